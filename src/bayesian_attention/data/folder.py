"""Where data sets are found."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

#: Environment variable with the folder of data sets.
FOLDER_VARIABLE = "BAYESIAN_ATTENTION_DATA"

#: Data sets that are part of the package.
_EMBEDDED = {"cora": "cora.npz"}


def find(name: str, relative: str, folder: Path | None = None) -> Path:
    """The file of a data set: embedded, or in the data folder.

    Args:
        name: name of the data set.
        relative: path of its file below the data folder.
        folder: the data folder; by default what is part of the package, then the folder that the environment
            variable names.

    Raises:
        ValueError: there is no such file; the message says how to get it.
    """
    if name in _EMBEDDED and folder is None:
        return Path(str(resources.files("bayesian_attention.data").joinpath(_EMBEDDED[name])))
    if folder is None and os.environ.get(FOLDER_VARIABLE):
        folder = Path(os.environ[FOLDER_VARIABLE])
    if folder is None:
        raise ValueError(
            f"{name}: is not part of the package. Point {FOLDER_VARIABLE} or --data to a folder that has {relative} "
            "(docs/data.md says how to make it from its publisher's files)"
        )
    path = folder / relative
    if not path.is_file():
        raise ValueError(f"{name}: there is no {path}; docs/data.md says how to make it from its publisher's files")
    return path
