"""Sums over many rows: blocks in the dtype of the input, the blocks added up in float64.

A sum over thousands of rows cancels and wants float64; converting all its terms would take longer than
adding them up. A short block rounds no worse than a single logit does. Each gradient of such a sum is one
product or a short sum, which the dtype of the input serves as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Rows in a block of a sum or of a product of weights and features: equal terms, which all round alike, are
#: common there, so that it is short.
_SHORT = 16

#: Rows in a block of a product of features and features.
_LONG = 256


def double_of(x: Tensor) -> torch.dtype:
    """float64, or float32 on a device that has no float64."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def double(x: Tensor) -> Tensor:
    """``x`` in :func:`double_of`."""
    return x.to(double_of(x))


def wide_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension but one.

    Args:
        x: (…, N, D), float32 or float64.

    Returns:
        (…, D), float64.
    """
    return _sum(x) if torch.compiler.is_compiling() else _WideSum.apply(x)


def wide_product(weights: Tensor, x: Tensor) -> Tensor:
    """Product of weights and x, a sum over rows.

    Args:
        weights: (…, E, N), float32 or float64, E small.
        x: (…, N, D), of the batch shape and dtype of ``weights``.

    Returns:
        (…, E, D), float64.
    """
    return plain_product(weights, x) if torch.compiler.is_compiling() else _WideProduct.apply(weights, x)


# What follows is written once with plain operations, which compilers differentiate and fuse, and once more
# with its gradient, which spares eager mode the copies that the gradients of slices are.


def _blocks(x: Tensor, size: int) -> list[Tensor]:
    """(…, N, D) → whole blocks (…, n, size, D) and the rows that are left (…, 1, r, D), unless there are none."""
    length = x.shape[-2]
    whole = length // size * size
    if x.dtype == torch.float64 or whole == 0:
        return [x.unsqueeze(-3)]
    if whole == length:
        return [x.unflatten(-2, (-1, size))]
    return [x[..., :whole, :].unflatten(-2, (-1, size)), x[..., whole:, :].unsqueeze(-3)]


def _added(sums: list[Tensor]) -> Tensor:
    """Sums of blocks, each (…, n, P, Q), added up in float64."""
    first, *rest = (x.sum(-3, dtype=double_of(x)) if x.shape[-3] > 1 else double(x.squeeze(-3)) for x in sums)
    return first + rest[0] if rest else first


def _sum(x: Tensor) -> Tensor:
    return _added([block.sum(-2, keepdim=True) for block in _blocks(x, _SHORT)]).squeeze(-2)


def plain_product(weights: Tensor, x: Tensor) -> Tensor:
    """:func:`wide_product` of plain operations."""
    blocks = zip(_blocks(weights.transpose(-1, -2), _SHORT), _blocks(x, _SHORT), strict=True)
    return _added([block.transpose(-1, -2) @ other for block, other in blocks])


def gram(x: Tensor) -> Tensor:
    """Product xᵀx, a sum over rows, of plain operations.

    Args:
        x: (…, N, D), float32 or float64.

    Returns:
        (…, D, D), float64.
    """
    return _added([block.transpose(-1, -2) @ block for block in _blocks(x, _LONG)])


class _WideSum(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _sum(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.like = inputs[0].shape, inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return grad.to(dtype).unsqueeze(-2).expand(shape)


class _WideProduct(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weights: Tensor, x: Tensor) -> Tensor:
        return plain_product(weights, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weights, x = ctx.saved_tensors
        grad = grad.to(x.dtype)
        grad_weights = grad @ x.transpose(-1, -2) if ctx.needs_input_grad[0] else None
        grad_x = weights.transpose(-1, -2) @ grad if ctx.needs_input_grad[1] else None
        return grad_weights, grad_x
