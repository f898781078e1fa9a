"""What a posterior family owes the library."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayesian_attention.checks import flag, positive
from bayesian_attention.numerics import wide


@dataclass(frozen=True)
class Posterior(ABC):
    """A family of distributions over unnormalised attention weights S; the weights are S / ΣS over a row.

    A spec says which family and which settings. It is a frozen dataclass: comparable, printable,
    JSON-serialisable. Parameters that are learned live in the module that :meth:`build` makes.

    Every family here is mean-preserving: E[S] ∝ exp(logits). With sampling off the weights are the softmax.
    """

    #: Name of the family in commands and records.
    name: ClassVar[str]
    #: The field that holds the parameter of the spread, or None where there is none.
    parameter_name: ClassVar[str | None] = None
    #: The family of the prior that its divergence is known to, "gamma" or "lognormal"; None: no divergence.
    prior_family: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        """Refuse a spread that is no positive number, and a ``learned`` that is neither True nor False."""
        flag(type(self).__name__, "learned", getattr(self, "learned", False))
        if self.parameter_name:
            value = positive(type(self).__name__, self.parameter_name, getattr(self, self.parameter_name))
            object.__setattr__(self, self.parameter_name, value)

    @abstractmethod
    def log_noise(self, uniform: Tensor, parameter: float | Tensor) -> Tensor:
        """What a draw adds to the logits: log S = logits + log_noise, up to a constant of the row.

        Args:
            uniform: independent uniform numbers in (0, 1), one an entry.
            parameter: the spread, a number, or a tensor that broadcasts against the entries.
        """

    @property
    def stochastic(self) -> bool:
        """Whether a draw differs from the mean at all."""
        return self.parameter_name is not None

    @property
    def parameter(self) -> float:
        """The spread that the spec states; the initial one where it is learned."""
        return float(getattr(self, self.parameter_name)) if self.parameter_name else 0.0

    @property
    def is_learned(self) -> bool:
        """Whether the spread is a parameter to be learned, one a head."""
        return bool(getattr(self, "learned", False))

    def build(self, heads: int) -> PosteriorParameter:
        """The module that holds the spread of ``heads`` attention heads."""
        return PosteriorParameter(self, heads)

    def to_dict(self) -> dict[str, Any]:
        """The spec as plain data, with its family under ``"name"``."""
        return {"name": self.name, **asdict(self)}


class PosteriorParameter(nn.Module):
    """The spread of a posterior: a constant, or one learned number a head.

    A learned spread is the exponential of an unconstrained parameter: it stays positive, and a step of
    the optimiser changes it by a ratio, the same for a shape of 0.1 and of 1000.

    Args:
        spec: the posterior.
        heads: number of attention heads, at least 1.
    """

    def __init__(self, spec: Posterior, heads: int) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads: must be at least 1; got {heads}")
        self.spec = spec
        self.heads = heads
        self.log_parameter: nn.Parameter | None = None
        if spec.is_learned:
            self.log_parameter = nn.Parameter(torch.full((heads,), math.log(spec.parameter)))

    def forward(self) -> float | Tensor:
        """The spread: a number, or a tensor of shape (heads,), float32 or wider."""
        if self.log_parameter is None:
            return self.spec.parameter
        return wide(self.log_parameter).exp()

    def extra_repr(self) -> str:
        """Spec and heads, for ``print(model)``."""
        return f"{self.spec}, heads={self.heads}"
