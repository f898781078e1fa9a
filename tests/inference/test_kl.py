import copy
import itertools
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bayesian_attention as ba
from bayesian_attention.inference.kl import recording, stochastic_layers
from tests.inference.models import Encoder, Outer, Shared, attention, encoder, features

X, MEMORY = features(3, 4, 8), features(3, 6, 8, seed=1)
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] + [True] * 5])


def integrated(posterior, prior, means: np.ndarray, draw: Callable[[np.ndarray, float], np.ndarray]) -> float:
    """Sum over ``means`` of KL(posterior ‖ prior), by the trapezoidal rule over the normal noise of a draw."""
    z = np.linspace(-9, 9, 20001)
    total = 0.0
    for mean in means.ravel():
        s = draw(z, mean)
        total += np.trapezoid(stats.norm.pdf(z) * (posterior(mean).logpdf(s) - prior.logpdf(s)), z)
    return total


def weibull_gamma(means: np.ndarray, k: float, concentration: float, rate: float) -> float:
    unit_mean = stats.weibull_min(k).mean()
    return integrated(
        lambda mean: stats.weibull_min(k, scale=mean / unit_mean),
        stats.gamma(concentration, scale=1 / rate),
        means,
        lambda z, mean: mean / unit_mean * (-stats.norm.logsf(z)) ** (1 / k),
    )


def lognormal_lognormal(means: np.ndarray, sigma: float, loc: float, scale: float) -> float:
    return integrated(
        lambda mean: stats.lognorm(sigma, scale=mean * np.exp(-(sigma**2) / 2)),
        stats.lognorm(scale, scale=np.exp(loc)),
        means,
        lambda z, mean: mean * np.exp(sigma * z - sigma**2 / 2),
    )


def torch_weights(layer: ba.MultiheadAttention, query: Tensor, key: Tensor, padding: Tensor | None = None) -> Tensor:
    """The softmax of PyTorch's own layer, (B, H, Lq, Lk)."""
    original = nn.MultiheadAttention(8, layer.num_heads, batch_first=True).double()
    original.load_state_dict(layer.state_dict())
    return original(query, key, key, padding, average_attn_weights=False)[1].detach()


@pytest.fixture(scope="module")
def by_hand() -> tuple[float, float, int, int]:
    """Total divergence and number of valid entries of the two layers of the encoder on padded data."""
    model = encoder().eval()
    first = torch_weights(model.first, X, X).numpy()
    hidden = X + model.first(X, X, X)[0]
    second = torch_weights(model.second, hidden, MEMORY, PADDING).transpose(1, 3)[~PADDING].numpy()
    assert (first > 0).all()
    assert (second > 0).all()
    return weibull_gamma(first, 2.0, 0.5, 2.0), lognormal_lognormal(second, 0.7, -1.0, 2.0), first.size, second.size


@pytest.mark.parametrize("tracked", [False, True])
def test_both_reductions_of_two_layers_agree_with_numerical_integration(by_hand, tracked):
    first, second, entries_first, entries_second = by_hand
    assert (entries_first, entries_second) == (3 * 2 * 4 * 4, (6 + 4 + 1) * 4 * 4)
    model = encoder().eval()
    if tracked:
        ba.track_kl(model)
    model(X, MEMORY, PADDING)
    torch.testing.assert_close(ba.kl_divergence(model).item(), (first + second) / 3, rtol=1e-7, atol=0)
    # Every call counts alike, whatever its size.
    mean = (first / entries_first + second / entries_second) / 2
    torch.testing.assert_close(ba.kl_divergence(model, reduction="mean").item(), mean, rtol=1e-7, atol=0)
    torch.testing.assert_close(ba.kl_divergence(model, examples=12).item(), (first + second) / 12, rtol=1e-7, atol=0)


def test_the_divergence_is_that_of_the_posterior_not_of_a_draw():
    model = encoder()
    model.second = attention(4, ba.Softmax()).double()
    with ba.sampling(model, False):
        model(X)
        without = ba.kl_divergence(model)
    model(X)
    torch.testing.assert_close(ba.kl_divergence(model), without)


def test_batch_copies_change_neither_reduction():
    model = encoder().eval()
    values = []
    for x in (X, X.repeat(5, 1, 1)):
        model(x)
        values.append([ba.kl_divergence(model, reduction=r) for r in ("sum", "mean")])
    torch.testing.assert_close(values[0], values[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_divergence_is_float32_or_wider(dtype):
    model = encoder().eval()
    model(X)
    exact = ba.kl_divergence(model)
    model.to(dtype)(X.to(dtype))
    kl = ba.kl_divergence(model)
    assert kl.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert kl.shape == ()
    torch.testing.assert_close(kl.double(), exact, rtol=0.02, atol=0)


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    layer = attention(2, ba.Weibull(3.0, learned=True), ba.LearnedPrior()).double()

    def kl(shape: Tensor, prior: Tensor, weight: Tensor) -> Tensor:
        replaced = {"stoch.posterior.log_parameter": shape, "stoch.prior.raw": prior, "in_proj_weight": weight}
        torch.func.functional_call(layer, replaced, (X, X, X))
        return ba.kl_divergence(layer)

    parameters = (layer.stoch.posterior.log_parameter, layer.stoch.prior.raw, layer.in_proj_weight)
    ba.track_kl(layer)
    assert torch.autograd.gradcheck(kl, tuple(p.detach().clone().requires_grad_() for p in parameters), fast_mode=True)


# Layers in a model


def test_layers_are_listed_once_in_order():
    layer = attention()
    outer = Outer(Shared(layer), attention(4))
    assert stochastic_layers(outer) == [layer.stoch, outer.last.stoch]
    assert stochastic_layers(nn.Sequential(layer, layer)) == [layer.stoch]
    assert stochastic_layers(nn.Linear(2, 2)) == []


def test_a_model_without_stochastic_attention_is_refused():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    model(X.float(), X.float(), X.float())
    with pytest.raises(ValueError, match="model: has no stochastic attention"):
        ba.kl_divergence(model)
    assert ba.track_kl(model) is model


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_deterministic_attention_has_no_divergence(reduction):
    model = Encoder(ba.Softmax(), ba.Softmax())
    model(X.float())
    assert ba.kl_divergence(model, reduction=reduction).item() == 0


def test_deterministic_layers_beside_stochastic_ones_add_nothing():
    torch.manual_seed(0)
    layer = attention().double()
    layer(X, X, X)
    alone = ba.kl_divergence(layer)
    outer = Outer(Shared(attention(4, ba.Softmax())), layer).double()
    outer.inner.forward = lambda x: x
    outer(X)
    torch.testing.assert_close(ba.kl_divergence(outer), alone)


def test_a_shared_layer_counts_every_call():
    torch.manual_seed(0)
    layer = attention().double().eval()
    total = 0.0
    x = X
    for _ in range(2):
        x = layer(x, x, x)[0]
        total += ba.kl_divergence(layer).item()
    model = ba.track_kl(Shared(copy.deepcopy(layer)))
    for _ in range(2):
        model(X)
        assert ba.kl_divergence(model).item() == pytest.approx(total, rel=1e-12)
        assert ba.kl_divergence(model, examples=3).item() == pytest.approx(total, rel=1e-12)


def test_a_shared_layer_in_an_untracked_model_is_refused_once_then_counted():
    model = Shared(attention())
    model(X.float())
    with pytest.raises(RuntimeError, match=r"ran more than once .* call track_kl\(model\) once"):
        ba.kl_divergence(model)
    ba.track_kl(model)(X.float())
    assert ba.kl_divergence(model) > 0


def test_a_shared_part_that_was_tracked_alone_is_refused_too():
    model = Shared(ba.track_kl(attention()))
    model(X.float())
    with pytest.raises(RuntimeError, match="ran more than once"):
        ba.kl_divergence(model)
    ba.track_kl(model.eval())(X.float())
    whole = ba.kl_divergence(model)
    hidden = model.layer(X.float(), X.float(), X.float())[0]
    first = ba.kl_divergence(model.layer)
    model.layer(hidden, hidden, hidden)
    torch.testing.assert_close(first + ba.kl_divergence(model.layer), whole)


@pytest.mark.parametrize("roots", [("outer",), ("inner", "outer"), ("outer", "inner"), ("inner", "last", "outer")])
def test_tracked_models_may_nest(roots):
    torch.manual_seed(0)
    outer = Outer(Shared(attention()), attention(4)).double().eval()
    parts = {"outer": outer, "inner": outer.inner, "last": outer.last}
    for name in roots:
        ba.track_kl(parts[name])
    outer(X)
    whole = ba.kl_divergence(outer)
    hidden = outer.inner(X).detach()
    fresh = ba.track_kl(copy.deepcopy(outer.last))
    fresh(hidden, hidden, hidden)
    last = ba.kl_divergence(fresh)
    inner = copy.deepcopy(outer.inner)
    ba.track_kl(inner)(X)
    torch.testing.assert_close(whole, ba.kl_divergence(inner) + last)


def test_tracking_twice_adds_no_hooks():
    model = encoder()
    assert ba.track_kl(ba.track_kl(model)) is model
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
def test_copies_record_for_themselves(copied, read):
    model = ba.track_kl(encoder())
    model(X)
    value = ba.kl_divergence(model).item() if read else None
    other = copied(model)
    with pytest.raises(RuntimeError, match="no divergence recorded"):
        ba.kl_divergence(other)
    if read:
        assert ba.kl_divergence(model).item() == value
    other(2 * X)
    model(X)
    theirs, own = ba.kl_divergence(other), ba.kl_divergence(model)
    assert theirs.item() != own.item()
    theirs.backward()
    assert all(p.grad is None for p in model.parameters())


# Passes


def test_without_a_forward_pass_the_error_says_so():
    with pytest.raises(RuntimeError, match=r"no divergence recorded: the model has made no forward pass"):
        ba.kl_divergence(encoder())


def test_every_pass_begins_anew():
    model = ba.track_kl(encoder().eval())
    values = []
    for x in (X, 3 * X, X):
        model(x)
        values.append(ba.kl_divergence(model).item())
        assert ba.kl_divergence(model).item() == values[-1]
    assert values[0] == values[2] != values[1]


def test_passes_in_evaluation_mode_before_the_first_read_do_not_count():
    model = encoder()
    model.eval()
    with torch.no_grad():
        model(X)
        model(X)
    model.train()
    with ba.sampling(model, False):
        model(X)
    kl = ba.kl_divergence(model)
    kl.backward()
    model.eval()
    model(X)
    torch.testing.assert_close(ba.kl_divergence(model), kl)


def test_an_evaluation_pass_may_be_read_without_gradients():
    model = encoder().eval()
    with torch.no_grad():
        model(X)
    assert not ba.kl_divergence(model).requires_grad


@pytest.mark.parametrize("tracked", [False, True])
def test_training_on_a_pass_without_gradients_is_refused(tracked):
    model = encoder()
    if tracked:
        ba.track_kl(model)
    with torch.no_grad():
        model(X)
        assert ba.kl_divergence(model) > 0
    with pytest.raises(RuntimeError, match="recorded without gradients"):
        ba.kl_divergence(model)


def test_terms_of_an_earlier_pass_are_not_handed_out_for_a_pass_that_recorded_nothing():
    model = encoder()
    model(X)
    ba.kl_divergence(model)
    with recording(model, False):
        model(X)
    with pytest.raises(RuntimeError, match="recording was off"):
        ba.kl_divergence(model)


def test_a_prediction_between_pass_and_divergence_leaves_no_stale_terms():
    model = encoder()
    model(X)
    ba.predict(model, X, samples=2)
    with pytest.raises(RuntimeError, match="no divergence recorded"):
        ba.kl_divergence(model)


@pytest.mark.parametrize("read_both", [False, True])
def test_two_passes_before_one_backward(read_both):
    """The gradient of a sum of losses is the sum of their gradients."""
    model = ba.track_kl(encoder(first=ba.Weibull(2.0, learned=True)).eval())
    inputs = (X, features(3, 4, 8, seed=5))
    parts = []
    for x in inputs:
        model.zero_grad()
        model(x)
        ba.kl_divergence(model).backward()
        parts.append([p.grad.clone() if p.grad is not None else None for p in model.parameters()])
    model.zero_grad()
    losses = []
    for x in inputs:
        model(x)
        if read_both or x is inputs[1]:
            losses.append(ba.kl_divergence(model))
    sum(losses).backward()
    for parameter, a, b in zip(model.parameters(), *parts, strict=True):
        if a is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, a + b if read_both else b)


def test_two_passes_before_the_first_read_are_refused():
    model = encoder()
    model(X)
    model(X)
    with pytest.raises(RuntimeError, match="ran more than once"):
        ba.kl_divergence(model)


def test_after_a_call_outside_a_pass_the_divergence_is_refused_until_the_next_pass():
    model = ba.track_kl(encoder().eval())
    model(X)
    before = ba.kl_divergence(model)
    with ba.recording(model, False):
        model.first(X, X, X)
    assert torch.equal(ba.kl_divergence(model), before)
    for call, grad in itertools.product((lambda: model.first(X, X, X), lambda: model.forward(X)), (True, False)):
        with torch.set_grad_enabled(grad):
            call()
            with pytest.raises(RuntimeError, match="not in a pass of the model itself"):
                ba.kl_divergence(model)
        model(X)
        torch.testing.assert_close(ba.kl_divergence(model), before)


class _Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = attention().double()
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x, x, x)[0]
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()])
@pytest.mark.parametrize("copied", [False, True])
def test_a_pass_that_was_interrupted_leaves_nothing_behind(error, copied):
    model = ba.track_kl(_Interrupted().eval())
    model(X)
    expected = ba.kl_divergence(model)
    model.error = error
    with pytest.raises(type(error)):
        model(X)
    model.error = None
    if copied:
        model = copy.deepcopy(model)
    for _ in range(2):
        model(X)
        torch.testing.assert_close(ba.kl_divergence(model), expected)


# Checkpointing


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.encoder = encoder(first=ba.Weibull(2.0, learned=True))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.encoder(x)
        return checkpoint(self.encoder, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("tracked", [False, True])
def test_checkpointing_changes_neither_divergence_nor_gradients(tracked, seed):
    results = []
    for reentrant in (None, False):
        model = _Checkpointed(reentrant)
        if tracked:
            ba.track_kl(model)
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(1)
            with ba.sampling(model, None, seed=seed):
                loss = model(X).square().sum() + ba.kl_divergence(model)
                loss.backward()
        results.append([loss, ba.kl_divergence(model), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


class _CheckpointedTwice(Shared):
    """A shared layer, each call of it a checkpointed block."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda y: self.layer(y, y, y)[0], x, use_reentrant=False)
        return x


@pytest.mark.parametrize("seed", [None, 3])
def test_a_checkpointed_block_that_would_draw_other_weights_in_backward_is_refused(seed):
    model = _Checkpointed(False)
    with ba.sampling(model.eval(), True, seed=seed):
        loss = model(X).sum()
    with pytest.raises(RuntimeError, match=r"call backward\(\) inside"):
        loss.backward()


def test_checkpointed_calls_of_a_shared_layer_are_refused_under_a_seed_alone():
    torch.manual_seed(0)
    model = ba.track_kl(_CheckpointedTwice(attention().double()))
    with ba.sampling(model, True, seed=3):
        loss = model(X).sum()
        with pytest.raises(RuntimeError, match="more than once in a pass"):
            loss.backward()
    plain = ba.track_kl(Shared(model.layer))
    gradients = []
    for network in (model, plain):
        torch.manual_seed(1)
        model.zero_grad()
        network(X).square().sum().backward()
        gradients.append(model.layer.in_proj_weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_an_empty_batch_has_no_divergence():
    model = encoder()
    for reduction in ("sum", "mean"):
        model(features(0, 3, 8))
        assert ba.kl_divergence(model, reduction=reduction).item() == 0


def test_reentrant_checkpointing_is_refused_in_training():
    model = ba.track_kl(_Checkpointed(True))
    model(X.clone().requires_grad_())
    with pytest.raises(RuntimeError, match=r"use checkpoint\(\.\.\., use_reentrant=False\)"):
        ba.kl_divergence(model)


# Recording


@pytest.mark.parametrize("error", [None, ValueError])
def test_recording_returns_to_what_it_was(error):
    model = encoder()
    model.second.stoch.record_kl = False
    try:
        with recording(model, True):
            assert all(layer.record_kl for layer in stochastic_layers(model))
            with recording(model, False):
                assert not any(layer.record_kl for layer in stochastic_layers(model))
                if error:
                    raise error
            assert all(layer.record_kl for layer in stochastic_layers(model))
    except ValueError:
        assert error is not None
    assert [layer.record_kl for layer in stochastic_layers(model)] == [True, False]


def test_recording_one_layer_alone():
    model = ba.track_kl(encoder().eval())
    model(X)
    both = ba.kl_divergence(model)
    parts = []
    for off in (model.first, model.second):
        with recording(off, False):
            model(X)
        parts.append(ba.kl_divergence(model))
    torch.testing.assert_close(sum(parts), both)


# Arguments


def test_unknown_reduction_is_named():
    model = encoder()
    model(X)
    with pytest.raises(ValueError, match=r"reduction: no 'means'. Did you mean 'mean'"):
        ba.kl_divergence(model, reduction="means")


@pytest.mark.parametrize("examples", [0, -3, 2.5])
def test_impossible_numbers_of_examples_are_named(examples):
    model = encoder()
    model(X)
    with pytest.raises(ValueError, match=f"examples must be a whole number of at least 1; got {examples}"):
        ba.kl_divergence(model, examples=examples)


class _Folded(nn.Module):
    """Windows folded into the batch of one layer, not of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.windows, self.whole = attention(), attention()

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.reshape(2 * x.shape[0], -1, x.shape[2])
        x = self.windows(pieces, pieces, pieces)[0].reshape(x.shape)
        return self.whole(x, x, x)[0]


def test_differing_batch_sizes_need_the_number_of_examples():
    model = _Folded().double()
    model(X)
    with pytest.raises(ValueError, match=r"examples: cannot be told .*batch sizes \[3, 6\]"):
        ba.kl_divergence(model)
    assert ba.kl_divergence(model, examples=3) > 0
    assert ba.kl_divergence(model, reduction="mean") > 0


def test_a_graph_needs_the_number_of_examples():
    graph = pytest.importorskip("bayesian_attention.layers.graph")
    conv = graph.BayesianGATConv(8, 4, heads=2)
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    conv(features(4, 8, dtype=torch.float32), edges)
    with pytest.raises(ValueError, match=r"examples: cannot be told from the attention \(a graph\)"):
        ba.kl_divergence(conv)
    torch.testing.assert_close(2 * ba.kl_divergence(conv, examples=4), ba.kl_divergence(conv, examples=2))


def test_sequence_first_and_unbatched_inputs_count_their_examples():
    torch.manual_seed(0)
    layer = ba.MultiheadAttention(8, 2).double().eval()
    x = X.transpose(0, 1)
    layer(x, x, x)
    batched = ba.kl_divergence(layer)
    single = []
    for example in X:
        layer(example, example, example)
        single.append(ba.kl_divergence(layer))
    torch.testing.assert_close(batched, sum(single) / 3)
