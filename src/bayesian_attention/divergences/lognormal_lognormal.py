"""KL divergence between two lognormals, in closed form."""

from __future__ import annotations

import math

from torch import Tensor


def lognormal_lognormal(
    scale: float | Tensor, log_mean: Tensor, prior_loc: float | Tensor, prior_scale: float | Tensor
) -> Tensor:
    """KL(LogNormal(μ, σ) ‖ LogNormal(μ₀, σ₀)) with the first lognormal given by its scale and its mean.

    log(σ₀/σ) + (σ² + (μ − μ₀)²) / (2σ₀²) − ½, where μ = log mean − σ²/2: the divergence of the two
    normals of the logarithm, since the divergence does not change under a one-to-one map.

    Source: Fan et al., "Bayesian Attention Modules", NeurIPS 2020, section 3.

    Args:
        scale: σ, positive.
        log_mean: logarithm of the mean of the first lognormal, finite.
        prior_loc: μ₀.
        prior_scale: σ₀, positive.

    Returns:
        Non-negative tensor (up to rounding) of the broadcast shape, in nats.
    """
    distance = log_mean - 0.5 * scale**2 - prior_loc
    return (_log(prior_scale) - _log(scale)) - 0.5 + (distance**2 + scale**2) / (2.0 * prior_scale**2)


def _log(x: float | Tensor) -> float | Tensor:
    return x.log() if isinstance(x, Tensor) else math.log(x)
