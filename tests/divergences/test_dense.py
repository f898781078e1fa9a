import math

import pytest
import torch
from torch import distributions

from bayesian_attention.divergences import Divergence, entrywise, reduce_valid
from bayesian_attention.posteriors import LogNormal, Softmax, Weibull
from bayesian_attention.priors import GammaParameters, LogNormalParameters

ENTRIES = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[7.0, 8.0, 9.0], [10.0, 11.0, 12.0]]])


def test_entrywise_takes_the_divergence_of_the_pair():
    log_mean = torch.tensor([-1.0, 0.0], dtype=torch.float64)
    zero = entrywise(Weibull(), 1.0, log_mean, GammaParameters(1.0, (-log_mean).exp()))
    torch.testing.assert_close(zero, torch.zeros_like(zero), rtol=0, atol=1e-12)
    kl = entrywise(LogNormal(), 0.5, log_mean, LogNormalParameters(-0.3, 2.0))
    expected = distributions.kl_divergence(distributions.Normal(log_mean - 0.125, 0.5), distributions.Normal(-0.3, 2.0))
    torch.testing.assert_close(kl, expected)


def test_entrywise_uses_the_spread_that_is_given_not_that_of_the_spec():
    log_mean, prior = torch.tensor([-1.0]), GammaParameters(0.5, 2.0)
    spread = torch.tensor([3.0])
    assert torch.equal(entrywise(Weibull(7.0), spread, log_mean, prior), entrywise(Weibull(3.0), 3.0, log_mean, prior))


@pytest.mark.parametrize(
    ("posterior", "prior", "message"),
    [
        (Weibull(), LogNormalParameters(0.0, 1.0), r"no divergence of Weibull\(.*\) from LogNormalParameters"),
        (LogNormal(), GammaParameters(1.0, 1.0), r"no divergence of LogNormal\(.*\) from GammaParameters"),
        (Softmax(), GammaParameters(1.0, 1.0), r"no divergence of Softmax\(\) from GammaParameters"),
    ],
)
def test_a_pair_without_a_closed_form_is_named(posterior, prior, message):
    with pytest.raises(TypeError, match=message):
        entrywise(posterior, 1.0, torch.zeros(1), prior)


@pytest.mark.parametrize(
    ("valid", "total", "count"),
    [
        (None, 78.0, 12),
        (torch.ones(3, dtype=torch.bool), 78.0, 12),
        (torch.tensor([True, False, True]), 52.0, 8),
        (torch.tensor([[True, False, False], [True, True, False]]), 1 + 4 + 5 + 7 + 10 + 11.0, 6),
        (torch.tensor([True, False]).view(2, 1, 1), 21.0, 6),
        (torch.tensor(True), 78.0, 12),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sum_and_mean_run_over_the_valid_entries(valid, total, count, dtype):
    divergence = reduce_valid(ENTRIES.to(dtype), valid)
    assert divergence.total.shape == divergence.entries.shape == divergence.mean.shape == ()
    assert divergence.total.dtype == divergence.entries.dtype == dtype
    assert divergence.total.item() == total
    assert divergence.entries.item() == count
    assert divergence.mean.item() == pytest.approx(total / count)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_without_a_valid_entry_sum_and_mean_are_zero(shape):
    entries = torch.ones(shape, requires_grad=True)
    for valid in (torch.zeros(shape, dtype=torch.bool), *((None,) if 0 in shape else ())):
        divergence = reduce_valid(entries, valid)
        assert divergence.total.item() == divergence.entries.item() == divergence.mean.item() == 0
        (gradient,) = torch.autograd.grad(divergence.mean, entries)
        assert torch.equal(gradient, torch.zeros(shape))


@pytest.mark.parametrize("junk", [math.inf, -math.inf, math.nan])
def test_what_is_masked_does_not_count(junk):
    entries = ENTRIES.clone()
    entries[..., 1] = junk
    divergence = reduce_valid(entries.requires_grad_(), torch.tensor([True, False, True]))
    assert divergence.total.item() == 52.0
    (gradient,) = torch.autograd.grad(divergence.total, entries)
    assert torch.equal(gradient, torch.tensor([1.0, 0.0, 1.0]).expand_as(entries))


@pytest.mark.parametrize(
    ("posterior", "prior"),
    [(Weibull(2.0), GammaParameters(0.5, 2.0)), (LogNormal(0.5), LogNormalParameters(-1.0, 2.0))],
    ids=["weibull", "lognormal"],
)
def test_masked_entries_get_no_gradient_through_the_divergence(posterior, prior):
    log_mean = torch.linspace(-2, 2, 24, dtype=torch.float64).view(2, 3, 4).log_softmax(-1).requires_grad_()
    spread = torch.tensor(posterior.parameter, dtype=torch.float64, requires_grad=True)
    valid = torch.tensor([True, True, False, True])
    reduce_valid(entrywise(posterior, spread, log_mean, prior), valid).total.backward()
    assert bool((log_mean.grad[..., 2] == 0).all())
    kept, alone = spread.grad.clone(), torch.tensor(posterior.parameter, dtype=torch.float64, requires_grad=True)
    reduce_valid(entrywise(posterior, alone, log_mean.detach()[..., valid], prior), None).total.backward()
    torch.testing.assert_close(kept, alone.grad)


def test_a_mask_that_does_not_fit_is_an_error():
    with pytest.raises(RuntimeError, match="size"):
        reduce_valid(ENTRIES, torch.ones(4, dtype=torch.bool))


def test_mean_of_a_divergence_is_differentiable():
    total = torch.tensor(6.0, requires_grad=True)
    (gradient,) = torch.autograd.grad(Divergence(total, torch.tensor(4.0)).mean, total)
    assert gradient.item() == 0.25
