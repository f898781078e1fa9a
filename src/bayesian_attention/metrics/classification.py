"""Accuracy and proper scores of predicted probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesian_attention.metrics.inputs import MeanMetric, check_probabilities


class Accuracy(MeanMetric):
    """Share of examples whose most probable class is right, of equals that of the lowest index; in [0, 1]."""

    higher_is_better = True

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        """Take in a batch.

        Args:
            probabilities: floating point (N, C), C ≥ 2; each row sums to 1.
            target: integers (N,), 0 … C − 1.

        Raises:
            ValueError: they are something else.
        """
        wide, target = check_probabilities(probabilities, target)
        self.add(wide.argmax(dim=1) == target)


class NegativeLogLikelihood(MeanMetric):
    """Mean of −log of the probability of the right class, in nats.

    A probability below the smallest normal number of its dtype, zero included, counts as that number, so
    that one example cannot make the mean infinite: 1.2e-38 in float32 (a score of 87.3), 6.1e-5 in float16.
    """

    higher_is_better = False

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        """Take in a batch.

        Args:
            probabilities: floating point (N, C), C ≥ 2; each row sums to 1.
            target: integers (N,), 0 … C − 1.

        Raises:
            ValueError: they are something else.
        """
        wide, target = check_probabilities(probabilities, target)
        right = wide.gather(1, target.unsqueeze(1)).clamp_min(torch.finfo(probabilities.dtype).tiny)
        self.add(-right.log())


class BrierScore(MeanMetric):
    """Mean over examples of the sum over classes of the squared error of the probability; in [0, 2].

    Source: Brier, "Verification of forecasts expressed in terms of probability", 1950.
    """

    higher_is_better = False

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        """Take in a batch.

        Args:
            probabilities: floating point (N, C), C ≥ 2; each row sums to 1.
            target: integers (N,), 0 … C − 1.

        Raises:
            ValueError: they are something else.
        """
        wide, target = check_probabilities(probabilities, target)
        truth = torch.nn.functional.one_hot(target, wide.shape[1])
        self.add(((wide - truth) ** 2).sum(dim=1))
