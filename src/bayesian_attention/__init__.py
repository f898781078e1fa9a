"""Bayesian attention for PyTorch: attention weights as random variables with a posterior and a prior."""

from bayesian_attention.engine import AttentionOutput, attend, attention_weights
from bayesian_attention.inference import (
    ClassificationPrediction,
    ConstantWeight,
    CyclicalWeight,
    ELBOTerms,
    LinearWeight,
    Prediction,
    RegressionPrediction,
    Schedule,
    SigmoidWeight,
    elbo_loss,
    kl_divergence,
    predict,
    recording,
    sampling,
    track_kl,
)
from bayesian_attention.layers import AdditiveAttention, MultiheadAttention, StochasticAttention
from bayesian_attention.posteriors import LogNormal, Posterior, Softmax, Weibull
from bayesian_attention.priors import ConstantPrior, ContextualPrior, LearnedPrior, Prior

__version__ = "0.1.0"

__all__ = [
    "AdditiveAttention",
    "AttentionOutput",
    "ClassificationPrediction",
    "ConstantPrior",
    "ConstantWeight",
    "ContextualPrior",
    "CyclicalWeight",
    "ELBOTerms",
    "LearnedPrior",
    "LinearWeight",
    "LogNormal",
    "MultiheadAttention",
    "Posterior",
    "Prediction",
    "Prior",
    "RegressionPrediction",
    "Schedule",
    "SigmoidWeight",
    "Softmax",
    "StochasticAttention",
    "Weibull",
    "attend",
    "attention_weights",
    "elbo_loss",
    "kl_divergence",
    "predict",
    "recording",
    "sampling",
    "track_kl",
]
