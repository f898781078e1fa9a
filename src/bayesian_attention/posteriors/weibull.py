"""Weibull attention weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bayesian_attention.posteriors.base import Posterior


@dataclass(frozen=True)
class Weibull(Posterior):
    """Weibull(shape k, scale λ = p / Γ(1 + 1/k)) with p the softmax of the logits, so that E[S] = p.

    log S = log p − log Γ(1 + 1/k) + log(E) / k with E ~ Exp(1); the Γ term is the same for every key of
    a head and cancels in S / ΣS. The spread falls with the shape: the variance of log S is
    π² / (6 k²). As k → ∞ the weights become the softmax; at k = 1 with equal logits they are
    Dirichlet(1, …, 1).

    Source: Fan et al., "Bayesian Attention Modules", NeurIPS 2020, section 3.

    Attributes:
        shape: k, positive. The paper's code uses 10 for language and 1000 for graphs.
        learned: learn k, one a head, starting from ``shape``.
    """

    name: ClassVar[str] = "weibull"
    parameter_name: ClassVar[str | None] = "shape"
    prior_family: ClassVar[str | None] = "gamma"

    shape: float = 10.0
    learned: bool = False

    def log_noise(self, uniform: Tensor, parameter: float | Tensor) -> Tensor:
        """log(−log u) / k: the logarithm of a standard exponential draw, over the shape."""
        return (-uniform.log()).log() / parameter
