"""The numbers behind the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Reliability:
    """A reliability diagram: bins of equal width, open below and closed above.

    Attributes:
        confidence: mean confidence in each bin, NaN in an empty one.
        accuracy: share of right answers in each bin, NaN in an empty one.
        count: answers in each bin.
    """

    confidence: np.ndarray
    accuracy: np.ndarray
    count: np.ndarray

    @property
    def share(self) -> np.ndarray:
        """Each bin's share of all answers."""
        return self.count / self.count.sum()

    @property
    def ece(self) -> float:
        """Expected calibration error: the mean gap, weighted by the bins' shares."""
        return float(np.nansum(self.share * np.abs(self.accuracy - self.confidence)))


def reliability(confidence: np.ndarray, correct: np.ndarray, bins: int = 10) -> Reliability:
    """The reliability diagram of answers with these confidences in [0, 1]."""
    index = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(index, minlength=bins)
    with np.errstate(invalid="ignore"):
        return Reliability(
            np.bincount(index, confidence, bins) / count,
            np.bincount(index, correct.astype(float), bins) / count,
            count,
        )


def risk_at(uncertainty: np.ndarray, correct: np.ndarray, coverage: np.ndarray) -> np.ndarray:
    """Share of wrong answers among the most certain ones, for each coverage in (0, 1].

    Answers of equal uncertainty count with their mean: they have no order among themselves.
    """
    _, group, sizes = np.unique(uncertainty, return_inverse=True, return_counts=True)
    wrong = np.bincount(group.reshape(-1), (~correct).astype(float), len(sizes))
    risk = np.repeat(wrong / sizes, sizes).cumsum() / np.arange(1, len(correct) + 1)
    answered = np.clip(np.ceil(coverage * len(correct) - 1e-9).astype(int), 1, len(correct))
    return risk[answered - 1]


def error_auroc(uncertainty: np.ndarray, correct: np.ndarray) -> float | None:
    """Probability that a wrong answer is more uncertain than a right one, ties counting half.

    None where all answers are right or all are wrong.
    """
    wrong = int((~correct).sum())
    right = len(correct) - wrong
    if wrong == 0 or right == 0:
        return None
    _, group, sizes = np.unique(uncertainty, return_inverse=True, return_counts=True)
    ranks = (sizes.cumsum() - (sizes - 1) / 2)[group.reshape(-1)]
    return float((ranks[~correct].sum() - wrong * (wrong + 1) / 2) / (wrong * right))


def log_edges(samples: Sequence[np.ndarray], bins: int = 28, floor: float = 1e-6) -> np.ndarray:
    """Edges of bins in log10 that hold nearly all positive values of all samples.

    The lowest percent, and what lies below ``floor``, is left below the first edge; the range spans at least
    one decade.
    """
    values = np.concatenate([sample.reshape(-1) for sample in samples]).astype(float)
    values = np.log10(values[values > floor]) if (values > floor).any() else np.log10([floor, floor * 10])
    low, high = np.percentile(values, 1), values.max() + 0.02
    return np.linspace(min(low, high - 1), high, bins + 1)


def entropy_edges(samples: Sequence[np.ndarray], classes: int, bins: int = 28) -> np.ndarray:
    """Edges of bins from 0 to the highest entropy that there can be.

    Where nearly all values are above half of that, as those of a half-trained model, the lowest half per cent is
    left below the first edge.
    """
    high = float(np.log(classes))
    low = float(np.percentile(np.concatenate(samples), 0.5))
    return np.linspace(min(low, 0.98 * high) if low > high / 2 else 0.0, high, bins + 1)


def shares(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Share of the values in each bin; those beyond an end count in the bin at that end."""
    if len(values) == 0:
        return np.zeros(len(edges) - 1)
    count, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    return count / len(values)
