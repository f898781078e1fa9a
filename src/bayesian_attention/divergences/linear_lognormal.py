"""Lognormal from lognormal, summed over rows of dense attention in linear time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayesian_attention.divergences.linear_rows import LinearRows
from bayesian_attention.divergences.prefix import chunked_features, earlier_squares
from bayesian_attention.divergences.wide_algebra import double, gram, wide_product
from bayesian_attention.priors import LogNormalParameters, PriorModule

#: Rows in a chunk under a causal mask, at least.
CHUNK = 64


def lognormal_lognormal_rows(rows: LinearRows, sigma: float | Tensor, prior: PriorModule) -> Tensor:
    """Σ KL(LogNormal(μ_ij, σ) ‖ LogNormal(μ₀_ij, σ₀)) over the rows that count and the keys that they see.

    With φ_ij = scale q_i·k_j + b_j the logits, μ_ij = φ_ij − lse_i − σ²/2, and N entries in all, the terms of
    :func:`lognormal_lognormal` sum to

    N (log(σ₀/σ) − ½ + σ²/(2σ₀²)) + Σ_ij (μ_ij − μ₀_ij)² / (2σ₀²).

    Every prior has μ₀_ij = m_j − Z_i: a constant, or the score of the key less the log-sum-exp of the scores
    that the row sees. So μ_ij − μ₀_ij is the dot product of a vector of the row and a vector of the key,
    see :func:`_factors`, and the squares of all dot products of two sets of vectors sum to the inner product
    of their Gram matrices. Under a causal mask the Gram matrices of the keys are running sums over chunks.

    Args:
        rows: with ``scores`` where the prior is contextual.
        sigma: σ, positive, a number or (H,).
        prior: a constant, learned or contextual prior.

    Returns:
        Shape (), float64.
    """
    # Of a contextual prior: the scores themselves, m_j; Z_i is a matter of the row.
    parameters = prior.distribution(rows.scores, rows.split_heads)
    if not isinstance(parameters, LogNormalParameters):
        raise TypeError(f"prior: {prior.spec} must give a lognormal; got {type(parameters).__name__}")
    prior_scale, scale = rows.split_heads(parameters.scale), rows.split_heads(sigma)
    visible = rows.visible()
    counting = rows.counting(visible)
    row, key = _factors(rows, parameters.loc, scale, counting)
    if rows.start is None:
        squares = _pairs(row, key)
    else:
        squares = _earlier_pairs(row, key.narrowed(rows.start, rows.key.shape[-2]))
        if rows.start:
            squares = squares + _pairs(row, key.narrowed(0, rows.start))
    entries = (counting * visible).sum(-1, keepdim=True)
    precision = 0.5 / prior_scale**2
    flat = prior_scale.log() - scale.log() - 0.5 + precision * scale**2
    return (entries * flat + precision * squares.unsqueeze(-1)).sum()


class Factors(NamedTuple):
    """One vector a row, or a key: ``factor`` times ``features`` (…, N, D), and ``extra`` (…, E, N) in float64."""

    features: Tensor
    extra: Tensor
    factor: float = 1.0

    def narrowed(self, first: int, stop: int) -> Factors:
        """The vectors from the first number up to the second."""
        return Factors(self.features[..., first:stop, :], self.extra[..., first:stop], self.factor)

    def joined(self) -> Tensor:
        """(…, N, D + E), the dtype of the features."""
        features = self.features if self.factor == 1.0 else self.features * self.factor
        return torch.cat([features, self.extra.to(features.dtype).transpose(-1, -2)], dim=-1)


def _factors(rows: LinearRows, loc: float | Tensor, sigma: Tensor, counting: Tensor) -> tuple[Factors, Factors]:
    """Vectors of rows and of keys whose dot products are μ_ij − μ₀_ij.

    For any reference points r and ρ these are (scale q_i, y_i, 1) and (k_j − r, 1, t_j), where
    y_i = scale q_i·r − lse_i − σ²/2 + Z_i − ρ and t_j = b_j − m_j + ρ. The mean key as r and the mean of m − b as ρ
    make everything as small as the differences are; where m − b is the same for all keys there is no t. A row
    that does not count and a key that is not valid are 0.
    """
    query, key, valid = rows.query, rows.key, rows.valid
    present = rows.key_weights()
    # Reference points are constants: the result does not depend on them.
    with torch.no_grad():
        number = present.sum(-1, keepdim=True).clamp_min(1.0)
        centre = _masked(key, valid).sum(-2, keepdim=True) / number.to(key.dtype).unsqueeze(-1)
    y = double((query * centre).sum(-1)) * rows.rounded_scale()
    y = y - rows.lse.masked_fill(~counting, 0.0) - 0.5 * sigma**2
    extra_row, extra_key = [], [present]
    if rows.scores is None and rows.bias is None:
        y = y - loc
    else:
        location = (loc if rows.bias is None else loc - rows.bias) * present
        with torch.no_grad():
            reference = location.sum(-1, keepdim=True) / number
        y = y - reference
        extra_row, extra_key = [torch.ones_like(y)], [present, reference * present - location]
    if rows.scores is not None:
        y = y + _normalisers(rows)
    extra = torch.stack([y, *extra_row], dim=-2)
    key = _masked(key - centre, valid)
    if rows.rows_left_out:
        query, extra = _masked(query, counting), extra.masked_fill(~counting.unsqueeze(-2), 0.0)
    return Factors(query, extra, rows.scale), Factors(key, torch.stack(extra_key, dim=-2))


def _masked(x: Tensor, valid: Tensor | None) -> Tensor:
    """(…, N, D), 0 where ``valid``, (…, N), is False."""
    return x if valid is None else x.masked_fill(~valid.unsqueeze(-1), 0.0)


def _normalisers(rows: LinearRows) -> Tensor:
    """Z_i, (…, H, R) or (…, H, 1), finite."""
    if rows.scores is None:
        raise ValueError("rows: need scores")
    if rows.start is None:
        return rows.scores.logsumexp(-1, keepdim=True)
    return rows.up_to_row(rows.scores.logcumsumexp(-1))


def _pairs(row: Factors, key: Factors) -> Tensor:
    """The sum of the squares of all dot products, (…), float64."""
    rows, features = row.features.shape[-2:]
    keys = key.features.shape[-2]
    if rows * keys <= (rows + keys) * features:
        # The products are fewer than the numbers in the vectors.
        products = row.joined() @ key.joined().transpose(-1, -2)
        return double(products.square().sum(-1)).sum(-1)
    # The inner product of the two Gram matrices, block by block. The last block is what matters where all
    # weights are alike; its terms are few, and it is computed in float64 throughout.
    dtype, factor = row.features.dtype, row.factor
    row_mixed = wide_product(row.extra.to(dtype), row.features)
    key_mixed = wide_product(key.extra.to(dtype), key.features)
    row_extra, key_extra = (x @ x.transpose(-1, -2) for x in (row.extra, key.extra))
    mixed = (row_mixed * key_mixed).sum((-2, -1)) * (2.0 * factor)
    extra = (row_extra * key_extra).sum((-2, -1))
    return (gram(row.features) * gram(key.features)).sum((-2, -1)) * factor**2 + mixed + extra


def _earlier_pairs(row: Factors, key: Factors) -> Tensor:
    """The sum of the squares of the dot products of each row with the keys up to its place, (…), float64."""
    length, features = row.features.shape[-2:]
    # With a chunk no shorter than the number of features all Gram matrices are no larger than the vectors.
    chunk = min(max(CHUNK, features), length)
    return earlier_squares(chunked_features(row.joined(), chunk), chunked_features(key.joined(), chunk))
