"""The Triton kernels against the reference in float64: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import bayesian_attention.engine.noise as noise
from bayesian_attention.engine import blockwise, reference
from bayesian_attention.engine.elementwise import FAMILIES
from bayesian_attention.engine.rows import DenseRows, NoiseAddress
from tests.engine.inputs import randn, random_mask
from tests.engine.interpreter import DEVICE, interpreted

triton = pytest.importorskip("triton", reason="triton is not installed")
tl = triton.language


# Tensors on the CPU are for the interpreter alone.
@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with interpreted():
        yield


with interpreted():
    from bayesian_attention.engine import triton_kernel, triton_noise

    @triton.jit
    def _noise_kernel(first, second, bits, uniforms, draws, keys, family: tl.constexpr, block: tl.constexpr):
        row = tl.program_id(0)
        columns = tl.arange(0, block)
        own = tl.load(keys + columns)
        words = triton_noise.key_words(own)
        row_first = tl.load(first + row).to(tl.uint32, bitcast=True)
        row_second = tl.load(second + row).to(tl.uint32, bitcast=True)
        random = triton_noise.random_bits(row_first, row_second, words)
        tl.store(bits + row * block + columns, random.to(tl.int32, bitcast=True))
        tl.store(uniforms + row * block + columns, triton_noise.uniform(random))
        draw = triton_noise.unit_noise(row_first, row_second, words, family, False)
        tl.store(draws + row * block + columns, draw)

    @triton.jit
    def _transform_kernel(u, draws, exponentials, block: tl.constexpr):
        columns = tl.program_id(0) * block + tl.arange(0, block)
        x = tl.load(u + columns)
        draw = triton_noise.normal_quantile(x)
        tl.store(draws + columns, draw)
        y = 2.0 * x - 1.0
        # 4u(1 − u) is 1 − y² without the fused multiply and add that the interpreter lacks.
        half = triton_noise.half_normal_quantile(y, tl.log2(4.0 * x * (1.0 - x)))
        tl.store(exponentials + columns, half)


SPREAD = {"weibull": (2.0, 0.5, 9.0, 1.0), "lognormal": (0.7, 0.1, 2.0, 1.0), "softmax": (1.0,) * 4}
TILE = (16, 16)


class Case:
    """An attention call: the kernels in ``dtype``, the reference in float64 with the same inputs."""

    def __init__(
        self,
        queries: int = 17,
        keys: int = 33,
        *,
        family: str = "weibull",
        batch: int = 1,
        heads: int = 2,
        key_heads: int | None = None,
        features: int = 16,
        values: int | None = None,
        draws: int = 1,
        mask: Tensor | None = None,
        is_causal: bool = False,
        offset: int = 0,
        dtype: torch.dtype = torch.float32,
        blocks: tuple[int, int] | None = TILE,
        size: float = 1.0,
    ) -> None:
        key_heads = key_heads or heads
        self.query = (size * randn(batch, heads, queries, features, seed=1)).to(DEVICE, dtype)
        self.key = randn(batch, key_heads, keys, features, seed=2).to(DEVICE, dtype)
        self.value = randn(batch, key_heads, keys, features if values is None else values, seed=3).to(DEVICE, dtype)
        self.spread = torch.tensor(SPREAD[family][:heads], device=DEVICE)
        self.family, self.draws, self.offset = family, draws, offset
        self.mask = None if mask is None else mask.to(DEVICE)
        self.blocks = blocks
        self.settings = {
            "family": family,
            "scale": 1 / math.sqrt(max(features, 1)),
            "is_causal": is_causal,
            "query_offset": offset,
        }
        self.first = self.second = None
        if family != "softmax":
            words = [
                DenseRows(None, offset).words(NoiseAddress(5, draw), self.query.shape[:-1], DEVICE)
                for draw in range(draws)
            ]
            self.first = torch.stack([word.first for word in words])
            self.second = torch.stack([word.second for word in words])
        self.grad_output = randn(draws, *self.query.shape[:-1], self.value.shape[-1], seed=4).to(DEVICE, dtype)
        self.grad_lse: Tensor | None = randn(*self.query.shape[:-1], seed=5).to(DEVICE, torch.float32)

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        return self.query, self.key, self.value, self.first, self.second, self.spread, self.mask

    def run(self) -> dict[str, Tensor | None]:
        """Outputs and gradients of the kernels."""
        output, lse, state = triton_kernel.forward(*self.inputs, **self.settings, blocks=self.blocks)
        assert output.dtype == self.value.dtype
        assert lse.dtype == state.dtype == torch.float32
        assert state.shape == (2 + self.draws, *lse.shape)
        grads = triton_kernel.backward(
            self.grad_output, self.grad_lse, *self.inputs, output, state, **self.settings, blocks=self.blocks,
            mask_grad=self.float_mask, spread_grad=self.family != "softmax",
        )  # fmt: skip
        for grad, x in zip(grads, (self.query, self.key, self.value, self.spread, self.mask), strict=True):
            assert grad is None or (grad.dtype, grad.shape) == (x.dtype, x.shape)
        return {"output": output, "lse": lse} | dict(zip(GRADS, grads, strict=True))

    @property
    def float_mask(self) -> bool:
        return self.mask is not None and self.mask.dtype != torch.bool

    def expected(self) -> dict[str, Tensor | None]:
        """The same from the reference, with gradients by autograd."""
        query, key, value, spread = (
            x.double().requires_grad_() for x in (self.query, self.key, self.value, self.spread)
        )
        mask = self.mask.double().requires_grad_() if self.float_mask else self.mask
        logits, rows = reference.dense_logits(
            query, key, mask=mask, is_causal=self.settings["is_causal"], scale=self.settings["scale"],
            query_offset=self.offset,
        )  # fmt: skip
        values = value.repeat_interleave(query.shape[1] // key.shape[1], 1)
        output = torch.stack(
            [
                reference.log_weights(logits, rows, FAMILIES[self.family], spread, NoiseAddress(5, draw)).exp() @ values
                for draw in range(self.draws)
            ]
        )
        lse = rows.log_sum_exp(logits).squeeze(-1)
        loss = (output * self.grad_output.double()).sum()
        if self.grad_lse is not None:
            loss = loss + (lse.masked_fill(lse == -math.inf, 0.0) * self.grad_lse.double()).sum()
        leaves = (query, key, value, spread, *((mask,) if self.float_mask else ()))
        grads = list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
        if self.family == "softmax":
            grads[3] = None
        grads += [None] * (5 - len(grads))
        return {"output": output.detach(), "lse": lse.detach()} | dict(zip(GRADS, grads, strict=True))


GRADS = ("query", "key", "value", "spread", "mask")


def close(name: str, ours: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    """Relative to the largest entry, −∞ and NaN where expected."""
    if expected is None:
        assert ours is None, name
        return
    expected = expected.double()
    finite = expected[torch.isfinite(expected)]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    torch.testing.assert_close(
        ours.double(),
        expected,
        rtol=0,
        atol=tolerance * max(size, 1e-3),
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )


def check(case: Case, output: float = 1e-5, gradient: float = 1e-4) -> None:
    ours, expected = case.run(), case.expected()
    for name, value in expected.items():
        close(name, ours[name], value, gradient if name in GRADS else output)


# The noise.


@pytest.mark.parametrize("family", ["weibull", "lognormal"])
def test_noise_bits_and_uniforms_are_those_of_the_noise_module(family: str) -> None:
    rows = DenseRows(None, 2**31 - 40).words(NoiseAddress(-7, 3), (4, 16), DEVICE).view(64)
    keys = torch.cat([torch.arange(112), 2**31 - 1 - torch.arange(16)]).to(DEVICE, torch.int32)
    bits = torch.empty(64, 128, dtype=torch.int32, device=DEVICE)
    uniforms, draws = (torch.empty(64, 128, device=DEVICE) for _ in range(2))
    _noise_kernel[(64,)](rows.first, rows.second, bits, uniforms, draws, keys, family, 128)
    expected = noise.bits(rows.view(64, 1), noise.key_words(keys))
    assert torch.equal(bits, expected)
    assert torch.equal(uniforms, noise.uniform(expected))
    exact = FAMILIES[family].log_noise(noise.uniform(expected, torch.float64), 1.0)
    torch.testing.assert_close(draws.double() * math.log(2), exact, rtol=2e-6, atol=2e-6)


def test_normal_quantiles_over_the_whole_range() -> None:
    last = 2**23
    middle = torch.arange(last // 2 - 2048, last // 2 + 2048)
    numbers = torch.cat([torch.arange(4096), middle, last - 1 - torch.arange(4096), torch.arange(0, last, 1024)])
    u = ((numbers.double() + 0.5) / last).to(DEVICE)
    precise, half = (torch.empty(len(u), device=DEVICE) for _ in range(2))
    _transform_kernel[(len(u) // 4096,)](u.float(), precise, half, 4096)
    exact = torch.special.ndtri(u)
    torch.testing.assert_close(precise.double(), exact, rtol=2e-6, atol=0)
    torch.testing.assert_close(half.double() * math.log(2), exact, rtol=2e-5, atol=0)


# Against the reference in float64.


@pytest.mark.parametrize("family", ["weibull", "lognormal", "softmax"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 65), (15, 17), (17, 15), (65, 16)])
def test_lengths(family: str, queries: int, keys: int) -> None:
    check(Case(queries, keys, family=family, heads=1))


@pytest.mark.parametrize("family", ["weibull", "lognormal", "softmax"])
def test_causal_with_several_draws_grouped_queries_and_a_mask(family: str) -> None:
    check(
        Case(
            18, 20, family=family, heads=4, key_heads=2, draws=1 if family == "softmax" else 2, is_causal=True,
            offset=3, mask=random_mask(1, 1, 18, 20),
        )
    )  # fmt: skip


@pytest.mark.parametrize("offset", [-20, -3, 0, 15, 16, 10**12, -(10**12)])
def test_query_offsets(offset: int) -> None:
    check(Case(17, 33, heads=1, is_causal=True, offset=offset))


BROADCAST = [(1, 1, 1, 20), (2, 1, 1, 20), (2, 1, 18, 20), (2, 2, 18, 20), (1, 2, 18, 1), (1, 2, 1, 1), (1, 1, 18, 20)]


@pytest.mark.parametrize("shape", BROADCAST)
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_masks(kind: str, shape: tuple[int, ...]) -> None:
    mask = random_mask(*shape)
    if kind == "additive":
        masked = torch.tensor([-math.inf, torch.finfo(torch.float32).min, -1e4])
        mask = torch.where(mask, randn(*shape, seed=6).float(), masked[torch.arange(mask.numel()).view(shape) % 3])
    check(Case(18, 20, batch=2, mask=mask, is_causal=shape[1] == 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_of_the_mask(dtype: torch.dtype) -> None:
    mask = torch.where(random_mask(1, 1, 17, 33), randn(1, 1, 17, 33), torch.finfo(dtype).min).to(dtype)
    check(Case(mask=mask, heads=1), gradient=1e-2 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("family", ["weibull", "softmax"])
def test_rows_that_see_no_key_give_zeros_without_gradients(family: str) -> None:
    mask = random_mask(1, 1, 17, 33)
    mask[..., 5, :] = False
    case = Case(mask=torch.where(mask, 0.0, -math.inf), family=family, is_causal=True, offset=-2)
    check(case)
    ours = case.run()
    for row in (0, 1, 5):
        assert (ours["lse"][..., row] == -math.inf).all()
        assert (ours["output"][..., row, :] == 0).all()
        assert (ours["query"][..., row, :] == 0).all()
        assert (ours["mask"][..., row, :] == 0).all()


def test_nan_in_an_additive_mask_is_seen_in_the_output() -> None:
    mask = torch.zeros(1, 1, 17, 33)
    mask[..., 4, 20] = math.nan
    output = Case(mask=mask, heads=1).run()["output"]
    assert torch.isnan(output[..., 4, :]).all()
    assert not torch.isnan(output[..., :4, :]).any()


@pytest.mark.parametrize(("features", "values"), [(32, 64), (64, 32), (96, 96), (128, 24), (3, 5), (1, 16)])
def test_head_sizes(features: int, values: int) -> None:
    check(Case(16, 17, features=features, values=values, heads=1))


def test_tuned_tiles() -> None:
    check(Case(70, 90, heads=1, blocks=None, is_causal=True, offset=20))


def test_large_logits() -> None:
    # Logits of some ±1000: float32 has 6e-5 of them, which moves the weights, and the clean ones most.
    check(Case(size=300.0, heads=1, features=32), output=1e-3, gradient=5e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
@pytest.mark.parametrize("family", ["weibull", "lognormal"])
def test_half_precision(dtype: torch.dtype, tolerance: float, family: str) -> None:
    case = Case(dtype=dtype, family=family, heads=2, key_heads=1, draws=2)
    check(case, output=tolerance, gradient=2 * tolerance)


def test_mixed_dtypes() -> None:
    case = Case(heads=1)
    case.key, case.value = case.key.half(), case.value.bfloat16()
    case.grad_output = case.grad_output.bfloat16()
    check(case, output=1e-2, gradient=1e-2)


def test_strides() -> None:
    case = Case(18, 20, batch=2, draws=2, mask=random_mask(2, 1, 20, 18).transpose(2, 3))
    case.query = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    case.key = case.key.transpose(2, 3).contiguous().transpose(2, 3)
    case.value = torch.stack([case.value, case.value], dim=-1)[..., 1]
    case.grad_output = case.grad_output[:, :, :, :1, :1].expand(case.grad_output.shape)
    case.grad_lse = torch.ones((), device=DEVICE).expand(case.grad_lse.shape)
    check(case)


def test_expanded_keys_and_mask() -> None:
    case = Case(17, 20, batch=2, mask=randn(1, 1, 17, 20).float())
    case.key, case.mask = case.key[:, :1].expand(2, 2, -1, -1), case.mask.expand(2, 2, -1, -1)
    check(case)


@pytest.mark.parametrize("family", ["weibull", "softmax"])
def test_without_a_gradient_of_the_log_sum_exp(family: str) -> None:
    case = Case(family=family)
    case.grad_lse = None
    check(case)


# Against itself and the blockwise backend.


@pytest.mark.parametrize("family", ["weibull", "lognormal"])
def test_each_of_several_draws_is_that_draw_alone(family: str) -> None:
    case = Case(family=family, draws=3, is_causal=True, offset=9)
    together, lse, _ = triton_kernel.forward(*case.inputs, **case.settings, blocks=TILE)
    first, second = case.first, case.second
    for draw in range(3):
        case.first, case.second = first[draw : draw + 1], second[draw : draw + 1]
        alone, own_lse, _ = triton_kernel.forward(*case.inputs, **case.settings, blocks=TILE)
        assert torch.equal(together[draw : draw + 1], alone)
        assert torch.equal(lse, own_lse)


def test_two_runs_give_the_same_bits() -> None:
    case = Case(draws=2, mask=randn(1, 1, 1, 33).float())
    first, second = case.run(), case.run()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("blocks", [(32, 16), (16, 32)])
def test_tiles_change_nothing_but_rounding(blocks: tuple[int, int]) -> None:
    check(Case(33, 40, heads=1, blocks=blocks, is_causal=True, offset=5, mask=random_mask(1, 1, 1, 40)))


def test_blockwise_gives_the_same() -> None:
    case = Case(draws=2, heads=2, key_heads=1, mask=random_mask(1, 2, 17, 33), is_causal=True, offset=20)
    output, lse, state = blockwise.forward(*case.inputs, **case.settings)
    grads = blockwise.backward(
        case.grad_output, case.grad_lse, *case.inputs, output, state, **case.settings, mask_grad=False,
        spread_grad=True,
    )  # fmt: skip
    ours = case.run()
    for name, expected in zip(("output", "lse", *GRADS), (output, lse, *grads), strict=True):
        close(name, ours[name], expected, 1e-5)


# Limits.


@pytest.mark.parametrize("sizes", [{"keys": 0}, {"queries": 0}, {"batch": 0}, {"values": 0}, {"features": 0}])
@pytest.mark.parametrize("family", ["weibull", "softmax"])
def test_sizes_of_zero(sizes: dict[str, int], family: str) -> None:
    shape = (1, 1, 1, sizes.get("keys", 33))
    check(Case(**{"queries": 17, "keys": 33, "heads": 1, "family": family, "mask": torch.zeros(shape), **sizes}))


def test_heads_that_are_too_wide_are_refused() -> None:
    case = Case(features=257, heads=1)
    with pytest.raises(NotImplementedError, match="up to 256 features a head; got 257"):
        triton_kernel.forward(*case.inputs, **case.settings)


def test_float64_is_refused() -> None:
    case = Case(dtype=torch.float64, heads=1)
    with pytest.raises(NotImplementedError, match="float64"):
        triton_kernel.forward(*case.inputs, **case.settings)
