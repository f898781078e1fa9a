"""Refusing tensors that do not fit together, by the name of the argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_inputs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Refuse types, devices, dtypes and shapes that do not fit, by the name of the argument."""
    given = {"query": query, "key": key, "value": value} | ({} if mask is None else {"mask": mask})
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: must be a tensor; got {type(x).__name__}")
        # Compiled loops read memory by its address: on another device it is not the tensor's.
        if x.device != query.device:
            raise ValueError(f"{name}: is on {x.device}, query is on {query.device}")
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
    if 0 in (key.shape[-3], query.shape[-3]) or query.shape[-3] % key.shape[-3]:
        raise ValueError(f"key: {key.shape[-3]} heads do not divide query's {query.shape[-3]}")
    if mask is None:
        return
    shape = (*query.shape[:-1], key.shape[-2])
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"mask: must be boolean or floating point; got {mask.dtype}")
    _require_broadcast("mask", mask, shape)


def checked_queries(query_valid: Tensor | None, query: Tensor) -> Tensor | None:
    """``query_valid`` with one dimension at least, if it is a boolean mask over the rows of ``query``."""
    if query_valid is None:
        return None
    if query_valid.dtype != torch.bool or query_valid.device != query.device:
        raise ValueError(
            f"query_valid: must be boolean and on {query.device}; got {query_valid.dtype} on {query_valid.device}"
        )
    _require_broadcast("query_valid", query_valid, query.shape[:-1])
    return query_valid.view(1) if query_valid.dim() == 0 else query_valid


def _require_broadcast(name: str, x: Tensor, shape: Sequence[int]) -> None:
    """Refuse what does not broadcast to ``shape``, or would enlarge it."""
    try:
        fits = torch.broadcast_shapes(x.shape, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: shape {tuple(x.shape)} does not broadcast to {tuple(shape)}")
