"""Precision: what is computed in float32 whatever the dtype of the model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """``x`` in float32, or as it is where it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast leaves the dtypes alone, on the device of ``x``."""
    if x.device.type == "meta":
        return nullcontext()
    return torch.autocast(device_type=x.device.type, enabled=False)
