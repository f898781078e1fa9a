import math

import pytest
import torch
from torch import Tensor

from bayesian_attention.engine.reference import dense_logits, log_weights
from bayesian_attention.engine.rows import DenseRows, NoiseAddress, SegmentRows
from bayesian_attention.posteriors import LogNormal, Softmax, Weibull


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def logits_of(query: Tensor, key: Tensor, **options: object) -> tuple[Tensor, DenseRows]:
    return dense_logits(query, key, **{"mask": None, "is_causal": False, "scale": 0.5, "query_offset": 0, **options})


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_are_scaled_dot_products_of_the_group(kv_heads):
    q, k = randn(2, 4, 3, 5), randn(2, kv_heads, 6, 5, seed=1)
    logits, rows = logits_of(q, k)
    assert rows.valid is None
    for head in range(4):
        expected = 0.5 * torch.einsum("bqd,bkd->bqk", q[:, head], k[:, head * kv_heads // 4])
        torch.testing.assert_close(logits[:, head], expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_narrow_dtypes_are_float32(dtype):
    q, k = randn(2, 3, 5, dtype=dtype) * 300, randn(2, 6, 5, seed=1, dtype=dtype) * 300
    logits, _ = logits_of(q, k)
    assert logits.dtype == torch.float32
    assert logits.abs().max() > 65504
    torch.testing.assert_close(logits.double(), 0.5 * q.double() @ k.double().mT, rtol=1e-6, atol=0.1)


def test_additive_masks_add_where_they_do_not_mask():
    q, k = randn(2, 3, 5), randn(2, 5, 5, seed=1)
    mask = torch.tensor([0.5, -1e4, -math.inf, -8999.0, -9984.0], dtype=torch.float64)
    plain, _ = logits_of(q, k)
    logits, rows = logits_of(q, k, mask=mask)
    assert rows.valid.tolist() == [True, False, False, True, False]
    expected = plain + torch.tensor([0.5, 0.0, 0.0, -8999.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(logits, expected, rtol=1e-14, atol=1e-12)


@pytest.mark.parametrize(("offset", "kept"), [(0, [1, 2, 3]), (2, [3, 4, 4]), (-2, [0, 0, 1])])
def test_causal_rows(offset, kept):
    q, k = randn(2, 3, 5), randn(2, 4, 5, seed=1)
    _, rows = logits_of(q, k, is_causal=True, query_offset=offset)
    assert rows.valid.sum(-1).tolist() == kept
    assert rows.query_offset == offset
    padding = torch.tensor([False, True, True, True])
    _, both = logits_of(q, k, is_causal=True, query_offset=offset, mask=padding)
    assert torch.equal(both.valid, rows.valid & padding)


def dense_case() -> tuple[Tensor, DenseRows]:
    valid = torch.rand(2, 1, 3, 4, generator=torch.Generator().manual_seed(1)) < 0.6
    valid[0, :, 2] = False
    return randn(2, 3, 3, 4), DenseRows(valid)


def segment_case() -> tuple[Tensor, SegmentRows]:
    edges = torch.tensor([[0, 0, 0, 1, 3, 3], [0, 1, 3, 1, 0, 2]])
    return randn(6, 3), SegmentRows(*edges, 4)


CASES = [dense_case, segment_case]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("posterior", [Weibull(3.0), LogNormal(0.5), Softmax()])
def test_without_an_address_weights_are_the_softmax(case, posterior):
    logits, rows = case()
    log_w = log_weights(logits, rows, posterior, posterior.parameter, None)
    expected = log_weights(logits, rows, Softmax(), 0.0, NoiseAddress(1))
    assert torch.equal(log_w, expected)
    if isinstance(rows, DenseRows):
        direct = logits.masked_fill(~rows.valid, -math.inf).softmax(-1).nan_to_num(0.0)
    else:
        dense = torch.full((4, 4, 3), -math.inf, dtype=torch.float64)
        dense[rows.index, rows.source] = logits
        direct = dense.softmax(1)[rows.index, rows.source]
    torch.testing.assert_close(log_w.exp(), direct, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("posterior", [Weibull(3.0), LogNormal(0.5)])
def test_log_ratios_within_a_row_carry_the_noise(case, posterior):
    logits, rows = case()
    address = NoiseAddress(4, 2)
    log_w = log_weights(logits, rows, posterior, posterior.parameter, address)
    u = rows.uniform(address, logits)
    if isinstance(posterior, Weibull):
        expected = torch.log(torch.distributions.Exponential(1.0).icdf(1 - u)) / 3.0
    else:
        expected = torch.distributions.Normal(0.0, 0.5).icdf(u)
    change = log_w - logits - expected  # one number a row
    if isinstance(rows, DenseRows):
        change = change.masked_fill(~rows.valid, math.nan)
        spread = change.sub(change.nanmean(-1, keepdim=True)).abs().nan_to_num(0.0)
        assert spread.max() < 1e-8
        total = log_w.exp().sum(-1)
        assert torch.equal(total == 0, ~rows.valid.any(-1).expand_as(total))
    else:
        for row in (0, 1, 3):
            edges = rows.index == row
            assert change[edges].std(0, correction=0).max() < 1e-8
            torch.testing.assert_close(log_w[edges].exp().sum(0), torch.ones(3).double(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("posterior", [Weibull(3.0), LogNormal(0.5)])
def test_gradients(case, posterior):
    logits, rows = case()
    spread = torch.tensor([0.6, 1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def weights(logits: Tensor, spread: Tensor) -> Tensor:
        return log_weights(logits, rows, posterior, spread, NoiseAddress(4)).exp()

    assert torch.autograd.gradcheck(weights, (logits.requires_grad_(), spread))


@pytest.mark.parametrize("case", CASES)
def test_one_spread_a_head(case):
    logits, rows = case()
    spread = torch.tensor([0.6, 1.0, 2.0], dtype=torch.float64)
    together = log_weights(logits, rows, LogNormal(1.0), spread, NoiseAddress(4))
    for head in range(3):
        alone = log_weights(logits, rows, LogNormal(1.0), float(spread[head]), NoiseAddress(4))
        torch.testing.assert_close(together.select(1, head), alone.select(1, head), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_spread_and_huge_logits_stay_finite(dtype):
    logits, rows = dense_case()
    logits = (logits * 1e4).to(dtype)
    for posterior in (Weibull(1e-3), Weibull(1e6), LogNormal(1e-6), LogNormal(1e3)):
        weights = log_weights(logits, rows, posterior, posterior.parameter, NoiseAddress(4)).exp()
        total = weights.sum(-1)
        torch.testing.assert_close(total, rows.valid.any(-1).expand_as(total).to(dtype))
