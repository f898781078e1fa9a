"""The tables of the study, from a folder that ``bayesian-attention compare`` wrote.

    python studies/graphs/tables.py runs/study-cora --json studies/graphs/cora.json

With --json, the metrics of every run go to a small file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from bayesian_attention.report.summary import COLUMNS, markdown, methods_of, summarise
from bayesian_attention.tasks.records import Record, load_arrays, read_records

RULES = {"": "Weights that the published rule keeps", "lowest_loss_": "Weights of the lowest validation loss"}


def draws_table(folder: Path, records: list[Record], methods: list[str]) -> str:
    """What the draws of the attention change: means over the test nodes, or the edges, and the runs."""
    lines = [
        "| attention | spread of a weight, % of its mean | epistemic, nats | entropy, nats | certain (p ≤ 0.05), % |",
        "| --- | --- | --- | --- | --- |",
    ]
    for method in methods:
        runs = [load_arrays(folder / "predictions" / f"{r.stem}.npz") for r in records if r.method == method]
        if not any(run["attention_std"].any() for run in runs):
            continue
        spread = np.mean([run["attention_std"].mean() / run["attention_mean"].mean() for run in runs])
        epistemic, entropy = (np.mean([run[name].mean() for run in runs]) for name in ("epistemic", "entropy"))
        certain = np.mean([(run["p_value"] <= 0.05).mean() for run in runs])
        lines.append(f"| {method} | {100 * spread:.1f} | {epistemic:.1e} | {entropy:.2f} | {100 * certain:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the tables and write the metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    records, complaints = read_records(arguments.folder)
    if complaints or not records:
        raise SystemExit("\n".join(complaints) or f"{arguments.folder}: has no finished runs")
    methods = sorted(methods_of(records), key=lambda method: (method != "softmax", method[0] != "w", method))
    for prefix, title in RULES.items():
        columns = {prefix + name: column for name, column in COLUMNS.items()}
        print(f"{title}:\n\n{markdown(summarise(records, methods, tuple(columns)), columns)}")
    print("What the draws change, with the weights that the published rule keeps:\n")
    print(draws_table(arguments.folder, records, methods))
    if arguments.json is not None:
        records.sort(key=lambda record: (methods.index(record.method), record.seed))
        runs = [
            {
                "method": record.method,
                "seed": record.seed,
                "epochs": record.epochs,
                "settings": record.settings,
                "metrics": {name: round(value, 5) for name, value in record.metrics.items()},
            }
            for record in records
        ]
        lines = ",\n".join(json.dumps(run) for run in runs)
        arguments.json.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
