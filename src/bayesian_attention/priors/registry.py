"""Priors by name, for commands and for files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bayesian_attention.names import look_up
from bayesian_attention.priors.base import Prior
from bayesian_attention.priors.constant import ConstantPrior
from bayesian_attention.priors.contextual import ContextualPrior
from bayesian_attention.priors.learned import LearnedPrior

_PRIORS: dict[str, type[Prior]] = {prior.name: prior for prior in (ConstantPrior, LearnedPrior, ContextualPrior)}


def prior_named(name: str) -> type[Prior]:
    """The kind of prior called ``name``.

    Raises:
        ValueError: there is none; the message offers near matches.
    """
    return look_up("prior", name, _PRIORS)


def prior_from_dict(data: Mapping[str, Any]) -> Prior:
    """The spec that :meth:`Prior.to_dict` wrote."""
    fields = dict(data)
    return prior_named(fields.pop("name"))(**fields)
