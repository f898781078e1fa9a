from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bayesian_attention import cli
from bayesian_attention.data import load_graph
from bayesian_attention.tasks.records import read_records
from tests.tasks.graphs import FEATURES, NODES, write_graph

SHORT = ["--recipe", "max_epochs=4,patience=4,hidden=2,heads=2,samples=3"]


@pytest.fixture(scope="module")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_graph(tmp_path_factory.mktemp("graph"))


def call(*arguments: object) -> int:
    """Exit status of the command."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def model_of(folder: Path, method: str, seed: int) -> Path:
    """The weights of a run."""
    (record,) = (r for r in read_records(folder)[0] if (r.method, r.seed) == (method, seed))
    return folder / "models" / f"{record.stem}.safetensors"


@pytest.fixture(scope="module")
def compared(graph_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    status = call(
        "compare", "graph", "--data", graph_file, "--attention", "softmax,weibull(shape=2)", "--seeds", "2",
        "--jobs", "1", "--out", folder, *SHORT,
    )  # fmt: skip
    assert status == 0
    return folder


def test_compare_leaves_runs_models_predictions_table_and_report(compared: Path) -> None:
    records, complaints = read_records(compared)
    assert not complaints
    assert {(record.method, record.seed) for record in records} == {
        (method, seed) for method in ("softmax", "weibull(shape=2)") for seed in (0, 1)
    }
    assert all(0 <= record.metrics["accuracy"] <= 1 for record in records)
    for record in records:
        assert (compared / "predictions" / f"{record.stem}.npz").exists()
        assert (compared / "models" / f"{record.stem}.safetensors").exists()
    assert "weibull(shape=2)" in (compared / "table.md").read_text()
    assert "</html>" in (compared / "report.html").read_text()
    assert not list(compared.rglob("*.tmp"))


def test_compare_goes_on_where_it_was(
    compared: Path, graph_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = (compared / "runs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "runs.jsonl").write_text("".join(lines[:3]) + lines[3][:50])
    status = call(
        "compare", "graph", "--data", graph_file, "--attention", "softmax,weibull(shape=2)", "--seeds", "2",
        "--jobs", "1", "--out", tmp_path, *SHORT,
    )  # fmt: skip
    captured = capsys.readouterr()
    assert status == 0
    assert "runs.jsonl:4: is not a finished run" in captured.err
    assert "3 of 4" in captured.err
    records, _ = read_records(tmp_path)
    assert len(records) == 4
    # The run that was made anew is the run that was lost.
    lost = json.loads(lines[3])
    assert [r.metrics["nll"] for r in records if (r.method, r.seed) == (lost["method"], lost["seed"])] == [lost["nll"]]


def test_compare_prints_means_and_differences(
    compared: Path, graph_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(
        "compare", "graph", "--data", graph_file, "--attention", "softmax,weibull(shape=2)", "--seeds", "2",
        "--out", compared, *SHORT,
    )  # fmt: skip
    output = capsys.readouterr().out
    values = [
        [r.metrics["nll"] for r in read_records(compared)[0] if r.method == m] for m in ("softmax", "weibull(shape=2)")
    ]
    assert f"{np.mean(values[0]):.3f} ± {np.std(values[0], ddof=1) / np.sqrt(2):.3f}" in output
    assert f"Δ {np.mean(values[1]) - np.mean(values[0]):+.3f} ± " in output
    assert "report.html" in output


def test_two_processes_give_the_results_of_one(compared: Path, graph_file: Path, tmp_path: Path) -> None:
    status = call(
        "compare", "graph", "--data", graph_file, "--attention", "softmax,weibull(shape=2)", "--seeds", "0-0",
        "--jobs", "2", "--out", tmp_path, *SHORT,
    )  # fmt: skip
    assert status == 0
    before = {r.method: r.metrics for r in read_records(compared)[0] if r.seed == 0}
    for record in read_records(tmp_path)[0]:
        assert dict(record.metrics) == pytest.approx(dict(before[record.method]), rel=1e-4, abs=1e-4, nan_ok=True)


def test_run_then_predict(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "graph", "--data", graph_file, "--attention", "lognormal", "--out", tmp_path, *SHORT) == 0
    assert "accuracy" in capsys.readouterr().out
    model = model_of(tmp_path, "lognormal", 0)
    assert call("predict", model, "--data", graph_file, "--nodes", "5,40-42") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["node"] for line in lines] == [5, 40, 41, 42]
    for line in lines:
        probabilities = np.array(line["probabilities"])
        assert probabilities.sum() == pytest.approx(1, abs=1e-5)
        assert line["label"] == probabilities.argmax()
        assert line["confidence"] == pytest.approx(probabilities.max(), abs=1e-6)
        assert line["entropy"] == pytest.approx(-(probabilities * np.log(probabilities)).sum(), abs=1e-4)
        assert line["certain"] == (line["p_value"] <= 0.05)
    # Without --seed the draws are those of the run itself, whose seed is 0 as well.
    arrays = np.load(tmp_path / "predictions" / f"{model.stem}.npz")
    np.testing.assert_array_equal([line["label"] for line in lines], arrays["label_all"][[5, 40, 41, 42]])
    tested = {int(node): p for node, p in zip(arrays["node"], arrays["probabilities"], strict=True)}
    shared = [line for line in lines if line["node"] in tested]
    assert shared
    for line in shared:
        np.testing.assert_allclose(line["probabilities"], tested[line["node"]], atol=1e-6)


def test_predict_writes_a_file_of_all_nodes(compared: Path, graph_file: Path, tmp_path: Path) -> None:
    model = model_of(compared, "softmax", 1)
    assert call("predict", model, "--data", graph_file, "--out", tmp_path / "new" / "out.jsonl") == 0
    lines = [json.loads(line) for line in (tmp_path / "new" / "out.jsonl").read_text().splitlines()]
    assert [line["node"] for line in lines] == list(range(NODES))
    assert all(line["epistemic"] == 0 and not line["certain"] for line in lines)


def test_report_of_a_folder(compared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("report", compared, "--out", tmp_path / "r.html") == 0
    assert str(tmp_path / "r.html") in capsys.readouterr().out.replace("\n", "")
    assert "</html>" in (tmp_path / "r.html").read_text()


def test_other_settings_in_the_same_folder_keep_apart(graph_file: Path, tmp_path: Path) -> None:
    base = ["compare", "graph", "--data", graph_file, "--attention", "softmax", "--seeds", "1", "--out", tmp_path]
    assert call(*base, *SHORT) == 0
    table, report = (tmp_path / "table.md").read_text(), (tmp_path / "report.html").read_text()
    assert call(*base, "--recipe", "max_epochs=2,hidden=3,samples=2") == 0
    assert (tmp_path / "table.md").read_text() != table
    assert call(*base, *SHORT) == 0
    assert (tmp_path / "table.md").read_text() == table
    assert (tmp_path / "report.html").read_text() == report
    assert len(list((tmp_path / "models").glob("*.safetensors"))) == 2


def test_run_makes_a_lost_model_again(graph_file: Path, tmp_path: Path) -> None:
    arguments = ["run", "graph", "--data", graph_file, "--attention", "softmax", "--out", tmp_path, *SHORT]
    assert call(*arguments) == 0
    model = model_of(tmp_path, "softmax", 0)
    content = model.read_bytes()
    model.unlink()
    assert call(*arguments) == 0
    assert model.read_bytes() == content


def test_brackets_in_a_path_are_no_markup(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "B[red]x[/b]"
    assert call("run", "graph", "--data", graph_file, "--attention", "softmax", "--out", folder, *SHORT) == 0
    assert str(folder) in capsys.readouterr().out.replace("\n", "")


def test_tasks_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("tasks") == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ("cora", "citeseer", "graph", "weibull+contextual"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run crora", "Did you mean 'cora'"),
        ("run cora --attention wiebull", "attention: no 'wiebull'. Did you mean 'weibull'"),
        ("run cora --attention weibull(shape=-1)", "shape must be a positive, finite number; got -1"),
        ("run cora --attention weibull(shpe=1)", "Did you mean 'shape'"),
        ("run cora --attention softmax,weibull", "run takes one method"),
        ("run cora --recipe dropot=0.1", "Did you mean 'dropout'"),
        ("run cora --recipe dropout=1", "dropout must be"),
        ("run cora --recipe samples=1", "samples must be"),
        ("run graph", "--data FILE.npz"),
        ("run graph --data missing.npz", "missing.npz: cannot be read"),
        ("run citeseer --data .", "planetoid/citeseer.npz"),
        ("compare cora --seeds 0", "seeds: must be at least 1"),
        ("compare cora --seeds 3-1", "seeds: cannot read '3-1'"),
        ("compare cora --seeds 0-99999999999", "too many"),
        ("compare cora --seeds a", "seeds: cannot read 'a'"),
        ("report missing", "missing is no folder"),
        ("report .", "has no finished runs"),
        ("predict missing", "missing: there is no such model"),
    ],
)
def test_wrong_input_is_named(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BAYESIAN_ATTENTION_DATA", raising=False)
    assert call(*arguments.split(" ")) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_unwritable_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert call("run", "cora", "--out", tmp_path / "file") == 2
    assert "out: cannot write to the folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == ""


def test_predict_refuses_what_does_not_fit(
    compared: Path, graph_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(compared, "softmax", 0)
    assert call("predict", model, "--data", graph_file, "--nodes", str(NODES)) == 2
    assert f"there is no node {NODES}" in capsys.readouterr().err
    assert call("predict", model, "--data", graph_file, "--level", "2") == 2
    assert "level: must lie between 0 and 1" in capsys.readouterr().err
    cora = Path(cli.__file__).parent / "data" / "cora.npz"
    assert load_graph(cora).features == 1433
    assert call("predict", model, "--data", cora) == 2
    assert f"was trained on {FEATURES} features" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_comparison_keeps_its_finished_runs(graph_file: Path, tmp_path: Path, number: signal.Signals) -> None:
    # A shell's background job, such as CI may be, ignores Ctrl-C, and its children inherit that.
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    start += "from bayesian_attention.cli import main; main()"
    command = [
        sys.executable, "-c", start, "compare", "graph",
        "--data", str(graph_file), "--attention", "softmax,weibull", "--seeds", "500", "--jobs", "2",
        "--out", str(tmp_path), *SHORT,
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 120
        while len(read_records(tmp_path)[0]) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    records, complaints = read_records(tmp_path)
    assert len(records) >= 2
    assert not complaints
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "the same command goes on from there" in error
        assert "Traceback" not in error
    # No worker goes on writing once the parent is gone.
    group = process.pid
    deadline = time.monotonic() + 30
    while _alive(group) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _alive(group)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
