"""The Triton kernels compile for a GPU, which need not be there: the interpreter accepts what the compiler does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
from bayesian_attention.engine import triton_backward, triton_forward, triton_kernel, triton_query

assert not triton_kernel.INTERPRETED

class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            compiled = self.kernel.warmup(*args, grid=grid, **kwargs)
            print(self.kernel.__name__, compiled.metadata.shared, len(compiled.asm["cubin"]))
        return launch

for module in (triton_backward, triton_forward, triton_query):
    for name, value in list(vars(module).items()):
        if name.endswith("_kernel") and isinstance(value, triton.JITFunction):
            setattr(module, name, Compiled(value))

x = torch.zeros(1, 2, 96, 64, dtype=torch.bfloat16)
words, spread, mask = torch.zeros(2, 1, 2, 96, dtype=torch.int32), torch.ones(2), torch.zeros(1, 1, 96, 96)
settings = dict(scale=0.1, is_causal=True, query_offset=0)
triton_kernel.forward(x, x, x, words[:1], words[:1], spread, None, family="lognormal", **settings)
settings["family"] = "weibull"
output, lse, state = triton_kernel.forward(x, x, x, words, words, spread, mask, **settings)
triton_kernel.backward(
    output, lse, x, x, x, words, words, spread, mask, output, state, **settings, mask_grad=True, spread_grad=True
)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler runs on Linux")
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        capture_output=True, text=True, timeout=300, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _, _ in kernels] == [
        *["forward_kernel"] * 3, "row_dots_kernel", "key_value_kernel", "query_kernel", "mask_kernel",
    ]  # fmt: skip
    # What a program may have on the smallest GPU of the last generations, 99 KiB.
    assert all(int(shared) <= 99 * 1024 for _, shared, _ in kernels)
