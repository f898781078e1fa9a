"""Trained graph models on disk: weights as safetensors, settings as JSON beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from bayesian_attention.data import Graph
from bayesian_attention.files import replacing
from bayesian_attention.tasks.gat import GAT
from bayesian_attention.tasks.method import Method
from bayesian_attention.tasks.node_classification import Recipe, build

#: Version of the format of the JSON file.
FORMAT = 1


def save_model(stem: Path, model: GAT, settings: Mapping[str, Any]) -> None:
    """Write ``stem``.safetensors and ``stem``.json, each whole or not at all.

    Args:
        stem: path without an ending; its folder is created.
        model: the model.
        settings: plain data that :func:`load_model` needs: "posterior", "prior", "kl_weight", "recipe", "task".
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    with replacing(stem.with_name(stem.name + ".safetensors")) as temporary:
        temporary.write_bytes(save(weights))
    shape = {"features": model.project.shape[0], "classes": model.second.out_channels}
    with replacing(stem.with_name(stem.name + ".json")) as temporary:
        temporary.write_text(json.dumps({"format": FORMAT, **shape, **settings}, indent=2) + "\n", encoding="utf-8")


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a saved model.

    Args:
        path: its .json or .safetensors file, or both without the ending.

    Raises:
        ValueError: there is no such model, or it is of another format.
    """
    given, path = path, _with_ending(path, ".json")
    if not path.exists():
        raise ValueError(f"{given}: there is no such model; its settings would be in {path}")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not JSON ({error})") from error
    if not isinstance(settings, dict) or settings.get("format") != FORMAT:
        found = settings.get("format") if isinstance(settings, dict) else None
        raise ValueError(f"{path}: is not a model of format {FORMAT}; its format is {found!r}")
    return settings


def load_model(path: Path, graph: Graph) -> tuple[GAT, Method, Recipe]:
    """A saved model, for use on ``graph``.

    Args:
        path: as for :func:`read_settings`.
        graph: a graph with the features and classes that the model was trained on.

    Raises:
        ValueError: the files are damaged, or the graph does not fit.
    """
    settings = read_settings(path)
    try:
        method, recipe = Method.from_dict(settings), Recipe(**settings["recipe"])
        features, classes = int(settings["features"]), int(settings["classes"])
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"{_with_ending(path, '.json')}: lacks or garbles a setting ({error})") from error
    if graph.features != features:
        raise ValueError(f"{path}: was trained on {features} features; {graph.name} has {graph.features}")
    if graph.classes > classes:
        raise ValueError(f"{path}: knows {classes} classes; {graph.name} has {graph.classes}")
    try:
        model = build(graph, method, recipe, classes)
    except ValueError as error:
        raise ValueError(f"{_with_ending(path, '.json')}: its settings do not go together ({error})") from error
    weights = _with_ending(path, ".safetensors")
    try:
        model.load_state_dict(load_file(weights))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"{weights}: cannot be loaded ({error})") from error
    return model.eval(), method, recipe


def _with_ending(path: Path, ending: str) -> Path:
    """The path with ``ending``, whichever of the two endings it has, or none."""
    name = path.name
    for known in (".json", ".safetensors"):
        name = name.removesuffix(known)
    return path.with_name(name + ending)
