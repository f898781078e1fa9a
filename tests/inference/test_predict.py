import itertools
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesian_attention as ba
from bayesian_attention.inference.kl import stochastic_layers
from tests.inference.models import Encoder, attention, encoder, features

X, MEMORY = features(7, 4, 8), features(7, 6, 8, seed=1)
PADDING = torch.tensor([[False] * (6 - i % 3) + [True] * (i % 3) for i in range(7)])


def by_hand(model: nn.Module, *inputs: Tensor, samples: int, seed: int) -> Tensor:
    """Single passes, one after the other."""
    model.eval()
    draws = []
    for index in range(samples):
        with torch.no_grad(), ba.sampling(model, True, seed=seed, sample_index=index):
            draws.append(model(*inputs))
    return torch.stack(draws)


@pytest.mark.parametrize("seed", [0, 5])
def test_classification_is_the_mean_of_single_passes(seed):
    model = encoder()
    prediction = ba.predict(model, (X, MEMORY, PADDING), samples=5, seed=seed)
    logits = by_hand(model, X, MEMORY, PADDING, samples=5, seed=seed)
    assert isinstance(prediction, ba.ClassificationPrediction)
    assert torch.equal(prediction.logits, logits)
    torch.testing.assert_close(prediction.mean, logits.softmax(dim=-1).mean(dim=0))
    assert (prediction.std > 0).all()


def test_regression_is_the_mean_of_single_passes():
    model = encoder()
    prediction = ba.predict(model, X, samples=5, task="regression", noise_std=0.5)
    numbers = by_hand(model, X, samples=5, seed=0)
    assert isinstance(prediction, ba.RegressionPrediction)
    torch.testing.assert_close(prediction.mean, numbers.mean(dim=0))
    torch.testing.assert_close(prediction.epistemic, numbers.std(dim=0))
    torch.testing.assert_close(prediction.aleatoric, torch.full((7, 3), 0.5, dtype=torch.float64))
    assert ba.predict(model, X, samples=2, task="regression").noise_variance is None


def test_predicted_noise_is_the_second_output():
    model = encoder()
    model.head = nn.Linear(8, 2).double()
    prediction = ba.predict(model, X, samples=4, task="regression", noise_std="predicted")
    numbers = by_hand(model, X, samples=4, seed=0)
    assert torch.equal(prediction.samples, numbers[..., 0])
    torch.testing.assert_close(prediction.aleatoric, numbers[..., 1].exp().mean(dim=0).sqrt())


def test_draws_continue_those_of_fewer_samples():
    model = encoder()
    assert torch.equal(ba.predict(model, X, samples=3).logits, ba.predict(model, X, samples=6).logits[:3])
    assert not torch.allclose(ba.predict(model, X, samples=3, seed=1).logits, ba.predict(model, X, samples=3).logits)


class _Windows(nn.Module):
    """Folds two windows an example into the batch of its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = attention(posterior=ba.Weibull(1.0)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.reshape(2 * x.shape[0], -1, x.shape[2])
        return self.head(self.attention(pieces, pieces, pieces)[0].reshape(x.shape).mean(dim=1))


@pytest.mark.parametrize("kind", [encoder, lambda: _Windows().double()])
@pytest.mark.parametrize("batch_size", [None, 1, 3, 100])
@pytest.mark.parametrize("samples_per_pass", [1, 2, 8])
def test_batches_and_repetitions_change_nothing(kind, batch_size, samples_per_pass):
    torch.manual_seed(0)
    model = kind()
    whole = ba.predict(model, X, samples=5).logits
    pieces = ba.predict(model, X, samples=5, batch_size=batch_size, samples_per_pass=samples_per_pass).logits
    assert pieces.shape == (5, 7, 3)
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("batch_size", "samples_per_pass"), [(None, 1), (3, 1), (3, 2), (None, 4)])
def test_every_input_with_rows_is_split_and_nothing_else(batch_size, samples_per_pass):
    """The mask's first dimension equals the batch size, though not the number of rows."""
    torch.manual_seed(0)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = attention().double(), nn.Linear(8, 3).double()

        def forward(self, x: Tensor, mask: Tensor, padding: Tensor, scale: float) -> Tensor:
            return self.head(self.attention(x, x, x, padding, attn_mask=mask)[0] * scale).mean(dim=1)

    model, x = Masked(), X[:, :3]
    inputs = (x, torch.ones(3, 3).triu(1).bool(), PADDING[:, 3:], 2.0)
    prediction = ba.predict(model, inputs, samples=4, batch_size=batch_size, samples_per_pass=samples_per_pass)
    torch.testing.assert_close(prediction.logits, by_hand(model, *inputs, samples=4, seed=0))


@pytest.mark.parametrize(
    ("batch_size", "samples_per_pass", "most", "passes"),
    [(None, 1, 7, 5), (2, 1, 2, 20), (2, 3, 6, 8), (None, 5, 35, 1), (7, 2, 14, 3), (1, 1, 1, 35)],
)
def test_no_pass_holds_more_rows_than_asked(batch_size, samples_per_pass, most, passes):
    model, rows = encoder(), []
    model.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[0]))
    ba.predict(model, X, samples=5, batch_size=batch_size, samples_per_pass=samples_per_pass)
    assert max(rows) == most
    assert len(rows) == passes
    assert sum(rows) == 35


# Inputs and outputs


def test_tensors_sequences_and_mappings_are_the_models_arguments():
    model = encoder()
    whole = ba.predict(model, (X, MEMORY), samples=3).logits
    for inputs in ([X, MEMORY], {"x": X, "memory": MEMORY}, UserDict(memory=MEMORY, x=X), (X, MEMORY, None)):
        for batch_size in (None, 3):
            torch.testing.assert_close(ba.predict(model, inputs, samples=3, batch_size=batch_size).logits, whole)
    assert torch.equal(ba.predict(model, X, samples=3).logits, ba.predict(model, (X,), samples=3).logits)


@pytest.mark.parametrize("dataset", [DataLoader(TensorDataset(X)), 3, "text", None, iter([X])])
def test_other_inputs_are_refused(dataset):
    with pytest.raises(TypeError, match="inputs: must be a tensor, a sequence or a mapping"):
        ba.predict(encoder(), dataset)


@pytest.mark.parametrize("inputs", [(), {}, [1, None], torch.zeros(()), {"x": torch.zeros(())}])
def test_inputs_without_rows_are_refused(inputs):
    with pytest.raises(ValueError, match="inputs: there is no tensor with rows"):
        ba.predict(encoder(), inputs)


class _Wrapped(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.encoder, self.wrap = encoder(), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.encoder(x))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: (x, None),
        lambda x: [x, 1],
        lambda x: {"loss": None, "logits": x},
        lambda x: UserDict(logits=x),
        lambda x: SimpleNamespace(logits=x),
    ],
)
def test_the_prediction_is_found_in_what_the_model_returns(wrap):
    expected = ba.predict(encoder(), X, samples=2).logits
    assert torch.equal(ba.predict(_Wrapped(wrap), X, samples=2).logits, expected)


def test_output_picks_the_prediction():
    model = _Wrapped(lambda x: {"answer": {"scores": x}})
    picked = ba.predict(model, X, samples=2, output=lambda result: result["answer"]["scores"], samples_per_pass=2)
    assert torch.equal(picked.logits, ba.predict(encoder(), X, samples=2, samples_per_pass=2).logits)
    with pytest.raises(ValueError, match="output: cannot tell which part of a dict is the prediction"):
        ba.predict(model, X, samples=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_predictions_are_float32_or_wider_without_gradients_on_the_cpu(dtype):
    prediction = ba.predict(encoder().to(dtype), X.to(dtype).requires_grad_(), samples=2)
    assert prediction.logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert prediction.logits.device.type == "cpu"
    assert not prediction.logits.requires_grad
    assert torch.isfinite(prediction.logits).all()


def test_outputs_a_token_keep_their_shape():
    model = attention().double()
    prediction = ba.predict(model, (X, X, X), samples=3, batch_size=4, samples_per_pass=2)
    assert prediction.logits.shape == (3, 7, 4, 8)
    assert prediction.mean.shape == (7, 4, 8)


def test_one_row_one_sample_and_one_key():
    prediction = ba.predict(encoder(), X[:1, :1], samples=1)
    assert prediction.logits.shape == (1, 1, 3)
    assert prediction.std.max() == 0


def test_no_rows_give_no_predictions():
    model = encoder()
    for batch_size in (None, 3):
        assert ba.predict(model, X[:0], samples=2, batch_size=batch_size).mean.shape == (0, 3)


def test_a_sequence_first_model_and_an_unbatched_one_run_whole():
    torch.manual_seed(0)
    model = ba.MultiheadAttention(8, 2).double()
    for x in (X.transpose(0, 1), X[0]):
        # There the first dimension is the length, 4, which does not divide the attention's batch of 7 or 1.
        prediction = ba.predict(model, (x, x, x), samples=3)
        assert torch.equal(prediction.logits, torch.stack([y[0] for y in _passes(model, x, 3)]))
        for split in ({"samples_per_pass": 2}, {"batch_size": 2}):
            with pytest.raises(ValueError, match="attention with batch_first=False"):
                ba.predict(model, (x, x, x), samples=3, **split)


def test_a_model_that_turns_its_rows_round_for_a_sequence_first_layer_may_be_split():
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention = ba.MultiheadAttention(8, 2, posterior=ba.Weibull(1.0)).double()

        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(0, 1)
            return self.attention(x, x, x)[0].mean(dim=0)

    model = Turned()
    whole = ba.predict(model, X, samples=4)
    for split in ({"samples_per_pass": 3}, {"batch_size": 2}):
        torch.testing.assert_close(ba.predict(model, X, samples=4, **split).logits, whole.logits)


def _passes(model: nn.Module, x: Tensor, samples: int) -> list[tuple[Tensor, Tensor]]:
    model.eval()
    passes = []
    for index in range(samples):
        with torch.no_grad(), ba.sampling(model, True, seed=0, sample_index=index):
            passes.append(model(x, x, x))
    return passes


@pytest.mark.parametrize("nodes_first", [True, False])
def test_a_graph_runs_whole(nodes_first):
    graph = pytest.importorskip("bayesian_attention.layers.graph")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = graph.BayesianGATConv(8, 3, heads=2, concat=False, posterior=ba.Weibull(1.0))

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.conv(x, edges)

    model, x = Net(), features(5, 8, dtype=torch.float32)
    edges = torch.tensor(list(itertools.permutations(range(5), 2))).T
    inputs = {"x": x, "edges": edges} if nodes_first else {"edges": edges, "x": x}
    prediction = ba.predict(model, inputs, samples=3)
    assert torch.equal(prediction.logits, by_hand(model, x, edges, samples=3, seed=0))
    if nodes_first:
        with pytest.raises(ValueError, match="samples_per_pass: a graph cannot be split or repeated"):
            ba.predict(model, inputs, samples=4, samples_per_pass=2)
        with pytest.raises(ValueError, match="batch_size: a graph cannot be split"):
            ba.predict(model, inputs, samples=4, batch_size=3)


# What stays as it was


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("seeded", [False, True])
def test_mode_sampling_and_recording_return(error, seeded):
    model = encoder().train()
    model.second.eval()
    model.second.stoch.record_kl = False
    names = ("training", "sampling", "seed", "sample_index", "batch_ids", "record_kl")
    calls = []

    def output(result: Tensor) -> Tensor:
        calls.append([module.training for module in model.modules()])
        if error and len(calls) == 2:
            raise error
        return result

    with ba.sampling(model, None, seed=3 if seeded else None):
        before = [{name: getattr(layer, name) for name in names} for layer in stochastic_layers(model)]
        modes = [module.training for module in model.modules()]
        if error:
            with pytest.raises(error):
                ba.predict(model, X, samples=3, output=output)
        else:
            ba.predict(model, X, samples=3, output=output)
        assert not any(itertools.chain(*calls))
        assert [{name: getattr(layer, name) for name in names} for layer in stochastic_layers(model)] == before
        assert [module.training for module in model.modules()] == modes


def test_dropout_is_off_and_torchs_generator_untouched():
    model = encoder()
    expected = ba.predict(model, X, samples=2).logits
    model.head = nn.Sequential(nn.Dropout(0.9), model.head)
    state = torch.get_rng_state()
    assert torch.equal(ba.predict(model.train(), X, samples=2).logits, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_divergence_is_computed():
    model = encoder()
    model.first.stoch._record = None
    assert ba.predict(model, X, samples=2).logits.shape == (2, 7, 3)


# Determinism


def test_deterministic_models_are_refused():
    for model in (nn.Linear(8, 3).double(), Encoder(ba.Softmax(), ba.Softmax()).double()):
        with pytest.raises(ValueError, match="model: has no stochastic attention"):
            ba.predict(model, X)


def test_a_posterior_of_no_spread_has_no_epistemic_uncertainty():
    model = encoder(first=ba.Weibull(1e12), second=ba.LogNormal(1e-12))
    prediction = ba.predict(model, X, samples=5)
    with ba.sampling(model, False):
        torch.testing.assert_close(prediction.mean, model(X).softmax(dim=-1).detach())
    assert prediction.epistemic.max() < 1e-12
    assert prediction.std.max() < 1e-10


def test_one_stochastic_layer_is_enough():
    model = encoder(first=ba.Softmax())
    assert ba.predict(model, X, samples=3).epistemic.min() > 0


# Arguments


@pytest.mark.parametrize("name", ["samples", "samples_per_pass", "batch_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "3", True])
def test_counts_are_whole_numbers_of_at_least_one(name, value):
    with pytest.raises(ValueError, match=f"predict: {name} must be a whole number of at least 1; got {value!r}"):
        ba.predict(encoder(), X, **{name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "clasification"}, "task: no 'clasification'. Did you mean 'classification'"),
        ({"noise_std": 0.1}, "noise_std: only regression has one"),
        ({"noise_std": "predicted"}, "noise_std: only regression has one"),
        ({"task": "regression", "noise_std": "predicted"}, r"noise_std: 'predicted' needs .* got \(20, 7, 3\)"),
        ({"task": "regression", "noise_std": -0.1}, "noise_std must not be negative; got -0.1"),
        ({"task": "regression", "noise_std": float("nan")}, "noise_std must be a finite number; got nan"),
        ({"task": "regression", "noise_std": "guess"}, "noise_std must be a finite number; got 'guess'"),
        ({"seed": 0.5}, "seed must be a whole number"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ba.predict(encoder(), X, **arguments)


def test_a_model_that_mixes_its_rows_is_refused_in_repetition():
    model = _Wrapped(lambda x: x.mean(dim=0, keepdim=True))
    assert ba.predict(model, X, samples=2).logits.shape == (2, 1, 3)
    with pytest.raises(ValueError, match="samples_per_pass: the output has 1 rows for 7 rows repeated 2 times"):
        ba.predict(model, X, samples=2, samples_per_pass=2)


def test_a_models_own_error_comes_through():
    with pytest.raises(ValueError, match="key, value"):
        ba.predict(attention(), (X, X, X[0]))
