"""Comparing methods over seeds: means with standard errors, and paired differences with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bayesian_attention.tasks.records import Record

#: Metrics for the weights of the lowest validation loss, to stand beside those of the weights that were kept.
LOWEST_LOSS_COLUMNS: dict[str, tuple[str, str]] = {
    "lowest_loss_accuracy": ("accuracy, lowest loss", "higher"),
    "lowest_loss_nll": ("NLL, lowest loss", "lower"),
    "lowest_loss_ece": ("ECE, lowest loss", "lower"),
}

#: Metrics of a comparison, with what to call them and which way is better.
COLUMNS: dict[str, tuple[str, str]] = {
    "accuracy": ("accuracy", "higher"),
    "nll": ("NLL", "lower"),
    "ece": ("ECE", "lower"),
    "brier": ("Brier", "lower"),
    "aurc": ("AURC", "lower"),
    "auroc_error": ("AUROC of errors", "higher"),
    "pavpu_0.05": ("PAvPU (p ≤ 0.05)", "higher"),
}


@dataclass(frozen=True)
class Cell:
    """One metric of one method over its seeds.

    Attributes:
        values: one a seed, in the order of the seeds.
        difference: mean over the seeds that it shares with the first method of its value minus the first's;
            None for the first method itself, or where they share fewer than two seeds.
        interval: half-width of the 95% interval of ``difference`` (Student's t, paired by seed).
    """

    values: tuple[float, ...]
    difference: float | None
    interval: float | None

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(self.values))

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean; None for a single seed."""
        count = len(self.values)
        return float(np.std(self.values, ddof=1) / math.sqrt(count)) if count > 1 else None

    @property
    def differs(self) -> bool:
        """Whether the interval of the difference leaves out zero."""
        return self.difference is not None and self.interval is not None and abs(self.difference) > self.interval


def deterministic(record: Record) -> bool:
    """Whether a run's method has no distribution over attention weights, by its settings."""
    return "prior" in record.settings and record.settings["prior"] is None


def methods_of(records: Sequence[Record]) -> list[str]:
    """The methods in the order in which they first occur."""
    return list(dict.fromkeys(record.method for record in records))


def summarise(
    records: Sequence[Record], methods: Sequence[str], columns: Sequence[str] = tuple(COLUMNS)
) -> dict[str, dict[str, Cell]]:
    """The cells of a table: a row a method, a column a metric.

    PAvPU tests the draws of a prediction. A deterministic method has none: all its answers would be uncertain
    and its PAvPU its error rate, so it gets no such cell, and nothing is compared with one.

    Args:
        records: runs of one task.
        methods: the methods to show; the first is what the others are compared with.
        columns: names of metrics; a metric that a run lacks is left out of its row.
    """
    by_method: dict[str, dict[int, Record]] = {method: {} for method in methods}
    for record in records:
        if record.method in by_method:
            by_method[record.method][record.seed] = record
    table: dict[str, dict[str, Cell]] = {}
    for method, runs in by_method.items():
        if not runs:
            continue
        row = {}
        for column in columns:
            tests_draws = "pavpu" in column
            if tests_draws and all(map(deterministic, runs.values())):
                continue
            values = {seed: run.metrics[column] for seed, run in sorted(runs.items()) if column in run.metrics}
            if not values:
                continue
            base = {
                seed: run.metrics[column]
                for seed, run in by_method[methods[0]].items()
                if column in run.metrics and not (tests_draws and deterministic(run))
            }
            difference, interval = (None, None) if method == methods[0] else paired_difference(values, base)
            row[column] = Cell(tuple(values.values()), difference, interval)
        table[method] = row
    return table


def paired_difference(values: dict[int, float], base: dict[int, float]) -> tuple[float, float] | tuple[None, None]:
    """Mean difference over shared seeds, and the half-width of its 95% interval."""
    from scipy import stats

    shared = sorted(values.keys() & base.keys())
    if len(shared) < 2:
        return None, None
    differences = np.array([values[seed] - base[seed] for seed in shared])
    error = differences.std(ddof=1) / math.sqrt(len(shared))
    return float(differences.mean()), float(stats.t.ppf(0.975, len(shared) - 1) * error)


def format_cell(cell: Cell, percent: bool) -> tuple[str, str]:
    """The mean with its standard error, and the difference with its interval, as text.

    Args:
        cell: what to show.
        percent: show fractions as percentages with one digit, other numbers with three.
    """
    scale, digits = (100.0, 1) if percent else (1.0, 3)
    text = f"{cell.mean * scale:.{digits}f}"
    if cell.standard_error is not None:
        text += f" ± {cell.standard_error * scale:.{digits + (1 if percent else 0)}f}"
    if cell.difference is None or cell.interval is None:
        return text, ""
    # Adding zero turns a rounded −0 into +0.
    difference = round(cell.difference * scale, digits) + 0.0
    return text, f"{difference:+.{digits}f} ± {cell.interval * scale:.{digits}f}"


def is_percentage(column: str) -> bool:
    """Whether a metric is shown in per cent: accuracies and PAvPU."""
    return "accuracy" in column or "pavpu" in column


def caption(records: Sequence[Record], methods: Sequence[str]) -> str:
    """What the numbers of a table are, in plain words."""
    seeds = len({record.seed for record in records})
    return (
        f"Test nodes, {seeds} seed{'s' if seeds > 1 else ''}: mean ± standard error; accuracy and PAvPU in per cent, "
        f"NLL in nats. Δ: paired difference to {methods[0]} ± half of its 95% interval; bold where the interval leaves "
        "out zero. The published stopping rule may keep the weights of an early epoch, whose probabilities are timid; "
        '"lowest loss" is for the weights of the lowest validation loss of the same training.'
    )


def markdown(table: dict[str, dict[str, Cell]], columns: dict[str, tuple[str, str]]) -> str:
    """The table in Markdown: mean ± standard error, and below it the paired difference to the first row.

    A difference whose 95% interval leaves out zero is in bold.
    """
    shown = [column for column in columns if any(column in row for row in table.values())]
    arrows = {"higher": "↑", "lower": "↓"}
    lines = [
        "| attention | " + " | ".join(f"{columns[c][0]} {arrows[columns[c][1]]}" for c in shown) + " |",
        "| --- |" + " --- |" * len(shown),
    ]
    for method, row in table.items():
        cells = []
        for column in shown:
            if column not in row or not math.isfinite(row[column].mean):
                cells.append("–")
                continue
            text, difference = format_cell(row[column], is_percentage(column))
            if difference:
                difference = f"**{difference}**" if row[column].differs else difference
                text += f"<br>Δ {difference}"
            cells.append(text)
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
