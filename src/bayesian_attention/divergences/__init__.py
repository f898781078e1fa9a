"""Kullback-Leibler divergences in closed form."""

from bayesian_attention.divergences.dense import Divergence, entrywise, reduce_valid
from bayesian_attention.divergences.lognormal_lognormal import lognormal_lognormal
from bayesian_attention.divergences.weibull_gamma import weibull_gamma

__all__ = ["Divergence", "entrywise", "lognormal_lognormal", "reduce_valid", "weibull_gamma"]
