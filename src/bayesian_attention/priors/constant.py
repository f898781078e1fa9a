"""The same prior for every attention weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bayesian_attention.priors.base import (
    GammaParameters,
    LogNormalParameters,
    Prior,
    PriorModule,
    PriorParameters,
)


@dataclass(frozen=True)
class ConstantPrior(Prior):
    """Gamma(concentration, rate) beneath a Weibull, LogNormal(loc, scale) beneath a lognormal.

    Source: Fan et al., "Bayesian Attention Modules", NeurIPS 2020, "fixed prior".

    Attributes:
        concentration: α of the Gamma, positive; 1 by default.
        rate: β of the Gamma, positive; 1 by default.
        loc: μ₀ of the lognormal; 0 by default.
        scale: σ₀ of the lognormal, positive; 1 by default.
    """

    name: ClassVar[str] = "constant"

    concentration: float | None = None
    rate: float | None = None
    loc: float | None = None
    scale: float | None = None

    def module(self, family: str, heads: int, key_dim: int | None) -> ConstantPriorModule:
        """A module without parameters."""
        return ConstantPriorModule(self, family)


class ConstantPriorModule(PriorModule):
    """See :class:`ConstantPrior`."""

    def distribution(self, log_weights: Tensor | None, heads_view: Callable[[Tensor], Tensor]) -> PriorParameters:
        """Two numbers."""
        setting = self.spec.setting
        if self.family == "gamma":
            return GammaParameters(setting("concentration"), setting("rate"))
        return LogNormalParameters(setting("loc"), setting("scale"))
