from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bayesian_attention.data import Graph
from bayesian_attention.tasks.model_files import FORMAT, load_model, read_settings, save_model
from bayesian_attention.tasks.node_classification import build, mean_logits, predictive
from tests.tasks.graphs import METHODS, SHORT, make_graph

METHOD = METHODS["weibull+contextual"]


@pytest.fixture
def stem(graph: Graph, tmp_path: Path) -> Path:
    """A saved model; the name has dots that are no endings."""
    torch.manual_seed(0)
    stem = tmp_path / "models" / "toy-weibull_shape=1.5-0"
    save_model(stem, build(graph, METHOD, SHORT), settings_of(METHOD))
    return stem


def settings_of(method) -> dict[str, Any]:
    return {"task": "graph", "seed": 3, **method.to_dict(), "recipe": dataclasses.asdict(SHORT)}


def with_ending(stem: Path, ending: str) -> Path:
    return stem.with_name(stem.name + ending)


def refused(path: Path, graph: Graph) -> str:
    with pytest.raises(ValueError, match=r"\S") as info:
        load_model(path, graph)
    assert str(path.parent / path.name.removesuffix(".json").removesuffix(".safetensors")) in str(info.value)
    return str(info.value)


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
def test_roundtrip(graph: Graph, tmp_path: Path, method):
    torch.manual_seed(0)
    model = build(graph, method, SHORT)
    stem = tmp_path / "a" / "b.c"
    save_model(stem, model, settings_of(method))
    assert sorted(file.name for file in stem.parent.iterdir()) == ["b.c.json", "b.c.safetensors"]
    for path in (stem, with_ending(stem, ".json"), with_ending(stem, ".safetensors")):
        torch.manual_seed(1)
        loaded, read_method, recipe = load_model(path, graph)
        assert (read_method, recipe) == (method, SHORT)
        assert not loaded.training
        assert torch.equal(mean_logits(loaded), mean_logits(model))
        assert torch.equal(predictive(loaded, SHORT, 5).logits, predictive(model, SHORT, 5).logits)


def test_settings_are_kept(stem: Path):
    settings = read_settings(stem)
    assert settings == {"format": FORMAT, "features": 20, "classes": 3, **settings_of(METHOD)}
    assert read_settings(with_ending(stem, ".safetensors")) == settings


def test_another_graph_of_the_same_features(stem: Path, tmp_path: Path):
    other = make_graph(tmp_path, seed=9)
    model, *_ = load_model(stem, other)
    assert mean_logits(model).shape == (other.nodes, 3)


def test_a_graph_of_fewer_classes_keeps_the_models(stem: Path, tmp_path: Path):
    model, *_ = load_model(stem, make_graph(tmp_path, classes=2))
    assert mean_logits(model).shape[1] == 3


def test_a_graph_that_does_not_fit(stem: Path, tmp_path: Path):
    assert "was trained on 20 features; easy has 21" in refused(stem, make_graph(tmp_path, features=21))
    assert "knows 3 classes; easy has 4" in refused(stem, make_graph(tmp_path, classes=4))


@pytest.mark.parametrize("found", [None, 0, FORMAT + 1, "1", [1]])
def test_another_format(stem: Path, graph: Graph, found: object):
    path = with_ending(stem, ".json")
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "format": found} if found is not None else {"a": 1}))
    assert f"is not a model of format {FORMAT}; its format is {found!r}" in refused(stem, graph)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"3", b"null", b'"x"'])
def test_damaged_settings(stem: Path, graph: Graph, content: bytes):
    with_ending(stem, ".json").write_bytes(content)
    assert refused(stem, graph)


@pytest.mark.parametrize("name", ["posterior", "prior", "kl_weight", "recipe", "features", "classes"])
def test_a_missing_setting(stem: Path, graph: Graph, name: str):
    path = with_ending(stem, ".json")
    settings = json.loads(path.read_text())
    del settings[name]
    path.write_text(json.dumps(settings))
    assert repr(name) in refused(stem, graph)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("posterior", {"name": "gauss"}),
        ("posterior", {"name": "weibull", "size": 3}),
        ("posterior", {"name": "weibull", "shape": -1}),
        ("posterior", {}),
        ("posterior", None),
        ("posterior", "weibull"),
        ("prior", {"name": "nobody"}),
        ("prior", None),
        ("prior", {"name": "constant", "loc": 1.0}),
        ("kl_weight", "much"),
        ("kl_weight", None),
        ("recipe", {"hidden": 4, "colour": 1}),
        ("recipe", {"hidden": "4"}),
        ("recipe", {"hidden": 0}),
        ("recipe", None),
        ("features", "many"),
        ("classes", None),
        ("classes", -1),
    ],
)
def test_a_garbled_setting(stem: Path, graph: Graph, name: str, value: object):
    path = with_ending(stem, ".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert refused(stem, graph)


@pytest.mark.parametrize("ending", [".json", ".safetensors"])
def test_a_missing_file(stem: Path, graph: Graph, ending: str):
    with_ending(stem, ending).unlink()
    assert ending in refused(stem, graph)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_weights(stem: Path, graph: Graph, kept: int):
    path = with_ending(stem, ".safetensors")
    path.write_bytes(path.read_bytes()[:kept])
    assert "cannot be loaded" in refused(stem, graph)


def test_weights_of_another_model(stem: Path, graph: Graph):
    path = with_ending(stem, ".safetensors")
    weights = load_file(path)
    name, tensor = "first.att_src", weights["first.att_src"]
    for changed in ({**weights, "more": tensor.clone()}, {k: v for k, v in weights.items() if k != name},
                    {**weights, name: tensor[..., :-1].contiguous()}):  # fmt: skip
        save_file(changed, path)
        assert "cannot be loaded" in refused(stem, graph)


def test_a_folder_in_the_place_of_the_settings(graph: Graph, tmp_path: Path):
    (tmp_path / "model.json").mkdir()
    assert "cannot be read" in refused(tmp_path / "model", graph)


def test_saving_anew_replaces(stem: Path, graph: Graph):
    torch.manual_seed(7)
    model = build(graph, METHODS["softmax"], SHORT)
    save_model(stem, model, settings_of(METHODS["softmax"]))
    loaded, method, _ = load_model(stem, graph)
    assert method == METHODS["softmax"]
    assert torch.equal(mean_logits(loaded), mean_logits(model))
    assert len(list(stem.parent.iterdir())) == 2
