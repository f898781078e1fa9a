import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from bayesian_attention.checks import at_least, finite, flag, positive

NO_NUMBERS = [True, False, np.True_, "1", b"1", None, 1j, [1.0], np.array([1.0]), torch.tensor(1.0)]
NOT_FINITE = [math.nan, math.inf, -math.inf, np.float32("nan")]


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.float64(2), np.int8(2), np.uint64(2), Fraction(4, 2)])
def test_real_numbers_of_any_kind_become_floats(value):
    for check in (finite, positive):
        result = check("Owner", "name", value)
        assert type(result) is float
        assert result == 2.0


def test_zero_and_negative_numbers_are_finite_but_not_positive():
    for value in (0, 0.0, -0.0, -3, -1e-300):
        assert finite("Owner", "name", value) == value
        with pytest.raises(ValueError, match=r"^Owner: name must be a positive, finite number; got "):
            positive("Owner", "name", value)
    assert positive("Owner", "name", 5e-324) == 5e-324


@pytest.mark.parametrize("value", NO_NUMBERS + NOT_FINITE, ids=repr)
@pytest.mark.parametrize(("check", "allowed"), [(finite, "a finite number"), (positive, "a positive, finite number")])
def test_anything_else_is_named(check, allowed, value):
    with pytest.raises(ValueError, match=r"^Owner: name must be ") as caught:
        check("Owner", "name", value)
    assert str(caught.value) == f"Owner: name must be {allowed}; got {value!r}"


@pytest.mark.parametrize("value", [10**400, -(10**400), Fraction(10**400)], ids=["huge", "negative", "fraction"])
@pytest.mark.parametrize("check", [finite, positive])
def test_a_number_beyond_every_float_is_named(check, value):
    with pytest.raises(ValueError, match=r"^Owner: name must be a .*finite number; got "):
        check("Owner", "name", value)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), 10**30])
def test_whole_numbers_of_any_kind_become_ints(value):
    result = at_least("Owner", "name", value, 3)
    assert type(result) is int
    assert result == value


@pytest.mark.parametrize("value", [2, -3, np.int64(0), 3.0, 3.5, np.float64(4), *NO_NUMBERS, *NOT_FINITE], ids=repr)
def test_other_than_whole_numbers_from_the_least_are_named(value):
    with pytest.raises(ValueError, match=r"^Owner: name must be ") as caught:
        at_least("Owner", "name", value, 3)
    assert str(caught.value) == f"Owner: name must be a whole number of at least 3; got {value!r}"


def test_only_true_and_false_are_flags():
    assert flag("Owner", "name", True) is True
    assert flag("Owner", "name", False) is False
    for value in (1, 0, "False", "true", None, np.True_, torch.tensor(True)):
        with pytest.raises(ValueError, match=r"^Owner: name must be True or False; got "):
            flag("Owner", "name", value)
