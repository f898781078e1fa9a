"""Reading and writing data sets."""

from bayesian_attention.data.graph_file import Graph, load_graph
from bayesian_attention.data.save import save_graph

__all__ = ["Graph", "load_graph", "save_graph"]
