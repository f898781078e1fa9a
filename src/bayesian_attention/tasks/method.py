"""What a comparison compares: a posterior, a prior and the weight of the divergence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from bayesian_attention.checks import finite
from bayesian_attention.posteriors import Posterior, posterior_from_dict, posterior_named
from bayesian_attention.priors import Prior, prior_from_dict, prior_named
from bayesian_attention.tasks.assignments import assignments

_PATTERN = re.compile(r"(?P<family>[^+()]+?)\s*(?:\+\s*(?P<prior>[^()]+?)\s*)?(?:\((?P<settings>.*)\))?")


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
        """Refuse a weight out of range, and a posterior and a prior that do not go together."""
        # As a float, so that 1 and 1.0 make the same record.
        object.__setattr__(self, "kl_weight", finite("Method", "kl_weight", self.kl_weight))
        if self.kl_weight < 0:
            raise ValueError(f"kl_weight: must not be negative; got {self.kl_weight!r}")
        if (self.prior is None) != (self.posterior.prior_family is None):
            raise ValueError(f"prior: {self.posterior} and {self.prior} do not go together")
        if self.prior is not None and self.posterior.prior_family is not None:
            self.prior.check_family(self.posterior.prior_family)

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


def parse_methods(text: str, recipes: Mapping[str, Method]) -> dict[str, Method]:
    """The methods that a command line names, by their labels, in order.

    ``softmax,weibull+contextual,lognormal(scale=0.3,kl_weight=0.1)`` are three: a family; a family and a
    prior; a family with settings. The prior is constant where none is named. Settings are the fields of the
    posterior, those of the prior with ``prior_`` in front, and ``kl_weight``.

    Args:
        text: methods with commas between them.
        recipes: the task's tuned methods, by family and prior. A method that is not among them has defaults.

    Raises:
        ValueError: an unknown family, prior or setting (with near matches), or a method named twice.
    """
    methods: dict[str, Method] = {}
    for label in (part.strip() for part in re.split(r",(?![^(]*\))", text)):
        if label in methods:
            raise ValueError(f"attention: {label!r} is named twice")
        methods[label] = _parse_method(label, recipes)
    return methods


def _parse_method(label: str, recipes: Mapping[str, Method]) -> Method:
    match = _PATTERN.fullmatch(label)
    if match is None:
        raise ValueError(
            f"attention: cannot read {label!r}; write a family such as weibull, weibull+contextual or weibull(shape=10)"
        )
    family = posterior_named(match["family"].strip())
    if family.prior_family is None:
        if match["prior"]:
            raise ValueError(f"attention: {family.name!r} takes no prior; got {label!r}")
        method = recipes.get(family.name, Method(family()))
    else:
        prior = prior_named((match["prior"] or "constant").strip())
        method = recipes.get(f"{family.name}+{prior.name}", Method(family(), prior()))
    owners: dict[str, str] = {field.name: "posterior" for field in fields(method.posterior)}
    if method.prior is not None:
        owners |= {f"prior_{field.name}": "prior" for field in fields(method.prior)} | {"kl_weight": "kl_weight"}
    for name, owner, value in assignments(f"attention: {label!r}", match["settings"] or "", owners):
        if owner == "kl_weight":
            method = replace(method, kl_weight=value)
        elif owner == "prior" and method.prior is not None:
            method = replace(method, prior=replace(method.prior, **{name.removeprefix("prior_"): value}))
        else:
            method = replace(method, posterior=replace(method.posterior, **{name: value}))
    return method
