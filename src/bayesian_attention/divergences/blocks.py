"""A sum over blocks of rows that keeps one block in memory at a time, in the backward pass too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bayesian_attention.divergences.dense import Divergence


def sum_over_row_blocks(divergence_of: Callable[[int, int], Divergence], rows: int, block: int) -> Divergence:
    """The divergence of all rows from that of consecutive blocks.

    Of each block only the sum is kept; the backward pass computes the block again. One block alone is
    computed as it is.

    Args:
        divergence_of: the divergence of rows from the first number up to the second, deterministic.
        rows: how many there are.
        block: rows a block, at least 1.
    """
    if rows <= block:
        return divergence_of(0, rows)

    def of_block(first: int) -> tuple[Tensor, Tensor]:
        stop = min(first + block, rows)
        if not torch.is_grad_enabled():
            return divergence_of(first, stop)
        return checkpoint(divergence_of, first, stop, use_reentrant=False, preserve_rng_state=False)

    totals, entries = zip(*(of_block(first) for first in range(0, rows, block)), strict=True)
    return Divergence(torch.stack(totals).sum(), torch.stack(entries).sum())


def rows_in_budget(shape: torch.Size | tuple[int, ...], budget: int = 2**22) -> int:
    """How many rows of logits (…, H, Lq, Lk) fit in a block of about ``budget`` entries, at least 1."""
    per_row = 1
    for size in (*shape[:-2], shape[-1]):
        per_row *= size
    return max(1, budget // max(per_row, 1))
