"""Lognormal attention weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayesian_attention.posteriors.base import Posterior


@dataclass(frozen=True)
class LogNormal(Posterior):
    """LogNormal(μ = log p − σ²/2, σ) with p the softmax of the logits, so that E[S] = p.

    log S = log p − σ²/2 + σ ε with ε ~ N(0, 1); −σ²/2 is the same for every key of a head and cancels in
    S / ΣS. As σ → 0 the weights become the softmax.

    Source: Fan et al., "Bayesian Attention Modules", NeurIPS 2020, section 3.

    Attributes:
        scale: σ, positive.
        learned: learn σ, one a head, starting from ``scale``.
    """

    name: ClassVar[str] = "lognormal"
    parameter_name: ClassVar[str | None] = "scale"
    prior_family: ClassVar[str | None] = "lognormal"

    scale: float = 0.1
    learned: bool = False

    def log_noise(self, uniform: Tensor, parameter: float | Tensor) -> Tensor:
        """σ ε, with ε the normal quantile of u."""
        # 2u − 1 is exact in float32 for the uniforms of the noise generator.
        return torch.erfinv(2.0 * uniform - 1.0) * (math.sqrt(2.0) * parameter)
