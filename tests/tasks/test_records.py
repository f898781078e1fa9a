from __future__ import annotations

import dataclasses
import json
import math
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayesian_attention.tasks.records import (
    RUNS_FILE,
    Record,
    append_record,
    load_arrays,
    read_records,
    run_key,
    save_arrays,
)


def record(seed: int = 0, method: str = "weibull", accuracy: float = 0.5, **settings: Any) -> Record:
    return Record(
        task="toy",
        method=method,
        seed=seed,
        settings={"data": "abc", "prior": {"name": "constant", "rate": None}, "recipe": {"hidden": 8}} | settings,
        metrics={"accuracy": accuracy, "nll": 1.25, "pavpu_0.05": 0.1},
        versions={"numpy": "1.0"},
        seconds=1.5,
        epochs=7,
    )


class TestRecord:
    def test_one_line_of_json_with_the_metrics_at_the_top(self):
        line = record().to_line()
        assert line.endswith("\n")
        assert line.count("\n") == 1
        data = json.loads(line)
        assert (data["accuracy"], data["pavpu_0.05"], data["seed"]) == (0.5, 0.1, 0)
        assert "metrics" not in data

    @pytest.mark.parametrize("method", ["weibull", "lognormal(scale=0.3, learned=true)", "ä\u2028\x85\n{}"])
    def test_roundtrip(self, method: str):
        assert Record.from_line(record(method=method).to_line()) == record(method=method)

    def test_nan_survives(self):
        assert math.isnan(Record.from_line(record(accuracy=math.nan).to_line()).metrics["accuracy"])

    @pytest.mark.parametrize("line", ["", "{", "[]", "3", "null", '"task"', "{}", '{"task": "toy"}', "\x00"])
    def test_other_lines(self, line: str):
        with pytest.raises(ValueError, match="is not a finished run"):
            Record.from_line(line)

    @pytest.mark.parametrize("field", ["task", "method", "seed", "settings", "versions", "seconds", "epochs"])
    def test_a_line_without_a_field(self, field: str):
        data = json.loads(record().to_line())
        del data[field]
        with pytest.raises(ValueError, match=f"is not a finished run.*{field}"):
            Record.from_line(json.dumps(data))


class TestKey:
    def test_the_same_for_a_repetition(self):
        other = dataclasses.replace(record(), metrics={"accuracy": 0.9}, versions={}, seconds=9.0, epochs=1)
        assert other.key == record().key == Record.from_line(record().to_line()).key

    def test_the_order_of_settings_does_not_matter(self):
        assert run_key("t", "m", 0, {"a": 1, "b": {"c": 2, "d": 3}}) == run_key(
            "t", "m", 0, {"b": {"d": 3, "c": 2}, "a": 1}
        )

    def test_whatever_the_result_depends_on_changes_it(self):
        others = [
            dataclasses.replace(record(), task="other"),
            record(method="lognormal"),
            record(seed=1),
            record(data="abd"),
            record(prior=None),
            record(prior={"name": "constant", "rate": 0.5}),
            record(recipe={"hidden": 9}),
            record(kl_weight=0.1),
        ]
        assert len({other.key for other in [record(), *others]}) == len(others) + 1

    @pytest.mark.parametrize(
        "label", ["weibull(shape=10,learned=true)", "../../etc/passwd", "a b\\c:d*?\n", "weibull+learned"]
    )
    def test_stems_are_plain_file_names(self, label: str):
        stem = record(seed=3, method=label).stem
        assert Path(stem).name == stem
        assert not set(stem) & set('\\/:*?"<>| \n()')
        assert stem.startswith("toy-")
        assert re.fullmatch(r".*-3-[0-9a-f]{6}", stem)

    def test_stems_tell_methods_apart(self):
        labels = ["weibull", "weibull+learned", "weibull(shape=1)", "weibull(shape=0.1)", "lognormal(prior_loc=1)",
                  "lognormal(prior_loc=-1)", "lognormal(prior_loc= 1)", "weibull(shape=1e3)",
                  "weibull(shape=1e-3)"]  # fmt: skip
        assert len({record(method=label).stem for label in labels}) == len(labels)

    def test_stems_tell_settings_apart(self):
        assert record(data="one").stem != record(data="two").stem


class TestList:
    def test_append_and_read(self, tmp_path: Path):
        records = [record(seed, method) for seed in range(3) for method in ("softmax", "weibull(shape=1)")]
        for each in records:
            append_record(tmp_path, each)
        assert read_records(tmp_path) == (records, [])

    def test_numbers_that_are_none_stay_strict_json(self, tmp_path: Path):
        append_record(tmp_path, record(accuracy=math.nan))
        line = (tmp_path / RUNS_FILE).read_text()
        assert json.loads(line, parse_constant=pytest.fail)["accuracy"] is None
        assert math.isnan(read_records(tmp_path)[0][0].metrics["accuracy"])

    def test_no_list_no_runs(self, tmp_path: Path):
        assert read_records(tmp_path) == ([], [])
        assert read_records(tmp_path / "none") == ([], [])

    @pytest.mark.parametrize("kept", [1, 40, -2, -1])
    def test_a_line_that_a_kill_left_unfinished(self, tmp_path: Path, kept: int):
        append_record(tmp_path, record(0))
        with (tmp_path / RUNS_FILE).open("a") as file:
            file.write(record(1).to_line()[:kept])
        whole = kept == -1
        before, complaints = read_records(tmp_path)
        assert before == [record(seed) for seed in range(1 + whole)]
        assert len(complaints) == 1 - whole
        append_record(tmp_path, record(2))
        after, complaints = read_records(tmp_path)
        assert after == [*before, record(2)]
        assert len(complaints) == 1 - whole
        if not whole:
            assert complaints[0].startswith(f"{tmp_path / RUNS_FILE}:2: is not a finished run")

    def test_bytes_that_are_no_text(self, tmp_path: Path):
        append_record(tmp_path, record(0))
        with (tmp_path / RUNS_FILE).open("ab") as file:
            file.write(b"\xff\xfe\x00\x80" * 9)
        append_record(tmp_path, record(1))
        records, complaints = read_records(tmp_path)
        assert records == [record(0), record(1)]
        assert len(complaints) == 1

    @pytest.mark.parametrize(
        "line",
        ["hello", "{}", "[1, 2]", "null", "7", json.dumps({**json.loads(record().to_line()), "accuracy": "high"}),
         json.dumps({**json.loads(record().to_line()), "seed": None}),
         json.dumps({**json.loads(record().to_line()), "seed": "0"}),
         json.dumps({**json.loads(record().to_line()), "method": 5}), "[" * 100_000,
         json.dumps({**json.loads(record().to_line()), "accuracy": [0.5]})],
    )  # fmt: skip
    def test_foreign_lines_are_complained_of_and_skipped(self, tmp_path: Path, line: str):
        (tmp_path / RUNS_FILE).write_text(f"\n{record(3).to_line()}{line}\n   \n{record(4).to_line()}")
        records, complaints = read_records(tmp_path)
        assert records == [record(3), record(4)]
        assert len(complaints) == 1
        assert complaints[0].startswith(f"{tmp_path / RUNS_FILE}:3: ")

    def test_the_last_line_of_a_run_wins_by_its_place_too(self, tmp_path: Path):
        lines = [record(0, accuracy=0.1), record(1), record(0, accuracy=0.2), record(2), record(0, accuracy=0.3)]
        for line in lines:
            append_record(tmp_path, line)
        assert read_records(tmp_path) == ([record(1), record(2), record(0, accuracy=0.3)], [])

    def test_a_run_with_other_settings_is_another(self, tmp_path: Path):
        for line in (record(data="one"), record(data="two")):
            append_record(tmp_path, line)
        assert len(read_records(tmp_path)[0]) == 2

    def test_a_folder_in_the_place_of_the_list(self, tmp_path: Path):
        (tmp_path / RUNS_FILE).mkdir()
        with pytest.raises(ValueError, match="cannot be read") as info:
            read_records(tmp_path)
        assert str(tmp_path / RUNS_FILE) in str(info.value)


ARRAYS = {
    "float": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
    "int": np.arange(5)[::2],
    "flag": np.array([True, False]),
    "empty": np.zeros((0, 3)),
    "number": np.array(3.5),
    "nan": np.array([np.nan, np.inf]),
}  # fmt: skip


class TestArrays:
    def test_roundtrip(self, tmp_path: Path):
        path = tmp_path / "new" / "folder" / "run.npz"
        save_arrays(path, ARRAYS)
        read = load_arrays(path)
        assert set(read) == set(ARRAYS)
        for name, array in ARRAYS.items():
            assert read[name].dtype == array.dtype
            np.testing.assert_array_equal(read[name], array)
        assert [file.name for file in path.parent.iterdir()] == ["run.npz"]

    def test_what_cannot_be_saved_leaves_the_old_file(self, tmp_path: Path):
        class Unpicklable:
            def __reduce__(self) -> str:
                raise pickle.PicklingError("no")

        path = tmp_path / "run.npz"
        save_arrays(path, {"a": np.arange(3)})
        with pytest.raises(pickle.PicklingError):
            save_arrays(path, {"b": np.array([Unpicklable()], dtype=object)})
        np.testing.assert_array_equal(load_arrays(path)["a"], np.arange(3))
        assert [file.name for file in tmp_path.iterdir()] == ["run.npz"]

    def test_pickled_objects_are_never_read(self, tmp_path: Path):
        path = tmp_path / "run.npz"
        np.savez(path, a=np.array([{"b": 1}], dtype=object))
        with pytest.raises(ValueError, match="allow_pickle"):
            load_arrays(path)

    def test_half_a_file_leaves_no_handle_open(self, tmp_path: Path):
        # An open handle would show as a ResourceWarning, which is an error here.
        path = tmp_path / "run.npz"
        save_arrays(path, ARRAYS)
        content = path.read_bytes()
        for length in range(4, len(content), 97):
            path.write_bytes(content[:length])
            with pytest.raises((zipfile.BadZipFile, ValueError, EOFError, OSError)):
                load_arrays(path)
