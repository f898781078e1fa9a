"""The compiled loops: their functions over all arguments, and what happens where they cannot be built."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
from scipy import special

from bayesian_attention.engine import native

with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    LIBRARY = native.library()

needs_compiler = pytest.mark.skipif(LIBRARY is None, reason="no C++ compiler, or BAYESIAN_ATTENTION_NATIVE=0")

EXP2, MINUS_LOG2, LOG2, WEIBULL, NORMAL = range(5)


def evaluate(function: int, x: np.ndarray) -> np.ndarray:
    assert LIBRARY is not None
    x = np.ascontiguousarray(x, dtype=np.float32)
    out = np.empty_like(x)
    LIBRARY.evaluate(function, x.ctypes.data, out.ctypes.data, x.size)
    return out.astype(np.float64)


def uniforms() -> np.ndarray:
    """All 2²³ that the noise can be."""
    return (np.arange(1 << 23, dtype=np.float64) + 0.5) / (1 << 23)


@needs_compiler
def test_powers_of_two():
    t = np.concatenate([np.linspace(-126, 127, 5_000_001), np.linspace(-1, 1, 1_000_001)]).astype(np.float32)
    relative = evaluate(EXP2, t) / np.exp2(t.astype(np.float64)) - 1
    assert np.abs(relative).max() < 2.5e-7
    assert np.array_equal(evaluate(EXP2, np.array([0.0, -1.0, 3.0])), [1.0, 0.5, 8.0])


@needs_compiler
def test_powers_of_two_beyond_the_range():
    out = evaluate(EXP2, np.array([-126.5, -1e4, -np.inf, np.nan]))
    assert np.array_equal(out[:3], [0.0, 0.0, 0.0])
    assert np.isnan(out[3])


@needs_compiler
def test_logarithm_of_every_uniform_number():
    u = uniforms()
    relative = evaluate(MINUS_LOG2, u) / -np.log2(u) - 1
    assert np.abs(relative).max() < 5e-7


@needs_compiler
def test_logarithms_of_exponential_draws():
    v = np.geomspace(2.0**-24, 24.0, 3_000_001).astype(np.float32)
    error = evaluate(LOG2, v) - np.log2(v.astype(np.float64))
    assert np.abs(error).max() < 2e-6  # the last digit of a number near 24 is as large
    near_one = np.abs(v - 1) < 0.5
    assert np.abs(error[near_one]).max() < 2.5e-7


@needs_compiler
def test_weibull_noise_of_every_uniform_number():
    """log(−log u): as exact as float32 logarithms are."""
    u = uniforms()
    error = evaluate(WEIBULL, u) * np.log(2) - np.log(-np.log(u))
    assert np.abs(error).max() < 2e-6


@needs_compiler
def test_normal_noise_of_every_uniform_number():
    u = uniforms()
    expected = special.ndtri(u)
    error = evaluate(NORMAL, u) * np.sqrt(2) - expected
    assert (np.abs(error) / np.maximum(np.abs(expected), 0.1)).max() < 2e-6
    # Signed noise of mean 0: u and 1 − u are opposites.
    drawn = evaluate(NORMAL, u)
    assert np.abs(drawn + drawn[::-1]).max() < 1e-5


ATTEND = """
import warnings, torch, bayesian_attention as ba
from bayesian_attention.engine import native
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x = torch.randn(1, 2, 200, 8, generator=torch.Generator().manual_seed(0))
    out = [ba.attend(x, x, x, ba.Weibull(2.0), seed=1, backend="blockwise").output for _ in range(2)][0]
expected = ba.attend(x, x, x, ba.Weibull(2.0), seed=1, backend="reference").output
torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
print(native.library() is not None, len(caught), *[str(w.message).replace(chr(10), " ") for w in caught], sep="|")
"""


def attend_elsewhere(**environment: str) -> list[str]:
    """What a process of this environment says: whether the loops are compiled, how many warnings, and which."""
    result = subprocess.run(
        [sys.executable, "-c", ATTEND], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return result.stdout.strip().split("|")


def test_without_a_compiler_tensor_operations_serve_and_a_warning_is_given_once(tmp_path):
    compiled, warned, message = attend_elsewhere(
        CXX=str(tmp_path / "no-such-compiler"), BAYESIAN_ATTENTION_CACHE=str(tmp_path)
    )
    assert (compiled, warned) == ("False", "1")
    assert "no-such-compiler" in message
    assert "CXX" in message


def test_a_compiler_that_fails_is_quoted(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "internal fault" >&2\nexit 1\n', encoding="utf-8"
    )
    compiler.chmod(0o700)
    compiled, warned, message = attend_elsewhere(CXX=str(compiler), BAYESIAN_ATTENTION_CACHE=str(tmp_path / "cache"))
    assert (compiled, warned) == ("False", "1")
    assert "internal fault" in message
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_loops_can_be_switched_off():
    assert attend_elsewhere(BAYESIAN_ATTENTION_NATIVE="0") == ["False", "0"]


@needs_compiler
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    taken = tmp_path / "file"
    taken.write_text("no folder", encoding="utf-8")
    assert attend_elsewhere(BAYESIAN_ATTENTION_CACHE=str(taken / "cache")) == ["True", "0"]


@needs_compiler
def test_the_cache_is_used_again(tmp_path):
    assert attend_elsewhere(BAYESIAN_ATTENTION_CACHE=str(tmp_path)) == ["True", "0"]
    (built,) = tmp_path.iterdir()
    before = built.stat().st_mtime_ns
    assert attend_elsewhere(BAYESIAN_ATTENTION_CACHE=str(tmp_path)) == ["True", "0"]
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == [before]
