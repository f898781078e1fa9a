"""Divergence of attention weights, entry by entry: the exact form, for any mask and any prior."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayesian_attention.divergences.lognormal_lognormal import lognormal_lognormal
from bayesian_attention.divergences.weibull_gamma import weibull_gamma
from bayesian_attention.posteriors import Posterior
from bayesian_attention.priors.base import GammaParameters, LogNormalParameters, PriorParameters


class Divergence(NamedTuple):
    """The divergence of one attention call.

    Attributes:
        total: sum over all valid entries of the call, batch included; shape (), in nats.
        entries: number of valid entries, shape (), the dtype of ``total``.
    """

    total: Tensor
    entries: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean over the valid entries; 0 where there are none."""
        return self.total / self.entries.clamp_min(1)


def entrywise(posterior: Posterior, parameter: float | Tensor, log_mean: Tensor, prior: PriorParameters) -> Tensor:
    """KL(posterior ‖ prior) of every entry.

    Args:
        posterior: the family.
        parameter: its spread; broadcasts against the entries.
        log_mean: log E[S], the log-softmax of the logits, finite.
        prior: parameters of the prior.

    Raises:
        TypeError: no closed form is known for the pair.
    """
    if posterior.prior_family == "gamma" and isinstance(prior, GammaParameters):
        return weibull_gamma(parameter, log_mean, prior.concentration, prior.rate)
    if posterior.prior_family == "lognormal" and isinstance(prior, LogNormalParameters):
        return lognormal_lognormal(parameter, log_mean, prior.loc, prior.scale)
    raise TypeError(f"no divergence of {posterior} from {type(prior).__name__}")


def reduce_valid(entries: Tensor, valid: Tensor | None) -> Divergence:
    """Sum the entries that count.

    Args:
        entries: divergence of every entry, finite where valid.
        valid: boolean mask that broadcasts against ``entries``; None: all count.
    """
    if valid is None:
        return Divergence(
            entries.sum(), torch.tensor(float(entries.numel()), dtype=entries.dtype, device=entries.device)
        )
    valid = valid.expand_as(entries)
    return Divergence(entries.masked_fill(~valid, 0.0).sum(), valid.sum().to(entries.dtype))
