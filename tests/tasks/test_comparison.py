from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from bayesian_attention.data import load_graph
from bayesian_attention.tasks.comparison import Job, execute, in_order, plan, run_one, settings_of
from bayesian_attention.tasks.method import Method
from bayesian_attention.tasks.model_files import load_model, read_settings
from bayesian_attention.tasks.node_classification import Recipe, predictive, run
from bayesian_attention.tasks.records import RUNS_FILE, Record, load_arrays, read_records
from tests.tasks.graphs import METHODS, SHORT, write_graph

TWO = {"softmax": METHODS["softmax"], "weibull(shape=10)": METHODS["weibull"]}
ALL = [(seed, label) for seed in (0, 1) for label in TWO]


def jobs_of(
    data: Path, out: Path, methods: Mapping[str, Method] = TWO, recipe: Recipe = SHORT, seeds=(0, 1)
) -> list[Job]:
    jobs, found, complaints = plan("graph", methods, recipe, seeds, data, out)
    assert not complaints
    assert len(jobs) + len(found) == len(methods) * len(seeds)
    return jobs


def pairs(items: list[Job] | list[Record]) -> list[tuple[int, str]]:
    return [(item.seed, item.label if isinstance(item, Job) else item.method) for item in items]


@pytest.fixture(scope="module")
def finished(graph_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished comparison."""
    out = tmp_path_factory.mktemp("finished")
    list(execute(jobs_of(graph_file, out), 1))
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A folder with the list of finished runs alone."""
    (tmp_path / RUNS_FILE).write_bytes((finished / RUNS_FILE).read_bytes())
    return tmp_path


class TestPlan:
    def test_all_is_missing_at_first(self, graph_file: Path, tmp_path: Path):
        assert pairs(jobs_of(graph_file, tmp_path)) == ALL
        assert pairs(jobs_of(graph_file, tmp_path / "none")) == ALL

    def test_nothing_is_left_at_the_end(self, graph_file: Path, out: Path):
        jobs, found, complaints = plan("graph", TWO, SHORT, (0, 1), graph_file, out)
        assert (jobs, complaints) == ([], [])
        assert pairs(found) == ALL

    def test_runs_not_asked_for_are_not_given(self, graph_file: Path, out: Path):
        softmax = {"softmax": METHODS["softmax"]}
        jobs, found, _ = plan("graph", softmax, SHORT, (1, 2), graph_file, out)
        assert (pairs(jobs), pairs(found)) == ([(2, "softmax")], [(1, "softmax")])

    @pytest.mark.parametrize("deleted", range(4))
    def test_a_deleted_line_is_run_again(self, graph_file: Path, out: Path, deleted: int):
        path = out / RUNS_FILE
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:deleted] + lines[deleted + 1 :]))
        assert pairs(jobs_of(graph_file, out)) == [ALL[deleted]]

    def test_a_torn_line_is_complained_of_and_run_again(self, graph_file: Path, out: Path):
        path = out / RUNS_FILE
        path.write_bytes(path.read_bytes()[:-40])
        jobs, found, complaints = plan("graph", TWO, SHORT, (0, 1), graph_file, out)
        assert (pairs(jobs), pairs(found)) == (ALL[3:], ALL[:3])
        assert [complaint.startswith(f"{path}:4: ") for complaint in complaints] == [True]

    @pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Recipe)])
    def test_another_recipe(self, graph_file: Path, out: Path, field: str):
        value = {"kl_reduction": "sum", "dropout": 0.5}.get(field) or 2 * getattr(SHORT, field) + 1
        recipe = dataclasses.replace(SHORT, **{field: value})
        assert pairs(jobs_of(graph_file, out, recipe=recipe)) == ALL

    @pytest.mark.parametrize(
        "change",
        [
            {"kl_weight": 0.02},
            {"posterior": dataclasses.replace(METHODS["weibull"].posterior, shape=11.0)},
            {"posterior": dataclasses.replace(METHODS["weibull"].posterior, learned=True)},
            {"prior": dataclasses.replace(METHODS["weibull"].prior, rate=2.0)},
        ],
    )
    def test_another_setting_of_one_method(self, graph_file: Path, out: Path, change: dict):
        label = "weibull(shape=10)"
        methods = {**TWO, label: dataclasses.replace(TWO[label], **change)}
        assert pairs(jobs_of(graph_file, out, methods)) == [(0, label), (1, label)]

    def test_other_data(self, out: Path, tmp_path: Path):
        assert pairs(jobs_of(write_graph(tmp_path, seed=1), out)) == ALL

    def test_the_same_data_elsewhere(self, out: Path, graph_file: Path, tmp_path: Path):
        path = tmp_path / "renamed.npz"
        path.write_bytes(graph_file.read_bytes())
        assert jobs_of(path, out) == []

    def test_an_unknown_task(self, out: Path):
        with pytest.raises(ValueError, match=r"^task: no 'grph'"):
            plan("grph", TWO, SHORT, (0,), None, out)


class TestExecute:
    def test_each_record_is_on_disk_with_its_files_before_it_is_given(self, graph_file: Path, tmp_path: Path):
        jobs = jobs_of(graph_file, tmp_path, seeds=(0,))
        given: list[Record] = []
        for record in execute(jobs, 1):
            given.append(record)
            assert read_records(tmp_path) == (given, [])
            assert (tmp_path / "predictions" / f"{record.stem}.npz").is_file()
            load_model(tmp_path / "models" / record.stem, load_graph(graph_file))
        assert pairs(given) == ALL[:2]

    def test_stopped_in_between_it_resumes_and_ends_the_same(self, graph_file: Path, finished: Path, tmp_path: Path):
        running = execute(jobs_of(graph_file, tmp_path), 1)
        next(running)
        running.close()
        rest = jobs_of(graph_file, tmp_path)
        assert pairs(rest) == ALL[1:]
        list(execute(rest, 1))
        assert jobs_of(graph_file, tmp_path) == []
        whole, resumed = (
            [(record.key, record.metrics, record.epochs) for record in read_records(folder)[0]]
            for folder in (finished, tmp_path)
        )
        assert resumed == whole

    def test_jobs_and_records_travel_between_processes(self, graph_file: Path, finished: Path, tmp_path: Path):
        for items in (jobs_of(graph_file, tmp_path), read_records(finished)[0]):
            assert pickle.loads(pickle.dumps(items)) == items  # noqa: S301

    def test_a_run_that_fails_says_which_and_keeps_the_others(self, graph_file: Path, tmp_path: Path):
        wild = dataclasses.replace(METHODS["weibull"], kl_weight=1e38)
        jobs = [
            *jobs_of(graph_file, tmp_path, {"softmax": METHODS["softmax"]}, seeds=(0,)),
            *jobs_of(graph_file, tmp_path, {"wild": wild}, dataclasses.replace(SHORT, learning_rate=1e30), (7,)),
        ]
        with pytest.raises(FloatingPointError, match="wild, seed 7: "):
            list(execute(jobs, 1))
        assert pairs(read_records(tmp_path)[0]) == [(0, "softmax")]


class TestRunOne:
    def test_record_and_files_are_those_of_the_run(self, graph_file: Path, finished: Path):
        graph = load_graph(graph_file)
        for record in read_records(finished)[0]:
            method = TWO[record.method]
            training, metrics, arrays = run(graph, method, SHORT, record.seed)
            assert dict(record.metrics) == pytest.approx(metrics, nan_ok=True)
            assert record.epochs == training.epochs == 3
            assert record.seconds > 0
            assert {"python", "torch", "numpy", "torch-geometric", "bayesian-attention"} <= set(record.versions)
            assert record.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
            assert record.settings == json.loads(json.dumps(settings_of(graph, method, SHORT)))
            saved = load_arrays(finished / "predictions" / f"{record.stem}.npz")
            assert set(saved) == set(arrays)
            for name, array in arrays.items():
                np.testing.assert_array_equal(saved[name], array)
            stem = finished / "models" / record.stem
            model, loaded, recipe = load_model(stem, graph)
            assert (loaded, recipe) == (method, SHORT)
            settings = read_settings(stem)
            assert (settings["task"], settings["method"], settings["seed"]) == ("graph", record.method, record.seed)
            probabilities = predictive(model, recipe, record.seed).mean[graph.splits["test"]].numpy()
            np.testing.assert_array_equal(probabilities, saved["probabilities"])

    def test_progress(self, graph_file: Path, tmp_path: Path):
        [job] = jobs_of(graph_file, tmp_path, {"softmax": METHODS["softmax"]}, seeds=(0,))
        seen = []
        run_one(job, lambda epoch, _: seen.append(epoch))
        assert seen == [0, 1, 2]
        # The caller keeps the list.
        assert read_records(tmp_path) == ([], [])


def test_in_order(finished: Path):
    records = read_records(finished)[0]
    labels = ["weibull(shape=10)", "softmax"]
    expected = [(seed, label) for label in labels for seed in (0, 1)]
    assert pairs(in_order(records[::-1], labels)) == expected
