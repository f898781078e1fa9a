"""Parameters of a divergence that many entries share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def as_tensor(x: float | Tensor, like: Tensor) -> Tensor:
    """A number as a tensor of no dimensions, so that it stays a constant of the expression."""
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=like.dtype, device=like.device)


def shape_of(parameters: Iterable[float | Tensor]) -> torch.Size:
    """The shape to which the parameters broadcast."""
    return torch.broadcast_shapes(*(x.shape for x in parameters if isinstance(x, Tensor)))


def sum_of_alike(entries: Tensor, shape: torch.Size) -> Tensor:
    """Sum over all entries that share one value of a tensor of ``shape``, which broadcasts against them."""
    return entries.sum_to_size(shape) if shape else entries.sum()
