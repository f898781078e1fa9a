"""One tensor that attention and the divergence read, whose gradients meet without a third tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Outer products that a :class:`Port` takes.
PORT_RANK = 3


class Port(NamedTuple):
    """Where a reader leaves its gradient by x, (…, N, D), as (x − centre) square + weightsᵀ features.

    Zeros, from which nothing is to be read: a function takes them as inputs and returns, as their gradients, the
    factors. They are small, and the product is taken where the other gradient of x already is, so that there
    is never a second one. For one reader: the products of sums are no sums of products.

    Attributes:
        square: (…, D, D).
        centre: (…, 1, D).
        weights: (…, PORT_RANK, N).
        features: (…, PORT_RANK, D).
    """

    square: Tensor
    centre: Tensor
    weights: Tensor
    features: Tensor


class Fork(NamedTuple):
    """What :func:`fork` returns.

    Attributes:
        own: ``x`` for the first reader.
        other: ``x`` for the second.
        port: for a part of the second reader's gradient; None where no gradient is wanted.
    """

    own: Tensor
    other: Tensor
    port: Port | None


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        *batch, length, features = x.shape
        shapes = (features, features), (1, features), (PORT_RANK, length), (PORT_RANK, features)
        return x.view_as(x), x.view_as(x), *(x.new_zeros(()).expand(*batch, *shape) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, own: Tensor | None, other: Tensor | None, *port: Tensor | None) -> Tensor | None:
        # An expanded gradient has no memory to add to.
        in_place = own is not None and own.is_contiguous() and not torch.is_grad_enabled()
        if own is None or other is None:
            grad = own if other is None else other
        else:
            grad = own.add_(other) if in_place else own + other
        square, centre, weights, features = port
        if square is None or centre is None or weights is None or features is None:
            return grad
        (x,) = ctx.saved_tensors
        message = Port(square, centre, weights, features)
        if grad is None or not in_place:
            added = (x - centre) @ square + weights.transpose(-1, -2) @ features
            return added if grad is None else grad + added
        _add_head_by_head(grad, x, message)
        return grad


def _add_head_by_head(grad: Tensor, x: Tensor, port: Port) -> None:
    """Add what was left at the port in place."""
    flat = [part.reshape(-1, *part.shape[-2:]) for part in (x, *port)]
    for total, own, *parts in zip(grad.view(-1, *grad.shape[-2:]), *flat, strict=True):
        square, centre, weights, features = parts
        total.addmm_(own - centre, square).addmm_(weights.T, features)


def fork(x: Tensor) -> Fork:
    """Two tensors equal to ``x``; the gradient of the second is added to that of the first in place.

    Autograd itself would add them up in new memory, the whole of it while the gradients of all inputs of the
    attention are still there. Only for a first reader whose gradient nobody else holds, as that of a fused
    attention operator.

    Args:
        x: (…, N, D).
    """
    # A compiler plans the memory of gradients itself.
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return Fork(x, x, None)
    own, other, *port = _Fork.apply(x)
    return Fork(own, other, Port(*port))
