"""The tables of the report, as the template shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bayesian_attention.report.summary import Cell, format_cell, is_percentage, summarise
from bayesian_attention.tasks.records import Record

_ARROWS = {"higher": "↑", "lower": "↓"}


def table(
    records: Sequence[Record], labels: Sequence[str], columns: Mapping[str, tuple[str, str]], fixed: set[str]
) -> dict[str, Any] | None:
    """A table of a row a method; None where no run has any of the metrics."""
    cells = summarise(records, labels, tuple(columns))
    shown = [column for column in columns if any(column in row for row in cells.values())]
    if not shown:
        return None
    rows: list[dict[str, Any]] = []
    for index, label in enumerate(labels):
        row = [_cell(cells[label].get(column), column, columns[column][1], label in fixed) for column in shown]
        rows.append({"label": label, "index": index, "cells": row})
    counts = sorted({len(cell.values) for row in cells.values() for cell in row.values()})
    paired = sorted(
        {
            len({r.seed for r in records if r.method == label} & {r.seed for r in records if r.method == labels[0]})
            for label in labels[1:]
        }
    )
    return {
        "head": [{"name": columns[c][0], "arrow": _ARROWS[columns[c][1]], "better": columns[c][1]} for c in shown],
        "rows": rows,
        "runs": span(counts),
        "pairs": span(paired),
        "some_pairs": bool(paired) and paired[-1] > 1,
        "single": counts[0] == 1,
        "pavpu": any("pavpu" in column for column in shown),
        "marks": any(cell["mark"] for row in rows for cell in row["cells"]),
    }


def _cell(cell: Cell | None, column: str, direction: str, fixed: bool) -> dict[str, str]:
    """What a cell of a table shows."""
    empty = {"text": "–", "difference": "", "mark": "", "title": "no run has this number"}
    if "pavpu" in column and fixed:
        return {**empty, "title": "without draws there is nothing to test"}
    if cell is None:
        return empty
    if not math.isfinite(cell.mean):
        return {**empty, "title": "not defined: all answers of a run are right, or all are wrong"}
    text, difference = format_cell(cell, is_percentage(column))
    if cell.difference is None or not difference:
        return {**empty, "text": text, "title": ""}
    mark = ""
    if cell.differs:
        mark = "better" if (cell.difference > 0) == (direction == "higher") else "worse"
    return {"text": text, "difference": difference.replace("-", "−"), "mark": mark, "title": ""}


def span(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: the one that they all are, or the first and the last."""
    if not numbers:
        return ""
    return str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"
