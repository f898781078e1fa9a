"""``attend``: stochastic attention in one call, whatever computes it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayesian_attention.checks import at_least
from bayesian_attention.engine import noise, reference
from bayesian_attention.engine.rows import NoiseAddress, log_normalise
from bayesian_attention.names import look_up
from bayesian_attention.numerics import autocast_off, wide
from bayesian_attention.posteriors import Posterior, PosteriorParameter

_BACKENDS = {"auto": None, "reference": None}


class AttentionOutput(NamedTuple):
    """What :func:`attend` returns.

    Attributes:
        output: (…, H, Lq, Dv), or (S, …, H, Lq, Dv) with ``samples=S``; the dtype of ``value``.
        lse: (…, H, Lq), log-sum-exp of the logits without noise, float32 or wider; −∞ for a row that is
            masked throughout.
    """

    output: Tensor
    lse: Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    posterior: Posterior | PosteriorParameter,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    sample: bool = True,
    seed: int | Tensor | None = None,
    sample_index: int | Tensor = 0,
    samples: int | None = None,
    batch_ids: Tensor | None = None,
    query_offset: int | None = None,
    backend: str = "auto",
) -> AttentionOutput:
    """Scaled dot-product attention whose weights are one draw from a posterior.

    The shapes are those of ``torch.nn.functional.scaled_dot_product_attention``, grouped queries included.
    A row that is masked throughout gives output 0 and lse −∞, with gradients of zero. Logits, noise and
    normalisation are computed in float32, or in float64 for float64 input.

    Args:
        query: (…, H, Lq, D), floating point.
        key: (…, Hkv, Lk, D); H is a multiple of Hkv.
        value: (…, Hkv, Lk, Dv).
        posterior: a spec, or the module with the learned spread that ``spec.build(heads)`` makes.
        mask: broadcasts against (…, H, Lq, Lk); boolean (True: attend), or additive, where −9,000 and
            less takes the key out.
        is_causal: a query sees keys up to its own absolute position only.
        scale: factor of the dot products; 1/√D by default.
        sample: draw, or return the posterior mean.
        seed: 64-bit seed of the noise; by default drawn from PyTorch's global generator.
        sample_index: number of the draw under the seed; a tensor (rows,) beside ``batch_ids`` gives each
            batch row its own.
        samples: draw this many, numbered from ``sample_index`` on, stacked in front; the logits are shared.
        batch_ids: int64 (rows,) identities of the batch rows for the noise; by default 0, 1, 2, …
        query_offset: absolute position of the first query; by default Lk − Lq under ``is_causal``, else 0.
        backend: "auto" or "reference".

    Raises:
        ValueError: shapes, dtypes or names that do not fit; the message names the argument.
    """
    look_up("backend", backend, _BACKENDS)
    if not isinstance(posterior, (Posterior, PosteriorParameter)):
        raise TypeError(
            f"posterior: must be a posterior such as Weibull(), or what its build() makes; got {posterior!r}"
        )
    _check(query, key, value, mask)
    spec, parameter = (
        (posterior, posterior.parameter) if isinstance(posterior, Posterior) else (posterior.spec, posterior())
    )
    if isinstance(parameter, Tensor) and parameter.numel() != query.shape[-3]:
        raise ValueError(f"posterior: has {parameter.numel()} heads, query has {query.shape[-3]}")
    if samples is not None:
        samples = at_least("attend", "samples", samples, 1)
    if batch_ids is not None and not isinstance(batch_ids, Tensor):
        raise TypeError(f"batch_ids: must be a tensor of integers; got {type(batch_ids).__name__}")
    if query_offset is None:
        query_offset = key.shape[-2] - query.shape[-2] if is_causal else 0
    if sample and spec.stochastic and seed is None:
        seed = noise.new_seed()
    sample_index = noise.integer("sample_index", sample_index)
    with autocast_off(query):
        logits, rows = reference.dense_logits(
            query,
            key,
            mask=mask,
            is_causal=is_causal,
            scale=scale,
            query_offset=query_offset,
        )
        _, lse = log_normalise(logits, rows)
        groups = query.shape[-3] // key.shape[-3]
        values = wide(value).repeat_interleave(groups, dim=-3) if groups > 1 else wide(value)

        def draw(index: int | Tensor) -> Tensor:
            address = NoiseAddress(seed, index, batch_ids) if sample and seed is not None else None
            weights = reference.log_weights(logits, rows, spec, parameter, address).exp()
            return (weights @ values).to(value.dtype)

        if samples is None:
            output = draw(sample_index)
        else:
            output = torch.stack([draw(sample_index + number) for number in range(samples)])
    return AttentionOutput(output, lse.squeeze(-1))


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Refuse shapes and dtypes that do not fit, by the name of the argument."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested:
            raise ValueError(f"{name}: nested tensors are not supported; pad and pass a mask")
        if not x.is_floating_point():
            raise ValueError(f"{name}: must be floating point; got {x.dtype}")
        if x.dim() < 3:
            raise ValueError(f"{name}: must have shape (…, heads, length, features); got {tuple(x.shape)}")
    for name, x in (("key", key), ("value", value)):
        if (x.dtype == torch.float64) != (query.dtype == torch.float64):
            raise ValueError(f"{name}: {x.dtype} does not go with query's {query.dtype}; float64 is for all or none")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: has {key.shape[-1]} features, query has {query.shape[-1]}")
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"value: shape {tuple(value.shape)} does not fit key's {tuple(key.shape)}")
    if key.shape[:-3] != query.shape[:-3]:
        raise ValueError(f"key: batch shape {tuple(key.shape[:-3])} is not query's {tuple(query.shape[:-3])}")
    if key.shape[-3] == 0 or query.shape[-3] % key.shape[-3]:
        raise ValueError(f"key: {key.shape[-3]} heads do not divide query's {query.shape[-3]}")
    if mask is None:
        return
    shape = (*query.shape[:-1], key.shape[-2])
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"mask: must be boolean or floating point; got {mask.dtype}")
    try:
        fits = torch.broadcast_shapes(mask.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"mask: shape {tuple(mask.shape)} does not broadcast to {tuple(shape)}")
