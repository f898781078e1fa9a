"""Sums of squared dot products by Gram matrices, against all dot products in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bayesian_attention.divergences import fork
from bayesian_attention.divergences.squares import Vectors, squared_products

FACTOR = -0.37


def leaves(length: int, keys: int, extras: int, dtype: torch.dtype, offset: float = 0.0) -> list[Tensor]:
    """Queries, keys, and the extra features of both; the keys ``offset`` away from 0."""
    generator = torch.Generator().manual_seed(length + extras)
    query = torch.randn(2, 3, length, 5, generator=generator, dtype=torch.float64)
    key = torch.randn(2, 3, keys, 5, generator=generator, dtype=torch.float64) + offset
    extra = [torch.randn(2, 3, extras, n, generator=generator, dtype=torch.float64) for n in (length, keys)]
    return [x.requires_grad_() for x in (query.to(dtype), key.to(dtype), *extra)]


def vectors_of(query: Tensor, key: Tensor, row_extra: Tensor, key_extra: Tensor) -> Vectors:
    centre = key.detach().mean(-2, keepdim=True)
    scale = torch.tensor(FACTOR, dtype=query.dtype).double()
    return Vectors(query, key, centre, row_extra, key_extra, FACTOR, scale)


def dense(query: Tensor, key: Tensor, row_extra: Tensor, key_extra: Tensor) -> Tensor:
    """The definition, with the centre that the vectors have."""
    query, key = query.double(), key.double()
    centre = key.detach().mean(-2, keepdim=True)
    first = row_extra[..., :1, :] + FACTOR * (query @ centre.mT).mT
    extra = torch.cat([first, row_extra[..., 1:, :]], dim=-2)
    return (FACTOR * query @ (key - centre).mT + extra.mT @ key_extra).square().sum((-2, -1))


@pytest.mark.parametrize("with_ports", [False, True])
@pytest.mark.parametrize("extras", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("length", "keys"), [(1, 1), (7, 400), (515, 300)])
def test_value_and_gradients(length, keys, dtype, extras, with_ports):
    """Through ports too, beside gradients of the first reader, contiguous or not."""
    for offset in (0.0, 30.0):
        inputs = leaves(length, keys, extras, dtype, offset)
        weights = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.1, 1.0]], dtype=torch.float64)
        expected = dense(*inputs)
        loss = (weights * expected).sum() + inputs[0].sum() + inputs[1].sin().sum()
        expected_grads = torch.autograd.grad(loss, inputs)
        if with_ports:
            (query, other_query, query_port), (key, other_key, key_port) = fork(inputs[0]), fork(inputs[1])
            found = squared_products(vectors_of(other_query, other_key, *inputs[2:]), (query_port, key_port))
        else:
            query, key = inputs[:2]
            found = squared_products(vectors_of(*inputs))
        loss = (weights * found).sum() + query.sum() + key.sin().sum()
        grads = torch.autograd.grad(loss, inputs)
        tolerance = 1e-10 if dtype == torch.float64 else 1e-4
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
        for grad, other in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(grad, other, rtol=0, atol=tolerance * other.abs().max().item())


def test_gradients_twice():
    small = [x.detach()[:1, :1].requires_grad_() for x in leaves(9, 4, 2, torch.float64)]
    centre = small[1].detach().mean(-2, keepdim=True)

    def function(*xs: Tensor) -> Tensor:
        scale = torch.tensor(FACTOR, dtype=torch.float64)
        return squared_products(Vectors(xs[0], xs[1], centre, xs[2], xs[3], FACTOR, scale))

    assert torch.autograd.gradcheck(function, small)
    assert torch.autograd.gradgradcheck(function, small)


def test_second_gradients_through_ports():
    inputs = leaves(6, 5, 2, torch.float64)

    def second(function_of: Callable[[], Tensor]) -> list[Tensor]:
        loss = function_of()
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in grads), inputs))

    def ported() -> Tensor:
        (query, other_query, query_port), (key, other_key, key_port) = fork(inputs[0]), fork(inputs[1])
        vectors = vectors_of(other_query, other_key, *inputs[2:])
        return squared_products(vectors, (query_port, key_port)).sum() + (query.sum() * key.sum())

    def plain() -> Tensor:
        return squared_products(vectors_of(*inputs)).sum() + inputs[0].sum() * inputs[1].sum()

    for found, expected in zip(second(ported), second(plain), strict=True):
        torch.testing.assert_close(found, expected)


def test_nothing_as_large_as_the_queries_comes_back_through_a_port():
    inputs = leaves(50, 60, 1, torch.float32)
    (_, other_query, query_port), (_, other_key, key_port) = fork(inputs[0]), fork(inputs[1])
    squares = squared_products(vectors_of(other_query, other_key, *inputs[2:]), (query_port, key_port))
    direct = torch.autograd.grad(squares.sum(), [other_query, other_key], allow_unused=True)
    assert direct == (None, None)


def test_vmap():
    inputs = [x.detach() for x in leaves(9, 12, 2, torch.float64)]
    each = torch.vmap(lambda *xs: squared_products(vectors_of(*xs)))(*inputs)
    torch.testing.assert_close(each, dense(*inputs))
