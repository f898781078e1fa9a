"""Choose the settings of each method on the validation nodes, with the same budget for every method.

    python studies/graphs/tune.py cora --out studies/graphs/tuning-cora.jsonl

Eight settings a method, two seeds each that no reported run uses. The criterion is the negative
log-likelihood of the predictive distribution on the validation nodes at the epoch of the lowest validation
loss, averaged over the seeds. Test nodes are not looked at. One JSON line a run, written at once; a rerun
skips what is there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import bayesian_attention as ba
from bayesian_attention.data import load_graph
from bayesian_attention.data.folder import find
from bayesian_attention.tasks.jobs import run_jobs
from bayesian_attention.tasks.method import Method
from bayesian_attention.tasks.node_classification import Recipe, predictive, train

SEEDS = (1000, 1001)
Job = tuple[str, str, dict[str, float], int]

GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "softmax": {"dropout": (0.4, 0.5, 0.6, 0.7), "weight_decay": (5e-4, 1e-3)},
    "weibull+constant": {"shape": (1.0, 10.0), "rate": (0.1, 1.0), "kl_weight": (0.01, 0.1)},
    "weibull+contextual": {"shape": (1.0, 10.0), "rate": (0.1, 1.0), "kl_weight": (0.01, 0.1)},
    "lognormal+constant": {"sigma": (0.1, 1.0), "prior_sigma": (1.0, 10.0), "kl_weight": (0.01, 0.1)},
    "lognormal+contextual": {"sigma": (0.1, 1.0), "prior_sigma": (1.0, 10.0), "kl_weight": (0.01, 0.1)},
}


def settings(grid: dict[str, tuple[float, ...]]) -> list[dict[str, float]]:
    """Every combination."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def method_and_recipe(name: str, setting: dict[str, float]) -> tuple[Method, Recipe]:
    """What a setting stands for. The constant Gamma prior has concentration = rate, so its mean is 1."""
    recipe = Recipe()
    if name == "softmax":
        recipe = replace(recipe, dropout=setting["dropout"], weight_decay=setting["weight_decay"])
        return Method(ba.Softmax()), recipe
    prior: ba.Prior
    posterior: ba.Posterior
    if name.startswith("weibull"):
        posterior, rate = ba.Weibull(setting["shape"]), setting["rate"]
        constant = ba.ConstantPrior(concentration=rate, rate=rate)
        contextual = ba.ContextualPrior(share_heads=False, rate=rate)
    else:
        posterior, scale = ba.LogNormal(setting["sigma"]), setting["prior_sigma"]
        constant = ba.ConstantPrior(scale=scale)
        contextual = ba.ContextualPrior(share_heads=False, scale=scale)
    prior = constant if name.endswith("constant") else contextual
    return Method(posterior, prior, setting["kl_weight"]), recipe


def work(job: Job) -> dict[str, float]:
    """Train one model and measure it on the validation nodes."""
    task, name, setting, seed = job
    graph = load_graph(find(task, f"planetoid/{task}.npz"))
    method, recipe = method_and_recipe(name, setting)
    training = train(graph, method, recipe, seed)
    training.model.load_state_dict(training.lowest_loss)
    prediction = predictive(training.model, recipe, seed)
    nodes = graph.splits["val"]
    mean, target = prediction.mean[nodes], graph.y[nodes]
    nll = F.nll_loss(mean.clamp_min(torch.finfo(mean.dtype).tiny).log(), target)
    hits = (mean.argmax(dim=-1) == target).double().mean()
    return {
        "val_nll": float(nll),
        "val_accuracy": float(hits),
        "epochs": training.epochs,
        "seconds": training.seconds,
    }


def best(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The chosen setting of each method."""
    chosen: dict[str, dict[str, Any]] = {}
    for name in GRIDS:
        runs: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            if line["method"] == name:
                runs.setdefault(json.dumps(line["setting"]), []).append(line)
        if runs:
            key = min(runs, key=lambda k: statistics.mean(run["val_nll"] for run in runs[k]))
            chosen[name] = {
                "setting": json.loads(key),
                "val_nll": round(statistics.mean(run["val_nll"] for run in runs[key]), 4),
                "val_accuracy": round(statistics.mean(run["val_accuracy"] for run in runs[key]), 4),
            }
    return chosen


def main() -> None:
    """Run what is missing and print the choice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("cora", "citeseer"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--methods", default=",".join(GRIDS))
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    done = {json.dumps([line["method"], line["setting"], line["seed"]]) for line in lines}
    jobs: list[Job] = [
        (arguments.task, name, setting, seed)
        for name in arguments.methods.split(",")
        for setting in settings(GRIDS[name])
        for seed in SEEDS
        if json.dumps([name, setting, seed]) not in done
    ]
    for (_, name, setting, seed), result in run_jobs(work, jobs, arguments.jobs):
        line = {"method": name, "setting": setting, "seed": seed, **result}
        lines.append(line)
        with arguments.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    print(json.dumps(best(lines), indent=2))


if __name__ == "__main__":
    main()
