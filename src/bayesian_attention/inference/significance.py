"""Do the posterior draws agree on which class leads? Student's t-tests between the two leading classes."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

Test = Literal["paired", "welch"]
Values = Literal["log_probabilities", "probabilities"]

#: How far rounding in half precision may lift a log-probability above 0.
_SLACK = 0.05

#: Standard deviations below so many units of rounding, of outputs that differ by the order of summation, are none.
_ROUNDING_UNITS = 4


def check_options(test: str, values: str) -> None:
    """Refuse names of tests and of values that are unknown.

    Raises:
        ValueError: one is.
    """
    if test not in get_args(Test):
        raise ValueError(f"test: must be 'paired' or 'welch'; got {test!r}")
    if values not in get_args(Values):
        raise ValueError(f"values: must be 'log_probabilities' or 'probabilities'; got {values!r}")


def two_leading_p_values(
    log_probabilities: Tensor, *, test: Test = "paired", values: Values = "log_probabilities"
) -> Tensor:
    """Two-sided p-value of the hypothesis that the two most probable classes have the same mean over draws.

    The two classes are those of the highest mean probability; of equals, those of the lowest index. Draws
    that are all the same, as those of a deterministic model, give a p-value of 1, however far apart the
    classes are: they carry no evidence that draws agree. Variation within the rounding of the input's dtype
    counts as none. A p-value shrinks with the number of draws, so that number belongs beside every figure
    made of it.

    Source: Fan et al., "Bayesian Attention Modules", NeurIPS 2020, section 4 (paired, on logits, for graphs;
    Welch's, on probabilities, for visual question answering).

    Args:
        log_probabilities: (S, …, C) with S ≥ 2 draws and C ≥ 2 classes; floating point. −∞, a probability
            that underflowed, counts as the log of the smallest positive number of the dtype (−103.3 in
            float32), or as the lowest finite value of the same example where that is lower.
        test: "paired" (the draws of the two classes share their noise), or "welch", which takes them as
            independent and is far less powerful here.
        values: what is compared. The paired difference of log-probabilities is that of logits. Probabilities
            saturate: where the draws differ by no more than the rounding of a number near 1, p is 1.

    Returns:
        Tensor of shape (…), on the device of the input; float32, or float64 for float64.

    Raises:
        ValueError: fewer than two draws or classes, NaN, values above 0, or names that are unknown.
        ImportError: scipy is not installed.
    """
    check_options(test, values)
    if log_probabilities.dim() < 2 or log_probabilities.shape[0] < 2 or log_probabilities.shape[-1] < 2:
        raise ValueError(
            "log_probabilities: must have shape (draws, …, classes) with at least two of each; "
            f"got {tuple(log_probabilities.shape)}"
        )
    if not log_probabilities.is_floating_point():
        raise ValueError(f"log_probabilities: must be floating point; got {log_probabilities.dtype}")
    if not bool((log_probabilities <= _SLACK).all()):
        raise ValueError(
            "log_probabilities: must be at most 0 and not NaN (logits need log_softmax first); "
            f"the largest is {float(log_probabilities.max()):.4g}"
        )
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError("the test needs scipy: pip install 'bayesian-attention[metrics]'") from error

    wide = torch.promote_types(log_probabilities.dtype, torch.float32)
    if log_probabilities.numel() == 0:
        return log_probabilities.new_ones(log_probabilities.shape[1:-1], dtype=wide)
    precision = torch.finfo(log_probabilities.dtype)
    draws = _finite(log_probabilities.detach().double().cpu(), math.log(precision.smallest_normal * precision.eps))
    count = draws.shape[0]
    # In log space the order survives where probabilities underflow.
    order = draws.logsumexp(dim=0).sort(dim=-1, descending=True, stable=True).indices
    leading = order[..., :2].expand(count, *order.shape[:-1], 2)
    compared = draws.gather(-1, leading)
    first, second = (compared if values == "log_probabilities" else compared.exp()).unbind(dim=-1)
    if test == "paired":
        difference = first - second
        variance = _variance(difference)
        t = difference.mean(dim=0) / (variance / count).sqrt()
        freedom = torch.full_like(t, count - 1)
    else:
        one, other = _variance(first) / count, _variance(second) / count
        variance = torch.maximum(one, other) * count
        t = (first.mean(dim=0) - second.mean(dim=0)) / (one + other).sqrt()
        freedom = (one + other) ** 2 / ((one**2 + other**2) / (count - 1))
    rounding = _ROUNDING_UNITS * precision.eps * torch.maximum(first.abs(), second.abs()).amax(dim=0)
    p = torch.as_tensor(2 * stats.t.sf(t.abs().numpy(), freedom.numpy()))
    p = torch.where(variance <= rounding**2, torch.ones_like(p), p)
    return p.to(log_probabilities.device, wide)


def _variance(draws: Tensor) -> Tensor:
    """Unbiased variance over the first dimension, in two passes.

    Draws that nearly agree lose digits in one pass, and how many depends on the shape of the batch. About the mean,
    whose own rounding enters squared, they do not.
    """
    return (draws - draws.mean(dim=0)).square().sum(dim=0) / (draws.shape[0] - 1)


def _finite(draws: Tensor, floor: float) -> Tensor:
    """``draws`` with −∞ replaced so that the order within an example is kept, whatever else is in the batch."""
    infinite = draws.isinf()
    lowest = draws.masked_fill(infinite, 0.0).amin(dim=(0, -1)).clamp_max(floor)
    return torch.where(infinite, lowest.unsqueeze(-1), draws)
