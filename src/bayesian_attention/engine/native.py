"""The compiled elementwise part of the blockwise backend: built on first use, kept in a cache folder.

The source, ``native.cpp``, is compiled by the C++ compiler of the machine for its own processor, in about a second,
and loaded through ctypes. Where there is no compiler, or it fails, :func:`library` says so once and returns None;
the blockwise backend then computes the same with tensor operations.

Two environment variables: ``CXX`` names the compiler, ``BAYESIAN_ATTENTION_CACHE`` the folder of the compiled files
(default: ``bayesian-attention`` in the user's cache folder). ``BAYESIAN_ATTENTION_NATIVE=0`` switches the compiled
part off.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

from bayesian_attention.engine.elementwise import Place, Problem, RowSums
from bayesian_attention.engine.reference import MASKED_BELOW

SOURCE = Path(__file__).with_name("native.cpp")

#: Tried in this order. The loops need the processor's own vector instructions; threads come from OpenMP, whose
#: library PyTorch has loaded already, so that both share one pool of threads.
_FLAGS: tuple[list[str], ...] = (
    ["-march=native", "-fopenmp"],
    ["-march=native", "-fopenmp-simd"],
    ["-fopenmp-simd"],
    [],
)
_COMMON = ["-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]


class Block(ctypes.Structure):
    """What ``struct Block`` of ``native.cpp`` holds, in its order."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("chunk", "chunks", "group", "groups", "query", "queries", "keys")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "all_groups", "all_queries", "causal", "offset", "family")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("key_words", "first", "second", "spread", "bool_mask", "float_mask")),
        ("mask_strides", ctypes.c_int64 * 5),
        ("masked_below", ctypes.c_float),
    )


class Sums(ctypes.Structure):
    """What ``struct Sums`` of ``native.cpp`` holds, in its order."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("peak", "clean", "drawn"))


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None where they are switched off or cannot be built (a warning says why)."""
    if os.environ.get("BAYESIAN_ATTENTION_NATIVE") == "0":
        return None
    try:
        return _declare(ctypes.CDLL(str(_build())))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        warnings.warn(
            "the compiled part of the blockwise backend is not available, so that attention on the CPU takes two to "
            f"three times as long: {str(detail).strip()[:500]} "
            "(install a C++ compiler or name one in CXX; BAYESIAN_ATTENTION_NATIVE=0 silences this)",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int
    block = ctypes.POINTER(Block)
    sums = ctypes.POINTER(Sums)
    loaded.attention_forward.argtypes = [block, pointer, pointer, number, sums, pointer, number]
    loaded.attention_backward.argtypes = [block, *[pointer] * 4, number, sums, *[pointer] * 3, number]
    loaded.evaluate.argtypes = [number, pointer, pointer, ctypes.c_int64]
    for name in ("attention_forward", "attention_backward", "evaluate"):
        getattr(loaded, name).restype = None
    return loaded


def _build() -> Path:
    """The compiled file for this source, compiler and processor, built if it is not in the cache."""
    compiler = _compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=60)  # noqa: S603
    identity = [SOURCE.read_text(encoding="utf-8"), version.stdout, _processor(), *_COMMON, *map(str, _FLAGS)]
    digest = hashlib.sha256("\0".join([*compiler, *identity]).encode()).hexdigest()[:24]
    name = f"attention-{digest}.so"
    try:
        return _built(compiler, _cache(), name)
    except OSError:
        # A home folder may be read-only, or not there: this process then builds for itself alone.
        folder = Path(tempfile.mkdtemp(prefix="bayesian-attention-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _built(compiler, folder, name)


def _built(compiler: list[str], folder: Path, name: str) -> Path:
    """The compiled file of this name in ``folder``, built if it is not there."""
    target = folder / name
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # Built under another name and renamed: processes that start together never see half a file.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / name
        for number, flags in enumerate(_FLAGS):
            command = [*compiler, *_COMMON, *flags, str(SOURCE), "-o", str(built)]
            try:
                subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)  # noqa: S603
            except subprocess.CalledProcessError:
                if number == len(_FLAGS) - 1:
                    raise
            else:
                break
        built.replace(target)
    return target


def _compiler() -> list[str]:
    """The command of the C++ compiler."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise OSError("no C++ compiler found (looked for c++, g++ and clang++)")


def _processor() -> str:
    """What tells processors apart whose instructions differ: a shared home folder may serve several."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _cache() -> Path:
    """The folder for compiled files."""
    named = os.environ.get("BAYESIAN_ATTENTION_CACHE")
    if named:
        return Path(named)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bayesian-attention"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bayesian-attention"


class NativeElementwise:
    """The compiled form of :class:`bayesian_attention.engine.elementwise.Elementwise`: float32, on the CPU."""

    _FAMILIES = ("softmax", "weibull", "lognormal")

    def __init__(self, problem: Problem) -> None:
        loaded = library()
        if loaded is None:
            raise ValueError("the compiled functions are not available")
        self.library = loaded
        self.problem = problem
        self.threads = torch.get_num_threads()
        self.block = Block(
            kv_heads=problem.kv_heads,
            all_groups=problem.rows[1],
            all_queries=problem.rows[2],
            causal=problem.is_causal,
            offset=problem.query_offset,
            family=self._FAMILIES.index(problem.family),
            scale=problem.scale,
            key_words=problem.key_words.data_ptr(),
            spread=problem.spread.data_ptr(),
            masked_below=MASKED_BELOW,
        )
        mask = problem.mask
        if mask is not None:
            # Kept, for the block holds its address alone.
            self.mask = mask = mask if mask.dtype == torch.bool else mask.float()
            if mask.dtype == torch.bool:
                self.block.bool_mask = mask.data_ptr()
            else:
                self.block.float_mask = mask.data_ptr()
            strides = (0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
            self.block.mask_strides = (ctypes.c_int64 * 5)(*strides)

    def forward(self, place: Place, draw: int, logits: Tensor, weights: Tensor, sums: RowSums) -> Tensor:
        """See :meth:`Elementwise.forward`."""
        inverse = logits.new_empty(place.chunks, place.rows, 1)
        self._at(place, draw)
        self.library.attention_forward(
            self.block,
            logits.data_ptr(),
            weights.data_ptr(),
            draw == 0,
            self._sums(sums, draw),
            inverse.data_ptr(),
            self.threads,
        )
        return inverse

    def backward(
        self,
        place: Place,
        draw: int,
        logits: Tensor,
        grad_weights: Tensor,
        weights: Tensor,
        grad_logits: Tensor,
        sums: RowSums,
        dot: Tensor,
        grad_lse: Tensor | None,
        grad_spread: Tensor | None,
    ) -> None:
        """See :meth:`Elementwise.backward`."""
        self._at(place, draw)
        self.library.attention_backward(
            self.block,
            logits.data_ptr(),
            grad_weights.data_ptr(),
            weights.data_ptr(),
            grad_logits.data_ptr(),
            draw == 0,
            self._sums(sums, draw),
            dot[draw].data_ptr(),
            None if grad_lse is None else grad_lse.data_ptr(),
            None if grad_spread is None else grad_spread[draw].data_ptr(),
            self.threads,
        )

    @staticmethod
    def _sums(sums: RowSums, draw: int) -> Sums:
        return Sums(sums.peak.data_ptr(), sums.clean.data_ptr(), sums.drawn[draw].data_ptr())

    def _at(self, place: Place, draw: int) -> None:
        """Point the block at a place and a draw."""
        block, problem = self.block, self.problem
        block.chunk, block.chunks, block.group, block.groups, block.query, block.queries, block.keys = place
        if problem.first is not None and problem.second is not None:
            block.first, block.second = problem.first[draw].data_ptr(), problem.second[draw].data_ptr()
