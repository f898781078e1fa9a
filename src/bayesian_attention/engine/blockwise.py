"""The blockwise backend: stochastic attention in linear memory, on any device.

Forward and backward pass go over blocks of query rows with all their keys. The dot products of a block are matrix
products of PyTorch; what happens to its entries (noise, perturbed weights, row sums, gradients) is one step, done by
compiled loops on the CPU (:mod:`native`) and by tensor operations elsewhere (:mod:`elementwise`). The backward pass
recomputes logits and noise, so nothing of the size queries × keys is ever whole, or kept.

Both functions work on plain tensors and are not differentiable; :mod:`operators` joins them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bayesian_attention.engine import elementwise, native
from bayesian_attention.engine.elementwise import Elementwise, Place, Problem, RowSums
from bayesian_attention.numerics import wide

#: Entries of a block of logits. Two or three blocks of this size (in float32) stay in the cache of a processor.
BLOCK_ENTRIES = 1 << 19
#: Rows a matrix product should have at least, however long they are.
_LEAST_ROWS = 64


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    spread: Tensor,
    mask: Tensor | None,
    *,
    family: str,
    scale: float,
    is_causal: bool,
    query_offset: int,
    block_entries: int | None = None,
    compiled: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention under one or several draws of the weights.

    Args:
        query: (B, H, Lq, D), floating point.
        key: (B, Hkv, Lk, D); H is a multiple of Hkv.
        value: (B, Hkv, Lk, Dv).
        first: int32 (S, B, H, Lq), the first noise word of each row and draw; None for the mean.
        second: the second noise word, of the same shape; None for the mean.
        spread: (H,), float32 or wider.
        mask: None, boolean or additive, four dimensions of size 1 or that of (B, H, Lq, Lk).
        family: "softmax" (the mean), "weibull" or "lognormal".
        scale: factor of the dot products.
        is_causal: a query sees keys up to its own position.
        query_offset: absolute position of the first query.
        block_entries: entries of a block, :data:`BLOCK_ENTRIES` by default.
        compiled: use the compiled loops; by default wherever they can be used.

    Returns:
        Output (S, B, H, Lq, Dv) in the dtype of ``value`` (S = 1 for the mean), log-sum-exp of the clean logits
        (B, H, Lq), and what :func:`backward` needs of each row (2 + S, B, H, Lq), the last two float32 or wider.
    """
    problem = Problem(query, key, first, second, spread, mask, family, scale, is_causal, query_offset)
    work = _Work(problem, query, key, value)
    steps = _elementwise(problem, compiled)
    dv = value.shape[-1]
    # Rows that see no key are in no block.
    fill = torch.zeros if problem.is_causal or problem.keys == 0 else torch.empty
    output = fill((problem.draws, *work.rows, dv), dtype=value.dtype, device=value.device)
    state = work.keys.new_full((2 + problem.draws, *work.rows), -math.inf)
    state[0] = 0.0
    sums = RowSums.of(state, work.rows)
    buffers = _Buffers(work.keys)
    for place in _places(problem, block_entries or BLOCK_ENTRIES):
        shape = (place.chunks, place.rows, place.keys)
        logits = buffers.take(0, shape)
        values = work.values[place.chunk_slice, : place.keys]
        torch.bmm(work.query_rows(place), work.keys[place.chunk_slice, : place.keys].transpose(1, 2), out=logits)
        for draw in range(problem.draws):
            weights = logits if problem.draws == 1 else buffers.take(1, shape)
            inverse = steps.forward(place, draw, logits, weights, sums)
            mixed = torch.bmm(weights, values, out=buffers.take(2, (place.chunks, place.rows, dv)))
            target = output[draw][place.rows_index]
            torch.mul(mixed.view(*place.shape, dv), inverse.view(*place.shape, 1), out=target)
    return (
        output.view(problem.draws, *query.shape[:-1], dv),
        (sums.peak + sums.clean).view(query.shape[:-1]),
        state.view(state.shape[0], *query.shape[:-1]),
    )


def backward(
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
    *,
    family: str,
    scale: float,
    is_causal: bool,
    query_offset: int,
    mask_grad: bool,
    spread_grad: bool,
    block_entries: int | None = None,
    compiled: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of :func:`forward`.

    With w the drawn and p the clean weights, dφ = Σ_draws w (dO·v − dO·O) + dlse p.

    Args:
        grad_output: (S, B, H, Lq, Dv), the dtype of ``output``.
        grad_lse: (B, H, Lq), or None for zero.
        query: as of :func:`forward`, like all that are not described here.
        key: as of forward.
        value: as of forward.
        first: as of forward.
        second: as of forward.
        spread: as of forward.
        mask: as of forward.
        output: what forward returned.
        state: what forward returned.
        family: as of forward.
        scale: as of forward.
        is_causal: as of forward.
        query_offset: as of forward.
        mask_grad: compute the gradient of ``mask``.
        spread_grad: compute the gradient of ``spread``.
        block_entries: as of forward.
        compiled: as of forward.

    Returns:
        Gradients of query, key, value, spread and mask, of their shapes and dtypes; the last two are None where
        not asked for.
    """
    problem = Problem(query, key, first, second, spread, mask, family, scale, is_causal, query_offset)
    work = _Work(problem, query, key, value)
    steps = _elementwise(problem, compiled)
    dv = value.shape[-1]
    grad_out = wide(grad_output).contiguous().view(problem.draws, *work.rows, dv)
    dot = (grad_out * wide(output).view_as(grad_out)).sum(-1)
    grad_query = torch.zeros_like(work.queries)
    grad_key = torch.zeros_like(work.keys)
    grad_value = torch.zeros_like(work.values)
    grad_spread = torch.zeros_like(dot) if spread_grad else None
    grad_mask: Tensor | None = None
    if mask_grad and problem.mask is not None:
        grad_mask = torch.zeros(problem.mask.shape, dtype=state.dtype, device=state.device)
    grad_lse = None if grad_lse is None else grad_lse.contiguous().view(work.rows)
    sums = RowSums.of(state, work.rows)
    buffers = _Buffers(work.keys)
    for place in _places(problem, block_entries or BLOCK_ENTRIES):
        shape = (place.chunks, place.rows, place.keys)
        queries, keys = work.query_rows(place), work.keys[place.chunk_slice, : place.keys]
        values = work.values[place.chunk_slice, : place.keys]
        several = problem.draws > 1
        logits = torch.bmm(queries, keys.transpose(1, 2), out=buffers.take(0, shape))
        grad_logits = buffers.take(3, shape) if several else buffers.take(1, shape)
        for draw in range(problem.draws):
            grad_rows = place.take(grad_out[draw])
            grad_weights = torch.bmm(grad_rows, values.transpose(1, 2), out=buffers.take(1, shape))
            weights = buffers.take(2, shape) if several else logits
            steps.backward(place, draw, logits, grad_weights, weights, grad_logits, sums, dot, grad_lse, grad_spread)
            grad_value[place.chunk_slice, : place.keys].baddbmm_(weights.transpose(1, 2), grad_rows)
        if grad_mask is not None:
            elementwise.add_to_mask(problem, place, grad_logits, grad_mask)
        grad_query[place.rows_index] = torch.bmm(grad_logits, keys).view(*place.shape, -1)
        grad_key[place.chunk_slice, : place.keys].baddbmm_(grad_logits.transpose(1, 2), queries)
    if grad_spread is not None:
        grad_spread = grad_spread.view(problem.draws, *query.shape[:-1]).sum((0, 1, 3)).to(spread.dtype)
    return (
        grad_query.mul_(scale).view(query.shape).to(query.dtype),
        grad_key.mul_(scale).view(key.shape).to(key.dtype),
        grad_value.view(value.shape).to(value.dtype),
        grad_spread,
        None if grad_mask is None or mask is None else grad_mask.view(mask.shape).to(mask.dtype),
    )


class _Work:
    """The inputs, wide and with one dimension for the pairs of batch row and key head."""

    def __init__(self, problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> None:
        #: Shape of what is kept a row: (pairs of batch row and key head, query heads of each, queries).
        self.rows = problem.rows
        self.queries = wide(query).contiguous().view(*self.rows, query.shape[-1])
        self.keys = wide(key).contiguous().view(self.rows[0], *key.shape[2:])
        self.values = wide(value).contiguous().view(self.rows[0], *value.shape[2:])

    def query_rows(self, place: Place) -> Tensor:
        """The queries of a block, (chunks, rows, D)."""
        return place.take(self.queries)


class _Buffers:
    """Blocks of memory that are used again from block to block."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.flat: dict[int, Tensor] = {}

    def take(self, number: int, shape: tuple[int, ...]) -> Tensor:
        """Buffer ``number`` in the given shape, contiguous; what it held is lost if it must grow."""
        size = math.prod(shape)
        if number not in self.flat or self.flat[number].numel() < size:
            self.flat[number] = self.like.new_empty(size)
        return self.flat[number][:size].view(shape)


def _elementwise(problem: Problem, compiled: bool | None) -> Elementwise:
    """The compiled step where it can be used and is wanted, else the one of tensor operations."""
    usable = problem.device.type == "cpu" and problem.dtype == torch.float32
    if compiled is None:
        compiled = usable and native.library() is not None
    if compiled and not (usable and native.library() is not None):
        raise ValueError("compiled: needs float32 (or narrower) tensors on the CPU and a C++ compiler")
    return native.NativeElementwise(problem) if compiled else elementwise.TensorElementwise(problem)


class _Sizes(NamedTuple):
    chunks: int
    groups: int
    queries: int


def _sizes(problem: Problem, entries: int) -> _Sizes:
    """How many pairs of batch row and key head, query heads and queries a block takes."""
    chunks, groups, queries = problem.rows
    # At least a pair a thread: a batched matrix product goes over the pairs in parallel.
    parallel = min(chunks, max(1, torch.get_num_threads()) if problem.device.type == "cpu" else 8)
    rows = max(_LEAST_ROWS, entries // (problem.keys * parallel))
    if queries > rows:
        return _Sizes(_fitting(problem, parallel), 1, rows)
    groups = min(groups, max(1, rows // queries))
    return _Sizes(_fitting(problem, max(parallel, entries // (problem.keys * queries * groups))), groups, queries)


def _fitting(problem: Problem, chunks: int) -> int:
    """``chunks``, changed to a divisor of the key heads or a multiple of them: a block is a rectangle of both."""
    if chunks >= problem.kv_heads:
        return min(chunks // problem.kv_heads * problem.kv_heads, problem.rows[0])
    return max(size for size in range(1, chunks + 1) if problem.kv_heads % size == 0)


def _places(problem: Problem, entries: int) -> Iterator[Place]:
    """The blocks, in a fixed order."""
    chunks, groups, queries = problem.rows
    if 0 in (*problem.rows, problem.keys):
        return
    sizes = _sizes(problem, entries)
    for chunk in range(0, chunks, sizes.chunks):
        for group in range(0, groups, sizes.groups):
            for query in range(0, queries, sizes.queries):
                last = min(query + sizes.queries, queries)
                # Behind the last query of a block, causal attention sees no key.
                keys = min(problem.keys, last + problem.query_offset) if problem.is_causal else problem.keys
                if keys <= 0:
                    continue
                yield Place(
                    chunk,
                    min(sizes.chunks, chunks - chunk),
                    group,
                    min(sizes.groups, groups - group),
                    query,
                    last - query,
                    keys,
                )
