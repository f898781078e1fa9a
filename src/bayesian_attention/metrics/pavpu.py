"""Patch accuracy versus patch uncertainty."""

from __future__ import annotations

from torch import Tensor

from bayesian_attention.checks import finite
from bayesian_attention.inference.significance import Test, Values, check_options, two_leading_p_values
from bayesian_attention.metrics.inputs import MeanMetric, check_target


class PAvPU(MeanMetric):
    """Share of examples that are right and certain, or wrong and uncertain; in [0, 1].

    An example is certain if a t-test over the draws tells its two leading classes apart: p ≤ ``level``. All
    examples of a deterministic model are uncertain (p = 1), so that its PAvPU is its error rate. Papers
    print 100 times this number. It depends on the number of draws: more draws, smaller p-values.

    Source: Mukhoti and Gal, 2018, with the test of Fan et al., "Bayesian Attention Modules", NeurIPS 2020.

    Args:
        level: of the test, between 0 and 1; the paper has 0.01, 0.05 and 0.1.
        test: see :func:`two_leading_p_values`.
        values: see :func:`two_leading_p_values`.

    Raises:
        ValueError: level out of range, or names that are unknown.
    """

    higher_is_better = True

    def __init__(self, level: float = 0.05, *, test: Test = "paired", values: Values = "log_probabilities") -> None:
        super().__init__(level, test, values)
        check_options(test, values)
        if not 0 < finite("PAvPU", "level", level) < 1:
            raise ValueError(f"level: must lie between 0 and 1; got {level!r}")
        self.level = level
        self.test = test
        self.values = values

    def update(self, log_probabilities: Tensor, target: Tensor) -> None:
        """Take in a batch.

        Args:
            log_probabilities: floating point (S, N, C), of S ≥ 2 draws and C ≥ 2 classes.
            target: integers (N,), 0 … C − 1.

        Raises:
            ValueError: they are something else.
        """
        if log_probabilities.dim() != 3:
            raise ValueError(
                f"log_probabilities: must have shape (draws, examples, classes); got {tuple(log_probabilities.shape)}"
            )
        _, examples, classes = log_probabilities.shape
        target = check_target(target, examples, classes)
        p = two_leading_p_values(log_probabilities, test=self.test, values=self.values)
        right = log_probabilities.detach().double().logsumexp(dim=0).argmax(dim=-1) == target
        self.add(right == (p <= self.level))
