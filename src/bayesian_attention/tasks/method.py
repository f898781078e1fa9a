"""What a comparison compares: a posterior, a prior and the weight of the divergence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from bayesian_attention.checks import finite
from bayesian_attention.posteriors import Posterior, posterior_from_dict, posterior_named
from bayesian_attention.priors import Prior, prior_from_dict, prior_named


@dataclass(frozen=True)
class Method:
    """One way to make the attention of a task's model.

    Attributes:
        posterior: family and settings of the attention weights.
        prior: their prior; None for a deterministic posterior.
        kl_weight: weight of the divergence in the loss, non-negative.
    """

    posterior: Posterior
    prior: Prior | None = None
    kl_weight: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a weight out of range, and a stochastic posterior without a prior."""
        if finite("Method", "kl_weight", self.kl_weight) < 0:
            raise ValueError(f"kl_weight: must not be negative; got {self.kl_weight!r}")
        if (self.prior is None) != (self.posterior.prior_family is None):
            raise ValueError(f"prior: {self.posterior} and {self.prior} do not go together")

    @property
    def name(self) -> str:
        """Family and prior, such as ``weibull+contextual``; ``softmax`` alone."""
        return self.posterior.name if self.prior is None else f"{self.posterior.name}+{self.prior.name}"

    def to_dict(self) -> dict[str, Any]:
        """The method as plain data."""
        return {
            "posterior": self.posterior.to_dict(),
            "prior": None if self.prior is None else self.prior.to_dict(),
            "kl_weight": self.kl_weight,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Method:
        """The method that :meth:`to_dict` wrote."""
        prior = data["prior"]
        return cls(
            posterior_from_dict(data["posterior"]),
            None if prior is None else prior_from_dict(prior),
            float(data["kl_weight"]),
        )


def parse_method(text: str, recipes: Mapping[str, Method]) -> Method:
    """The method that a command line names: ``softmax``, ``weibull`` or ``weibull+contextual``.

    Args:
        text: a family, or a family and a prior joined by ``+``; the prior is constant by default.
        recipes: the task's tuned methods by name; a method that is not among them has default settings.

    Raises:
        ValueError: an unknown family or prior, with near matches.
    """
    family_name, _, prior_name = text.strip().partition("+")
    family = posterior_named(family_name)
    if family.prior_family is None:
        if prior_name:
            raise ValueError(f"attention: {family_name!r} takes no prior; got {text!r}")
        return recipes.get(family_name, Method(family()))
    prior = prior_named(prior_name or "constant")
    return recipes.get(f"{family.name}+{prior.name}", Method(family(), prior()))


def override(method: Method, **settings: float | None) -> Method:
    """The method with some settings replaced, each wherever it has a meaning.

    Args:
        method: what to change.
        **settings: numbers by name: ``kl_weight``, or any field of the posterior or the prior, where the
            posterior's fields are plain (``shape``, ``scale``) and the prior's begin with ``prior_``. None
            leaves the setting alone.

    Raises:
        ValueError: no part of the method has such a setting, or the value is not allowed.
    """
    posterior, prior, kl_weight = method.posterior, method.prior, method.kl_weight
    for name, value in settings.items():
        if value is None:
            continue
        if name == "kl_weight" and prior is not None:
            kl_weight = value
        elif name.startswith("prior_") and prior is not None and _has(prior, name.removeprefix("prior_")):
            prior = replace(prior, **{name.removeprefix("prior_"): value})
        elif _has(posterior, name):
            posterior = replace(posterior, **{name: value})
        else:
            raise ValueError(f"{name}: {method.name} has no such setting")
    return Method(posterior, prior, kl_weight)


def _has(spec: object, name: str) -> bool:
    return any(field.name == name for field in fields(spec))  # type: ignore[arg-type]
