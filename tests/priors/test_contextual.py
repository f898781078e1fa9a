import math

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from bayesian_attention.divergences import entrywise
from bayesian_attention.engine.rows import DenseRows, SegmentRows, log_normalise
from bayesian_attention.posteriors import LogNormal, Weibull
from bayesian_attention.priors import ContextualPrior
from bayesian_attention.priors.contextual import ContextualPriorModule

ACTIVATIONS: dict[str, nn.Module] = {
    "relu": nn.ReLU(),
    "leaky_relu": nn.LeakyReLU(0.3),
    "gelu": nn.GELU(),
    "tanh": nn.Tanh(),
}


def build(spec: ContextualPrior, heads: int, dim: int, family: str = "gamma", seed: int = 0) -> ContextualPriorModule:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = spec.build(family, heads, dim)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    return module


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def perceptron(module: ContextualPriorModule, network: int, activation: nn.Module, keys: Tensor) -> Tensor:
    """Scores by torch's own layers, given the weights of one network."""
    score = module.score_weight[network].T
    if module.hidden_weight is None:
        return F.linear(keys, score).squeeze(-1)
    hidden = F.linear(keys, module.hidden_weight[network].T, module.hidden_bias[network, 0])
    return F.linear(activation(hidden), score).squeeze(-1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("hidden", [None, 1, 10])
@pytest.mark.parametrize("share_heads", [True, False])
@pytest.mark.parametrize("leading", [(), (2,), (2, 3)], ids=str)
def test_scores_are_those_of_torchs_own_layers(activation, hidden, share_heads, leading):
    spec = ContextualPrior(hidden=hidden, activation=activation, negative_slope=0.3, share_heads=share_heads)
    module = build(spec, heads=4, dim=5)
    keys = normal(*leading, 4, 7, 5)
    scores = module.scores(keys)
    assert scores.shape == (*leading, 4, 7)
    for head in range(4):
        network = 0 if share_heads else head
        expected = perceptron(module, network, ACTIVATIONS[activation], keys[..., head, :, :])
        torch.testing.assert_close(scores[..., head, :], expected)


@pytest.mark.parametrize(("share_heads", "networks"), [(True, 1), (False, 3)])
def test_one_network_for_all_heads_or_one_each(share_heads, networks):
    module = build(ContextualPrior(share_heads=share_heads, hidden=6), heads=3, dim=4)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "hidden_weight": (networks, 4, 6),
        "hidden_bias": (networks, 1, 6),
        "score_weight": (networks, 6, 1),
    }
    # The same keys in every head tell shared networks from separate ones.
    scores = module.scores(normal(1, 5, 4).expand(3, 5, 4))
    assert torch.equal(scores[0], scores[1]) == share_heads


def test_initial_weights_are_he_normal_and_biases_zero():
    """Kolmogorov–Smirnov against N(0, 2 / fan in), false-alarm rate 1e-5 each."""
    torch.manual_seed(0)
    module = ContextualPrior(hidden=200, share_heads=False).build("gamma", 20, 64)
    assert torch.equal(module.hidden_bias, torch.zeros(20, 1, 200))
    for weight, fan_in in ((module.hidden_weight, 64), (module.score_weight, 200)):
        law = stats.norm(scale=math.sqrt(2 / fan_in))
        assert stats.kstest(weight.detach().flatten().numpy(), law.cdf).pvalue > 1e-5


CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()
PADDED = torch.tensor([[True, True, True, False], [True, False, False, False]]).view(2, 1, 1, 4)
EMPTY_ROW = CAUSAL.clone().index_fill(0, torch.tensor(2), False)


@pytest.mark.parametrize("valid", [None, CAUSAL, PADDED, PADDED & CAUSAL, EMPTY_ROW], ids=str)
@pytest.mark.parametrize("rate", [None, 0.5])
def test_gamma_means_are_a_softmax_over_the_valid_keys_of_each_row(valid, rate):
    module = build(ContextualPrior(rate=rate), heads=3, dim=5)
    scores = module.scores(normal(2, 3, 4, 5))
    rows = DenseRows(valid)
    log_weights = log_normalise(rows.keys_over_entries(scores).expand(2, 3, 4, 4), rows)[0]
    concentration, beta = module.distribution(log_weights, rows.heads_over_entries)
    assert beta == (1.0 if rate is None else rate)
    mask = torch.ones(2, 3, 4, 4, dtype=torch.bool) if valid is None else valid.expand(2, 3, 4, 4)
    expected = scores.unsqueeze(-2).exp() * mask
    expected = beta * expected / expected.sum(-1, keepdim=True).clamp_min(1e-30)
    torch.testing.assert_close(concentration, expected, rtol=1e-5, atol=1e-20)
    mean = (concentration / beta).sum(-1)
    torch.testing.assert_close(mean, mask.any(-1).float(), rtol=1e-5, atol=1e-20)


def test_lognormal_locations_are_a_log_softmax_over_the_keys():
    module = build(ContextualPrior(scale=0.7), heads=3, dim=5, family="lognormal")
    scores = module.scores(normal(2, 3, 4, 5))
    rows = DenseRows()
    log_weights = log_normalise(rows.keys_over_entries(scores), rows)[0]
    loc, scale = module.distribution(log_weights, rows.heads_over_entries)
    assert scale == 0.7
    torch.testing.assert_close(loc, scores.log_softmax(-1).unsqueeze(-2))


def test_on_a_graph_the_softmax_runs_over_the_neighbours():
    source, target = torch.tensor([0, 1, 2, 2, 0, 3, 3]), torch.tensor([0, 0, 0, 1, 1, 1, 3])
    module = build(ContextualPrior(share_heads=False), heads=2, dim=3)
    scores = module.scores(normal(2, 4, 3))
    rows = SegmentRows(target, source, 4)
    log_weights = log_normalise(rows.keys_over_entries(scores), rows)[0]
    concentration, _ = module.distribution(log_weights, rows.heads_over_entries)
    assert concentration.shape == (7, 2)
    for node in range(4):
        edges = target == node
        expected = scores[:, source[edges]].softmax(-1).T
        torch.testing.assert_close(concentration[edges], expected)


@pytest.mark.parametrize("family", ["gamma", "lognormal"])
@pytest.mark.parametrize("hidden", [None, 10])
@pytest.mark.parametrize("share_heads", [True, False])
def test_gradients_of_the_divergence_reach_all_parameters_and_the_keys(family, hidden, share_heads):
    module = build(ContextualPrior(hidden=hidden, share_heads=share_heads, activation="tanh"), 2, 3, family)
    keys = normal(2, 2, 5, 3).requires_grad_()
    rows = DenseRows(torch.ones(5, 5, dtype=torch.bool).tril())
    log_prior = log_normalise(rows.keys_over_entries(module.scores(keys)), rows)[0].masked_fill(~rows.valid, 0.0)
    log_mean = log_normalise(normal(2, 2, 5, 5, seed=1), rows)[0].masked_fill(~rows.valid, 0.0)
    posterior = Weibull(2.0) if family == "gamma" else LogNormal(0.5)
    prior = module.distribution(log_prior, rows.heads_over_entries)
    kl = entrywise(posterior, posterior.parameter, log_mean, prior).masked_fill(~rows.valid, 0.0).sum()
    kl.backward()
    for name, tensor in [*module.named_parameters(), ("keys", keys)]:
        assert tensor.grad is not None, name
        assert bool(tensor.grad.isfinite().all()), name
        # Every network of every head is reached.
        assert bool((tensor.grad.flatten(1).abs().sum(-1) > 0).all()), name


@pytest.mark.parametrize("activation", ["gelu", "tanh", "leaky_relu"])
def test_gradcheck(activation):
    module = build(ContextualPrior(hidden=4, activation=activation, share_heads=False), 2, 3).double()
    keys = normal(2, 2, 3, 3, dtype=torch.float64).requires_grad_()
    weights = [p.detach().clone().requires_grad_() for p in module.parameters()]
    names = [name for name, _ in module.named_parameters()]

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, keys: Tensor) -> Tensor:
            rows = DenseRows()
            log_weights = log_normalise(rows.keys_over_entries(self.inner.scores(keys)), rows)[0]
            return self.inner.distribution(log_weights, rows.heads_over_entries).concentration

    scores = Scores()

    def run(keys: Tensor, *values: Tensor) -> Tensor:
        named = {f"inner.{name}": value for name, value in zip(names, values, strict=True)}
        return torch.func.functional_call(scores, named, (keys,))

    assert torch.autograd.gradcheck(run, (keys, *weights))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    module = build(ContextualPrior(), heads=2, dim=8)
    keys = normal(2, 2, 16, 8).to(dtype)
    wide_scores = module.scores(keys.float())
    assert torch.equal(module.scores(keys), wide_scores)
    half = module.to(dtype).scores(keys)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, wide_scores, rtol=0.05, atol=0.05)


def test_keys_need_not_be_contiguous():
    module = build(ContextualPrior(), heads=2, dim=4)
    keys = normal(3, 7, 2, 4).transpose(1, 2)
    assert not keys.is_contiguous()
    torch.testing.assert_close(module.scores(keys), module.scores(keys.contiguous()))


def test_a_key_of_vanishing_weight_keeps_a_finite_divergence_and_gradient():
    module = ContextualPrior().build("gamma", 1, 4)
    log_weights = torch.tensor([0.0, -200.0]).view(1, 1, 1, 2).requires_grad_()
    prior = module.distribution(log_weights, lambda x: x)
    assert bool((prior.concentration > 0).all())
    kl = entrywise(Weibull(1.0), 1.0, torch.tensor([-1.0, -1.0]), prior)
    kl.sum().backward()
    assert bool(kl.isfinite().all())
    assert bool(log_weights.grad.isfinite().all())


def test_a_single_key_has_all_the_prior_weight():
    module = build(ContextualPrior(rate=3.0), heads=2, dim=4)
    rows = DenseRows()
    log_weights = log_normalise(rows.keys_over_entries(module.scores(normal(1, 2, 1, 4))), rows)[0]
    assert torch.equal(module.distribution(log_weights, lambda x: x).concentration, torch.full((1, 2, 1, 1), 3.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": 0}, "hidden must be a whole number of at least 1; got 0"),
        ({"hidden": -3}, "hidden must be a whole number of at least 1; got -3"),
        ({"hidden": 2.5}, r"hidden must be a whole number of at least 1; got 2\.5"),
        ({"hidden": True}, "hidden must be a whole number of at least 1; got True"),
        ({"hidden": "10"}, "hidden must be a whole number of at least 1; got '10'"),
        ({"negative_slope": math.nan}, "negative_slope must be a finite number; got nan"),
        ({"negative_slope": "0.1"}, "negative_slope must be a finite number; got '0.1'"),
        ({"share_heads": "no"}, "share_heads must be True or False; got 'no'"),
        ({"activation": "rleu"}, r"activation: no 'rleu'\. Did you mean 'relu'.* Known: gelu, leaky_relu, relu, tanh"),
        ({"activation": "LeakyReLU"}, "activation: no 'LeakyReLU'. Did you mean 'leaky_relu'"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=f"ContextualPrior: {message}"):
        ContextualPrior(**settings)


@pytest.mark.parametrize("family", ["gamma", "lognormal"])
def test_an_attention_without_keys_is_refused(family):
    with pytest.raises(
        ValueError, match="ContextualPrior: this attention offers no keys; use ConstantPrior or Learned"
    ):
        ContextualPrior().build(family, 2, None)
    with pytest.raises(ValueError, match="ContextualPrior: keys are needed and none were given"):
        ContextualPrior().build(family, 2, 4).distribution(None, lambda x: x)
