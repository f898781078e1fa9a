"""The graph attention network of the published experiments, on sparse node features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesian_attention.data import Graph
from bayesian_attention.posteriors import Posterior, Softmax
from bayesian_attention.priors import Prior


class _BagProduct(torch.autograd.Function):
    """Sparse matrix (with fixed values) times dense matrix, forwards by rows and backwards by columns.

    ``embedding_bag`` is the fastest CSR product that PyTorch has on CPUs, but its own gradient for dense
    weights is slow, so the gradient is a second bag product over the transpose.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, features: SparseFeatures, values: Tensor) -> Tensor:
        ctx.features = features
        ctx.values = values
        return _bag(features.indices, features.indptr, values, matrix)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        features: SparseFeatures = ctx.features
        values = ctx.values.index_select(0, features.order)
        return (
            _bag(features.row_indices, features.column_pointers, values, gradients[0].contiguous()),
            None,
            None,
        )


def _bag(indices: Tensor, pointers: Tensor, values: Tensor, matrix: Tensor) -> Tensor:
    return F.embedding_bag(indices, matrix, pointers, mode="sum", per_sample_weights=values, include_last_offset=True)


class SparseFeatures(nn.Module):
    """A CSR matrix of node features (N, F) that keeps its transpose at hand.

    Each row is divided by the sum of its absolute values.

    Args:
        graph: where the features come from.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        nodes = graph.nodes
        rows = torch.repeat_interleave(torch.arange(nodes), graph.indptr.diff())
        wide = graph.values.double()  # a sum in float32 can overflow
        totals = torch.zeros(nodes, dtype=wide.dtype).index_add_(0, rows, wide.abs())
        values = (wide / totals.index_select(0, rows) if rows.numel() else wide).float()
        order = torch.argsort(graph.indices, stable=True)
        counts = torch.bincount(graph.indices, minlength=graph.features)
        buffers = {
            "indptr": graph.indptr,
            "indices": graph.indices,
            "values": values.nan_to_num(0.0),
            "order": order,
            "row_indices": rows.index_select(0, order),
            "column_pointers": F.pad(counts.cumsum(0), (1, 0)),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    indptr: Tensor
    indices: Tensor
    values: Tensor
    order: Tensor
    row_indices: Tensor
    column_pointers: Tensor

    def forward(self, matrix: Tensor, dropout: float) -> Tensor:
        """Product with a dense matrix (F, O) after dropout on the features, (N, O)."""
        # Dropping an entry that is zero changes nothing, so dropout on the stored ones is dropout on all.
        values: Tensor = F.dropout(self.values, dropout) if dropout else self.values
        return _BagProduct.apply(matrix, self, values)


class GAT(nn.Module):
    """Two attention layers: 8 heads of 8 features, concatenated; then one head of C classes.

    Source: Veličković et al., "Graph attention networks", ICLR 2018, section 3.3 (transductive).

    Args:
        graph: the graph, whose features become part of the model.
        posterior: family of the attention weights; ``Softmax()`` builds PyTorch Geometric's own layers.
        prior: prior of the attention weights.
        hidden: features a head of the first layer.
        heads: heads of the first layer.
        dropout: on the inputs of both layers and on the attention weights.
        classes: number of classes; by default as many as the graph's labels have.
    """

    def __init__(
        self,
        graph: Graph,
        posterior: Posterior,
        prior: Prior | None,
        *,
        hidden: int = 8,
        heads: int = 8,
        dropout: float = 0.6,
        classes: int | None = None,
    ) -> None:
        from torch_geometric.nn import GATConv

        super().__init__()
        self.dropout = dropout
        self.features = SparseFeatures(graph)
        self.project = nn.Parameter(torch.empty(graph.features, heads * hidden))
        nn.init.xavier_uniform_(self.project)
        common = {"dropout": dropout, "add_self_loops": False}
        self.first = GATConv(heads * hidden, hidden, heads=heads, **common)
        # The projection of the sparse features replaces the layer's own.
        self.first.lin = nn.Identity()
        self.second = GATConv(heads * hidden, classes or graph.classes, heads=1, concat=False, **common)
        if not isinstance(posterior, Softmax):
            from bayesian_attention.layers.graph import make_bayesian

            make_bayesian(self.first, posterior, prior)
            make_bayesian(self.second, posterior, prior)
        self.register_buffer("edge_index", with_self_loops(graph), persistent=False)

    edge_index: Tensor

    def forward(self, edge_index: Tensor | None = None) -> Tensor:
        """Logits of all nodes, (N, C).

        Args:
            edge_index: int64 (2, E) with self-loops; by default that of the graph.
        """
        edges = self.edge_index if edge_index is None else edge_index
        dropout = self.dropout if self.training else 0.0
        hidden = self.features(self.project, dropout)
        hidden = F.elu(self.first(hidden, edges))
        return self.second(F.dropout(hidden, dropout), edges)

    def attention(self) -> tuple[Tensor, Tensor]:
        """Attention weights of both layers for the edges of ``edge_index``, (E, heads) and (E, 1)."""
        dropout = self.dropout if self.training else 0.0
        hidden = self.features(self.project, dropout)
        hidden, (_, first) = self.first(hidden, self.edge_index, return_attention_weights=True)
        _, (_, second) = self.second(F.dropout(F.elu(hidden), dropout), self.edge_index, return_attention_weights=True)
        return first, second


def with_self_loops(graph: Graph) -> Tensor:
    """The edges with one loop a node, sorted by target and then by source, int64 (2, E + N)."""
    source, target = graph.edge_index[:, graph.edge_index[0] != graph.edge_index[1]]
    loops = torch.arange(graph.nodes)
    edges = torch.stack([torch.cat([source, loops]), torch.cat([target, loops])])
    return edges[:, torch.argsort(edges[1] * graph.nodes + edges[0])].contiguous()
