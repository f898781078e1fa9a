import pytest
import torch

from bayesian_attention.priors import ConstantPrior, GammaParameters, LogNormalParameters


@pytest.mark.parametrize(
    ("spec", "family", "expected"),
    [
        (ConstantPrior(), "gamma", GammaParameters(1.0, 1.0)),
        (ConstantPrior(), "lognormal", LogNormalParameters(0.0, 1.0)),
        (ConstantPrior(concentration=1e-4), "gamma", GammaParameters(1e-4, 1.0)),
        (ConstantPrior(rate=1e-4), "gamma", GammaParameters(1.0, 1e-4)),
        (ConstantPrior(loc=0), "lognormal", LogNormalParameters(0.0, 1.0)),
        (ConstantPrior(loc=-2.5, scale=100), "lognormal", LogNormalParameters(-2.5, 100.0)),
    ],
    ids=str,
)
def test_it_is_the_two_numbers_of_the_spec_or_their_defaults(spec, family, expected):
    module = spec.build(family, 3, None)
    parameters = module.distribution(None, lambda x: x)
    assert parameters == expected
    assert type(parameters) is type(expected)
    assert list(module.parameters()) == []
    assert not isinstance(parameters[0], torch.Tensor)
