from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse

from bayesian_attention.data import load_graph, save_graph
from tests.data.graphs import FEATURES, NODES, arrays


def parts(**changes: object) -> dict[str, object]:
    given = arrays()
    dense = np.zeros((NODES, FEATURES), dtype=np.float32)
    for node in range(NODES):
        entries = slice(given["x_indptr"][node], given["x_indptr"][node + 1])
        dense[node, given["x_indices"][entries]] = given["x_data"][entries]
    plain = {"x": dense, "edge_index": given["edge_index"], "y": given["y"]}
    return plain | {split: given[f"{split}_index"] for split in ("train", "val", "test")} | changes


def test_what_is_read_is_what_was_given(tmp_path: Path) -> None:
    tensors = {name: torch.as_tensor(value) for name, value in parts().items()}
    mask = torch.zeros(NODES, dtype=torch.bool)
    mask[[0, 1]] = True
    graph = load_graph(save_graph(tmp_path / "mine.npz", **tensors | {"train": mask}))
    matrix = sparse.csr_array((graph.values.numpy(), graph.indices.numpy(), graph.indptr.numpy()), (NODES, FEATURES))
    np.testing.assert_array_equal(matrix.toarray(), parts()["x"])
    assert torch.equal(graph.edge_index, tensors["edge_index"])
    assert torch.equal(graph.y, tensors["y"])
    for split in ("train", "val", "test"):
        assert torch.equal(graph.splits[split], tensors[split])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.ones(6)}, "x: must have shape"),
        ({"x": np.array([["a"]])}, "x: must hold numbers"),
        ({"edge_index": np.array([[0], [6]])}, "mine.npz: edge_index names the missing node 6"),
        ({"y": np.arange(5)}, "mine.npz: y has 5 labels for 6 nodes"),
        ({"val": np.array([0])}, "node 0 is in both train_index and val_index"),
        ({"test": np.zeros(5, dtype=bool)}, "test: a mask must have one entry a node, 6"),
    ],
)
def test_what_does_not_fit_is_named_and_leaves_no_file(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        save_graph(tmp_path / "mine.npz", **parts(**changes))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"path: must end in \.npz"):
        save_graph(tmp_path / "mine", **parts())
