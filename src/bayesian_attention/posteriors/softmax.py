"""Deterministic attention, the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bayesian_attention.posteriors.base import Posterior


@dataclass(frozen=True)
class Softmax(Posterior):
    """A point mass on the softmax of the logits: no noise, no divergence."""

    name: ClassVar[str] = "softmax"

    def log_noise(self, uniform: Tensor, parameter: float | Tensor) -> Tensor:
        """Zero."""
        return uniform.new_zeros(())
