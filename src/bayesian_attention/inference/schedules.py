"""How the weight of the divergence grows over training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from bayesian_attention.checks import finite, positive


class Schedule(Protocol):
    """A weight for each step, or epoch: whatever the caller counts."""

    def __call__(self, step: float) -> float:
        """The weight at ``step`` ≥ 0."""


def _non_negative(owner: str, value: float) -> None:
    if finite(owner, "weight", value) < 0:
        raise ValueError(f"{owner}: weight must not be negative; got {value!r}")


@dataclass(frozen=True)
class ConstantWeight:
    """The same weight throughout. 1 is the evidence lower bound.

    Attributes:
        weight: non-negative.
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a negative weight."""
        _non_negative("ConstantWeight", self.weight)

    def __call__(self, step: float) -> float:
        """The weight."""
        return self.weight


@dataclass(frozen=True)
class LinearWeight:
    """From zero in a straight line to ``weight`` at ``steps``, constant from there.

    Attributes:
        weight: the final weight, non-negative.
        steps: length of the ramp, positive.
    """

    weight: float = 1.0
    steps: float = 1000.0

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        _non_negative("LinearWeight", self.weight)
        positive("LinearWeight", "steps", self.steps)

    def __call__(self, step: float) -> float:
        """The weight at ``step``."""
        return self.weight * min(1.0, max(0.0, step / self.steps))


@dataclass(frozen=True)
class SigmoidWeight:
    """weight · σ(rate · (step − midpoint)), as in the code of "Bayesian Attention Modules" (2020).

    With the authors' midpoint of 0 it begins at half the weight, not at zero.

    Attributes:
        weight: the final weight, non-negative.
        rate: steepness, positive.
        midpoint: the step at which half the weight is reached.
    """

    weight: float = 1.0
    rate: float = 1.0
    midpoint: float = 0.0

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        _non_negative("SigmoidWeight", self.weight)
        positive("SigmoidWeight", "rate", self.rate)
        finite("SigmoidWeight", "midpoint", self.midpoint)

    def __call__(self, step: float) -> float:
        """The weight at ``step``."""
        # tanh does not overflow, where exp(x) / (1 + exp(x)) is NaN from x = 710 on.
        return self.weight * 0.5 * (1.0 + math.tanh(0.5 * self.rate * (step - self.midpoint)))


@dataclass(frozen=True)
class CyclicalWeight:
    """Linear ramps that begin anew, each followed by a plateau.

    Source: Fu et al., "Cyclical annealing schedule", NAACL 2019.

    Attributes:
        weight: the height of the plateaus, non-negative.
        period: length of a cycle, positive.
        ramp: share of the cycle that rises, in (0, 1].
    """

    weight: float = 1.0
    period: float = 1000.0
    ramp: float = 0.5

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        _non_negative("CyclicalWeight", self.weight)
        positive("CyclicalWeight", "period", self.period)
        if positive("CyclicalWeight", "ramp", self.ramp) > 1:
            raise ValueError(f"CyclicalWeight: ramp must be at most 1; got {self.ramp!r}")

    def __call__(self, step: float) -> float:
        """The weight at ``step``."""
        return self.weight * min(1.0, (step % self.period) / (self.period * self.ramp))
