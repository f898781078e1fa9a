import pytest
import torch
from torch import distributions

from bayesian_attention.divergences import lognormal_lognormal, weibull_gamma
from bayesian_attention.priors import LearnedPrior


def broadcast(per_head: torch.Tensor) -> torch.Tensor:
    return per_head.view(-1, 1, 1)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("start", [1e-30, 1e-10, 1e-4, 0.5, 1.0, 4.0, 10.0, 29.9, 30.1, 1000.0, 1e8])
@pytest.mark.parametrize(("family", "field"), [("gamma", "concentration"), ("lognormal", "scale")])
def test_it_starts_from_the_setting(family, field, start, heads):
    module = LearnedPrior(**{field: start}).build(family, heads, None)
    learned = getattr(module.distribution(None, broadcast), field)
    assert learned.dtype == torch.float32
    # The parameter itself is float32: near −69, for 1e-30, its spacing is 8e-6.
    torch.testing.assert_close(learned, torch.full((heads, 1, 1), start), rtol=5e-6, atol=0)


def test_the_other_number_is_fixed():
    assert LearnedPrior(rate=0.25).build("gamma", 2, None).distribution(None, broadcast).rate == 0.25
    assert LearnedPrior().build("gamma", 2, None).distribution(None, broadcast).rate == 1.0
    assert LearnedPrior(loc=-2).build("lognormal", 2, None).distribution(None, broadcast).loc == -2.0
    assert LearnedPrior().build("lognormal", 2, None).distribution(None, broadcast).loc == 0.0


@pytest.mark.parametrize(("family", "field"), [("gamma", "concentration"), ("lognormal", "scale")])
@pytest.mark.parametrize("raw", [-80.0, -1.0, 0.0, 50.0])
def test_it_is_positive_wherever_the_optimiser_goes(family, field, raw):
    module = LearnedPrior().build(family, 2, None)
    with torch.no_grad():
        module.raw.fill_(raw)
    learned = getattr(module.distribution(None, broadcast), field)
    assert bool((learned > 0).all())
    (gradient,) = torch.autograd.grad(learned.sum(), module.raw)
    assert bool((gradient > 0).all())
    # The derivative of softplus is the logistic function.
    torch.testing.assert_close(gradient, torch.full((2,), raw).sigmoid(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", ["gamma", "lognormal"])
def test_each_head_learns_by_itself(family):
    module = LearnedPrior().build(family, 3, None)
    first, second = module.distribution(None, broadcast)
    entries = torch.ones(2, 3, 4, 5) * first + second
    entries[:, 2].square().sum().backward()
    assert module.raw.grad[2] != 0
    assert torch.equal(module.raw.grad[:2], torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_parameters_give_float32(dtype):
    module = LearnedPrior(concentration=2.0).build("gamma", 2, None).to(dtype)
    learned = module.distribution(None, broadcast).concentration
    assert learned.dtype == torch.float32
    torch.testing.assert_close(learned, torch.full((2, 1, 1), 2.0), rtol=1e-2, atol=0)


def test_gamma_prior_learns_the_concentration_that_fits():
    """The divergence is least where E[log S] agrees: ψ(α) − log β = log λ − γ/k, two heads with two answers."""
    module = LearnedPrior(concentration=3.0, rate=1.0).build("gamma", 2, None)
    log_mean = torch.tensor([-3.0, 0.5]).view(2, 1, 1)
    optimiser = torch.optim.LBFGS(module.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = weibull_gamma(2.0, log_mean, *module.distribution(None, broadcast)).sum()
        value.backward()
        return value

    optimiser.step(loss)
    alpha = module.distribution(None, broadcast).concentration.detach()
    law = distributions.Weibull((log_mean - torch.lgamma(torch.tensor(1.5))).exp(), torch.tensor(2.0))
    mean_log = law.icdf((torch.arange(100000) + 0.5) / 100000).log().mean(-1, keepdim=True)
    torch.testing.assert_close(torch.digamma(alpha), mean_log, rtol=0, atol=5e-3)


def test_lognormal_prior_learns_the_scale_that_fits():
    """σ₀² becomes E[(log S − μ₀)²] = σ² + (μ − μ₀)², here 0.25 + 4."""
    module = LearnedPrior(loc=1.0, scale=0.3).build("lognormal", 1, None)
    log_mean = torch.full((1, 1, 1), 3.0 + 0.125)
    optimiser = torch.optim.LBFGS(module.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = lognormal_lognormal(0.5, log_mean, *module.distribution(None, broadcast)).sum()
        value.backward()
        return value

    optimiser.step(loss)
    assert module.distribution(None, broadcast).scale.item() == pytest.approx(4.25**0.5, rel=1e-3)
