import copy

import pytest
import torch
from torch import Tensor, nn

import bayesian_attention as ba
from bayesian_attention.inference.kl import stochastic_layers
from tests.inference.models import Encoder, Outer, Shared, attention, encoder, features

X = features(4, 5, 8)
STATE = ("sampling", "seed", "sample_index", "batch_ids")


def state(model: nn.Module) -> list[object]:
    return [getattr(layer, name) for layer in stochastic_layers(model) for name in STATE]


def draw(model: nn.Module, x: Tensor = X, active: bool | None = True, **arguments) -> Tensor:
    with ba.sampling(model, active, **arguments):
        return model(x).detach()


@pytest.mark.parametrize("training", [True, False])
def test_on_off_and_following_the_mode(training):
    model = encoder().train(training)
    mean = draw(model, active=False)
    assert torch.equal(draw(model, active=False), mean)
    assert not torch.allclose(draw(model, active=True), mean)
    assert torch.equal(draw(model, active=None), mean) != training
    assert torch.equal(model(X), mean) != training


def test_off_is_the_posterior_mean_of_pytorchs_own_layer():
    torch.manual_seed(0)
    layer = attention(posterior=ba.Weibull(0.5)).double()
    original = nn.MultiheadAttention(8, 2, batch_first=True).double()
    original.load_state_dict(layer.state_dict())
    with ba.sampling(layer, False):
        torch.testing.assert_close(layer(X, X, X), original(X, X, X))


@pytest.mark.parametrize("seed", [0, -1, 7, 2**62])
def test_a_seed_repeats_the_draws_whatever_torch_does(seed):
    model = encoder()
    first = draw(model, seed=seed)
    torch.manual_seed(123)
    assert torch.equal(draw(model, seed=seed), first)
    with ba.sampling(model, True, seed=seed):
        assert torch.equal(model(X), first)
        assert torch.equal(model(X), first)
    assert not torch.allclose(draw(model, seed=seed + 1), first)
    assert torch.equal(draw(copy.deepcopy(model), seed=seed), first)


def test_a_seed_leaves_torchs_generator_alone():
    model = encoder()
    before = torch.get_rng_state()
    draw(model, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_torchs_generator_rules():
    model = encoder()
    torch.manual_seed(5)
    first, second = draw(model), draw(model)
    assert not torch.allclose(first, second)
    torch.manual_seed(5)
    assert torch.equal(draw(model), first)
    assert torch.equal(draw(model), second)


def test_draws_are_numbered():
    model = encoder()
    draws = [draw(model, seed=1, sample_index=i) for i in range(4)]
    assert torch.equal(draw(model, seed=1), draws[0])
    assert torch.equal(draw(model, seed=1, sample_index=torch.tensor(2)), draws[2])
    assert all(not torch.allclose(a, b) for i, a in enumerate(draws) for b in draws[:i])


def test_rows_have_draws_of_their_own():
    model = encoder()
    rows = torch.arange(4)
    whole = draw(model, seed=1)
    assert torch.equal(draw(model, seed=1, batch_ids=rows), whole)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(draw(model, X[order], seed=1, batch_ids=order), whole[order])
    torch.testing.assert_close(draw(model, X[1:3], seed=1, batch_ids=rows[1:3]), whole[1:3])
    mixed = draw(model, seed=1, batch_ids=rows, sample_index=torch.tensor([0, 5, 0, 5]))
    other = draw(model, seed=1, sample_index=5)
    torch.testing.assert_close(mixed, torch.stack([whole[0], other[1], whole[2], other[3]]))
    same = draw(model, X[:1].expand(4, -1, -1), seed=1)
    assert not torch.allclose(same[0], same[1])


def test_layers_do_not_share_their_noise():
    torch.manual_seed(0)
    one = attention(posterior=ba.Weibull(1.0)).double()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = one, copy.deepcopy(one)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x, x, x)[1], self.b(x, x, x)[1]

    model = Both()
    with ba.sampling(model, False):
        assert torch.equal(*model(X))
    with ba.sampling(model, True, seed=0):
        assert not torch.allclose(*model(X))


def test_calls_of_a_shared_layer_do_not_share_their_noise():
    torch.manual_seed(0)
    layer = attention(posterior=ba.Weibull(1.0)).double()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.layer(x, x, x)[1] for _ in range(2)])

    model = Twice()
    with ba.sampling(model, True, seed=0):
        first, again = model(X), model(X)
    assert torch.equal(first, again)
    assert not torch.allclose(first[0], first[1])
    # Independent, not merely different: with 80 degrees of freedom |r| > 0.6 has a probability below 1e-7.
    noise = (first - draw(model, active=False)).detach().flatten(1)
    assert abs(torch.corrcoef(noise)[0, 1].item()) < 0.6


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_former_state_returns(error):
    model = encoder()
    model.second.stoch.sampling = False
    before = state(model)
    try:
        with ba.sampling(model, True, seed=1, sample_index=2, batch_ids=torch.arange(4)):
            inside = state(model)
            with ba.sampling(model, False):
                assert state(model) == [False, None, 0, None] * 2
            assert all(a is b for a, b in zip(state(model), inside, strict=True))
            if error:
                raise error
    except (ValueError, KeyboardInterrupt):
        assert error
    assert state(model) == before == [None, None, 0, None, False, None, 0, None]


def test_nested_blocks_with_seeds_take_turns():
    model = encoder()
    first, second = draw(model, seed=1), draw(model, seed=2)
    with ba.sampling(model, True, seed=1):
        assert torch.equal(model(X), first)
        assert torch.equal(draw(model, seed=2), second)
        assert torch.equal(model(X), first)
        with pytest.raises(ZeroDivisionError), ba.sampling(model, False):
            _ = 1 / 0
        assert torch.equal(model(X), first)


def test_a_part_may_sample_alone():
    torch.manual_seed(0)
    model = Outer(Shared(attention()), attention(4)).double().eval()
    mean = model(X)
    with ba.sampling(model.last, True, seed=0):
        assert model.inner.layer.stoch.sampling is None
        first = model(X)
        assert torch.equal(model(X), first)
    assert not torch.allclose(first, mean)
    assert torch.equal(model(X), mean)


def test_softmax_draws_nothing():
    torch.manual_seed(0)
    model = Encoder(ba.Softmax(), ba.Softmax()).double()
    assert torch.equal(draw(model, seed=0), draw(model, active=False))


def test_a_model_without_stochastic_attention_runs_as_it_is():
    model = nn.Linear(8, 2).double()
    with ba.sampling(model, True, seed=0):
        torch.testing.assert_close(model(X), X @ model.weight.T + model.bias)


@pytest.mark.parametrize(
    "arguments", [{"sample_index": 1}, {"sample_index": torch.tensor(0)}, {"batch_ids": torch.arange(4)}]
)
def test_noise_addresses_without_a_seed_are_refused(arguments):
    model = encoder()
    with pytest.raises(ValueError, match=r"sample_index, batch_ids: .* give the seed too"):
        draw(model, **arguments)
    assert state(model) == [None, None, 0, None] * 2


@pytest.mark.parametrize("seed", ["abc", 2.5, True, -(2**63) - 1])
def test_a_wrong_seed_is_named_and_changes_nothing(seed):
    model = encoder()
    with pytest.raises(ValueError, match="seed must be a whole number"):
        draw(model, active=False, seed=seed)
    assert state(model) == [None, None, 0, None] * 2


def test_a_seed_of_more_than_64_bits_changes_nothing():
    model = encoder()
    with pytest.raises(ValueError, match="at most 64 bits"):
        draw(model, active=False, seed=2**64)
    assert state(model) == [None, None, 0, None] * 2


def test_identities_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="batch_ids: 3 identities cannot be spread"):
        draw(encoder(), seed=0, batch_ids=torch.arange(3))
