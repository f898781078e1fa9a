"""The training loss: a negative evidence lower bound."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from bayesian_attention.checks import finite
from bayesian_attention.inference.kl import kl_divergence


class ELBOTerms(NamedTuple):
    """A loss and what it is made of.

    Attributes:
        loss: nll + weight · kl; call ``backward()`` on it.
        nll: negative log-likelihood, as given.
        kl: divergence of the attention weights, unweighted.
        weight: weight of the divergence.
    """

    loss: Tensor
    nll: Tensor
    kl: Tensor
    weight: float


def elbo_loss(
    model: nn.Module,
    nll: Tensor,
    *,
    weight: float = 1.0,
    reduction: str = "sum",
    examples: int | None = None,
) -> ELBOTerms:
    """The loss of the forward pass that ``model`` has just made.

    With weight 1 and reduction "sum" the loss is the negative evidence lower bound, averaged over the
    examples of the batch (one posterior draw). Reduction "mean" is the published experiments' scale.

    Args:
        model: the module whose forward pass gave ``nll``.
        nll: negative log-likelihood, averaged over examples; shape ().
        weight: weight of the divergence, from a schedule for instance.
        reduction: "sum" or "mean", see :func:`kl_divergence`.
        examples: see :func:`kl_divergence`.

    Raises:
        ValueError: an ``nll`` of several numbers, or a weight that is negative; and as :func:`kl_divergence`.
    """
    if nll.numel() != 1:
        raise ValueError(f"nll: must be a single number, the mean over examples; got shape {tuple(nll.shape)}")
    if finite("elbo_loss", "weight", weight) < 0:
        raise ValueError(f"elbo_loss: weight must not be negative; got {weight!r}")
    kl = kl_divergence(model, reduction=reduction, examples=examples).to(nll.device)
    return ELBOTerms(nll + weight * kl, nll, kl, weight)
