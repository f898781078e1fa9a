"""Rows of attention logits, dense or as the edges of a graph: what is normalised over what.

Both forms know the same three things: how to normalise a row, how to lay one value a key out over the
entries, and the address of each entry for the noise. Posteriors, priors and divergences are written
once, over entries, and serve both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bayesian_attention.engine import noise


class Rows(Protocol):
    """What attention needs to know of its rows."""

    @property
    def valid(self) -> Tensor | None:
        """Boolean mask over the entries, True where the key may be attended to; None: everywhere."""

    def log_sum_exp(self, log_weights: Tensor) -> Tensor:
        """Log-sum-exp of each row over its valid entries, −∞ for a row without any."""

    def over_entries(self, per_row: Tensor) -> Tensor:
        """Lay the result of :meth:`log_sum_exp` out over the entries (or broadcast)."""

    def keys_over_entries(self, per_key: Tensor) -> Tensor:
        """Lay one value a key, shape (…, H, keys), out over the entries (or broadcast)."""

    def heads_over_entries(self, per_head: Tensor) -> Tensor:
        """View one value a head, shape (H,), so that it broadcasts against the entries."""

    def uniform(self, address: NoiseAddress, like: Tensor) -> Tensor:
        """A uniform number in (0, 1) an entry, of the dtype and device of ``like``."""


@dataclass(frozen=True)
class NoiseAddress:
    """The part of a noise address that does not depend on the entry.

    Attributes:
        seed: 64-bit seed of the call.
        sample: number of the posterior draw, an int, or a tensor with one number a batch row.
        batch_ids: int64 tensor with one identity a batch row; by default the rows are numbered.
    """

    seed: int | Tensor
    sample: int | Tensor = 0
    batch_ids: Tensor | None = None


def log_normalise(log_weights: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Normalise log weights over each row.

    Args:
        log_weights: one value an entry; entries that are not valid must be −∞ or finite, never NaN.
        rows: what a row is.

    Returns:
        The normalised log weights (−∞ where not valid; a row without a valid entry is all −∞) and the
        log-sum-exp of each row. Gradients are finite everywhere, zero for masked entries.
    """
    lse = rows.log_sum_exp(log_weights)
    # A row without a valid entry has lse = −∞; 0 stands in so that no −∞ − (−∞) arises.
    finite = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    log_p = log_weights - rows.over_entries(finite)
    if rows.valid is not None:
        log_p = log_p.masked_fill(~rows.valid, -torch.inf)
    return log_p, lse


class IdentityError(ValueError):
    """``batch_ids`` that do not fit the attention's batch."""


@dataclass(frozen=True)
class DenseRows:
    """Logits of shape (…, H, Lq, Lk); a row is the last dimension.

    Attributes:
        valid: boolean mask that broadcasts against the logits, or None.
        query_offset: absolute position of the first query.
    """

    valid: Tensor | None = None
    query_offset: int = 0

    def log_sum_exp(self, log_weights: Tensor) -> Tensor:
        """Row sums of shape (…, H, Lq, 1)."""
        if self.valid is not None:
            log_weights = log_weights.masked_fill(~self.valid, -torch.inf)
        if log_weights.shape[-1] == 0:
            return log_weights.new_full((*log_weights.shape[:-1], 1), -torch.inf)
        if self.valid is None:
            return torch.logsumexp(log_weights, dim=-1, keepdim=True)
        # torch.logsumexp has NaN gradients on a row of −∞; such rows go around it.
        empty = ~self.valid.any(dim=-1, keepdim=True)
        safe = log_weights.masked_fill(empty, 0.0)
        return torch.logsumexp(safe, dim=-1, keepdim=True).masked_fill(empty, -torch.inf)

    def over_entries(self, per_row: Tensor) -> Tensor:
        """(…, H, Lq, 1) broadcasts as it is."""
        return per_row

    def keys_over_entries(self, per_key: Tensor) -> Tensor:
        """(…, H, Lk) → (…, H, 1, Lk)."""
        return per_key.unsqueeze(-2)

    def heads_over_entries(self, per_head: Tensor) -> Tensor:
        """(H,) → (H, 1, 1)."""
        return per_head.view(-1, 1, 1)

    def words(self, address: NoiseAddress, shape: Sequence[int], device: torch.device) -> noise.RowWords:
        """The noise words of rows of shape (…, H, Lq), of that shape."""
        *leading, heads, queries = shape
        words = _batch_words(address, leading, device)
        words = words.view(*leading, 1, 1) if leading else words
        words = words.absorb_position(torch.arange(heads, device=device).view(heads, 1))
        return words.absorb_position(torch.arange(self.query_offset, self.query_offset + queries, device=device))

    def uniform(self, address: NoiseAddress, like: Tensor) -> Tensor:
        """One number an entry of ``like``, of shape (…, H, Lq, Lk)."""
        words = self.words(address, like.shape[:-1], like.device)
        columns = noise.key_words(torch.arange(like.shape[-1], device=like.device))
        return noise.uniform(noise.bits(words.view(*like.shape[:-1], 1), columns), like.dtype)


@dataclass(frozen=True)
class SegmentRows:
    """Logits of shape (E, H), one an edge; a row is the set of edges that share a target.

    Attributes:
        index: int64 tensor (E,), the row of each edge.
        source: int64 tensor (E,), the key of each edge.
        count: number of rows.
        valid: boolean mask that broadcasts against the logits, or None.
    """

    index: Tensor
    source: Tensor
    count: int
    valid: Tensor | None = None

    def log_sum_exp(self, log_weights: Tensor) -> Tensor:
        """Row sums of shape (count, H)."""
        if self.valid is not None:
            log_weights = log_weights.masked_fill(~self.valid, -torch.inf)
        rows = self.index.unsqueeze(-1).expand_as(log_weights)
        shape = (self.count, *log_weights.shape[1:])
        # The maximum only stabilises: it cancels, so no gradient runs through it.
        peak = log_weights.new_full(shape, -torch.inf)
        peak = peak.scatter_reduce(0, rows, log_weights.detach(), "amax", include_self=True)
        peak = torch.where(torch.isneginf(peak), torch.zeros_like(peak), peak)
        scaled = torch.exp(log_weights - peak.index_select(0, self.index))
        total = log_weights.new_zeros(shape).scatter_add(0, rows, scaled)
        empty = total == 0
        return (torch.log(total.masked_fill(empty, 1.0)) + peak).masked_fill(empty, -torch.inf)

    def over_entries(self, per_row: Tensor) -> Tensor:
        """(count, H) → (E, H)."""
        return per_row.index_select(0, self.index)

    def keys_over_entries(self, per_key: Tensor) -> Tensor:
        """(H, N) → (E, H)."""
        # Rows of a transposed tensor are gathered entry by entry, ten times slower than whole rows.
        return per_key.transpose(0, 1).contiguous().index_select(0, self.source)

    def heads_over_entries(self, per_head: Tensor) -> Tensor:
        """(H,) broadcasts against (E, H) as it is."""
        return per_head

    def uniform(self, address: NoiseAddress, like: Tensor) -> Tensor:
        """One number an entry of ``like``, of shape (E, H).

        The address's ``batch_ids`` are identities of the nodes, for a subgraph of a larger graph. Parallel
        edges share their number.
        """
        device = like.device
        ids = address.batch_ids
        if isinstance(address.sample, Tensor) and address.sample.dim():
            raise ValueError("sample_index: a graph takes one draw a pass, so its number must be a single one")
        if ids is not None and ids.numel() != self.count:
            raise IdentityError(f"batch_ids: a graph needs one identity a node, {self.count}; got {ids.numel()}")
        ids = torch.arange(self.count, device=device) if ids is None else ids.to(device)
        # The same order of coordinates as dense rows of one batch row: dense attention that is masked
        # by the adjacency matrix draws the same numbers.
        words = noise.start(address.seed, address.sample, device=device).absorb(0)
        words = words.absorb_position(torch.zeros((), dtype=torch.int32, device=device))
        words = words.absorb_position(torch.arange(like.shape[1], device=device))
        words = words.absorb_position(ids.view(-1, 1)).index_select(self.index)
        if address.batch_ids is not None and self.source.numel() and int(self.source.max()) >= ids.numel():
            raise ValueError("batch_ids: a bipartite graph has sources that are no targets, so it takes none")
        keys = self.source if address.batch_ids is None else ids.index_select(0, self.source)
        return noise.uniform(noise.bits(words, noise.key_words(keys).unsqueeze(-1)), like.dtype)


def _batch_words(address: NoiseAddress, leading: list[int], device: torch.device) -> noise.RowWords:
    """Row words up to the batch coordinate: shape () without leading dimensions, else (rows,).

    ``batch_ids`` may be shorter than the batch of the attention: a model that folds windows or time steps
    into the batch has a whole number of attention rows an example, numbered within the example.
    """
    rows = 1
    for size in leading:
        rows *= size
    ids, sample = address.batch_ids, address.sample
    if ids is None and isinstance(sample, Tensor) and sample.dim():
        raise ValueError("sample_index: one number a batch row needs batch_ids, one identity a batch row, beside it")
    if ids is None:
        words = noise.start(address.seed, sample, device=device)
        return words.absorb(torch.arange(rows, device=device)).absorb_position(
            torch.zeros((), dtype=torch.int32, device=device)
        )
    if ids.numel() == 0 or rows % ids.numel():
        raise IdentityError(
            f"batch_ids: {ids.numel()} identities cannot be spread over attention of batch shape {tuple(leading)}; "
            "its size must be a multiple of their number"
        )
    if isinstance(sample, Tensor) and sample.dim() and sample.shape != ids.shape:
        raise ValueError(f"sample_index: shape {tuple(sample.shape)} is not that of batch_ids, {tuple(ids.shape)}")
    noise.integer("batch_ids", ids)
    factor = rows // ids.numel()
    words = noise.start(address.seed, sample, device=device).absorb(ids)
    inner = torch.arange(factor, device=device)
    return noise.RowWords(words.first.unsqueeze(-1), words.second.unsqueeze(-1)).absorb_position(inner).view(-1)
