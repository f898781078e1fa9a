import copy
import dataclasses
import json
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

from bayesian_attention.posteriors import LogNormal, Posterior, Softmax, Weibull, posterior_from_dict
from tests.posteriors.draws import uniforms

SPREAD: list[tuple[type[Posterior], str]] = [(Weibull, "shape"), (LogNormal, "scale")]
SPECS = [Softmax(), Weibull(), Weibull(0.3, learned=True), LogNormal(), LogNormal(scale=2, learned=True)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_spec_survives_json(spec):
    data = json.loads(json.dumps(spec.to_dict()))
    assert data["name"] == spec.name
    again = posterior_from_dict(data)
    assert again == spec
    assert type(again) is type(spec)
    assert hash(again) == hash(spec)
    assert data == spec.to_dict(), "reading must not change what was read"


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_spec_is_frozen(spec):
    for field in [*(f.name for f in dataclasses.fields(spec)), "new"]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(spec, field, 1.0)


@pytest.mark.parametrize(("family", "field"), SPREAD)
@pytest.mark.parametrize("value", [3, np.float32(3), np.int64(3), np.float64(3)])
def test_numbers_of_any_kind_become_plain_floats(family, field, value):
    spec = family(**{field: value})
    assert type(getattr(spec, field)) is float
    assert spec == family(3.0)
    assert json.loads(json.dumps(spec.to_dict()))[field] == 3.0


@pytest.mark.parametrize(("family", "field"), SPREAD)
@pytest.mark.parametrize(
    "value", [0, 0.0, -0.0, -1.5, math.nan, math.inf, -math.inf, True, "10", None, 1j, [1.0], torch.tensor(1.0)]
)
def test_a_spread_that_is_no_positive_number_is_named(family, field, value):
    with pytest.raises(ValueError, match=rf"{family.__name__}: {field} must be a positive, finite number; got "):
        family(**{field: value})


@pytest.mark.parametrize("family", [Weibull, LogNormal])
@pytest.mark.parametrize("value", ["False", 1, 0, None, np.True_])
def test_learned_is_true_or_false(family, value):
    with pytest.raises(ValueError, match=rf"{family.__name__}: learned must be True or False; got "):
        family(learned=value)


def test_what_the_specs_say_of_themselves():
    facts = [(s.stochastic, s.is_learned, s.parameter, s.prior_family) for s in SPECS]
    assert facts == [
        (False, False, 0.0, None),
        (True, False, 10.0, "gamma"),
        (True, True, 0.3, "gamma"),
        (True, False, 0.1, "lognormal"),
        (True, True, 2.0, "lognormal"),
    ]
    assert Weibull(2) != LogNormal(2)
    assert Weibull(2) != Weibull(2, learned=True)


def test_a_family_must_say_how_it_draws():
    with pytest.raises(TypeError, match="log_noise"):
        Posterior()


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.is_learned], ids=str)
def test_a_fixed_spread_is_a_number_and_no_parameter(spec):
    module = spec.build(4)
    assert type(module()) is float
    assert module() == spec.parameter
    assert list(module.parameters()) == []
    assert module.state_dict() == {}


@pytest.mark.parametrize("family", [Weibull, LogNormal])
@pytest.mark.parametrize("start", [1e-6, 0.1, 1.0, 1000.0, 1e6])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_learned_spread_starts_from_the_spec(family, start, heads):
    value = family(start, learned=True).build(heads)()
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, torch.full((heads,), start), rtol=2e-6, atol=0)


@pytest.mark.parametrize("family", [Weibull, LogNormal])
def test_a_learned_spread_stays_positive_and_moves_by_ratios(family):
    moved = []
    for start in (0.1, 1000.0):
        module = family(start, learned=True).build(2)
        optimiser = torch.optim.SGD(module.parameters(), lr=1.0)
        for _ in range(5):
            optimiser.zero_grad()
            module().log().sum().backward()
            optimiser.step()
        assert bool((module() > 0).all())
        moved.append(module().detach() / start)
    torch.testing.assert_close(moved[0], torch.full((2,), math.exp(-5)), rtol=1e-5, atol=0)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("spec", [Weibull(2.0, learned=True), LogNormal(0.5, learned=True)], ids=str)
def test_gradient_reaches_each_head_by_itself(spec):
    module = spec.build(3)
    u = uniforms(2, 3, 4, 5, dtype=torch.float32)
    noise = spec.log_noise(u, module().view(-1, 1, 1))
    noise[:, 1].sum().backward()
    gradient = module.log_parameter.grad
    assert gradient[1] != 0
    assert gradient[0] == gradient[2] == 0
    # The noise is a standard draw times the spread or its inverse: d noise / d log spread = ± noise.
    sign = 1 if isinstance(spec, LogNormal) else -1
    torch.testing.assert_close(gradient[1], sign * noise[:, 1].sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])  # noqa: S301
def test_copies_are_equal_and_independent(copier: Callable):
    module = Weibull(3.0, learned=True).build(2)
    twin = copier(module)
    assert twin.spec == module.spec
    assert torch.equal(twin(), module())
    with torch.no_grad():
        twin.log_parameter += 1
    torch.testing.assert_close(module(), torch.full((2,), 3.0))


def test_state_dict_carries_the_spread():
    source, target = (Weibull(start, learned=True).build(2) for start in (3.0, 7.0))
    with torch.no_grad():
        source.log_parameter[1] += 0.5
    target.load_state_dict(source.state_dict())
    assert torch.equal(source(), target())
    with pytest.raises(RuntimeError, match="size mismatch"):
        Weibull(learned=True).build(3).load_state_dict(source.state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        Weibull().build(2).load_state_dict(source.state_dict())


@pytest.mark.parametrize(
    ("dtype", "wide"), [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2]
)
def test_the_spread_is_float32_or_wider_whatever_the_model(dtype, wide):
    value = Weibull(10.0, learned=True).build(2).to(dtype)()
    assert value.dtype == wide
    torch.testing.assert_close(value, torch.full((2,), 10.0, dtype=wide), rtol=1e-2, atol=0)


@pytest.mark.parametrize("heads", [0, -1])
def test_too_few_heads_are_named(heads):
    with pytest.raises(ValueError, match=f"heads: must be at least 1; got {heads}"):
        Weibull().build(heads)


def test_print_names_spec_and_heads():
    assert repr(LogNormal(0.25, learned=True).build(8)) == (
        "PosteriorParameter(LogNormal(scale=0.25, learned=True), heads=8)"
    )
