"""Accuracy and proper scores of predicted probabilities."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from bayesian_attention.metrics.inputs import MeanMetric, check_probabilities


class ProbabilityScore(MeanMetric):
    """The mean over examples of a score of the predicted probabilities."""

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        """Take in a batch.

        Args:
            probabilities: floating point (N, C), C ≥ 2; each row sums to 1.
            target: integers (N,), 0 … C − 1.

        Raises:
            ValueError: they are something else.
        """
        wide, target = check_probabilities(probabilities, target)
        self.add(self.scores(wide, target, torch.finfo(probabilities.dtype).tiny))

    @abstractmethod
    def scores(self, probabilities: Tensor, target: Tensor, smallest: float) -> Tensor:
        """One score an example.

        Args:
            probabilities: float64 (N, C), checked.
            target: int64 (N,), checked.
            smallest: the smallest normal number of the dtype in which the probabilities came.
        """


class Accuracy(ProbabilityScore):
    """Share of examples whose most probable class is right, of equals that of the lowest index; in [0, 1]."""

    higher_is_better = True

    def scores(self, probabilities: Tensor, target: Tensor, smallest: float) -> Tensor:
        """Whether each answer is right."""
        return probabilities.argmax(dim=1) == target


class NegativeLogLikelihood(ProbabilityScore):
    """Mean of −log of the probability of the right class, in nats.

    A probability below the smallest normal number of its dtype, zero included, counts as that number, so
    that one example cannot make the mean infinite: 1.2e-38 in float32 (a score of 87.3), 6.1e-5 in float16.
    """

    higher_is_better = False

    def scores(self, probabilities: Tensor, target: Tensor, smallest: float) -> Tensor:
        """−log of the probability of the right class."""
        return -probabilities.gather(1, target.unsqueeze(1)).clamp_min(smallest).log()


class BrierScore(ProbabilityScore):
    """Mean over examples of the sum over classes of the squared error of the probability; in [0, 2].

    Source: Brier, "Verification of forecasts expressed in terms of probability", 1950.
    """

    higher_is_better = False

    def scores(self, probabilities: Tensor, target: Tensor, smallest: float) -> Tensor:
        """Squared distance from the right class's unit vector."""
        truth = torch.nn.functional.one_hot(target, probabilities.shape[1])
        return ((probabilities - truth) ** 2).sum(dim=1)
