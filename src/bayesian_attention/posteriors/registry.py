"""Posterior families by name, for commands and for files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bayesian_attention.names import look_up
from bayesian_attention.posteriors.base import Posterior
from bayesian_attention.posteriors.lognormal import LogNormal
from bayesian_attention.posteriors.softmax import Softmax
from bayesian_attention.posteriors.weibull import Weibull

_FAMILIES: dict[str, type[Posterior]] = {family.name: family for family in (Softmax, Weibull, LogNormal)}


def posterior_named(name: str) -> type[Posterior]:
    """The family called ``name``.

    Raises:
        ValueError: there is none; the message offers near matches.
    """
    return look_up("attention", name, _FAMILIES)


def posterior_from_dict(data: Mapping[str, Any]) -> Posterior:
    """The spec that :meth:`Posterior.to_dict` wrote."""
    fields = dict(data)
    return posterior_named(fields.pop("name"))(**fields)
