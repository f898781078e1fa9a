import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bayesian_attention.divergences import has_linear_form, key_mask, linear_divergence
from bayesian_attention.posteriors import LogNormal, Softmax, Weibull
from bayesian_attention.priors import ConstantPrior, ContextualPrior
from bayesian_attention.priors.constant import ConstantPriorModule
from tests.divergences.linear_cases import PAIRS, Call, call, compare, log_sum_exp, padding

MASKS = ["none", "padding", "bias", "padding and bias", "queries"]


def masked(kind: str, queries: int, keys: int) -> dict[str, Any]:
    """Arguments; with padding one batch row has few valid keys, the last ones, so that causal rows see none."""
    generator = torch.Generator().manual_seed(3)
    result: dict[str, Any] = {}
    if "padding" in kind:
        result["valid"] = padding(keys)
        result["valid"][1, :, : keys // 2] = False
    if "bias" in kind:
        result["bias"] = torch.randn(2, 1, keys, generator=generator, dtype=torch.float64)
    if kind == "queries":
        result["valid"] = padding(keys)
        result["query_valid"] = torch.rand(2, 1, queries, generator=generator) < 0.6
    return result


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_query_sees_every_key(pair, mask):
    for queries, keys in [(7, 7), (31, 200), (200, 33)]:
        compare(call(pair, queries, keys, **masked(mask, queries, keys)))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pair", PAIRS)
def test_causal(pair, mask):
    """From offsets at which no query sees a key to those at which every query sees all."""
    for queries, keys, offsets in [
        (65, 65, (-100, -3, 1, 100)),
        (33, 100, (0, 67, 99)),
        (100, 33, (-67, 5)),
    ]:
        for offset in offsets:
            arguments = masked(mask, queries, keys)
            compare(call(pair, queries, keys, is_causal=True, query_offset=offset, **arguments))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65, 200])
@pytest.mark.parametrize("pair", PAIRS)
def test_lengths_about_the_sizes_of_blocks(pair, length):
    compare(call(pair, length, length, is_causal=True))
    compare(call(pair, length, length))
    compare(call(pair, length, 2 * length, is_causal=True, query_offset=length))


@pytest.mark.parametrize("pair", PAIRS)
def test_grouped_queries_and_a_spread_a_head(pair):
    spread = torch.tensor([0.4, 0.9, 1.7, 3.0], dtype=torch.float64)
    for causal in (False, True):
        compare(call(pair, 40, 40, heads=4, kv_heads=2, spread=spread, is_causal=causal, scale=-0.3))
        compare(call(pair, 40, 40, heads=4, kv_heads=1, spread=spread, is_causal=causal, valid=padding(40)))


@pytest.mark.parametrize("batch", [(), (2, 3), (0,)])
@pytest.mark.parametrize("pair", PAIRS)
def test_leading_dimensions(pair, batch):
    for causal in (False, True):
        compare(call(pair, 5, 9, batch=batch, is_causal=causal, query_offset=4))
        compare(call(pair, 9, 5, batch=batch, features=1, is_causal=causal))


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("pair", PAIRS)
def test_without_a_query_or_a_key_it_is_zero_and_differentiable(pair, queries, keys):
    for causal in (False, True):
        one = call(pair, queries, keys, is_causal=causal)
        compare(one)
        assert one.linear().total.item() == one.linear().entries.item() == one.linear().mean.item() == 0


@pytest.mark.parametrize("pair", PAIRS)
def test_rows_without_a_valid_key_do_not_count(pair):
    valid = padding(40)
    valid[0] = False
    for causal in (False, True):
        compare(call(pair, 40, 40, valid=valid, is_causal=causal))
        compare(call(pair, 40, 40, valid=torch.zeros(40, dtype=torch.bool), is_causal=causal))


@pytest.mark.parametrize("pair", PAIRS)
def test_masks_broadcast(pair):
    for shape in [(30,), (2, 30), (2, 1, 30), (2, 2, 30), (2, 1, 1)]:
        valid = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.7
        for causal in (False, True):
            compare(
                call(pair, 30, 30, valid=valid, bias=torch.linspace(-1, 1, 30, dtype=torch.float64), is_causal=causal)
            )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_gradcheck(pair, causal):
    for length in (4, 70):
        bias = torch.linspace(-1, 1, length, dtype=torch.float64)
        one = call(pair, length, length, batch=(), features=2, bias=bias, valid=padding(length)[0], is_causal=causal)
        lse = log_sum_exp(*one.logits()).detach().requires_grad_()

        def total(query: Tensor, key: Tensor, lse: Tensor, spread: Tensor, bias: Tensor, one: Call = one) -> Tensor:
            return replace(one, query=query, key=key, spread=spread, bias=bias).linear(lse).total

        inputs = (one.query, one.key, lse, one.spread, one.bias)
        assert torch.autograd.gradcheck(total, inputs, fast_mode=length > 10)


SITUATIONS = ["plain", "nearly the same keys", "a large common offset", "large logits", "unused features", "outliers"]


def in_situation(one: Call, kind: str) -> Call:
    query, key, features = one.query.detach(), one.key.detach(), one.key.shape[-1]
    generator = torch.Generator().manual_seed(9)
    first = torch.arange(features) < features // 2
    if kind == "nearly the same keys":
        key = key[..., :1, :] + 1e-3 * key
    if kind == "a large common offset":
        key = key + 100 * torch.randn((*key.shape[:-2], 1, features), generator=generator, dtype=key.dtype)
    if kind == "large logits":
        query = query * (1e4 / one.logits()[0].abs().max().item())
    if kind == "unused features":
        query, key = query * torch.where(first, 1.0, 1e-3), key * torch.where(first, 1e-3, 1.0)
    if kind == "outliers":
        query, key = query - 20.0 * (torch.arange(features) == 0), key + 50.0 * (torch.arange(features) == 0)
    return replace(one, query=query, key=key)


def errors(one: Call) -> dict[str, tuple[float, float, float]]:
    """Of a float32 call: relative errors against float64, of the linear form and of the sum over entries, and room.

    Of each gradient by its norm. The linear form is given a rounded log-sum-exp, and takes the weights of a row
    to sum to 1 where they do so up to that rounding: what this leaves of keys that share an offset is room of
    the gradient by the query.
    """
    exact = one.to(torch.float64)
    totals = [call.total for call in (exact.dense(), one.linear(), one.dense())]
    assert totals[1].dtype == torch.float32
    gradients = [call.gradients(total) for call, total in zip((exact, one, one), totals, strict=True)]
    key = exact.key.norm(dim=-1).max() / math.sqrt(exact.key.shape[-1])
    unsummed = 2.0**-22 * key * (1 + log_sum_exp(*exact.logits()).abs().max()) * math.sqrt(exact.query[..., 0].numel())
    result = {"total": (*(abs((x / totals[0]).item() - 1) for x in totals[1:]), 5e-7)}
    for name, expected in gradients[0].items():
        size = expected.norm().item() or 1.0
        room = 2e-6 + (unsummed.item() / size if name == "query" else 0.0)
        result[name] = (*((x[name] - expected).norm().item() / size for x in gradients[1:]), room)
    return result


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("pair", PAIRS)
def test_float32_is_as_precise_as_the_sum_over_entries(pair, situation, causal):
    """On the mean of three calls the errors are at most 5 times those of the sum over entries, plus some room.

    The room is 5e-7 of the total and 2e-6 of a gradient. The gradients of a prior's network may vanish, all keys
    alike; they are left out where the sum over entries has no digit of them.
    """
    settings = {"features": 32, "batch": (), "heads": 1, "kv_heads": 1, "is_causal": causal}
    # Numbers of float32, so that both precisions see the same.
    found = [
        errors(in_situation(call(pair, 270, 270, seed=seed, **settings), situation).to(torch.float32))
        for seed in range(3)
    ]
    for name in found[0]:
        linear, dense, room = (sum(each[name][i] for each in found) / len(found) for i in range(3))
        assert linear <= 5 * dense + room or dense > 0.1, name


@pytest.mark.parametrize("pair", PAIRS)
def test_no_tensor_grows_with_the_number_of_entries(pair):
    """Nor faster than the inputs: 8192 queries and keys, of which each tensor has at most 128 numbers."""
    length = 8192
    posterior, spec = PAIRS[pair]
    prior = spec.build(posterior.prior_family, 1, 16)
    query, key = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(2))
    lse = torch.zeros(1, 1, length, requires_grad=True)
    for causal in (False, True):
        with _Largest() as mode:
            divergence = linear_divergence(posterior, posterior.parameter, prior, query, key, lse, is_causal=causal)
            torch.autograd.grad(divergence.total, (query, key, lse))
        assert query.numel() <= mode.largest <= 128 * length


class _Largest(TorchDispatchMode):
    """The size of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.untyped_storage().nbytes() // each.element_size())
        return result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pair", ["weibull-contextual", "lognormal-learned"])
def test_narrow_inputs_are_computed_in_float32(pair, dtype):
    one = call(pair, 40, 40, dtype=torch.float32).to(dtype)
    wide = one.to(torch.float32)
    lse = log_sum_exp(*wide.logits()).detach()
    with torch.autocast("cpu", torch.bfloat16):
        narrow = replace(one, prior=wide.prior, spread=wide.spread).linear(lse)
    assert narrow.total.dtype == torch.float32
    torch.testing.assert_close(narrow.total, wide.linear(lse).total)
    (gradient,) = torch.autograd.grad(narrow.total, one.query)
    assert gradient.dtype == dtype


def test_layouts_of_memory_do_not_matter():
    """Queries and keys as a projection leaves them, (batch, length, heads, features)."""
    for pair in PAIRS:
        one = call(pair, 70, 70, dtype=torch.float32)
        for causal in (False, True):
            plain = replace(one, is_causal=causal)
            strided = replace(plain, query=_strided(one.query), key=_strided(one.key))
            torch.testing.assert_close(strided.linear().total, plain.linear().total)


def _strided(x: Tensor) -> Tensor:
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


COMPILED = [
    ("weibull-constant", False),
    ("weibull-contextual", True),
    ("lognormal-contextual", True),
]


def functional(one: Call) -> tuple[Any, tuple[Tensor, ...]]:
    """The total as a function of queries, keys, log-sum-exp and valid keys, and values of these."""

    def total(query: Tensor, key: Tensor, lse: Tensor, valid: Tensor) -> Tensor:
        return replace(one, query=query, key=key, valid=valid).linear(lse).total

    assert one.valid is not None
    return total, (one.query.detach(), one.key.detach(), log_sum_exp(*one.logits()).detach(), one.valid)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_function_transforms(pair, causal):
    one = call(pair, 300, 300, batch=(3,), valid=padding(300, 3), dtype=torch.float32, spread=0.7, is_causal=causal)
    total, inputs = functional(one)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    expected = torch.autograd.grad(total(*leaves, inputs[3]), leaves)
    together = torch.func.grad(total, argnums=(0, 1, 2))(*inputs)
    apart = torch.vmap(torch.func.grad(total, argnums=(0, 1, 2)))(*inputs)
    for gradient, one_call, each in zip(expected, together, apart, strict=True):
        torch.testing.assert_close(one_call, gradient)
        torch.testing.assert_close(each, gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())
    torch.testing.assert_close(torch.vmap(total)(*inputs).sum(), total(*inputs))


@pytest.mark.parametrize(("pair", "causal"), COMPILED)
def test_compiles_in_one_graph(pair, causal):
    one = call(pair, 300, 300, batch=(1,), valid=padding(300, 1), dtype=torch.float32, spread=0.7, is_causal=causal)
    total, inputs = functional(one)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    torch.compiler.reset()
    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")(*leaves, inputs[3])
    expected = total(*leaves, inputs[3])
    torch.testing.assert_close(compiled, expected)
    gradients = zip(torch.autograd.grad(compiled, leaves), torch.autograd.grad(expected, leaves), strict=True)
    for found, gradient in gradients:
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(PAIRS)),
    st.integers(1, 80),
    st.integers(1, 80),
    st.integers(-90, 90),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_whatever_the_sizes_and_the_mask(pair, queries, keys, offset, causal, seed):
    valid = torch.rand(2, 1, keys, generator=torch.Generator().manual_seed(seed)) < 0.5
    arguments = {"is_causal": causal, "query_offset": offset, "valid": valid, "seed": seed}
    compare(call(pair, queries, keys, **arguments), rtol=1e-9)


def test_only_known_pairs_have_a_linear_form():
    class Subclass(ConstantPriorModule):
        pass

    class Narrower(Weibull):
        pass

    gamma, lognormal = ConstantPrior().build("gamma", 2, 4), ConstantPrior().build("lognormal", 2, 4)
    assert has_linear_form(Weibull(), gamma, is_causal=True)
    assert has_linear_form(LogNormal(), lognormal, is_causal=True)
    for posterior, prior in [
        (Weibull(), lognormal),
        (LogNormal(), gamma),
        (Softmax(), gamma),
        (Narrower(), gamma),
        (Weibull(), Subclass(ConstantPrior(), "gamma")),
    ]:
        assert not has_linear_form(posterior, prior, is_causal=False)
        query = torch.zeros(1, 2, 3, 4)
        assert linear_divergence(posterior, 1.0, prior, query, query, query[..., 0]) is None


@pytest.mark.parametrize(("rate", "known"), [(0.5, True), (1.0, True), (1.5, False)])
def test_a_causal_contextual_gamma_needs_a_rate_of_at_most_one(rate, known):
    prior = ContextualPrior(rate=rate).build("gamma", 2, 4)
    assert has_linear_form(Weibull(), prior, is_causal=True) == known
    assert has_linear_form(Weibull(), prior, is_causal=False)


def test_a_large_rate_of_a_contextual_gamma():
    one = call("weibull-contextual", 40, 40)
    prior = ContextualPrior(rate=7.5).build("gamma", 2, 5)
    compare(replace(one, prior=prior, valid=padding(40)).to(torch.float64))


def test_a_mask_over_the_keys_is_taken_apart():
    assert key_mask(None, -1e4) == (None, None)
    keys = torch.tensor([True, False, True])
    valid, bias = key_mask(keys, -1e4)
    assert torch.equal(valid, keys)
    assert bias is None
    additive = torch.tensor([0.5, -math.inf, -1e4, 3.0]).requires_grad_()
    valid, bias = key_mask(additive, -9e3)
    assert valid.tolist() == [True, False, False, True]
    assert bias.tolist() == [0.5, 0.0, 0.0, 3.0]
    (gradient,) = torch.autograd.grad(bias.sum(), additive)
    assert gradient.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_what_is_expanded_over_the_queries_is_a_mask_over_the_keys():
    keys = torch.rand(2, 1, 1, 6) < 0.5
    for mask in (keys, keys.expand(2, 3, 5, 6), keys.expand(2, 1, 5, 6)):
        valid, bias = key_mask(mask, -1e4)
        assert torch.equal(valid, keys.squeeze(-2).expand(valid.shape))
        assert bias is None
    assert key_mask(torch.ones(2, 1, 0, 6, dtype=torch.bool), -1e4) == (None, None)


def test_a_mask_of_its_own_for_each_query_is_none_over_the_keys():
    """Decided by strides: equal values do not count."""
    assert key_mask(torch.ones(5, 6, dtype=torch.bool), -1e4) is None
    assert key_mask(torch.zeros(2, 1, 5, 6), -1e4) is None
    assert key_mask(torch.rand(5, 1) < 0.5, -1e4) is None


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_key_mask_gives_what_the_mask_does(pair, additive):
    """Through the whole: a mask (batch, 1, 1, keys) as attention takes it."""
    keys = padding(30).unsqueeze(-2)
    mask = torch.zeros(keys.shape, dtype=torch.float64).masked_fill(~keys, -math.inf) if additive else keys
    valid, bias = key_mask(mask, -9e3)
    compare(call(pair, 30, 30, valid=valid, bias=bias))
