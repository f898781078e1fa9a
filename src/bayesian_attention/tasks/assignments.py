"""Settings as a command line writes them: ``name=value,name=value``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from bayesian_attention.names import look_up

Owner = TypeVar("Owner")

_WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None}


def assignments(what: str, text: str, known: Mapping[str, Owner]) -> Iterator[tuple[str, Owner, Any]]:
    """Each setting in ``text`` with what ``known`` has under its name, and its value.

    A value is a number, true, false, none or a word.

    Args:
        what: begins the error messages.
        text: settings with commas between them; may be empty.
        known: all names of settings.

    Raises:
        ValueError: an unknown name (with near matches), a name without a value, or a name given twice.
    """
    seen: set[str] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        owner = look_up(f"{what}: setting", name, known)
        if not value:
            raise ValueError(f"{what}: {name} has no value; write {name}=NUMBER")
        if name in seen:
            raise ValueError(f"{what}: {name} is set twice")
        seen.add(name)
        yield name, owner, _read(value)


def _read(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
