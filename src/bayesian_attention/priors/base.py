"""What a prior owes the library: the parameters of a Gamma or a lognormal for every attention weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from bayesian_attention.checks import finite, positive
from bayesian_attention.names import look_up

#: Smallest concentration of a Gamma prior: below it log Γ leaves float32.
SMALLEST_CONCENTRATION = 1e-30


class GammaParameters(NamedTuple):
    """Gamma(concentration α, rate β), each a number or a tensor that broadcasts against the entries."""

    concentration: float | Tensor
    rate: float | Tensor


class LogNormalParameters(NamedTuple):
    """LogNormal(loc μ₀, scale σ₀), each a number or a tensor that broadcasts against the entries."""

    loc: float | Tensor
    scale: float | Tensor


PriorParameters = GammaParameters | LogNormalParameters

#: Settings that belong to one family of prior alone, by family.
FAMILY_SETTINGS = {"gamma": ("concentration", "rate"), "lognormal": ("loc", "scale")}


@dataclass(frozen=True)
class Prior(ABC):
    """A prior over unnormalised attention weights.

    The posterior decides the family: Gamma beneath a Weibull, lognormal beneath a lognormal. A spec has
    the settings of both; None stands for the default of the family in use, and a setting of the other
    family is an error when the module is built, never ignored.
    """

    name: ClassVar[str]

    #: What None stands for.
    defaults: ClassVar[dict[str, float]] = {"concentration": 1.0, "rate": 1.0, "loc": 0.0, "scale": 1.0}

    def __post_init__(self) -> None:
        """Refuse settings that are no numbers, or not positive where they must be."""
        for field in ("concentration", "rate", "scale"):
            value = getattr(self, field, None)
            if value is not None:
                object.__setattr__(self, field, positive(type(self).__name__, field, value))
        loc = getattr(self, "loc", None)
        if loc is not None:
            object.__setattr__(self, "loc", finite(type(self).__name__, "loc", loc))

    def setting(self, name: str) -> float:
        """The value of a setting, or its default."""
        value = getattr(self, name, None)
        return self.defaults[name] if value is None else float(value)

    def build(self, family: str, heads: int, key_dim: int | None) -> PriorModule:
        """The module with the prior's parameters.

        Args:
            family: "gamma" or "lognormal", as the posterior asks.
            heads: number of attention heads.
            key_dim: features of a key a head; None where the host has no keys to offer.

        Raises:
            ValueError: a setting is given that the family does not have, or keys are needed and absent.
        """
        self.check_family(family)
        return self.module(family, heads, key_dim)

    def check_family(self, family: str) -> None:
        """Refuse settings of another family than "gamma" or "lognormal", whichever is asked for.

        Raises:
            ValueError: a setting is given that the family does not have.
        """
        own = look_up("family", family, FAMILY_SETTINGS)
        for field in fields(self):
            foreign = field.name in self.defaults and field.name not in own
            if foreign and getattr(self, field.name) is not None:
                raise ValueError(
                    f"{type(self).__name__}: {field.name} has no meaning for a {family} prior; "
                    f"it takes {' and '.join(name for name in own if hasattr(self, name))}"
                )

    @abstractmethod
    def module(self, family: str, heads: int, key_dim: int | None) -> PriorModule:
        """What :meth:`build` returns once the settings are checked."""

    def to_dict(self) -> dict[str, Any]:
        """The spec as plain data, with its kind under ``"name"``."""
        return {"name": self.name, **asdict(self)}


class PriorModule(nn.Module):
    """A prior with its parameters. Subclasses give ``parameters_of``, and ``scores`` if they look at keys.

    Args:
        spec: the prior.
        family: "gamma" or "lognormal".
    """

    #: Whether :meth:`scores` is to be called.
    needs_keys: ClassVar[bool] = False

    def __init__(self, spec: Prior, family: str) -> None:
        super().__init__()
        self.spec = spec
        self.family = family

    def scores(self, keys: Tensor) -> Tensor:
        """Unnormalised log weights of the prior, one a key and head.

        Args:
            keys: (…, H, Lk, D); for a graph the nodes are the keys, (H, N, D).

        Returns:
            Tensor of shape (…, H, Lk), float32 or wider.
        """
        raise NotImplementedError(f"{type(self).__name__} does not look at keys")

    def distribution(self, log_weights: Tensor | None, heads_view: Callable[[Tensor], Tensor]) -> PriorParameters:
        """The parameters of the prior of every entry.

        Args:
            log_weights: :meth:`scores`, normalised over each row; None unless ``needs_keys``.
            heads_view: gives a tensor of shape (H,) the shape that broadcasts against the entries.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Spec and family, for ``print(model)``."""
        return f"{self.spec}, family={self.family!r}"
