import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import bayesian_attention.engine.noise as noise
from bayesian_attention.engine import AttentionOutput, attend
from bayesian_attention.posteriors import LogNormal, Posterior, Softmax, Weibull
from tests.engine.inputs import FAMILIES, LEARNED, qkv, randn, random_mask

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def close(ours: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    tolerance = TOLERANCE[ours.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def reference(
    query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None = None, bias: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp in float64, row after row, only over the keys that are valid."""
    q, k, v = query.double(), key.double(), value.double()
    groups = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    logits = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1]) + bias
    valid = torch.ones_like(logits, dtype=torch.bool) if valid is None else valid.expand_as(logits)
    e = torch.where(valid, (logits - logits.masked_fill(~valid, -1e300).amax(-1, keepdim=True)).exp(), 0.0)
    total = e.sum(-1, keepdim=True)
    output = e / total.clamp(min=1e-300) @ v
    return output, torch.logsumexp(logits.masked_fill(~valid, -math.inf), -1)


# With sampling off: the attention of PyTorch.

SHAPES = [
    {},
    {"batch": ()},
    {"batch": (1,)},
    {"batch": (2, 3)},
    {"queries": 1},
    {"keys": 1},
    {"queries": 1, "keys": 1},
    {"features": 5, "values": 3},
    {"features": 1, "values": 1},
    {"heads": 1},
    {"queries": 9, "keys": 4},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["none", "boolean", "additive"])
def test_mean_is_scaled_dot_product_attention(kind, shape, dtype):
    q, k, v = qkv(**shape, dtype=dtype)
    size = (*q.shape[:-1], k.shape[-2])
    mask = {"none": None, "boolean": random_mask(*size), "additive": randn(*size, dtype=dtype)}[kind]
    output, lse = attend(q, k, v, Weibull(2.0), mask=mask, sample=False)
    close(output, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    valid, bias = (mask, 0.0) if kind == "boolean" else (None, 0.0 if mask is None else mask)
    close(lse, reference(q, k, v, valid, bias)[1].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("out", [-math.inf, "lowest", -1e4, -1e9])
def test_additive_masks_take_keys_out(out, dtype):
    q, k, v = qkv(dtype=dtype)
    valid = random_mask(2, 1, 5, 7)
    out = torch.finfo(dtype).min if out == "lowest" else out
    mask = randn(2, 1, 5, 7, dtype=dtype).masked_fill(~valid, out)
    output, lse = attend(q, k, v, Weibull(2.0), mask=mask, sample=False)
    close(output, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    close(lse, reference(q, k, v, valid, mask)[1].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("out", [-math.inf, "lowest", -1e4])
def test_additive_masks_take_whole_rows_out_in_every_dtype(out, dtype):
    # −1e4 is −9984 in bfloat16.
    q, k, v = qkv(dtype=dtype)
    mask = torch.zeros(5, 7, dtype=dtype)
    mask[2] = torch.finfo(dtype).min if out == "lowest" else out
    for sample in (False, True):
        output, lse = attend(q, k, v, Weibull(2.0), mask=mask, sample=sample, seed=1)
        assert bool((output[:, :, 2] == 0).all())
        assert bool(lse[:, :, 2].isneginf().all())
        assert bool((output[:, :, 3] != 0).any())


@pytest.mark.parametrize("mask_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_additive_masks_of_another_dtype(dtype, mask_dtype):
    q, k, v = qkv(dtype=dtype)
    mask = randn(5, 7, dtype=mask_dtype).masked_fill(~random_mask(5, 7), -math.inf)
    output, lse = attend(q, k, v, Weibull(2.0), mask=mask, sample=False)
    expected, expected_lse = reference(q, k, v, None, mask.double())
    assert output.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(output.double(), expected, {torch.bfloat16: 8e-3, torch.float32: 2e-6, torch.float64: 1e-12}[dtype])
    close(lse, expected_lse.to(lse.dtype), 2e-6)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 1), (5, 7), (4, 1, 7), (2, 1, 1, 7), (1, 4, 5, 7), (2, 4, 5, 7)])
def test_masks_broadcast(shape):
    q, k, v = qkv()
    mask = torch.ones(shape, dtype=torch.bool) if math.prod(shape) < 2 or shape == (5, 1) else random_mask(*shape)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(2, 4, 5, 7))
    close(attend(q, k, v, Weibull(2.0), mask=mask, sample=False).output, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_causal_attention_of_equal_lengths(dtype):
    q, k, v = qkv(queries=7, dtype=dtype)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    close(attend(q, k, v, Weibull(2.0), is_causal=True, sample=False).output, expected)


@pytest.mark.parametrize(("queries", "offset"), [(5, None), (5, 0), (5, 1), (1, None), (1, 3), (9, None), (9, 0)])
def test_causal_attention_with_an_offset(queries, offset):
    q, k, v = qkv(queries=queries)
    first = 7 - queries if offset is None else offset
    valid = torch.ones(queries, 7, dtype=torch.bool).tril(first)
    output, lse = attend(q, k, v, Weibull(2.0), is_causal=True, sample=False, query_offset=offset)
    close(output, reference(q, k, v, valid)[0])
    close(lse, reference(q, k, v, valid)[1])


def test_causal_and_padding_masks_combine():
    q, k, v = qkv(queries=7)
    padding = random_mask(2, 1, 1, 7)
    both = padding & torch.ones(7, 7, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=both)
    close(attend(q, k, v, Weibull(2.0), mask=padding, is_causal=True, sample=False).output, expected)
    additive = torch.zeros(2, 1, 1, 7, dtype=torch.float64).masked_fill(~padding, -math.inf)
    close(attend(q, k, v, Weibull(2.0), mask=additive, is_causal=True, sample=False).output, expected)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries(kv_heads):
    q, k, v = qkv(kv_heads=kv_heads, values=3)
    mask = random_mask(2, 4, 5, 7)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    close(attend(q, k, v, Weibull(2.0), mask=mask, sample=False).output, expected)
    # Heads of a group share keys, never noise.
    same = attend(q[:, :1].expand_as(q), k[:, :1], v[:, :1], Weibull(2.0), seed=1).output
    assert bool((same[:, 0] != same[:, 1]).all())


@pytest.mark.parametrize("posterior", [Weibull(2.0), Weibull(2.0, learned=True), LogNormal(0.5), Softmax()])
@pytest.mark.parametrize("scale", [None, 0.3, 1.0, 0.0])
def test_scale_and_mean_of_every_family(posterior, scale):
    q, k, v = qkv()
    expected = F.scaled_dot_product_attention(q, k, v, scale=scale)
    close(attend(q, k, v, posterior.build(4), scale=scale, sample=False).output, expected)


def test_softmax_takes_no_randomness():
    q, k, v = qkv()
    state = torch.get_rng_state()
    output, _ = attend(q, k, v, Softmax())
    attend(q, k, v, Weibull(2.0), sample=False)
    attend(q, k, v, Weibull(2.0), seed=3)
    assert torch.equal(state, torch.get_rng_state())
    close(output, F.scaled_dot_product_attention(q, k, v))
    assert torch.equal(attend(q, k, v, Softmax(), samples=3, seed=1).output, torch.stack([output] * 3))


@pytest.mark.parametrize("posterior", [Weibull(1e6), LogNormal(1e-6)])
def test_a_tight_posterior_is_deterministic_attention(posterior):
    q, k, v = qkv(dtype=torch.float32)
    close(attend(q, k, v, posterior, seed=1).output, F.scaled_dot_product_attention(q, k, v), 1e-4)


@pytest.mark.parametrize("sample", [False, True])
def test_strides_do_not_matter(sample):
    q, k, v = qkv()
    expected = attend(q, k, v, Weibull(2.0), sample=sample, seed=1)
    # (B, L, H, D) seen as (B, H, L, D), every second feature of a wider tensor, and an expanded mask.
    q2 = q.transpose(1, 2).contiguous().transpose(1, 2)
    k2 = k.repeat_interleave(2, -1)[..., ::2]
    v2 = v.mT.contiguous().mT
    assert not any(x.is_contiguous() for x in (q2, k2, v2))
    ours = attend(q2, k2, v2, Weibull(2.0), sample=sample, seed=1, mask=torch.ones((), dtype=torch.bool).expand(5, 7))
    close(ours.output, expected.output)
    close(ours.lse, expected.lse)


@pytest.mark.parametrize("size", [{"queries": 0}, {"batch": (0,)}, {"keys": 0}, {"values": 0}], ids=str)
@pytest.mark.parametrize("sample", [False, True])
def test_empty_dimensions(size, sample):
    q, k, v = (x.requires_grad_() for x in qkv(**size))
    output, lse = attend(q, k, v, Weibull(2.0), sample=sample, seed=1)
    assert output.shape == (*q.shape[:-1], v.shape[-1])
    assert lse.shape == q.shape[:-1]
    assert bool((output == 0).all())
    if k.shape[-2] == 0:
        assert bool(lse.isneginf().all())
    output.sum().backward()
    assert bool((q.grad == 0).all())


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("additive", [False, True])
def test_fully_masked_rows(additive, sample):
    q, k, v = (x.requires_grad_() for x in qkv())
    module = Weibull(2.0, learned=True).build(4)
    valid = random_mask(2, 1, 5, 7)
    valid[0, :, 1] = valid[1] = False
    mask = torch.zeros(valid.shape, dtype=torch.float64).masked_fill(~valid, -math.inf) if additive else valid
    output, lse = attend(q, k, v, module, mask=mask, sample=sample, seed=1)
    empty = ~valid.any(-1).expand(2, 4, 5)
    assert bool((output[empty] == 0).all())
    assert torch.equal(lse.isneginf(), empty)
    (output.sum() + lse[~empty].sum()).backward()
    assert bool((q.grad[empty] == 0).all())
    assert bool((q.grad[~empty] != 0).all())
    for x in (k, v):
        assert bool(x.grad.isfinite().all())
        assert bool((x.grad[1] == 0).all())
    if sample:
        assert bool(module.log_parameter.grad.isfinite().all())


# Half precision.


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@pytest.mark.parametrize("sample", [False, True])
def test_half_precision_rounds_only_the_output(dtype, tolerance, sample):
    q, k, v = qkv(queries=33, keys=65, features=16, values=16, dtype=dtype)
    mask = randn(2, 1, 33, 65, dtype=dtype)
    ours = attend(q, k, v, Weibull(2.0), mask=mask, sample=sample, seed=1)
    wide = attend(*(x.double() for x in (q, k, v)), Weibull(2.0), mask=mask.double(), sample=sample, seed=1)
    assert ours.output.dtype == dtype
    assert ours.lse.dtype == torch.float32
    # Half a unit in the last place of the output, and the rounding of float32 before it.
    torch.testing.assert_close(ours.output.double(), wide.output, rtol=tolerance, atol=1e-5)
    close(ours.lse.double(), wide.lse, 1e-5)


def test_value_decides_the_output_dtype():
    q, k, v = qkv(dtype=torch.float32)
    output, lse = attend(q.bfloat16(), k.bfloat16(), v, Weibull(2.0), seed=1)
    assert output.dtype == lse.dtype == torch.float32
    assert attend(q, k, v.half(), Weibull(2.0), seed=1).output.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype):
    q, k, v = qkv(dtype=torch.float32)
    plain = attend(q, k, v, Weibull(2.0), seed=1)
    with torch.autocast("cpu", dtype=dtype):
        ours = attend(q, k, v, Weibull(2.0), seed=1)
    assert ours.output.dtype == torch.float32
    assert torch.equal(ours.output, plain.output)
    assert torch.equal(ours.lse, plain.lse)


def test_large_logits_in_half_precision_are_finite():
    q, k, v = (x * 200 for x in qkv(dtype=torch.float16))
    q.requires_grad_()
    output, lse = attend(q, k, v, Weibull(0.5), seed=1)
    assert lse.abs().max() > 65504
    output.float().sum().backward()
    assert bool(output.isfinite().all() and lse.isfinite().all() and q.grad.isfinite().all())


# The noise of a call.


@pytest.mark.parametrize("posterior", FAMILIES)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_draw_adds_the_noise_of_the_address_to_the_logits(posterior, grouped):
    q, k, v = qkv(kv_heads=2 if grouped else 4)
    words = noise.start(-6, 2).absorb(torch.tensor([8, 5]).view(2, 1, 1, 1)).absorb_position(torch.tensor(0))
    words = words.absorb_position(torch.arange(4).view(4, 1, 1)).absorb_position(torch.arange(3, 8).view(5, 1))
    u = noise.uniform(noise.bits(words, noise.key_words(torch.arange(7))), torch.float64)
    if isinstance(posterior, Weibull):
        # Inverse of the survival function of Weibull(k, 1): S = (−log u)^(1/k).
        log_s = torch.from_numpy(np.log(stats.weibull_min(posterior.shape).isf(u.numpy())))
    else:
        log_s = torch.from_numpy(stats.norm(0, posterior.scale).ppf(u.numpy()))
    output, lse = attend(q, k, v, posterior, seed=-6, sample_index=2, batch_ids=torch.tensor([8, 5]), query_offset=3)
    close(output, reference(q, k, v, None, log_s)[0], 1e-9)
    close(lse, reference(q, k, v)[1])


@pytest.mark.parametrize("posterior", FAMILIES)
def test_a_sample_does_not_depend_on_the_batch_split(posterior):
    q, k, v = qkv(batch=(6,))
    ids = torch.tensor([4, 9, 3, 2**35, 0, 7])
    full = attend(q, k, v, posterior, seed=1, batch_ids=ids).output
    parts = [attend(q[i], k[i], v[i], posterior, seed=1, batch_ids=ids[i]).output for i in torch.arange(6).split(4)]
    close(full, torch.cat(parts))
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    shuffled = attend(q[order], k[order], v[order], posterior, seed=1, batch_ids=ids[order]).output
    close(full[order], shuffled)
    assert torch.equal(full, attend(q, k, v, posterior, seed=1, batch_ids=ids).output)
    assert bool((full != attend(q, k, v, posterior, seed=1).output).all())


@pytest.mark.parametrize("posterior", [*FAMILIES, Softmax()])
@pytest.mark.parametrize("first", [0, 5, torch.tensor([3, 8])])
def test_several_samples_are_the_separate_calls(posterior, first):
    q, k, v = qkv()
    options = {"seed": 4, "batch_ids": torch.tensor([6, 1]), "mask": random_mask(2, 1, 5, 7)}
    together = attend(q, k, v, posterior, samples=3, sample_index=first, **options)
    single = [attend(q, k, v, posterior, sample_index=first + i, **options) for i in range(3)]
    assert together.output.shape == (3, 2, 4, 5, 8)
    assert torch.equal(together.output, torch.stack([x.output for x in single]))
    assert torch.equal(together.lse, single[0].lse)
    if posterior.stochastic:
        assert not torch.equal(together.output[0], together.output[1])


def test_a_sample_number_for_each_batch_row():
    q, k, v = (x[:1].expand(3, *x.shape[1:]) for x in qkv())
    ids, numbers = torch.tensor([5, 5, 5]), torch.tensor([2, 0, 1])
    ours = attend(q, k, v, Weibull(2.0), seed=1, batch_ids=ids, sample_index=numbers).output
    expected = attend(q[:1], k[:1], v[:1], Weibull(2.0), seed=1, batch_ids=ids[:1], samples=3).output
    close(ours, expected[numbers, 0])


@pytest.mark.parametrize("posterior", FAMILIES)
def test_decoding_token_by_token_repeats_the_full_pass(posterior):
    q, k, v = qkv(queries=7, kv_heads=2)
    full, full_lse = attend(q, k, v, posterior, is_causal=True, seed=9)
    for t in range(7):
        past = k[..., : t + 1, :], v[..., : t + 1, :]
        for options in ({"query_offset": t}, {"is_causal": True}):
            output, lse = attend(q[..., t : t + 1, :], *past, posterior, seed=9, **options)
            close(output, full[..., t : t + 1, :])
            close(lse, full_lse[..., t : t + 1])
    # A prompt at once, then the rest at once.
    chunk = attend(q[..., 4:, :], k, v, posterior, is_causal=True, seed=9).output
    close(chunk, full[..., 4:, :])


def test_global_generator_rules_the_default_seed():
    q, k, v = qkv()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first, second = (attend(q, k, v, Weibull(2.0)).output for _ in range(2))
        torch.manual_seed(3)
        seed = noise.new_seed()
        torch.manual_seed(3)
        again = attend(q, k, v, Weibull(2.0), samples=2).output
    assert torch.equal(first, again[0])
    assert torch.equal(first, attend(q, k, v, Weibull(2.0), seed=seed).output)
    assert torch.equal(first, attend(q, k, v, Weibull(2.0), seed=seed.item()).output)
    assert bool((first != second).all())
    assert bool((again[0] != again[1]).all())


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), torch.tensor(5), np.int64(5)])
def test_seeds_of_every_kind(seed):
    q, k, v = qkv()
    output = attend(q, k, v, Weibull(2.0), seed=seed).output
    assert torch.equal(output, attend(q, k, v, Weibull(2.0), seed=int(seed)).output)
    assert bool((output != attend(q, k, v, Weibull(2.0), seed=6).output).all())


def test_masked_keys_do_not_disturb_the_others():
    q, k, v = qkv()
    valid = torch.arange(7) < 4
    expected = attend(q, k[..., :4, :], v[..., :4, :], Weibull(2.0), seed=1)
    ours = attend(q, k, v, Weibull(2.0), seed=1, mask=valid)
    close(ours.output, expected.output)
    close(ours.lse, expected.lse)


# Distributions. The value is the identity, so that the output is the weights.


def weight_draws(posterior: Posterior, logits: Tensor, count: int, seed: int) -> np.ndarray:
    """(count, keys) draws of the weights of a row with these logits, spread over queries and heads."""
    keys, heads = len(logits), 4
    query = torch.ones(heads, count // heads, 1, dtype=torch.float64)
    key = logits.view(1, keys, 1).expand(heads, keys, 1).double()
    value = torch.eye(keys, dtype=torch.float64).expand(heads, keys, keys)
    return attend(query, key, value, posterior, scale=1.0, seed=seed).output.reshape(-1, keys).numpy()


LOGITS = torch.tensor([0.5, -1.0, 0.0, 1.5])


@pytest.mark.parametrize("spread", [0.5, 1.0, 10.0, 1000.0])
def test_weibull_log_ratios_are_logistic(spread):
    # log E₁ − log E₂ is standard logistic. False-alarm rate 1e-6 each.
    log_w = np.log(weight_draws(Weibull(spread), LOGITS, 40_000, seed=1))
    ratio = (log_w[:, 0] - log_w[:, 3] + 1.0) * spread
    assert stats.kstest(ratio, "logistic").pvalue > 1e-6


@pytest.mark.parametrize("spread", [1e-3, 0.1, 1.0, 3.0])
def test_lognormal_log_ratios_are_normal(spread):
    # False-alarm rate 1e-6 each.
    log_w = np.log(weight_draws(LogNormal(spread), LOGITS, 40_000, seed=2))
    ratio = (log_w[:, 0] - log_w[:, 3] + 1.0) / (spread * math.sqrt(2))
    assert stats.kstest(ratio, "norm").pvalue > 1e-6


@pytest.mark.parametrize("keys", [2, 3, 8])
def test_weibull_of_shape_one_with_equal_logits_is_a_flat_dirichlet(keys):
    # Marginals are Beta(1, n − 1); of the spacings, the largest two columns sum to Beta(2, n − 2).
    w = weight_draws(Weibull(1.0), torch.full((keys,), 0.7), 40_000, seed=3)
    for column in range(keys):
        assert stats.kstest(w[:, column], stats.beta(1, keys - 1).cdf).pvalue > 1e-6
    if keys > 2:
        assert stats.kstest(w[:, :2].sum(1), stats.beta(2, keys - 2).cdf).pvalue > 1e-6


@pytest.mark.parametrize("posterior", [Weibull(0.7), Weibull(3.0), LogNormal(0.3), LogNormal(2.0)])
def test_weights_are_distributed_as_normalised_draws_of_torch_distributions(posterior):
    # Four two-sample tests of marginals at 1e-6 each, and the means at 6e-7.
    p = LOGITS.double().softmax(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        if isinstance(posterior, Weibull):
            scale = p / math.gamma(1 + 1 / posterior.shape)
            law = torch.distributions.Weibull(scale, torch.tensor(posterior.shape, dtype=torch.float64))
        else:
            law = torch.distributions.LogNormal(p.log() - posterior.scale**2 / 2, posterior.scale)
        torch.testing.assert_close(law.mean, p)
        s = law.sample((40_000,))
    expected = (s / s.sum(-1, keepdim=True)).numpy()
    ours = weight_draws(posterior, LOGITS, 40_000, seed=5)
    for column in range(4):
        assert stats.ks_2samp(ours[:, column], expected[:, column]).pvalue > 1e-6
    error = np.sqrt((ours.var(0) + expected.var(0)) / 40_000)
    assert np.abs((ours.mean(0) - expected.mean(0)) / error).max() < 5.2


def test_each_head_has_its_own_spread():
    # The variance of log-ratios of head h is π²/(3 k²); four standard errors of the kurtotic logistic: 1e-4.
    module = Weibull(1.0, learned=True).build(3)
    shapes = torch.tensor([0.5, 2.0, 20.0])
    with torch.no_grad():
        module.log_parameter.copy_(shapes.log())
    query, key = torch.ones(3, 20_000, 1), torch.zeros(3, 2, 1)
    log_w = attend(query, key, torch.eye(2).expand(3, 2, 2), module, seed=1).output.log()
    variance = (log_w[..., 0] - log_w[..., 1]).var(-1) * 3 * shapes**2 / math.pi**2
    torch.testing.assert_close(variance, torch.ones(3), rtol=0, atol=4 * math.sqrt(3.2 / 20_000))


@pytest.mark.parametrize("posterior", FAMILIES)
def test_draws_of_different_samples_queries_and_heads_are_uncorrelated(posterior):
    # 45 + 45 + 45 correlations at 6e-7 each.
    query, key = torch.ones(10, 10, 400, 1), torch.zeros(10, 10, 2, 1)
    value = torch.eye(2).expand(10, 10, 2, 2)
    log_w = attend(query, key, value, posterior, seed=1, samples=10).output.log()
    z = log_w[..., 0] - log_w[..., 1]  # (samples, batch, heads, queries)
    for dim in range(3):
        x = z.movedim(dim, 0).flatten(1)
        r = torch.corrcoef(x)[tuple(torch.triu_indices(10, 10, 1))] * math.sqrt(x.shape[1])
        assert r.abs().max() < 5


# Gradients.


@pytest.mark.parametrize("posterior", LEARNED)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": "padding"}, {"mask": "empty row"}], ids=str)
def test_gradients(posterior, options):
    q, k, v = (x.requires_grad_() for x in qkv((), 2, 1, queries=3, keys=4, features=2, values=2))
    module = posterior.build(2).double()
    mask = {"padding": random_mask(1, 4), "empty row": torch.arange(3).view(3, 1) != 1}.get(options.get("mask"))

    def call(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        # gradcheck changes the spread in place, where the module holds it.
        output, lse = attend(q, k, v, module, **{**options, "mask": mask}, seed=2)
        return output, lse.masked_fill(lse.isneginf(), 0.0)

    assert torch.autograd.gradcheck(call, (q, k, v, module.log_parameter))


def test_gradients_of_the_mean_are_those_of_scaled_dot_product_attention():
    ours, theirs = ([x.clone().requires_grad_() for x in (*qkv(), randn(2, 1, 5, 7, seed=5))] for _ in range(2))
    weight = randn(2, 4, 5, 8, seed=6)
    attend(*ours[:3], Weibull(2.0), mask=ours[3], sample=False).output.mul(weight).sum().backward()
    F.scaled_dot_product_attention(*theirs[:3], attn_mask=theirs[3]).mul(weight).sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        close(x.grad, y.grad)


def test_a_learned_bias_gets_no_gradient_where_it_masks():
    q, k, v = qkv()
    bias = randn(5, 7).masked_fill(~random_mask(5, 7), -1e4).requires_grad_()
    attend(q, k, v, Weibull(2.0), mask=bias, seed=1).output.sum().backward()
    assert torch.equal(bias.grad != 0, bias > -1e3)


@pytest.mark.parametrize("posterior", LEARNED)
def test_spread_gradients_belong_to_their_heads(posterior):
    q, k, v = qkv()
    for head in range(4):
        module = posterior.build(4)
        attend(q, k, v, module, seed=1).output[:, head].sum().backward()
        assert torch.equal(module.log_parameter.grad != 0, torch.arange(4) == head)


def test_a_fixed_spread_and_a_learned_one_of_the_same_size_draw_the_same():
    q, k, v = qkv()
    for fixed, learned in zip(FAMILIES, LEARNED, strict=True):
        expected = attend(q, k, v, fixed, seed=1).output
        close(attend(q, k, v, fixed.build(4), seed=1).output, expected)
        close(attend(q, k, v, copy.deepcopy(learned.build(4)).double(), seed=1).output, expected, 1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("seed", [5, None])
def test_checkpointing_replays_the_noise(seed, reentrant):
    def run(wrap: Callable[..., AttentionOutput]) -> list[Tensor]:
        q, k, v = (x.requires_grad_() for x in qkv())
        module = Weibull(2.0, learned=True).build(4)
        torch.manual_seed(8)
        output, _ = wrap(q, k, v, module)
        loss = output.square().sum() + torch.rand(())
        loss.backward()
        return [output, q.grad, k.grad, v.grad, module.log_parameter.grad]

    def call(*args: object) -> AttentionOutput:
        return attend(*args, seed=seed)

    with torch.random.fork_rng(devices=[]):
        plain = run(call)
        replayed = run(lambda *args: checkpoint(call, *args, use_reentrant=reentrant))
    for x, y in zip(plain, replayed, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_compiled_attention_is_the_same(backend):
    # The tracing compiler alone, which needs no C++ compiler and takes seconds.
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k, v = (x.requires_grad_() for x in qkv(queries=7))
    options = {"is_causal": True, "seed": torch.tensor(-3), "backend": backend}
    output, lse = compiled(q, k, v, Weibull(2.0), **options)
    expected, expected_lse = attend(q, k, v, Weibull(2.0), **options)
    close(output, expected)
    close(lse, expected_lse)
    close(torch.autograd.grad(output.sum(), q)[0], torch.autograd.grad(expected.sum(), q)[0])


# Properties.


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_attention(data):
    draw = data.draw
    batch = draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))
    kv_heads, groups = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads, queries, keys = kv_heads * groups, draw(st.integers(1, 6)), draw(st.integers(1, 6))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    size = draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]))
    q, k, v = qkv(batch, heads, kv_heads, queries, keys, draw(st.integers(1, 5)), draw(st.integers(1, 5)), dtype)
    q = (q * size).to(dtype)
    shape = tuple(n if draw(st.booleans()) else 1 for n in (*batch, heads, queries, keys))
    shape = shape[draw(st.integers(0, len(shape))) :]
    kind = draw(st.sampled_from(["none", "boolean", "additive"]))
    mask_seed = draw(st.integers(0, 99))
    valid = torch.rand(shape, generator=torch.Generator().manual_seed(mask_seed)) < draw(st.sampled_from([0.2, 0.7]))
    bias = randn(*shape, dtype=dtype).masked_fill(~valid, -math.inf)
    mask = {"none": None, "boolean": valid, "additive": bias}[kind]
    full = torch.ones(()).bool() if kind == "none" else valid
    is_causal = draw(st.booleans())
    if is_causal:
        full = full & torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    full = full.expand(*batch, heads, queries, keys)
    options = {"mask": mask, "is_causal": is_causal}

    output, lse = attend(q, k, v, Weibull(2.0), sample=False, **options)
    added = bias.double().masked_fill(~valid, 0.0) if kind == "additive" else 0.0
    expected, expected_lse = reference(q, k, v, full, added)
    # The error of a weight is that of its logit, relative to 1.
    precision = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    largest = (q.double().abs().amax() * k.double().abs().amax() * math.sqrt(q.shape[-1])).item()
    tolerance = 8 * precision * (4 + largest) + torch.finfo(dtype).eps
    torch.testing.assert_close(
        output.double(), expected, rtol=tolerance, atol=tolerance * v.double().abs().max().item()
    )
    torch.testing.assert_close(lse.double(), expected_lse, rtol=8 * precision, atol=8 * precision * (4 + largest))
    assert output.dtype == dtype

    posterior = draw(st.sampled_from([Weibull(0.1), Weibull(10.0), LogNormal(0.1), LogNormal(5.0)]))
    q.requires_grad_()
    drawn, drawn_lse = attend(q, k, v, posterior, seed=draw(st.integers(-(2**63), 2**63 - 1)), **options)
    assert torch.equal(drawn_lse, lse)
    # A mixture of the values of valid keys, or 0.
    values = v.double().repeat_interleave(groups, -3).unsqueeze(-3)
    low = torch.where(full.unsqueeze(-1), values, math.inf).amin(-2)
    high = torch.where(full.unsqueeze(-1), values, -math.inf).amax(-2)
    some = full.any(-1)
    slack = 4 * torch.finfo(dtype).eps * v.double().abs().max().item()
    assert bool((drawn.double() >= low - slack)[some].all())
    assert bool((drawn.double() <= high + slack)[some].all())
    assert bool((drawn[~some] == 0).all())
    (drawn.double().sum() + drawn_lse[some].double().sum()).backward()
    assert bool(q.grad.isfinite().all())
    assert bool((q.grad[~some] == 0).all())
