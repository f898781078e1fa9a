"""Divergence of dense attention in time and memory linear in the numbers of queries and keys."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from bayesian_attention.divergences.dense import Divergence
from bayesian_attention.divergences.fork import Port
from bayesian_attention.divergences.linear_lognormal import lognormal_lognormal_rows
from bayesian_attention.divergences.linear_rows import LinearRows
from bayesian_attention.divergences.linear_weibull import weibull_gamma_rows
from bayesian_attention.divergences.prefix import shifted_scores
from bayesian_attention.divergences.wide_algebra import double
from bayesian_attention.numerics import autocast_off, wide
from bayesian_attention.posteriors import LogNormal, Posterior, Weibull
from bayesian_attention.priors import PriorModule
from bayesian_attention.priors.constant import ConstantPriorModule
from bayesian_attention.priors.contextual import ContextualPriorModule
from bayesian_attention.priors.learned import LearnedPriorModule

_FAMILIES = {Weibull: ("gamma", weibull_gamma_rows), LogNormal: ("lognormal", lognormal_lognormal_rows)}
_PRIORS = (ConstantPriorModule, LearnedPriorModule, ContextualPriorModule)


def has_linear_form(posterior: Posterior, prior: PriorModule, *, is_causal: bool) -> bool:
    """Whether :func:`linear_divergence` knows the pair.

    Subclasses may change what the formulas rest on, so only the library's own classes count. Under a causal
    mask a contextual prior beneath a Weibull must have a rate of at most 1.
    """
    family = _FAMILIES.get(type(posterior))
    if family is None or prior.family != family[0] or type(prior) not in _PRIORS:
        return False
    causal_gamma = is_causal and prior.needs_keys and prior.family == "gamma"
    return not causal_gamma or prior.spec.setting("rate") <= 1.0


def key_mask(mask: Tensor | None, masked_below: float) -> tuple[Tensor | None, Tensor | None] | None:
    """A mask over the keys alone, taken apart.

    Decided by shape and strides, never by the values, which a device would have to be waited for: a mask
    that is expanded over the queries counts as one over the keys.

    Args:
        mask: boolean (True: attend) or additive, broadcasts against (…, H, Lq, Lk).
        masked_below: an additive mask of this or less takes the key out.

    Returns:
        The valid keys and the bias of the others, each None or broadcasting against (…, H, Lk); None where
        the mask differs from query to query.
    """
    if mask is None:
        return None, None
    if mask.dim() > 1:
        if mask.shape[-2] == 0:
            return None, None
        if mask.shape[-2] != 1 and mask.stride(-2) != 0:
            return None
        mask = mask.select(-2, 0)
    if mask.dtype == torch.bool:
        return mask, None
    valid = ~(mask <= masked_below)
    return valid, mask.masked_fill(~valid, 0.0)


def linear_divergence(
    posterior: Posterior,
    spread: float | Tensor,
    prior: PriorModule,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    scale: float | None = None,
    valid: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    query_offset: int = 0,
    query_valid: Tensor | None = None,
    ports: tuple[Port, Port] | None = None,
) -> Divergence | None:
    """The sum of all entries' divergences, from what is linear in the numbers of queries and keys.

    The value and its gradients are those of the sum over entries; sums that cancel run in float64. It
    takes ``lse`` for what it is, the log-sum-exp of the logits, and uses that the mean weights of a row sum
    to 1: its derivative by ``lse`` alone has no meaning.

    Args:
        posterior: the family.
        spread: of the posterior, a number or (H,).
        prior: the prior.
        query: (…, H, Lq, D), floating point.
        key: (…, Hkv, Lk, D) with H a multiple of Hkv.
        lse: (…, H, Lq), log-sum-exp of the logits without noise, bias included; −∞ for a row without a
            valid key. float32 or wider.
        scale: factor of the dot products; 1/√D by default.
        valid: boolean, broadcasts against (…, H, Lk); None: all keys.
        bias: added to the logits, broadcasts against (…, H, Lk); None: 0.
        is_causal: query i sees keys j ≤ i + ``query_offset`` only.
        query_offset: absolute position of the first query.
        query_valid: boolean, broadcasts against (…, H, Lq): the queries that count; None: all.
        ports: of ``query`` and of ``key``, as of :func:`fork`, for such gradients as are large; None: none.

    Returns:
        The divergence in float32, or in float64 for float64 input; None where there is no linear form.
    """
    if not has_linear_form(posterior, prior, is_causal=is_causal):
        return None
    with autocast_off(query):
        rows = _rows(prior, query, key, lse, scale, valid, bias, query_valid)
        if rows.query is query and rows.key is key:
            rows = replace(rows, ports=ports)
        pieces = _causal_pieces(rows, query_offset) if is_causal else [rows]
        pieces = [piece for piece in pieces if piece.query.shape[-2] and piece.key.shape[-2]]
        entries = torch.zeros((), dtype=torch.int64, device=query.device)
        total = entries.to(rows.dtype)
        if not pieces:
            # Sums of nothing, so that a loss of this alone can be differentiated.
            total = total + query[..., :0].sum() + key[..., :0].sum() + lse[..., :0].sum()
        total_of = _FAMILIES[type(posterior)][1]
        for piece in pieces:
            total = total + total_of(piece, spread, prior)
            visible = piece.visible()
            entries = entries + (piece.counting(visible) * visible).sum()
        dtype = wide(lse).dtype
        return Divergence(total.to(dtype), entries.to(dtype))


def _rows(
    prior: PriorModule,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    scale: float | None,
    valid: Tensor | None,
    bias: Tensor | None,
    query_valid: Tensor | None,
) -> LinearRows:
    """All rows, every key visible to each."""
    groups = query.shape[-3] // key.shape[-3]
    query, key = wide(query), wide(key)
    scores: Tensor | None = None
    if isinstance(prior, ContextualPriorModule):
        # One network for all heads gives the heads of a group the same scores.
        shared = prior.score_weight.shape[0] == 1
        scores = prior.scores(key if shared else _repeated(key, groups, -3))
        scores = _repeated(scores, groups, -2) if shared else scores
    key = _repeated(key, groups, -3)
    if valid is not None:
        valid = _with_keys(valid, key)
    if bias is not None:
        bias = double(_with_keys(bias, key))
        bias = bias if valid is None else bias.masked_fill(~valid, 0.0)
    return LinearRows(
        query,
        key,
        double(lse),
        1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale,
        valid=valid,
        bias=bias,
        counted=None if query_valid is None else query_valid.expand(lse.shape),
        scores=scores if scores is None or key.shape[-2] == 0 else shifted_scores(scores, valid),
    )


def _causal_pieces(rows: LinearRows, offset: int) -> list[LinearRows]:
    """Rows that see one more key each, and rows that all see the same; rows that see none are left out."""
    queries, keys = rows.query.shape[-2], rows.key.shape[-2]
    first = max(0, -offset)
    start = first + offset
    if first >= queries or keys == 0:
        return []
    if start >= keys - 1 or first == queries - 1:
        return [rows.narrowed(first, queries, min(start + 1, keys), None)]
    stop = min(queries, first + keys - start)
    pieces = [rows.narrowed(first, stop, start + stop - first, start)]
    if stop < queries:
        pieces.append(rows.narrowed(stop, queries, keys, None))
    return pieces


def _repeated(x: Tensor, groups: int, dim: int) -> Tensor:
    return x.repeat_interleave(groups, dim=dim) if groups > 1 else x


def _with_keys(x: Tensor, key: Tensor) -> Tensor:
    """``x`` with its last dimension expanded to the number of keys."""
    return x.expand(*x.shape[:-1], key.shape[-2])
