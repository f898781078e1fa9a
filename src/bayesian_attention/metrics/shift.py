"""Out-of-distribution detection."""

from __future__ import annotations

import warnings

from torch import Tensor

from bayesian_attention.metrics.inputs import check_scores
from bayesian_attention.metrics.selective import ScoresAndFlags, auroc


class OutOfDistributionAUROC(ScoresAndFlags):
    """Area under the ROC curve of the uncertainty as a detector of input from another distribution.

    NaN, with a warning, if all input is of one kind: there is nothing to tell apart.

    Source: Hendrycks and Gimpel, "A baseline for detecting misclassified and out-of-distribution examples in
    neural networks", ICLR 2017.
    """

    higher_is_better = True

    def update(self, uncertainty: Tensor, is_ood: Tensor) -> None:
        """Take in a batch.

        Args:
            uncertainty: floating point (N,), higher where the model is less certain; infinity is allowed.
            is_ood: bool (N,), whether the input is out of distribution.

        Raises:
            ValueError: they are something else, or an uncertainty is NaN.
        """
        self.keep(*check_scores("uncertainty", uncertainty, "is_ood", is_ood))

    def compute(self) -> Tensor:
        """The area, float64 of shape ().

        Raises:
            ValueError: there is no data.
        """
        uncertainty, is_ood = self.gathered()
        if bool(is_ood.all()) or not bool(is_ood.any()):
            warnings.warn(
                "OutOfDistributionAUROC is NaN: it needs input from both distributions, and has one kind only",
                stacklevel=2,
            )
        return auroc(uncertainty, is_ood)
