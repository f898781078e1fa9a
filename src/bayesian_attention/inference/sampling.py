"""Whether, and with what noise, a model draws its attention weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bayesian_attention.checks import at_least, flag
from bayesian_attention.engine.noise import derive_seed, integer
from bayesian_attention.inference.kl import stochastic_layers, track_kl


@contextmanager
def sampling(
    model: nn.Module,
    active: bool | None,
    *,
    seed: int | None = None,
    sample_index: int | Tensor = 0,
    batch_ids: Tensor | None = None,
) -> Iterator[None]:
    """Control the draws of all stochastic attention in ``model`` within a block.

    Args:
        model: the module whose forward pass will be called.
        active: True draws, False gives the posterior mean, None follows train() and eval().
        seed: makes the draws a function of the seed, the layer, the draw's number and the row alone; each
            forward pass in the block repeats them. By default every call takes a fresh seed from PyTorch's
            global generator.
        sample_index: number of the draw; with ``batch_ids``, possibly a tensor (rows,).
        batch_ids: int64 (rows,), identities of the batch rows: their places in the data, say, so that a row
            gets the same noise in whatever batch it comes. By default the rows of a batch are numbered.

    Raises:
        ValueError: sample_index or batch_ids without a seed, which would be ignored.
    """
    if seed is None and (batch_ids is not None or isinstance(sample_index, Tensor) or sample_index != 0):
        raise ValueError("sample_index, batch_ids: address noise under a seed; give the seed too")
    if seed is not None:
        seed = at_least("sampling", "seed", seed, -(2**63))
        if seed >= 2**64:
            raise ValueError(f"sampling: seed must have at most 64 bits; got {seed}")
    if active is not None:
        flag("sampling", "active", active)
    integer("sample_index", sample_index)
    if batch_ids is not None:
        integer("batch_ids", batch_ids)
    track_kl(model)
    layers = stochastic_layers(model)
    names = ("sampling", "seed", "sample_index", "batch_ids", "call_number")
    before = [{name: getattr(layer, name) for name in names} for layer in layers]
    # Tensors, not numbers: a compiled model takes a new draw without compiling anew.
    index = sample_index if isinstance(sample_index, Tensor) else torch.tensor(sample_index)
    seeds = [None if seed is None else derive_seed(seed, number) for number in range(len(layers))]
    for layer, layer_seed in zip(layers, seeds, strict=True):
        layer.sampling = active
        layer.seed = layer_seed
        layer.sample_index = 0 if seed is None else index
        layer.batch_ids = batch_ids
        layer.call_number = 0
    try:
        yield
    finally:
        for layer, state in zip(layers, before, strict=True):
            for name, value in state.items():
                setattr(layer, name, value)
