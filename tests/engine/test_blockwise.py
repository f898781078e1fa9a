"""Blocks of any size, any number of threads, compiled loops or tensor operations: one and the same attention."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bayesian_attention.engine import attend, blockwise, native
from bayesian_attention.engine.rows import DenseRows, NoiseAddress
from bayesian_attention.posteriors import LogNormal, Softmax, Weibull
from tests.engine.inputs import qkv, randn, random_mask

with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    COMPILED = [False] if native.library() is None else [False, True]

SPREAD = {"weibull": 2.0, "lognormal": 0.7, "softmax": 1.0}
#: Entries of a block, from blocks as small as they get to one for all, and threads.
BLOCKS = [(1, 1), (300, 2), (1 << 20, 1)]
OPTIONS: dict[str, Any] = {"scale": 0.4, "is_causal": False, "query_offset": 0}


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def arguments(
    family: str, q: Tensor, k: Tensor, v: Tensor, draws: int = 1, query_offset: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Positional arguments of forward up to the spread."""
    first = second = None
    if family != "softmax":
        rows = DenseRows(query_offset=query_offset)
        words = [rows.words(NoiseAddress(5, draw), q.shape[:-1], q.device) for draw in range(draws)]
        first, second = torch.stack([w.first for w in words]), torch.stack([w.second for w in words])
    return (
        q,
        k,
        v,
        first,
        second,
        torch.full((q.shape[1],), SPREAD[family], dtype=torch.promote_types(q.dtype, torch.float32)),
    )


def both_passes(
    args: tuple[Any, ...], mask: Tensor | None, *, spread_grad: bool = True, **options: Any
) -> dict[str, Tensor | None]:
    """What forward and backward give for fixed gradients."""
    settings = {**OPTIONS, **options}
    output, lse, state = blockwise.forward(*args, mask, **settings)
    grads = blockwise.backward(
        randn(*output.shape, seed=31, dtype=output.dtype),
        randn(*lse.shape, seed=32, dtype=lse.dtype),
        *args,
        mask,
        output,
        state,
        mask_grad=mask is not None and mask.dtype != torch.bool,
        spread_grad=spread_grad,
        **settings,
    )
    return dict(zip(("output", "lse", "query", "key", "value", "spread", "mask"), (output, lse, *grads), strict=True))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "one head": {"heads": 1},
    "many keys": {"queries": 3, "keys": 300},
    "many queries": {"queries": 300, "keys": 3},
    "batch of five": {"batch": (5,), "heads": 6, "kv_heads": 3},
    "one key": {"keys": 1},
    "causal": {"options": {"is_causal": True, "query_offset": 2}, "queries": 150, "keys": 140},
    "rows that see nothing": {"options": {"is_causal": True, "query_offset": -70}, "queries": 150, "keys": 150},
}


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("family", SPREAD)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mask", ["none", "boolean", "additive"])
def test_block_sizes_threads_and_loops_agree(family, case, mask):
    """Outputs to 1e-5, gradients to 1e-4 of the largest, of the float64 tensor operations in one block."""
    shape = {name: x for name, x in CASES[case].items() if name != "options"}
    options = {"family": family, **CASES[case].get("options", {})}
    q, k, v = qkv(**{"batch": (2,), **shape}, dtype=torch.float32)
    size = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    additive = randn(1, size[1], 1, size[3], dtype=torch.float32)
    bias = {"none": None, "boolean": random_mask(*size), "additive": additive}[mask]
    args = arguments(family, q, k, v, 1, options.get("query_offset", 0))
    *wide, wide_bias = (x.double() if x is not None and x.is_floating_point() else x for x in (*args, bias))
    expected = both_passes(tuple(wide), wide_bias, compiled=False, block_entries=1 << 30, **options)
    for compiled, (block_entries, threads) in product(COMPILED, BLOCKS):
        torch.set_num_threads(threads)
        ours = both_passes(args, bias, compiled=compiled, block_entries=block_entries, **options)
        for name, x in ours.items():
            if x is None:
                assert expected[name] is None
                continue
            largest = max(1.0, float(expected[name].nan_to_num(neginf=0.0).abs().max()))
            bound = (1e-5 if name in ("output", "lse") else 1e-4) * largest
            torch.testing.assert_close(
                x.double(), expected[name], rtol=0, atol=bound, msg=f"{name}, {compiled=}, {block_entries=}"
            )


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("family", ["weibull", "lognormal"])
def test_the_same_noise_to_the_last_bit(family):
    """With logits of 0 and the identity for values the output is the weights, which then hold nothing but noise."""
    q, v = torch.zeros(2, 3, 150, 4), torch.eye(150).expand(2, 3, -1, -1)
    args = arguments(family, q, q, v)
    for compiled in COMPILED:
        drawn = []
        for block_entries, threads in BLOCKS:
            torch.set_num_threads(threads)
            options = {**OPTIONS, "family": family, "compiled": compiled, "block_entries": block_entries}
            drawn.append(blockwise.forward(*args, None, **options)[0])
        assert all(torch.equal(x, drawn[0]) for x in drawn)
        posterior = Weibull(2.0) if family == "weibull" else LogNormal(0.7)
        expected = attend(q.double(), q.double(), v.double(), posterior, seed=5, backend="reference").output
        torch.testing.assert_close(drawn[0][0].double(), expected, rtol=3e-6, atol=0)


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("family", ["weibull", "lognormal"])
def test_draws_in_one_call_are_the_separate_ones_and_their_gradients_add(family, compiled):
    q, k, v = qkv(queries=40, keys=50, dtype=torch.float32)
    args = arguments(family, q, k, v, draws=3)
    mask = randn(2, 1, 40, 50, dtype=torch.float32)
    options = {**OPTIONS, "family": family, "compiled": compiled}
    output, lse, state = blockwise.forward(*args, mask, **options)
    grad_output, grad_lse = randn(*output.shape, dtype=torch.float32), randn(*lse.shape, dtype=torch.float32)
    flags = {"mask_grad": True, "spread_grad": True}
    grads = blockwise.backward(grad_output, grad_lse, *args, mask, output, state, **options, **flags)
    totals = [torch.zeros_like(x) for x in grads]
    for draw in range(3):
        one = (*args[:3], args[3][draw : draw + 1], args[4][draw : draw + 1], args[5])
        alone, alone_lse, alone_state = blockwise.forward(*one, mask, **options)
        assert torch.equal(alone[0], output[draw])
        assert torch.equal(alone_lse, lse)
        parts = blockwise.backward(
            grad_output[draw : draw + 1],
            grad_lse if draw == 0 else None,
            *one,
            mask,
            alone,
            alone_state,
            **options,
            **flags,
        )
        totals = [total + part for total, part in zip(totals, parts, strict=True)]
    for ours, total in zip(grads, totals, strict=True):
        torch.testing.assert_close(ours, total, rtol=1e-5, atol=1e-5 * float(total.abs().max()))


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            # What is expanded shares its memory.
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("mask", [False, True])
def test_nothing_of_the_size_queries_times_keys_is_made(compiled, mask):
    length = 4096
    q, k, v = qkv(batch=(1,), heads=2, queries=length, keys=length, dtype=torch.float32)
    bias = randn(1, 1, 1, length, dtype=torch.float32) if mask else None
    with LargestTensor() as largest:
        both_passes(arguments("weibull", q, k, v), bias, family="weibull", compiled=compiled)
    assert largest.elements <= 2 * blockwise.BLOCK_ENTRIES
    assert largest.elements < length * length / 8


@pytest.mark.parametrize(
    "sizes", [{"queries": 0}, {"keys": 0}, {"batch": (0,)}, {"features": 0}, {"values": 0}], ids=str
)
@pytest.mark.parametrize("family", SPREAD)
def test_empty_dimensions(sizes, family):
    q, k, v = qkv(**{"batch": (2,), **sizes}, dtype=torch.float32)
    for compiled in COMPILED:
        ours = both_passes(arguments(family, q, k, v), None, family=family, compiled=compiled)
        for name, like in (("query", q), ("key", k), ("value", v)):
            assert ours[name].shape == like.shape
        assert not ours["output"].any() or "features" in sizes
        if "keys" in sizes:
            assert bool(ours["lse"].isneginf().all())


def test_compiled_loops_are_refused_where_they_do_not_work():
    q, k, v = qkv(dtype=torch.float64)
    with pytest.raises(ValueError, match="compiled: needs float32"):
        blockwise.forward(
            *arguments("softmax", q, k, v),
            None,
            family="softmax",
            scale=1.0,
            is_causal=False,
            query_offset=0,
            compiled=True,
        )


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_stays_in_its_row(compiled, bad):
    q, k, v = qkv(dtype=torch.float32)
    q = q.clone()
    q[0, 0, 2, 0] = bad
    output, lse, _ = blockwise.forward(
        *arguments("weibull", q, k, v),
        None,
        family="weibull",
        scale=1.0,
        is_causal=False,
        query_offset=0,
        compiled=compiled,
    )
    assert bool(output[0, 0, 0, 2].isnan().all())
    assert not bool(lse[0, 0, 2].isfinite())
    output[0, 0, 0, 2] = 0.0
    assert bool(output.isfinite().all())


def test_softmax_of_attend_is_that_of_pytorch_at_length():
    q, k, v = qkv(batch=(1,), heads=2, queries=700, keys=900, features=16, values=16, dtype=torch.float32)
    ours = attend(q, k, v, Softmax(), backend="blockwise").output
    torch.testing.assert_close(ours, torch.nn.functional.scaled_dot_product_attention(q, k, v), rtol=1e-5, atol=1e-5)
