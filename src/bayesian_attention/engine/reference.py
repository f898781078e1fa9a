"""The float-exact backend: plain tensor algebra over all entries, in float32 or wider.

It keeps several tensors of the size of the logits. Other backends are measured against it, and what needs
dense weights (plots, returned attention, graphs) comes from here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesian_attention.engine.rows import DenseRows, NoiseAddress, Rows, log_normalise
from bayesian_attention.numerics import wide
from bayesian_attention.posteriors import Posterior

#: An additive mask of this or less takes the key out, as −∞ does. Models write −10,000,
#: which bfloat16 rounds to −9,984.
MASKED_BELOW = -9e3


def dense_logits(
    query: Tensor, key: Tensor, *, mask: Tensor | None, is_causal: bool, scale: float | None, query_offset: int
) -> tuple[Tensor, DenseRows]:
    """Logits and rows of dense attention.

    Args:
        query: (…, H, Lq, D).
        key: (…, Hkv, Lk, D) with H a multiple of Hkv.
        mask: boolean (True: attend) or additive, broadcasting against (…, H, Lq, Lk).
        is_causal: keep a key only up to the absolute position of the query.
        scale: factor of the dot products; 1/√D by default.
        query_offset: absolute position of the first query.

    Returns:
        Logits (…, H, Lq, Lk), finite wherever the inputs are, and the rows. Masked entries hold the plain
        logit; the rows' mask is what excludes them.
    """
    if scale is None:
        scale = 1 / math.sqrt(max(query.shape[-1], 1))
    groups = query.shape[-3] // key.shape[-3]
    keys = wide(key).repeat_interleave(groups, dim=-3) if groups > 1 else wide(key)
    logits = (wide(query) * scale) @ keys.transpose(-1, -2)
    valid: Tensor | None = None
    if mask is not None and mask.dtype == torch.bool:
        valid = mask
    elif mask is not None:
        valid = ~(mask <= MASKED_BELOW)  # NaN stays, to be seen in the output
        logits = logits + mask.masked_fill(~valid, 0.0).to(logits.dtype)
    if is_causal:
        rows = torch.arange(query.shape[-2], device=query.device).unsqueeze(-1) + query_offset
        causal = torch.arange(key.shape[-2], device=query.device) <= rows
        valid = causal if valid is None else valid & causal
    return logits, DenseRows(valid, query_offset)


def log_weights(
    logits: Tensor,
    rows: Rows,
    posterior: Posterior,
    parameter: float | Tensor,
    address: NoiseAddress | None,
) -> Tensor:
    """Normalised log weights of one posterior draw, or of the mean.

    Args:
        logits: one an entry, float32 or wider.
        rows: what a row is.
        posterior: the family.
        parameter: its spread, a number or a tensor (H,).
        address: of the noise; None for the posterior mean, the softmax.

    Returns:
        Log weights of the shape of ``logits``; −∞ where masked.
    """
    if address is not None and posterior.stochastic:
        spread = rows.heads_over_entries(parameter) if isinstance(parameter, Tensor) else parameter
        logits = logits + posterior.log_noise(rows.uniform(address, logits), spread)
    return log_normalise(logits, rows)[0]
