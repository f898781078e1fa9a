"""One draw, whatever computes it: the fused backends against the float64 reference."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bayesian_attention.engine import AttentionOutput, attend
from bayesian_attention.posteriors import LogNormal, Posterior, PosteriorParameter, Softmax, Weibull
from tests.engine.inputs import LEARNED, qkv, randn, random_mask
from tests.engine.interpreter import interpreted

FAMILIES = [Weibull(2.0), LogNormal(0.7), Softmax()]


def gradients(
    posterior: Posterior, tensors: dict[str, Tensor | None], *, dtype: torch.dtype | None = None, **options: Any
) -> tuple[AttentionOutput, dict[str, Tensor]]:
    """Output and gradients of a fixed function of output and lse; lse counts only in rows that see a key."""
    leaves = {
        name: x if x is None or x.dtype == torch.bool else x.detach().to(dtype or x.dtype).requires_grad_()
        for name, x in tensors.items()
    }
    module = posterior.build(tensors["query"].shape[-3])
    result = attend(
        leaves["query"], leaves["key"], leaves["value"], module, mask=leaves.get("mask"), **{"seed": 11, **options}
    )
    seen = torch.isfinite(result.lse)
    loss = (result.output.double() * randn(*result.output.shape, seed=21)).sum()
    loss = loss + (result.lse.double() * randn(*result.lse.shape, seed=22))[seen].sum()
    loss.backward()
    grads = {name: x.grad for name, x in leaves.items() if x is not None and x.requires_grad}
    grads |= {"spread": parameter.grad for parameter in module.parameters()}  # noqa: B035 - one or none
    return result, {name: torch.zeros(()) if grad is None else grad for name, grad in grads.items()}


def assert_gradients_close(ours: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """To a tolerance relative to the largest entry of each, or to 1 where that is tiny: what cancels is no error."""
    assert ours.keys() == expected.keys()
    for name, grad in ours.items():
        # A gradient may be too large for float16, and is infinite then.
        largest = torch.finfo(grad.dtype).max
        bounded = expected[name].double().clamp(-largest, largest)
        size = float(bounded.abs().max()) if grad.numel() else 0.0
        torch.testing.assert_close(
            grad.double().clamp(-largest, largest),
            bounded,
            rtol=0,
            atol=tolerance * max(size, 0.1),
            msg=f"gradient of {name}",
        )


def compare(
    posterior: Posterior,
    tensors: dict[str, Tensor | None],
    output_tolerance: float = 1e-5,
    backend: str = "blockwise",
    **options: Any,
) -> None:
    """A backend in the tensors' own dtype, against the reference in float64."""
    ours, our_grads = gradients(posterior, tensors, backend=backend, **options)
    expected, grads = gradients(posterior, tensors, dtype=torch.float64, backend="reference", **options)
    value = tensors["value"]
    assert value is not None
    assert ours.output.dtype == value.dtype
    size = max(1.0, float(value.abs().max())) if value.numel() else 1.0
    torch.testing.assert_close(ours.output.double(), expected.output, rtol=0, atol=output_tolerance * size)
    torch.testing.assert_close(ours.lse.double(), expected.lse, rtol=1e-5, atol=1e-5)
    assert_gradients_close(our_grads, grads, 10 * output_tolerance)


@pytest.mark.parametrize("posterior", [*FAMILIES, *LEARNED])
@pytest.mark.parametrize(
    "shape", [{}, {"kv_heads": 2}, {"batch": ()}, {"batch": (2, 3)}, {"queries": 1, "keys": 1}], ids=str
)
@pytest.mark.parametrize("mask", ["none", "boolean", "additive", "keys", "causal"])
def test_blockwise_is_the_reference(posterior, shape, mask):
    q, k, v = qkv(**shape, dtype=torch.float32)
    size = (*q.shape[:-1], k.shape[-2])
    masks = {
        "boolean": random_mask(*size),
        "additive": randn(*size, dtype=torch.float32).masked_fill(~random_mask(*size), -math.inf),
        "keys": randn(*size[:-3], 1, 1, size[-1], dtype=torch.float32),
    }
    compare(posterior, {"query": q, "key": k, "value": v, "mask": masks.get(mask)}, is_causal=mask == "causal")


@pytest.mark.parametrize("posterior", FAMILIES)
@pytest.mark.parametrize("backend", ["blockwise", "auto"])
def test_float64_is_exact(posterior, backend):
    q, k, v = qkv()
    tensors = {"query": q, "key": k, "value": v, "mask": randn(2, 1, 5, 7)}
    ours, our_grads = gradients(posterior, tensors, backend=backend)
    expected, grads = gradients(posterior, tensors, backend="reference")
    torch.testing.assert_close(ours.output, expected.output, rtol=0, atol=1e-13)
    assert_gradients_close(our_grads, grads, 1e-12)


@pytest.mark.parametrize("posterior", LEARNED)
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True, "query_offset": -2}, {"samples": 3, "sample_index": 4}], ids=str
)
def test_gradcheck(posterior, options):
    q, k, v = qkv(heads=2, kv_heads=1, queries=3, keys=4, features=3, values=2)
    mask = randn(1, 2, 1, 4).masked_fill(torch.tensor([False, False, True, False]), -math.inf)
    module = posterior.build(2).double()

    def of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, log_spread: Tensor) -> tuple[Tensor, Tensor]:
        result = torch.func.functional_call(
            _Attend(module, backend="blockwise", seed=3, **options),
            {"module.log_parameter": log_spread},
            (q, k, v, mask),
        )
        return result.output, result.lse.masked_fill(result.lse.isneginf(), 0.0)

    inputs = [x.requires_grad_() for x in (q, k, v, mask, module.log_parameter.detach())]
    assert torch.autograd.gradcheck(of, inputs)


class _Attend(torch.nn.Module):
    def __init__(self, module: PosteriorParameter, **options: Any) -> None:
        super().__init__()
        self.module, self.options = module, options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> AttentionOutput:
        return attend(q, k, v, self.module, mask=mask, **self.options)


def compare_any(draw: Any, backend: str, queries: list[int], keys: list[int]) -> None:
    """A call at random: shapes, masks, dtypes, scales and seeds."""
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    batch = draw(st.sampled_from([(), (1,), (2,), (2, 2)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16]))
    logit_size = draw(st.sampled_from([0.1, 1.0, 30.0, 1e4]))
    heads, seed = kv_heads * groups, draw(st.integers(-(2**63), 2**63 - 1))
    posterior = draw(
        st.sampled_from(
            [
                Weibull(0.3),
                Weibull(1.0),
                Weibull(10.0),
                Weibull(1e6),
                LogNormal(0.01),
                LogNormal(2.0),
                Softmax(),
                *LEARNED,
            ]
        )
    )
    lengths = draw(st.sampled_from(queries)), draw(st.sampled_from(keys))
    q, k, v = qkv(batch, heads, kv_heads, *lengths, draw(st.integers(1, 9)), draw(st.integers(1, 9)), dtype=dtype)
    size = (*batch, heads, *lengths)
    # Masks broadcast in any dimension.
    mask_size = [draw(st.sampled_from([1, n])) for n in size]
    kind = draw(st.sampled_from(["none", "boolean", "additive"]))
    valid = torch.rand(mask_size, generator=torch.Generator().manual_seed(seed % 2**63)) < draw(
        st.sampled_from([0.1, 0.7])
    )
    out = draw(st.sampled_from([-math.inf, "lowest", -1e4]))
    mask = None
    if kind == "boolean":
        mask = valid
    elif kind == "additive":
        mask = randn(*mask_size, dtype=dtype).masked_fill(~valid, torch.finfo(dtype).min if out == "lowest" else out)
    options = {"is_causal": draw(st.booleans()), "scale": draw(st.sampled_from([None, 0.5])), "seed": seed}
    if options["is_causal"]:
        options["query_offset"] = draw(st.sampled_from([None, 0, -1, 3]))
    # Large logits lose digits in float32 before any attention is computed, unless they are whole numbers.
    if logit_size > 1:
        q, k = (q * logit_size).round(), k.round()
        options["scale"] = 1.0
        mask = mask.round() if kind == "additive" else mask
    tensors = {"query": q, "key": k, "value": v, "mask": mask}
    # The output is rounded to half precision, and so is its gradient's way back.
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    compare(posterior, tensors, tolerance, backend, **options)


@given(st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_attention_by_blocks(data):
    """Outputs to 1e-5, gradients to 1e-4 of the largest."""
    compare_any(data.draw, "blockwise", [1, 2, 5, 17, 70], [1, 2, 7, 33, 300])


# A gradient beyond the largest float16 is infinite with every backend; the interpreter, made of numpy, also warns.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate])
def test_any_attention_by_triton(data):
    """Likewise, in Triton's interpreter."""
    with interpreted():
        compare_any(data.draw, "triton", [1, 2, 5, 17, 40], [1, 2, 7, 33, 50])
