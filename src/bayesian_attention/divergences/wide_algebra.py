"""Sums over many rows in double precision, without keeping double-precision copies for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def double_of(x: Tensor) -> torch.dtype:
    """float64, or float32 on a device that has no float64."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def double(x: Tensor) -> Tensor:
    """``x`` in :func:`double_of`."""
    return x.to(double_of(x))


def wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Product a @ b, accumulated in float64; the gradients are computed in the narrower of the two dtypes.

    A sum over thousands of keys cancels and wants float64; each of its gradients is a single product or a
    short sum, which float32 serves as well as it serves the logits.

    Args:
        a: (…, M, N), float32 or float64.
        b: (…, N, P), of the same batch shape as ``a``.

    Returns:
        (…, M, P), float64.
    """
    return _WideMatmul.apply(a, b)


def gram(x: Tensor) -> Tensor:
    """Product xᵀx, accumulated in float64; the gradient is computed in the dtype of ``x``.

    Args:
        x: (…, N, D), float32 or float64.

    Returns:
        (…, D, D), float64.
    """
    return _Gram.apply(x)


def wide_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension but one, in float64."""
    return x.sum(-2, dtype=double_of(x))


class _WideMatmul(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return double(a) @ double(b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        dtype = _narrower(a, b)
        grad = grad.to(dtype)
        grad_a = (grad @ b.to(dtype).transpose(-1, -2)).to(a.dtype) if ctx.needs_input_grad[0] else None
        grad_b = (a.to(dtype).transpose(-1, -2) @ grad).to(b.dtype) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b


class _Gram(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        x = double(x)
        return x.transpose(-1, -2) @ x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x @ (grad + grad.transpose(-1, -2)).to(x.dtype)


def _narrower(a: Tensor, b: Tensor) -> torch.dtype:
    return b.dtype if a.dtype == torch.float64 else a.dtype
