"""The tasks that the command knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bayesian_attention.data import Graph, load_graph
from bayesian_attention.data.folder import find
from bayesian_attention.names import look_up
from bayesian_attention.posteriors import LogNormal, Softmax, Weibull
from bayesian_attention.priors import ConstantPrior, ContextualPrior
from bayesian_attention.tasks.method import Method
from bayesian_attention.tasks.node_classification import Recipe


@dataclass(frozen=True)
class Task:
    """Node classification on one graph.

    Attributes:
        name: how the command calls it.
        description: one line.
        file: path of the graph below the data folder; None where the user gives the file.
        methods: tuned methods by family and prior.
        recipe: of the model and its training.
    """

    name: str
    description: str
    file: str | None
    methods: Mapping[str, Method]
    recipe: Recipe = field(default_factory=Recipe)

    def load(self, data: Path | None) -> Graph:
        """The graph.

        Args:
            data: the folder of data sets, or, for the user's own graph, the file.

        Raises:
            ValueError: the data is missing or damaged; the message says what to do.
        """
        if self.file is None:
            if data is None:
                raise ValueError(f"data: the task {self.name!r} needs a graph of yours: --data FILE.npz")
            return load_graph(data)
        if data is not None and data.is_file():
            raise ValueError(f"data: {data} is a file; run the task 'graph' on a graph of your own")
        return load_graph(find(self.name, self.file, data), self.name)


# Chosen on validation nodes: studies/graphs/README.md states the grid.
_CORA = {
    "softmax": Method(Softmax()),
    "weibull+constant": Method(Weibull(10.0), ConstantPrior(concentration=0.1, rate=0.1), 0.1),
    "weibull+contextual": Method(Weibull(10.0), ContextualPrior(share_heads=False, rate=1.0), 0.01),
    "lognormal+constant": Method(LogNormal(0.1), ConstantPrior(scale=1.0), 0.1),
    "lognormal+contextual": Method(LogNormal(0.1), ContextualPrior(share_heads=False, scale=1.0), 0.1),
}
_CITESEER = {
    "softmax": Method(Softmax()),
    "weibull+constant": Method(Weibull(10.0), ConstantPrior(concentration=0.1, rate=0.1), 0.01),
    "weibull+contextual": Method(Weibull(10.0), ContextualPrior(share_heads=False, rate=0.1), 0.01),
    "lognormal+constant": Method(LogNormal(0.1), ConstantPrior(scale=10.0), 0.01),
    "lognormal+contextual": Method(LogNormal(0.1), ContextualPrior(share_heads=False, scale=10.0), 0.1),
}

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "cora", "topic of 2,708 papers from words and citations (part of the package)", "planetoid/cora.npz", _CORA
        ),
        Task("citeseer", "topic of 3,327 papers from words and citations", "planetoid/citeseer.npz", _CITESEER),
        Task("graph", "node classification on a graph of your own: --data FILE.npz", None, _CORA),
    )
}


def task_named(name: str) -> Task:
    """The task called ``name``.

    Raises:
        ValueError: there is none; the message offers near matches.
    """
    return look_up("task", name, TASKS)
