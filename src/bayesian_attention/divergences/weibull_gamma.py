"""KL divergence of a Weibull from a Gamma, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

EULER = 0.57721566490153286061


def weibull_gamma(
    shape: float | Tensor, log_mean: Tensor, concentration: float | Tensor, rate: float | Tensor
) -> Tensor:
    """KL(Weibull(k, λ) ‖ Gamma(α, rate β)) with the Weibull given by its shape and its mean.

    γα/k − α log λ + log k + β λ Γ(1 + 1/k) − γ − 1 − α log β + log Γ(α), where
    λ = mean / Γ(1 + 1/k) and γ is Euler's constant.

    Source: Zhang et al., "WHAI: Weibull hybrid autoencoding inference", ICLR 2018, equation 9 (as a bound's
    term); Fan et al., "Bayesian Attention Modules", NeurIPS 2020, section 3.

    Args:
        shape: k, positive.
        log_mean: logarithm of the mean of the Weibull, finite.
        concentration: α, positive.
        rate: β, positive.

    Returns:
        Non-negative tensor (up to rounding) of the broadcast shape, in nats.
    """
    k, alpha, beta = (_as_tensor(x, log_mean) for x in (shape, concentration, rate))
    log_scale = log_mean - torch.lgamma(1.0 + 1.0 / k)
    return (
        alpha * (EULER / k - log_scale - beta.log())
        + torch.lgamma(alpha)
        + beta * log_mean.exp()
        + (k.log() - EULER - 1.0)
    )


def _as_tensor(x: float | Tensor, like: Tensor) -> Tensor:
    """A number as a tensor of no dimensions, so that it stays a constant of the expression."""
    return x if isinstance(x, Tensor) else torch.tensor(x, dtype=like.dtype, device=like.device)
