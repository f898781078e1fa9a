"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``, and move what was written there to ``path`` at the end.

    After an error, or a kill, ``path`` is what it was before.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def writable_folder(path: Path, argument: str) -> Path:
    """``path`` as a folder that exists and can be written to.

    Args:
        path: the folder; created with its parents where it is missing.
        argument: what the user calls it, for the error.

    Raises:
        ValueError: it cannot be created or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{argument}: cannot write to the folder {path} ({reason})") from error
    return path
