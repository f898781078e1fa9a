"""Triton's kernels in its interpreter, where there is no GPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def interpreted() -> Iterator[None]:
    """Have functions that are compiled within interpreted instead, unless there is a GPU.

    Triton reads the variable when a function is decorated. Its own were decorated when it was imported, which other
    tests may have caused long ago. The backend reads it at every call, to take tensors on the CPU.
    """
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            _interpret_library()
        yield


def _interpret_library() -> None:
    triton = importlib.import_module("triton")
    function = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    replaced: dict[str, Any] = {}
    for module in (triton.language, triton.language.standard):
        for name, value in vars(module).copy().items():
            if isinstance(value, triton.JITFunction):
                setattr(module, name, replaced.setdefault(name, function(value.fn)))
