from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GATConv
from torch_geometric.utils import add_self_loops, remove_self_loops

from bayesian_attention.data import Graph, load_graph
from bayesian_attention.inference import sampling
from bayesian_attention.posteriors import LogNormal, Softmax, Weibull
from bayesian_attention.priors import ConstantPrior, ContextualPrior
from bayesian_attention.tasks.gat import GAT, SparseFeatures, with_self_loops
from tests.data import graphs as tiny
from tests.tasks.graphs import BARE, CLASSES, FEATURES, ISOLATED, METHODS, NODES


def dense(graph: Graph) -> Tensor:
    """The features with rows that sum to 1, float64."""
    x = torch.zeros(graph.nodes, graph.features, dtype=torch.float64)
    for row in range(graph.nodes):
        for place in range(graph.indptr[row], graph.indptr[row + 1]):
            x[row, graph.indices[place]] = graph.values[place].double()
    return x / x.sum(dim=1, keepdim=True).where(x.sum(dim=1, keepdim=True) != 0, 1.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class PlainGAT(nn.Module):
    """The published model of PyTorch Geometric's layers on dense features, with the weights of another."""

    def __init__(self, model: GAT) -> None:
        super().__init__()
        features, width = model.project.shape
        heads = model.first.heads
        self.first = GATConv(features, width // heads, heads=heads)
        self.second = GATConv(width, model.second.out_channels)
        weights = {name: value for name, value in model.state_dict().items() if ".stoch." not in name}
        self.load_state_dict({("first.lin.weight" if k == "project" else k): v.T if k == "project" else v
                              for k, v in weights.items()})  # fmt: skip

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(F.elu(self.first(x, edges)), edges)


class TestSparseFeatures:
    def test_product(self, graph: Graph):
        matrix = normal(FEATURES, 7)
        product = SparseFeatures(graph).double()(matrix, 0.0)
        torch.testing.assert_close(product, dense(graph) @ matrix, rtol=1e-6, atol=1e-7)

    def test_rows_sum_to_one_or_are_empty(self, graph: Graph):
        sums = SparseFeatures(graph)(torch.ones(FEATURES, 1), 0.0).squeeze()
        expected = torch.ones(NODES)
        expected[BARE] = 0
        torch.testing.assert_close(sums, expected)

    def test_gradient_against_the_dense_product(self, graph: Graph):
        matrix, upstream = normal(FEATURES, 7).requires_grad_(), normal(NODES, 7, seed=1)
        features = SparseFeatures(graph).double()
        features(matrix, 0.0).backward(upstream)
        torch.testing.assert_close(matrix.grad, dense(graph).T @ upstream, rtol=1e-6, atol=1e-7)

    def test_gradcheck(self, graph: Graph):
        features = SparseFeatures(graph).double()
        assert torch.autograd.gradcheck(lambda matrix: features(matrix, 0.0), normal(FEATURES, 3).requires_grad_())

    def test_gradient_of_what_is_not_contiguous(self, graph: Graph):
        matrix = normal(7, FEATURES).T.requires_grad_()
        features = SparseFeatures(graph).double()
        features(matrix, 0.0).T[::2].sum().backward()
        upstream = torch.zeros(NODES, 7, dtype=torch.float64)
        upstream[:, ::2] = 1
        torch.testing.assert_close(matrix.grad, dense(graph).T @ upstream, rtol=1e-6, atol=1e-7)

    def test_dropout_drops_the_same_entries_forwards_and_backwards(self, graph: Graph):
        features = SparseFeatures(graph).double()
        identity = torch.eye(FEATURES, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(0)
        dropped = features(identity, 0.5)
        upstream = normal(NODES, FEATURES)
        dropped.backward(upstream)
        torch.testing.assert_close(identity.grad, dropped.detach().T @ upstream)

    @pytest.mark.parametrize("rate", [0.2, 0.6])
    def test_dropout_statistics(self, graph: Graph, rate: float):
        """A kept entry is scaled by 1/(1 − rate); the share dropped is within 4.5 standard errors (1e-5)."""
        features = SparseFeatures(graph)
        identity, whole = torch.eye(FEATURES), dense(graph).float()
        present = whole > 0
        torch.manual_seed(1)
        passes = torch.stack([features(identity, rate) for _ in range(200)])
        kept = passes != 0
        assert not kept[:, ~present].any()
        torch.testing.assert_close(passes[kept], (whole / (1 - rate)).expand_as(passes)[kept])
        count = 200 * int(present.sum())
        deviation = (rate * (1 - rate) / count) ** 0.5
        assert abs(1 - kept[:, present].double().mean().item() - rate) < 4.5 * deviation

    def test_zeros_that_are_stored_and_rows_without_any_entry(self, tmp_path: Path):
        values = tiny.arrays()["x_data"].copy()
        values[2:4] = 0
        path = tiny.write(tmp_path, x_data=values)
        graph = load_graph(path)
        product = SparseFeatures(graph).double()(normal(5, 2), 0.0)
        assert torch.equal(product[1], torch.zeros(2, dtype=torch.float64))
        torch.testing.assert_close(product, dense(graph) @ normal(5, 2), rtol=1e-6, atol=1e-7)

    def test_a_graph_without_features(self, tmp_path: Path):
        none = np.zeros(0, dtype=np.int64)
        path = tiny.write(tmp_path, x_indptr=np.zeros(7, np.int64), x_indices=none, x_data=none.astype(np.float32))
        matrix = normal(5, 2).float().requires_grad_()
        product = SparseFeatures(load_graph(path))(matrix, 0.0)
        product.sum().backward()
        assert torch.equal(product, torch.zeros(6, 2))
        assert torch.equal(matrix.grad, torch.zeros(5, 2))


class TestSelfLoops:
    def test_one_loop_a_node_in_order(self, graph: Graph):
        edges = with_self_loops(graph)
        pairs = edges.T.tolist()
        expected, _ = add_self_loops(remove_self_loops(graph.edge_index)[0], num_nodes=NODES)
        assert sorted(pairs) == sorted(expected.T.tolist())
        assert pairs == sorted(pairs, key=lambda pair: (pair[1], pair[0]))
        assert [source for source, target in pairs if source == target] == list(range(NODES))
        assert edges.is_contiguous()

    def test_a_graph_without_edges(self, tmp_path: Path):
        graph = load_graph(tiny.write(tmp_path, edge_index=np.zeros((2, 0), np.int64)))
        assert with_self_loops(graph).tolist() == [list(range(6))] * 2


class TestGAT:
    @pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
    @pytest.mark.parametrize(("hidden", "heads"), [(8, 8), (3, 1)])
    def test_equals_plain_layers_on_dense_features(self, graph: Graph, method, hidden: int, heads: int):
        torch.manual_seed(0)
        model = GAT(graph, method.posterior, method.prior, hidden=hidden, heads=heads).eval()
        nn.init.normal_(model.first.bias)
        nn.init.normal_(model.second.bias)
        plain = PlainGAT(model).eval()
        x = dense(graph).float()
        torch.testing.assert_close(model(), plain(x, graph.edge_index), rtol=1e-5, atol=1e-5)
        # The same edges, given; and others.
        fewer = graph.edge_index[:, ::3]
        loops = torch.arange(NODES).expand(2, -1)
        torch.testing.assert_close(model(model.edge_index), model())
        given = torch.cat([fewer[:, fewer[0] != fewer[1]], loops], dim=1)
        torch.testing.assert_close(model(given), plain(x, fewer), rtol=1e-5, atol=1e-5)

    def test_gradients_equal_those_of_plain_layers(self, graph: Graph):
        torch.manual_seed(0)
        model = GAT(graph, Softmax(), None, hidden=4, heads=2, dropout=0.0)
        plain = PlainGAT(model)
        upstream = normal(NODES, CLASSES).float()
        model().backward(upstream)
        plain(dense(graph).float(), graph.edge_index).backward(upstream)
        torch.testing.assert_close(model.project.grad.T, plain.first.lin.weight.grad, rtol=1e-4, atol=1e-6)
        for name, parameter in plain.named_parameters():
            if name != "first.lin.weight":
                other = model.get_parameter(name).grad
                torch.testing.assert_close(other, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)

    @pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
    def test_attention_sums_to_one_over_the_neighbours(self, graph: Graph, method):
        torch.manual_seed(0)
        model = GAT(graph, method.posterior, method.prior, hidden=4, heads=2).eval()
        stochastic = method.prior is not None
        for active in (False, True) if stochastic else (False,):
            with torch.no_grad(), sampling(model, active, seed=0):
                first, second = model.attention()
            edges = model.edge_index.shape[1]
            assert (first.shape, second.shape) == ((edges, 2), (edges, 1))
            for weights in (first, second):
                sums = torch.zeros(NODES, weights.shape[1]).index_add_(0, model.edge_index[1], weights)
                torch.testing.assert_close(sums, torch.ones_like(sums))

    def test_attention_equals_that_of_plain_layers(self, graph: Graph):
        torch.manual_seed(0)
        model = GAT(graph, LogNormal(), ConstantPrior(), hidden=4, heads=2).eval()
        plain = PlainGAT(model).eval()
        hidden, (edges, first) = plain.first(dense(graph).float(), graph.edge_index, return_attention_weights=True)
        _, (_, second) = plain.second(F.elu(hidden), graph.edge_index, return_attention_weights=True)
        order = torch.argsort(edges[1] * NODES + edges[0])
        assert torch.equal(edges[:, order], model.edge_index)
        for own, other in zip(model.attention(), (first, second), strict=True):
            torch.testing.assert_close(own, other[order], rtol=1e-5, atol=1e-6)

    def test_a_node_without_neighbours_hears_itself_alone(self, graph: Graph):
        torch.manual_seed(0)
        model = GAT(graph, Weibull(0.5), ContextualPrior(), hidden=4, heads=2).eval()
        with torch.no_grad():
            mean = model()
            with sampling(model, True, seed=3):
                drawn = model()
        assert torch.equal(drawn[ISOLATED], mean[ISOLATED])
        assert not torch.equal(drawn[BARE], mean[BARE])

    def test_a_node_without_features_and_neighbours_is_finite_in_training(self, tmp_path: Path):
        graph = load_graph(
            tiny.write(tmp_path, x_indptr=np.array([0, 0, 4, 6, 8, 10, 12]), edge_index=np.array([[1], [2]]))
        )
        torch.manual_seed(0)
        model = GAT(graph, Weibull(), ContextualPrior(), hidden=2, heads=2).train()
        logits = model()
        logits[graph.splits["train"]].sum().backward()
        assert logits.isfinite().all()
        # The prior has gradients from the divergence alone.
        assert all(
            parameter.grad.isfinite().all() for name, parameter in model.named_parameters() if "prior" not in name
        )

    def test_dropout_in_training_alone(self, graph: Graph):
        torch.manual_seed(0)
        model = GAT(graph, Softmax(), None, hidden=4, heads=2)
        assert not torch.equal(model.train()(), model())
        assert torch.equal(model.eval()(), model())

    def test_classes(self, graph: Graph):
        assert GAT(graph, Softmax(), None, hidden=4, heads=2, classes=5)().shape == (NODES, 5)
        assert GAT(graph, Softmax(), None, hidden=4, heads=2)().shape == (NODES, CLASSES)

    def test_the_state_holds_no_data_and_copies_are_independent(self, graph: Graph):
        torch.manual_seed(0)
        model = GAT(graph, Weibull(), ContextualPrior(), hidden=4, heads=2).eval()
        assert not [name for name in model.state_dict() if name.startswith("features") or name == "edge_index"]
        twin = copy.deepcopy(model)
        torch.testing.assert_close(twin(), model(), rtol=0, atol=0)
        with torch.no_grad():
            twin.project.mul_(2)
        assert not torch.equal(twin(), model())
