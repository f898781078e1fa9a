"""Writing a graph of your own as a file that the tasks read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bayesian_attention.data.graph_file import SPLITS, load_graph
from bayesian_attention.files import replacing


def save_graph(
    path: Path | str,
    *,
    x: Tensor | np.ndarray,
    edge_index: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    train: Tensor | np.ndarray,
    val: Tensor | np.ndarray,
    test: Tensor | np.ndarray,
) -> Path:
    """Write a graph as an npz file, once it has passed every check of :func:`load_graph`.

    The arguments are those of a ``torch_geometric.data.Data``: ``save_graph("mine.npz", x=data.x,
    edge_index=data.edge_index, y=data.y, train=data.train_mask, val=data.val_mask, test=data.test_mask)``.

    Args:
        path: the file, whose name ends in .npz; replaced whole or left as it is.
        x: node features (N, F), dense; stored sparsely. When a model is built, each row is
            divided by the sum of its absolute values.
        edge_index: integers (2, E), from sources to targets; an undirected edge stands in both directions.
        y: integers (N,), classes 0 … C − 1; −1 where unknown.
        train: nodes of the training split: a boolean mask (N,) or integers.
        val: nodes of the validation split.
        test: nodes of the test split.

    Returns:
        The path.

    Raises:
        ValueError: something does not fit; the message names it.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"path: must end in .npz; got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"path: there is no folder {path.parent}")
    features = _array("x", x)
    if features.ndim != 2:
        raise ValueError(f"x: must have shape (nodes, features); got {features.shape}")
    rows, columns = np.nonzero(features)
    arrays = {
        "x_indptr": np.searchsorted(rows, np.arange(len(features) + 1)),
        "x_indices": columns,
        "x_data": features[rows, columns],
        "x_shape": np.array(features.shape),
        "edge_index": _array("edge_index", edge_index),
        "y": _array("y", y),
    }
    for split, nodes in zip(SPLITS, (train, val, test), strict=True):
        given = _array(split, nodes)
        if given.dtype == np.bool_ and given.shape != (len(features),):
            raise ValueError(f"{split}: a mask must have one entry a node, {len(features)}; got shape {given.shape}")
        arrays[f"{split}_index"] = np.flatnonzero(given) if given.dtype == np.bool_ else given
    with replacing(path) as temporary:
        with temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        try:
            load_graph(temporary)
        except ValueError as error:
            raise ValueError(str(error).replace(str(temporary), str(path))) from None
    return path


def _array(name: str, values: Tensor | np.ndarray) -> np.ndarray:
    """Plain numbers."""
    if isinstance(values, Tensor):
        if values.layout != torch.strided:
            raise ValueError(f"{name}: must be dense; call to_dense() on a {values.layout} tensor")
        values = values.detach().cpu()
        array = (values.double() if values.is_floating_point() else values).numpy()
    else:
        array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name}: must hold numbers; got {array.dtype}")
    return array
