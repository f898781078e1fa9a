"""Attention layers."""

from bayesian_attention.layers.additive import AdditiveAttention
from bayesian_attention.layers.multihead import MultiheadAttention
from bayesian_attention.layers.stochastic import StochasticAttention

__all__ = ["AdditiveAttention", "MultiheadAttention", "StochasticAttention"]
