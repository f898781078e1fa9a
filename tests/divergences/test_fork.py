"""A tensor with two readers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bayesian_attention.divergences import Port, fork
from bayesian_attention.layers import StochasticAttention
from bayesian_attention.posteriors import LogNormal, Weibull
from bayesian_attention.priors import ConstantPrior


@pytest.mark.parametrize("readers", ["both", "first", "second"])
def test_gradients_are_added(readers):
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    first, second, _ = fork(x)
    loss = torch.zeros(())
    expected = torch.zeros(2, 3)
    if readers != "second":
        loss, expected = loss + first.square().sum(), expected + 2 * x.detach()
    if readers != "first":
        loss, expected = loss + second.sum(), expected + 1  # an expanded gradient
    (grad,) = torch.autograd.grad(loss, x)
    assert torch.equal(grad, expected)


def test_the_sum_takes_the_memory_of_the_first_gradient():
    x = torch.ones(1, 3, requires_grad=True)
    first, second, port = fork(x)
    own = torch.full((1, 3), 2.0)
    left = Port(*(torch.zeros_like(part) for part in port))
    left.square.copy_(torch.eye(3) * 10)
    left.centre.fill_(0.5)
    left.weights[..., 1, :] = 2.0
    left.features[..., 1, :] = torch.tensor([100.0, 200.0, 300.0])
    (grad,) = torch.autograd.grad([first, second, *port], x, [own, torch.ones(1, 3), *left])
    assert grad.data_ptr() == own.data_ptr()
    assert grad.tolist() == [[208.0, 408.0, 608.0]]  # 2 + 1 + 10 (1 − 0.5) + 2 · 100, …


def test_a_gradient_that_is_differentiated_again_is_left_alone():
    x = torch.tensor([[2.0]], requires_grad=True)
    first, second, _ = fork(x)
    (grad,) = torch.autograd.grad(first**3 + second**2, x, create_graph=True)
    (again,) = torch.autograd.grad(grad, x)
    assert (grad.item(), again.item()) == (16.0, 14.0)


def test_without_gradients_it_is_the_tensor_itself():
    x = torch.ones(2, 2, requires_grad=True)
    with torch.no_grad():
        assert fork(x).own is x
        assert fork(x).port is None
    assert fork(x.detach()).other.requires_grad is False


@pytest.mark.parametrize("posterior", [Weibull(), LogNormal()], ids=str)
@pytest.mark.parametrize("same", [False, True])
def test_a_layer_s_gradients_with_the_divergence_are_the_reference_s(posterior, same):
    """The queries have a third reader, and may be the keys."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 20, 4) for _ in range(3)]

    def grads(backend: str, dtype: torch.dtype) -> list[Tensor]:
        layer = StochasticAttention(posterior, ConstantPrior(), heads=3).to(dtype)
        layer.backend = backend
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        query, key, value = (x * 1 for x in leaves)
        torch.manual_seed(1)
        output = layer.attend(query, query if same else key, value).output
        loss = output.square().sum() + 0.1 * layer.kl_terms[0].total + query.sin().sum() + 0 * key.sum()
        loss.backward()
        return [x.grad for x in leaves if x.grad is not None]

    for ours, expected in zip(grads("blockwise", torch.float32), grads("reference", torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)
