"""Which backend takes a call, and what is said where one does not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad

from bayesian_attention.engine import attend, backends
from bayesian_attention.engine.backends import choose
from bayesian_attention.posteriors import LogNormal, Softmax, Weibull
from tests.engine.inputs import qkv


@dataclass(frozen=True)
class Narrower(Weibull):
    """A family of a user's own."""


def of(length: int, posterior=Weibull(2.0), backend: str = "auto", **options) -> str:  # noqa: B008 - frozen
    return choose(backend, posterior, *qkv(batch=(1,), queries=length, keys=length, **options))


@pytest.mark.parametrize("posterior", [Weibull(2.0), LogNormal(0.3), Softmax()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_cpu_takes_blocks_unless_the_call_is_small(posterior, dtype):
    assert of(8, posterior, dtype=dtype) == "reference"
    assert of(256, posterior, dtype=dtype) == "blockwise"


def test_float64_takes_blocks_only_to_save_memory():
    assert of(256, dtype=torch.float64) == "reference"
    assert of(2200, heads=4, dtype=torch.float64) == "blockwise"


def test_empty_calls_have_a_backend():
    assert of(0, dtype=torch.float32) == "reference"


@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_families_that_only_the_reference_knows(backend):
    assert of(256, Narrower(2.0), dtype=torch.float32) == "reference"
    with pytest.raises(ValueError, match=f"'{backend}' draws from Softmax, Weibull, LogNormal alone.*'reference'"):
        of(256, Narrower(2.0), backend, dtype=torch.float32)


def fake_device(kind: str) -> mock._patch:
    """Tensors that say they are elsewhere."""
    return mock.patch.object(torch.Tensor, "device", torch.device(kind))


def test_a_gpu_takes_triton_where_it_can(monkeypatch):
    monkeypatch.setattr(backends, "_HAS_TRITON", True)
    with fake_device("cuda"):
        assert of(8, dtype=torch.float32) == "triton"
        assert of(64, dtype=torch.bfloat16) == "triton"
        assert of(64, dtype=torch.float64) == "blockwise"
        assert of(8, features=300, dtype=torch.float32) == "blockwise"
    monkeypatch.setattr(backends, "_HAS_TRITON", False)
    with fake_device("cuda"):
        assert of(64, dtype=torch.float32) == "blockwise"


@pytest.mark.parametrize(
    ("present", "options", "pattern"),
    [
        (False, {"dtype": torch.float32}, "needs the package triton.*backend='blockwise'"),
        (True, {"dtype": torch.float32}, "needs tensors on a GPU, and query is on cpu; backend='blockwise'"),
    ],
)
def test_triton_says_who_takes_what_it_does_not(monkeypatch, present, options, pattern):
    monkeypatch.setattr(backends, "_HAS_TRITON", present)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=f"backend: 'triton' {pattern}"):
        of(16, backend="triton", **options)


def test_triton_takes_no_float64_and_no_wide_heads(monkeypatch):
    monkeypatch.setattr(backends, "_HAS_TRITON", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="takes no float64; backend='blockwise' does"):
        of(16, backend="triton", dtype=torch.float64)
    with pytest.raises(ValueError, match="up to 256 features a head, got 300; backend='blockwise'"):
        of(16, backend="triton", features=300, dtype=torch.float32)


def test_an_unknown_backend():
    with pytest.raises(ValueError, match=re.escape("backend")):
        of(16, backend="cuda")


# Transformations of functions: the reference takes them, and the others say so.


def test_function_transforms_go_to_the_reference():
    q, k, v = qkv(batch=(3,), queries=100, keys=100, dtype=torch.float32)

    def loss(q, backend="auto"):
        return attend(q, k[0], v[0], Weibull(2.0), seed=3, backend=backend).output.square().sum()

    ours = torch.vmap(torch.func.grad(loss))(q)
    for row in range(3):
        leaf = q[row].clone().requires_grad_()
        loss(leaf, "blockwise").backward()
        torch.testing.assert_close(ours[row], leaf.grad, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"'blockwise' does not work under torch\.func.*backend='reference'"):
        torch.func.grad(loss)(q[0], "blockwise")


def test_forward_mode_goes_to_the_reference():
    q, k, v = qkv(batch=(1,), queries=100, keys=100, dtype=torch.float32)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        tangent = forward_ad.unpack_dual(attend(dual, k, v, Weibull(2.0), seed=3).output).tangent
        assert tangent is not None
        assert bool(tangent.any())
        with pytest.raises(ValueError, match="no forward-mode derivative; backend='reference'"):
            attend(dual, k, v, Weibull(2.0), seed=3, backend="blockwise")


def test_second_derivatives_are_refused_by_name():
    q, k, v = (x.requires_grad_() for x in qkv(batch=(1,), queries=100, keys=100, dtype=torch.float32))
    output = attend(q, k, v, Weibull(2.0), seed=3).output
    (grad,) = torch.autograd.grad(output.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative; backend='reference' has one"):
        grad.square().sum().backward()
    output = attend(q, k, v, Weibull(2.0), seed=3, backend="reference").output
    (grad,) = torch.autograd.grad(output.square().sum(), q, create_graph=True)
    grad.square().sum().backward()
    assert q.grad is not None
