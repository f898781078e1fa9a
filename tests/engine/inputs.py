"""Tensors for tests of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesian_attention.posteriors import LogNormal, Weibull

FAMILIES = [Weibull(2.0), LogNormal(0.7)]
LEARNED = [Weibull(2.0, learned=True), LogNormal(0.7, learned=True)]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_mask(*shape: int, seed: int = 7) -> Tensor:
    """Boolean; no row is masked throughout."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[..., 0] = True
    return mask


def qkv(
    batch: tuple[int, ...] = (2,),
    heads: int = 4,
    kv_heads: int | None = None,
    queries: int = 5,
    keys: int = 7,
    features: int = 8,
    values: int = 8,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = kv_heads or heads
    return (
        randn(*batch, heads, queries, features, seed=1, dtype=dtype),
        randn(*batch, kv_heads, keys, features, seed=2, dtype=dtype),
        randn(*batch, kv_heads, keys, values, seed=3, dtype=dtype),
    )
