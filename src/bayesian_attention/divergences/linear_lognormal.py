"""Lognormal from lognormal, summed over rows of dense attention in linear time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayesian_attention.divergences.linear_rows import LinearRows
from bayesian_attention.divergences.prefix import chunked, chunked_features
from bayesian_attention.divergences.wide_algebra import double, gram, wide_matmul
from bayesian_attention.priors import LogNormalParameters, PriorModule


def lognormal_lognormal_rows(rows: LinearRows, sigma: float | Tensor, prior: PriorModule) -> Tensor:
    """Σ KL(LogNormal(μ_ij, σ) ‖ LogNormal(μ₀_ij, σ₀)) over the rows that count and the keys that they see.

    With φ_ij = scale q_i·k_j + b_j the logits, μ_ij = φ_ij − lse_i − σ²/2, and N entries in all, the terms of
    :func:`lognormal_lognormal` sum to

    N (log(σ₀/σ) − ½ + σ²/(2σ₀²)) + Σ_ij (μ_ij − μ₀_ij)² / (2σ₀²).

    Every prior has μ₀_ij = m_j − Z_i: a constant, or the score of the key less the log-sum-exp of the scores
    that the row sees. For any reference points r and ρ, x_ij = scale q_i·(k_j − r) − (m_j − b_j − ρ) and
    y_i = scale q_i·r − lse_i − σ²/2 + Z_i − ρ give μ_ij − μ₀_ij = x_ij + y_i, and

    Σ_j (x_ij + y_i)² = scale² q_iᵀ G q_i − 2 scale q_i·u + V + 2 y_i (scale q_i·S − T) + n_i y_i²

    with G, u, V, S and T the sums over j of k'k'ᵀ, t k', t², k' and t, where k' = k_j − r and
    t = m_j − b_j − ρ. The mean key as r and the mean of m − b as ρ make everything as small as the
    differences are. Under a causal mask the sums run over chunks of keys, and what a row sees of its own
    chunk is summed entry by entry.

    Args:
        rows: with ``scores`` where the prior is contextual.
        sigma: σ, positive, a number or (H,).
        prior: a constant, learned or contextual prior.

    Returns:
        Shape (), float64.
    """
    # Of a contextual prior: the scores themselves, m_j; Z_i is in y_i.
    parameters = prior.distribution(rows.scores, rows.split_heads)
    if not isinstance(parameters, LogNormalParameters):
        raise TypeError(f"prior: {prior.spec} must give a lognormal; got {type(parameters).__name__}")
    loc = rows.split_heads(parameters.loc) if not isinstance(parameters.loc, Tensor) else parameters.loc
    prior_scale = parameters.scale if isinstance(parameters.scale, Tensor) else rows.split_heads(parameters.scale)
    prior_scale, scale = prior_scale.to(rows.dtype), rows.split_heads(sigma)
    visible = rows.visible()
    counting = rows.counting(visible)
    entries = (counting * visible).sum(-1, keepdim=True)
    squares = _squares(rows, loc, scale, visible, counting).unsqueeze(-1)
    flat = prior_scale.log() - scale.log() - 0.5 + scale**2 / (2.0 * prior_scale**2)
    return (entries * flat + squares / (2.0 * prior_scale**2)).sum()


class Moments(NamedTuple):
    """Sums over keys: their number n, and G, S, u, T and V of :func:`lognormal_lognormal_rows`.

    Shapes (…, 1), (…, D, D), (…, D), (…, D), (…, 1) and (…, 1).
    """

    number: Tensor
    gram: Tensor
    key: Tensor
    key_location: Tensor
    location: Tensor
    location_square: Tensor

    @staticmethod
    def of(key: Tensor, location: Tensor, present: Tensor) -> Moments:
        """Of keys (…, K, D), locations (…, K) and weights 0 or 1 (…, K), the first two 0 where the third is."""
        products = wide_matmul(torch.stack([present, location], dim=-2), key)
        return Moments(
            present.sum(-1, keepdim=True),
            gram(key),
            products[..., 0, :],
            products[..., 1, :],
            location.sum(-1, keepdim=True),
            location.square().sum(-1, keepdim=True),
        )

    def squares(self, query: Tensor, y: Tensor, counting: Tensor, scale: float) -> Tensor:
        """Σ_i Σ_j (x_ij + y_i)² over rows (…, R) that count; ``query`` is 0 where one does not."""
        products = wide_matmul(query, torch.stack([self.key, self.key_location], dim=-1)) * scale
        per_row = self.number * y.square() + 2.0 * y * (products[..., 0] - self.location)
        per_row = per_row - 2.0 * products[..., 1] + self.location_square
        quadratic = (self.gram * gram(query)).sum((-2, -1)) * scale**2
        return quadratic + per_row.masked_fill(~counting, 0.0).sum(-1)


def _squares(rows: LinearRows, loc: Tensor, sigma: Tensor, visible: Tensor, counting: Tensor) -> Tensor:
    """Σ (μ_ij − μ₀_ij)² of each batch row and head, (…, H)."""
    present = rows.key_weights()
    number = present.sum(-1, keepdim=True).clamp_min(1.0)
    # Reference points are constants: the sum does not depend on them.
    with torch.no_grad():
        centre = (present.to(rows.key.dtype).unsqueeze(-2) @ rows.key) / number.unsqueeze(-1).to(rows.key.dtype)
    location = loc if rows.bias is None else loc - rows.bias
    location = location.expand(present.shape)
    with torch.no_grad():
        reference = (location.detach() * present).sum(-1, keepdim=True) / number
    key, location = rows.key - centre, location - reference
    if rows.valid is not None:
        key = key.masked_fill(~rows.valid.unsqueeze(-1), 0.0)
        location = location.masked_fill(~rows.valid, 0.0)
    query = rows.query
    if rows.valid is not None or rows.counted is not None:
        query = query.masked_fill(~counting.unsqueeze(-1), 0.0)
    y = wide_matmul(query, double(centre).transpose(-1, -2)).squeeze(-1) * rows.scale
    y = y - rows.lse.masked_fill(~counting, 0.0) - 0.5 * sigma**2 - reference
    if rows.scores is not None:
        y = y + _normalisers(rows)
    y = y.masked_fill(~counting, 0.0)
    if rows.start is None:
        return Moments.of(key, location, present).squares(query, y, counting, rows.scale)
    return _causal_squares(query, key, location, present, y, counting, rows.scale, rows.start)


def _normalisers(rows: LinearRows) -> Tensor:
    """Z_i, (…, H, R) or (…, H, 1), finite."""
    if rows.scores is None:
        raise ValueError("rows: need scores")
    if rows.start is None:
        return rows.scores.logsumexp(-1, keepdim=True)
    return rows.up_to_row(rows.scores.logcumsumexp(-1))


def _causal_squares(
    query: Tensor,
    key: Tensor,
    location: Tensor,
    present: Tensor,
    y: Tensor,
    counting: Tensor,
    scale: float,
    start: int,
) -> Tensor:
    """Σ_i Σ_{j ≤ start + i} (x_ij + y_i)², (…, H), of R rows and start + R keys."""
    length, features = query.shape[-2:]
    # With a chunk no shorter than the number of features all G together are no larger than the keys.
    chunk = min(max(64, features), length)
    own_key = chunked_features(key[..., start:, :], chunk)
    own_location, own_present = chunked(location[..., start:], chunk), chunked(present[..., start:], chunk)
    query, y, counting = chunked_features(query, chunk), chunked(y, chunk), chunked(counting, chunk)

    sees = torch.ones(chunk, chunk, dtype=torch.bool, device=key.device).tril()
    sees = sees & counting.unsqueeze(-1) & (own_present > 0).unsqueeze(-2)
    x = (query * scale) @ own_key.transpose(-1, -2)
    offsets = y.unsqueeze(-1) - own_location.unsqueeze(-2)
    distance = (x + offsets.to(x.dtype)).masked_fill(~sees, 0.0)
    inside = double(distance.square().sum(-1)).sum((-2, -1))
    if length <= chunk and start == 0:
        return inside

    # Sums over the keys before each chunk: those that every row sees, and all earlier chunks.
    earliest = Moments.of(key[..., :start, :], location[..., :start], present[..., :start])
    chunks = Moments.of(own_key, own_location, own_present)
    axis = y.dim() - 2
    before = Moments(
        *(
            torch.cat([first.unsqueeze(axis), each.narrow(axis, 0, each.shape[axis] - 1)], axis).cumsum(axis)
            for first, each in zip(earliest, chunks, strict=True)
        )
    )
    return inside + before.squares(query, y, counting, scale).sum(-1)
