"""Which backend computes an attention call.

| backend | takes | memory |
| --- | --- | --- |
| reference | everything | several tensors of queries × keys |
| blockwise | Softmax, Weibull and LogNormal; any device and floating dtype | linear |
| triton | the same, in float32, float16 or bfloat16, up to 256 features a head, on a GPU | linear |
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bayesian_attention.engine.elementwise import FAMILIES
from bayesian_attention.names import look_up
from bayesian_attention.posteriors import Posterior

#: What ``backend`` may be.
BACKENDS = {"auto": None, "reference": None, "blockwise": None, "triton": None}

#: Entries of the logits below which the reference's few large operations beat blocks: the fixed cost of a call counts.
SMALL = 1 << 14
#: The same for float64, which has no compiled loops: blocks then save memory, not time.
SMALL_DOUBLE = 1 << 24

#: Triton's widest head; see triton_kernel.py.
_TRITON_FEATURES = 256
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def choose(backend: str, posterior: Posterior, query: Tensor, key: Tensor, value: Tensor) -> str:
    """The backend of a call: "reference", "blockwise" or "triton".

    Args:
        backend: what the user asked for; "auto" decides by device, dtype and size.
        posterior: the family.
        query: (…, H, Lq, D).
        key: (…, Hkv, Lk, D).
        value: (…, Hkv, Lk, Dv).

    Raises:
        ValueError: the backend asked for does not take the call; the message names one that does.
    """
    look_up("backend", backend, BACKENDS)
    if backend == "reference":
        return backend
    refusal = _no_fused(posterior, query)
    if backend == "auto":
        if refusal is not None or query.device.type == "meta":
            return "reference"
        entries = query.shape[:-1].numel() * key.shape[-2]
        if query.device.type == "cpu":
            small = SMALL_DOUBLE if query.dtype == torch.float64 else SMALL
            return "reference" if entries < small else "blockwise"
        usable = query.device.type == "cuda" and entries > 0 and _no_triton(query, value) is None
        return "triton" if usable else "blockwise"
    if refusal is None and backend == "triton":
        refusal = _no_triton(query, value)
    if refusal is not None:
        raise ValueError(f"backend: {backend!r} {refusal}")
    return backend


def _no_fused(posterior: Posterior, query: Tensor) -> str | None:
    """Why neither fused backend takes the call, or None."""
    # A subclass may draw in its own way.
    if type(posterior) is not type(FAMILIES.get(posterior.name)):
        return f"draws from {', '.join(type(x).__name__ for x in FAMILIES.values())} alone, not {posterior}; " + _REST
    if torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active():
        return "does not work under torch.func's grad, vmap, jvp and the like; " + _REST
    if forward_ad._current_level >= 0:
        return "has no forward-mode derivative; " + _REST
    return None


_REST = "backend='reference' (or 'auto') does"


def _no_triton(query: Tensor, value: Tensor) -> str | None:
    """Why the Triton kernels do not take the call, or None."""
    if not _HAS_TRITON:
        return "needs the package triton (pip install 'bayesian-attention[triton]'); backend='blockwise' does not"
    if query.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs tensors on a GPU, and query is on {query.device.type}; backend='blockwise' takes any device"
    if query.dtype == torch.float64:
        return "computes in float32 and takes no float64; backend='blockwise' does"
    widest = max(query.shape[-1], value.shape[-1])
    if widest > _TRITON_FEATURES:
        return f"takes up to {_TRITON_FEATURES} features a head, got {widest}; backend='blockwise' has no limit"
    return None
