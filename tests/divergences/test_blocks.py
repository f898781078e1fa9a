import pytest
import torch
from torch import Tensor

from bayesian_attention.divergences import Divergence, entrywise, reduce_valid, rows_in_budget, sum_over_row_blocks
from bayesian_attention.posteriors import Weibull
from bayesian_attention.priors import GammaParameters


class Rows:
    """The divergence of rows of given logits, and how often it was computed."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(2, rows, 6, generator=generator, dtype=torch.float64, requires_grad=True)
        self.valid = torch.rand(2, rows, 6, generator=generator) < 0.8
        self.calls: list[tuple[int, int]] = []

    def __call__(self, first: int, stop: int) -> Divergence:
        self.calls.append((first, stop))
        log_mean = self.logits[:, first:stop].log_softmax(-1)
        return reduce_valid(entrywise(Weibull(), 2.0, log_mean, GammaParameters(0.5, 1.0)), self.valid[:, first:stop])


@pytest.mark.parametrize("block", [1, 3, 7, 9, 10, 11, 100])
def test_the_sum_is_that_of_all_rows(block):
    rows = Rows(10)
    whole = rows(0, 10)
    found = sum_over_row_blocks(rows, 10, block)
    torch.testing.assert_close(found.total, whole.total, rtol=1e-12, atol=0)
    assert torch.equal(found.entries, whole.entries)
    (gradient,) = torch.autograd.grad(found.total, rows.logits)
    (expected,) = torch.autograd.grad(whole.total, rows.logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_a_block_is_computed_again_in_the_backward_pass_and_not_without_one():
    rows = Rows(10)
    found = sum_over_row_blocks(rows, 10, 4)
    assert rows.calls == [(0, 4), (4, 8), (8, 10)]
    found.total.backward()
    assert sorted(rows.calls) == sorted([(0, 4), (4, 8), (8, 10)] * 2)
    rows.calls.clear()
    with torch.no_grad():
        assert not sum_over_row_blocks(rows, 10, 4).total.requires_grad
    assert rows.calls == [(0, 4), (4, 8), (8, 10)]


def test_one_block_alone_is_computed_once():
    rows = Rows(10)
    sum_over_row_blocks(rows, 10, 10).total.backward()
    assert rows.calls == [(0, 10)]


def test_no_rows():
    rows = Rows(0)
    found = sum_over_row_blocks(rows, 0, 5)
    assert found.total.item() == found.entries.item() == 0


def test_what_is_kept_for_the_backward_pass_is_a_number_a_block():
    rows = Rows(100)
    kept: list[int] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        sum_over_row_blocks(rows, 100, 10)
    assert max(kept, default=0) <= 10


@pytest.mark.parametrize(
    ("shape", "budget", "rows"),
    [
        ((2, 3, 100, 50), 3000, 10),
        ((2, 3, 100, 50), 299, 1),
        ((100, 50), 1000, 20),
        (torch.Size([4, 100, 1]), 16, 4),
        ((2, 0, 5, 7), 10, 10),
        ((2, 3, 5, 0), 10, 10),
    ],
)
def test_rows_in_budget(shape, budget, rows):
    assert rows_in_budget(shape, budget) == rows
