import pytest
import torch

from bayesian_attention.numerics import autocast_off, wide


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float32),
    ],
)
def test_nothing_narrower_than_float32_is_left(dtype, expected):
    x = torch.tensor([0, 1, 3]).to(dtype)
    assert wide(x).dtype == expected
    assert wide(x).tolist() == [0.0, 1.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_wide_already_is_not_copied(dtype):
    x = torch.ones(3, dtype=dtype)
    assert wide(x) is x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_come_back_in_the_dtype_of_the_input(dtype):
    x = torch.ones(3, dtype=dtype, requires_grad=True)
    (2 * wide(x)).sum().backward()
    assert x.grad.dtype == dtype
    assert x.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_off_inside_and_back_on_after(dtype):
    x = torch.eye(4, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert (x.float() @ x.float()).dtype == torch.bfloat16
        with autocast_off(x):
            assert (x.float() @ x.float()).dtype == torch.float32
        assert (x.float() @ x.float()).dtype == torch.bfloat16
    with autocast_off(x):
        assert (x @ x).dtype == dtype
