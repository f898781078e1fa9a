"""Kullback-Leibler divergences in closed form."""

from bayesian_attention.divergences.blocks import rows_in_budget, sum_over_row_blocks
from bayesian_attention.divergences.dense import Divergence, entrywise, reduce_valid
from bayesian_attention.divergences.fork import Port, fork
from bayesian_attention.divergences.linear import has_linear_form, key_mask, linear_divergence
from bayesian_attention.divergences.lognormal_lognormal import lognormal_lognormal
from bayesian_attention.divergences.weibull_gamma import weibull_gamma

__all__ = [
    "Divergence",
    "Port",
    "entrywise",
    "fork",
    "has_linear_form",
    "key_mask",
    "linear_divergence",
    "lognormal_lognormal",
    "reduce_valid",
    "rows_in_budget",
    "sum_over_row_blocks",
    "weibull_gamma",
]
