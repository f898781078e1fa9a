import copy

import pytest
import torch
from torch import Tensor

import bayesian_attention as ba

B, LQ, LK, DQ, DK, HID = 3, 2, 4, 5, 6, 7
PADDING = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1]], dtype=torch.bool)
PER_QUERY = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]], dtype=torch.bool).repeat(B, 1, 1)
SMALL = ba.Weibull(2.0)


def layer(posterior: ba.Posterior | None = None, prior: ba.Prior | None = None) -> ba.AdditiveAttention:
    torch.manual_seed(0)
    return ba.AdditiveAttention(DQ, DK, HID, posterior=posterior or SMALL, prior=prior).double()


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(B, LQ, DQ), (B, LK, DK), (B, LK, 3)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def by_hand(module: ba.AdditiveAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None):
    """The equations, one pair of query and key at a time."""
    contexts, weights = torch.zeros(B, LQ, value.shape[-1]).double(), torch.zeros(B, LQ, LK).double()
    for b in range(B):
        for i in range(LQ):
            scores = {}
            for j in range(LK):
                if mask is not None and not (mask[b, j] if mask.dim() == 2 else mask[b, i, j]):
                    continue
                hidden = module.query_proj.weight @ query[b, i] + module.key_proj.weight @ key[b, j]
                scores[j] = (module.score.weight[0] @ torch.tanh(hidden + module.key_proj.bias)).exp()
            for j, score in scores.items():
                weights[b, i, j] = score / sum(scores.values())
                contexts[b, i] += weights[b, i, j] * value[b, j]
    return contexts, weights


@pytest.mark.parametrize("own_values", [True, False])
@pytest.mark.parametrize("mask", [None, PADDING, PER_QUERY], ids=["none", "keys", "queries"])
def test_agrees_with_a_loop(mask, own_values):
    module = layer().eval()
    query, key, value = inputs()
    context, weights = module(query, key, value if own_values else None, mask=mask)
    expected = by_hand(module, query, key, value if own_values else key, mask)
    torch.testing.assert_close(context, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights, expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [None, PADDING, PER_QUERY[:, :1]], ids=["none", "keys", "queries"])
def test_one_query_an_example(mask):
    module = layer().train()
    query, key, value = inputs()
    results = []
    for q in (query[:, 0], query[:, :1]):
        with ba.sampling(module, True, seed=0):
            results.append(module(q, key, value, mask=mask))
    (context, weights), (contexts, all_weights) = results
    assert context.shape == (B, 3)
    assert weights.shape == (B, LK)
    assert torch.equal(context, contexts[:, 0])
    assert torch.equal(weights, all_weights[:, 0])


@pytest.mark.parametrize("posterior", [ba.Weibull(1e6), ba.LogNormal(1e-6)], ids=str)
def test_without_spread_it_is_the_mean(posterior):
    module = layer(posterior)
    args = inputs()
    drawn = module.train()(*args, mask=PADDING)
    mean = module.eval()(*args, mask=PADDING)
    for a, b in zip(drawn, mean, strict=True):
        assert not torch.equal(a, b)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_samples_in_training_and_mixes_with_what_it_drew():
    module = layer()
    query, key, value = inputs()
    (context, weights), (_, others) = (module(query, key, value, mask=PADDING) for _ in range(2))
    assert not torch.allclose(weights, others, atol=1e-3)
    torch.testing.assert_close(context, weights @ value)
    assert bool((weights.transpose(1, 2)[~PADDING] == 0).all())
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, LQ).double())


@pytest.mark.parametrize("prior", [None, ba.LearnedPrior(), ba.ContextualPrior(hidden=3)], ids=str)
def test_divergence_counts_what_the_mask_leaves(prior):
    module = layer(prior=prior)
    query, key, value = inputs()
    module(query, key, value, mask=PADDING)
    total = ba.kl_divergence(module, examples=1)
    (term,) = module.stoch.kl_terms
    assert term.entries == PADDING.sum() * LQ
    assert term.examples == B
    alone = []
    for b in range(B):
        kept = PADDING[b]
        module(query[b : b + 1], key[b : b + 1, kept], value[b : b + 1, kept])
        alone.append(ba.kl_divergence(module))
    torch.testing.assert_close(torch.stack(alone).sum(), total)


def test_an_example_without_keys_gives_zeros_and_zero_gradients():
    module = layer(prior=ba.ContextualPrior())
    query, key, value = (x.requires_grad_() for x in inputs())
    mask = PADDING.clone()
    mask[1] = False
    context, weights = module(query, key, value, mask=mask)
    assert bool((context[1] == 0).all() & (weights[1] == 0).all())
    (context.square().sum() + ba.kl_divergence(module)).backward()
    for x in (query, key, value):
        assert bool(x.grad.isfinite().all())
        assert bool((x.grad[1] == 0).all())
        assert bool((x.grad[0] != 0).any())


def test_gradcheck_under_a_fixed_seed():
    module = layer(ba.Weibull(1.5, learned=True), ba.ContextualPrior(hidden=3, activation="tanh"))
    args = [x.requires_grad_() for x in inputs()]

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with ba.sampling(module, True, seed=0):
            return *module(*tensors[:3], mask=PADDING), ba.kl_divergence(module)

    assert torch.autograd.gradcheck(call, (*args, *module.parameters()), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes(dtype):
    module = layer().eval()
    args = inputs()
    expected = module(*args, mask=PADDING)
    narrow = copy.deepcopy(module).to(dtype)
    for result, reference in zip(narrow(*(x.to(dtype) for x in args), mask=PADDING), expected, strict=True):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), reference, rtol=0, atol=16 * torch.finfo(dtype).eps)


def test_autocast():
    module = layer().float()
    query, key, value = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        context, weights = module(query, key, value, mask=PADDING)
    assert bool(context.isfinite().all())
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(B, LQ), rtol=0, atol=2e-2)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 1, 1), (0, 2, 3), (2, 0, 3), (2, 2, 0)])
@pytest.mark.parametrize("masked", ["none", "keys", "queries"])
def test_odd_sizes(batch, queries, keys, masked):
    module = layer()
    mask = {"none": None, "keys": torch.ones(batch, keys), "queries": torch.ones(batch, queries, keys)}[masked]
    query, key = torch.randn(batch, queries, DQ).double(), torch.randn(batch, keys, DK).double()
    context, weights = module(query, key, mask=None if mask is None else mask.bool())
    assert weights.shape == (batch, queries, keys)
    torch.testing.assert_close(context, key.repeat_interleave(queries, dim=0).view(context.shape) if keys else context)
    assert bool((context == 0).all()) or keys == 1


def test_non_contiguous_input():
    module = layer().eval()
    query, key, value = inputs()
    contiguous = module(query, key, value, mask=PER_QUERY)
    strided = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (query, key, value, PER_QUERY)]
    assert not any(x.is_contiguous() for x in strided)
    for a, b in zip(module(*strided[:3], mask=strided[3]), contiguous, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_draw_the_same_in_whatever_batch():
    module = layer().eval()
    query, key, value = inputs()

    def call(rows: slice) -> Tensor:
        with ba.sampling(module, True, seed=2, batch_ids=torch.arange(B)[rows]):
            return module(query[rows], key[rows], value[rows], mask=PADDING[rows])[1]

    torch.testing.assert_close(torch.cat([call(slice(0, 1)), call(slice(1, 3))]), call(slice(None)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(LQ)}, r"query, key: must have shapes .* got \(2,\)"),
        ({"query": torch.zeros(B + 1, LQ, DQ)}, r"query, key: .* got \(4, 2, 5\) and \(3, 4, 6\)"),
        ({"key": torch.zeros(B, DK)}, r"query, key: .* and \(3, 6\)"),
        ({"query": torch.zeros(B, LQ, DQ + 1)}, "query: must have 5 features; got 6"),
        ({"key": torch.zeros(B, LK, DK + 1)}, "key: must have 6 features; got 7"),
        ({"value": torch.zeros(B, LK + 1, 3)}, r"value: shape \(3, 5, 3\) does not fit"),
        ({"value": torch.zeros(B, LK)}, r"value: shape \(3, 4\) does not fit"),
        ({"mask": torch.zeros(B, LK)}, "mask: must be boolean, .* got torch.float32"),
        ({"mask": torch.zeros(LK, B).bool()}, r"mask: must have shape \(3, 4\) or \(3, 2, 4\); got \(4, 3\)"),
        ({"mask": torch.zeros(B, 1, LQ, LK).bool()}, "mask: must have shape"),
    ],
)
def test_wrong_input_is_named(changes, message):
    module = layer().float()
    query, key, value = inputs(torch.float32)
    with pytest.raises(ValueError, match=message):
        module(**{"query": query, "key": key, "value": value, **changes})


@pytest.mark.parametrize("name", ["query_dim", "key_dim", "hidden_dim"])
@pytest.mark.parametrize("value", [0, 2.5, True])
def test_wrong_sizes_are_named(name, value):
    sizes = {"query_dim": 2, "key_dim": 2, "hidden_dim": 2, name: value}
    with pytest.raises(ValueError, match=f"AdditiveAttention: {name} must be a whole number"):
        ba.AdditiveAttention(**sizes)
