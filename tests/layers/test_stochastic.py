import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor

import bayesian_attention as ba
from bayesian_attention.engine.rows import DenseRows, SegmentRows

B, H, LQ, LK, D = 2, 2, 3, 4, 3

POSTERIORS = [ba.Weibull(2.5), ba.Weibull(1.5, learned=True), ba.LogNormal(0.6), ba.LogNormal(0.8, learned=True)]
PRIORS = {
    "gamma": [
        None,
        ba.ConstantPrior(concentration=0.7, rate=1.8),
        ba.LearnedPrior(concentration=0.4, rate=0.9),
        ba.ContextualPrior(hidden=4, rate=1.7),
        ba.ContextualPrior(hidden=None, share_heads=False),
    ],
    "lognormal": [
        None,
        ba.ConstantPrior(loc=-1.0, scale=1.4),
        ba.LearnedPrior(loc=0.3, scale=0.5),
        ba.ContextualPrior(hidden=4, activation="leaky_relu", scale=0.7),
        ba.ContextualPrior(hidden=None, share_heads=False),
    ],
}
PAIRS = [(q, p) for q in POSTERIORS for p in PRIORS[q.prior_family]]
# Each posterior and each prior at least once.
SOME = PAIRS[::3]

# One query of the first example sees nothing; the last key of the second is padding.
MASK = torch.ones(B, 1, LQ, LK, dtype=torch.bool)
MASK[0, :, 1] = False
MASK[1, :, :, -1] = False
MASK[1, :, 0, 0] = False


def layer(posterior: ba.Posterior, prior: ba.Prior | None = None, *, heads: int = H, key_dim: int | None = D):
    torch.manual_seed(3)
    stoch = ba.StochasticAttention(posterior, prior, heads=heads, key_dim=key_dim).double()
    with torch.no_grad():
        for parameter in stoch.parameters():
            # Heads must differ, or a wrong order of heads would go unseen.
            parameter.add_(0.3 * torch.randn_like(parameter))
    return stoch


def qkv(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(B, H, LQ, D), (B, H, LK, D), (B, H, LK, 5)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def logits_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def softmax_over(logits: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=-1).nan_to_num(0.0)


def spread_of(stoch: ba.StochasticAttention) -> list[float]:
    """The spread of each head."""
    raw = stoch.posterior.log_parameter
    return [stoch.posterior.spec.parameter] * stoch.heads if raw is None else raw.exp().tolist()


def prior_of(stoch: ba.StochasticAttention, k: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Both parameters of the prior of every entry, (B, H, LQ, LK)."""
    module, spec = stoch.prior, stoch.prior.spec
    shape = (B, H, LQ, LK)
    gamma = module.family == "gamma"
    defaults = {"concentration": 1.0, "rate": 1.0, "loc": 0.0, "scale": 1.0}

    def constant(name: str) -> Tensor:
        value = getattr(spec, name)
        return torch.full(shape, defaults[name] if value is None else value, dtype=torch.float64)

    if isinstance(spec, ba.LearnedPrior):
        learned = module.raw.exp().add(1).log().view(1, H, 1, 1).expand(shape)
        return (learned, constant("rate")) if gamma else (constant("loc"), learned)
    if isinstance(spec, ba.ContextualPrior):
        scores = torch.empty(B, H, LK, dtype=torch.float64)
        for h in range(H):
            net = 0 if spec.share_heads else h
            hidden = k[:, h]
            if spec.hidden is not None:
                hidden = hidden @ module.hidden_weight[net] + module.hidden_bias[net]
                hidden = torch.where(hidden > 0, hidden, 0.1 * hidden if spec.activation == "leaky_relu" else 0.0)
            scores[:, h] = (hidden @ module.score_weight[net]).squeeze(-1)
        c = softmax_over(scores.unsqueeze(2).expand(shape), mask.expand(shape))
        return (constant("rate") * c, constant("rate")) if gamma else (c.log(), constant("scale"))
    return (constant("concentration"), constant("rate")) if gamma else (constant("loc"), constant("scale"))


def weibull_gamma_by_quadrature(k: np.ndarray, mean: np.ndarray, alpha: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """E[log q(S) − log p(S)] with S = λ E^(1/k), E ~ Exp(1), by the trapezoidal rule in log E."""
    t = np.linspace(-45.0, 4.5, 2000)[:, None]
    scale = mean / special.gamma(1 + 1 / k)
    s = scale * np.exp(t / k)
    ratio = stats.weibull_min.logpdf(s, k, scale=scale) - stats.gamma.logpdf(s, alpha, scale=1 / beta)
    return np.trapezoid(np.exp(t - np.exp(t)) * ratio, t, axis=0)


def expected_kl(stoch: ba.StochasticAttention, q: Tensor, k: Tensor, mask: Tensor) -> float:
    mask = mask.expand(B, H, LQ, LK)
    p = softmax_over(logits_of(q, k), mask)[mask]
    spread = torch.tensor(spread_of(stoch), dtype=torch.float64).view(1, H, 1, 1).expand(B, H, LQ, LK)[mask]
    first, second = (x.detach()[mask] for x in prior_of(stoch, k, mask))
    if stoch.prior.family == "gamma":
        return weibull_gamma_by_quadrature(*(x.numpy() for x in (spread, p, first, second))).sum()
    posterior = torch.distributions.LogNormal(p.log() - spread**2 / 2, spread)
    return torch.distributions.kl_divergence(posterior, torch.distributions.LogNormal(first, second)).sum().item()


@pytest.mark.parametrize(("posterior", "prior"), PAIRS, ids=str)
def test_recorded_divergence_is_that_of_every_valid_entry(posterior, prior):
    stoch = layer(posterior, prior)
    q, k, v = qkv()
    stoch.attend(q, k, v, mask=MASK)
    (term,) = stoch.kl_terms
    assert term.total.shape == term.entries.shape == ()
    assert term.entries == MASK.sum() * H
    assert term.examples == B
    assert term.total.item() == pytest.approx(expected_kl(stoch, q, k, MASK), rel=1e-7)


@pytest.mark.parametrize("mask", [None, MASK, torch.where(MASK, 0.3, -torch.inf).double()], ids=["none", "bool", "add"])
@pytest.mark.parametrize(("posterior", "prior"), [*PAIRS, (ba.Softmax(), None)], ids=str)
def test_attend_and_weights_agree(posterior, prior, mask):
    stoch = layer(posterior, prior)
    q, k, v = qkv()
    torch.manual_seed(7)
    mixed = stoch.attend(q, k, v, mask=mask).output
    attended = list(stoch.kl_terms)
    torch.manual_seed(7)
    weights = stoch.weights(logits_of(q, k), DenseRows(None if mask is None else MASK), k)
    torch.testing.assert_close(weights @ v, mixed, rtol=1e-12, atol=1e-12)
    for a, b in zip(attended, stoch.kl_terms, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("prior", [None, ba.ContextualPrior(share_heads=False)], ids=str)
def test_grouped_queries_share_their_keys(prior):
    stoch = layer(ba.Weibull(2.0), prior, heads=4)
    q, k, v = qkv()
    q = torch.cat([q, q + 1], dim=1)
    torch.manual_seed(0)
    grouped = stoch.attend(q, k, v, mask=MASK).output
    term = stoch.kl_terms[0]
    torch.manual_seed(0)
    spelled = stoch.attend(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1), mask=MASK).output
    torch.testing.assert_close(grouped, spelled)
    torch.testing.assert_close(term.total, stoch.kl_terms[0].total)


def test_causal_attention_counts_and_averages_the_lower_triangle():
    stoch = layer(ba.LogNormal(0.5), ba.ContextualPrior(hidden=None)).eval()
    q, k, v = qkv()
    offset = LK - LQ
    lower = torch.ones(LQ, LK, dtype=torch.bool).tril(offset)
    out = stoch.attend(q, k, v, is_causal=True).output
    torch.testing.assert_close(out, softmax_over(logits_of(q, k), lower) @ v)
    assert stoch.kl_terms[0].entries == B * H * lower.sum()
    assert stoch.kl_terms[0].total.item() == pytest.approx(expected_kl(stoch, q, k, lower.view(1, 1, LQ, LK)), rel=1e-6)


def test_a_graph_records_the_divergence_of_the_dense_attention_that_its_edges_leave():
    n = 5
    torch.manual_seed(1)
    adjacency = torch.rand(n, n) < 0.5
    adjacency[2] = False
    target, source = adjacency.nonzero().unbind(1)
    logits = torch.randn(H, n, n, dtype=torch.float64)
    keys = torch.randn(H, n, D, dtype=torch.float64)
    for posterior, prior in PAIRS:
        stoch = layer(posterior, prior)
        torch.manual_seed(9)
        dense = stoch.weights(logits, DenseRows(adjacency), keys)
        expected = stoch.kl_terms[0]
        torch.manual_seed(9)
        sparse = stoch.weights(logits[:, target, source].T, SegmentRows(target, source, n), keys)
        term = stoch.kl_terms[0]
        torch.testing.assert_close(sparse, dense[:, target, source].T, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(term.total, expected.total, rtol=1e-12, atol=0)
        assert term.entries == expected.entries == H * adjacency.sum()
        assert (term.examples, expected.examples) == (None, 1)


@pytest.mark.parametrize(("posterior", "prior"), SOME, ids=str)
def test_masked_keys_do_not_matter(posterior, prior):
    stoch = layer(posterior, prior)
    q, k, v = qkv()
    padding = torch.arange(LK) < LK - 1
    torch.manual_seed(0)
    before, term = stoch.attend(q, k, v, mask=padding).output, stoch.kl_terms[0]
    k, v = k.clone(), v.clone()
    k[..., -1, :], v[..., -1, :] = 1e6, -1e6
    torch.manual_seed(0)
    after = stoch.attend(q, k, v, mask=padding).output
    assert torch.equal(before, after)
    assert torch.equal(term.total, stoch.kl_terms[0].total)


@pytest.mark.parametrize(("posterior", "prior"), SOME, ids=str)
def test_wholly_masked_attention_is_zero_with_zero_gradients(posterior, prior):
    stoch = layer(posterior, prior)
    q, k, v = (x.requires_grad_() for x in qkv())
    nothing = torch.zeros(LQ, LK, dtype=torch.bool)
    weights = stoch.weights(logits_of(q, k), DenseRows(nothing), k)
    assert torch.equal(weights, torch.zeros_like(weights))
    output = stoch.attend(q, k, v, mask=nothing).output
    (term,) = stoch.kl_terms
    assert (term.total, term.entries) == (0, 0)
    (output.sum() + weights.sum() + term.total).backward()
    for x in (q, k, v):
        assert torch.equal(x.grad, torch.zeros_like(x))
    assert all(p.grad is None or torch.equal(p.grad, torch.zeros_like(p)) for p in stoch.parameters())


@pytest.mark.parametrize(("posterior", "prior"), PAIRS, ids=str)
def test_gradients_of_a_partly_masked_call_are_finite_and_right(posterior, prior):
    stoch = layer(posterior, prior)
    q, k, v = (x.requires_grad_() for x in qkv())

    def call(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(2)
        return stoch.attend(q, k, v, mask=MASK).output, stoch.kl_terms[0].total

    assert torch.autograd.gradcheck(call, (q, k, v, *stoch.parameters()), fast_mode=True)


@pytest.mark.parametrize("sampling", [None, True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("posterior", [ba.Weibull(1.0), ba.LogNormal(1.0)], ids=str)
def test_sampling_follows_training_unless_told(posterior, training, sampling):
    stoch = layer(posterior).train(training)
    stoch.sampling = sampling
    q, k, v = qkv()
    mean = torch.softmax(logits_of(q, k), dim=-1)
    weights = [stoch.weights(logits_of(q, k), DenseRows()) for _ in range(2)]
    outputs = [stoch.attend(q, k, v).output for _ in range(2)]
    if training if sampling is None else sampling:
        assert not torch.allclose(weights[0], weights[1], atol=1e-3)
        assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)
    else:
        for w, o in zip(weights, outputs, strict=True):
            torch.testing.assert_close(w, mean, rtol=1e-12, atol=0)
            torch.testing.assert_close(o, mean @ v, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("posterior", POSTERIORS, ids=str)
def test_the_divergence_is_of_the_distribution_not_of_the_draw(posterior):
    stoch = layer(posterior)
    q, k, v = qkv()
    totals = []
    for training in (True, True, False):
        stoch.train(training).attend(q, k, v)
        totals.append(stoch.kl_terms[0].total)
        assert stoch.kl_terms[0].training is training
    torch.testing.assert_close(totals[1], totals[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(totals[2], totals[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("posterior", [ba.Weibull(3.0), ba.LogNormal(0.5)], ids=str)
def test_unnormalised_weights_have_the_softmax_for_their_mean(posterior):
    # log W_ij − log W_i1 = log S_ij − log S_i1, whose moments scipy knows. Bounds are 5 standard errors,
    # each a false alarm of 6e-7; the seed is fixed.
    n = 20_000
    logits = torch.tensor([0.0, 1.0], dtype=torch.float64).expand(n, 1, 1, 2)
    stoch = ba.StochasticAttention(posterior, heads=1)
    torch.manual_seed(0)
    log_w = stoch.weights(logits, DenseRows()).log()
    difference = (log_w[..., 1] - log_w[..., 0]).flatten()
    variance = math.pi**2 / 6 / 9 if isinstance(posterior, ba.Weibull) else 0.25
    assert abs(difference.mean().item() - 1.0) < 5 * math.sqrt(2 * variance / n)
    # The kurtosis of a difference of two Gumbels is 4.2, of normals 3.
    assert difference.var().item() == pytest.approx(2 * variance, rel=5 * math.sqrt(3.2 / n))


def test_learned_spread_gets_gradients_from_draw_and_divergence():
    for posterior in (ba.Weibull(2.0, learned=True), ba.LogNormal(0.5, learned=True)):
        stoch = layer(posterior)
        q, k, v = qkv()
        stoch.attend(q, k, v).output.square().sum().backward()
        from_draw = stoch.posterior.log_parameter.grad.clone()
        stoch.posterior.log_parameter.grad = None
        stoch.kl_terms[0].total.backward()
        assert from_draw.shape == (H,)
        assert bool((from_draw != 0).all())
        assert bool((stoch.posterior.log_parameter.grad != 0).all())


def test_each_head_has_its_own_learned_spread():
    stoch = ba.StochasticAttention(ba.Weibull(1.0, learned=True), heads=2)
    with torch.no_grad():
        stoch.posterior.log_parameter[1] = math.log(1e6)
    logits = torch.zeros(1, 2, 50, 4)
    weights = stoch.weights(logits, DenseRows())
    assert weights[:, 0].std() > 0.1
    torch.testing.assert_close(weights[:, 1], torch.full((1, 50, 4), 0.25), rtol=0, atol=1e-4)


def test_nothing_is_recorded_when_recording_is_off_or_no_prior_stands():
    q, k, v = qkv()
    stoch = layer(ba.Weibull(2.0))
    stoch.record_kl = False
    stoch.attend(q, k, v)
    stoch.weights(logits_of(q, k), DenseRows())
    assert stoch.kl_terms == []
    stoch = layer(ba.Softmax())
    stoch.attend(q, k, v)
    assert stoch.prior is None
    assert stoch.kl_terms == []


def test_terms_say_whether_gradients_were_on():
    stoch = layer(ba.Weibull(2.0))
    q, k, v = (x.requires_grad_() for x in qkv())
    stoch.attend(q, k, v)
    assert stoch.kl_terms[0].differentiable
    assert stoch.kl_terms[0].total.requires_grad
    with torch.no_grad():
        stoch.attend(q, k, v)
    assert not stoch.kl_terms[0].differentiable


def test_an_untracked_layer_keeps_one_term_only():
    stoch = layer(ba.Weibull(2.0))
    q, k, v = qkv()
    for _ in range(3):
        stoch.attend(q, k, v)
    assert len(stoch.kl_terms) == 1
    assert stoch.calls_since_read == 3


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])  # noqa: S301
@pytest.mark.parametrize(("posterior", "prior"), SOME, ids=str)
def test_copies_leave_recorded_terms_behind_and_draw_the_same(posterior, prior, duplicate):
    stoch = layer(posterior, prior)
    q, k, v = (x.requires_grad_() for x in qkv())
    stoch.attend(q, k, v)
    copied = duplicate(stoch)
    assert copied.kl_terms == []
    assert copied.calls_since_read == 0
    assert len(stoch.kl_terms) == 1
    outputs = []
    for module in (stoch, copied):
        torch.manual_seed(4)
        outputs.append(module.attend(q, k, v).output)
        outputs.append(module.kl_terms[0].total)
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    own = {id(p) for p in stoch.parameters()}
    assert not own & {id(p) for p in copied.parameters()}


@pytest.mark.parametrize(("posterior", "prior"), SOME, ids=str)
def test_state_holds_tensors_alone_and_travels(posterior, prior):
    stoch = layer(posterior, prior)
    q, k, v = qkv()
    stoch.attend(q, k, v)
    file = io.BytesIO()
    torch.save(stoch.state_dict(), file)
    file.seek(0)
    fresh = ba.StochasticAttention(posterior, prior, heads=H, key_dim=D).double()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    fresh.attend(q, k, v)
    assert torch.equal(fresh.kl_terms[0].total, stoch.kl_terms[0].total)
    learned = posterior.is_learned or isinstance(prior, (ba.LearnedPrior, ba.ContextualPrior))
    assert bool(stoch.state_dict()) is learned


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("posterior", "prior"), SOME, ids=str)
def test_narrow_dtypes_are_kept_outside_and_widened_inside(posterior, prior, dtype):
    stoch = layer(posterior, prior).to(torch.float32)
    q, k, v = qkv(dtype)
    wide_inputs = [x.float() for x in (q, k, v)]
    torch.manual_seed(0)
    narrow, term = stoch.attend(q, k, v, mask=MASK).output, stoch.kl_terms[0]
    torch.manual_seed(0)
    reference = stoch.attend(*wide_inputs, mask=MASK).output
    assert narrow.dtype == dtype
    assert term.total.dtype == torch.float32
    assert torch.equal(narrow, reference.to(dtype))
    torch.testing.assert_close(term.total, stoch.kl_terms[0].total, rtol=1e-6, atol=0)
    weights = stoch.weights(logits_of(q, k), DenseRows(MASK), k)
    assert weights.dtype == dtype
    rows = weights.float().sum(-1)
    torch.testing.assert_close(rows, MASK.any(-1).expand_as(rows).float(), rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_autocast_leaves_the_inside_alone():
    stoch = layer(ba.Weibull(2.0), ba.ContextualPrior()).float()
    q, k, v = qkv(torch.float32)
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            results.append((stoch.attend(q, k, v, mask=MASK).output, stoch.kl_terms[0].total))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (2, 3, 4), (2, 1, 2, 3, 4)])
def test_odd_shapes(shape):
    heads = shape[-3]
    stoch = ba.StochasticAttention(ba.Weibull(1.0), heads=heads)
    weights = stoch.weights(torch.randn(shape), DenseRows())
    assert weights.shape == shape
    torch.testing.assert_close(weights.sum(-1), torch.full(shape[:-1], float(shape[-1] > 0)))
    (term,) = stoch.kl_terms
    assert term.entries == math.prod(shape)
    assert torch.isfinite(term.total)
    assert term.examples == (shape[0] if len(shape) > 3 else 1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3.0,), TypeError, r"posterior: must be a posterior such as Weibull\(\); got 3.0"),
        ((ba.Weibull,), TypeError, "posterior: must be a posterior"),
        ((ba.Weibull(), "constant"), TypeError, "prior: must be a prior .* got 'constant'"),
        ((ba.Softmax(), ba.ConstantPrior()), ValueError, "prior: .* takes no prior"),
        ((ba.Weibull(), ba.ConstantPrior(loc=0.0)), ValueError, "ConstantPrior: loc has no meaning for a gamma"),
        ((ba.LogNormal(), ba.LearnedPrior(rate=1.0)), ValueError, "LearnedPrior: rate has no meaning"),
        ((ba.Weibull(), ba.ContextualPrior()), ValueError, "ContextualPrior: this attention offers no keys"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        ba.StochasticAttention(*arguments, heads=2)


def test_no_heads_are_refused():
    with pytest.raises(ValueError, match="heads: must be at least 1; got 0"):
        ba.StochasticAttention(ba.Weibull(), heads=0)


def test_a_contextual_prior_asks_for_its_keys():
    stoch = ba.StochasticAttention(ba.Weibull(), ba.ContextualPrior(), heads=1, key_dim=2)
    with pytest.raises(ValueError, match=r"keys: ContextualPrior.* looks at the keys"):
        stoch.weights(torch.zeros(1, 1, 2, 2), DenseRows())


@pytest.mark.parametrize(
    ("query_valid", "message"),
    [
        (torch.ones(5, dtype=torch.bool), r"query_valid: shape \(5,\) does not broadcast to \(2, 3, 6\)"),
        (torch.ones(1, 1, 3, 6, dtype=torch.bool), "query_valid: shape"),
        (torch.ones(6), "query_valid: must be boolean"),
        (torch.ones(6, dtype=torch.bool, device="meta"), "query_valid: must be boolean and on cpu"),
    ],
)
def test_a_query_mask_that_does_not_fit_is_named(query_valid, message):
    layer, x = ba.StochasticAttention(ba.Weibull(), heads=3), torch.zeros(2, 3, 6, 4)
    with pytest.raises(ValueError, match=message):
        layer.attend(x, x, x, query_valid=query_valid)


@pytest.mark.parametrize("mask", [None, torch.ones(6, 6, dtype=torch.bool)], ids=["no mask", "mask of queries"])
def test_a_query_mask_without_dimensions(mask):
    layer, x = ba.StochasticAttention(ba.Weibull(), heads=3), torch.zeros(2, 3, 6, 4)
    layer.attend(x, x, x, mask=mask, query_valid=torch.tensor(True))
    assert layer.kl_terms[0].entries == 2 * 3 * 6 * 6
