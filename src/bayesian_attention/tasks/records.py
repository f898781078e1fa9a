"""Finished runs on disk: one JSON line each, and an npz file with what a report draws."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from bayesian_attention.files import replacing

RUNS_FILE = "runs.jsonl"

#: What the entries of a line must be.
_KINDS: dict[str, type | tuple[type, ...]] = {
    "task": str,
    "method": str,
    "seed": int,
    "settings": dict,
    "versions": dict,
    "seconds": (int, float),
    "epochs": int,
}


@dataclass(frozen=True)
class Record:
    """One finished run.

    Attributes:
        task: name of the task.
        method: label of the method, as the command line has it.
        seed: seed of initialisation, training and draws.
        settings: everything else that the result depends on: the method, the recipe, the data's fingerprint.
        metrics: results by their plain names, as fractions and nats.
        versions: of the libraries, by name.
        seconds: wall-clock time of the training.
        epochs: epochs of the training.
    """

    task: str
    method: str
    seed: int
    settings: Mapping[str, Any]
    metrics: Mapping[str, float]
    versions: Mapping[str, str]
    seconds: float
    epochs: int

    @property
    def key(self) -> str:
        """Equal for two runs that would repeat each other."""
        return run_key(self.task, self.method, self.seed, self.settings)

    @property
    def stem(self) -> str:
        """Name of the run's files, without an ending."""
        return run_stem(self.task, self.method, self.seed, self.settings)

    def to_line(self) -> str:
        """One line of JSON, the metrics at the top level."""
        data = asdict(self)
        # JSON has no NaN.
        metrics = {name: value if math.isfinite(value) else None for name, value in data.pop("metrics").items()}
        return json.dumps({**data, **metrics}, allow_nan=False) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Record:
        """The record that :meth:`to_line` wrote.

        Raises:
            ValueError: the line is not a record.
        """
        try:
            data = json.loads(line)
            own = {field.name: data.pop(field.name) for field in fields(cls) if field.name != "metrics"}
            metrics = {name: math.nan if value is None else float(value) for name, value in data.items()}
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"is not a finished run ({type(error).__name__}: {error})") from error
        for name, kind in _KINDS.items():
            if not isinstance(own[name], kind) or isinstance(own[name], bool):
                raise ValueError(f"is not a finished run ({name} is {own[name]!r})")
        return cls(**own, metrics=metrics)


def run_key(task: str, method: str, seed: int, settings: Mapping[str, Any]) -> str:
    """What tells one run from another."""
    return json.dumps([task, method, seed, settings], sort_keys=True)


def run_stem(task: str, method: str, seed: int, settings: Mapping[str, Any]) -> str:
    """A file name for a run: readable, and its own, as runs of other settings may lie beside it."""
    digest = hashlib.sha256(run_key(task, method, seed, settings).encode()).hexdigest()[:6]
    return f"{task}-{re.sub(r'[^A-Za-z0-9.=+]+', '_', method).strip('_')}-{seed}-{digest}"


def append_record(folder: Path, record: Record) -> None:
    """Add a run to the folder's list, at once and durably.

    A line that an earlier kill left unfinished is closed first, so that it cannot swallow the new one.
    """
    path = folder / RUNS_FILE
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(record.to_line().encode())
        file.flush()
        os.fsync(file.fileno())


def read_records(folder: Path) -> tuple[list[Record], list[str]]:
    """The finished runs of a folder, and a complaint for each line that is none.

    A later line replaces an earlier one of the same run, and its place in the order.

    Raises:
        ValueError: the list is there and cannot be read.
    """
    path = folder / RUNS_FILE
    if not path.exists():
        return [], []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    records: dict[str, Record] = {}
    complaints = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = Record.from_line(line)
        except (ValueError, TypeError) as error:
            complaints.append(f"{path}:{number}: {error}")
            continue
        records.pop(record.key, None)
        records[record.key] = record
    return list(records.values()), complaints


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write named arrays as a compressed npz, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays that :func:`save_arrays` wrote; nothing is unpickled."""
    # From memory: of a file that proves to be no zip archive, numpy leaves the handle open.
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}
