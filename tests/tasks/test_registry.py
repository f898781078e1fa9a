from __future__ import annotations

from pathlib import Path

import pytest

from bayesian_attention.data.folder import FOLDER_VARIABLE
from bayesian_attention.posteriors import Softmax
from bayesian_attention.tasks.method import Method, parse_methods
from bayesian_attention.tasks.registry import TASKS, task_named


def test_names():
    assert {"cora", "citeseer", "graph"} <= set(TASKS)
    for name, task in TASKS.items():
        assert task_named(name) is task
        assert task.name == name
        assert task.description


@pytest.mark.parametrize(("name", "near"), [("Cora", "'cora'"), ("citseer", "'citeseer'"), ("grap", "'graph'")])
def test_near_matches(name: str, near: str):
    with pytest.raises(ValueError, match=f"^task: no '{name}'") as info:
        task_named(name)
    assert f"Did you mean {near}" in str(info.value)
    assert all(known in str(info.value) for known in TASKS)


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_tuned_methods_are_found_by_family_and_prior(task):
    for key, method in task.methods.items():
        family, _, prior = key.partition("+")
        assert method.posterior.name == family
        assert (method.prior.name if method.prior else "") == prior
        assert parse_methods(key, task.methods) == {key: method}
        assert Method.from_dict(method.to_dict()) == method
    assert task.methods["softmax"].posterior == Softmax()


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_priors_of_tuned_methods_fit_their_posteriors(task):
    for method in task.methods.values():
        if method.prior is not None:
            assert method.prior.build(method.posterior.prior_family, 2, 3).family == method.posterior.prior_family


def test_cora_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    graph = task_named("cora").load(None)
    assert (graph.name, graph.nodes) == ("cora", 2708)
    with pytest.raises(ValueError, match="cora: there is no "):
        task_named("cora").load(tmp_path)


def test_the_task_of_your_own_graph(graph_file: Path, tmp_path: Path):
    task = task_named("graph")
    assert task.load(graph_file).name == graph_file.stem
    with pytest.raises(ValueError, match=r"^data: the task 'graph' needs a graph of yours: --data"):
        task.load(None)
    with pytest.raises(ValueError, match="cannot be read"):
        task.load(tmp_path)
    with pytest.raises(ValueError, match="cannot be read"):
        task.load(tmp_path / "none.npz")


@pytest.mark.parametrize("name", ["cora", "citeseer"])
def test_a_file_for_a_task_that_has_its_own(name: str, graph_file: Path):
    with pytest.raises(ValueError, match=r"^data: .* is a file; run the task 'graph'") as info:
        task_named(name).load(graph_file)
    assert str(graph_file) in str(info.value)


def test_data_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=f"citeseer: .*{FOLDER_VARIABLE}"):
        task_named("citeseer").load(None)
    with pytest.raises(ValueError, match="citeseer: there is no"):
        task_named("citeseer").load(tmp_path)
    damaged = tmp_path / "planetoid" / "citeseer.npz"
    damaged.parent.mkdir()
    damaged.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="planetoid"):
        task_named("citeseer").load(tmp_path)
