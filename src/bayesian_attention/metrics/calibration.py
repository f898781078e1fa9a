"""Expected calibration error and reliability diagrams."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayesian_attention.checks import at_least, flag
from bayesian_attention.metrics.inputs import BatchMetric, check_probabilities


class ReliabilityBins(NamedTuple):
    """A reliability diagram.

    Attributes:
        confidence: mean confidence of each bin, float64 (bins,); 0 in an empty one.
        accuracy: share of right answers in each bin, float64 (bins,); 0 in an empty one.
        counts: examples in each bin, float64 (bins,).
    """

    confidence: Tensor
    accuracy: Tensor
    counts: Tensor


class CalibrationError(BatchMetric):
    """Expected calibration error: mean over examples of |accuracy − confidence| of their bin; in [0, 1].

    Bins are of equal width, (lower, upper], the first closed below, so that confidences of exactly 0 and
    exactly 1 fall into the first and the last. Their edges are rounded to the dtype of the probabilities:
    0.3 belongs to (0.2, 0.3] in every precision. Empty bins do not count.

    Source: Naeini, Cooper and Hauskrecht, AAAI 2015; class-wise: Kull et al., NeurIPS 2019.

    Args:
        n_bins: number of bins.
        classwise: treat each class as a yes-or-no question with the probability of that class as the
            confidence, and average the errors of the classes. By default only the most probable class of
            each example counts (top-label).
    """

    higher_is_better = False
    confidence: Tensor
    hits: Tensor
    count: Tensor

    def __init__(self, n_bins: int = 10, *, classwise: bool = False) -> None:
        super().__init__()
        self.n_bins = at_least("CalibrationError", "n_bins", n_bins, 1)
        self.classwise = flag("CalibrationError", "classwise", classwise)
        # Rows of classes by columns of bins. One row, for the top label or until the first batch tells the number
        # of classes; being zero, it adds to any number of rows when states are merged.
        for name in ("confidence", "hits", "count"):
            self.add_sum(name, 1, self.n_bins)

    def update(self, probabilities: Tensor, target: Tensor) -> None:
        """Take in a batch.

        Args:
            probabilities: floating point (N, C), C ≥ 2; each row sums to 1.
            target: integers (N,), 0 … C − 1.

        Raises:
            ValueError: they are something else, or, with ``classwise``, C is not that of earlier batches.
        """
        wide, target = check_probabilities(probabilities, target)
        if self.classwise:
            classes = wide.shape[1]
            if self.count.shape[0] != classes:
                if bool(self.count.any()):
                    raise ValueError(f"probabilities: have {classes} classes; earlier batches {self.count.shape[0]}")
                for name in ("confidence", "hits", "count"):
                    setattr(self, name, torch.zeros(classes, self.n_bins, dtype=torch.float64, device=wide.device))
            confidence, hits = (
                wide.T.contiguous(),
                (torch.arange(classes, device=target.device).unsqueeze(1) == target).double(),
            )
        else:
            top, label = wide.max(dim=1)
            confidence, hits = top.unsqueeze(0), (label == target).double().unsqueeze(0)
        # Inner edges alone: what rounding lifts above 1 stays in the last bin.
        edges = torch.arange(1, self.n_bins, dtype=torch.float64, device=wide.device) / self.n_bins
        bins = torch.bucketize(confidence, edges.to(probabilities.dtype).double())
        self.confidence.scatter_add_(1, bins, confidence)
        self.hits.scatter_add_(1, bins, hits)
        self.count.scatter_add_(1, bins, torch.ones_like(confidence))

    def compute(self) -> Tensor:
        """The error, float64 of shape ().

        Raises:
            ValueError: there is no data.
        """
        self.require_data(self.count.sum())
        return ((self.hits - self.confidence).abs().sum(dim=1) / self.count.sum(dim=1)).mean()

    def bins(self) -> ReliabilityBins:
        """The reliability diagram of this process; with ``classwise`` that of all classes together.

        Raises:
            ValueError: there is no data.
        """
        self.require_data(self.count.sum())
        count = self.count.sum(dim=0)
        some = count.clamp_min(1)
        return ReliabilityBins(self.confidence.sum(dim=0) / some, self.hits.sum(dim=0) / some, count)
