"""The command ``bayesian-attention``."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

try:
    import typer
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.table import Table
except ImportError as error:
    raise SystemExit(f"error: the command needs {error.name}: pip install 'bayesian-attention[cli]'") from error

if TYPE_CHECKING:
    from bayesian_attention.tasks.comparison import Job
    from bayesian_attention.tasks.records import Record

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Attention weights as random variables: train, compare, report, predict.",
)

#: Most seeds and nodes that one call names, and the largest of them.
_MOST, _LARGEST = 1_000_000, 2**63 - 1

TaskName = Annotated[str, typer.Argument(metavar="TASK", help="A task; `bayesian-attention tasks` lists them.")]
Attention = Annotated[
    str,
    typer.Option(
        help="Family of the weights, with a prior and settings if wanted: weibull, lognormal+contextual, "
        "weibull(shape=10,kl_weight=0.1). Several have commas between them."
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder of data sets (default: $BAYESIAN_ATTENTION_DATA), or the npz file of the task 'graph'."),
]
Out = Annotated[Path | None, typer.Option(help="Folder of the results (default: runs/TASK).")]
RecipeSettings = Annotated[
    str, typer.Option("--recipe", help="Settings of model and training to change, as dropout=0.4,patience=200.")
]


@app.command()
def tasks() -> None:
    """List the tasks, and the methods that each has settings for."""
    from bayesian_attention.tasks.registry import TASKS

    for task in TASKS.values():
        _out().print(f"[bold]{task.name}[/]  {task.description}", highlight=False)
        _out().print(f"    settings for: {', '.join(task.methods)}", highlight=False)


@app.command()
def run(
    task: TaskName,
    attention: Attention = "weibull",
    seed: Annotated[int, typer.Option(help="Seed of initialisation, training and draws.", min=0, max=_LARGEST)] = 0,
    recipe: RecipeSettings = "",
    data: Data = None,
    out: Out = None,
) -> None:
    """Train one model, measure it and save it."""
    jobs, found, _, folder = _plan(task, attention, [seed], recipe, data, out, single=True)
    record = found[0] if found else _train_one(jobs[0])
    _print_metrics(record)
    _say(_out(), f"model: {folder / 'models' / record.stem}.safetensors")


@app.command()
def compare(
    task: TaskName,
    attention: Attention = "softmax,weibull,lognormal",
    seeds: Annotated[str, typer.Option(help="How many, from 0 on; or which: 5-9 or 1,4,7.")] = "3",
    jobs: Annotated[int | None, typer.Option(help="Processes (default: one a CPU core).", min=1)] = None,
    recipe: RecipeSettings = "",
    data: Data = None,
    out: Out = None,
) -> None:
    """Train several methods over the same seeds, and compare them with the first.

    Finished runs in the output folder are not made again, so a call that was stopped goes on where it was.
    """
    from bayesian_attention.files import replacing
    from bayesian_attention.report import markdown, write_report
    from bayesian_attention.report.summary import COLUMNS, LOWEST_LOSS_COLUMNS, caption, summarise
    from bayesian_attention.tasks.comparison import in_order

    missing, found, labels, folder = _plan(task, attention, _numbers("seeds", seeds, counts=True), recipe, data, out)
    if missing:
        found += _train_all(missing, jobs or _cores())
    records = in_order(found, labels)
    # Files first: a terminal that cannot print a character, or a pipe that is closed, must not cost them.
    with replacing(folder / "table.md") as temporary:
        columns = COLUMNS | LOWEST_LOSS_COLUMNS
        table = markdown(summarise(records, labels, tuple(columns)), columns)
        temporary.write_text(f"{table}\n{caption(records, labels)}\n", encoding="utf-8")
    destination = write_report(folder, folder / "report.html", methods=labels, only=records)
    _print_comparison(records, labels)
    _say(_out(), f"table:  {folder / 'table.md'}\nreport: {destination}")


@app.command()
def report(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="Folder of a comparison.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file (default: RUNS/report.html).")] = None,
) -> None:
    """Write the HTML report of the runs in a folder."""
    from bayesian_attention.files import writable_folder
    from bayesian_attention.report import write_report

    if not runs.is_dir():
        raise ValueError(f"RUNS: {runs} is no folder")
    destination = runs / "report.html" if out is None else out
    if destination.is_dir():
        raise ValueError(f"out: {destination} is a folder; name the HTML file")
    writable_folder(destination.parent, "out")
    _say(_out(), f"report: {write_report(runs, destination)}")


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A saved model: its .safetensors or .json file.")],
    nodes: Annotated[str, typer.Option(help="Which nodes, as 0-99 or 3,17,20-30 (default: all).")] = "",
    samples: Annotated[int | None, typer.Option(help="Posterior draws (default: as in training).", min=2)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws.", min=0, max=_LARGEST)] = 0,
    level: Annotated[float, typer.Option(help="Significance level for calling a prediction certain.")] = 0.05,
    data: Data = None,
    out: Annotated[Path | None, typer.Option(help="A jsonl file (default: standard output).")] = None,
) -> None:
    """Predict nodes with a saved model: a JSON line each, with class, probabilities and uncertainty."""
    from dataclasses import replace

    from bayesian_attention.files import replacing, writable_folder
    from bayesian_attention.tasks.model_files import load_model, read_settings
    from bayesian_attention.tasks.node_classification import predictive
    from bayesian_attention.tasks.registry import task_named

    settings = read_settings(model)
    graph = task_named(str(settings.get("task"))).load(data)
    if graph.fingerprint != settings.get("data"):
        _say(_err(), f"note: {graph.name} is not the graph that the model was trained on")
    network, _, recipe = load_model(model, graph)
    wanted = _numbers("nodes", nodes) if nodes else list(range(graph.nodes))
    if max(wanted) >= graph.nodes:
        raise ValueError(f"nodes: there is no node {max(wanted)}; {graph.name} has the nodes 0 to {graph.nodes - 1}")
    prediction = predictive(network, replace(recipe, samples=samples or recipe.samples), seed)
    certain = prediction.certain(level)
    lines = (
        json.dumps(
            {
                "node": node,
                "label": int(prediction.label[node]),
                "confidence": round(float(prediction.confidence[node]), 6),
                "entropy": round(float(prediction.entropy[node]), 6),
                "aleatoric": round(float(prediction.aleatoric[node]), 6),
                "epistemic": round(float(prediction.epistemic[node]), 6),
                "p_value": float(prediction.p_value[node]),
                "certain": bool(certain[node]),
                "probabilities": [round(float(p), 6) for p in prediction.mean[node]],
            }
        )
        for node in wanted
    )
    if out is None:
        sys.stdout.writelines(f"{line}\n" for line in lines)
        return
    writable_folder(out.parent, "out")
    if out.is_dir():
        raise ValueError(f"out: {out} is a folder; name the jsonl file")
    if out.suffix in (".safetensors", ".json"):
        raise ValueError(f"out: {out} has the ending of a model's file; name a jsonl file")
    with replacing(out) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    _say(_err(), f"{len(wanted)} predictions: {out}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; bad input ends it with status 2 and one line that names what is wrong.

    Args:
        arguments: of the command line; by default those of the process.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="bayesian-attention")
    except (ValueError, ArithmeticError, ImportError) as error:
        _fail(str(error))
    except BrokenProcessPool:
        _fail("a worker process died, perhaps for want of memory; finished runs are saved, try --jobs 1")
    except BrokenPipeError:
        # The reader of a pipe, such as head, has had enough. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        _fail(f"{error.filename or 'system'}: {error.strerror or error}")
    except MemoryError:
        _fail("not enough memory")
    except RuntimeError as error:
        # PyTorch has no class of its own for this on CPUs.
        if "DefaultCPUAllocator" not in str(error):
            raise
        _fail("not enough memory")


def _fail(message: str) -> None:
    _err().print(f"[bold red]error:[/] {_plain(message)}", highlight=False, soft_wrap=True)
    raise SystemExit(2)


def _say(console: Console, text: str) -> None:
    """Print text as it is: no markup, no colours, no line breaks inside of paths."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _plain(text: str) -> str:
    """Text whose square brackets are no markup."""
    from rich.markup import escape

    return escape(text)


def _out() -> Console:
    return _console(stderr=False)


def _err() -> Console:
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    """A console of the stream as it is now. A file has no width of its own; tables need some."""
    stream = sys.stderr if stderr else sys.stdout
    if stream is None:  # closed by who started the command
        return Console(quiet=True)
    return Console(file=stream, width=None if stream.isatty() else 120)


def _cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _numbers(argument: str, text: str, *, counts: bool = False) -> list[int]:
    """The whole numbers that ``text`` names: 3,17,20-30. With ``counts``, a lone N stands for 0 to N − 1."""
    pieces = [piece.strip() for piece in text.split(",")]
    if counts and len(pieces) == 1 and pieces[0].isdecimal():
        if not 1 <= int(pieces[0]) <= _MOST:
            raise ValueError(f"{argument}: must be at least 1 and at most {_MOST:,}; got {text!r}")
        return list(range(int(pieces[0])))
    numbers: list[int] = []
    for piece in pieces:
        first, dash, last = piece.partition("-")
        ends = [first, last if dash else first]
        if not all(end.strip().isdecimal() for end in ends) or int(ends[0]) > int(ends[1]):
            raise ValueError(f"{argument}: cannot read {piece!r}; write whole numbers and ranges, as 0,4,7-9")
        if int(ends[1]) > _LARGEST:
            raise ValueError(f"{argument}: {piece!r} is too large; at most {_LARGEST}")
        if int(ends[1]) - int(ends[0]) >= _MOST:
            raise ValueError(f"{argument}: {piece!r} are too many; at most {_MOST:,} at once")
        numbers.extend(range(int(ends[0]), int(ends[1]) + 1))
    return list(dict.fromkeys(numbers))


def _plan(
    name: str,
    attention: str,
    seeds: Sequence[int],
    recipe: str,
    data: Path | None,
    out: Path | None,
    *,
    single: bool = False,
) -> tuple[list[Job], list[Record], list[str], Path]:
    """Runs to make, runs that are there, labels of the methods, folder of the results."""
    from bayesian_attention.files import writable_folder
    from bayesian_attention.tasks.comparison import Job, plan
    from bayesian_attention.tasks.method import parse_methods
    from bayesian_attention.tasks.registry import task_named

    task = task_named(name)
    methods = parse_methods(attention, task.methods)
    if single and len(methods) > 1:
        raise ValueError(f"attention: run takes one method; got {attention!r}. Use compare for several")
    settings = task.recipe.with_settings(recipe)
    # Before the folder is made: a typing error should leave nothing behind.
    task.load(data)
    folder = writable_folder(Path("runs") / task.name if out is None else out, "out")
    for label, method in methods.items():
        if method.prior is not None and f"{method.posterior.name}+{method.prior.name}" not in task.methods:
            _say(_err(), f"note: {label} has no tuned settings for {task.name}; what is not given is a default")
    jobs, found, complaints = plan(task.name, methods, settings, seeds, data, folder)
    if single and found and not (folder / "models" / f"{found[0].stem}.safetensors").exists():
        # The model is what run is for.
        jobs, found = [Job(task.name, found[0].method, methods[found[0].method], settings, seeds[0], data, folder)], []
    for complaint in complaints:
        _say(_err(), f"note: {complaint}; left as it is")
    if found:
        _say(_err(), f"finished already, in {folder}: {len(found)} of {len(found) + len(jobs)}")
    return jobs, found, list(methods), folder


def _train_one(job: Job) -> Record:
    """Make one run, showing its epochs."""
    from bayesian_attention.tasks.comparison import run_one
    from bayesian_attention.tasks.records import append_record

    with _interruptible("nothing is saved of a run that did not finish"), _progress() as progress:
        bar = progress.add_task(_plain(job.label), total=None)

        def show(epoch: int, accuracy: float) -> None:
            text = f"{job.label}: epoch {epoch + 1}, validation accuracy {100 * accuracy:.1f}%"
            progress.update(bar, description=_plain(text))

        record = run_one(job, show)
        append_record(job.out, record)
    return record


def _train_all(jobs: Sequence[Job], processes: int) -> list[Record]:
    """Make several runs, showing each that is finished."""
    from bayesian_attention.tasks.comparison import execute

    records: list[Record] = []
    hint = "finished runs are saved; the same command goes on from there"
    with _interruptible(hint), _progress(MofNCompleteColumn()) as progress:
        bar = progress.add_task(f"training, {min(processes, len(jobs))} at a time", total=len(jobs))
        for record in execute(jobs, processes):
            records.append(record)
            progress.update(bar, advance=1)
            progress.console.print(
                f"{record.method}, seed {record.seed}: accuracy {100 * record.metrics['accuracy']:.1f}%, "
                f"NLL {record.metrics['nll']:.3f} ({record.epochs} epochs, {record.seconds:.0f} s)",
                highlight=False,
                markup=False,
            )
    return records


def _progress(*columns: ProgressColumn) -> Progress:
    """A progress bar on standard error."""
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *columns, TimeElapsedColumn(), console=_err()
    )


@contextmanager
def _interruptible(hint: str) -> Iterator[None]:
    """End on Ctrl-C with a line that says what is left, instead of a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        _err().print(f"stopped: {hint}", highlight=False)
        raise typer.Exit(130) from None


def _print_metrics(record: Record) -> None:
    """The test metrics of one run."""
    from bayesian_attention.report.summary import COLUMNS, Cell, format_cell, is_percentage

    table = Table("metric", record.method)
    for name, (title, _) in COLUMNS.items():
        if math.isfinite(record.metrics.get(name, math.nan)):
            text, _ = format_cell(Cell((record.metrics[name],), None, None), is_percentage(name))
            table.add_row(title, text + ("%" if is_percentage(name) else ""))
    _out().print(table)


def _print_comparison(records: Sequence[Record], labels: Sequence[str]) -> None:
    """Mean ± standard error of each method, and its paired difference to the first with a 95% interval."""
    from bayesian_attention.report.summary import (
        COLUMNS,
        LOWEST_LOSS_COLUMNS,
        caption,
        format_cell,
        is_percentage,
        summarise,
    )

    table = Table("", *(_plain(label) for label in labels), show_lines=True)
    columns = COLUMNS | LOWEST_LOSS_COLUMNS
    rows = summarise(records, labels, tuple(columns))
    for name, (title, better) in columns.items():
        cells = []
        for label in labels:
            cell = rows.get(label, {}).get(name)
            defined = cell is not None and math.isfinite(cell.mean)
            text, difference = format_cell(cell, is_percentage(name)) if cell and defined else ("–", "")
            bold = cell is not None and cell.differs
            cells.append(text + (f"\n[bold]Δ {difference}[/]" if bold else f"\nΔ {difference}" if difference else ""))
        unit = ", %" if is_percentage(name) else ""
        table.add_row(f"{title}{unit} {'↑' if better == 'higher' else '↓'}", *cells)
    _out().print(table)
    _out().print(caption(records, labels), highlight=False, markup=False)
