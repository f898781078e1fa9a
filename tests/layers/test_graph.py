import copy
import inspect
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric import EdgeIndex
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, TransformerConv

import bayesian_attention as ba
from bayesian_attention.engine.rows import DenseRows
from bayesian_attention.layers.graph import (
    BayesianGATConv,
    BayesianGATv2Conv,
    BayesianTransformerConv,
    make_bayesian,
)

OURS = {GATConv: BayesianGATConv, GATv2Conv: BayesianGATv2Conv, TransformerConv: BayesianTransformerConv}
N, FEATURES, C, EDGE = 6, 5, 4, 3
# Node 5 has no incoming edge, node 0 a loop, and 1 → 2 stands twice.
EDGES = torch.tensor([[0, 0, 1, 1, 2, 3, 4, 5, 5, 1], [0, 1, 2, 3, 0, 4, 4, 0, 3, 2]])
# From 7 sources to 4 targets.
BIPARTITE = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 6, 0], [0, 0, 1, 1, 2, 2, 0, 2, 2]])
SMALL = ba.Weibull(2.0)
COMMON: list[dict[str, Any]] = [
    {},
    {"heads": 3},
    {"heads": 3, "concat": False},
    {"heads": 2, "bias": False},
    {"heads": 2, "edge_dim": EDGE},
    {"heads": 2, "in_channels": (FEATURES, FEATURES + 1)},
]
ATTENTION_ONLY: list[dict[str, Any]] = [
    {"heads": 2, "add_self_loops": False},
    {"heads": 2, "residual": True, "negative_slope": 0.5},
    {"heads": 2, "edge_dim": EDGE, "fill_value": "max", "residual": True, "concat": False},
]
CASES = [
    *[(kind, build) for kind in OURS for build in COMMON],
    *[(kind, build) for kind in (GATConv, GATv2Conv) for build in ATTENTION_ONLY],
    (GATv2Conv, {"heads": 2, "share_weights": True}),
    *[
        (TransformerConv, {"heads": 2, **build})
        for build in (
            {"beta": True},
            {"beta": True, "concat": False, "edge_dim": EDGE},
            {"root_weight": False},
        )
    ],
]


def name(value: Any) -> str | None:
    return value.__name__ if isinstance(value, type) else None if isinstance(value, nn.Module) else str(value)


def pair(kind: type, *, posterior: ba.Posterior = SMALL, prior: ba.Prior | None = None, **build: Any):
    """The original and ours with the same weights, in double precision."""
    torch.manual_seed(0)
    build = {"in_channels": FEATURES, **build}
    original = kind(out_channels=C, **build)
    ours = OURS[kind](out_channels=C, posterior=posterior, prior=prior, **build)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.copy_(torch.randn_like(parameter))
    ours.load_state_dict(original.state_dict(), strict=False)
    return original.double(), ours.double()


def arguments(build: dict[str, Any]) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    bipartite = isinstance(build.get("in_channels"), tuple)
    x = (normal(7, FEATURES), normal(4, FEATURES + 1)) if bipartite else normal(N, FEATURES)
    edges = BIPARTITE if bipartite else EDGES
    return (x, edges, normal(edges.shape[1], EDGE)) if "edge_dim" in build else (x, edges)


def close(results: Any, expected: Any, atol: float = 1e-6) -> None:
    torch.testing.assert_close(results, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(("kind", "build"), CASES, ids=name)
def test_without_sampling_it_is_the_original(kind, build):
    original, ours = pair(kind, **build)
    assert isinstance(ours, kind)
    assert list(ours.state_dict()) == list(original.state_dict())
    original.load_state_dict(ours.state_dict())
    args = arguments(build)
    with ba.sampling(ours, False):
        close(ours(*args), original(*args))
        out, (edges, alpha) = ours(*args, return_attention_weights=True)
    expected, (expected_edges, expected_alpha) = original(*args, return_attention_weights=True)
    close((out, alpha), (expected, expected_alpha))
    assert torch.equal(edges, expected_edges)


@pytest.mark.parametrize("posterior", [ba.Weibull(1e6), ba.LogNormal(1e-6)], ids=str)
@pytest.mark.parametrize(("kind", "build"), CASES, ids=name)
def test_without_spread_sampling_is_the_original(kind, build, posterior):
    original, ours = pair(kind, posterior=posterior, **build)
    args = arguments(build)
    drawn = ours(*args)
    assert not torch.equal(drawn, original(*args))
    close(drawn, original(*args), atol=1e-4)


@pytest.mark.parametrize("prior", [None, ba.LearnedPrior(), ba.ContextualPrior()], ids=str)
@pytest.mark.parametrize(("kind", "build"), CASES, ids=name)
def test_converted_and_built_are_the_same(kind, build, prior):
    original, ours = pair(kind, prior=prior, **build)
    torch.manual_seed(3)
    converted = make_bayesian(original, SMALL, prior)
    assert converted is original
    assert type(converted) is OURS[kind]
    converted.double().load_state_dict(ours.state_dict())
    args = arguments(build)
    results = []
    for module in (converted, ours):
        with ba.sampling(module, True, seed=1):
            results.append((module(*args), ba.kl_divergence(module, examples=1)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("kind", OURS, ids=name)
def test_converting_an_instance_leaves_the_class_and_other_instances_alone(kind):
    torch.manual_seed(0)
    before = dict(vars(kind))
    one, other = (kind(FEATURES, C, heads=2) for _ in range(2))
    args = arguments({})
    x = args[0].float()
    expected, mean = other(x, EDGES), one(x, EDGES)
    make_bayesian(one, SMALL)
    assert not torch.allclose(one(x, EDGES), one(x, EDGES), atol=1e-3)
    close(one.eval()(x, EDGES), mean, atol=1e-5)
    assert type(other) is kind
    assert torch.equal(other(x, EDGES), expected)
    assert not hasattr(other, "stoch")
    torch.manual_seed(1)
    later = kind(FEATURES, C, heads=2)
    assert torch.equal(later(x, EDGES), later(x, EDGES))
    changed = {key for key, value in vars(kind).items() if before.get(key, value) is not value}
    assert changed <= {"__doc__"}


@pytest.mark.parametrize("kind", OURS, ids=name)
def test_dropout_is_the_original_s_under_the_same_seed(kind):
    original, ours = pair(kind, heads=2, dropout=0.5)
    x = arguments({})[0]
    ours.stoch.sampling = False
    results = []
    for module in (original, ours):
        torch.manual_seed(2)
        results.append(module(x, EDGES))
    close(results[1], results[0])
    assert not torch.allclose(results[0], original.eval()(x, EDGES))
    close(ours.eval()(x, EDGES), original(x, EDGES))


@pytest.mark.parametrize("kind", OURS, ids=name)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sampling", [None, True, False])
def test_sampling_follows_training_unless_told(kind, training, sampling):
    _, ours = pair(kind, heads=2)
    ours.train(training)
    x = arguments({})[0]
    with ba.sampling(ours, sampling):
        same = torch.allclose(ours(x, EDGES), ours(x, EDGES), atol=1e-3)
    assert same is not (training if sampling is None else sampling)


@pytest.mark.parametrize("kind", OURS, ids=name)
def test_returned_weights_are_those_really_used(kind):
    build = {"root_weight": False} if kind is TransformerConv else {"bias": False}
    _, ours = pair(kind, heads=2, **build)
    x = arguments({})[0]
    out, (edges, alpha) = ours(x, EDGES, return_attention_weights=True)
    values = {GATConv: "lin", GATv2Conv: "lin_l", TransformerConv: "lin_value"}[kind]
    values = getattr(ours, values)(x).view(N, 2, C)
    mixed = torch.zeros(N, 2, C, dtype=torch.float64)
    sums = torch.zeros(N, 2, dtype=torch.float64)
    for e, (source, target) in enumerate(edges.T.tolist()):
        mixed[target] += alpha[e].unsqueeze(-1) * values[source]
        sums[target] += alpha[e]
    close(mixed.view(N, -1), out, atol=1e-12)
    has_neighbours = torch.bincount(edges[1], minlength=N) > 0
    close(sums, has_neighbours.double().unsqueeze(-1).expand(N, 2), atol=1e-12)
    assert bool((alpha != ours.eval()(x, EDGES, return_attention_weights=True)[1][1]).any())


def dense_parts(ours: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (H, N, N), keys and values (H, N, C), from the papers' equations."""
    heads = ours.heads

    def split(y: Tensor) -> Tensor:
        return y.view(N, heads, C).transpose(0, 1)

    if isinstance(ours, TransformerConv):
        query, key, value = (split(m(x)) for m in (ours.lin_query, ours.lin_key, ours.lin_value))
        return query @ key.transpose(1, 2) / math.sqrt(C), key, value
    if isinstance(ours, GATv2Conv):
        source, target = split(ours.lin_l(x)), split(ours.lin_r(x))
        hidden = F.leaky_relu(target.unsqueeze(2) + source.unsqueeze(1), ours.negative_slope)
        return (hidden * ours.att.view(heads, 1, 1, C)).sum(-1), source, source
    source = split(ours.lin(x))
    to = (source * ours.att_dst.view(heads, 1, C)).sum(-1).unsqueeze(2)
    return F.leaky_relu(to + (source * ours.att_src.view(heads, 1, C)).sum(-1).unsqueeze(1)), source, source


@pytest.mark.parametrize("kind", OURS, ids=name)
@pytest.mark.parametrize(
    ("posterior", "prior"),
    [
        (SMALL, None),
        (ba.Weibull(1.5, learned=True), ba.LearnedPrior()),
        (SMALL, ba.ContextualPrior(share_heads=False)),
        (ba.LogNormal(0.8, learned=True), ba.ContextualPrior(hidden=None)),
    ],
    ids=str,
)
def test_a_graph_is_dense_attention_masked_by_its_adjacency(kind, posterior, prior):
    build = {"negative_slope": 0.01, "add_self_loops": False} if kind is not TransformerConv else {}
    if kind is GATv2Conv:
        build["negative_slope"] = 0.3
    _, ours = pair(kind, heads=2, posterior=posterior, prior=prior, **build)
    x = arguments({})[0].requires_grad_()
    edges = EDGES.unique(dim=1)
    edges = edges[:, torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(0))]
    adjacency = torch.zeros(N, N, dtype=torch.bool)
    adjacency[edges[1], edges[0]] = True

    dense = ba.StochasticAttention(posterior, prior, heads=2, key_dim=C).double()
    dense.load_state_dict(ours.stoch.state_dict())
    logits, keys, values = dense_parts(ours, x)
    with ba.sampling(dense, True, seed=4):
        weights = dense.weights(logits, DenseRows(adjacency), keys)
    dense.tracked = False
    dense.weights(logits, DenseRows(adjacency), keys)
    (expected_term,) = dense.kl_terms
    with ba.sampling(ours, True, seed=4):
        out, (_, alpha) = ours(x, edges, return_attention_weights=True)
    (term,) = ours.stoch.kl_terms

    close(alpha, weights[:, edges[1], edges[0]].T, atol=1e-10)
    expected = (weights @ values).transpose(0, 1).reshape(N, -1)
    expected = expected + (ours.lin_skip(x) if kind is TransformerConv else ours.bias)
    close(out, expected, atol=1e-10)
    torch.testing.assert_close(term.total, expected_term.total, rtol=1e-10, atol=0)
    assert term.entries == expected_term.entries == 2 * edges.shape[1]
    for scalar in ((out, expected), (term.total, expected_term.total)):
        theirs, mine = (torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in scalar)
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", OURS, ids=name)
@pytest.mark.parametrize("prior", [None, ba.ContextualPrior()], ids=str)
def test_divergence_of_separate_graphs_adds_up(kind, prior):
    """Were the prior normalised over all nodes, a second graph beside the first would change it."""
    _, ours = pair(kind, heads=2, prior=prior)
    x = arguments({})[0]
    other, other_edges = x.flip(0) * 2, EDGES.flip(1)[:, :7]
    terms = []
    for nodes, edges in (
        (x, EDGES),
        (other, other_edges),
        (torch.cat([x, other]), torch.cat([EDGES, other_edges + N], 1)),
    ):
        ours(nodes, edges)
        terms.append(ours.stoch.kl_terms[0])
    torch.testing.assert_close(terms[0].total + terms[1].total, terms[2].total, rtol=1e-10, atol=0)
    assert terms[0].entries + terms[1].entries == terms[2].entries


@pytest.mark.parametrize("prior", [None, ba.ContextualPrior()], ids=str)
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("kind", OURS, ids=name)
def test_no_edges(kind, loops, prior):
    build = {} if kind is TransformerConv else {"add_self_loops": loops}
    original, ours = pair(kind, heads=2, prior=prior, **build)
    x = arguments({})[0].requires_grad_()
    none = torch.empty(2, 0, dtype=torch.long)
    out = ours(x, none)
    close(out, original(x, none))
    (term,) = ours.stoch.kl_terms
    assert term.entries == (2 * N if build.get("add_self_loops") else 0)
    assert (term.total == 0) == (term.entries == 0)
    (out.sum() + ba.kl_divergence(ours, examples=N)).backward()
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("edges", [[[0], [0]], [[], []]], ids=["loop", "none"])
@pytest.mark.parametrize("kind", OURS, ids=name)
def test_one_node(kind, edges):
    original, ours = pair(kind, heads=2, prior=ba.ContextualPrior())
    x, edges = torch.randn(1, FEATURES, dtype=torch.float64), torch.tensor(edges, dtype=torch.long)
    close(ours(x, edges), original(x, edges))


@pytest.mark.parametrize("kind", OURS, ids=name)
def test_a_node_without_neighbours_gets_what_it_gets_from_the_original(kind):
    build = {} if kind is TransformerConv else {"add_self_loops": False}
    original, ours = pair(kind, heads=2, **build)
    x = arguments({})[0].requires_grad_()
    out = ours(x, EDGES)
    close(out[5], original(x, EDGES)[5])
    assert not torch.allclose(out[0], original(x, EDGES)[0], atol=1e-3)
    out.square().sum().backward()
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("bipartite", [False, True])
@pytest.mark.parametrize("kind", OURS, ids=name)
def test_both_directions_of_flow(kind, bipartite, flow):
    channels = (FEATURES, FEATURES + 1) if bipartite else FEATURES
    build = {"heads": 2, "flow": flow, "in_channels": channels}
    if kind is not TransformerConv:
        build["add_self_loops"] = False
    prior = ba.ContextualPrior(hidden=None)
    original, ours = pair(kind, prior=prior, **build)
    x, edges = arguments(build)
    there, here = edges
    if flow == "target_to_source":
        # The original swaps the rows of the edges, never the two sides of its input.
        edges = edges.flip(0)
    with ba.sampling(ours, False):
        close(ours(x, edges), original(x, edges))
    (term,) = ours.stoch.kl_terms
    key_map = {GATConv: "lin_src" if bipartite else "lin", GATv2Conv: "lin_l", TransformerConv: "lin_key"}[kind]
    keys = getattr(ours, key_map)(x[0] if bipartite else x).view(-1, 2, C)
    scores = (keys @ ours.stoch.prior.score_weight[0]).squeeze(-1)[there]
    alpha = original(x, edges, return_attention_weights=True)[1][1]
    total = 0.0
    for node in here.unique().tolist():
        mine = here == node
        # Gamma(c, 1) beneath Weibull(k, p / Γ(1 + 1/k)), in the form of the WHAI paper.
        c, p, k = scores[mine].softmax(0), alpha[mine], torch.tensor(2.0, dtype=torch.float64)
        scale = p / torch.exp(torch.lgamma(1 + 1 / k))
        euler = 0.5772156649015329
        total += (euler * c / k - c * scale.log() + k.log() + p - euler - 1 + torch.lgamma(c)).sum().item()
    assert term.total.item() == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize(("kind", "shared"), [(GATConv, {}), (GATv2Conv, {"share_weights": True})], ids=name)
def test_one_map_for_both_sides_gives_the_sources_keys(kind, shared):
    _, ours = pair(kind, heads=2, prior=ba.ContextualPrior(), add_self_loops=False, **shared)
    x = arguments({})[0]
    sources, targets = torch.cat([x, x.flip(0)])[:7], x[:4]
    ours((sources, targets), BIPARTITE)
    bipartite = ours.stoch.kl_terms[0].total
    # The same edges within one graph of eleven nodes.
    ours(torch.cat([sources, targets]), torch.stack([BIPARTITE[0], BIPARTITE[1] + 7]))
    torch.testing.assert_close(bipartite, ours.stoch.kl_terms[0].total)


@pytest.mark.parametrize("kind", OURS, ids=name)
def test_a_shared_layer_draws_anew_and_is_counted_twice(kind):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = pair(kind, heads=1, prior=ba.ContextualPrior())[1]

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.conv(x, EDGES), self.conv(x, EDGES)

    model = ba.track_kl(Twice())
    x = arguments({})[0]
    for seed in (None, 5):
        with ba.sampling(model, True, seed=seed):
            first, second = model(x)
            again = model(x)[0]
        assert not torch.allclose(first, second, atol=1e-3)
        assert torch.equal(first, again) is (seed is not None)
        terms = model.conv.stoch.kl_terms
        assert len(terms) == 2
        torch.testing.assert_close(ba.kl_divergence(model, examples=3), 2 * terms[0].total / 3)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])  # noqa: S301
@pytest.mark.parametrize("converted", [True, False])
@pytest.mark.parametrize("kind", OURS, ids=name)
def test_copies_are_independent(kind, converted, duplicate):
    original, ours = pair(kind, heads=2, prior=ba.ContextualPrior())
    if converted:
        ours = make_bayesian(original, SMALL, ba.ContextualPrior()).double()
    x = arguments({})[0].requires_grad_()
    ours(x, EDGES)
    copied = duplicate(ours)
    assert type(copied) is type(ours)
    results = []
    for module in (ours, copied):
        with ba.sampling(module, True, seed=1):
            results += [module(x, EDGES), ba.kl_divergence(module, examples=1)]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    with ba.sampling(ours, True, seed=1):
        assert torch.equal(ours(x, EDGES), results[0])


@pytest.mark.parametrize("kind", OURS, ids=name)
def test_a_pass_that_fails_leaves_no_keys_behind(kind):
    _, ours = pair(kind, heads=2, prior=ba.ContextualPrior())
    x = arguments({})[0]
    ours(x, EDGES)
    expected = ours.stoch.kl_terms[0].total
    with pytest.raises((IndexError, ValueError, RuntimeError)):
        ours(2 * x, EDGES + N)
    ours(x, EDGES)
    assert torch.equal(ours.stoch.kl_terms[0].total, expected)


@pytest.mark.parametrize("layout", ["coo", "csr", "edge_index"])
@pytest.mark.parametrize("kind", OURS, ids=name)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_other_forms_of_the_adjacency(kind, layout):
    build = {} if kind is TransformerConv else {"add_self_loops": False}
    original, ours = pair(kind, heads=2, prior=ba.ContextualPrior(), **build)
    x = arguments({})[0]
    edges = EDGES.unique(dim=1)
    if layout == "edge_index":
        adjacency = EdgeIndex(edges.contiguous(), sparse_size=(N, N))
    else:
        # PyTorch Geometric takes the transposed adjacency matrix.
        values = torch.ones(edges.shape[1], dtype=torch.float64)
        adjacency = torch.sparse_coo_tensor(edges.flip(0), values, (N, N)).coalesce()
        adjacency = adjacency.to_sparse_csr() if layout == "csr" else adjacency
    try:
        expected = original(x, adjacency)
    except Exception as error:
        with pytest.raises(type(error)):
            ours(x, adjacency)
        return
    with ba.sampling(ours, False):
        close(ours(x, adjacency), expected)
    results = []
    for form in (adjacency, edges):
        with ba.sampling(ours, True, seed=3):
            results += [ours(x, form), ours.stoch.kl_terms[0].total]
    # The same target's edges have the same noise, in whatever order they come.
    close(results[0], results[2], atol=1e-10)
    torch.testing.assert_close(results[1], results[3])


@pytest.mark.parametrize("kind", OURS, ids=name)
def test_order_of_the_edges_does_not_matter_and_node_identities_travel(kind):
    _, ours = pair(kind, heads=2)
    x = arguments({})[0]
    shuffled = EDGES[:, torch.randperm(EDGES.shape[1], generator=torch.Generator().manual_seed(0))]
    with ba.sampling(ours, True, seed=1):
        whole = ours(x, EDGES)
        close(ours(x, shuffled), whole, atol=1e-10)
    # Renumbered nodes that keep their identities keep their noise.
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    place = order.argsort()
    with ba.sampling(ours, True, seed=1, batch_ids=order):
        close(ours(x[order], place[EDGES]), whole[order], atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", OURS, ids=name)
def test_narrow_dtypes(kind, dtype):
    original, ours = pair(kind, heads=2, prior=ba.ContextualPrior())
    x = arguments({})[0]
    expected = original(x, EDGES)
    with ba.sampling(ours.to(dtype), False):
        mean = ours(x.to(dtype), EDGES)
    assert mean.dtype == dtype
    # Logits of size 20 move by their own rounding.
    scale = expected.abs().max().item()
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=32 * scale * torch.finfo(dtype).eps)
    assert ours(x.to(dtype), EDGES).dtype == dtype
    assert ours.stoch.kl_terms[0].total.dtype == torch.float32
    assert bool(ours.stoch.kl_terms[0].total.isfinite())


@pytest.mark.parametrize("kind", OURS, ids=name)
def test_gradcheck_under_a_fixed_seed(kind):
    _, ours = pair(kind, posterior=ba.Weibull(1.5, learned=True), prior=ba.ContextualPrior(activation="tanh"), heads=2)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(0.3)
    x = arguments({})[0].requires_grad_()

    def call(x: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        with ba.sampling(ours, True, seed=0):
            return ours(x, EDGES), ba.kl_divergence(ours, examples=N)

    assert torch.autograd.gradcheck(call, (x, *ours.parameters()), fast_mode=True)


@pytest.mark.parametrize("kind", OURS, ids=name)
def test_input_width_may_be_left_open(kind):
    torch.manual_seed(0)
    ours = OURS[kind](-1, C, heads=2, posterior=SMALL, prior=ba.ContextualPrior())
    x = arguments({})[0].float()
    assert ours(x, EDGES).shape == (N, 2 * C)
    assert ours.stoch.kl_terms[0].total.isfinite()
    converted = make_bayesian(kind(-1, C, heads=2), SMALL, ba.ContextualPrior())
    assert not torch.allclose(converted(x, EDGES), converted(x, EDGES), atol=1e-4)


@pytest.mark.parametrize("kind", OURS, ids=name)
def test_deterministic_attention_has_no_divergence(kind):
    original, ours = pair(kind, heads=2, posterior=ba.Softmax())
    x = arguments({})[0]
    close(ours.train()(x, EDGES), original(x, EDGES))
    assert ba.kl_divergence(ours) == 0


@pytest.mark.parametrize("kind", OURS, ids=name)
def test_divergence_of_a_graph_asks_for_its_examples(kind):
    _, ours = pair(kind)
    x = arguments({})[0]
    ours(x, EDGES)
    total = ours.stoch.kl_terms[0].total
    with pytest.raises(ValueError, match=r"examples: .*\(a graph\)"):
        ba.kl_divergence(ours)
    torch.testing.assert_close(ba.kl_divergence(ours, examples=4), total / 4)
    entries = ours.stoch.kl_terms[0].entries
    torch.testing.assert_close(ba.kl_divergence(ours, reduction="mean"), total / entries)


@pytest.mark.parametrize(
    "module", [nn.Linear(2, 2), GCNConv(2, 2), BayesianGATConv(2, 2)], ids=lambda m: type(m).__name__
)
def test_other_modules_are_refused(module):
    kinds = f"GATConv, GATv2Conv, TransformerConv; got {type(module).__name__}"
    with pytest.raises(TypeError, match=f"conv: must be exactly one of {kinds}"):
        make_bayesian(module)


def test_a_subclass_is_refused_and_a_failed_conversion_changes_nothing():
    class Own(GATConv):
        pass

    with pytest.raises(TypeError, match=r"conv: .* got Own"):
        make_bayesian(Own(2, 2))
    conv = GATConv(FEATURES, C)
    x = arguments({})[0].float()
    expected = conv(x, EDGES)
    with pytest.raises(ValueError, match="loc has no meaning"):
        make_bayesian(conv, SMALL, ba.ConstantPrior(loc=1.0))
    with pytest.raises(TypeError, match="posterior: must be a posterior"):
        make_bayesian(conv, "weibull")
    assert type(conv) is GATConv
    assert torch.equal(conv(x, EDGES), expected)


@pytest.mark.parametrize("kind", OURS, ids=name)
def test_constructors_take_the_original_s_arguments(kind):
    positional = [FEATURES, C, 2, False]
    assert list(inspect.signature(kind.__init__).parameters)[1:5] == ["in_channels", "out_channels", "heads", "concat"]
    ours = OURS[kind](*positional)
    assert (ours.heads, ours.concat, ours.out_channels) == (2, False, C)
    assert ours.stoch.posterior.spec == ba.Weibull()
    with pytest.raises(TypeError, match="posterior: must be a posterior"):
        OURS[kind](FEATURES, C, posterior=1.0)


@pytest.mark.parametrize("kind", OURS, ids=name)
def test_conversion_keeps_mode_and_precision(kind):
    conv = kind(FEATURES, C, heads=2).double().eval()
    x = arguments({})[0]
    expected = conv(x, EDGES)
    make_bayesian(conv, ba.Weibull(1.0, learned=True), ba.ContextualPrior())
    close(conv(x, EDGES), expected, atol=1e-12)
    assert conv.stoch.kl_terms[0].total.dtype == torch.float64
    assert not torch.allclose(conv.train()(x, EDGES), expected, atol=1e-3)
