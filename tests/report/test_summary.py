from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from bayesian_attention.report import COLUMNS, markdown, summarise
from bayesian_attention.report.summary import format_cell, is_percentage, methods_of, paired_difference
from bayesian_attention.tasks.records import Record


def record(method: str, seed: int, **metrics: float) -> Record:
    return Record("toy", method, seed, {}, metrics, {}, 1.0, 1)


def series(method: str, values: list[float], name: str = "nll") -> list[Record]:
    return [record(method, seed, **{name: value}) for seed, value in enumerate(values)]


def test_interval_is_that_of_the_paired_t_test() -> None:
    generator = np.random.default_rng(0)
    base, other = generator.normal(size=(2, 7))
    cell = summarise([*series("a", list(base)), *series("b", list(other))], ["a", "b"], ["nll"])["b"]["nll"]
    expected = stats.ttest_rel(other, base).confidence_interval(0.95)
    assert cell.difference is not None
    assert cell.interval is not None
    assert cell.difference - cell.interval == pytest.approx(expected.low)
    assert cell.difference + cell.interval == pytest.approx(expected.high)
    assert cell.differs == (expected.low > 0 or expected.high < 0)


def test_pavpu_is_compared_among_methods_with_draws_alone() -> None:
    values = [0.2, 0.4, 0.3]
    fixed = [
        Record("toy", "a", seed, {"prior": None}, {"pavpu_0.05": value}, {}, 1.0, 1)
        for seed, value in enumerate(values)
    ]
    drawn = [*series("b", values, "pavpu_0.05"), *series("c", [0.5, 0.4, 0.9], "pavpu_0.05")]
    table = summarise([*fixed, *drawn], ["a", "b", "c"], ["pavpu_0.05"])
    assert table["a"] == {}
    assert table["b"]["pavpu_0.05"].difference is None
    assert summarise(drawn, ["b", "c"], ["pavpu_0.05"])["c"]["pavpu_0.05"].difference == pytest.approx(0.3)


def test_mean_and_standard_error() -> None:
    cell = summarise(series("a", [1.0, 2.0, 4.0]), ["a"], ["nll"])["a"]["nll"]
    assert cell.values == (1.0, 2.0, 4.0)
    assert cell.mean == pytest.approx(7 / 3)
    assert cell.standard_error == pytest.approx(stats.sem([1.0, 2.0, 4.0]))
    assert cell.difference is None
    assert not cell.differs


def test_clear_difference_is_told_from_none() -> None:
    records = [*series("a", [1.0, 1.1, 1.2]), *series("b", [2.0, 2.11, 2.2]), *series("c", [0.9, 1.2, 1.3])]
    table = summarise(records, ["a", "b", "c"], ["nll"])
    assert table["b"]["nll"].differs
    assert not table["c"]["nll"].differs


def test_equal_runs_do_not_differ() -> None:
    table = summarise([*series("a", [1.0, 2.0]), *series("b", [1.0, 2.0])], ["a", "b"], ["nll"])
    assert table["b"]["nll"].difference == 0
    assert not table["b"]["nll"].differs


def test_single_seed_has_neither_error_nor_difference() -> None:
    cell = summarise([*series("a", [1.0]), *series("b", [2.0])], ["a", "b"], ["nll"])["b"]["nll"]
    assert cell.standard_error is None
    assert (cell.difference, cell.interval) == (None, None)
    assert format_cell(cell, percent=False) == ("2.000", "")


def test_only_shared_seeds_are_paired() -> None:
    base = {0: 1.0, 1: 2.0, 2: 3.0, 5: 100.0}
    values = {0: 1.5, 1: 2.7, 2: 3.3, 4: -100.0}
    difference, interval = paired_difference(values, base)
    expected = stats.ttest_rel([1.5, 2.7, 3.3], [1.0, 2.0, 3.0]).confidence_interval(0.95)
    assert difference is not None
    assert interval is not None
    assert (difference - interval, difference + interval) == pytest.approx((expected.low, expected.high))
    assert paired_difference({1: 1.0, 2: 2.0}, {2: 1.0, 3: 1.0}) == (None, None)


def test_missing_metrics_and_methods_are_left_out() -> None:
    table = summarise([record("a", 0, nll=1.0), record("b", 0, ece=0.1)], ["a", "b", "c"], ["nll", "ece"])
    assert set(table) == {"a", "b"}
    assert set(table["a"]) == {"nll"}
    assert set(table["b"]) == {"ece"}


def test_a_later_run_of_a_seed_replaces_an_earlier_one() -> None:
    table = summarise([record("a", 0, nll=1.0), record("a", 0, nll=3.0)], ["a"], ["nll"])
    assert table["a"]["nll"].values == (3.0,)


def test_methods_keep_their_order() -> None:
    assert methods_of([record("b", 0), record("a", 0), record("b", 1)]) == ["b", "a"]


def test_percentages() -> None:
    assert is_percentage("accuracy")
    assert is_percentage("lowest_loss_pavpu_0.05")
    assert not is_percentage("auroc_error")
    cell = summarise(
        [*series("a", [0.80, 0.82], "accuracy"), *series("b", [0.81, 0.85], "accuracy")], ["a", "b"], ["accuracy"]
    )["b"]["accuracy"]
    half = 100 * 0.01 * stats.t.ppf(0.975, 1)
    assert format_cell(cell, percent=True) == ("83.0 ± 2.00", f"+2.0 ± {half:.1f}")


def test_markdown() -> None:
    records = [*series("a", [1.0, 1.1, 1.2]), *series("b", [2.0, 2.11, 2.2]), record("c", 0, ece=0.25)]
    text = markdown(summarise(records, ["a", "b", "c"]), COLUMNS)
    lines = text.splitlines()
    assert lines[0] == "| attention | NLL ↓ | ECE ↓ |"
    assert lines[1] == "| --- | --- | --- |"
    assert lines[2].startswith("| a | 1.100 ± 0.058 |")
    assert "<br>Δ **+1.003 ± " in lines[3]
    assert lines[4] == "| c | – | 0.250 |"
    assert not math.isnan(float(lines[4].split("|")[3]))
