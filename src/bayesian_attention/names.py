"""Looking things up by name, with near matches in the error."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def look_up(kind: str, name: str, known: Mapping[str, T]) -> T:
    """The value of ``name`` in ``known``.

    Args:
        kind: what is looked up, such as "attention"; begins the error message.
        name: the name asked for.
        known: all names.

    Raises:
        ValueError: there is no such name; the message lists near matches and all names.
    """
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(match) for match in near)}?" if near else ""
    raise ValueError(f"{kind}: no {name!r}.{hint} Known: {', '.join(sorted(known))}.")
