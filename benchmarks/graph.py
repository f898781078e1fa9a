"""What Bayesian attention costs on a graph: an epoch of the Cora GAT for each method, against softmax.

    python benchmarks/graph.py

An epoch is what training does: forward, divergence, backward, optimiser step, and the pass over the validation
nodes. Epochs of the methods alternate, so that whatever else the machine does falls on all of them alike; the
ratio is taken within each round, and the median over rounds is printed.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from bayesian_attention.data import Graph, load_graph
from bayesian_attention.data.folder import find
from bayesian_attention.tasks.jobs import keep_freed_memory
from bayesian_attention.tasks.method import Method
from bayesian_attention.tasks.node_classification import Recipe, build, epoch_loss, mean_logits, optimizer
from bayesian_attention.tasks.registry import TASKS

BASELINE = "softmax"


def epoch_of(graph: Graph, method: Method, recipe: Recipe) -> Callable[[], None]:
    """A function that runs one more epoch of a model of its own."""
    torch.manual_seed(0)
    model = build(graph, method, recipe)
    adam = optimizer(model, recipe)
    nodes = graph.splits["val"]
    labels = graph.y[nodes]

    def epoch() -> None:
        model.train()
        adam.zero_grad()
        epoch_loss(model, graph, method, recipe, 0).backward()
        adam.step()
        F.cross_entropy(mean_logits(model)[nodes], labels).item()

    return epoch


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    graph = load_graph(find("cora", "planetoid/cora.npz"))
    epochs = {label: epoch_of(graph, method, Recipe()) for label, method in TASKS["cora"].methods.items()}
    times: dict[str, list[float]] = {label: [] for label in epochs}
    for number in range(arguments.rounds + 10):
        for label, epoch in epochs.items():
            begun = time.perf_counter()
            epoch()
            if number >= 10:  # the first rounds warm up
                times[label].append(time.perf_counter() - begun)
    setting = (
        f"torch {torch.__version__}, {arguments.threads} thread(s), {arguments.rounds} rounds, {platform.machine()}"
    )
    print(f"{setting}; Cora, {graph.nodes} nodes, {graph.edge_index.shape[1] + graph.nodes} edges with self-loops\n")
    print("| attention | ms an epoch (median) | ratio to softmax (median, quartiles) |\n| --- | --- | --- |")
    for label, own in times.items():
        ratios = [one / base for one, base in zip(own, times[BASELINE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {label} | {1000 * statistics.median(own):.1f} | {middle:.2f} ({low:.2f} to {high:.2f}) |")


if __name__ == "__main__":
    main()
