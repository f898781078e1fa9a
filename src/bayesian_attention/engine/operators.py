"""The blockwise and Triton backends as differentiable PyTorch operators.

Custom operators are opaque to ``torch.compile``, which therefore captures attention in one graph, and they carry
their own gradient. They take four-dimensional tensors and the noise words of every row; what a user passes is turned
into that by :func:`fused_attention`.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor

from bayesian_attention.engine import blockwise

_FORWARD = "bayesian_attention::attention_forward"
_BACKWARD = "bayesian_attention::attention_backward"

#: Numbers that both backends keep a row, beside one a draw: the peak of the clean logits and their sum over it.
_STATE_ROWS = 2


def _implementation(backend: str) -> Any:
    """The module of a backend. Triton is imported when a kernel is first wanted."""
    if backend == "blockwise":
        return blockwise
    return importlib.import_module("bayesian_attention.engine.triton_kernel")


@torch.library.custom_op(_FORWARD, mutates_args=())
def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    spread: Tensor,
    mask: Tensor | None,
    backend: str,
    family: str,
    scale: float,
    is_causal: bool,
    query_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and what the backward pass needs; see the ``forward`` of the backend's module."""
    return _implementation(backend).forward(
        query, key, value, first, second, spread, mask,
        family=family, scale=scale, is_causal=is_causal, query_offset=query_offset,
    )  # fmt: skip


@attention_forward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    spread: Tensor,
    mask: Tensor | None,
    backend: str,
    family: str,
    scale: float,
    is_causal: bool,
    query_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and dtypes of :func:`attention_forward`."""
    draws, rows = 1 if first is None else first.shape[0], query.shape[:-1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    return (
        value.new_empty((draws, *rows, value.shape[-1])),
        query.new_empty(rows, dtype=dtype),
        query.new_empty((draws + _STATE_ROWS, *rows), dtype=dtype),
    )


@torch.library.custom_op(_BACKWARD, mutates_args=())
def attention_backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    spread: Tensor,
    mask: Tensor | None,
    output: Tensor,
    state: Tensor,
    backend: str,
    family: str,
    scale: float,
    is_causal: bool,
    query_offset: int,
    mask_grad: bool,
    spread_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients; see the ``backward`` of the backend's module. One not asked for is empty."""
    *inputs, grad_spread, grad_mask = _implementation(backend).backward(
        grad_output, grad_lse, query, key, value, first, second, spread, mask, output, state,
        family=family, scale=scale, is_causal=is_causal, query_offset=query_offset,
        mask_grad=mask_grad, spread_grad=spread_grad,
    )  # fmt: skip
    grad_query, grad_key, grad_value = inputs
    empty = state.new_empty(0)
    return (
        grad_query,
        grad_key,
        grad_value,
        empty if grad_spread is None else grad_spread,
        empty.clone() if grad_mask is None else grad_mask,
    )


@attention_backward.register_fake
def _(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    spread: Tensor,
    mask: Tensor | None,
    output: Tensor,
    state: Tensor,
    backend: str,
    family: str,
    scale: float,
    is_causal: bool,
    query_offset: int,
    mask_grad: bool,
    spread_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Shapes and dtypes of :func:`attention_backward`."""
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        spread.new_empty(spread.shape) if spread_grad else state.new_empty(0),
        mask.new_empty(mask.shape) if mask_grad and mask is not None else state.new_empty(0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Keep what the backward pass needs: nothing of the size queries × keys."""
    query, key, value, first, second, spread, mask, *settings = inputs
    outputs, _, state = output
    ctx.save_for_backward(query, key, value, first, second, spread, mask, outputs, state)
    ctx.settings = settings
    # A log-sum-exp that nobody used costs no exponentials.
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, grad_state: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments. The state never leaves this module, so it has none."""
    query, key, value, first, second, spread, mask, output, state = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    spread_grad = ctx.needs_input_grad[5]
    mask_grad = mask is not None and ctx.needs_input_grad[6]
    grads = attention_backward(
        grad_output, grad_lse, query, key, value, first, second, spread, mask, output, state,
        *ctx.settings, mask_grad, spread_grad,
    )  # fmt: skip
    grad_query, grad_key, grad_value, grad_spread, grad_mask = grads
    return (
        grad_query,
        grad_key,
        grad_value,
        None,
        None,
        grad_spread if spread_grad else None,
        grad_mask if mask_grad else None,
        *(None,) * 5,
    )


def _refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Say which backend has one."""
    raise NotImplementedError(
        "backend: the blockwise and Triton backends have no second derivative; backend='reference' has one"
    )


attention_forward.register_autograd(_backward, setup_context=_save)
attention_backward.register_autograd(_refuse_second_derivative)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    words: tuple[Tensor, Tensor] | None,
    spread: float | Tensor,
    mask: Tensor | None,
    *,
    backend: str,
    family: str,
    scale: float | None,
    is_causal: bool,
    query_offset: int,
) -> tuple[Tensor, Tensor]:
    """Attention under one or several draws, or under the mean, by a fused backend.

    Args:
        query: (…, H, Lq, D).
        key: (…, Hkv, Lk, D).
        value: (…, Hkv, Lk, Dv).
        words: the two noise words of every row, int32 (S, …, H, Lq) each; None for the mean.
        spread: a number or (H,).
        mask: broadcasts against (…, H, Lq, Lk), boolean or additive.
        backend: "blockwise" or "triton".
        family: "weibull", "lognormal" or "softmax".
        scale: factor of the dot products; 1/√D by default.
        is_causal: as of ``attend``.
        query_offset: as of ``attend``.

    Returns:
        Output (S, …, H, Lq, Dv), S = 1 for the mean, and log-sum-exp of the clean logits (…, H, Lq).
    """
    leading = query.shape[:-3]
    heads, queries = query.shape[-3:-1]
    if len(leading) != 1:
        query, key, value = (_one_batch(x) for x in (query, key, value))
    if mask is not None:
        mask = _four_dimensions(mask, leading)
    dtype = torch.promote_types(query.dtype, torch.float32)
    if isinstance(spread, Tensor):
        spread = spread.to(dtype).expand(heads)
    else:
        spread = torch.full((heads,), spread, dtype=dtype, device=query.device)
    first, second = (None, None) if words is None else (word.view(len(word), *query.shape[:-1]) for word in words)
    output, lse, _ = attention_forward(
        query,
        key,
        value,
        first,
        second,
        spread,
        mask,
        backend,
        family if words is not None else "softmax",
        1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else float(scale),
        is_causal,
        query_offset,
    )
    if len(leading) != 1:
        output = output.view(len(output), *leading, heads, queries, value.shape[-1])
        lse = lse.view(*leading, heads, queries)
    return output, lse


def _one_batch(x: Tensor) -> Tensor:
    """(…, H, L, D) → (B, H, L, D)."""
    return x.unsqueeze(0) if x.dim() == 3 else x.flatten(0, -4)


def _four_dimensions(mask: Tensor, leading: torch.Size) -> Tensor:
    """A mask that broadcasts against (…, H, Lq, Lk) as (B or 1, H or 1, Lq or 1, Lk or 1)."""
    inner = min(mask.dim(), 3)
    outer = mask.shape[: mask.dim() - inner]
    mask = mask.view(*outer, *(1,) * (3 - inner), *mask.shape[mask.dim() - inner :])
    if len(leading) == 1 and outer:
        return mask
    if all(size == 1 for size in outer):
        return mask.view(1, *mask.shape[-3:])
    return mask.expand(*leading, -1, -1, -1).flatten(0, -4)
