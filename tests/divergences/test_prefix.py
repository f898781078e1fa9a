import math

import pytest
import torch
from scipy import special
from torch import Tensor

from bayesian_attention.divergences.prefix import (
    EXCLUDED,
    chunked,
    chunked_features,
    earlier_dots,
    earlier_squares,
    log_gamma_prefix_sums,
    prefix_means,
    shifted_scores,
)
from bayesian_attention.priors.base import SMALLEST_CONCENTRATION

LENGTHS = [1, 31, 32, 33, 200, 1100]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def scores_of(kind: str, length: int) -> Tensor:
    """(2, length), at most 0, ranging over hundreds but for the first kind."""
    scores = normal(2, length)
    if kind == "rising":
        scores = scores + torch.linspace(-900, 0, length, dtype=torch.float64)
    if kind == "falling":
        scores = scores - torch.linspace(0, 900, length, dtype=torch.float64)
    if kind == "wild":
        scores = 200 * scores
    return scores - scores.amax(-1, keepdim=True)


KINDS = ["even", "rising", "falling", "wild"]


def shares(scores: Tensor) -> Tensor:
    """Row i: the softmax of the scores up to i, as torch takes it."""
    later = torch.ones(scores.shape[-1], scores.shape[-1], dtype=torch.bool).triu(1)
    return scores.unsqueeze(-2).expand(*scores.shape, scores.shape[-1]).masked_fill(later, -torch.inf).softmax(-1)


@pytest.mark.parametrize("length", LENGTHS)
def test_earlier_dots(length):
    query, key = normal(2, length, 3), normal(2, length, 3, seed=1)
    expected = (query @ key.transpose(-1, -2)).tril().sum((-2, -1))
    torch.testing.assert_close(earlier_dots(query, key), expected, rtol=1e-10, atol=1e-10)
    single = earlier_dots(query.float(), key.float())
    assert single.dtype == torch.float64
    torch.testing.assert_close(single, expected, rtol=1e-5, atol=1e-4 * length)


@pytest.mark.parametrize("length", [1, 3, 9, 10])
def test_earlier_squares(length):
    """In chunks of three, the last of which is padded with zeros."""
    row, key = (normal(2, length, 4, seed=seed).requires_grad_() for seed in (0, 1))
    expected = (row @ key.transpose(-1, -2)).tril().square().sum((-2, -1))
    found = earlier_squares(chunked_features(row, 3), chunked_features(key, 3))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = normal(2, seed=2)
    for one, other in zip(
        torch.autograd.grad(found, (row, key), upstream),
        torch.autograd.grad(expected, (row, key), upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_prefix_means(kind, length):
    """Three levels of chunks at 1100 keys. In float32 the weights round once, and so do the means."""
    scores = scores_of(kind, length)
    values = normal(2, length, 3, seed=1)
    expected = shares(scores) @ values
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        found = prefix_means(scores, scores.logcumsumexp(-1), values.to(dtype))
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_prefix_means(kind):
    scores, values = scores_of(kind, 70).requires_grad_(), normal(2, 70, 3, seed=1).requires_grad_()
    upstream = normal(2, 70, 3, seed=2)
    found = torch.autograd.grad(prefix_means(scores, scores.logcumsumexp(-1), values), (scores, values), upstream)
    expected = torch.autograd.grad(shares(scores) @ values, (scores, values), upstream)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_prefix_means_leave_excluded_keys_out():
    scores = scores_of("even", 100)
    valid = torch.rand(2, 100, generator=torch.Generator().manual_seed(4)) < 0.5
    valid[:, :40] = False  # a whole chunk without a valid key
    scores = scores.masked_fill(~valid, EXCLUDED)
    values = normal(2, 100, 3, seed=1)
    sums = scores.logcumsumexp(-1)
    found = prefix_means(scores, sums.masked_fill(sums < EXCLUDED / 2, 0.0), values)
    expected = (shares(scores) * valid.unsqueeze(-2)) @ values
    seen = valid.cumsum(-1) > 0
    torch.testing.assert_close(found[seen], expected[seen], rtol=0, atol=1e-12)
    assert bool(found.isfinite().all())


def log_gammas(scores: Tensor, valid: Tensor, rate: float) -> Tensor:
    """By scipy, entry by entry, clamp included."""
    concentrations = (rate * shares(scores)).clamp_min(SMALLEST_CONCENTRATION)
    counted = valid.unsqueeze(-2) & torch.ones(scores.shape[-1], scores.shape[-1], dtype=torch.bool).tril()
    return torch.from_numpy(special.gammaln(concentrations.numpy())).masked_fill(~counted, 0.0).sum(-1)


@pytest.mark.parametrize("rate", [1e-6, 0.3, 1.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 33, 200])
def test_log_gamma_prefix_sums(length, kind, rate):
    """To 1e-14 an entry and of the sum, or to 4e-9 an entry, at concentrations down to the smallest."""
    scores = scores_of(kind, length)
    valid = torch.rand(2, length, generator=torch.Generator().manual_seed(4)) < 0.8
    valid[:, 0] = True
    scores = scores.masked_fill(~valid, EXCLUDED)
    expected = log_gammas(scores, valid, rate)
    for exact, tolerance in ((True, 1e-14), (False, 4e-9)):
        found = log_gamma_prefix_sums(scores, scores.logcumsumexp(-1), valid, rate, exact)
        assert bool(((found - expected).abs() <= tolerance * length + 2e-14 * expected.abs()).all())


def test_a_concentration_leaves_the_sums_where_it_is_clamped():
    """A rising sequence: the first key's share falls below 1e-30, and counts as 1e-30 from there on."""
    scores = torch.linspace(-200, 0, 50, dtype=torch.float64)
    valid = torch.ones(50, dtype=torch.bool)
    assert (shares(scores) < SMALLEST_CONCENTRATION).any()
    found = log_gamma_prefix_sums(scores, scores.logcumsumexp(-1), valid, 1.0, exact=True)
    torch.testing.assert_close(found, log_gammas(scores, valid, 1.0), rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_log_gamma_prefix_sums(kind):
    """Against digamma, which is the derivative of log Γ; clamped concentrations have none."""
    scores = scores_of(kind, 60).requires_grad_()
    valid, upstream = torch.ones(60, dtype=torch.bool), normal(2, 60, seed=2)
    found = log_gamma_prefix_sums(scores, scores.logcumsumexp(-1), valid, 0.7, exact=True)
    (gradient,) = torch.autograd.grad(found, scores, upstream)
    concentrations = (0.7 * shares(scores)).clamp_min(SMALLEST_CONCENTRATION)
    counted = torch.ones(60, 60, dtype=torch.bool).tril()
    (expected,) = torch.autograd.grad(torch.lgamma(concentrations).masked_fill(~counted, 0.0).sum(-1), scores, upstream)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9)


def test_shifted_scores_have_a_maximum_of_zero():
    scores = torch.tensor([[1.0, 5.0, 3.0], [2.0, 0.0, 9.0]], requires_grad=True)
    shifted = shifted_scores(scores, None)
    assert shifted.dtype == torch.float64
    assert shifted.tolist() == [[-4, 0, -2], [-7, -9, 0]]
    valid = torch.tensor([[True, False, True], [False, False, False]])
    shifted = shifted_scores(scores, valid)
    assert shifted.tolist() == [[-2, EXCLUDED, 0], [EXCLUDED] * 3]
    (gradient,) = torch.autograd.grad(shifted.sum(), scores)
    assert torch.equal(gradient, valid.float())


def test_chunks_are_padded_at_the_end():
    x = torch.arange(5.0)
    assert chunked(x, 2, value=-math.inf).tolist() == [[0, 1], [2, 3], [4, -math.inf]]
    assert chunked(x[:4], 2).tolist() == [[0, 1], [2, 3]]
    assert chunked_features(x.unsqueeze(-1), 3).squeeze(-1).tolist() == [[0, 1, 2], [3, 4, 0]]
