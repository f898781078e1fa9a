import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import fixed_quad
from torch import Tensor, distributions

from bayesian_attention.divergences import weibull_gamma

SHAPES = [0.1, 0.5, 1.0, 3.0, 10.0, 100.0, 1000.0]
LOG_MEANS = [-20.0, -5.0, -1.0, 0.0]
CONCENTRATIONS = [1e-6, 1e-4, 0.1, 1.0, 10.0]
RATES = [0.1, 1.0, 10.0]


def tensors(*values: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.tensor(value, dtype=dtype) for value in values]


def grid(*axes: list[float], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """All combinations, rounded to float32 so that both precisions see the same numbers."""
    columns = torch.tensor(list(itertools.product(*axes)), dtype=torch.float64).float().T
    return [column.to(dtype).clone() for column in columns]


def integrated(shape: float, log_mean: float, alpha: float, beta: float) -> float:
    """By Gauss–Legendre over scipy's densities of log S: a left Gumbel for the Weibull, a log-gamma for the Gamma."""
    posterior = stats.gumbel_l(log_mean - math.lgamma(1 + 1 / shape), 1 / shape)
    prior = stats.loggamma(alpha, loc=-math.log(beta))

    def integrand(y: np.ndarray) -> np.ndarray:
        return posterior.pdf(y) * (posterior.logpdf(y) - prior.logpdf(y))

    # In standard units the law lies between −60, where its tail is e⁻⁶⁰, and 6.
    location, width = posterior.args
    return fixed_quad(integrand, location - 60 * width, location + 6 * width, n=400)[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_numerical_integration(shape):
    for point in itertools.product(LOG_MEANS, CONCENTRATIONS, RATES):
        kl = weibull_gamma(shape, *tensors(*point)).item()
        assert kl == pytest.approx(integrated(shape, *point), rel=1e-9, abs=1e-9), point


@pytest.mark.parametrize("shape", [0.5, 1.0, 3.0, 10.0, 1000.0])
@pytest.mark.parametrize(("log_mean", "alpha", "beta"), [(-2.0, 1e-4, 1e-4), (0.0, 1.0, 2.0), (-7.0, 0.5, 10.0)])
def test_agrees_with_monte_carlo(shape, log_mean, alpha, beta):
    """torch's samples and log densities, 2·10⁵ draws, within 5 standard errors: false-alarm rate 6e-7 a case."""
    k = torch.tensor(shape, dtype=torch.float64)
    # The scale that gives the mean, by torch's own mean.
    unit = distributions.Weibull(torch.ones_like(k), k, validate_args=False)
    posterior = distributions.Weibull(math.exp(log_mean) / unit.mean, k)
    prior = distributions.Gamma(*tensors(alpha, beta))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        s = posterior.sample((200_000,))
    ratio = posterior.log_prob(s) - prior.log_prob(s)
    kl = weibull_gamma(shape, *tensors(log_mean, alpha, beta))
    assert abs((ratio.mean() - kl) / (ratio.std() / math.sqrt(len(s)))) < 5


@pytest.mark.parametrize("log_mean", LOG_MEANS)
def test_zero_where_both_are_the_same_exponential(log_mean):
    """Weibull(1, λ) is Gamma(1, 1/λ). The divergence is least there, so every derivative vanishes too."""
    values = [x.requires_grad_() for x in tensors(1.0, log_mean, 1.0, math.exp(-log_mean))]
    kl = weibull_gamma(*values)
    assert abs(kl.item()) < 1e-12
    for gradient, value in zip(torch.autograd.grad(kl, values), values, strict=True):
        assert abs(gradient * value) < 1e-12


@pytest.mark.parametrize("shape", [2.0, 7.5])
@pytest.mark.parametrize("rate", [0.5, 3.0])
def test_exponential_prior_by_the_entropy(shape, rate):
    """KL(q ‖ Exp(β)) = −H(q) − log β + β E[S], with scipy's entropy."""
    law = stats.weibull_min(shape, scale=0.4)
    expected = -law.entropy() - math.log(rate) + rate * law.mean()
    kl = weibull_gamma(shape, *tensors(math.log(law.mean()), 1.0, rate))
    assert kl.item() == pytest.approx(expected, rel=1e-10)


@settings(deadline=None, max_examples=300)
@given(
    st.floats(math.log(0.1), math.log(1000)),
    st.floats(-30, 1),
    st.floats(math.log(1e-6), math.log(10)),
    st.floats(math.log(0.01), math.log(100)),
)
def test_never_negative(log_shape, log_mean, log_alpha, log_beta):
    shape, alpha, beta = (math.exp(x) for x in (log_shape, log_alpha, log_beta))
    assert weibull_gamma(shape, *tensors(log_mean, alpha, beta)).item() > -1e-12


def test_float32_agrees_with_float64():
    """Within 2e-6 · (1 + |value|) for the divergence and its gradients, shapes 0.1 … 10⁶."""
    axes = ([*SHAPES, 1e6], [*LOG_MEANS, -0.1], [*CONCENTRATIONS, 0.5, 3.0], [*RATES, 2.0])
    results = []
    for dtype in (torch.float64, torch.float32):
        values = [x.requires_grad_() for x in grid(*axes, dtype=dtype)]
        kl = weibull_gamma(*values)
        assert kl.dtype == dtype
        results.append([kl.detach(), *torch.autograd.grad(kl.sum(), values)])
    for exact, single in zip(*results, strict=True):
        assert bool(((single.double() - exact).abs() <= 2e-6 * (1 + exact.abs())).all())


def test_gradcheck():
    values = [x.requires_grad_() for x in grid([0.3, 1.0, 20.0], [-5.0, 0.0], [0.01, 2.0], [0.1, 3.0])]
    assert torch.autograd.gradcheck(weibull_gamma, values)
    assert torch.autograd.gradgradcheck(weibull_gamma, values)


def test_numbers_and_tensors_give_the_same():
    log_mean = torch.linspace(-5, 0, 4, dtype=torch.float64)
    full = [torch.full_like(log_mean, x) for x in (3.0, 0.2, 0.5)]
    torch.testing.assert_close(weibull_gamma(3.0, log_mean, 0.2, 0.5), weibull_gamma(full[0], log_mean, *full[1:]))


def test_parameters_broadcast_against_the_entries():
    """A shape a head, a concentration a key, the entries non-contiguous."""
    log_mean = (
        torch.randn(2, 5, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        .log_softmax(1)
        .transpose(1, 3)
    )
    shape = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    alpha = torch.linspace(0.1, 2, 30, dtype=torch.float64).view(2, 3, 1, 5)
    kl = weibull_gamma(shape.view(3, 1, 1), log_mean, alpha, 0.7)
    assert kl.shape == (2, 3, 4, 5)
    for b, h, q, k in itertools.product(range(2), range(3), range(4), range(5)):
        one = weibull_gamma(shape[h].item(), log_mean[b, h, q, k], alpha[b, h, 0, k].item(), 0.7)
        torch.testing.assert_close(kl[b, h, q, k], one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_concentration_stays_finite(dtype):
    log_mean = torch.tensor([-80.0, 0.0], dtype=dtype, requires_grad=True)
    alpha = torch.tensor(1e-30, dtype=dtype, requires_grad=True)
    kl = weibull_gamma(10.0, log_mean, alpha, 1e-4)
    kl.sum().backward()
    assert bool(kl.isfinite().all())
    assert bool(log_mean.grad.isfinite().all())
    # log Γ(α) → −log α.
    assert np.allclose(
        kl.detach(), 30 * math.log(10) + math.log(10) - 1.5772156649 + 1e-4 * np.exp([-80, 0]), rtol=1e-6
    )
