"""What every family owes: the battery that a new one inherits by a line in ``CASES``."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, distributions

from bayesian_attention.engine import reference
from bayesian_attention.engine.rows import DenseRows, NoiseAddress
from bayesian_attention.posteriors import LogNormal, Posterior, Weibull
from tests.posteriors.draws import FALSE_ALARM, log_noise, uniforms


class Case(NamedTuple):
    spec: Posterior
    #: scipy's law of S for E[S] = mean.
    law: object
    #: logarithm of E[exp(log_noise)], which cancels in the weights.
    log_factor: float


def weibull(k: float, mean: float = 1.0) -> Case:
    factor = math.gamma(1 + 1 / k)
    return Case(Weibull(k), stats.weibull_min(k, scale=mean / factor), math.log(factor))


def lognormal(sigma: float, mean: float = 1.0) -> Case:
    law = stats.lognorm(sigma, scale=mean * math.exp(-(sigma**2) / 2))
    return Case(LogNormal(sigma), law, sigma**2 / 2)


MEAN = 0.3
CASES = [weibull(k, MEAN) for k in (0.5, 1.0, 3.0, 10.0, 1000.0)] + [lognormal(s, MEAN) for s in (1e-4, 0.1, 1.0, 1.5)]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.spec))


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_follow_the_law(case, dtype):
    """Kolmogorov–Smirnov, 10⁵ draws, false-alarm rate 1e-5 a case.

    On log S, where float32 resolves the narrow laws too: a one-to-one map changes nothing in the test.
    """
    log_s = math.log(MEAN) + log_noise(case.spec, 10, 100, 100, seed=1, dtype=dtype).double() - case.log_factor
    result = stats.kstest(log_s.flatten().numpy(), lambda x: case.law.cdf(np.exp(x)))
    assert result.pvalue > FALSE_ALARM


@each_case
def test_draws_preserve_the_mean(case):
    """E[S] = exp(logit): z-test on 10⁵ draws with the known variance, false-alarm rate below 1e-5 a case.

    5 standard errors would be 6e-7 for a normal mean; the skewest law here (skewness 33) leaves that room.
    """
    s = MEAN * (log_noise(case.spec, 10, 100, 100, seed=2) - case.log_factor).exp()
    assert case.law.mean() == pytest.approx(MEAN, rel=1e-9)
    z = (s.mean().item() - MEAN) / (case.law.std() / math.sqrt(s.numel()))
    assert abs(z) < 5


@each_case
def test_spread_of_the_logarithm(case):
    """Variance of log S is π²/(6k²) or σ²; false-alarm rate below 1e-5 (5 standard errors, 10⁵ draws)."""
    x = log_noise(case.spec, 10, 100, 100, seed=3)
    if isinstance(case.spec, Weibull):
        variance, kurtosis = math.pi**2 / 6 / case.spec.shape**2, stats.gumbel_l.stats(moments="k") + 3
    else:
        variance, kurtosis = case.spec.scale**2, 3.0
    error = variance * math.sqrt((kurtosis - 1) / x.numel())
    assert abs(x.var().item() - variance) < 5 * error


def torch_law(spec: Posterior, parameter: Tensor) -> distributions.Distribution:
    if isinstance(spec, Weibull):
        return distributions.Weibull(torch.ones_like(parameter), parameter)
    return distributions.LogNormal(torch.zeros_like(parameter), parameter)


@each_case
def test_value_and_gradient_are_those_of_the_quantile_function(case):
    """torch's own reparameterised sample from the same uniform number, and its gradient."""
    u = uniforms(1, 1, 500, seed=4)
    ours, theirs = (torch.full_like(u, case.spec.parameter).requires_grad_() for _ in range(2))
    noise = case.spec.log_noise(u, ours)
    # −log u is exponential just as −log(1 − u) is, so the Weibull counts quantiles from the other end.
    quantile = torch_law(case.spec, theirs).icdf(1 - u if isinstance(case.spec, Weibull) else u).log()
    torch.testing.assert_close(noise, quantile, rtol=1e-9, atol=1e-10)
    (ours_grad,) = torch.autograd.grad(noise.sum(), ours)
    (theirs_grad,) = torch.autograd.grad(quantile.sum(), theirs)
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-8, atol=1e-9)


@each_case
def test_gradient_is_the_implicit_one(case):
    """d log S / d parameter = −(∂F/∂parameter) / f, with F and f of torch: true of any reparameterisation."""
    u = uniforms(1, 1, 200, seed=5)
    parameter = torch.full_like(u, case.spec.parameter).requires_grad_()
    x = case.spec.log_noise(u, parameter)
    (gradient,) = torch.autograd.grad(x.sum(), parameter)
    if isinstance(case.spec, Weibull):
        cdf = -torch.expm1(-(x.detach() * parameter).exp())
    else:
        cdf = distributions.Normal(0.0, parameter).cdf(x.detach())
    point = x.detach().exp()
    density = torch_law(case.spec, parameter.detach()).log_prob(point).exp() * point
    (slope,) = torch.autograd.grad(cdf.sum(), parameter)
    torch.testing.assert_close(gradient, -slope / density, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("spec", [Weibull(), LogNormal()], ids=str)
def test_gradcheck_of_a_spread_a_head(spec):
    u = uniforms(2, 3, 4, 5, seed=6)
    parameter = torch.tensor([0.2, 1.0, 7.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: spec.log_noise(u, p.view(3, 1, 1)), (parameter,))


@pytest.mark.parametrize("spec", [Weibull(1.0), LogNormal(1.0)], ids=str)
def test_float32_noise_is_accurate_up_to_the_last_uniform(spec):
    u = torch.cat([torch.arange(1000), torch.arange(2**23 - 1000, 2**23), torch.arange(0, 2**23, 997)]).double()
    u = (u + 0.5) * 2.0**-23
    noise, exact = spec.log_noise(u.float(), 1.0), spec.log_noise(u, 1.0)
    assert noise.dtype == torch.float32
    assert bool(noise.isfinite().all())
    if isinstance(spec, LogNormal):
        exact_by_scipy = torch.from_numpy(stats.norm.ppf(u.numpy()))
    else:
        exact_by_scipy = torch.from_numpy(np.log(stats.expon.isf(u.numpy())))
    torch.testing.assert_close(exact, exact_by_scipy, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(noise.double(), exact_by_scipy, rtol=1e-6, atol=6e-7)


def weights(logits: Tensor, spec: Posterior, seed: int = 0, valid: Tensor | None = None) -> Tensor:
    return reference.log_weights(logits, DenseRows(valid), spec, spec.parameter, NoiseAddress(seed)).exp()


@pytest.mark.parametrize("spec", [Weibull(1e6), LogNormal(1e-6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_spread_the_weights_are_the_softmax(spec, dtype):
    logits = 5 * torch.randn(4, 2, 50, 60, generator=torch.Generator().manual_seed(0), dtype=dtype)
    w = weights(logits, spec)
    assert not torch.equal(w, logits.softmax(-1))
    torch.testing.assert_close(w, logits.softmax(-1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("keys", [2, 5, 16])
def test_exponential_weights_at_equal_logits_are_uniform_on_the_simplex(keys):
    """Weibull(1) with equal logits is Dirichlet(1, …, 1): sums of m weights are Beta(m, n − m).

    Kolmogorov–Smirnov, 50 000 rows, false-alarm rate 1e-5 a marginal; covariances within 6 standard
    errors, below 1e-6 for all of them together.
    """
    w = weights(torch.full((5, 10, 1000, keys), 2.7, dtype=torch.float64), Weibull(1.0), seed=8).view(-1, keys)
    for count in {1, keys // 2, keys - 1}:
        sums = w[:, :count].sum(-1).numpy()
        assert stats.kstest(sums, stats.beta(count, keys - count).cdf).pvalue > FALSE_ALARM
    assert stats.kstest(w[:, -1].numpy(), stats.beta(1, keys - 1).cdf).pvalue > FALSE_ALARM
    expected = stats.dirichlet([1.0] * keys).cov()
    product = (w - 1 / keys).unsqueeze(-1) * (w - 1 / keys).unsqueeze(-2)
    error = product.std(0) / math.sqrt(len(w))
    assert bool(((product.mean(0) - torch.from_numpy(expected)).abs() < 6 * error).all())


@pytest.mark.parametrize("spec", [Weibull(1.0), LogNormal(1.0)], ids=str)
def test_masked_keys_get_nothing_and_the_rest_a_smaller_simplex(spec):
    logits = torch.randn(2, 3, 40, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    valid = torch.tensor([True, True, True, True, False, False])
    w = weights(logits, spec, valid=valid)
    assert bool((w[..., 4:] == 0).all())
    torch.testing.assert_close(w[..., :4], weights(logits[..., :4], spec), rtol=1e-12, atol=0)


@pytest.mark.parametrize("spec", [Weibull(0.1), LogNormal(10.0)], ids=str)
def test_wide_spreads_stay_finite_in_float32(spec):
    logits = torch.zeros(2, 2, 100, 100)
    w = weights(logits, spec)
    assert bool(w.isfinite().all())
    torch.testing.assert_close(w.sum(-1), torch.ones(2, 2, 100))


@pytest.mark.parametrize("spec", [Weibull(1.0), LogNormal(1.0)], ids=str)
def test_a_single_key_has_all_the_weight(spec):
    assert torch.equal(weights(torch.full((1, 1, 1, 1), -3.7), spec), torch.ones(1, 1, 1, 1))


@pytest.mark.parametrize(("shape", "low"), [(0.1, 0.0269), (0.2, 0.00019), (1.0, 0.0)])
def test_the_mean_over_all_uniforms_is_that_of_the_family_but_for_the_cut_tail(shape, low):
    """Exact, over every number that the noise generator can give; docs/methods.md states the figures."""
    uniform = (torch.arange(2**23, dtype=torch.float64) + 0.5) / 2**23
    mean = Weibull(shape).log_noise(uniform, shape).exp().mean().item()
    assert 1 - mean / math.gamma(1 + 1 / shape) == pytest.approx(low, abs=5e-5 if shape < 0.2 else 5e-6)
