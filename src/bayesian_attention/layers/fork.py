"""One tensor with two readers whose gradients meet without a third tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, own: Tensor | None, other: Tensor | None) -> Tensor | None:
        if own is None or other is None:
            return own if other is None else other
        return own + other if torch.is_grad_enabled() else own.add_(other)


def fork(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors equal to ``x``; the gradient of the second is added to that of the first in place.

    Autograd itself would add them up in new memory, the whole of it while the gradients of all inputs of the
    attention are still there. Only for a first reader whose gradient nobody else holds, as that of a fused
    attention operator.
    """
    # A compiler plans the memory of gradients itself.
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return x, x
    own, other = _Fork.apply(x)
    return own, other
