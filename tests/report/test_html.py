from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from bayesian_attention.report import summarise, write_report
from bayesian_attention.report.summary import format_cell, is_percentage
from bayesian_attention.tasks.records import RUNS_FILE, load_arrays, save_arrays
from tests.report.runs import make_run

VOID = {"meta", "br", "link", "img", "hr", "wbr", "input"}
HOSTILE = "weibull<script>alert(1)</script>$x_\"'&"


class Page(HTMLParser):
    """Checks nesting, and collects attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.names: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href", "srcset", "data"}]
        self.names += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in {"style", "script"}:
            self.text += data


def report(folder: Path, **options: list[str]) -> tuple[str, Page]:
    destination = folder / "report.html"
    assert write_report(folder, destination, **options) == destination
    text = destination.read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed in range(3):
        make_run(tmp_path, "weibull+constant", seed)
        make_run(tmp_path, "softmax", seed, stochastic=False)
    return tmp_path


def test_needs_nothing_else(folder: Path) -> None:
    text, page = report(folder)
    assert text.startswith("<!DOCTYPE html>")
    assert not re.search(r"https?://|@import|url\(", text)
    assert all(load.startswith("#") for load in page.loads)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert len(page.names) == len(set(page.names))
    assert len(text) < 2_000_000
    assert "prefers-color-scheme: dark" in text
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_shows_the_numbers_of_the_table(folder: Path) -> None:
    from bayesian_attention.tasks.records import read_records

    _, page = report(folder)
    table = summarise(read_records(folder)[0], ["softmax", "weibull+constant"])
    for row in table.values():
        for column, cell in row.items():
            text, difference = format_cell(cell, is_percentage(column))
            if "pavpu" in column:
                continue
            assert text in page.text
            assert difference.replace("-", "−") in page.text
    for heading in (
        "Do the probabilities",
        "which answers to withhold",
        "more uncertain where",
        "Where does the attention",
    ):
        assert heading in page.text
    assert "Seeds: 0, 1, 2." in page.text
    assert "Student's t over\n3 seeds" in page.text


def test_marks_differences(folder: Path) -> None:
    text, page = report(folder)
    # The NLL falls by 0.3 in every seed; the ECE is the same.
    assert re.search(r'class="difference better">.*Δ −0\.300 ± 0\.000', text)
    assert re.search(r'class="difference ">Δ \+0\.000 ± 0\.000', text)
    text, page = report(folder, methods=["weibull+constant"])
    assert re.search(r'class="difference worse">.*Δ \+0\.300 ± 0\.000', text)
    assert "Compared with weibull+constant: softmax" in page.text


def test_deterministic_method_is_first_and_has_no_pavpu(folder: Path) -> None:
    text, page = report(folder)
    assert "Compared with softmax: weibull+constant" in page.text
    assert text.count("without draws there is nothing to test") == 2
    assert "60.0 ± 0.00" in page.text
    assert "Δ +0.0 ± 0.0" not in re.findall(r"<tr>.*?</tr>", text, re.DOTALL)[2].rpartition("<td")[2]


def test_escapes_labels(tmp_path: Path) -> None:
    make_run(tmp_path, HOSTILE, 0)
    make_run(tmp_path, "softmax", 0, stochastic=False)
    text, page = report(tmp_path)
    assert "<script" not in text
    assert HOSTILE in page.text


def arrays_of(folder: Path, seed: int) -> Path:
    """The predictions file of a softmax run."""
    (path,) = folder.glob(f"predictions/toy-softmax-{seed}-*.npz")
    return path


def test_names_runs_without_arrays(folder: Path) -> None:
    missing = arrays_of(folder, 0)
    missing.unlink()
    path = arrays_of(folder, 1)
    path.write_bytes(path.read_bytes()[:200])
    path = arrays_of(folder, 2)
    arrays = load_arrays(path)
    del arrays["entropy"]
    save_arrays(path, arrays)
    _, page = report(folder)
    assert f"softmax, seed 0: predictions/{missing.name} is missing" in page.text
    assert f"softmax, seed 1: predictions/{arrays_of(folder, 1).name} cannot be used" in page.text
    assert "cannot be used (lacks entropy)" in page.text
    assert "Do the probabilities" in page.text


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("entropy", lambda array: array[:-1], "do not fit together"),
        ("probabilities", lambda array: array * np.nan, "not finite"),
        ("target", lambda array: (array + 1) % 3, "its accuracy is"),
        ("label_all", lambda array: array[:20], "label_all lacks"),
        ("edge_index", lambda array: array[0], "do not fit together"),
    ],
)
def test_names_arrays_that_are_damaged(folder: Path, name: str, change: object, complaint: str) -> None:
    path = arrays_of(folder, 1)
    arrays = load_arrays(path)
    save_arrays(path, {**arrays, name: change(arrays[name])})  # type: ignore[operator]
    _, page = report(folder)
    assert complaint in page.text


@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_files_that_are_no_npz(folder: Path, content: bytes | None) -> None:
    path = arrays_of(folder, 1)
    if content is None:
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        path.write_bytes(content)
    _, page = report(folder)
    assert f"softmax, seed 1: predictions/{arrays_of(folder, 1).name} cannot be used" in page.text


def test_the_command_repeats_seeds_and_recipe(tmp_path: Path) -> None:
    for seed in (2, 5):
        make_run(tmp_path, "weibull", seed, task="graph", recipe={"hidden": 9, "heads": 8})
    _, page = report(tmp_path)
    command = f'compare graph --attention "weibull" --seeds 2,5 --recipe hidden=9 --data FILE.npz --out {tmp_path.name}'
    assert command in page.text


def test_no_arrays_at_all(folder: Path) -> None:
    for path in (folder / "predictions").iterdir():
        path.unlink()
    _, page = report(folder)
    assert "Results on the test nodes" in page.text
    assert "Do the probabilities" not in page.text
    assert "svg" in page.tags


@pytest.mark.parametrize("stochastic", [False, True])
def test_single_method_and_seed(tmp_path: Path, stochastic: bool) -> None:
    make_run(tmp_path, "only", 4, stochastic=stochastic)
    _, page = report(tmp_path)
    assert "One method:" in page.text
    assert "Seed: 4." in page.text
    assert "no difference can be judged" in page.text
    assert ("Epistemic uncertainty" in page.text) == stochastic
    assert "nan" not in page.text.lower()


def test_deterministic_methods_only(tmp_path: Path) -> None:
    for seed in range(2):
        make_run(tmp_path, "softmax", seed, stochastic=False)
        make_run(tmp_path, "uniform", seed, stochastic=False)
    _, page = report(tmp_path)
    assert "among the highest entropy" in page.text
    assert "spread over draws" not in page.text


def test_two_tasks(folder: Path) -> None:
    make_run(folder, "softmax", 0, task="other", stochastic=False)
    _, page = report(folder)
    assert page.tags.count("section") == 3
    assert "Task: toy" in page.text
    assert "Task: other" in page.text
    assert {"#task0", "#task1"} == set(page.loads)


def test_metrics_that_are_not_defined(tmp_path: Path) -> None:
    make_run(tmp_path, "softmax", 0, stochastic=False, metrics={"auroc_error": float("nan")})
    text, page = report(tmp_path)
    assert "nan" not in page.text.lower()
    assert "not defined" in text


def test_warns_of_unfair_comparisons(tmp_path: Path) -> None:
    make_run(tmp_path, "softmax", 0, stochastic=False)
    make_run(tmp_path, "weibull", 0, recipe={"hidden": 4})
    make_run(tmp_path, "weibull", 1, recipe={"hidden": 16})
    make_run(tmp_path, "weibull", 1, recipe={"hidden": 8})
    with (tmp_path / RUNS_FILE).open("a") as file:
        file.write("half a li\n")
    _, page = report(tmp_path)
    assert "weibull: its runs have 2 different settings" in page.text
    assert "2 different recipes" in page.text
    assert "weibull, seed 1: an earlier run with other settings is left out" in page.text
    assert "is not a finished run" in page.text
    assert "The methods do not have the same seeds." in page.text


def test_report_repeats_itself(folder: Path) -> None:
    assert report(folder)[0] == report(folder)[0]


def test_no_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        write_report(tmp_path, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("library", ["jinja2", "scipy", "matplotlib"])
def test_missing_library_is_named(folder: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == library or name == "bayesian_attention.report.figures":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"{library}.*bayesian-attention\[report\]"):
        write_report(folder, folder / "report.html")
