import contextlib
import copy
import inspect
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import bayesian_attention as ba
from bayesian_attention.engine.rows import DenseRows

E, H, B, LQ, LK = 8, 2, 3, 4, 5
BUILDS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 6, "vdim": 7},
    {"kdim": 6, "bias": False, "add_zero_attn": True},
    {"vdim": 7, "add_bias_kv": True},
]
PADDING = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [1, 0, 0, 0, 1]], dtype=torch.bool)
MASKS_2D = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
SMALL = ba.Weibull(2.0)


def pair(*, double: bool = False, posterior: ba.Posterior | None = None, **build: Any):
    """The original and ours with the same weights, none of them trivial."""
    torch.manual_seed(0)
    original = nn.MultiheadAttention(E, H, **build)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    ours = ba.MultiheadAttention(E, H, posterior=posterior, **build)
    ours.load_state_dict(original.state_dict())
    ours.stoch.sampling = False
    return (original.double(), ours.double()) if double else (original, ours)


def inputs(build: dict[str, Any], batched: bool = True, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    widths = (E, build.get("kdim", E), build.get("vdim", E))
    lengths = (LQ, LK, LK)
    first = build.get("batch_first", False)
    return tuple(
        torch.randn(
            ((B, n, w) if first else (n, B, w)) if batched else (n, w), generator=generator, dtype=torch.float64
        ).to(dtype)
        for n, w in zip(lengths, widths, strict=True)
    )


def as_float(mask: Tensor) -> Tensor:
    """The same keys out, and a bias on the others."""
    bias = torch.linspace(-1, 1, mask.numel()).view(mask.shape)
    return bias.masked_fill(mask, -torch.inf)


def three(mask: Tensor, batch: int) -> Tensor:
    """One mask a head and example, all different, none leaving a query without keys."""
    return torch.stack([mask.roll(i, dims=-1) for i in range(batch * H)])


def compare(original: nn.Module, ours: nn.Module, args: tuple[Tensor, ...], atol: float = 1e-6, **call: Any) -> None:
    with warnings.catch_warnings():
        # The original deprecates masks of two dtypes.
        warnings.simplefilter("ignore", UserWarning)
        expected, expected_weights = original(*args, **call)
    output, weights = ours(*args, **call)
    assert output.shape == expected.shape
    assert output.dtype == expected.dtype
    torch.testing.assert_close(output, expected, rtol=atol, atol=atol)
    if expected_weights is None:
        assert weights is None
    else:
        assert weights.dtype == expected_weights.dtype
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=atol)


def test_signature_is_the_original_s():
    theirs = list(inspect.signature(nn.MultiheadAttention.forward).parameters.values())
    mine = list(inspect.signature(ba.MultiheadAttention.forward).parameters.values())
    assert [(p.name, p.default, p.kind) for p in mine] == [(p.name, p.default, p.kind) for p in theirs]
    torch.manual_seed(0)
    positional = (E, H, 0.25, False, True, True, 6, 7, True, "cpu", torch.float64)
    original = nn.MultiheadAttention(*positional)
    torch.manual_seed(0)
    ours = ba.MultiheadAttention(*positional)
    assert isinstance(ours, nn.MultiheadAttention)
    for name in ("embed_dim", "num_heads", "dropout", "kdim", "vdim", "batch_first", "add_zero_attn", "head_dim"):
        assert getattr(ours, name) == getattr(original, name)
    for (name, mine_), (other, theirs_) in zip(ours.state_dict().items(), original.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(mine_, theirs_)


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_state_travels_both_ways(build):
    original, ours = pair(**build)
    assert list(ours.state_dict()) == list(original.state_dict())
    back = nn.MultiheadAttention(E, H, **build)
    back.load_state_dict(ours.state_dict())
    for name, value in back.state_dict().items():
        assert torch.equal(value, original.state_dict()[name])


def test_parameters_of_posterior_and_prior_come_on_top():
    ours = ba.MultiheadAttention(E, H, posterior=ba.Weibull(learned=True), prior=ba.LearnedPrior())
    extra = set(ours.state_dict()) - set(nn.MultiheadAttention(E, H).state_dict())
    assert extra == {"stoch.posterior.log_parameter", "stoch.prior.raw"}
    missing = ours.load_state_dict(nn.MultiheadAttention(E, H).state_dict(), strict=False)
    assert set(missing.missing_keys) == extra


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_without_sampling_it_is_the_original(build, batch_first, batched):
    build = {**build, "batch_first": batch_first}
    original, ours = pair(**build)
    args = inputs(build, batched)
    padding = PADDING if batched else PADDING[1]
    stacked = three(MASKS_2D, B if batched else 1)
    # The second key is nobody's padding in the first two examples, nor any query's loss in the plain mask.
    paddings = [None, padding, as_float(padding)]
    masks = [None, MASKS_2D, as_float(MASKS_2D), stacked, as_float(stacked)]
    for key_padding_mask, attn_mask in itertools.product(paddings, masks):
        if attn_mask is not None and key_padding_mask is not None and not build.get("add_zero_attn"):
            # The original gives NaN for a query that the two together leave without keys.
            attn_mask = attn_mask.clone()
            attn_mask[..., 1] = False if attn_mask.dtype == torch.bool else 0.5
        call = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "average_attn_weights": False}
        compare(original, ours, args, **call)
        compare(original, ours, args, **call, need_weights=False)
    compare(original, ours, args, key_padding_mask=padding)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_causal_hint(kind, need_weights):
    original, ours = pair(batch_first=True)
    x = torch.randn(B, LQ, E)
    mask = torch.ones(LQ, LQ, dtype=torch.bool).triu(1)
    if kind == "float":
        mask = nn.Transformer.generate_square_subsequent_mask(LQ)
    compare(original, ours, (x, x, x), attn_mask=mask, is_causal=True, need_weights=need_weights)
    changed = x.clone()
    changed[:, -1] += 1
    kept = ours(changed, changed, changed, attn_mask=mask, is_causal=True)[0][:, :-1]
    torch.testing.assert_close(kept, ours(x, x, x, attn_mask=mask)[0][:, :-1])


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_dropout_is_the_original_s_under_the_same_seed(masked, need_weights):
    original, ours = pair(batch_first=True, dropout=0.4)
    args = inputs({"batch_first": True})
    call = {"key_padding_mask": PADDING} if masked else {}
    results = []
    for module in (original, ours):
        torch.manual_seed(2)
        results.append(module(*args, need_weights=need_weights, average_attn_weights=False, **call))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=1e-6)
    if need_weights:
        assert bool((results[1][1] == 0).any())
        torch.testing.assert_close(results[1][1], results[0][1], rtol=0, atol=1e-6)
    compare(original.eval(), ours.eval(), args, **call)


def test_dropout_keeps_its_rate_beside_sampling():
    # 40 000 weights: a deviation of 5 standard errors, false alarm 6e-7; the seed is fixed.
    torch.manual_seed(0)
    ours = ba.MultiheadAttention(E, H, dropout=0.3, batch_first=True, posterior=SMALL)
    x = torch.randn(50, 20, E)
    zero = (ours(x, x, x, average_attn_weights=False)[1] == 0).double().mean().item()
    assert abs(zero - 0.3) < 5 * (0.3 * 0.7 / 40_000) ** 0.5


@pytest.mark.parametrize("posterior", [ba.Weibull(1e6), ba.LogNormal(1e-6)], ids=str)
@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_without_spread_sampling_is_the_original(build, posterior):
    original, ours = pair(posterior=posterior, **build)
    ours.stoch.sampling = True
    for need_weights in (True, False):
        compare(original, ours, inputs(build), atol=1e-4, key_padding_mask=as_float(PADDING), need_weights=need_weights)


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_gradients_are_the_original_s(build):
    original, ours = pair(double=True, **build)
    grads = []
    for module in (original, ours):
        args = [x.requires_grad_() for x in inputs(build, dtype=torch.float64)]
        output, weights = module(*args, key_padding_mask=PADDING)
        (output.sin().sum() + weights.square().sum()).backward()
        grads.append([x.grad for x in (*args, *module.parameters())])
    for mine, theirs in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("need_weights", [True, False])
def test_double_precision_is_kept_with_additive_masks(need_weights):
    original, ours = pair(double=True)
    args = inputs({}, dtype=torch.float64)
    mask = as_float(three(MASKS_2D, B)).double() / 3
    compare(original, ours, args, atol=1e-13, attn_mask=mask, need_weights=need_weights)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes(dtype, need_weights):
    original, ours = pair()
    args = inputs({})
    expected = original(*args, key_padding_mask=PADDING)[0]
    narrow = ours.to(dtype)
    output, weights = narrow(*(x.to(dtype) for x in args), key_padding_mask=PADDING, need_weights=need_weights)
    assert output.dtype == dtype
    assert weights is None or weights.dtype == dtype
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=64 * torch.finfo(dtype).eps)
    narrow.stoch.sampling = True
    output = narrow(*(x.to(dtype) for x in args), key_padding_mask=as_float(PADDING).to(dtype))[0]
    assert output.dtype == dtype
    assert bool(output.isfinite().all())


@pytest.mark.parametrize("sampling", [True, False])
def test_autocast_leaves_logits_noise_and_normalisation_in_full_precision(sampling):
    torch.manual_seed(0)
    ours = ba.MultiheadAttention(E, H, batch_first=True, posterior=SMALL)
    with torch.no_grad():
        ours.in_proj_weight.mul_(4)
    x = torch.randn(B, LQ, E)
    with torch.autocast("cpu", dtype=torch.bfloat16), ba.sampling(ours, sampling, seed=1):
        output, weights = ours(x, x, x, average_attn_weights=False)
        lean = ours(x, x, x, need_weights=False)[0]
        q, k, _ = ours._project(x, x, x)
    logits = q.float() @ k.float().transpose(-1, -2) * ours.head_dim**-0.5
    assert logits.abs().max() > 5
    with ba.sampling(ours, sampling, seed=1):
        exact = ours.stoch.weights(logits, DenseRows())
    assert output.dtype == lean.dtype == torch.bfloat16
    torch.testing.assert_close(weights.float(), exact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(output.float(), lean.float(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("posterior", [SMALL, ba.LogNormal(1.0), ba.Softmax()], ids=str)
def test_a_query_without_keys_gets_the_output_bias(posterior, need_weights):
    _, ours = pair(batch_first=True, posterior=posterior)
    ours.stoch.sampling = None
    query, key, value = (x.requires_grad_() for x in inputs({"batch_first": True}))
    padding = torch.zeros(B, LK, dtype=torch.bool)
    padding[1] = True
    for mask in (padding, torch.zeros(B, LK).masked_fill(padding, -torch.inf)):
        output, weights = ours(query, key, value, key_padding_mask=mask, need_weights=need_weights)
        torch.testing.assert_close(output[1], ours.out_proj.bias.expand(LQ, E), rtol=0, atol=0)
        if need_weights:
            assert bool((weights[1] == 0).all())
            torch.testing.assert_close(weights[[0, 2]].sum(-1), torch.ones(2, LQ))
        output.square().sum().backward()
    for x in (query, key, value):
        assert bool(x.grad.isfinite().all())
    assert bool((query.grad[1] == 0).all())
    assert all(bool(p.grad.isfinite().all()) for p in ours.parameters())


@pytest.mark.parametrize("shape", [(1, 1), (0, 3), (1, 4)])
@pytest.mark.parametrize("need_weights", [True, False])
def test_small_batches_and_sequences(shape, need_weights):
    original, ours = pair(batch_first=True)
    x = torch.randn(*shape, E)
    compare(original.eval(), ours.eval(), (x, x, x), need_weights=need_weights)
    ours.stoch.sampling = True
    output = ours(x, x, x, need_weights=need_weights)[0]
    assert output.shape == x.shape
    if shape[1] == 1:
        # One key has all the weight, whatever is drawn.
        torch.testing.assert_close(output, original(x, x, x)[0])


def test_non_contiguous_input():
    original, ours = pair(batch_first=True)
    x = torch.randn(E, LQ, B).permute(2, 1, 0)
    mask = three(torch.zeros(LQ, LQ, dtype=torch.bool).fill_diagonal_(True), B).transpose(1, 2)
    assert not x.is_contiguous()
    assert not mask.is_contiguous()
    compare(original, ours, (x, x, x), attn_mask=mask)
    compare(original, ours, (x, x, x), attn_mask=mask, need_weights=False)


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_returned_weights_are_those_really_used(build):
    _, ours = pair(double=True, posterior=SMALL, batch_first=True, **build)
    query, key, value = inputs({**build, "batch_first": True}, dtype=torch.float64)
    with ba.sampling(ours, True, seed=3):
        output, weights = ours(query, key, value, key_padding_mask=PADDING, average_attn_weights=False)
        lean = ours(query, key, value, key_padding_mask=PADDING, need_weights=False)[0]
        average = ours(query, key, value, key_padding_mask=PADDING)[1]
    v = ours._project(query, key, value)[2]
    if ours.bias_v is not None:
        v = torch.cat([v, ours.bias_v.view(1, H, 1, -1).expand(B, -1, -1, -1)], dim=2)
    if ours.add_zero_attn:
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], dim=2)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, LQ, dtype=torch.float64))
    assert bool((weights[..., :LK].transpose(1, -1)[PADDING] == 0).all())
    torch.testing.assert_close(ours.out_proj((weights @ v).transpose(1, 2).flatten(2)), output)
    torch.testing.assert_close(lean, output)
    torch.testing.assert_close(average, weights.mean(1))


def test_divergence_is_the_same_on_both_ways_and_skips_padding():
    ours = ba.MultiheadAttention(E, H, batch_first=True, prior=ba.ContextualPrior())
    args = inputs({"batch_first": True})
    totals = []
    for need_weights in (True, False):
        ours(*args, key_padding_mask=PADDING, need_weights=need_weights)
        (term,) = ours.stoch.kl_terms
        assert term.entries == H * LQ * (~PADDING).sum()
        assert term.examples == B
        totals.append(term.total)
    torch.testing.assert_close(totals[0], totals[1])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layer_samples_in_evaluation(norm_first, padded, context):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True, norm_first=norm_first).eval()
    reference = copy.deepcopy(layer)
    ours = ba.MultiheadAttention(E, H, dropout=0.0, batch_first=True, posterior=SMALL)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours.eval()
    x = torch.randn(B, LK, E)
    padding = PADDING if padded else None
    with context():
        with ba.sampling(layer, True):
            draws = [layer(x, src_key_padding_mask=padding) for _ in range(2)]
        # The original's own fused path must not stand in for it.
        mean, expected = layer(x, src_key_padding_mask=padding), reference(x, src_key_padding_mask=padding)
    assert not torch.allclose(*draws, atol=1e-3)
    seen = ~PADDING if padded else torch.ones(B, LK, dtype=torch.bool)
    torch.testing.assert_close(mean[seen], expected[seen], rtol=0, atol=2e-6)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_encoder_samples_in_evaluation(padded, causal, context):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True)
    reference = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    layer = copy.deepcopy(layer)
    layer.self_attn = ba.MultiheadAttention(E, H, dropout=0.0, batch_first=True, posterior=SMALL)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    encoder.load_state_dict(reference.state_dict())
    x = torch.randn(B, LK, E)
    # The original's mask leaves the first key of the last example to nobody, a NaN under a causal mask.
    call: dict[str, Any] = {"src_key_padding_mask": PADDING.roll(1, 0).flip(1) if padded else None}
    if causal:
        call["src_key_padding_mask"] = torch.arange(LK) >= torch.tensor([[5], [3], [2]]) if padded else None
        call |= {"mask": torch.ones(LK, LK, dtype=torch.bool).triu(1), "is_causal": True}
    with context():
        with ba.sampling(encoder, True, seed=0):
            same = [encoder(x, **call) for _ in range(2)]
        with ba.sampling(encoder, True, seed=1):
            other = encoder(x, **call)
        mean, expected = encoder(x, **call), reference(x, **call)
    assert torch.equal(*same)
    assert not torch.allclose(same[0], other, atol=1e-3)
    seen = ~call["src_key_padding_mask"] if padded else torch.ones(B, LK, dtype=torch.bool)
    torch.testing.assert_close(mean[seen], expected[seen], rtol=0, atol=2e-6)


def test_layers_of_an_encoder_draw_apart():
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    layer.self_attn = ba.MultiheadAttention(E, H, batch_first=True, posterior=ba.Weibull(1.0))
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    weights = []
    for module in encoder.layers:
        module.self_attn.stoch.register_forward_hook(lambda *_: None)
        weights.append(module.self_attn)
    x = torch.zeros(1, 6, E)
    with ba.sampling(encoder, True, seed=0):
        first, second = (module(x, x, x)[1] for module in weights)
    assert not torch.allclose(first, second, atol=1e-2)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_decoder_layer(context):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=True).eval()
    reference = copy.deepcopy(layer)
    for name in ("self_attn", "multihead_attn"):
        ours = ba.MultiheadAttention(E, H, batch_first=True, posterior=SMALL)
        ours.load_state_dict(getattr(layer, name).state_dict())
        setattr(layer, name, ours.eval())
    x, memory = torch.randn(B, LQ, E), torch.randn(B, LK, E)
    call = {
        "tgt_mask": torch.ones(LQ, LQ, dtype=torch.bool).triu(1),
        "tgt_is_causal": True,
        "memory_key_padding_mask": PADDING,
    }
    with context():
        torch.testing.assert_close(layer(x, memory, **call), reference(x, memory, **call), rtol=0, atol=2e-6)
        with ba.sampling(layer, True):
            assert not torch.allclose(layer(x, memory, **call), layer(x, memory, **call), atol=1e-3)


def test_nested_tensors_are_refused_with_the_way_out():
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    layer.self_attn = ba.MultiheadAttention(E, H, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if not encoder.use_nested_tensor:
            pytest.skip("this PyTorch does not nest here")
        with torch.no_grad(), pytest.raises(ValueError, match=r"nested tensors are not .*enable_nested_tensor=False"):
            encoder(torch.randn(B, LK, E), src_key_padding_mask=PADDING.sort(1).values)


def test_deepcopy_is_independent_and_stays_off_the_fused_path():
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    layer.self_attn = ba.MultiheadAttention(E, H, batch_first=True, posterior=SMALL)
    layer(torch.randn(B, LK, E, requires_grad=True))
    copied = copy.deepcopy(layer).eval()
    x = torch.randn(B, LK, E)
    with torch.no_grad(), ba.sampling(copied, True):
        assert not torch.allclose(copied(x), copied(x), atol=1e-3)
    with torch.no_grad():
        copied.self_attn.in_proj_weight.zero_()
    assert bool((layer.self_attn.in_proj_weight != 0).any())
    assert layer.self_attn.stoch.sampling is None


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None, posterior: ba.Posterior) -> None:
        super().__init__()
        self.attention = ba.MultiheadAttention(E, H, batch_first=True, posterior=posterior, prior=ba.ContextualPrior())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return x + self.attention(x, x, x, need_weights=False)[0]

        return block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)


def gradients(reentrant: bool | None, *, kl: bool, seed: int | None = None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = ba.track_kl(Checkpointed(reentrant, ba.Weibull(2.0, learned=True)))
    x = torch.randn(B, LQ, E, requires_grad=True)
    with contextlib.nullcontext() if seed is None else ba.sampling(model, True, seed=seed):
        loss = model(x).square().sum()
        if kl:
            loss = loss + ba.kl_divergence(model)
        loss.backward()
    return {"x": x.grad} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("kl", [True, False])
def test_checkpointing_changes_no_gradient(kl, seed):
    plain, checkpointed = (gradients(reentrant, kl=kl, seed=seed) for reentrant in (None, False))
    assert plain.keys() == checkpointed.keys()
    for name, value in plain.items():
        torch.testing.assert_close(checkpointed[name], value, msg=name)


def test_reentrant_checkpointing_draws_the_same_and_refuses_the_divergence():
    plain, checkpointed = (gradients(reentrant, kl=False) for reentrant in (None, True))
    for name, value in plain.items():
        torch.testing.assert_close(checkpointed[name], value, msg=name)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        gradients(True, kl=True)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_row_draws_the_same_in_whatever_batch(batch_first):
    ours = ba.MultiheadAttention(E, H, batch_first=batch_first, posterior=SMALL).double().eval()
    x = torch.randn(6, LQ, E, dtype=torch.float64)

    def call(rows: slice) -> Tensor:
        part = x[rows] if batch_first else x[rows].transpose(0, 1)
        with ba.sampling(ours, True, seed=4, sample_index=2, batch_ids=torch.arange(6)[rows]):
            out = ours(part, part, part)[0]
        return out if batch_first else out.transpose(0, 1)

    whole = call(slice(None))
    torch.testing.assert_close(torch.cat([call(slice(0, 1)), call(slice(1, 4)), call(slice(4, 6))]), whole)
    torch.testing.assert_close(call(slice(None, None, 2)), whole[::2])


def test_padding_does_not_change_a_row_s_draw():
    ours = ba.MultiheadAttention(E, H, batch_first=True, posterior=SMALL).double().eval()
    x = torch.randn(2, 3, E, dtype=torch.float64)
    padded = torch.cat([x, torch.randn(2, 4, E, dtype=torch.float64)], dim=1)
    with ba.sampling(ours, True, seed=1):
        short = ours(x, x, x)[0]
        long = ours(padded, padded, padded, key_padding_mask=(torch.arange(7) >= 3).expand(2, 7))[0]
    torch.testing.assert_close(long[:, :3], short)


def test_gradcheck_under_a_fixed_seed():
    torch.manual_seed(0)
    ours = ba.MultiheadAttention(4, 2, batch_first=True, posterior=ba.LogNormal(0.7, learned=True)).double()
    args = [torch.randn(2, n, 4, dtype=torch.float64, requires_grad=True) for n in (2, 3, 3)]
    padding = torch.tensor([[False, False, True], [True, True, True]])

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with ba.sampling(ours, True, seed=0):
            output, weights = ours(*tensors[:3], key_padding_mask=padding)
            return output, weights, ba.kl_divergence(ours)

    assert torch.autograd.gradcheck(call, (*args, *ours.parameters()), fast_mode=True)


ROWS = (torch.zeros(B, LQ, E), torch.zeros(B, LK, E), torch.zeros(B, LK, E))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("args", "call", "message"),
    [
        ((ROWS[0][0], *ROWS[1:]), {}, "query, key, value: must all have 3 dimensions, or 2 without a batch"),
        ((torch.zeros(1, B, LQ, E),) * 3, {}, r"query, key, value: .* got \(1, 3, 4, 8\)"),
        ((ROWS[0], ROWS[1][:1], ROWS[2][:1]), {}, "key: "),
        ((ROWS[0][:1], *ROWS[1:]), {}, "key: "),
        ((*ROWS[:2], ROWS[2][:, 1:]), {}, "value: "),
        ((*ROWS[:2], ROWS[2][:1]), {}, "value: "),
        (ROWS, {"is_causal": True}, "is_causal: is a hint about attn_mask"),
        (ROWS, {"attn_mask": torch.zeros(LK, LQ)}, r"attn_mask: must have shape \(4, 5\) or \(6, 4, 5\)"),
        (ROWS, {"attn_mask": torch.zeros(B, LQ, LK)}, r"attn_mask: .* got \(3, 4, 5\)"),
        (ROWS, {"attn_mask": torch.zeros(LQ, LK, dtype=torch.uint8)}, "attn_mask: must be boolean or floating"),
        (ROWS, {"key_padding_mask": torch.zeros(LK, B)}, r"key_padding_mask: must have shape \(3, 5\)"),
        (ROWS, {"key_padding_mask": torch.zeros(B, LK, dtype=torch.long)}, "key_padding_mask: must be boolean or"),
    ],
)
def test_wrong_input_is_named(args, call, message, need_weights):
    ours = ba.MultiheadAttention(E, H, batch_first=True)
    with pytest.raises(ValueError, match=message):
        ours(*args, need_weights=need_weights, **call)


def test_wrong_construction_is_refused():
    with pytest.raises(TypeError, match="posterior: must be a posterior"):
        ba.MultiheadAttention(E, H, posterior="weibull")
    with pytest.raises(AssertionError, match="divisible"):
        ba.MultiheadAttention(E, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parameters_made_in_another_dtype(dtype):
    ours = ba.MultiheadAttention(
        E, H, dtype=dtype, posterior=ba.LogNormal(0.5, learned=True), prior=ba.ContextualPrior()
    )
    ba.track_kl(ours)
    x = torch.randn(LQ, B, E, dtype=dtype)
    for need_weights in (True, False):
        output = ours(x, x, x, need_weights=need_weights)[0]
        assert output.dtype == dtype
        assert ours.stoch.kl_terms[0].total.dtype == torch.promote_types(dtype, torch.float32)
    (output.sum() + ba.kl_divergence(ours)).backward()
    assert all(bool(p.grad.isfinite().all()) for p in ours.parameters())


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("prior", [ba.ConstantPrior(), ba.ContextualPrior()])
def test_padding_of_self_attention_changes_no_divergence(prior, kind, need_weights):
    """Neither as keys nor as queries: a row padded to 7 costs what it costs alone."""
    torch.manual_seed(0)
    ours = ba.MultiheadAttention(8, 2, batch_first=True, prior=prior).eval()
    row = torch.randn(1, 3, 8)
    ours(row, row, row, need_weights=need_weights)
    expected = {reduction: ba.kl_divergence(ours, reduction=reduction) for reduction in ("sum", "mean")}
    padded = torch.cat([row, torch.randn(1, 4, 8)], dim=1)
    mask = (torch.arange(7) >= 3).unsqueeze(0)
    mask = mask if kind == "bool" else torch.zeros(1, 7).masked_fill(mask, -torch.inf)
    ours(padded, padded, padded, key_padding_mask=mask, need_weights=need_weights)
    for reduction, value in expected.items():
        torch.testing.assert_close(ba.kl_divergence(ours, reduction=reduction), value)
