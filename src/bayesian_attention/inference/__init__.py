"""Training and predicting with Bayesian attention."""

from bayesian_attention.inference.elbo import ELBOTerms, elbo_loss
from bayesian_attention.inference.kl import kl_divergence, recording, track_kl
from bayesian_attention.inference.predict import predict
from bayesian_attention.inference.prediction import (
    ClassificationPrediction,
    Prediction,
    RegressionPrediction,
)
from bayesian_attention.inference.sampling import sampling
from bayesian_attention.inference.schedules import (
    ConstantWeight,
    CyclicalWeight,
    LinearWeight,
    Schedule,
    SigmoidWeight,
)

__all__ = [
    "ClassificationPrediction",
    "ConstantWeight",
    "CyclicalWeight",
    "ELBOTerms",
    "LinearWeight",
    "Prediction",
    "RegressionPrediction",
    "Schedule",
    "SigmoidWeight",
    "elbo_loss",
    "kl_divergence",
    "predict",
    "recording",
    "sampling",
    "track_kl",
]
