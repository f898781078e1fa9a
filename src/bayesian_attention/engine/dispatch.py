"""``attend``: stochastic attention in one call, whatever computes it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayesian_attention.checks import at_least
from bayesian_attention.engine import noise, reference
from bayesian_attention.engine.arguments import check_inputs
from bayesian_attention.engine.backends import choose
from bayesian_attention.engine.operators import fused_attention
from bayesian_attention.engine.rows import DenseRows, NoiseAddress, log_normalise
from bayesian_attention.numerics import autocast_off, wide
from bayesian_attention.posteriors import Posterior, PosteriorParameter


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
        backend: "reference", "blockwise", "triton", or "auto", which takes the fastest that takes the call. All
            give the same weights for the same seed. The last two keep nothing of the size Lq × Lk and know
            Softmax, Weibull and LogNormal; the reference takes everything and has higher derivatives.

    Raises:
        ValueError: shapes, dtypes or names that do not fit; the message names the argument.
    """
    spec, spread = _family(posterior)
    check_inputs(query, key, value, mask)
    if isinstance(spread, Tensor) and spread.numel() != query.shape[-3]:
        raise ValueError(f"posterior: has {spread.numel()} heads, query has {query.shape[-3]}")
    backend = choose(backend, spec, query, key, value)
    query_offset = _offset(query_offset, query, key, is_causal)
    addresses = _addresses(spec, sample, seed, sample_index, samples, batch_ids)
    with autocast_off(query):
        if backend == "reference":
            logits, rows = reference.dense_logits(
                query, key, mask=mask, is_causal=is_causal, scale=scale, query_offset=query_offset
            )
            _, lse = log_normalise(logits, rows)
            lse = lse.squeeze(-1)
            groups = query.shape[-3] // key.shape[-3]
            values = wide(value).repeat_interleave(groups, dim=-3) if groups > 1 else wide(value)

            def draw(address: NoiseAddress | None) -> Tensor:
                log_w = reference.log_weights(logits, rows, spec, spread, address)
                return (log_w.exp() @ values).to(value.dtype)

            outputs = torch.stack([draw(address) for address in addresses] or [draw(None)])
        else:
            outputs, lse = fused_attention(
                query,
                key,
                value,
                _words(addresses, query, query_offset),
                spread,
                mask,
                backend=backend,
                family=spec.name,
                scale=scale,
                is_causal=is_causal,
                query_offset=query_offset,
            )
    if samples is None:
        return AttentionOutput(outputs.squeeze(0), lse)
    return AttentionOutput(outputs if addresses else outputs.expand(samples, *outputs.shape[1:]), lse)


def attention_weights(
    query: Tensor,
    key: Tensor,
    posterior: Posterior | PosteriorParameter,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    sample: bool = True,
    seed: int | Tensor | None = None,
    sample_index: int | Tensor = 0,
    batch_ids: Tensor | None = None,
    query_offset: int | None = None,
) -> Tensor:
    """The weights with which :func:`attend` mixes the values, whole: for plots and for models that return them.

    With the same seed they are those of every backend of ``attend``, up to rounding. They are made by the
    reference, in memory of the size Lq × Lk.

    Args:
        query: as of :func:`attend`, like all that follows.
        key: likewise.
        posterior: likewise.
        mask: likewise.
        is_causal: likewise.
        scale: likewise.
        sample: likewise.
        seed: likewise.
        sample_index: likewise.
        batch_ids: likewise.
        query_offset: likewise.

    Returns:
        (…, H, Lq, Lk), float32 or wider; each row sums to 1, or is 0 where it is masked throughout.
    """
    spec, spread = _family(posterior)
    check_inputs(query, key, key, mask)
    if isinstance(spread, Tensor) and spread.numel() != query.shape[-3]:
        raise ValueError(f"posterior: has {spread.numel()} heads, query has {query.shape[-3]}")
    query_offset = _offset(query_offset, query, key, is_causal)
    addresses = _addresses(spec, sample, seed, sample_index, None, batch_ids)
    with autocast_off(query):
        logits, rows = reference.dense_logits(
            query, key, mask=mask, is_causal=is_causal, scale=scale, query_offset=query_offset
        )
        return reference.log_weights(logits, rows, spec, spread, addresses[0] if addresses else None).exp()


def default_query_offset(query: Tensor, key: Tensor, is_causal: bool) -> int:
    """The absolute position of the first query where none is given: under a causal mask queries are the last."""
    return key.shape[-2] - query.shape[-2] if is_causal else 0


def _offset(query_offset: int | None, query: Tensor, key: Tensor, is_causal: bool) -> int:
    """``query_offset`` or its default."""
    if query_offset is None:
        return default_query_offset(query, key, is_causal)
    if not isinstance(query_offset, int | torch.SymInt):
        raise ValueError(f"query_offset: must be an integer; got {query_offset!r}")
    return query_offset


def _family(posterior: Posterior | PosteriorParameter) -> tuple[Posterior, float | Tensor]:
    """Family and spread."""
    if isinstance(posterior, Posterior):
        return posterior, posterior.parameter
    if isinstance(posterior, PosteriorParameter):
        return posterior.spec, posterior()
    raise TypeError(f"posterior: must be a posterior such as Weibull(), or what its build() makes; got {posterior!r}")


def _addresses(
    spec: Posterior,
    sample: bool,
    seed: int | Tensor | None,
    sample_index: int | Tensor,
    samples: int | None,
    batch_ids: Tensor | None,
) -> list[NoiseAddress]:
    """Where the noise of each draw lives; none for the mean."""
    if samples is not None:
        samples = at_least("attend", "samples", samples, 1)
    if batch_ids is not None and not isinstance(batch_ids, Tensor):
        raise TypeError(f"batch_ids: must be a tensor of integers; got {type(batch_ids).__name__}")
    sample_index = noise.integer("sample_index", sample_index)
    if not (sample and spec.stochastic):
        return []
    if seed is None:
        seed = noise.new_seed()
    return [NoiseAddress(seed, sample_index + number, batch_ids) for number in range(samples or 1)]


def _words(addresses: list[NoiseAddress], query: Tensor, query_offset: int) -> tuple[Tensor, Tensor] | None:
    """The noise words of every row and draw, int32 (S, …, H, Lq) each."""
    if not addresses:
        return None
    rows = DenseRows(query_offset=query_offset)
    drawn = [rows.words(address, query.shape[:-1], query.device) for address in addresses]
    if len(drawn) == 1:
        return drawn[0].first.unsqueeze(0), drawn[0].second.unsqueeze(0)
    return torch.stack([words.first for words in drawn]), torch.stack([words.second for words in drawn])
