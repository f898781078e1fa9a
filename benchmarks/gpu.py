"""What Bayesian attention costs on a GPU: forward and backward, against PyTorch's FlashAttention.

    python benchmarks/gpu.py

First the Triton kernels are compared with the reference in float64 on small shapes; a difference ends the program
with status 1. Then the methods take turns, so that whatever else the machine does falls on all of them alike; the
ratio to ``scaled_dot_product_attention`` is taken within each round, and the median over rounds is printed, as JSON.
Extra memory is the peak of what a call allocates on top of its inputs. Without a GPU the status is 2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bayesian_attention.engine import attend
from bayesian_attention.posteriors import LogNormal, Posterior, Softmax, Weibull

BASELINE = "flash"
POSTERIORS: dict[str, Posterior] = {"softmax": Softmax(), "weibull": Weibull(), "lognormal": LogNormal()}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
#: Largest difference to the reference, relative to its largest entry: of outputs and of gradients.
TOLERANCE = {torch.float32: (2e-5, 1e-4), torch.float16: (4e-3, 1e-2), torch.bfloat16: (2e-2, 4e-2)}


def inputs(*shapes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Normal tensors on the GPU that want gradients."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(x, generator=generator, device="cuda").to(dtype).requires_grad_() for x in shapes]


def difference(ours: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest entry; NaN where one has −∞ or NaN and the other does not."""
    same = ours.double() == expected
    gap = torch.where(same, 0.0, (ours.double() - expected).abs()).max()
    return float(gap / expected[torch.isfinite(expected)].abs().max().clamp(min=1e-30))


def check(posterior: Posterior, dtype: torch.dtype, features: int, *, is_causal: bool, masked: str) -> float:
    """Compare output, log-sum-exp and gradients with the reference in float64.

    Returns:
        The largest difference, as a fraction of what is allowed.
    """
    batch, heads, key_heads, queries, keys, draws = 2, 4, 2, 150, 203, 2
    tensors = inputs(
        (batch, heads, queries, features), (batch, key_heads, keys, features), (batch, key_heads, keys, features),
        dtype=dtype,
    )  # fmt: skip
    mask: Tensor | None = None
    if masked != "none":
        (mask,) = inputs((batch, 1, queries, keys), dtype=torch.float32, seed=1)
        out = mask.detach() > 1
        out[:, :, 7] = True  # a row that sees no key
        mask = mask.detach().masked_fill(out, -math.inf).requires_grad_() if masked == "additive" else ~out
    (grad_output,) = inputs((draws, batch, heads, queries, features), dtype=torch.float64, seed=2)
    grad_output = grad_output.detach()

    def results(wide: bool) -> list[Tensor]:
        leaves = [x.detach().double() if wide else x.detach() for x in tensors]
        own = mask.detach().double() if wide and masked == "additive" and mask is not None else mask
        if masked == "additive" and own is not None:
            leaves.append(own.detach())
        leaves = [x.requires_grad_() for x in leaves]
        module = posterior.build(heads).to("cuda", torch.float64 if wide else torch.float32)
        output, lse = attend(
            leaves[0], leaves[1], leaves[2], module, mask=leaves[3] if masked == "additive" else own,
            is_causal=is_causal, samples=draws, seed=3, backend="reference" if wide else "triton",
        )  # fmt: skip
        loss = (output.double() * grad_output).sum() + lse[torch.isfinite(lse)].double().square().sum()
        leaves += list(module.parameters())
        return [output, lse, *torch.autograd.grad(loss, leaves)]

    allowed = [TOLERANCE[dtype][0]] * 2 + [TOLERANCE[dtype][1]] * 6
    worst = 0.0
    for number, (ours, expected, most) in enumerate(zip(results(False), results(True), allowed, strict=False)):
        share = difference(ours.detach(), expected.detach()) / most
        if not share <= 1:
            raise SystemExit(
                f"{posterior}, {dtype}, {features} features, causal {is_causal}, mask {masked}: result {number} "
                f"(output, lse, gradients of query, key, value, …) is {share:.2f} of the allowed difference off"
            )
        worst = max(worst, share)
    return worst


def check_all() -> dict[str, Any]:
    """Every combination that selects other code in the kernels."""
    shares = []
    families = [Softmax(), Weibull(2.0, learned=True), LogNormal(0.5, learned=True)]
    for posterior, dtype, features in itertools.product(families, TOLERANCE, (32, 64, 80, 128)):
        shares.append(check(posterior, dtype, features, is_causal=features != 32, masked="none"))
    for posterior, masked, dtype in itertools.product(families, ("boolean", "additive"), TOLERANCE):
        shares.append(check(posterior, dtype, 64, is_causal=False, masked=masked))
    shares.append(check(families[1], torch.bfloat16, 256, is_causal=True, masked="boolean"))
    shares.append(check(families[1], torch.float32, 256, is_causal=True, masked="additive"))
    return {"comparisons": len(shares), "largest_share_of_the_allowed_difference": round(max(shares), 3)}


def calls(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, backward: bool) -> dict[str, Callable[[], None]]:
    """One call of each method: forward alone, or forward and backward."""
    grad = torch.randn_like(query)

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    def ours(posterior: Posterior) -> Callable[[], Tensor]:
        return lambda: attend(query, key, value, posterior, is_causal=is_causal, seed=1, backend="triton").output

    def timed(method: Callable[[], Tensor]) -> Callable[[], None]:
        def call() -> None:
            if backward:
                torch.autograd.grad(method(), (query, key, value), grad)
            else:
                with torch.no_grad():
                    method()

        return call

    return {BASELINE: timed(flash)} | {label: timed(ours(posterior)) for label, posterior in POSTERIORS.items()}


def milliseconds(call: Callable[[], None], repeats: int) -> float:
    """Time of one call, by events on the GPU around several."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def extra_memory(call: Callable[[], None]) -> int:
    """Bytes that a call allocates at its peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(methods: dict[str, Callable[[], None]], rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Medians of time and ratio over alternating rounds, as many as fit into the seconds but at least three."""
    memory = {label: [extra_memory(call) for _ in range(2)][-1] for label, call in methods.items()}  # once to compile
    # Events are exact to half a microsecond: a measurement takes at least two milliseconds.
    repeats = {label: max(1, min(20, int(2 / milliseconds(call, 1)))) for label, call in methods.items()}
    times: dict[str, list[float]] = {label: [] for label in methods}
    begun = time.perf_counter()
    for number in range(rounds):
        if number >= 3 and time.perf_counter() - begun > seconds:
            break
        for label, call in methods.items():
            times[label].append(milliseconds(call, repeats[label]))
    results: dict[str, dict[str, Any]] = {}
    for label, own in times.items():
        ratios = [one / base for one, base in zip(own, times[BASELINE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        results[label] = {
            "ms": round(statistics.median(own), 4),
            "ratio": round(middle, 3),
            "ratio_quartiles": [round(low, 3), round(high, 3)],
            "extra_mib": round(memory[label] / 2**20, 2),
            "rounds": len(own),
        }
    return results


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=5.0, help="for the rounds of one setting")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16384, help="batch rows times length")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA GPU, and torch sees none", file=sys.stderr)
        raise SystemExit(2)
    import triton  # not to be found on every machine, which the line above is for

    checks = check_all()
    print(f"checked: {checks}", file=sys.stderr)
    results = []
    for length, is_causal, backward in itertools.product(arguments.lengths, (False, True), (False, True)):
        shape = (max(1, arguments.tokens // length), arguments.heads, length, 64)
        query, key, value = inputs(shape, shape, shape, dtype=torch.bfloat16)
        setting = {
            "length": length,
            "batch": shape[0],
            "causal": is_causal,
            "pass": "forward+backward" if backward else "forward",
        }
        methods = measure(calls(query, key, value, is_causal, backward), arguments.rounds, arguments.seconds)
        results.append(setting | {"attention": methods})
        ratios = {label: own["ratio"] for label, own in methods.items() if label != BASELINE}
        print(f"{setting}: {ratios}", file=sys.stderr)
    document = {
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "setting": {"dtype": "bfloat16", "heads": arguments.heads, "features": 64, "baseline": BASELINE},
        "checks": checks,
        "results": results,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
