"""Rows of dense attention, described without their entries, for divergences in linear time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bayesian_attention.divergences.fork import Port
from bayesian_attention.divergences.wide_algebra import double_of


@dataclass(frozen=True)
class LinearRows:
    """Queries and the keys they see: all of them, or all up to a place that moves by one a query.

    Attributes:
        query: (…, H, R, D), float32 or float64.
        key: (…, H, K, D), of that dtype.
        lse: (…, H, R), float64; anything where a row does not count.
        scale: factor of the dot products.
        start: row i sees keys j ≤ start + i, and K = start + R; None: every row sees all keys.
        valid: boolean, broadcasts against (…, H, K), one dimension less than ``query``; None: all.
        bias: added to the logits, broadcasts as ``valid`` does, float64, 0 for invalid keys; None: 0.
        counted: boolean (…, H, R), the rows that count; None: all. Rows without a valid key never do.
        scores: (…, H, K), scores of a contextual prior in float64, as of ``shifted_scores``; None: none.
        ports: for the gradients of these very queries and keys, of all of them; None: none.
    """

    query: Tensor
    key: Tensor
    lse: Tensor
    scale: float
    start: int | None = None
    valid: Tensor | None = None
    bias: Tensor | None = None
    counted: Tensor | None = None
    scores: Tensor | None = None
    ports: tuple[Port, Port] | None = None

    def narrowed(self, first: int, stop: int, keys: int, start: int | None) -> LinearRows:
        """Rows ``first`` to ``stop``, the first ``keys`` keys, and another ``start``."""
        return replace(
            self,
            query=self.query[..., first:stop, :],
            key=self.key[..., :keys, :],
            lse=self.lse[..., first:stop],
            start=start,
            valid=None if self.valid is None else self.valid[..., :keys],
            bias=None if self.bias is None else self.bias[..., :keys],
            counted=None if self.counted is None else self.counted[..., first:stop],
            scores=None if self.scores is None else self.scores[..., :keys],
            ports=None,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sums."""
        return double_of(self.query)

    def rounded_scale(self) -> Tensor:
        """``scale`` as the log-sum-exp saw it, rounded to the dtype of the queries: (), the dtype of sums.

        The rounding is the same for all logits, and in a sum against the log-sum-exp it would not average out.
        """
        return torch.full((), self.scale, dtype=self.query.dtype, device=self.query.device).to(self.dtype)

    def split_heads(self, per_head: float | Tensor) -> Tensor:
        """A number, or one a head (H,), in the dtype of sums and the shape that broadcasts against (…, H, R)."""
        if isinstance(per_head, Tensor):
            return per_head.to(self.dtype).reshape(-1, 1)
        return torch.full((1, 1), per_head, dtype=self.dtype, device=self.query.device)

    def key_valid(self) -> Tensor:
        """``valid``, all True where there is none."""
        if self.valid is not None:
            return self.valid
        return torch.ones(self.key.shape[-2], dtype=torch.bool, device=self.key.device)

    @property
    def rows_left_out(self) -> bool:
        """Whether there may be rows that do not count."""
        return self.valid is not None or self.counted is not None

    def key_weights(self) -> Tensor:
        """1 for a valid key, else 0: (…, H, K), the dtype of sums."""
        return self.key_valid().to(self.dtype).expand(self.key.shape[:-1])

    def up_to_row(self, running: Tensor) -> Tensor:
        """From sums over keys up to each place, (…, K), those that end where each row ends, (…, R)."""
        start = self.start or 0
        return running[..., start : start + self.query.shape[-2]]

    def visible(self) -> Tensor:
        """How many valid keys a row sees: int64, broadcasts against (…, H, R)."""
        if self.start is None:
            return self.key_valid().sum(-1, keepdim=True)
        if self.valid is not None:
            return self.up_to_row(self.valid.cumsum(-1))
        return torch.arange(self.start + 1, self.start + 1 + self.query.shape[-2], device=self.query.device)

    def counting(self, visible: Tensor) -> Tensor:
        """The rows that count: boolean (…, H, R)."""
        counting = visible > 0
        if self.counted is not None:
            counting = counting & self.counted
        return counting.expand(self.lse.shape)
