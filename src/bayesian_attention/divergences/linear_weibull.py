"""Weibull from Gamma, summed over rows of dense attention in linear time."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesian_attention.divergences.linear_rows import LinearRows
from bayesian_attention.divergences.prefix import EXCLUDED, earlier_dots, log_gamma_prefix_sums, prefix_means
from bayesian_attention.divergences.weibull_gamma import EULER
from bayesian_attention.divergences.wide_algebra import double, wide_product, wide_sum
from bayesian_attention.priors import GammaParameters, PriorModule


def weibull_gamma_rows(rows: LinearRows, shape: float | Tensor, prior: PriorModule) -> Tensor:
    """Σ KL(Weibull(k, λ_ij) ‖ Gamma(α_ij, β)) over the rows that count and the keys that they see.

    With φ_ij = scale q_i·k_j + b_j the logits, log λ_ij = φ_ij − lse_i − log Γ(1 + 1/k) and Σ_j λ_ij Γ(1 + 1/k) = 1,
    the terms of :func:`weibull_gamma` sum to

    A_i (γ/k + log Γ(1 + 1/k) − log β + lse_i) − Σ_j α_ij φ_ij + Σ_j log Γ(α_ij) + β + n_i (log k − γ − 1)

    for a row that sees n_i keys, A_i = Σ_j α_ij. Where α_ij = α_j, Σ_i Σ_j α_j φ_ij is the product of the sum
    of the queries with the weighted sum of the keys. Under a causal mask the sums over keys are running
    sums, and those of a contextual prior, α_ij = β exp(s_j − Z_i), are renormalised as they run.

    Args:
        rows: with ``scores`` where the prior is contextual.
        shape: k, positive, a number or (H,).
        prior: a constant, learned or contextual prior; the rate of a contextual one at most 1 where ``rows``
            are causal.

    Returns:
        Shape (), float64.
    """
    sums = _causal_contextual if rows.start is not None and rows.scores is not None else _weighted_keys
    visible = rows.visible()
    counting = rows.counting(visible)
    weights = counting.to(rows.dtype)
    mass, cross, log_gammas, rate = sums(rows, prior, weights)
    k, beta = rows.split_heads(shape), rows.split_heads(rate)
    per_mass = EULER / k + torch.lgamma(1.0 + 1.0 / k) - beta.log() + rows.lse.masked_fill(~counting, 0.0)
    per_row = mass * per_mass + log_gammas + beta + visible * (k.log() - EULER - 1.0)
    return (weights * per_row).sum() - cross


def _weighted_keys(
    rows: LinearRows, prior: PriorModule, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, float | Tensor]:
    """Concentrations that do not depend on the row, or not but for the keys that it sees.

    Returns:
        A_i, the sum of Σ_j α_ij φ_ij over the rows that count, Σ_j log Γ(α_ij), and β.
    """
    log_weights = None if rows.scores is None else rows.scores.log_softmax(-1)
    parameters = prior.distribution(log_weights, rows.split_heads)
    if not isinstance(parameters, GammaParameters):
        raise TypeError(f"prior: {prior.spec} must give a Gamma; got {type(parameters).__name__}")
    alpha, rate = parameters
    if rows.scores is not None:
        # One concentration a key; all rows see the same keys.
        alpha = alpha if isinstance(alpha, Tensor) else rows.split_heads(alpha)
        log_gammas = torch.lgamma(alpha.masked_fill(~rows.key_valid(), 1.0)).sum(-1, keepdim=True)
        alpha = alpha * rows.key_weights()
        return alpha.sum(-1, keepdim=True), _cross(rows, alpha, weights).sum(), log_gammas, rate
    alpha = alpha.to(rows.dtype) if isinstance(alpha, Tensor) else rows.split_heads(alpha)
    if rows.start is not None:
        cross = _causal_cross(rows, weights)
    elif rows.rows_left_out or rows.bias is not None:
        cross = _cross(rows, rows.key_weights(), weights)
    else:
        cross = rows.rounded_scale() * (wide_sum(rows.query) * wide_sum(rows.key)).sum(-1)
    visible = rows.visible()
    return alpha * visible, (alpha.squeeze(-1) * cross).sum(), torch.lgamma(alpha) * visible, rate


def _cross(rows: LinearRows, key_weights: Tensor, row_weights: Tensor) -> Tensor:
    """Σ_i Σ_j u_i v_j φ_ij, (…, H), for weights u (…, H, R) and v (…, H, K)."""
    queries, keys = _weighted_sum(row_weights, rows.query), _weighted_sum(key_weights, rows.key)
    cross = rows.rounded_scale() * (queries * keys).sum(-1)
    if rows.bias is not None:
        cross = cross + row_weights.sum(-1) * (key_weights * rows.bias).sum(-1)
    return cross


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Σ_j weights_j values_j, (…, D), float64, of weights (…, N) and values (…, N, D)."""
    return wide_product(weights.to(values.dtype).unsqueeze(-2), values).squeeze(-2)


def _causal_cross(rows: LinearRows, row_weights: Tensor) -> Tensor:
    """Σ_i Σ_j u_i φ_ij, (…, H), over the valid keys that each row sees, for weights u of 0 and 1."""
    start, length = rows.start or 0, rows.query.shape[-2]
    key = rows.key if rows.valid is None else rows.key.masked_fill(~rows.valid.unsqueeze(-1), 0.0)
    query = rows.query
    if rows.rows_left_out:
        query = query.masked_fill(row_weights.unsqueeze(-1) == 0, 0.0)
    cross = rows.rounded_scale() * earlier_dots(query, key[..., start:, :])
    if rows.bias is not None:
        cross = cross + (row_weights * rows.bias[..., start:].cumsum(-1)).sum(-1)
    if start:
        early = rows.narrowed(0, length, start, None)
        cross = cross + _cross(early, early.key_weights(), row_weights)
    return cross


def _causal_contextual(
    rows: LinearRows, prior: PriorModule, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, float | Tensor]:
    """Concentrations β c_ij, c_ij = exp(s_j − Z_i) normalised over the keys that row i sees.

    Returns:
        As of :func:`_weighted_keys`. The clamp of tiny concentrations is left out of A_i and of the
        cross-term, where 1e-30 is nothing, and kept in Σ_j log Γ(α_ij), where it is 69 nats.
    """
    scores, start = rows.scores, rows.start
    if scores is None or start is None:
        raise ValueError("rows: need scores and a start")
    rate = prior.spec.setting("rate")
    log_sums = scores.logcumsumexp(-1)
    log_gammas = log_gamma_prefix_sums(
        scores, log_sums, rows.key_valid(), rate, exact=rows.query.dtype == torch.float64
    )
    finite = log_sums.masked_fill(log_sums < EXCLUDED / 2, 0.0)
    values = rows.key
    if rows.bias is not None:
        # The bias is averaged as one more feature of the keys.
        bias = rows.bias.expand(values.shape[:-1]).to(values.dtype)
        values = torch.cat([values, bias.unsqueeze(-1)], dim=-1)
    if start:
        # The keys that every row sees, and the first row's own, become one key: their mean and total.
        first = finite[..., start : start + 1]
        shares = (scores[..., : start + 1] - first).exp()
        mean = _weighted_sum(shares, values[..., : start + 1, :]).to(values.dtype).unsqueeze(-2)
        values = torch.cat([mean, values[..., start + 1 :, :]], dim=-2)
        scores = torch.cat([log_sums[..., start : start + 1], scores[..., start + 1 :]], dim=-1)
        finite = finite[..., start:]
    means = prefix_means(scores, finite, values)
    logits = double((rows.query * means[..., : rows.query.shape[-1]]).sum(-1)) * rows.rounded_scale()
    if rows.bias is not None:
        logits = logits + means[..., -1]
    mass = torch.full((1, 1), rate, dtype=rows.dtype, device=rows.query.device)
    return mass, rate * (weights * logits).sum(), rows.up_to_row(log_gammas), rate
