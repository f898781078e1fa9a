"""Checks of arguments, whose errors name the argument, what came and what is allowed."""

from __future__ import annotations

import math
import numbers


def finite(owner: str, name: str, value: object) -> float:
    """``value`` as a float, if it is a finite number.

    Raises:
        ValueError: it is not.
    """
    number = _number(value)
    if math.isfinite(number):
        return number
    raise ValueError(f"{owner}: {name} must be a finite number; got {value!r}")


def positive(owner: str, name: str, value: object) -> float:
    """``value`` as a float, if it is a positive, finite number.

    Raises:
        ValueError: it is not.
    """
    number = _number(value)
    if math.isfinite(number) and number > 0:
        return number
    raise ValueError(f"{owner}: {name} must be a positive, finite number; got {value!r}")


def at_least(owner: str, name: str, value: object, least: int) -> int:
    """``value`` as an int, if it is a whole number of at least ``least``.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least:
        return int(value)
    raise ValueError(f"{owner}: {name} must be a whole number of at least {least}; got {value!r}")


def flag(owner: str, name: str, value: object) -> bool:
    """``value``, if it is True or False and not merely something that counts as one, such as "False".

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool):
        return value
    raise ValueError(f"{owner}: {name} must be True or False; got {value!r}")


def _number(value: object) -> float:
    """``value`` as a float; NaN for what is no number, infinity for an integer beyond every float."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
