from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from bayesian_attention.data import Graph, load_graph
from bayesian_attention.data.folder import FOLDER_VARIABLE, find
from tests.data.graphs import FEATURES, NODES, arrays, write

NAMES = tuple(arrays())


def as_arrays(graph: Graph) -> dict[str, np.ndarray]:
    tensors = {
        "x_indptr": graph.indptr,
        "x_indices": graph.indices,
        "x_data": graph.values,
        "edge_index": graph.edge_index,
        "y": graph.y,
        **{f"{split}_index": nodes for split, nodes in graph.splits.items()},
    }
    return {**{name: tensor.numpy() for name, tensor in tensors.items()}, "x_shape": [graph.nodes, graph.features]}


def refused(path: Path) -> str:
    """The message, which names the file."""
    with pytest.raises(ValueError, match=re.escape(f"{path}: ")) as info:
        load_graph(path)
    return str(info.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_sound_file_is_read_as_written(tmp_path: Path, compressed: bool):
    path = write(tmp_path, compressed=compressed)
    graph = load_graph(path)
    read = as_arrays(graph)
    for name, array in arrays().items():
        np.testing.assert_array_equal(read[name], array, err_msg=name)
    assert (graph.name, graph.nodes, graph.features, graph.classes) == ("small", NODES, FEATURES, 3)
    assert graph.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert load_graph(path, "other").name == "other"


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint16, ">i8"])
def test_integers_of_any_width_become_int64(tmp_path: Path, dtype: str | type):
    changes = {name: array.astype(dtype) for name, array in arrays().items() if name not in ("x_data", "y")}
    graph = load_graph(write(tmp_path, **changes))
    for name, array in as_arrays(graph).items():
        np.testing.assert_array_equal(array, arrays()[name])
    integers = (graph.indptr, graph.indices, graph.edge_index, graph.y, *graph.splits.values())
    assert {tensor.dtype for tensor in integers} == {torch.int64}


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int64, np.bool_])
def test_features_of_any_kind_become_float32(tmp_path: Path, dtype: type):
    values = arrays()["x_data"].astype(dtype)
    graph = load_graph(write(tmp_path, x_data=values))
    assert graph.values.dtype == torch.float32
    np.testing.assert_array_equal(graph.values.numpy(), values.astype(np.float64))


def test_edges_in_fortran_order_are_contiguous_afterwards(tmp_path: Path):
    graph = load_graph(write(tmp_path, edge_index=np.asfortranarray(arrays()["edge_index"])))
    assert graph.edge_index.is_contiguous()
    np.testing.assert_array_equal(graph.edge_index.numpy(), arrays()["edge_index"])


def test_no_edges_and_no_features_are_a_graph(tmp_path: Path):
    empty = np.zeros(0, dtype=np.int64)
    changes = {"x_indptr": np.zeros(NODES + 1, dtype=np.int64), "x_indices": empty, "x_data": empty.astype(np.float32)}
    graph = load_graph(write(tmp_path, edge_index=np.zeros((2, 0), dtype=np.int64), **changes))
    assert graph.edge_index.shape == (2, 0)
    assert graph.values.numel() == 0
    assert graph.nodes == NODES


def test_arrays_it_does_not_know_are_left_alone(tmp_path: Path):
    # Also one that could not be read without pickle.
    path = write(tmp_path, notes=np.array([{"a": 1}], dtype=object))
    assert load_graph(path).nodes == NODES


class TestDamage:
    @pytest.mark.parametrize("compressed", [False, True])
    def test_truncated_anywhere(self, tmp_path: Path, compressed: bool):
        path = write(tmp_path, compressed=compressed)
        content = path.read_bytes()
        for length in [*range(0, len(content), 13), len(content) - 1]:
            path.write_bytes(content[:length])
            assert refused(path)

    @pytest.mark.parametrize("compressed", [False, True])
    def test_a_flipped_bit_is_noticed_or_harmless(self, tmp_path: Path, compressed: bool):
        path = write(tmp_path, compressed=compressed)
        content = path.read_bytes()
        outcomes = Counter()
        for position in range(0, 8 * len(content), 61):
            damaged = bytearray(content)
            damaged[position // 8] ^= 1 << position % 8
            path.write_bytes(damaged)
            try:
                read = as_arrays(load_graph(path))
            except ValueError:
                outcomes["refused"] += 1
                continue
            # Dates and the like can differ without harm.
            for name, array in arrays().items():
                np.testing.assert_array_equal(read[name], array)
            outcomes["harmless"] += 1
        assert outcomes["refused"] > outcomes["harmless"] > 0

    @pytest.mark.parametrize("name", NAMES)
    def test_a_broken_deflate_stream(self, tmp_path: Path, name: str):
        path = write(tmp_path)
        with zipfile.ZipFile(path) as file:
            info = file.getinfo(f"{name}.npy")
        content = bytearray(path.read_bytes())
        # The local header has 30 bytes, the name and the extra field; then block type 3, which is reserved.
        start = info.header_offset + 30 + len(info.filename)
        start += int.from_bytes(content[info.header_offset + 28 : info.header_offset + 30], "little")
        content[start] |= 0b110
        path.write_bytes(content)
        assert "damaged" in refused(path)

    @pytest.mark.parametrize("name", NAMES)
    def test_pickled_arrays_are_never_read(self, tmp_path: Path, name: str):
        marker = tmp_path / "marker"

        class Trap:
            def __reduce__(self) -> tuple[object, tuple[str]]:
                return os.mkdir, (str(marker),)

        array = np.empty(1, dtype=object)
        array[0] = Trap()
        assert "pickle" in refused(write(tmp_path, **{name: array}))
        assert not marker.exists()

    def test_a_pickle_by_the_name_of_a_graph(self, tmp_path: Path):
        path = tmp_path / "graph.npz"
        path.write_bytes(pickle.dumps(arrays()))
        assert "pickle" in refused(path)

    @pytest.mark.parametrize("content", [b"", b"hello", b"PK", b"PK\x05\x06" + bytes(18), b"\x93NUMPY", b"\x00" * 999])
    def test_other_files(self, tmp_path: Path, content: bytes):
        path = tmp_path / "graph.npz"
        path.write_bytes(content)
        assert refused(path)

    def test_a_single_array(self, tmp_path: Path):
        path = tmp_path / "graph.npz"
        with path.open("wb") as file:
            np.save(file, np.arange(3))
        assert "single array" in refused(path)

    def test_a_member_that_is_no_array(self, tmp_path: Path):
        path = write(tmp_path, y=None)
        with zipfile.ZipFile(path, "a") as file:
            file.writestr("y", "0 1 2 0 1 0")
        assert refused(path) == "y is no array"

    def test_a_header_of_an_absurd_shape(self, tmp_path: Path):
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (2**50,)})
        path = write(tmp_path, y=None)
        with zipfile.ZipFile(path, "a") as file:
            file.writestr("y.npy", header.getvalue())
        assert "damaged" in refused(path)

    def test_a_missing_file_and_a_folder(self, tmp_path: Path):
        assert refused(tmp_path / "none.npz") == "cannot be read (No such file or directory)"
        assert refused(tmp_path) == "cannot be read (Is a directory)"

    @pytest.mark.parametrize("name", NAMES)
    def test_a_missing_array(self, tmp_path: Path, name: str):
        message = refused(write(tmp_path, **{name: None}))
        assert message.startswith(f"lacks {name};")
        assert all(other in message for other in NAMES)

    def test_no_array_at_all(self, tmp_path: Path):
        path = tmp_path / "graph.npz"
        np.savez(path)
        message = refused(path)
        assert all(name in message for name in NAMES)
        assert message.endswith("it has no array")


class TestArrays:
    @pytest.mark.parametrize("name", [name for name in NAMES if name != "x_data"])
    @pytest.mark.parametrize("dtype", [np.float64, np.bool_, "U8", np.complex64, "datetime64[s]"])
    def test_integers_must_be_integers(self, tmp_path: Path, name: str, dtype: str | type):
        array = arrays()[name].astype(np.int64).astype(dtype)
        assert refused(write(tmp_path, **{name: array})).startswith(f"{name} must hold integers")

    @pytest.mark.parametrize("dtype", ["U8", np.complex64, "datetime64[s]"])
    def test_features_must_be_numbers(self, tmp_path: Path, dtype: str | type):
        array = np.ones(2 * NODES, dtype=np.int64).astype(dtype)
        assert refused(write(tmp_path, x_data=array)).startswith("x_data must hold numbers")

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("change", ["number", "more", "fewer"])
    def test_dimensions(self, tmp_path: Path, name: str, change: str):
        array = arrays()[name]
        changed = {"number": array.reshape(-1)[0], "more": array[None], "fewer": array.reshape(-1)}[change]
        if changed.shape == array.shape:
            changed = array[:, None, None]
        assert refused(write(tmp_path, **{name: changed})).startswith(f"{name} must hold")

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("x_shape", [6], "x_shape must be two positive numbers, nodes and features; got [6]"),
            ("x_shape", [6, 5, 1], "x_shape must be two"),
            ("x_shape", [0, 5], "x_shape must be two positive"),
            ("x_shape", [6, -5], "x_shape must be two positive"),
            ("x_shape", [7, 5], "x_indptr must rise from 0 to the 12 entries of x_indices in 8 steps"),
            ("x_shape", [6, 4], "x_indices must lie in 0 … 3; got 0 … 4"),
            ("x_indptr", [0, 2, 4, 6, 8, 10], "x_indptr must rise"),
            ("x_indptr", [1, 2, 4, 6, 8, 10, 12], "x_indptr must rise"),
            ("x_indptr", [0, 4, 2, 6, 8, 10, 12], "x_indptr must rise"),
            ("x_indptr", [0, 2, 4, 6, 8, 10, 11], "x_indptr must rise"),
            ("x_indptr", [0, 2, 4, 6, 8, 10, 13], "x_indptr must rise"),
            ("x_indices", [0, 1, 1, 2, 2, 3, 3, 4, 0, 4, 1, -1], "x_indices must lie in 0 … 4; got -1 … 4"),
            ("x_indices", [0, 1, 1, 2, 2, 3, 3, 4, 0, 4, 1, 5], "x_indices must lie in 0 … 4; got 0 … 5"),
            ("x_indices", [0, 1, 1], "x_indptr must rise from 0 to the 3 entries"),
            ("x_data", [1.0], "x_data has 1 values for 12 indices"),
            ("x_data", [1.0] * 11 + [float("nan")], "x_data holds a number that is not finite"),
            ("x_data", [1.0] * 11 + [float("-inf")], "x_data holds a number that is not finite"),
            # Finite in float64 alone.
            ("x_data", [1.0] * 11 + [1e39], "x_data holds a number that is not finite"),
            ("y", [0, 1, 2, 0, 1], "y has 5 labels for 6 nodes"),
            ("y", [0, 1, 2, 0, 1, -2], "y must hold at least two classes"),
            ("y", [-1] * 6, "y must hold at least two classes"),
            ("y", [0] * 6, "y must hold at least two classes"),
            ("y", [0, 0, 0, 0, 0, -1], "y must hold at least two classes"),
            ("edge_index", [[0, 1]], "edge_index must have shape (2, edges); got (1, 2)"),
            ("edge_index", [[0, 1], [1, 0], [0, 0]], "edge_index must have shape (2, edges); got (3, 2)"),
            ("edge_index", [[0, 6], [1, 0]], "edge_index names the missing node 6 at [0, 1]; the nodes are 0 to 5"),
            ("edge_index", [[0, 1], [-1, 0]], "edge_index names the missing node -1 at [1, 0]"),
            ("train_index", [0, 6], "train_index names the missing node 6 at [1]"),
            ("val_index", [-1], "val_index names the missing node -1 at [0]"),
            ("test_index", [4, 5], "test_index holds node 5, whose label is unknown (-1)"),
            ("train_index", [0, 1, 0], "train_index holds a node twice"),
            ("train_index", [0, 1, 2], "node 2 is in both train_index and val_index"),
            ("test_index", [1, 4], "node 1 is in both train_index and test_index"),
            ("val_index", [2, 3], "node 3 is in both val_index and test_index"),
            *(
                (f"{split}_index", np.zeros(0, np.int64), f"{split}_index is empty")
                for split in ("train", "val", "test")
            ),
        ],
    )
    def test_contents(self, tmp_path: Path, name: str, value: object, message: str):
        assert refused(write(tmp_path, **{name: np.array(value)})).startswith(message)

    def test_a_number_beyond_int64_names_no_node(self, tmp_path: Path):
        edges = np.array([[0, 2**64 - 1], [1, 0]], dtype=np.uint64)
        assert "edge_index names the missing node" in refused(write(tmp_path, edge_index=edges))


@pytest.fixture(scope="module")
def cora() -> Graph:
    return load_graph(find("cora", "planetoid/cora.npz"), "cora")


class TestCora:
    def test_sizes(self, cora: Graph):
        assert (cora.name, cora.nodes, cora.features, cora.classes) == ("cora", 2708, 1433, 7)
        assert {split: len(nodes) for split, nodes in cora.splits.items()} == {"train": 140, "val": 500, "test": 1000}
        assert cora.values.numel() == 49216
        assert (cora.values == 1).all()
        assert (cora.y >= 0).all()

    def test_edges_are_undirected_and_single(self, cora: Graph):
        source, target = cora.edge_index.tolist()
        pairs = set(zip(source, target, strict=True))
        assert len(pairs) == cora.edge_index.shape[1] == 2 * 5278
        assert {(b, a) for a, b in pairs} == pairs
        assert all(a != b for a, b in pairs)

    def test_twenty_training_nodes_a_class(self, cora: Graph):
        assert cora.y[cora.splits["train"]].bincount().tolist() == [20] * 7

    def test_columns_ascend_in_each_row(self, cora: Graph):
        for start, stop in zip(cora.indptr[:-1], cora.indptr[1:], strict=True):
            assert (cora.indices[start:stop].diff() > 0).all()

    def test_the_file_is_small_and_holds_plain_arrays(self):
        path = find("cora", "planetoid/cora.npz")
        assert path.stat().st_size < 200_000
        with zipfile.ZipFile(path) as file:
            for name in file.namelist():
                with file.open(name) as member:
                    version = np.lib.format.read_magic(member)
                    assert version == (1, 0)
                    assert not np.lib.format.read_array_header_1_0(member)[2].hasobject


@pytest.mark.skipif(not os.environ.get(FOLDER_VARIABLE), reason=f"{FOLDER_VARIABLE} is not set")
class TestDataFolder:
    def test_cora_is_the_embedded_one(self):
        theirs = Path(os.environ[FOLDER_VARIABLE]) / "planetoid" / "cora.npz"
        with np.load(theirs, allow_pickle=False) as one, np.load(find("cora", ""), allow_pickle=False) as other:
            assert set(one.files) == set(other.files)
            for name in one.files:
                np.testing.assert_array_equal(one[name], other[name])

    def test_citeseer(self):
        graph = load_graph(find("citeseer", "planetoid/citeseer.npz"), "citeseer")
        assert (graph.nodes, graph.features, graph.classes, graph.edge_index.shape[1]) == (3327, 3703, 6, 9104)
        assert {split: len(nodes) for split, nodes in graph.splits.items()} == {"train": 120, "val": 500, "test": 1000}
        assert int((graph.y < 0).sum()) == 15
        assert graph.nodes - len(graph.edge_index.unique()) == 48
