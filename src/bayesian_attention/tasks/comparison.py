"""Running methods over seeds, resuming where an earlier call stopped."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from bayesian_attention.data import Graph
from bayesian_attention.tasks.jobs import keep_freed_memory, run_jobs
from bayesian_attention.tasks.method import Method
from bayesian_attention.tasks.model_files import save_model
from bayesian_attention.tasks.node_classification import Progress, Recipe, run
from bayesian_attention.tasks.records import Record, append_record, read_records, run_key, run_stem, save_arrays
from bayesian_attention.tasks.registry import task_named


@dataclass(frozen=True)
class Job:
    """One run to be made.

    Attributes:
        task: name of the task.
        label: of the method.
        method: the method.
        recipe: of model and training.
        seed: of everything random.
        data: what ``Task.load`` takes.
        out: folder of the results.
    """

    task: str
    label: str
    method: Method
    recipe: Recipe
    seed: int
    data: Path | None
    out: Path


def settings_of(graph: Graph, method: Method, recipe: Recipe) -> dict[str, Any]:
    """All that a result depends on besides the seed and the versions."""
    return {"data": graph.fingerprint, **method.to_dict(), "recipe": asdict(recipe)}


def plan(
    task: str,
    methods: Mapping[str, Method],
    recipe: Recipe,
    seeds: Sequence[int],
    data: Path | None,
    out: Path,
) -> tuple[list[Job], list[Record], list[str]]:
    """What is to be run, and what is there already.

    Returns:
        The missing jobs, seed by seed; the finished runs among those asked for; complaints about lines of
        the list of runs that cannot be read.
    """
    graph = task_named(task).load(data)
    records, complaints = read_records(out)
    finished = {record.key: record for record in records}
    jobs, found = [], []
    for seed in seeds:
        for label, method in methods.items():
            record = finished.get(run_key(task, label, seed, settings_of(graph, method, recipe)))
            if record is None:
                jobs.append(Job(task, label, method, recipe, seed, data, out))
            else:
                found.append(record)
    return jobs, found, complaints


def execute(jobs: Sequence[Job], processes: int) -> Iterator[Record]:
    """Make the runs; each is on disk before it is yielded."""
    for job, record in run_jobs(run_one, jobs, processes):
        append_record(job.out, record)
        yield record


def run_one(job: Job, progress: Progress | None = None) -> Record:
    """Make one run, and save its model and its predictions."""
    keep_freed_memory()
    graph = task_named(job.task).load(job.data)
    try:
        training, metrics, arrays = run(graph, job.method, job.recipe, job.seed, progress)
    except FloatingPointError as error:
        raise FloatingPointError(f"{job.label}, seed {job.seed}: {error}") from error
    settings = settings_of(graph, job.method, job.recipe)
    stem = run_stem(job.task, job.label, job.seed, settings)
    save_arrays(job.out / "predictions" / f"{stem}.npz", arrays)
    save_model(
        job.out / "models" / stem, training.model, {"task": job.task, "method": job.label, "seed": job.seed} | settings
    )
    return Record(
        task=job.task,
        method=job.label,
        seed=job.seed,
        settings=settings,
        metrics=metrics,
        versions=_versions(),
        seconds=round(training.seconds, 3),
        epochs=training.epochs,
    )


def in_order(records: Sequence[Record], labels: Sequence[str]) -> list[Record]:
    """Runs by method, in the order of ``labels``, and by seed."""
    return sorted(records, key=lambda record: (labels.index(record.method), record.seed))


def _versions() -> dict[str, str]:
    names = ("bayesian-attention", "torch", "torch-geometric", "numpy")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}
