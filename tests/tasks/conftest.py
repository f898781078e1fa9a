from __future__ import annotations

from pathlib import Path

import pytest

from bayesian_attention.data import Graph, load_graph
from tests.tasks.graphs import write_graph


@pytest.fixture(scope="session")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_graph(tmp_path_factory.mktemp("graph"))


@pytest.fixture(scope="session")
def graph(graph_file: Path) -> Graph:
    return load_graph(graph_file)
