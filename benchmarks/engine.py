"""What Bayesian attention costs on a CPU: time and memory against plain attention.

    python benchmarks/engine.py

The methods of a length are called in turn, in one process, so that whatever else the machine does falls on all of
them alike; each is called twice and the second call timed, for the first pays for the memory and the caches that the
method before it left behind. The ratio to ``scaled_dot_product_attention`` is taken within each round, and the
median over rounds is printed with its quartiles. Extra memory is the peak of the resident set during one call on top
of what it was before (outputs and gradients included): the median of several fresh processes, each of which may use
what the machine has free; a method that needs more is left out of the times of that length. Stochastic methods draw
and compute the divergence from their prior in every call, and differentiate it in the backward pass, unless marked
otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesian_attention.engine import attend
from bayesian_attention.layers import StochasticAttention
from bayesian_attention.posteriors import LogNormal, Softmax, Weibull
from bayesian_attention.priors import ConstantPrior

BASELINE = "sdpa"
PASSES = ("forward", "forward+backward")
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
#: A loss adds the divergence with this weight; any but zero costs the same.
KL_WEIGHT = 1e-3

#: Output, and divergence or None.
Result = tuple[Tensor, Tensor | None]
Method = Callable[[Tensor, Tensor, Tensor], Result]


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Result:
    """Plain attention: PyTorch's fused kernel."""
    return F.scaled_dot_product_attention(query, key, value), None


def sdpa_with_dropout(query: Tensor, key: Tensor, value: Tensor) -> Result:
    """Plain attention with dropout of its weights, for which PyTorch has no fused kernel on a CPU."""
    return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1), None


def eager_softmax(query: Tensor, key: Tensor, value: Tensor) -> Result:
    """Plain attention, as models write it out."""
    return torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), -1) @ value, None


def authors_formula(query: Tensor, key: Tensor, value: Tensor) -> Result:
    """Weibull attention as its authors compute it: whole tensors of queries × keys.

    Source: Fan et al., Bayesian Attention Modules, 2020: the form of their language models, with fixed shape k = 10
    and the prior Gamma(α, β), α = β = 1e-4, and the mean of the divergence over entries.
    """
    k, alpha, beta = 10.0, 1e-4, 1e-4
    mean = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), -1)
    log_scale = torch.log(mean + 1e-20) - math.lgamma(1 + 1 / k)
    uniform = torch.rand_like(mean)
    noise = torch.log(-torch.log(1 - uniform + 1e-20) + 1e-20) / k
    weights = torch.softmax(log_scale + noise, -1)
    euler = 0.5772156649015329
    scale_mean = log_scale.exp() * math.gamma(1 + 1 / k)
    constant = euler * alpha / k + math.log(k) - euler - 1 - alpha * math.log(beta) + math.lgamma(alpha)
    divergence = constant - alpha * log_scale + beta * scale_mean
    return weights @ value, divergence.mean()


def of_engine(posterior: Weibull | LogNormal | Softmax, backend: str) -> Callable[[int], Method]:
    """Attention of this library by one backend, with its divergence."""

    def build(heads: int) -> Method:
        prior = None if isinstance(posterior, Softmax) else ConstantPrior()
        layer = StochasticAttention(posterior, prior, heads=heads)
        layer.backend = backend

        def call(query: Tensor, key: Tensor, value: Tensor) -> Result:
            output = layer.attend(query, key, value).output
            if prior is None:
                return output, None
            (term,) = layer.kl_terms
            return output, term.total / term.entries

        return call

    return build


def without_divergence(posterior: Weibull | LogNormal) -> Callable[[int], Method]:
    """Draws alone: what a prediction costs."""

    def build(heads: int) -> Method:
        return lambda query, key, value: (attend(query, key, value, posterior, seed=1).output, None)

    return build


METHODS: dict[str, Callable[[int], Method]] = {
    BASELINE: lambda heads: sdpa,
    "sdpa, dropout 0.1": lambda heads: sdpa_with_dropout,
    "eager softmax": lambda heads: eager_softmax,
    "authors' Weibull": lambda heads: authors_formula,
    "reference, Weibull": of_engine(Weibull(), "reference"),
    "blockwise, softmax": of_engine(Softmax(), "blockwise"),
    "blockwise, Weibull": of_engine(Weibull(), "blockwise"),
    "blockwise, Weibull, no divergence": without_divergence(Weibull()),
    "blockwise, LogNormal": of_engine(LogNormal(), "blockwise"),
    "blockwise, LogNormal, no divergence": without_divergence(LogNormal()),
}


def call_of(label: str, batch: int, heads: int, length: int, features: int, backward: bool) -> Callable[[], None]:
    """A function that makes one call of a method on tensors of its own."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, length, features)
    query, key, value, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    method = METHODS[label](heads)

    def call() -> None:
        if not backward:
            with torch.no_grad():
                method(query, key, value)
            return
        leaves = [x.requires_grad_() for x in (query, key, value)]
        output, divergence = method(*leaves)
        outputs, grads = [output], [grad]
        if divergence is not None:
            outputs.append(divergence)
            grads.append(torch.tensor(KL_WEIGHT))
        torch.autograd.grad(outputs, leaves, grads)

    return call


# Time.


def ratios_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Medians over alternating rounds: as many as fit into the seconds, five at least."""
    size = (arguments.batch, arguments.heads, arguments.length, arguments.features)
    calls = {label: call_of(label, *size, arguments.backward) for label in arguments.methods}
    for call in calls.values():  # to warm up
        call()
    times: dict[str, list[float]] = {label: [] for label in calls}
    gc.disable()  # what it collects is of no one method
    begun = time.perf_counter()
    for number in range(arguments.rounds):
        if number >= 5 and time.perf_counter() - begun > arguments.seconds:
            break
        for label, call in calls.items():
            call()
            start = time.perf_counter()
            call()
            times[label].append(time.perf_counter() - start)
    results: dict[str, dict[str, Any]] = {}
    for label, own in times.items():
        low, middle, high = statistics.quantiles(
            [one / base for one, base in zip(own, times[BASELINE], strict=True)], n=4
        )
        results[label] = {
            "ms": round(1000 * statistics.median(own), 3),
            "ratio": round(middle, 3),
            "ratio_quartiles": [round(low, 3), round(high, 3)],
            "rounds": len(own),
        }
    return results


# Memory.


def status(field: str) -> int:
    """Bytes of a field of the process's status, as Linux tells them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def free_memory() -> int:
    """Bytes that the machine could give to one process."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/meminfo has no MemAvailable")


def peak_of(arguments: argparse.Namespace) -> int | None:
    """Bytes of the resident set that one call adds at its peak; None: more than the machine has."""
    (label,) = arguments.methods
    call_of(label, 1, arguments.heads, 64, arguments.features, arguments.backward)()  # loads and builds
    call = call_of(label, arguments.batch, arguments.heads, arguments.length, arguments.features, arguments.backward)
    gc.collect()
    # The limit is on addresses, of which a process has more than it has memory.
    limit = status("VmSize") + int(0.9 * free_memory())
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    try:
        call()
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error):
            raise
        return None
    return status("VmHWM") - before


# The program.


def in_fresh_process(arguments: argparse.Namespace, what: str, batch: int, length: int, **options: Any) -> Any:
    """Run this file for one measurement and return what it prints."""
    command = [sys.executable, __file__, "--measure", what, "--batch", str(batch), "--length", str(length)]
    for name in ("threads", "heads", "features", "rounds", "seconds"):
        command += [f"--{name}", str(getattr(arguments, name))]
    command += ["--methods", *options["methods"], *(["--backward"] if options["backward"] else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603 - this very file
    return json.loads(done.stdout)


def median_peak(arguments: argparse.Namespace, label: str, batch: int, length: int, backward: bool) -> int | None:
    """Median of :func:`peak_of` over processes; None where one did not fit."""
    peaks: list[int] = []
    for _ in range(arguments.processes):
        peak = in_fresh_process(arguments, "memory", batch, length, methods=[label], backward=backward)
        if peak is None:
            return None
        peaks.append(peak)
    return int(statistics.median(peaks))


def measure_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every length and pass: memory first, then the times of what fitted."""
    results = []
    for length in arguments.lengths:
        batch = max(1, arguments.tokens // length)
        for name in arguments.passes:
            backward = name != "forward"
            setting = {"length": length, "batch": batch, "pass": name}
            print(f"{setting} …", file=sys.stderr)
            memory = {label: median_peak(arguments, label, batch, length, backward) for label in arguments.methods}
            fitting = [label for label, peak in memory.items() if peak is not None]
            times = in_fresh_process(arguments, "time", batch, length, methods=fitting, backward=backward)
            methods = {
                label: times.get(label, {}) | {"extra_mib": None if peak is None else round(peak / 2**20, 1)}
                for label, peak in memory.items()
            }
            results.append(setting | {"attention": methods})
    return results


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: a line a method and length."""
    lines = [
        f"| length (batch) | attention | {' | '.join(f'{name}, ratio | extra MiB' for name in PASSES)} |",
        "| --- | --- " + "| --- | --- " * len(PASSES) + "|",
    ]
    by_pass = {(one["length"], one["pass"]): one for one in results}
    for length in dict.fromkeys(one["length"] for one in results):
        own = [by_pass.get((length, name)) for name in PASSES]
        batch = next(one["batch"] for one in own if one is not None)
        labels = next(one["attention"] for one in own if one is not None)
        for label in labels:
            cells = []
            for one in own:
                cells += ["—", "—"] if one is None else cells_of(label, one["attention"][label])
            lines.append(f"| {length} ({batch}) | {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cells_of(label: str, measured: dict[str, Any]) -> list[str]:
    """Ratio and memory in words."""
    if measured["extra_mib"] is None:
        return ["—", "does not fit"]
    if label == BASELINE:
        return [f"1 ({measured['ms']:.3g} ms)", f"{measured['extra_mib']:.0f}"]
    low, high = measured["ratio_quartiles"]
    return [f"{measured['ratio']:.2f} ({low:.2f} to {high:.2f})", f"{measured['extra_mib']:.0f}"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--features", type=int, default=64, help="of a head")
    parser.add_argument("--tokens", type=int, default=1024, help="batch rows times length, one batch row at least")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--passes", nargs="+", default=PASSES, choices=PASSES)
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(METHODS),
        choices=list(METHODS),
        metavar="METHOD",
        help="names as the table has them, each in quotes; all by default",
    )
    parser.add_argument("--rounds", type=int, default=40, help="at most, of one length and pass")
    parser.add_argument("--seconds", type=float, default=20.0, help="for the rounds of one length and pass")
    parser.add_argument("--processes", type=int, default=3, help="for the memory of one method, length and pass")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    parser.add_argument("--measure", choices=("time", "memory"), help="one measurement, printed as JSON")
    parser.add_argument("--batch", type=int, help="of one measurement")
    parser.add_argument("--length", type=int, help="of one measurement")
    parser.add_argument("--backward", action="store_true", help="in one measurement")
    arguments = parser.parse_args()
    if arguments.measure is not None:
        torch.set_num_threads(arguments.threads)
        print(json.dumps(ratios_of(arguments) if arguments.measure == "time" else peak_of(arguments)))
        return
    if BASELINE not in arguments.methods:
        parser.error(f"--methods: ratios need {BASELINE!r} among them")
    results = measure_all(arguments)
    setting = {
        "torch": torch.__version__,
        "threads": arguments.threads,
        "dtype": "float32",
        "heads": arguments.heads,
        "features": arguments.features,
        "machine": platform.machine(),
        "command": shlex.join(["python", "benchmarks/engine.py", *sys.argv[1:]]),
    }
    print(", ".join(f"{name} {value}" for name, value in setting.items()) + "\n")
    print(table(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"setting": setting, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
