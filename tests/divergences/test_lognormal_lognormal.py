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

from bayesian_attention.divergences import lognormal_lognormal

SCALES = [0.01, 0.1, 1.0, 3.0, 10.0]
LOG_MEANS = [-20.0, -5.0, -1.0, 0.0]
LOCS = [-20.0, -5.0, 0.0, 2.0]


def grid(*axes: list[float], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """All combinations, rounded to float32 so that both precisions see the same numbers."""
    columns = torch.tensor(list(itertools.product(*axes)), dtype=torch.float64).float().T
    return [column.to(dtype).clone() for column in columns]


def test_agrees_with_torch():
    """The grid; torch's laws of S and of log S, whose divergences are the same."""
    scale, log_mean, loc, prior_scale = grid(SCALES, LOG_MEANS, LOCS, SCALES)
    kl = lognormal_lognormal(scale, log_mean, loc, prior_scale)
    mu = log_mean - scale.square() / 2
    for law in (distributions.LogNormal, distributions.Normal):
        expected = distributions.kl_divergence(law(mu, scale), law(loc, prior_scale))
        torch.testing.assert_close(kl, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(distributions.LogNormal(mu, scale).mean, log_mean.exp(), rtol=1e-12, atol=0)


def integrated(scale: float, log_mean: float, loc: float, prior_scale: float) -> float:
    """By Gauss–Legendre over scipy's densities of log S, 12 standard deviations to each side."""
    posterior = stats.norm(math.log(stats.lognorm(scale, scale=math.exp(log_mean - scale**2 / 2)).median()), scale)
    prior = stats.norm(loc, prior_scale)

    def integrand(y: np.ndarray) -> np.ndarray:
        return posterior.pdf(y) * (posterior.logpdf(y) - prior.logpdf(y))

    return fixed_quad(integrand, *(posterior.mean() + 12 * scale * np.array([-1, 1])), n=200)[0]


@pytest.mark.parametrize("scale", SCALES)
def test_agrees_with_numerical_integration(scale):
    for point in itertools.product(LOG_MEANS, LOCS, SCALES):
        kl = lognormal_lognormal(scale, *(torch.tensor(x, dtype=torch.float64) for x in point)).item()
        assert kl == pytest.approx(integrated(scale, *point), rel=1e-9, abs=1e-9), point


@pytest.mark.parametrize("scale", [0.01, 0.5, 2.0])
@pytest.mark.parametrize(("log_mean", "loc", "prior_scale"), [(-2.0, 0.0, 1.0), (0.0, -1.0, 100.0), (-7.0, -6.0, 0.3)])
def test_agrees_with_monte_carlo(scale, log_mean, loc, prior_scale):
    """torch's samples and log densities, 2·10⁵ draws, within 5 standard errors: false-alarm rate 6e-7 a case."""
    sigma, mean = torch.tensor(scale, dtype=torch.float64), torch.tensor(log_mean, dtype=torch.float64)
    posterior = distributions.LogNormal(mean - sigma.square() / 2, sigma)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        s = posterior.sample((200_000,))
    prior = distributions.LogNormal(torch.full_like(mean, loc), prior_scale)
    ratio = posterior.log_prob(s) - prior.log_prob(s)
    kl = lognormal_lognormal(scale, mean, loc, prior_scale)
    assert abs((ratio.mean() - kl) / (ratio.std() / math.sqrt(len(s)))) < 5


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("log_mean", LOG_MEANS)
def test_zero_where_both_are_the_same(scale, log_mean):
    """The divergence is least there, so every derivative vanishes too."""
    values = [torch.tensor(x, dtype=torch.float64) for x in (scale, log_mean, log_mean - scale**2 / 2, scale)]
    values = [value.requires_grad_() for value in values]
    kl = lognormal_lognormal(*values)
    assert abs(kl.item()) < 1e-12
    for gradient in torch.autograd.grad(kl, values):
        assert abs(gradient) < 1e-9


@settings(deadline=None, max_examples=300)
@given(
    st.floats(math.log(0.01), math.log(10)),
    st.floats(-30, 1),
    st.floats(-30, 5),
    st.floats(math.log(0.01), math.log(100)),
)
def test_never_negative(log_scale, log_mean, loc, log_prior_scale):
    mean = torch.tensor(log_mean, dtype=torch.float64)
    assert lognormal_lognormal(math.exp(log_scale), mean, loc, math.exp(log_prior_scale)).item() > -1e-12


def test_float32_agrees_with_float64():
    """Within 1e-6 · (1 + |KL|) for the divergence, all scales from 0.01 to 10.

    The gradients divide a difference of numbers up to 20 by σ₀²: within 1e-6 · (1 + 20/σ₀²) and for σ₀
    itself another factor 1/σ₀, whatever the formula.
    """
    results = []
    for dtype in (torch.float64, torch.float32):
        values = [x.requires_grad_() for x in grid(SCALES, LOG_MEANS, LOCS, SCALES, dtype=dtype)]
        kl = lognormal_lognormal(*values)
        assert kl.dtype == dtype
        results.append([kl.detach(), *torch.autograd.grad(kl.sum(), values)])
        prior_scale = values[3].detach().double()
    room = 20 / prior_scale.square()
    for exact, single, extra in zip(*results, (0, room, room, room, room / prior_scale), strict=True):
        assert bool(((single.double() - exact).abs() <= 1e-6 * (1 + exact.abs() + extra)).all())


def test_gradcheck():
    values = [x.requires_grad_() for x in grid([0.1, 1.0, 3.0], [-5.0, 0.0], [-2.0, 1.0], [0.5, 3.0])]
    assert torch.autograd.gradcheck(lognormal_lognormal, values)
    assert torch.autograd.gradgradcheck(lognormal_lognormal, values)


def test_numbers_and_tensors_give_the_same():
    log_mean = torch.linspace(-5, 0, 4, dtype=torch.float64)
    full = [torch.full_like(log_mean, x) for x in (0.3, -2.0, 0.5)]
    by_numbers = lognormal_lognormal(0.3, log_mean, -2.0, 0.5)
    torch.testing.assert_close(by_numbers, lognormal_lognormal(full[0], log_mean, *full[1:]))


def test_parameters_broadcast_against_the_entries():
    """A scale a head, a location a key, the entries non-contiguous."""
    log_mean = (
        torch.randn(2, 5, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        .log_softmax(1)
        .transpose(1, 3)
    )
    scale = torch.tensor([0.1, 2.0, 3.0], dtype=torch.float64)
    loc = torch.linspace(-4, 1, 30, dtype=torch.float64).view(2, 3, 1, 5)
    kl = lognormal_lognormal(scale.view(3, 1, 1), log_mean, loc, 0.7)
    assert kl.shape == (2, 3, 4, 5)
    for b, h, q, k in itertools.product(range(2), range(3), range(4), range(5)):
        one = lognormal_lognormal(scale[h].item(), log_mean[b, h, q, k], loc[b, h, 0, k].item(), 0.7)
        torch.testing.assert_close(kl[b, h, q, k], one)
