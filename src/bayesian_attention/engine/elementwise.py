"""What happens to the entries of a block of logits, by tensor operations: any device, any floating dtype.

The compiled form of the same two steps is in :mod:`native`.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bayesian_attention.engine import noise
from bayesian_attention.engine.noise import RowWords
from bayesian_attention.engine.reference import MASKED_BELOW
from bayesian_attention.posteriors import LogNormal, Posterior, Softmax, Weibull

#: Posteriors whose draws the fused backends know, by the name of the family.
FAMILIES: dict[str, Posterior] = {"softmax": Softmax(), "weibull": Weibull(), "lognormal": LogNormal()}


class Place(NamedTuple):
    """Where a block of rows lies, and its size.

    Attributes:
        chunk: number of its first pair of batch row and key head.
        chunks: how many pairs: a divisor or a multiple of the number of key heads.
        group: its first query head among those of the key head.
        groups: how many.
        query: its first query.
        queries: how many.
        keys: how many keys, from the first on.
    """

    chunk: int
    chunks: int
    group: int
    groups: int
    query: int
    queries: int
    keys: int

    @property
    def chunk_slice(self) -> slice:
        """Its pairs of batch row and key head."""
        return slice(self.chunk, self.chunk + self.chunks)

    @property
    def rows_index(self) -> tuple[slice, slice, slice]:
        """Its part of a tensor of all rows."""
        return (
            self.chunk_slice,
            slice(self.group, self.group + self.groups),
            slice(self.query, self.query + self.queries),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Pairs, query heads of each, queries."""
        return self.chunks, self.groups, self.queries

    @property
    def rows(self) -> int:
        """Rows a pair."""
        return self.groups * self.queries

    def take(self, x: Tensor) -> Tensor:
        """Its part of a tensor (pairs, query heads, queries, features) as (pairs, rows, features)."""
        part = x[self.rows_index]
        return part.squeeze(1) if self.groups == 1 else part.flatten(1, 2)


class Problem:
    """One attention call, as blocks need it: the sizes, the mask and the noise. Arguments as of ``forward``."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        first: Tensor | None,
        second: Tensor | None,
        spread: Tensor,
        mask: Tensor | None,
        family: str,
        scale: float,
        is_causal: bool,
        query_offset: int,
    ) -> None:
        batch, heads, queries, _ = query.shape
        self.batch, self.kv_heads, self.keys = batch, key.shape[1], key.shape[2]
        groups = heads // self.kv_heads
        #: Pairs of batch row and key head, query heads of each, queries.
        self.rows = (batch * self.kv_heads, groups, queries)
        self.device = query.device
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.family, self.scale = family, scale
        self.is_causal, self.query_offset = is_causal, query_offset
        self.spread = spread.detach().to(self.dtype).contiguous()
        self.draws = 1 if first is None else first.shape[0]
        self.first = None if first is None else first.contiguous().view(self.draws, *self.rows)
        self.second = None if second is None else second.contiguous().view(self.draws, *self.rows)
        self.key_words = noise.key_words(torch.arange(self.keys, device=self.device))
        self.mask = None if mask is None else _with_groups(mask.detach(), self.kv_heads, groups)


def _with_groups(mask: Tensor, kv_heads: int, groups: int) -> Tensor:
    """A mask of (batch, heads, queries, keys) as (batch, key heads, query heads of each, queries, keys)."""
    if mask.shape[1] == 1:
        return mask.unsqueeze(1)
    return mask.unflatten(1, (kv_heads, groups))


class RowSums(NamedTuple):
    """What the backward pass needs of each row to make its weights again. Natural logarithms.

    Logits enter as differences from the largest of their row: of large logits these are exact, and a single
    log-sum-exp would not tell them apart.

    Attributes:
        peak: (pairs, query heads, queries), the largest clean logit, 0 for a row without a key.
        clean: of that shape, log-sum-exp of the clean logits less ``peak``, −∞ for a row without a key.
        drawn: (draws, pairs, query heads, queries), the same of the draws' logits.
    """

    peak: Tensor
    clean: Tensor
    drawn: Tensor

    @staticmethod
    def of(state: Tensor, rows: tuple[int, int, int]) -> RowSums:
        """The sums within one tensor (2 + draws, …) over all rows."""
        state = state.view(state.shape[0], *rows)
        return RowSums(state[0], state[1], state[2:])


class Elementwise(Protocol):
    """The two steps."""

    def forward(self, place: Place, draw: int, logits: Tensor, weights: Tensor, sums: RowSums) -> Tensor:
        """Turn dot products into unnormalised weights.

        Args:
            place: the block.
            draw: number of the draw; 0 turns the dot products in ``logits`` into logits first.
            logits: (pairs, rows, keys), changed in place.
            weights: written; may be ``logits`` where there is one draw.
            sums: written, those of the clean logits by draw 0.

        Returns:
            (pairs, rows, 1), one over the sum of each row's weights, 0 for a row without a key.
        """

    def backward(
        self,
        place: Place,
        draw: int,
        logits: Tensor,
        grad_weights: Tensor,
        weights: Tensor,
        grad_logits: Tensor,
        sums: RowSums,
        dot: Tensor,
        grad_lse: Tensor | None,
        grad_spread: Tensor | None,
    ) -> None:
        """Turn dot products and the gradient of normalised weights into those weights and the gradient of the logits.

        Args:
            place: the block.
            draw: as of :meth:`forward`.
            logits: (pairs, rows, keys), changed in place.
            grad_weights: (pairs, rows, keys).
            weights: written; may be ``logits`` where there is one draw.
            grad_logits: written by draw 0, added to by the others; may be ``grad_weights`` where there is one draw.
            sums: of the forward pass.
            dot: (draws, pairs, query heads, queries), product of output and its gradient.
            grad_lse: (pairs, query heads, queries), gradient of the clean log-sum-exp, or None.
            grad_spread: gradient of the spread, of the shape of ``dot``; written; or None.
        """


class TensorElementwise:
    """See :class:`Elementwise`."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def forward(self, place: Place, draw: int, logits: Tensor, weights: Tensor, sums: RowSums) -> Tensor:
        """See :meth:`Elementwise.forward`."""
        if draw == 0:
            self._finish(place, logits)
            peak = _finite(logits.amax(-1, keepdim=True))
            logits -= peak
            sums.peak[place.rows_index] = peak.view(place.shape)
            sums.clean[place.rows_index] = torch.logsumexp(logits, -1).view(place.shape)
        perturbed = logits if self.problem.family == "softmax" else logits + self._noise(place, draw)
        peak = _finite(perturbed.amax(-1, keepdim=True))
        torch.exp(perturbed - peak, out=weights)
        total = weights.sum(-1, keepdim=True)
        sums.drawn[draw][place.rows_index] = (total.log() + peak).view(place.shape)
        return torch.where(total == 0, total, 1 / total)

    def backward(
        self,
        place: Place,
        draw: int,
        logits: Tensor,
        grad_weights: Tensor,
        weights: Tensor,
        grad_logits: Tensor,
        sums: RowSums,
        dot: Tensor,
        grad_lse: Tensor | None,
        grad_spread: Tensor | None,
    ) -> None:
        """See :meth:`Elementwise.backward`."""
        if draw == 0:
            self._finish(place, logits)
            logits -= _rows(place, sums.peak)
        clean = logits - _rows(place, _finite(sums.clean)) if grad_lse is not None and draw == 0 else None
        drawn = self._noise(place, draw) if self.problem.family != "softmax" else None
        perturbed = logits if drawn is None else logits + drawn
        torch.exp(perturbed - _rows(place, _finite(sums.drawn[draw])), out=weights)
        change = weights * (grad_weights - _rows(place, dot[draw]))
        if grad_spread is not None and drawn is not None:
            # The noise is its standard form over the shape, or times the scale.
            per_row = (change * drawn).sum(-1).view(place.shape)
            spread = self.problem.spread.view(self.problem.kv_heads, -1)[self._heads(place)][..., None]
            sign = -1 if self.problem.family == "weibull" else 1
            grad_spread[draw][place.rows_index] = sign * per_row / spread
        if draw:
            grad_logits += change
            return
        if clean is not None and grad_lse is not None:
            change += clean.exp() * _rows(place, grad_lse)
        grad_logits.copy_(change)

    def _finish(self, place: Place, logits: Tensor) -> None:
        """Turn dot products into logits, −∞ where masked, in place."""
        problem = self.problem
        logits *= problem.scale
        if problem.mask is not None:
            part = mask_part(problem, place, problem.mask)
            view = logits.view(*part.shape[:2], place.groups, place.queries, place.keys)
            if part.dtype == torch.bool:
                view.masked_fill_(~part, -math.inf)
            else:
                out = part <= MASKED_BELOW
                view.add_(part.masked_fill(out, 0.0)).masked_fill_(out, -math.inf)
        if problem.is_causal:
            last = torch.arange(place.query, place.query + place.queries, device=logits.device) + problem.query_offset
            hidden = torch.arange(place.keys, device=logits.device) > last.unsqueeze(-1)
            logits.view(-1, place.queries, place.keys).masked_fill_(hidden, -math.inf)

    def _noise(self, place: Place, draw: int) -> Tensor:
        """What the draw adds to the logits, (pairs, rows, keys)."""
        problem = self.problem
        if problem.first is None or problem.second is None:
            raise ValueError("first, second: a draw needs noise words")
        rows = RowWords(
            problem.first[draw][place.rows_index].unsqueeze(-1), problem.second[draw][place.rows_index].unsqueeze(-1)
        )
        uniform = noise.uniform(noise.bits(rows, problem.key_words[: place.keys]), problem.dtype)
        spread = problem.spread.view(problem.kv_heads, -1)[self._heads(place)][..., None, None]
        return FAMILIES[problem.family].log_noise(uniform, spread).flatten(1, 2)

    def _heads(self, place: Place) -> tuple[Tensor, slice]:
        """Index of the block's heads into (key heads, query heads of each)."""
        pairs = torch.arange(place.chunk, place.chunk + place.chunks, device=self.problem.device)
        return pairs % self.problem.kv_heads, slice(place.group, place.group + place.groups)


def mask_part(problem: Problem, place: Place, mask: Tensor) -> Tensor:
    """The view of a mask (or of its gradient) that belongs to a block.

    Returns:
        Shape (batch rows, key heads, query heads, queries, keys), where every size but the first two may be 1. The
        first two are the block's own: their product is its number of pairs.
    """
    row, head = divmod(place.chunk, problem.kv_heads)
    rows, heads = max(1, place.chunks // problem.kv_heads), min(place.chunks, problem.kv_heads)
    starts = (row, head, place.group, place.query, 0)
    sizes = (rows, heads, place.groups, place.queries, place.keys)
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if mask.shape[dim] != 1:
            mask = mask.narrow(dim, start, size)
    return mask.expand(rows, heads, -1, -1, -1)


def add_to_mask(problem: Problem, place: Place, grad_logits: Tensor, grad_mask: Tensor) -> None:
    """Add the gradient of a block's logits to that of the mask, summed where the mask broadcasts."""
    rows, heads = max(1, place.chunks // problem.kv_heads), min(place.chunks, problem.kv_heads)
    grad = grad_logits.view(rows, heads, place.groups, place.queries, place.keys)
    summed = [dim for dim, size in enumerate(grad_mask.shape) if size == 1]
    if summed:
        grad = grad.sum(summed, keepdim=True)
    target = grad_mask
    starts = (*divmod(place.chunk, problem.kv_heads), place.group, place.query, 0)
    for dim, start in enumerate(starts):
        if grad_mask.shape[dim] != 1:
            target = target.narrow(dim, start, grad.shape[dim])
    target += grad


def _rows(place: Place, per_row: Tensor) -> Tensor:
    """The block's part of a tensor of all rows, (pairs, rows, 1)."""
    return per_row[place.rows_index].flatten(1).unsqueeze(-1)


def _finite(x: Tensor) -> Tensor:
    """A row without a key has −∞, and logits of −∞: any number makes its weights 0."""
    return x.masked_fill(x == -math.inf, 0.0)
