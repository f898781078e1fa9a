"""Synthetic runs on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bayesian_attention.tasks.records import Record, append_record, save_arrays

CLASSES, NODES, TESTED = 3, 40, 30


def make_arrays(seed: int, stochastic: bool) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    target = generator.integers(0, CLASSES, TESTED)
    logits = generator.normal(size=(TESTED, CLASSES)) + 1.5 * np.eye(CLASSES)[target]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    label = generator.integers(0, CLASSES, NODES)
    label[-TESTED:] = probabilities.argmax(axis=1)
    # Each node hears itself and the next four.
    index = np.arange(NODES)
    sources = np.concatenate([(index + step) % NODES for step in range(5)])
    mean = generator.dirichlet(np.ones(5), NODES).T.reshape(-1)
    return {
        "node": np.arange(NODES - TESTED, NODES),
        "target": target,
        "probabilities": probabilities.astype(np.float32),
        "entropy": -(probabilities * np.log(probabilities)).sum(axis=1),
        "epistemic": generator.exponential(0.01, TESTED) * stochastic,
        "p_value": generator.random(TESTED),
        "label_all": label,
        "edge_index": np.stack([sources, np.tile(index, 5)]),
        "attention_mean": mean,
        "attention_std": mean * 0.2 * stochastic,
    }


def make_run(
    folder: Path, method: str, seed: int, *, task: str = "toy", stochastic: bool = True, **over: Any
) -> Record:
    """Write one run as a comparison would."""
    arrays = make_arrays(seed + 100 * stochastic, stochastic)
    accuracy = float((arrays["probabilities"].argmax(axis=1) == arrays["target"]).mean())
    metrics = {"accuracy": accuracy, "nll": 0.8 + 0.01 * seed - 0.3 * stochastic, "ece": 0.1 + 0.001 * seed}
    metrics |= {"brier": 0.4, "aurc": 0.1, "auroc_error": 0.75, "pavpu_0.05": 0.6}
    metrics |= {f"lowest_loss_{name}": value for name, value in metrics.items()}
    metrics |= {"accuracy_mean_weights": accuracy, **over.pop("metrics", {})}
    settings = {"data": "abc", "prior": {"name": "constant"} if stochastic else None, "recipe": {"hidden": 8}}
    record = Record(task, method, seed, settings | over, metrics, {"numpy": np.__version__}, 1.5 + seed, 10)
    append_record(folder, record)
    save_arrays(folder / "predictions" / f"{record.stem}.npz", arrays)
    return record
