"""Priors over attention weights."""

from bayesian_attention.priors.base import GammaParameters, LogNormalParameters, Prior, PriorModule
from bayesian_attention.priors.constant import ConstantPrior
from bayesian_attention.priors.contextual import ContextualPrior
from bayesian_attention.priors.learned import LearnedPrior
from bayesian_attention.priors.registry import prior_from_dict, prior_named

__all__ = [
    "ConstantPrior",
    "ContextualPrior",
    "GammaParameters",
    "LearnedPrior",
    "LogNormalParameters",
    "Prior",
    "PriorModule",
    "prior_from_dict",
    "prior_named",
]
