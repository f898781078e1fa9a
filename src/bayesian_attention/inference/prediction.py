"""Predictions with their uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayesian_attention.inference.significance import two_leading_p_values

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Prediction:
    """Posterior predictive draws of a batch. See the subclasses."""

    def columns(self) -> dict[str, Tensor]:
        """What :meth:`to_pandas` shows: tensors of shape (rows,)."""
        raise NotImplementedError

    def to_pandas(self) -> pd.DataFrame:
        """One line a row of the batch (all dimensions before the classes are flattened).

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install 'bayesian-attention[pandas]'") from error
        return pd.DataFrame({name: column.numpy() for name, column in self.columns().items()})


@dataclass(frozen=True, eq=False)
class ClassificationPrediction(Prediction):
    """Predictions over classes.

    Attributes:
        logits: (S, B, …, C), float32 or wider, on the CPU; one slice a posterior draw.
    """

    logits: Tensor

    def __post_init__(self) -> None:
        """Refuse what is no set of draws over classes."""
        if self.logits.dim() < 2 or self.logits.shape[0] < 1 or self.logits.shape[-1] < 2:
            raise ValueError(
                "logits: must have shape (draws, …, classes) with at least one draw and two classes; "
                f"got {tuple(self.logits.shape)}"
            )

    @cached_property
    def log_probabilities(self) -> Tensor:
        """Log-probabilities of each draw, (S, B, …, C)."""
        return self.logits.log_softmax(dim=-1)

    @cached_property
    def samples(self) -> Tensor:
        """Probabilities of each draw, (S, B, …, C)."""
        return self.log_probabilities.exp()

    @cached_property
    def mean(self) -> Tensor:
        """Predictive probabilities, the mean over draws, (B, …, C)."""
        return self.samples.mean(dim=0)

    @cached_property
    def std(self) -> Tensor:
        """Standard deviation of the probabilities over draws, (B, …, C); 0 for a single draw."""
        return self.samples.std(dim=0, correction=1 if self.samples.shape[0] > 1 else 0)

    @property
    def label(self) -> Tensor:
        """The most probable class, int64 (B, …)."""
        return self.mean.argmax(dim=-1)

    @property
    def confidence(self) -> Tensor:
        """Its probability, (B, …)."""
        return self.mean.amax(dim=-1)

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the predictive distribution in nats, (B, …): the total uncertainty."""
        return torch.special.entr(self.mean).sum(dim=-1)

    @cached_property
    def aleatoric(self) -> Tensor:
        """Mean entropy of the draws in nats, (B, …): what would remain if the weights were known."""
        return torch.special.entr(self.samples).sum(dim=-1).mean(dim=0)

    @cached_property
    def epistemic(self) -> Tensor:
        """Mutual information of label and attention weights in nats, (B, …): entropy − aleatoric."""
        return (self.entropy - self.aleatoric).clamp_min(0.0)

    @cached_property
    def p_value(self) -> Tensor:
        """Paired t-test between the two leading classes over draws, (B, …); 1 for a single draw.

        Small values mean that the draws agree on which class leads. It shrinks with the number of draws.
        """
        if self.logits.shape[0] < 2:
            return torch.ones(self.logits.shape[1:-1], dtype=self.logits.dtype)
        return two_leading_p_values(self.log_probabilities)

    def certain(self, level: float = 0.05) -> Tensor:
        """Where the test rejects that the two leading classes are level, bool (B, …)."""
        if not 0 < level < 1:
            raise ValueError(f"level: must lie between 0 and 1; got {level!r}")
        return self.p_value <= level

    def columns(self) -> dict[str, Tensor]:
        """Label, confidence and uncertainties, then one probability a class."""
        named = ("label", "confidence", "entropy", "aleatoric", "epistemic", "p_value")
        columns = {name: getattr(self, name).flatten() for name in named}
        probabilities = self.mean.flatten(end_dim=-2)
        return columns | {f"p{c}": probabilities[:, c] for c in range(probabilities.shape[1])}


@dataclass(frozen=True, eq=False)
class RegressionPrediction(Prediction):
    """Predictions of numbers.

    Attributes:
        samples: (S, B, …), the predicted mean of each posterior draw, on the CPU.
        noise_variance: variance of the observations around the mean, broadcasting against ``samples``, or
            None where the model has no notion of it.
    """

    samples: Tensor
    noise_variance: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse what is no set of draws."""
        if self.samples.dim() < 2 or self.samples.shape[0] < 1:
            raise ValueError(
                f"samples: must have shape (draws, rows, …) with at least one draw; got {tuple(self.samples.shape)}"
            )
        if self.noise_variance is not None and not bool((self.noise_variance >= 0).all()):
            raise ValueError("noise_variance: must not be negative or NaN")

    @cached_property
    def mean(self) -> Tensor:
        """Mean over draws, (B, …)."""
        return self.samples.mean(dim=0)

    @cached_property
    def epistemic(self) -> Tensor:
        """Standard deviation over draws, (B, …); 0 for a single draw."""
        return self.samples.std(dim=0, correction=1 if self.samples.shape[0] > 1 else 0)

    @cached_property
    def aleatoric(self) -> Tensor:
        """Root of the mean noise variance, (B, …); 0 where the model has none."""
        if self.noise_variance is None:
            return torch.zeros_like(self.mean)
        return self.noise_variance.expand_as(self.samples).mean(dim=0).sqrt()

    @cached_property
    def std(self) -> Tensor:
        """Standard deviation of the predictive distribution, (B, …)."""
        return torch.hypot(self.epistemic, self.aleatoric)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Central interval of a normal with the predictive mean and standard deviation, two (B, …)."""
        if not 0 < level < 1:
            raise ValueError(f"level: must lie between 0 and 1; got {level!r}")
        half = NormalDist().inv_cdf(0.5 + level / 2) * self.std
        return self.mean - half, self.mean + half

    def log_likelihood(self, target: Tensor) -> Tensor:
        """Log density of ``target`` (B, …) under the mixture of the draws, (B, …), in nats.

        Raises:
            ValueError: the noise variance is missing or zero, so a draw has no density, or ``target`` has
                another shape than the predictions.
        """
        if self.noise_variance is None:
            raise ValueError("noise_variance: a density needs one; give it to predict()")
        if not bool((self.noise_variance > 0).all()):
            raise ValueError("noise_variance: a density needs a positive one; some of it is zero")
        if target.shape != self.samples.shape[1:]:
            raise ValueError(f"target: must have shape {tuple(self.samples.shape[1:])}; got {tuple(target.shape)}")
        variance = self.noise_variance.expand_as(self.samples)
        log_density = -0.5 * ((target - self.samples) ** 2 / variance + variance.log() + math.log(2 * math.pi))
        return torch.logsumexp(log_density, dim=0) - math.log(self.samples.shape[0])

    def columns(self) -> dict[str, Tensor]:
        """Mean and standard deviations."""
        return {name: getattr(self, name).flatten() for name in ("mean", "std", "aleatoric", "epistemic")}
