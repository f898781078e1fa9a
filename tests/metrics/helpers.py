"""What the tests of the metrics share."""

import copy
import itertools

import torch


def classification(n=200, classes=4, seed=0, dtype=torch.float64):
    """Probabilities and targets that agree more often than by chance."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    target = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)
    return (1.5 * logits).softmax(dim=1).to(dtype), target


def fed(metric, *data, cuts=(), dim=0):
    """``metric`` after one update a piece of the data, cut along ``dim`` (of the last argument: 0)."""
    n = data[-1].shape[0]
    ends = [0, *cuts, n]
    for start, stop in itertools.pairwise(ends):
        metric.update(*(x.narrow(dim if i < len(data) - 1 else 0, start, stop - start) for i, x in enumerate(data)))
    return metric


def check_splits(metric, *data, dim=0):
    """Batches, an empty one among them, forward() and merged states all give what one update gives."""
    n = data[-1].shape[0]
    whole = fed(copy.deepcopy(metric), *data, dim=dim).compute()

    def same(other):
        torch.testing.assert_close(other, whole, rtol=1e-12, atol=1e-14)

    same(fed(copy.deepcopy(metric), *data, cuts=(1, n // 3, n // 3, n - 2), dim=dim).compute())

    first, second = copy.deepcopy(metric), copy.deepcopy(metric)
    half = [x.narrow(dim if i < len(data) - 1 else 0, 0, n // 2) for i, x in enumerate(data)]
    rest = [x.narrow(dim if i < len(data) - 1 else 0, n // 2, n - n // 2) for i, x in enumerate(data)]
    first.update(*half)
    second.update(*rest)
    first.merge_state(second)
    same(first.compute())

    forward = copy.deepcopy(metric)
    of_half = forward(*half)
    torch.testing.assert_close(of_half, fed(copy.deepcopy(metric), *half, dim=dim).compute(), rtol=1e-12, atol=1e-14)
    forward(*rest)
    same(forward.compute())

    forward.reset()
    forward.update(*data)
    same(forward.compute())
