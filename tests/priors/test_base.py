import copy
import dataclasses
import json
import math
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from bayesian_attention.priors import (
    ConstantPrior,
    ContextualPrior,
    GammaParameters,
    LearnedPrior,
    LogNormalParameters,
    Prior,
    PriorModule,
    prior_from_dict,
)

SPECS = [
    ConstantPrior(),
    ConstantPrior(concentration=2, rate=0.5),
    ConstantPrior(loc=-3, scale=0.1),
    LearnedPrior(),
    LearnedPrior(concentration=1e-4, rate=1e-4),
    ContextualPrior(),
    ContextualPrior(hidden=None, share_heads=False, scale=2),
    ContextualPrior(hidden=np.int64(3), activation="leaky_relu", negative_slope=np.float32(0.25), rate=np.float64(2)),
]
KINDS = [ConstantPrior, LearnedPrior, ContextualPrior]


def has(kind: type[Prior], *names: str) -> list[str]:
    return [f.name for f in dataclasses.fields(kind) if f.name in names]


def broadcast(per_head: Tensor) -> Tensor:
    return per_head.view(-1, 1, 1)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_spec_survives_json(spec):
    data = json.loads(json.dumps(spec.to_dict()))
    assert data["name"] == spec.name
    again = prior_from_dict(data)
    assert again == spec
    assert type(again) is type(spec)
    assert hash(again) == hash(spec)


@pytest.mark.parametrize("kind", KINDS)
def test_spec_is_frozen(kind):
    for field in [*(f.name for f in dataclasses.fields(kind)), "new"]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(kind(), field, 1.0)


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind in KINDS for field in has(kind, "concentration", "rate", "scale")]
)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1", 1j])
def test_settings_that_are_not_positive_are_named(kind, field, value):
    with pytest.raises(ValueError, match=rf"{kind.__name__}: {field} must be a positive, finite number; got "):
        kind(**{field: value})


@pytest.mark.parametrize("kind", [ConstantPrior, LearnedPrior])
@pytest.mark.parametrize("value", [math.nan, -math.inf, False, "0"])
def test_a_location_that_is_not_finite_is_named(kind, value):
    with pytest.raises(ValueError, match=rf"{kind.__name__}: loc must be a finite number; got "):
        kind(loc=value)
    assert kind(loc=-2).loc == -2.0


@pytest.mark.parametrize(
    ("kind", "family", "field", "allowed"),
    [
        (ConstantPrior, "gamma", "loc", "concentration and rate"),
        (ConstantPrior, "gamma", "scale", "concentration and rate"),
        (ConstantPrior, "lognormal", "concentration", "loc and scale"),
        (ConstantPrior, "lognormal", "rate", "loc and scale"),
        (LearnedPrior, "gamma", "loc", "concentration and rate"),
        (LearnedPrior, "gamma", "scale", "concentration and rate"),
        (LearnedPrior, "lognormal", "concentration", "loc and scale"),
        (LearnedPrior, "lognormal", "rate", "loc and scale"),
        (ContextualPrior, "gamma", "scale", "rate"),
        (ContextualPrior, "lognormal", "rate", "scale"),
    ],
)
def test_a_setting_of_the_other_family_is_refused(kind, family, field, allowed):
    # 1.0 is the default of most: what is refused is stating it, not its value.
    spec = kind(**{field: 1.0})
    with pytest.raises(
        ValueError, match=rf"{kind.__name__}: {field} has no meaning for a {family} .* takes {allowed}$"
    ):
        spec.build(family, 2, 4)
    other = "lognormal" if family == "gamma" else "gamma"
    assert isinstance(spec.build(other, 2, 4), PriorModule)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gamma", "lognormal"])
@pytest.mark.parametrize("heads", [1, 3])
def test_every_prior_serves_both_families_and_any_number_of_heads(kind, family, heads):
    module = kind().build(family, heads, 5)
    log_weights = torch.full((2, heads, 4, 6), 1 / 6).log() if module.needs_keys else None
    parameters = module.distribution(log_weights, broadcast)
    assert isinstance(parameters, GammaParameters if family == "gamma" else LogNormalParameters)
    entries = torch.zeros(2, heads, 4, 6)
    assert torch.broadcast_tensors(entries, *(torch.as_tensor(p) for p in parameters))[0].shape == entries.shape
    if family == "gamma":
        assert all(bool((torch.as_tensor(p) > 0).all()) for p in parameters)
    else:
        assert bool((torch.as_tensor(parameters.scale) > 0).all())


@pytest.mark.parametrize("kind", [LearnedPrior, ContextualPrior])
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])  # noqa: S301
def test_copies_are_equal_and_independent(kind, copier):
    module = kind().build("gamma", 2, 3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    twin = copier(module)
    assert twin.spec == module.spec
    assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter += 1
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("kind", [LearnedPrior, ContextualPrior])
def test_state_dict_carries_all_there_is(kind):
    source, target = (kind().build("lognormal", 2, 3) for _ in range(2))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    target.load_state_dict(source.state_dict())
    keys = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(2))

    def outcome(module: PriorModule) -> Tensor:
        log_weights = module.scores(keys).log_softmax(-1).unsqueeze(-2) if module.needs_keys else None
        loc, scale = module.distribution(log_weights, broadcast)
        return torch.as_tensor(loc) + torch.as_tensor(scale)

    assert torch.equal(outcome(source), outcome(target))


@pytest.mark.parametrize("kind", [ConstantPrior, LearnedPrior])
def test_priors_that_do_not_look_at_keys_say_so(kind):
    module = kind().build("gamma", 2, None)
    assert not module.needs_keys
    with pytest.raises(NotImplementedError, match=rf"{kind.__name__}Module does not look at keys"):
        module.scores(torch.zeros(2, 3, 4))


def test_print_names_spec_and_family():
    module = ConstantPrior(loc=1.5).build("lognormal", 2, None)
    assert repr(module) == f"ConstantPriorModule({ConstantPrior(loc=1.5)}, family='lognormal')"


def test_a_prior_must_say_what_module_it_makes():
    with pytest.raises(TypeError, match="module"):
        Prior()
