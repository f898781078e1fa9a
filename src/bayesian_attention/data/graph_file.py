"""Graphs for node classification, in one npz file each.

The arrays of a file:

- ``x_indptr``, ``x_indices``, ``x_data``, ``x_shape``: node features, a CSR matrix (N, F);
- ``edge_index``: int64 (2, E), each column an edge from a source to a target, every undirected edge in both
  directions;
- ``y``: int64 (N,), classes 0 … C − 1, −1 where unknown;
- ``train_index``, ``val_index``, ``test_index``: int64, the nodes of each split.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SPLITS = ("train", "val", "test")
_FEATURES = ("x_indptr", "x_indices", "x_data", "x_shape")
# What zipfile and numpy raise for bytes that are not what they should be; RuntimeError: of a flag that says encrypted
# or compressed in another way, MemoryError: of an absurd shape.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError, MemoryError)
_REQUIRED = (*_FEATURES, "edge_index", "y", *(f"{split}_index" for split in SPLITS))


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph whose nodes are to be classified.

    Attributes:
        name: what to call it.
        fingerprint: first 16 hexadecimal digits of the SHA-256 of the file.
        indptr: int64 (N + 1,), row pointers of the features.
        indices: int64 (nnz,), their columns.
        values: float32 (nnz,), their values.
        features: number of columns F.
        edge_index: int64 (2, E).
        y: int64 (N,), −1 where unknown.
        splits: the nodes of "train", "val" and "test", int64.
    """

    name: str
    fingerprint: str
    indptr: Tensor
    indices: Tensor
    values: Tensor
    features: int
    edge_index: Tensor
    y: Tensor
    splits: dict[str, Tensor]

    @property
    def nodes(self) -> int:
        """Number of nodes N."""
        return self.y.shape[0]

    @property
    def classes(self) -> int:
        """Number of classes C."""
        return int(self.y.max()) + 1


def load_graph(path: Path, name: str | None = None) -> Graph:
    """Read a graph and check every array of it. Nothing in the file is ever unpickled.

    Args:
        path: the npz file.
        name: what to call the graph; by default the file's stem.

    Raises:
        ValueError: the file is missing, truncated or pickled, or an array is not what it should be; the
            message names the file and the array.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    arrays = _read_arrays(path, content)
    x_shape = _integers(path, arrays, "x_shape", 1)
    if x_shape.shape != (2,) or (x_shape < 1).any():
        raise ValueError(f"{path}: x_shape must be two positive numbers, nodes and features; got {x_shape.tolist()}")
    nodes, features = (int(size) for size in x_shape)
    indptr, indices, values = _check_features(path, arrays, nodes, features)
    y = _integers(path, arrays, "y", 1)
    if y.shape != (nodes,):
        raise ValueError(f"{path}: y has {y.size} labels for {nodes} nodes")
    classes = int(y.max())
    if (y < -1).any() or classes < 1:
        raise ValueError(
            f"{path}: y must hold at least two classes 0, 1, … and −1 where unknown; got values "
            f"from {int(y.min())} to {classes}"
        )
    present = np.unique(y[y >= 0])
    if present.size != classes + 1:
        lacking = int(np.setdiff1d(np.arange(min(classes, present.size) + 1), present)[0])
        raise ValueError(f"{path}: y has classes up to {classes} and none {lacking}; number them 0, 1, … without gaps")
    edges = _integers(path, arrays, "edge_index", 2)
    if edges.shape[0] != 2:
        raise ValueError(f"{path}: edge_index must have shape (2, edges); got {edges.shape}")
    _check_nodes(path, "edge_index", edges, nodes)
    splits = {split: _check_split(path, arrays, f"{split}_index", y) for split in SPLITS}
    _check_disjoint(path, splits)
    return Graph(
        name=name or path.stem,
        fingerprint=hashlib.sha256(content).hexdigest()[:16],
        indptr=torch.from_numpy(indptr),
        indices=torch.from_numpy(indices),
        values=torch.from_numpy(values),
        features=features,
        edge_index=torch.from_numpy(np.ascontiguousarray(edges)),
        y=torch.from_numpy(y),
        splits={split: torch.from_numpy(nodes_) for split, nodes_ in splits.items()},
    )


def _read_arrays(path: Path, content: bytes) -> dict[str, np.ndarray]:
    """The arrays of the file, by name."""
    try:
        # From memory: of a file that proves to be no zip archive, numpy leaves the handle open.
        file = np.load(io.BytesIO(content), allow_pickle=False)
        names = file.files if isinstance(file, np.lib.npyio.NpzFile) else None
        arrays = {name: file[name] for name in _REQUIRED if name in names} if names is not None else {}
    except _DAMAGE as error:
        if "pickle" in str(error).lower():
            raise ValueError(f"{path}: holds pickled objects, which are never read; save plain arrays") from error
        raise ValueError(f"{path}: is truncated, damaged or no npz file ({error})") from error
    if names is None:
        raise ValueError(f"{path}: is a single array, not an npz file with the arrays {', '.join(_REQUIRED)}")
    missing = [name for name in _REQUIRED if name not in names]
    if missing:
        raise ValueError(f"{path}: lacks {', '.join(missing)}; it has {', '.join(names) or 'no array'}")
    for name, array in arrays.items():
        # Of a member that is no npy file numpy gives the bytes.
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{path}: {name} is no array")
    return arrays


def _integers(path: Path, arrays: dict[str, np.ndarray], name: str, dimensions: int) -> np.ndarray:
    """An array of whole numbers, as int64."""
    array = arrays[name]
    if array.ndim != dimensions or array.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: {name} must hold integers in {dimensions} dimension(s); got {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64)


def _check_nodes(path: Path, name: str, array: np.ndarray, nodes: int) -> None:
    """Every number must be a node."""
    wrong = (array < 0) | (array >= nodes)
    if wrong.any():
        place = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise ValueError(
            f"{path}: {name} names the missing node {int(array[place])} at {list(place)}; "
            f"the nodes are 0 to {nodes - 1}"
        )


def _check_features(
    path: Path, arrays: dict[str, np.ndarray], nodes: int, features: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The CSR matrix of the features."""
    indptr = _integers(path, arrays, "x_indptr", 1)
    indices = _integers(path, arrays, "x_indices", 1)
    values = arrays["x_data"]
    if values.ndim != 1 or values.dtype.kind not in "iufb":
        raise ValueError(f"{path}: x_data must hold numbers in 1 dimension; got {values.dtype} of {values.shape}")
    if indptr.shape != (nodes + 1,) or indptr[0] != 0 or (np.diff(indptr) < 0).any() or indptr[-1] != indices.size:
        raise ValueError(
            f"{path}: x_indptr must rise from 0 to the {indices.size} entries of x_indices in {nodes + 1} steps"
        )
    if values.shape != indices.shape:
        raise ValueError(f"{path}: x_data has {values.size} values for {indices.size} indices")
    if indices.size and (indices.min() < 0 or indices.max() >= features):
        raise ValueError(f"{path}: x_indices must lie in 0 … {features - 1}; got {indices.min()} … {indices.max()}")
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"{path}: x_data holds a number that is not finite")
    return indptr, indices, values


def _check_split(path: Path, arrays: dict[str, np.ndarray], name: str, y: np.ndarray) -> np.ndarray:
    """The nodes of one split, all of them labelled."""
    index = _integers(path, arrays, name, 1)
    if index.size == 0:
        raise ValueError(f"{path}: {name} is empty")
    _check_nodes(path, name, index, y.size)
    unlabelled = index[y[index] < 0]
    if unlabelled.size:
        raise ValueError(f"{path}: {name} holds node {int(unlabelled[0])}, whose label is unknown (-1)")
    if np.unique(index).size != index.size:
        raise ValueError(f"{path}: {name} holds a node twice")
    return index


def _check_disjoint(path: Path, splits: dict[str, np.ndarray]) -> None:
    """No node may be in two splits."""
    for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
        shared = np.intersect1d(splits[one], splits[other])
        if shared.size:
            raise ValueError(f"{path}: node {int(shared[0])} is in both {one}_index and {other}_index")
