"""A prior whose parameter is learned, one a head."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesian_attention.numerics import wide
from bayesian_attention.priors.base import (
    GammaParameters,
    LogNormalParameters,
    Prior,
    PriorModule,
    PriorParameters,
)


@dataclass(frozen=True)
class LearnedPrior(Prior):
    """The concentration of the Gamma, or the scale of the lognormal, is learned; the other number is fixed.

    The learned number is the softplus of an unconstrained parameter and starts from the setting. (The
    paper's code leaves it unconstrained, so that it can turn negative.)

    Source: Fan et al., "Bayesian Attention Modules", NeurIPS 2020, "parameter" prior.

    Attributes:
        concentration: where α starts, positive; 1 by default. Learned.
        rate: β, positive; 1 by default.
        loc: μ₀; 0 by default.
        scale: where σ₀ starts, positive; 1 by default. Learned.
    """

    name: ClassVar[str] = "learned"

    concentration: float | None = None
    rate: float | None = None
    loc: float | None = None
    scale: float | None = None

    def module(self, family: str, heads: int, key_dim: int | None) -> LearnedPriorModule:
        """A module with one parameter a head."""
        return LearnedPriorModule(self, family, heads)


class LearnedPriorModule(PriorModule):
    """See :class:`LearnedPrior`."""

    def __init__(self, spec: LearnedPrior, family: str, heads: int) -> None:
        super().__init__(spec, family)
        start = spec.setting("concentration" if family == "gamma" else "scale")
        # The inverse of softplus; for large x it is x up to rounding, where expm1 would overflow.
        raw = start if start > 30 else math.log(math.expm1(start))
        self.raw = nn.Parameter(torch.full((heads,), raw))

    def distribution(self, log_weights: Tensor | None, heads_view: Callable[[Tensor], Tensor]) -> PriorParameters:
        """One number a head, and a constant."""
        learned = heads_view(F.softplus(wide(self.raw)))
        if self.family == "gamma":
            return GammaParameters(learned, self.spec.setting("rate"))
        return LogNormalParameters(self.spec.setting("loc"), learned)
