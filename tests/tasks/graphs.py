"""An easy synthetic citation graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bayesian_attention.data import Graph, load_graph
from bayesian_attention.posteriors import LogNormal, Softmax, Weibull
from bayesian_attention.priors import ConstantPrior, ContextualPrior, LearnedPrior
from bayesian_attention.tasks.method import Method
from bayesian_attention.tasks.node_classification import Recipe

CLASSES, NODES, FEATURES = 3, 66, 20
#: Special nodes, in no split: one without an edge, one without a feature.
ISOLATED, BARE = 64, 65

METHODS = {
    "softmax": Method(Softmax()),
    "weibull": Method(Weibull(10.0), ConstantPrior(), 0.01),
    "weibull+contextual": Method(Weibull(2.0, learned=True), ContextualPrior(hidden=4, share_heads=False), 0.01),
    "lognormal+learned": Method(LogNormal(0.5), LearnedPrior(), 0.01),
}

#: For what must run, not learn.
SHORT = Recipe(hidden=4, heads=2, max_epochs=3, samples=4)


def write_graph(folder: Path, seed: int = 0, features: int = FEATURES, classes: int = CLASSES) -> Path:
    """Nodes mostly have words and neighbours of their class; one edge is a loop."""
    generator = np.random.default_rng(seed)
    y = np.arange(NODES) % classes
    own = np.arange(features) % classes == y[:, None]
    dense = (generator.random((NODES, features)) < np.where(own, 0.5, 0.1)) * generator.uniform(
        0.5, 2, (NODES, features)
    )
    dense[BARE] = 0
    close = np.triu(generator.random((NODES, NODES)) < np.where(y[:, None] == y, 0.15, 0.02), 1)
    close[ISOLATED], close[:, ISOLATED] = False, False
    close[0, BARE] = True
    source, target = np.nonzero(close | close.T)
    rows, columns = np.nonzero(dense)
    split = generator.permutation(ISOLATED)
    path = folder / "easy.npz"
    np.savez_compressed(
        path,
        x_indptr=np.searchsorted(rows, np.arange(NODES + 1)),
        x_indices=columns,
        x_data=dense[rows, columns].astype(np.float32),
        x_shape=np.array(dense.shape),
        edge_index=np.stack([np.append(source, 3), np.append(target, 3)]),
        y=y,
        train_index=split[:15],
        val_index=split[15:35],
        test_index=split[35:],
    )
    return path


def make_graph(folder: Path, **changes: int) -> Graph:
    """The graph itself."""
    return load_graph(write_graph(folder, **changes))
