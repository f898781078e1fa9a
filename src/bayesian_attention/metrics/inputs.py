"""What the metrics accept, and the base that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

try:
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError("metrics need torchmetrics: pip install 'bayesian-attention[metrics]'") from error

#: How far the probabilities of an example may be from summing to 1, by dtype.
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}


class BatchMetric(Metric):
    """A metric that is fed batch by batch and does not depend on how the data was cut into batches."""

    is_differentiable = False
    full_state_update = False

    def add_sum(self, name: str, *shape: int) -> None:
        """Add a float64 state that batches and processes add up."""
        self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take in a batch and return the metric of that batch alone. A batch that is refused changes nothing."""
        # torchmetrics sets the state aside while it updates with the batch, and an exception there would lose it.
        states = {name: getattr(self, name) for name in self._defaults}
        states = {name: list(state) if isinstance(state, list) else state for name, state in states.items()}
        count, computed, on_cpu = self._update_count, self._computed, self.compute_on_cpu
        try:
            return super().forward(*args, **kwargs)
        except Exception:
            for name, state in states.items():
                setattr(self, name, state)
            self._update_count, self._computed, self.compute_on_cpu = count, computed, on_cpu
            self._to_sync, self._should_unsync, self._enable_grad = self.sync_on_compute, True, False
            raise

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Module:
        """Follow the model to its device, never to its dtype: sums over many batches stay in float64."""
        return super()._apply(lambda state: state.to(fn(state).device), exclude_state)

    def require_data(self, count: Tensor | int) -> None:
        """Refuse to compute before the first example.

        Raises:
            ValueError: ``count`` is zero.
        """
        if int(count) == 0:
            raise ValueError(f"{type(self).__name__}: no data; call update first")


class MeanMetric(BatchMetric):
    """The mean over examples of something.

    Args:
        settings: whatever two metrics of the same class may differ in.
    """

    total: Tensor
    count: Tensor

    def __init__(self, *settings: object) -> None:
        super().__init__()
        self.add_sum("total")
        self.add_sum("count")
        # A MetricCollection takes metrics for one whose states have the same names and, after the first batch,
        # the same values, as those of two levels of a test easily have. The name of this one tells them apart.
        self.add_sum("_".join(map(str, ("state_of", type(self).__name__, *settings))))

    def add(self, scores: Tensor) -> None:
        """Take in one score an example."""
        self.total += scores.double().sum()
        self.count += scores.numel()

    def compute(self) -> Tensor:
        """The mean, float64 of shape ().

        Raises:
            ValueError: there is no data.
        """
        self.require_data(self.count)
        return self.total / self.count


def check_probabilities(probabilities: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities as float64 and targets as int64, both checked.

    Args:
        probabilities: (N, C), floating point, each row non-negative with sum 1.
        target: (N,), integers 0 … C − 1.

    Raises:
        ValueError: they are not; the message names the argument, what came and what is allowed.
    """
    if probabilities.dim() != 2 or probabilities.shape[1] < 2 or not probabilities.is_floating_point():
        raise ValueError(
            "probabilities: must be floating point of shape (examples, classes) with at least two classes; "
            f"got {probabilities.dtype} of shape {tuple(probabilities.shape)}"
        )
    wide = probabilities.detach().double()
    if not bool((wide >= 0).all()):
        raise ValueError(f"probabilities: must not be negative or NaN; the smallest is {float(wide.min())}")
    error = (wide.sum(dim=1) - 1).abs()
    if not bool((error <= _TOLERANCE.get(probabilities.dtype, 1e-3)).all()):
        raise ValueError(f"probabilities: each row must sum to 1; one is off by {float(error.max()):.3g}")
    return wide, check_target(target, probabilities.shape[0], probabilities.shape[1])


def check_target(target: Tensor, examples: int, classes: int) -> Tensor:
    """Targets as int64, checked."""
    if target.shape != (examples,) or target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(
            f"target: must hold {examples} integers in one dimension; got {target.dtype} of {tuple(target.shape)}"
        )
    target = target.detach().long()
    wrong = (target < 0) | (target >= classes)
    if bool(wrong.any()):
        raise ValueError(f"target: must lie in 0 … {classes - 1}; got {int(target[wrong][0])}")
    return target


def check_scores(name: str, scores: Tensor, flag_name: str, flags: Tensor) -> tuple[Tensor, Tensor]:
    """One finite number and one boolean an example, as float64 and bool.

    Raises:
        ValueError: shapes or dtypes that do not fit, or NaN. Infinity is a score like any other.
    """
    if scores.dim() != 1 or not scores.is_floating_point():
        raise ValueError(
            f"{name}: must be floating point in one dimension; got {scores.dtype} of shape {tuple(scores.shape)}"
        )
    if flags.shape != scores.shape or flags.dtype != torch.bool:
        raise ValueError(
            f"{flag_name}: must be boolean of shape {tuple(scores.shape)}; got {flags.dtype} of {tuple(flags.shape)}"
        )
    if bool(scores.isnan().any()):
        raise ValueError(f"{name}: must not be NaN")
    # Copies: a caller may fill the same buffers again.
    return scores.detach().to(torch.float64, copy=True), flags.detach().clone()
