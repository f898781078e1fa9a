"""Metrics of predictions and of their uncertainty, as torchmetrics."""

from bayesian_attention.metrics.calibration import CalibrationError, ReliabilityBins
from bayesian_attention.metrics.classification import Accuracy, BrierScore, NegativeLogLikelihood
from bayesian_attention.metrics.pavpu import PAvPU
from bayesian_attention.metrics.selective import AURC, ErrorAUROC, RiskCoverage, RiskCoverageCurve
from bayesian_attention.metrics.shift import OutOfDistributionAUROC

__all__ = [
    "AURC",
    "Accuracy",
    "BrierScore",
    "CalibrationError",
    "ErrorAUROC",
    "NegativeLogLikelihood",
    "OutOfDistributionAUROC",
    "PAvPU",
    "ReliabilityBins",
    "RiskCoverage",
    "RiskCoverageCurve",
]
