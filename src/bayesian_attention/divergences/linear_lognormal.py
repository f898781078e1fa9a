"""Lognormal from lognormal, summed over rows of dense attention in linear time."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesian_attention.divergences.fork import Port
from bayesian_attention.divergences.linear_rows import LinearRows
from bayesian_attention.divergences.prefix import chunked_features, earlier_squares
from bayesian_attention.divergences.squares import Vectors, squared_products
from bayesian_attention.divergences.wide_algebra import double
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
    see :func:`_vectors`, and the squares of all dot products of two sets of vectors sum to the inner product
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
    vectors = _vectors(rows, parameters.loc, scale, counting)
    if rows.start is None:
        squares = _pairs(vectors, None if rows.rows_left_out else rows.ports)
    else:
        squares = _earlier_pairs(vectors, rows.start)
        if rows.start:
            squares = squares + _pairs(vectors.first_keys(rows.start), None)
    entries = (counting * visible).sum(-1, keepdim=True)
    precision = 0.5 / prior_scale**2
    flat = prior_scale.log() - scale.log() - 0.5 + precision * scale**2
    return (entries * flat + precision * squares.unsqueeze(-1)).sum()


def _vectors(rows: LinearRows, loc: float | Tensor, sigma: Tensor, counting: Tensor) -> Vectors:
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
        valid_keys = key if valid is None else key.masked_fill(~valid.unsqueeze(-1), 0.0)
        centre = valid_keys.sum(-2, keepdim=True) / number.to(key.dtype).unsqueeze(-1)
    if valid is not None:
        # Less the centre, 0.
        key = torch.where(valid.unsqueeze(-1), key, centre)
    y = -rows.lse.masked_fill(~counting, 0.0) - 0.5 * sigma**2
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
    if rows.rows_left_out:
        query = query.masked_fill(~counting.unsqueeze(-1), 0.0)
        extra = extra.masked_fill(~counting.unsqueeze(-2), 0.0)
    return Vectors(query, key, centre, extra, torch.stack(extra_key, dim=-2), rows.scale, rows.rounded_scale())


def _normalisers(rows: LinearRows) -> Tensor:
    """Z_i, (…, H, R) or (…, H, 1), finite."""
    if rows.scores is None:
        raise ValueError("rows: need scores")
    if rows.start is None:
        return rows.scores.logsumexp(-1, keepdim=True)
    return rows.up_to_row(rows.scores.logcumsumexp(-1))


def _pairs(vectors: Vectors, ports: tuple[Port, Port] | None) -> Tensor:
    """The sum of the squares of all dot products, (…), float64."""
    rows, features = vectors.query.shape[-2:]
    keys = vectors.key.shape[-2]
    if rows * keys <= (rows + keys) * features:
        # The products are fewer than the numbers in the vectors.
        products = vectors.rows() @ vectors.keys().transpose(-1, -2)
        return double(products.square().sum(-1)).sum(-1)
    return squared_products(vectors, ports)


def _earlier_pairs(vectors: Vectors, start: int) -> Tensor:
    """The same of each row with the keys from ``start`` up to the row's place."""
    length, features = vectors.query.shape[-2:]
    # With a chunk no shorter than the number of features all Gram matrices are no larger than the vectors.
    chunk = min(max(CHUNK, features), length)
    return earlier_squares(chunked_features(vectors.rows(), chunk), chunked_features(vectors.keys(start), chunk))
