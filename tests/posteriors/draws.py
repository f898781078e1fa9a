"""Draws for the tests of the families."""

import torch
from torch import Tensor

from bayesian_attention.engine.rows import DenseRows, NoiseAddress
from bayesian_attention.posteriors import Posterior

#: p-value or two-sided tail below which a statistical test fails: its false-alarm rate.
FALSE_ALARM = 1e-5


def uniforms(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The library's own noise, at least three-dimensional."""
    return DenseRows().uniform(NoiseAddress(seed), torch.empty(shape, dtype=dtype))


def log_noise(spec: Posterior, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draws of the family's noise at the spread of its spec."""
    return spec.log_noise(uniforms(*shape, seed=seed, dtype=dtype), spec.parameter)
