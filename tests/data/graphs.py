"""A small sound graph as the arrays of its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

NODES, FEATURES = 6, 5


def arrays() -> dict[str, np.ndarray]:
    """Six nodes in a ring, two features each, three classes; the label of the last node is unknown."""
    ring = np.stack([np.arange(NODES), (np.arange(NODES) + 1) % NODES])
    return {
        "x_indptr": 2 * np.arange(NODES + 1),
        "x_indices": np.array([0, 1, 1, 2, 2, 3, 3, 4, 0, 4, 1, 3]),
        "x_data": np.linspace(0.5, 6.0, 2 * NODES, dtype=np.float32),
        "x_shape": np.array([NODES, FEATURES]),
        "edge_index": np.concatenate([ring, ring[::-1]], axis=1),
        "y": np.array([0, 1, 2, 0, 1, -1]),
        "train_index": np.array([0, 1]),
        "val_index": np.array([2]),
        "test_index": np.array([4, 3]),
    }


def write(folder: Path, *, compressed: bool = True, **changes: object) -> Path:
    """The file of that graph with some arrays replaced; None leaves an array out."""
    path = folder / "small.npz"
    changed = {name: value for name, value in {**arrays(), **changes}.items() if value is not None}
    (np.savez_compressed if compressed else np.savez)(path, **changed)
    return path
