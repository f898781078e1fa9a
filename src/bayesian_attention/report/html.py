"""The report of a folder of runs: one HTML file that needs nothing else."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bayesian_attention.files import replacing
from bayesian_attention.report.summary import (
    COLUMNS,
    deterministic,
    methods_of,
)
from bayesian_attention.report.tables import table
from bayesian_attention.tasks.records import Record, read_records

if TYPE_CHECKING:
    from markupsafe import Markup

    from bayesian_attention.report.runs import Run

#: The second table: the same metrics for other weights of the same training.
_OTHER_COLUMNS: dict[str, tuple[str, str]] = {
    **{f"lowest_loss_{name}": column for name, column in COLUMNS.items()},
    "accuracy_mean_weights": ("accuracy, mean attention", "higher"),
}

_COVERAGES = np.linspace(0.02, 1.0, 99)
_SPREADS = {"light": ("#b3bcc9", "#c9548f", "#560a57"), "dark": ("#515c6d", "#e0699f", "#ffe3ee")}


def write_report(
    folder: Path, destination: Path, *, methods: Sequence[str] = (), only: Sequence[Record] | None = None
) -> Path:
    """Write the report of the runs in a folder.

    Args:
        folder: where the runs are: ``runs.jsonl`` and ``predictions``.
        destination: the HTML file to write; replaced whole or left as it is.
        methods: labels in the order in which to show them; the first is the one that the others are compared
            with. Others follow. By default deterministic methods come first, in the order of the runs.
        only: the runs to report; by default all of the folder, of each method and seed the last.

    Returns:
        ``destination``.

    Raises:
        ValueError: there is no finished run in ``folder``.
        ImportError: matplotlib, jinja2 or scipy is not installed.
    """
    try:
        import jinja2
        import scipy.stats  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the report needs {error.name}: pip install 'bayesian-attention[report]'", name=error.name
        ) from error
    from bayesian_attention.report import figures, runs

    found, complaints = read_records(folder)
    records, replaced = runs.latest(found if only is None else only)
    if not records:
        raise ValueError(f"{folder}: has no finished runs to report")
    tasks = list(dict.fromkeys(record.task for record in records))
    environment = jinja2.Environment(autoescape=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["breakable"] = _breakable
    source = resources.files("bayesian_attention.report").joinpath("template.html").read_text(encoding="utf-8")
    page = environment.from_string(source).render(
        tasks=[
            _task(folder, number, task, [record for record in records if record.task == task], methods)
            for number, task in enumerate(tasks)
        ],
        notes=[*complaints, *replaced],
        folder=_shown(folder),
        ramps={theme: _ramp(anchors) for theme, anchors in _SPREADS.items()},
        dashes=[" ".join(f"{1.6 * length:g}" for length in dash) for dash in figures.DASHES],
        series=figures.SERIES,
    )
    with replacing(destination) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return destination


def order_of(records: Sequence[Record], wanted: Sequence[str] = ()) -> list[str]:
    """The methods of some runs: those wanted, then deterministic ones, then the others."""
    labels = methods_of(records)
    fixed = {record.method for record in records if deterministic(record)}
    first = [label for label in dict.fromkeys(wanted) if label in labels]
    rest = [label for label in labels if label not in first]
    return first + sorted(rest, key=lambda label: label not in fixed)


def _task(folder: Path, number: int, task: str, records: list[Record], wanted: Sequence[str]) -> dict[str, Any]:
    """Everything that the template shows of one task."""
    from bayesian_attention.report.cards import neighbourhood_cards
    from bayesian_attention.report.runs import load_runs

    labels = order_of(records, wanted)
    records = sorted(records, key=lambda record: (labels.index(record.method), record.seed))
    runs, missing = load_runs(folder, records)
    fixed = {record.method for record in records if deterministic(record)}
    seeds = {label: [record.seed for record in records if record.method == label] for label in labels}
    by_method = {label: [run for run in runs if run.record.method == label] for label in labels}
    drawn = {label: (labels.index(label), found) for label, found in by_method.items() if found}
    return {
        "anchor": f"task{number}",
        "name": task,
        "labels": labels,
        "deterministic": sorted(fixed, key=labels.index),
        "seeds": seeds,
        "same_seeds": len({tuple(found) for found in seeds.values()}) == 1,
        "notes": [*missing, *_warnings(records, labels)],
        "table": table(records, labels, COLUMNS, fixed),
        "other_table": table(records, labels, _OTHER_COLUMNS, fixed),
        "classes": max((run.probabilities.shape[1] for run in runs), default=0),
        "answers": sorted({len(run.node) for run in runs}),
        "reliability": _reliability(drawn),
        "risk": _risk(drawn),
        "uncertainty": _uncertainty(drawn),
        "neighbourhoods": neighbourhood_cards(by_method),
        "command": _command(_shown(folder), task, records, labels),
        "details": [_details(label, labels.index(label), records) for label in labels],
        "versions": _versions(records),
    }


def _shown(folder: Path) -> str:
    """A folder as the report names it: a whole path says more about the machine than about the runs."""
    return folder.resolve().name if folder.is_absolute() or str(folder) == "." else str(folder)


def _command(folder: str, task: str, records: Sequence[Record], labels: Sequence[str]) -> str:
    """The command line that makes the runs of one task."""
    from bayesian_attention.tasks.node_classification import Recipe
    from bayesian_attention.tasks.registry import TASKS

    seeds = sorted({record.seed for record in records})
    # A lone number would be read as how many.
    numbers = ",".join(map(str, seeds)) if len(seeds) > 1 else f"{seeds[0]}-{seeds[0]}"
    if seeds == list(range(len(seeds))):
        numbers = str(len(seeds))
    command = f'bayesian-attention compare {task} --attention "{",".join(labels)}" --seeds {numbers}'
    recipe = records[0].settings.get("recipe", {})
    usual = {field.name: field.default for field in fields(Recipe)}
    changed = ",".join(f"{name}={value}" for name, value in recipe.items() if value != usual.get(name, value))
    command += f" --recipe {changed}" if changed else ""
    command += " --data FILE.npz" if task in TASKS and TASKS[task].file is None else ""
    return f"{command} --out {shlex.quote(folder)}"


def _warnings(records: Sequence[Record], labels: Sequence[str]) -> list[str]:
    """What makes a comparison less than fair, or a table less than whole."""
    notes = []
    for label in labels:
        kinds = {json.dumps(record.settings, sort_keys=True) for record in records if record.method == label}
        if len(kinds) > 1:
            notes.append(f"{label}: its runs have {len(kinds)} different settings, listed under Details")
    for name, what in (("data", "data"), ("recipe", "recipes of model and training")):
        kinds = {json.dumps(record.settings.get(name), sort_keys=True) for record in records}
        if len(kinds) > 1:
            notes.append(f"the runs have {len(kinds)} different {what}: the methods are not alone in what differs")
    return notes


def _pooled(runs: Sequence[Run], name: str) -> np.ndarray:
    return np.concatenate([getattr(run, name) for run in runs])


def _reliability(drawn: Mapping[str, tuple[int, list[Run]]]) -> list[dict[str, Any]]:
    from bayesian_attention.report.curves import reliability
    from bayesian_attention.report.figures import reliability_panel

    diagrams = {
        label: reliability(_pooled(runs, "confidence"), _pooled(runs, "correct")) for label, (_, runs) in drawn.items()
    }
    highest = max((float(diagram.share.max()) for diagram in diagrams.values()), default=1.0)
    return [
        {
            "label": label,
            "index": drawn[label][0],
            "svg": reliability_panel(diagram, highest),
            "ece": f"{diagram.ece:.3f}",
            "accuracy": f"{100 * _pooled(drawn[label][1], 'correct').mean():.1f}%",
            "confidence": f"{100 * _pooled(drawn[label][1], 'confidence').mean():.1f}%",
            "seeds": len(drawn[label][1]),
            "answers": int(diagram.count.sum()),
        }
        for label, diagram in diagrams.items()
    ]


def _risk(drawn: Mapping[str, tuple[int, list[Run]]]) -> dict[str, Any] | None:
    from bayesian_attention.report.curves import risk_at
    from bayesian_attention.report.figures import Curve, risk_coverage_chart

    if not drawn:
        return None
    curves, rows = [], []
    for label, (index, runs) in drawn.items():
        risks = np.stack([risk_at(run.entropy, run.correct, _COVERAGES) for run in runs])
        error = risks.std(axis=0, ddof=1) / math.sqrt(len(runs)) if len(runs) > 1 else None
        curves.append(Curve(index, _COVERAGES, risks.mean(axis=0), error))
        some = np.mean([risk_at(run.entropy, run.correct, np.array([0.5, 0.8, 1.0])) for run in runs], axis=0)
        rows.append(
            {"label": label, "index": index, "seeds": len(runs), "risks": [f"{100 * risk:.1f}%" for risk in some]}
        )
    return {"svg": risk_coverage_chart(curves), "rows": rows, "band": any(c.half_width is not None for c in curves)}


def _uncertainty(drawn: Mapping[str, tuple[int, list[Run]]]) -> list[dict[str, Any]]:
    from bayesian_attention.report import curves
    from bayesian_attention.report.figures import uncertainty_panel

    groups: list[dict[str, Any]] = []
    for name, title, axis in (
        ("entropy", "Entropy (total uncertainty)", "entropy"),
        ("epistemic", "Epistemic uncertainty", "epistemic uncertainty"),
    ):
        logarithmic = name == "epistemic"
        shown = {
            label: (index, runs)
            for label, (index, runs) in drawn.items()
            if not logarithmic or any(run.has_epistemic for run in runs)
        }
        if not shown:
            continue
        samples = {label: _pooled(runs, name) for label, (_, runs) in shown.items()}
        if logarithmic:
            edges = curves.log_edges(list(samples.values()))
            scaled = {label: np.log10(np.maximum(sample, 1e-30)) for label, sample in samples.items()}
        else:
            classes = max(run.probabilities.shape[1] for _, runs in shown.values() for run in runs)
            edges, scaled = curves.entropy_edges(list(samples.values()), classes), samples
        parts = {}
        for label, (_, runs) in shown.items():
            correct = _pooled(runs, "correct")
            parts[label] = (
                curves.shares(scaled[label][correct], edges),
                curves.shares(scaled[label][~correct], edges),
                _mean_auroc(runs, name),
                int(correct.sum()),
                int((~correct).sum()),
            )
        highest = max(float(max(right.max(), wrong.max())) for right, wrong, *_ in parts.values())
        panels = [
            {
                "label": label,
                "index": shown[label][0],
                "svg": uncertainty_panel(
                    right, wrong, edges, highest, label=f"{axis} in nats", logarithmic=logarithmic
                ),
                "auroc": "–" if auroc is None else f"{auroc:.3f}",
                "right": count_right,
                "wrong": count_wrong,
            }
            for label, (right, wrong, auroc, count_right, count_wrong) in parts.items()
        ]
        groups.append({"name": name, "title": title, "panels": panels})
    return groups


def _mean_auroc(runs: Sequence[Run], name: str) -> float | None:
    """The AUROC of errors, the mean over the runs for which there is one."""
    from bayesian_attention.report.curves import error_auroc

    found = [auroc for run in runs if (auroc := error_auroc(getattr(run, name), run.correct)) is not None]
    return float(np.mean(found)) if found else None


def _breakable(label: str) -> Markup:
    """A label, escaped, that a line may break after its punctuation."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([+(,])", r"\1<wbr>", str(escape(label))))  # noqa: S704


def _details(label: str, index: int, records: Sequence[Record]) -> dict[str, Any]:
    """Settings, times and epochs of a method's runs."""
    own = [record for record in records if record.method == label]
    kinds: dict[str, list[int]] = {}
    for record in own:
        kinds.setdefault(json.dumps(record.settings, indent=2, ensure_ascii=False), []).append(record.seed)
    seconds = [record.seconds for record in own]
    epochs = [record.epochs for record in own]
    return {
        "label": label,
        "index": index,
        "runs": len(own),
        "seconds": f"{np.mean(seconds):.1f}",
        "range": f"{min(seconds):.1f} – {max(seconds):.1f}" if len(own) > 1 else "",
        "epochs": f"{np.mean(epochs):.0f}",
        "settings": [{"seeds": ", ".join(map(str, seeds)), "text": text} for text, seeds in kinds.items()],
    }


def _versions(records: Sequence[Record]) -> list[tuple[str, str]]:
    names = dict.fromkeys(name for record in records for name in record.versions)
    return [
        (name, ", ".join(dict.fromkeys(str(r.versions[name]) for r in records if name in r.versions))) for name in names
    ]


def _ramp(anchors: Sequence[str]) -> list[str]:
    """Colours of the scale of spreads, from the first anchor to the last."""
    from bayesian_attention.report.neighbourhoods import SPREADS

    points = np.array([[int(anchor[i : i + 2], 16) for i in (1, 3, 5)] for anchor in anchors], dtype=float)
    places = np.linspace(0, len(anchors) - 1, SPREADS)
    mixed = np.stack([np.interp(places, np.arange(len(anchors)), points[:, channel]) for channel in range(3)], axis=1)
    return ["#" + "".join(f"{round(value):02x}" for value in colour) for colour in mixed]
