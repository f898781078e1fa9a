"""Reading data sets."""

from bayesian_attention.data.graph_file import Graph, load_graph

__all__ = ["Graph", "load_graph"]
