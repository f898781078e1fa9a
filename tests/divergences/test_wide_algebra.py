import pytest
import torch
from torch import Tensor

from bayesian_attention.divergences.wide_algebra import double, double_of, gram, wide_product, wide_sum

#: Fewer rows than a block of either size, whole blocks, and whole blocks and some rows.
LENGTHS = [0, 1, 15, 16, 17, 256, 300, 512, 1000]


def features(
    length: int, *, batch: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tensor:
    return torch.randn(*batch, length, 4, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def plain(name: str, x: Tensor, weights: Tensor) -> Tensor:
    if name == "sum":
        return x.sum(-2)
    return x.transpose(-1, -2) @ x if name == "gram" else weights @ x


def wide(name: str, x: Tensor, weights: Tensor) -> Tensor:
    if name == "sum":
        return wide_sum(x)
    return gram(x) if name == "gram" else wide_product(weights, x)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["sum", "gram", "product"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients(name, length, dtype):
    """Of contiguous numbers and of a slice of a transposed tensor, against float64."""
    for strided in (False, True):
        x, weights = features(length, dtype=dtype), features(length, dtype=dtype, seed=1).transpose(-1, -2)
        if strided:
            x = features(length + 2, dtype=dtype).transpose(1, 2).contiguous().transpose(1, 2)[..., 1:-1, :]
        found = wide(name, x, weights)
        expected = plain(name, x.double(), weights.double())
        assert found.dtype == torch.float64
        close = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
        torch.testing.assert_close(found, expected, **close)
        upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        inputs = [x, weights] if name == "product" else [x]
        gradients = torch.autograd.grad(found, inputs, upstream)
        for one, other in zip(gradients, torch.autograd.grad(expected, inputs, upstream), strict=True):
            assert one.dtype == dtype
            torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize("length", [3, 20])
def test_gradcheck(length):
    x = features(length, batch=(2,), dtype=torch.float64)
    weights = features(length, batch=(2,), dtype=torch.float64, seed=1).detach().transpose(-1, -2).requires_grad_()
    assert torch.autograd.gradcheck(wide_sum, x)
    for function, inputs in ((gram, (x,)), (wide_product, (weights, x))):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", ["sum", "product"])
def test_equal_terms_do_not_round_alike(name):
    """A hundred thousand thirds in float32: to 1e-7, where one running sum would be off by 1e-3."""
    x = torch.full((100_000, 1), 1 / 3)
    total = wide(name, x, torch.ones(1, 100_000)).item()
    assert total == pytest.approx(x.double().sum().item(), rel=1e-7)


def test_products_cancel_in_float64():
    """Ten thousand rows of both signs, whose products sum to a millionth of their size."""
    x = features(10_000, batch=())
    x = torch.cat([x, -x * (1 + 1e-6)]).detach()
    exact = x.double().sum(-2)
    # The errors of the blocks are independent: at most 1e-7 of a term each, over 1250 blocks.
    assert (wide_sum(x) - exact).abs().max() < 1e-4
    assert (wide_product(torch.ones(1, len(x)), x) - exact).abs().max() < 1e-4


@pytest.mark.parametrize("length", [10, 300])
def test_function_transforms(length):
    x, weights = features(length).detach(), features(length, seed=1).detach().transpose(-1, -2)
    for name in ("sum", "gram", "product"):

        def total(x: Tensor, weights: Tensor, name: str = name) -> Tensor:
            return wide(name, x, weights).square().sum()

        def expected(x: Tensor, weights: Tensor, name: str = name) -> Tensor:
            return plain(name, x.double(), weights.double()).square().sum()

        gradient = torch.func.grad(expected, argnums=(0, 1))(x, weights)
        size = gradient[0].abs().max().item()
        for found in (
            torch.func.grad(total, argnums=(0, 1))(x, weights),
            torch.vmap(torch.func.grad(total, argnums=(0, 1)))(x, weights),
        ):
            for one, other in zip(found, gradient, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * size)
        # One operand that is the same for the whole batch.
        apart = torch.vmap(lambda w, one=x[0], name=name: wide(name, one, w))(weights[:, :1])
        together = torch.stack([plain(name, x[0].double(), w.double()) for w in weights[:, :1]])
        torch.testing.assert_close(apart, together.expand_as(apart), rtol=1e-5, atol=1e-4)


def test_double_precision_where_there_is_any():
    x = torch.ones(2)
    assert double(x).dtype == double_of(x) == torch.float64
