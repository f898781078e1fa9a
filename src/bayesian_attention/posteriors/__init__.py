"""Families of distributions over attention weights."""

from bayesian_attention.posteriors.base import Posterior, PosteriorParameter
from bayesian_attention.posteriors.lognormal import LogNormal
from bayesian_attention.posteriors.registry import posterior_from_dict, posterior_named
from bayesian_attention.posteriors.softmax import Softmax
from bayesian_attention.posteriors.weibull import Weibull

__all__ = [
    "LogNormal",
    "Posterior",
    "PosteriorParameter",
    "Softmax",
    "Weibull",
    "posterior_from_dict",
    "posterior_named",
]
