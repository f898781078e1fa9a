"""Running sums over keys under weights that are normalised anew at every key, in linear time.

Row i sees keys j ≤ i with weights c_ij = exp(s_j − Z_i), Z_i = log Σ_{j ≤ i} exp(s_j). The scores s may range
over hundreds, so nothing here divides by one maximum for all rows: early keys would underflow.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesian_attention.divergences.wide_algebra import double, double_of, wide_sum
from bayesian_attention.priors.base import SMALLEST_CONCENTRATION

#: The score of a key that is not valid: finite, so that differences of two are no NaN.
EXCLUDED = -1e30

#: Keys in one dense block.
CHUNK = 32

# log Γ(1 + x) = Σ_r a_r x^r, r = 1, 2, …, on [0, 1]: log Γ(1 + x) / x interpolated at the Chebyshev nodes of
# [0, 1] in 60 digits. All a_r are below 1, so that nothing cancels. Errors at most 3e-9 and 2e-16.
_SHORT_SERIES = (
    -0.57721565954566046, 0.82246595746641399, -0.40064932466354993, 0.27009590689464015, -0.20401113627963256,
    0.15555902987838594, -0.10655966801599691, 0.056772387448483812, -0.019647977172474455, 0.0031904868265416437,
)  # fmt: skip
_LONG_SERIES = (
    -0.57721566490153247, 0.82246703342383227, -0.40068563435259854, 0.27058080679331507, -0.20738550920133019,
    0.16955651993291763, -0.14404298996370853, 0.12545826001340057, -0.11105240626681293, 0.098928000314460862,
    -0.087181528598100857, 0.073772262617519878, -0.057430217606352144, 0.039081256810780475,
    -0.021995727867212124, 0.009629946947066346, -0.0030328068205186401, 0.00060565792679668515,
    -5.7259201923556404e-5,
)  # fmt: skip


def earlier_dots(query: Tensor, key: Tensor) -> Tensor:
    """Σ_i Σ_{j ≤ i} query_i · key_j.

    Within a chunk by a dense triangular block; what lies before the chunk by its sum, in float64.

    Args:
        query: (…, N, D), float32 or float64.
        key: the shape and dtype of ``query``.

    Returns:
        (…), float64.
    """
    q, k = chunked_features(query, CHUNK), chunked_features(key, CHUNK)
    inside = double((q @ k.transpose(-1, -2)).tril().sum((-2, -1))).sum(-1)
    if q.shape[-3] == 1:
        return inside
    before = wide_sum(k[..., :-1, :, :]).cumsum(-2)
    return inside + (wide_sum(q[..., 1:, :, :]) * before).sum((-2, -1))


def earlier_squares(a: Tensor, b: Tensor) -> Tensor:
    """Σ_i Σ_{j ≤ i} (a_i·b_j)².

    Within a chunk by a dense triangular block; what lies before the chunk by the sum of its Gram matrices, in
    float64.

    Args:
        a: (…, chunks, C, E), float32 or float64, C of the size of E.
        b: the shape and dtype of ``a``.

    Returns:
        (…), float64.
    """
    # Compilers differentiate the plain operations; eager mode would keep a dozen copies for that.
    return _earlier_squares(a, b) if torch.compiler.is_compiling() else _EarlierSquares.apply(a, b)


def _earlier_squares(a: Tensor, b: Tensor) -> Tensor:
    own = (a @ b.transpose(-1, -2)).tril()
    squares = double(own.square().sum(-1)).sum((-2, -1))
    if a.shape[-3] == 1:
        return squares
    before = _running(_grams(b[..., :-1, :, :]))
    return squares + double((_grams(a[..., 1:, :, :]) * before).sum(-1)).sum((-2, -1))


def _grams(x: Tensor) -> Tensor:
    return x.transpose(-1, -2) @ x


def _running(x: Tensor) -> Tensor:
    """(…, chunks, E, E): running sums over chunks, added up in float64."""
    return x.cumsum(-3, dtype=double_of(x)).to(x.dtype)


def _remaining(x: Tensor) -> Tensor:
    """(…, chunks, E, E): the sum from each on, added up in float64."""
    return _running(x.flip(-3)).flip(-3)


def _padded(x: Tensor, front: int, back: int) -> Tensor:
    """(…, chunks, C, E) with chunks of zeros in front of the others or behind them."""
    return F.pad(x, (0, 0, 0, 0, front, back))


class _EarlierSquares(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _earlier_squares(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        twice = (2.0 * grad).to(a.dtype)[..., None, None, None]
        own = (a @ b.transpose(-1, -2)).tril()
        grad_a, grad_b = own @ b, own.transpose(-1, -2) @ a
        if a.shape[-3] > 1:
            # The first chunk has nothing before it, the last is before nothing.
            from_before = a[..., 1:, :, :] @ _running(_grams(b[..., :-1, :, :]))
            from_after = b[..., :-1, :, :] @ _remaining(_grams(a[..., 1:, :, :]))
            grad_a, grad_b = grad_a + _padded(from_before, 1, 0), grad_b + _padded(from_after, 0, 1)
        return twice * grad_a, twice * grad_b


def chunked(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """(…, N) → (…, chunks, size), padded with ``value`` at the end."""
    pad = -x.shape[-1] % size
    return (F.pad(x, (0, pad), value=value) if pad else x).unflatten(-1, (-1, size))


def chunked_features(x: Tensor, size: int) -> Tensor:
    """(…, N, D) → (…, chunks, size, D), padded with 0 at the end."""
    pad = -x.shape[-2] % size
    return (F.pad(x, (0, 0, 0, pad)) if pad else x).unflatten(-2, (-1, size))


def prefix_means(scores: Tensor, log_sums: Tensor, values: Tensor) -> Tensor:
    """Σ_{j ≤ i} c_ij values_j for every i.

    Within a chunk of keys by a dense triangular block; what lies before the chunk enters as its own mean,
    times exp(Z_before − Z_i). The means before the chunks are the same problem over the chunks' totals.

    Args:
        scores: s, (…, N), at most about 0; float64. Invalid keys hold :data:`EXCLUDED`.
        log_sums: Z, (…, N); any finite number for a row without a valid key.
        values: (…, N, D).

    Returns:
        (…, N, D), the dtype of ``values``.
    """
    length = scores.shape[-1]
    if length <= CHUNK:
        return _block_weights(scores, log_sums).to(values.dtype) @ values
    s, z = chunked(scores, CHUNK, EXCLUDED), chunked(log_sums, CHUNK)
    x = chunked_features(values, CHUNK)
    inside = _block_weights(s, z).to(x.dtype) @ x
    # All chunks but the last have something after them.
    totals = s[..., :-1, :].logsumexp(-1)
    ends = z[..., :-1, -1]
    shares = (s[..., :-1, :] - totals.unsqueeze(-1)).exp().to(x.dtype)
    chunk_means = (shares.unsqueeze(-2) @ x[..., :-1, :, :]).squeeze(-2)
    before = F.pad(prefix_means(totals, ends, chunk_means), (0, 0, 1, 0))
    carried = (F.pad(ends, (1, 0), value=EXCLUDED).unsqueeze(-1) - z).exp().to(x.dtype)
    result = torch.addcmul(inside, carried.unsqueeze(-1), before.unsqueeze(-2))
    return result.flatten(-3, -2)[..., :length, :]


def _block_weights(scores: Tensor, log_sums: Tensor) -> Tensor:
    """exp(s_j − Z_i) for j ≤ i, else 0: (…, C) → (…, C, C)."""
    size = scores.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu(1)
    # Later keys may be far larger: mask before exp, whose infinity would be NaN in the backward pass.
    return (scores.unsqueeze(-2) - log_sums.unsqueeze(-1)).masked_fill(later, -torch.inf).exp()


def log_gamma_prefix_sums(scores: Tensor, log_sums: Tensor, valid: Tensor, rate: float, exact: bool) -> Tensor:
    """Σ_{j ≤ i} log Γ(α_ij) over valid keys, α_ij = max(β c_ij, smallest concentration), for β ≤ 1.

    log Γ(α) = −log α + log Γ(1 + α). The second is a polynomial in α on [0, 1], and its sum follows from
    the power sums Σ_j c_ij^r = exp(log Σ_j exp(r s_j) − r Z_i). The first is linear in Z_i − s_j until α is so
    small that it is clamped; as Z only grows with i, a key stays clamped from then on, so that a key enters
    the running sums at its place and leaves them at a place found by bisection.

    Args:
        scores: s, (…, N), at most 0; float64. Invalid keys hold :data:`EXCLUDED`.
        log_sums: Z, (…, N), :data:`EXCLUDED` up to rounding where no key is valid yet.
        valid: boolean, broadcasts against ``scores``.
        rate: β in (0, 1].
        exact: to 1e-15 an entry; else to 3e-9.

    Returns:
        (…, N), float64; some finite number where no key is valid yet.
    """
    coefficients = _LONG_SERIES if exact else _SHORT_SERIES
    dtype, device, length = scores.dtype, scores.device, scores.shape[-1]
    z = log_sums.masked_fill(log_sums < EXCLUDED / 2, 0.0)
    powers = torch.arange(2, len(coefficients) + 1, dtype=dtype, device=device).unsqueeze(-1)
    logs = (scores.unsqueeze(-2) * powers).logcumsumexp(-1) - z.unsqueeze(-2) * powers
    series = [a * rate**r for r, a in enumerate(coefficients, start=1)]
    smooth = torch.tensor(series[1:], dtype=dtype, device=device) @ logs.exp() + series[0]

    largest = -math.log(SMALLEST_CONCENTRATION)
    present = valid.to(dtype).expand_as(scores)
    own = scores.masked_fill(~valid, 0.0)
    with torch.no_grad():
        places = torch.arange(length, device=device)
        bound = (scores + (largest + math.log(rate))).contiguous()
        clamped_from = torch.searchsorted(log_sums.contiguous(), bound).maximum(places)
    present_now = (present - _moved(present, clamped_from)).cumsum(-1)
    own_now = (own - _moved(own, clamped_from)).cumsum(-1)
    clamped = present.cumsum(-1) - present_now
    return smooth + present_now * (z - math.log(rate)) - own_now + largest * clamped


def _moved(x: Tensor, places: Tensor) -> Tensor:
    """Each x_j added at its new place; places beyond the end are dropped."""
    room = x.new_zeros(*x.shape[:-1], x.shape[-1] + 1)
    return room.scatter_add(-1, places, x)[..., :-1]


def shifted_scores(scores: Tensor, valid: Tensor | None) -> Tensor:
    """Scores in float64 with :data:`EXCLUDED` for invalid keys and a maximum of 0, for which no gradient is due."""
    scores = scores.to(double_of(scores))
    if valid is not None:
        scores = scores.masked_fill(~valid, EXCLUDED)
    peak = scores.detach().amax(-1, keepdim=True)
    shifted = scores - torch.where(peak < EXCLUDED / 2, torch.zeros_like(peak), peak)
    return shifted if valid is None else shifted.masked_fill(~valid, EXCLUDED)
