"""A prior that looks at the keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesian_attention.checks import at_least, finite, flag
from bayesian_attention.names import look_up
from bayesian_attention.numerics import wide
from bayesian_attention.priors.base import (
    SMALLEST_CONCENTRATION,
    GammaParameters,
    LogNormalParameters,
    Prior,
    PriorModule,
    PriorParameters,
)

_ACTIVATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "relu": lambda x, _: F.relu(x),
    "leaky_relu": F.leaky_relu,
    "gelu": lambda x, _: F.gelu(x),
    "tanh": lambda x, _: torch.tanh(x),
}


@dataclass(frozen=True)
class ContextualPrior(Prior):
    """A small network on each key says how much weight the key deserves before any query is seen.

    Its outputs are normalised by a softmax over the keys that a row may attend to: c_j. Beneath a Weibull
    the prior of S_ij is Gamma(β c_j, β), of mean c_j; beneath a lognormal it is LogNormal(log c_j, σ₀), of
    median c_j.

    Source: Fan et al., "Bayesian Attention Modules", NeurIPS 2020, "contextual prior".

    Attributes:
        hidden: width of the hidden layer; None for a single linear map from key to score.
        activation: "relu", "leaky_relu", "gelu" or "tanh".
        negative_slope: of the leaky ReLU (the paper's code: 0.1 for language, 0.3 for images).
        share_heads: one network for all heads, or one each (as the paper's code does for graphs).
        rate: β of the Gamma, positive; 1 by default. It scales the concentration too.
        scale: σ₀ of the lognormal, positive; 1 by default.
    """

    name: ClassVar[str] = "contextual"

    hidden: int | None = 10
    activation: str = "relu"
    negative_slope: float = 0.1
    share_heads: bool = True
    rate: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        super().__post_init__()
        if self.hidden is not None:
            object.__setattr__(self, "hidden", at_least("ContextualPrior", "hidden", self.hidden, 1))
        object.__setattr__(self, "negative_slope", finite("ContextualPrior", "negative_slope", self.negative_slope))
        flag("ContextualPrior", "share_heads", self.share_heads)
        look_up("ContextualPrior: activation", self.activation, _ACTIVATIONS)

    def module(self, family: str, heads: int, key_dim: int | None) -> ContextualPriorModule:
        """A module with the network."""
        if key_dim is None:
            raise ValueError("ContextualPrior: this attention offers no keys; use ConstantPrior or LearnedPrior")
        return ContextualPriorModule(self, family, heads, key_dim)


class ContextualPriorModule(PriorModule):
    """See :class:`ContextualPrior`. Weights start as He-normal, biases as zero."""

    needs_keys: ClassVar[bool] = True

    def __init__(self, spec: ContextualPrior, family: str, heads: int, key_dim: int) -> None:
        super().__init__(spec, family)
        self.activation = spec.activation
        self.negative_slope = spec.negative_slope
        self.heads = heads
        networks = 1 if spec.share_heads else heads
        width = key_dim if spec.hidden is None else spec.hidden
        self.hidden_weight: nn.Parameter | None = None
        self.hidden_bias: nn.Parameter | None = None
        if spec.hidden is not None:
            self.hidden_weight = nn.Parameter(torch.randn(networks, key_dim, width) * math.sqrt(2 / key_dim))
            self.hidden_bias = nn.Parameter(torch.zeros(networks, 1, width))
        self.score_weight = nn.Parameter(torch.randn(networks, width, 1) * math.sqrt(2 / width))
        # A bias on the score would be the same for every key of a head, and the softmax ignores it.

    def scores(self, keys: Tensor) -> Tensor:
        """See :meth:`PriorModule.scores`."""
        x = wide(keys)
        if self.hidden_weight is not None and self.hidden_bias is not None:
            x = x @ wide(self.hidden_weight) + wide(self.hidden_bias)
            x = _ACTIVATIONS[self.activation](x, self.negative_slope)
        return (x @ wide(self.score_weight)).squeeze(-1)

    def distribution(self, log_weights: Tensor | None, heads_view: Callable[[Tensor], Tensor]) -> PriorParameters:
        """Concentration β c_j and rate β, or location log c_j and scale σ₀."""
        if log_weights is None:
            raise ValueError("ContextualPrior: keys are needed and none were given")
        if self.family == "gamma":
            rate = self.spec.setting("rate")
            return GammaParameters((rate * log_weights.exp()).clamp_min(SMALLEST_CONCENTRATION), rate)
        return LogNormalParameters(log_weights, self.spec.setting("scale"))
