"""Selective prediction: is the model wrong where it is uncertain?"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics.utilities.data import dim_zero_cat

from bayesian_attention.metrics.inputs import BatchMetric, check_scores


class RiskCoverageCurve(NamedTuple):
    """Risk of answering only the most certain examples.

    Attributes:
        coverage: share of examples answered, 1/n, 2/n, …, 1; float64 (n,).
        risk: expected share of wrong answers among them; float64 (n,).
    """

    coverage: Tensor
    risk: Tensor


class ScoresAndFlags(BatchMetric):
    """Keeps one score and one flag an example."""

    scores: list[Tensor]
    flags: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("flags", [], dist_reduce_fx="cat")

    def keep(self, scores: Tensor, flags: Tensor) -> None:
        """Take in a batch."""
        self.scores.append(scores)
        self.flags.append(flags)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """All scores, float64 (n,), and flags, bool (n,).

        Raises:
            ValueError: there is no data.
        """
        self.require_data(len(self.scores))
        scores, flags = dim_zero_cat(self.scores), dim_zero_cat(self.flags)
        self.require_data(scores.numel())
        return scores, flags


def auroc(scores: Tensor, positive: Tensor) -> Tensor:
    """Area under the ROC curve: the probability that a positive scores above a negative, ties counting half.

    Args:
        scores: (n,), any numbers that can be ordered.
        positive: bool (n,).

    Returns:
        float64 of shape (); NaN where all or none are positive.
    """
    _, group, sizes = torch.unique(scores, return_inverse=True, return_counts=True)
    middle = sizes.cumsum(0) - (sizes - 1).double() / 2
    positives, negatives = positive.sum().double(), (~positive).sum().double()
    pairs_won = middle[group][positive].sum() - positives * (positives + 1) / 2
    return pairs_won / (positives * negatives)


class SelectiveMetric(ScoresAndFlags):
    """A metric of uncertainties and of whether the answers are right."""

    def update(self, uncertainty: Tensor, correct: Tensor) -> None:
        """Take in a batch.

        Args:
            uncertainty: floating point (N,), higher where the model is less certain; infinity is allowed.
            correct: bool (N,), whether the answer is right.

        Raises:
            ValueError: they are something else, or an uncertainty is NaN.
        """
        self.keep(*check_scores("uncertainty", uncertainty, "correct", correct))

    def curve(self) -> RiskCoverageCurve:
        """The risk–coverage curve, one point an example."""
        uncertainty, correct = self.gathered()
        _, group, sizes = torch.unique(uncertainty, return_inverse=True, return_counts=True)
        wrong = torch.zeros(len(sizes), dtype=torch.float64, device=group.device)
        wrong.scatter_add_(0, group, (~correct).double())
        # In a random order each place of a group of ties holds the group's mean error in expectation.
        errors = (wrong / sizes).repeat_interleave(sizes).cumsum(0)
        answered = torch.arange(1, len(errors) + 1, dtype=torch.float64, device=errors.device)
        return RiskCoverageCurve(answered / len(errors), errors / answered)


class RiskCoverage(SelectiveMetric):
    """The risk–coverage curve: answer the most certain first.

    Examples of equal uncertainty have no order among themselves; the risk is its expectation over all
    orders, so the order of the data does not matter.

    Source: Geifman and El-Yaniv, "Selective classification for deep neural networks", NeurIPS 2017.
    """

    def compute(self) -> RiskCoverageCurve:
        """The curve, one point an example; of a single example, torchmetrics makes tensors of shape ().

        Raises:
            ValueError: there is no data.
        """
        return self.curve()


class AURC(SelectiveMetric):
    """Area under the risk–coverage curve: its mean over the coverages 1/n, …, 1; smaller is better.

    Ties of the uncertainty are treated as by :class:`RiskCoverage`: the area is its expectation over all orders
    of equals, so a constant uncertainty gets the error rate.

    Source: Geifman, Uziel and El-Yaniv, "Bias-reduced uncertainty estimation for deep neural classifiers",
    ICLR 2019.
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """The area, float64 of shape ().

        Raises:
            ValueError: there is no data.
        """
        return self.curve().risk.mean()


class ErrorAUROC(SelectiveMetric):
    """Area under the ROC curve of the uncertainty as a detector of wrong answers.

    NaN, with a warning, if all answers are right or all are wrong: there is nothing to tell apart.

    Source: Hendrycks and Gimpel, "A baseline for detecting misclassified and out-of-distribution examples in
    neural networks", ICLR 2017.
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        """The area, float64 of shape ().

        Raises:
            ValueError: there is no data.
        """
        uncertainty, correct = self.gathered()
        if bool(correct.all()) or not bool(correct.any()):
            warnings.warn("ErrorAUROC is NaN: it needs right and wrong answers, and has one kind only", stacklevel=2)
        return auroc(uncertainty, ~correct)
