"""The runs of a report: records with the arrays that they saved."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from bayesian_attention.tasks.records import Record, load_arrays

#: Per test node; ``probabilities`` has a second dimension for the classes.
_NODE_ARRAYS = ("node", "target", "probabilities", "entropy", "epistemic")
_EDGE_ARRAYS = ("attention_mean", "attention_std")

# What numpy raises for a file that is missing, cut short, changed, or no npz at all.
_DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run with its predictions.

    Attributes:
        record: the record.
        node: numbers of the test nodes, (T,).
        target: their classes, (T,).
        probabilities: predicted, (T, C).
        entropy: of the predictions in nats, (T,).
        epistemic: the part of the entropy that draws of the attention explain, in nats, (T,).
        label_all: predicted class of every node, (N,).
        edge_index: sources and targets of the edges, (2, E).
        attention_mean: mean weight of each edge over posterior draws, (E,).
        attention_std: its standard deviation over draws, (E,).
    """

    record: Record
    node: np.ndarray
    target: np.ndarray
    probabilities: np.ndarray
    entropy: np.ndarray
    epistemic: np.ndarray
    label_all: np.ndarray
    edge_index: np.ndarray
    attention_mean: np.ndarray
    attention_std: np.ndarray

    @cached_property
    def confidence(self) -> np.ndarray:
        """Probability of the predicted class, (T,)."""
        return self.probabilities.max(axis=1).astype(np.float64)

    @cached_property
    def label(self) -> np.ndarray:
        """The predicted class, (T,)."""
        return self.probabilities.argmax(axis=1)

    @cached_property
    def correct(self) -> np.ndarray:
        """Whether it is the true one, bool (T,)."""
        return self.label == self.target

    @property
    def stochastic(self) -> bool:
        """Whether the attention varies from draw to draw."""
        return bool((self.attention_std > 0).any())

    @property
    def has_epistemic(self) -> bool:
        """Whether there is epistemic uncertainty beyond rounding."""
        return bool((self.epistemic > 1e-6).any())


def latest(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """One record for each task, method and seed: the last. Names the runs that it replaces.

    A table has one place for them.
    """
    kept: dict[str, Record] = {}
    complaints = []
    for record in records:
        place = json.dumps([record.task, record.method, record.seed])
        if place in kept:
            complaints.append(
                f"{record.task}: {record.method}, seed {record.seed}: an earlier run with other settings is left out"
            )
            del kept[place]
        kept[place] = record
    return list(kept.values()), list(dict.fromkeys(complaints))


def load_runs(folder: Path, records: Sequence[Record]) -> tuple[list[Run], list[str]]:
    """The runs whose arrays can be used, and a complaint for each of the others."""
    runs, complaints = [], []
    for record in records:
        path = folder / "predictions" / f"{record.stem}.npz"
        try:
            runs.append(_load(path, record))
        except _DAMAGE as error:
            reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be used ({_reason(error)})"
            complaints.append(
                f"{record.method}, seed {record.seed}: predictions/{path.name} {reason}; "
                "the run is in the tables, but in no figure"
            )
    return runs, complaints


def _load(path: Path, record: Record) -> Run:
    if path.stat().st_size > 0 and not zipfile.is_zipfile(path):
        raise ValueError("is no npz file, or half of one")
    arrays = load_arrays(path)
    names = (*_NODE_ARRAYS, "label_all", "edge_index", *_EDGE_ARRAYS)
    absent = [name for name in names if name not in arrays]
    if absent:
        raise ValueError(f"lacks {', '.join(absent)}")
    run = Run(record, **{name: arrays[name] for name in names})
    nodes, edges = len(run.node), run.edge_index.shape[-1]
    if (
        nodes == 0
        or run.probabilities.ndim != 2
        or run.edge_index.shape != (2, edges)
        or any(len(arrays[name]) != nodes for name in _NODE_ARRAYS)
        or any(arrays[name].shape != (edges,) for name in _EDGE_ARRAYS)
    ):
        raise ValueError("its arrays do not fit together")
    for name in ("probabilities", "entropy", "epistemic", *_EDGE_ARRAYS):
        if not np.isfinite(arrays[name]).all():
            raise ValueError(f"{name} has numbers that are not finite")
    highest = max(run.node.max(), run.edge_index.max(initial=0))
    if min(run.node.min(), run.edge_index.min(initial=0)) < 0 or highest >= len(run.label_all):
        raise ValueError("it names nodes that label_all lacks")
    accuracy = record.metrics.get("accuracy")
    # Half an answer more than none: equal probabilities may be ordered otherwise in another precision.
    if accuracy is not None and abs(run.correct.mean() - accuracy) > 1.5 / nodes:
        raise ValueError(f"its accuracy is {run.correct.mean():.4f}, that of the record {accuracy:.4f}")
    return run


def _reason(error: Exception) -> str:
    text = error.args[0] if len(error.args) == 1 else getattr(error, "strerror", None)
    return str(text or type(error).__name__).partition("\n")[0]
