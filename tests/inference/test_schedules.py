import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

import bayesian_attention as ba

STEPS = [0, 1, 2.5, 10, 99, 100, 101, 1e6]
RISING = [
    ba.ConstantWeight(0.3),
    ba.LinearWeight(0.3, steps=100),
    ba.SigmoidWeight(0.3, rate=0.1, midpoint=50),
    ba.SigmoidWeight(0.3),
]


@pytest.mark.parametrize("schedule", RISING)
def test_weights_rise_from_no_less_than_zero_to_the_final_weight(schedule):
    values = [schedule(step) for step in STEPS]
    assert values == sorted(values)
    assert values[0] >= 0
    assert values[-1] == 0.3
    assert all(type(value) is float for value in values)


def test_constant():
    assert [ba.ConstantWeight()(step) for step in STEPS] == [1.0] * len(STEPS)
    assert ba.ConstantWeight(0.0)(7) == 0


def test_linear_by_hand():
    schedule = ba.LinearWeight(2.0, steps=4)
    assert [schedule(step) for step in (0, 1, 2, 3, 4, 5)] == [0, 0.5, 1, 1.5, 2, 2]
    assert schedule(-3) == 0
    assert ba.LinearWeight()(1000) == 1 > ba.LinearWeight()(999)


@pytest.mark.parametrize(("rate", "midpoint"), [(1.0, 0.0), (1e-3, 0.0), (0.5, 20.0), (3.0, -2.0)])
def test_sigmoid_is_the_authors(rate, midpoint):
    schedule = ba.SigmoidWeight(0.7, rate=rate, midpoint=midpoint)
    steps = np.array([0, 1, 5, 19, 20, 21, 80, 200])
    np.testing.assert_allclose([schedule(s) for s in steps], 0.7 * expit(rate * (steps - midpoint)), rtol=1e-12)
    # Their formula, where it is a number.
    x = rate * (steps - midpoint)
    small = x < 300
    np.testing.assert_allclose([schedule(s) for s in steps[small]], 0.7 * np.exp(x[small]) / (1 + np.exp(x[small])))


def test_sigmoid_begins_at_half_the_weight_and_never_overflows():
    schedule = ba.SigmoidWeight(2.0)
    assert schedule(0) == 1.0
    assert schedule(1e300) == 2.0
    assert ba.SigmoidWeight(2.0, rate=1e3, midpoint=1e6)(0) == 0.0


def test_cyclical_by_hand():
    schedule = ba.CyclicalWeight(2.0, period=10, ramp=0.4)
    assert [schedule(s) for s in range(10)] == [0, 0.5, 1, 1.5, 2, 2, 2, 2, 2, 2]
    assert [schedule(s) for s in range(10, 20)] == [schedule(s) for s in range(10)]
    assert schedule(35) == schedule(5)


def test_cyclical_without_a_plateau_is_a_saw():
    schedule = ba.CyclicalWeight(1.0, period=4, ramp=1.0)
    assert [schedule(s) for s in range(5)] == [0, 0.25, 0.5, 0.75, 0]


@settings(deadline=None)
@given(st.floats(0, 1e3), st.floats(0.1, 1e4), st.floats(0.01, 1), st.floats(0, 1e5))
def test_cyclical_stays_in_range_and_rises_within_a_cycle(weight, period, ramp, step):
    schedule = ba.CyclicalWeight(weight, period=period, ramp=ramp)
    assert 0 <= schedule(step) <= weight
    inside = step % period
    assert schedule(inside / 2) <= schedule(inside)


def test_schedules_compare_and_print():
    assert ba.LinearWeight(1.0, 5) == ba.LinearWeight(1.0, steps=5) != ba.LinearWeight(1.0, steps=6)
    assert repr(ba.LinearWeight(1.0, 5)) == "LinearWeight(weight=1.0, steps=5)"


ALL = [ba.ConstantWeight, ba.LinearWeight, ba.SigmoidWeight, ba.CyclicalWeight]


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, "1", None, True])
def test_wrong_weights_are_named(schedule, weight):
    with pytest.raises(ValueError, match=rf"{schedule.__name__}: weight must"):
        schedule(weight)


@pytest.mark.parametrize(
    ("schedule", "field"),
    [
        (ba.LinearWeight, "steps"),
        (ba.SigmoidWeight, "rate"),
        (ba.CyclicalWeight, "period"),
        (ba.CyclicalWeight, "ramp"),
    ],
)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "1", None])
def test_wrong_lengths_are_named(schedule, field, value):
    with pytest.raises(ValueError, match=f"{schedule.__name__}: {field} must be a positive, finite number"):
        schedule(**{field: value})


def test_other_wrong_settings_are_named():
    with pytest.raises(ValueError, match=r"CyclicalWeight: ramp must be at most 1; got 1\.5"):
        ba.CyclicalWeight(ramp=1.5)
    with pytest.raises(ValueError, match="SigmoidWeight: midpoint must be a finite number; got nan"):
        ba.SigmoidWeight(midpoint=math.nan)
