"""The checks of the noise can fail: what they would find.

Defects of exactly the size that docs/noise.md calls detectable (with probability 0.99) are planted into the
generator's own words, and whole generators with a step missing go through the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats
from torch import Tensor

from bayesian_attention.engine import noise
from tests.engine.noise_statistics import (
    ACROSS,
    ALONG,
    ALPHA,
    BIRTHDAYS,
    DRAWS,
    GAP,
    GAP_CELLS,
    LAGS,
    MODEL_DRAWS,
    NEAR,
    ORDINATE_CELLS,
    POWER,
    SHARED_DRAWS,
    SHARED_KEYS,
    SMALL,
    TUPLE,
    PValues,
    along,
    bit_pairs,
    cells,
    collision_mean,
    correlations,
    exponentials,
    laws,
    neighbours,
    normals,
    order,
    pair,
    repeats,
    rows_of_pairs,
    seeds_that_share_the_first_word,
    spacing_mean,
    tails,
)


@pytest.fixture(scope="module")
def base() -> np.ndarray:
    return along("query")


# The checks can fail: defects of the size that is called detectable, planted into the generator's words.


def score(count: int) -> float:
    """Mean of a normal score of which the largest of ``count`` is significant with probability POWER."""
    return float(stats.norm.isf(ALPHA / (2 * count)) + stats.norm.isf(1 - POWER))


def noncentrality(freedom: int, alpha: float = ALPHA) -> float:
    """Of a χ² that is significant with probability POWER."""
    bound = stats.chi2.isf(alpha, freedom)
    return float(optimize.brentq(lambda x: stats.ncx2.cdf(bound, freedom, x) - (1 - POWER), 1, 1e5))


def poisson_factor(mean: float) -> float:
    """By which a Poisson mean must rise for the count to be significant with probability POWER."""
    bound = stats.poisson.isf(ALPHA / 2, mean) + 1
    return float(optimize.brentq(lambda m: stats.poisson.sf(bound - 1, m) - POWER, mean, 100 * mean + 100)) / mean


def detectable(shape: tuple[int, int] = (ALONG, ACROSS)) -> dict[str, float]:
    """Size of the defect that each check finds with probability POWER, in the units of docs/noise.md."""
    draws = shape[0] * shape[1]
    root, waves, gaps = math.sqrt(draws), shape[0] * (shape[1] // 2), draws * GAP
    lags, days = len([lag for lag in LAGS if lag < shape[0]]), min(BIRTHDAYS, shape[0])
    return {
        "cells": math.sqrt(noncentrality(2**16 - 1) / draws),
        "Kolmogorov": (stats.kstwobign.isf(ALPHA) + stats.norm.isf(1 - POWER) / 2) / root,
        "bits": score(32) / (2 * root),
        "parities": score(2 * (2**16 - 1)) / (2 * root),
        "pairs of bits": score(1024) / (2 * math.sqrt(draws // 2)),
        "lags": score(lags) / root,
        "near lags": math.sqrt(noncentrality(NEAR**2 - 1) / (NEAR**2 - 1)) / root,
        "every lag": score(draws) / root,
        "highest wave": math.sqrt(2 * noncentrality(2, ALPHA / waves) / draws),
        "spectrum": math.sqrt(noncentrality(ORDINATE_CELLS - 1) / waves),
        "permutations": math.sqrt(noncentrality(math.factorial(TUPLE) - 1) / (draws / TUPLE)),
        "turns": score(1) * math.sqrt(16 / 90) / root,
        "gaps": math.sqrt(noncentrality(GAP_CELLS - 1) / gaps),
        "collisions": poisson_factor(collision_mean(draws, shape[1])) - 1,
        "birthday spacings": poisson_factor(shape[0] // days * shape[1] * spacing_mean(days)) - 1,
        "normal beyond 4": poisson_factor(draws * stats.norm.sf(4)) - 1,
        "normal beyond 5": poisson_factor(draws * stats.norm.sf(5)) - 1,
        "exponential beyond 14": poisson_factor(draws * math.exp(-14)) - 1,
    }


def chosen(x: np.ndarray, probability: float) -> np.ndarray:
    """Where a defect strikes: independent of ``x``, the same every time."""
    return np.random.default_rng(0).random(x.shape, dtype=np.float32) < probability


def chosen_entries(x: np.ndarray, count: float) -> np.ndarray:
    """The same for a fixed number of entries of the flattened array."""
    return np.random.default_rng(0).choice(x.size, math.ceil(count), replace=False)


def share(correlation: float) -> float:
    """Share q of entries to overwrite by a neighbour: two neighbours correlate by q (1 − q)."""
    return (1 - math.sqrt(1 - 4 * correlation)) / 2


def favour(x: np.ndarray, bit: int, wanted: np.ndarray | int, share: float) -> np.ndarray:
    """``bit`` (0 the lowest) given the wanted value in a share of the entries."""
    one = np.uint32(1 << bit)
    replaced = (x & ~one) | np.asarray(wanted, dtype=np.uint32) << np.uint32(bit)
    return np.where(chosen(x, share), replaced, x)


def odd(x: np.ndarray) -> np.ndarray:
    """Parity of the upper bits 1 to 15, the topmost excepted."""
    x = (x >> np.uint32(16)) & np.uint32(0x7FFF)
    for shift in (8, 4, 2, 1):
        x = x ^ (x >> np.uint32(shift))
    return x & np.uint32(1)


def copies(x: np.ndarray, q: float, lag: tuple[int, int] = (1, 0)) -> np.ndarray:
    return np.where(chosen(x, q), np.roll(x, lag, axis=(0, 1)), x)


def flipped_copies(x: np.ndarray, q: float) -> np.ndarray:
    """Copies of the neighbour of which half are mirrored at one half: z and its neighbour stay uncorrelated."""
    source = np.roll(x, 1, axis=0)
    mirror = np.random.default_rng(1).random(x.shape, dtype=np.float32) < 0.5
    return np.where(chosen(x, q), np.where(mirror, ~source, source), x)


def scattered_copies(x: np.ndarray, q: float) -> np.ndarray:
    """Copies from one of the 1,023 near lags, at random."""
    row, column = np.nonzero(chosen(x, q))
    lag = np.random.default_rng(1).integers(1, NEAR**2, row.size)
    y = x.copy()
    y[row, column] = x[row - lag // NEAR, column - lag % NEAR]
    return y


def filtered(x: np.ndarray, weight: float) -> np.ndarray:
    """Normal draws of which neighbours correlate by weight / (1 + weight²)."""
    z = normals(x)
    return (z + np.float32(weight) * np.roll(z, 1, axis=0)) / np.float32(math.sqrt(1 + weight**2))


def as_words(z: np.ndarray) -> np.ndarray:
    return (special.ndtr(z.astype(np.float64)) * 2**32).astype(np.uint32)


def weight_for_turns(change: float) -> float:
    """For :func:`filtered`, such that turning points are rarer by ``change`` than 2/3."""

    def rarer(weight: float) -> float:
        rho = weight / (1 + weight**2)
        return 2 / 3 - math.acos((2 * rho - 1) / (2 - 2 * rho)) / math.pi

    return float(optimize.brentq(lambda w: rarer(w) - change, 0, 0.9))


def waved(x: np.ndarray, amplitude: float) -> np.ndarray:
    i, j = np.ogrid[: x.shape[0], : x.shape[1]]
    phase = 2 * math.pi * (141 * i / x.shape[0] + 17 * j / x.shape[1])
    return normals(x) + (amplitude * np.sin(phase)).astype(np.float32)


def ascending(x: np.ndarray, share: float) -> np.ndarray:
    """The first two of every five swapped into order in a share of the tuples."""
    y = x.copy()
    a, b = x[0::TUPLE][: len(x) // TUPLE], x[1::TUPLE][: len(x) // TUPLE]
    swap = chosen(a, share) & (a > b)
    y[0::TUPLE][: len(a)], y[1::TUPLE][: len(a)] = np.where(swap, b, a), np.where(swap, a, b)
    return y


def more_collisions(x: np.ndarray, rise: float) -> np.ndarray:
    pairs = chosen_entries(x, 2 * math.ceil(rise * collision_mean(x.size, x.shape[1]))).reshape(2, -1)
    y = x.flatten()
    y[pairs[0]] = y[pairs[1]]
    return y.reshape(x.shape)


def more_spacings(x: np.ndarray, rise: float) -> np.ndarray:
    """Two words at one distance twice, in as many blocks as it takes."""
    days = min(BIRTHDAYS, len(x))
    y = x.T.copy()
    count = y.shape[0] * (y.shape[1] // days)
    for block in range(math.ceil(rise * count * spacing_mean(days))):
        row = y[block % y.shape[0], block // y.shape[0] * days :]
        row[1], row[3] = row[0] + np.uint32(1000), row[2] + np.uint32(1000)
    return y.T.copy()


def more_extremes(x: np.ndarray, rise: float, tail: float, value: float) -> np.ndarray:
    """A share ``rise · tail`` of the words replaced by that of the uniform ``value``."""
    y = x.flatten()
    y[chosen_entries(x, rise * tail * x.size)] = int(value * 2**32)
    return y.reshape(x.shape)


def of_normals(x: np.ndarray) -> PValues:
    return correlations(normals(x))


PLANTED: dict[str, tuple[str, str, Callable[[np.ndarray, float], PValues]]] = {
    # case: size in `detectable`, p-value that finds it, and the check of words with a defect of that size
    "a bit": ("bits", "bits", lambda x, s: cells(favour(x, 3, 1, 2 * s))),
    "a parity": ("parities", "parities", lambda x, s: cells(favour(x, 31, odd(x), 2 * s))),
    "cells": ("cells", "upper cells", lambda x, s: cells(favour(x, 31, odd(x), s))),
    "the median": ("Kolmogorov", "Kolmogorov", lambda x, s: cells(favour(x, 31, 0, 2 * s))),
    "a bit and its neighbour's": (
        "bits",
        "xor bits",
        lambda x, s: neighbours(favour(x, 9, np.roll(x, 1, axis=0) >> np.uint32(9) & np.uint32(1), 2 * s)),
    ),
    "bits of a word": (
        "pairs of bits",
        "pairs of bits within",
        lambda x, s: bit_pairs(favour(x, 7, x >> np.uint32(20) & np.uint32(1), 2 * s)),
    ),
    "bits of neighbours": (
        "pairs of bits",
        "pairs of bits between",
        lambda x, s: bit_pairs(favour(x, 7, np.roll(x, 1) >> np.uint32(20) & np.uint32(1), 2 * s)),
    ),
    "neighbours": ("lags", "lags z, z", lambda x, s: of_normals(copies(x, share(s)))),
    "magnitudes": ("lags", "lags |z|, |z|", lambda x, s: of_normals(flipped_copies(x, share(s)))),
    "distant entries": ("every lag", "every lag z, z", lambda x, s: of_normals(copies(x, share(s), (777, 333)))),
    "a wave": ("highest wave", "highest wave", lambda x, s: correlations(waved(x, s))),
    "colour": ("spectrum", "spectrum", lambda x, s: correlations(filtered(x, math.sqrt(s / 2)))),
    "order": ("permutations", "permutations", lambda x, s: order(ascending(x, s))),
    "runs": ("turns", "turns", lambda x, s: order(as_words(filtered(x, weight_for_turns(s))))),
    "gaps": ("gaps", "gaps upper", lambda x, s: order(copies(x, share(s * math.sqrt(GAP / (1 - GAP)))))),
    "equal words": ("collisions", "collisions", lambda x, s: repeats(more_collisions(x, s), x.shape[1])),
    "equal spacings": ("birthday spacings", "birthday spacings", lambda x, s: repeats(more_spacings(x, s), x.shape[1])),
    "large normals": (
        "normal beyond 4",
        "N(0, 1) above 4.0",
        lambda x, s: laws(more_extremes(x, s, stats.norm.sf(4.0), stats.norm.cdf(4.2))),
    ),
    "largest normals": (
        "normal beyond 5",
        "N(0, 1) below −5.0",
        lambda x, s: laws(more_extremes(x, s, stats.norm.sf(5.0), stats.norm.cdf(-5.1))),
    ),
    "largest exponentials": (
        "exponential beyond 14",
        "Exp(1) above 14.0",
        lambda x, s: laws(more_extremes(x, s, math.exp(-14.0), math.exp(-15.0))),
    ),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_defect_of_detectable_size_is_found(case):
    """At a tenth of the draws, where detectable sizes are about three times as large."""
    size, check, defect = PLANTED[case]
    x = along("query", SMALL)
    assert defect(x, detectable(SMALL)[size])[check] < ALPHA


def test_correlations_of_detectable_size_are_found_at_all_draws(base):
    sizes = detectable()
    y = copies(scattered_copies(base, share(sizes["near lags"] * (NEAR**2 - 1))), share(sizes["lags"]), (4096, 0))
    p = of_normals(y)
    assert p["lags z, z"] < ALPHA
    assert p["near lags z, z"] < ALPHA


# The checks can fail: generators with a step missing or replaced.


def mixed(row: noise.RowWords, keys: Tensor, fault: str) -> np.ndarray:
    """``noise.bits`` with one step left out, or with the second word added."""
    x = keys ^ row.first
    x = x ^ noise._shift_right(x, 16)
    if fault != "no first multiplication":
        x = x * noise._M1
    x = x ^ noise._shift_right(x, 15)
    x = x + row.second if fault == "second word added" else x ^ row.second
    if fault != "no second multiplication":
        x = x * noise._M2
    return (x if fault == "no last shift" else x ^ noise._shift_right(x, 16)).numpy().view(np.uint32)


@pytest.mark.parametrize(
    "fault", ["second word added", "no first multiplication", "no second multiplication", "no last shift"]
)
def test_a_step_left_out_of_the_bits_is_found(fault):
    """By rows that share their first word: elsewhere two well-mixed words hide it."""
    one, other = rows_of_pairs(seeds_that_share_the_first_word(), 101)
    keys = noise.key_words(torch.arange(SHARED_KEYS))
    assert min(pair(mixed(one, keys, ""), mixed(other, keys, "")).values()) > ALPHA
    assert pair(mixed(one, keys, fault), mixed(other, keys, fault))["difference upper cells"] < ALPHA


ROW, KEY = torch.arange(SMALL[0], dtype=torch.int32).view(-1, 1), torch.arange(SMALL[1], dtype=torch.int32)


def rows(query: Tensor) -> noise.RowWords:
    return noise.start(3).absorb_position(query)


def coordinates_added() -> Tensor:
    """Seed and head enter one sum, as they would without a mixer after each."""
    seed, head = ROW[:45].view(-1, 1, 1), ROW[:45]
    return noise.bits(rows(seed + head), noise.key_words(KEY))


def shifted_and_exclusive_or() -> Tensor:
    """Row words that are linear over bits."""
    word = ROW ^ (ROW << 13)
    word = word ^ noise._shift_right(word, 17)
    return word ^ (word << 5) ^ noise.key_words(KEY)


BROKEN: dict[str, tuple[Callable[[], Tensor], Callable[[np.ndarray], PValues], tuple[str, ...]]] = {
    # fault: its words, the check, and what finds it
    "a linear congruential generator": (
        lambda: ROW * 1664525 + KEY * 1013904223,
        lambda x: neighbours(x) | of_normals(x) | order(x) | repeats(x, SMALL[1]),
        ("xor upper cells", "lags z, z", "highest wave", "permutations", "turns", "gaps upper", "birthday spacings"),
    ),
    "the head left out": (
        lambda: noise.bits(rows(ROW * 0), noise.key_words(KEY)),
        lambda x: neighbours(x) | of_normals(x) | repeats(x, SMALL[1]),
        ("xor upper cells", "lags z, z", "lags |z|, |z|", "collisions"),
    ),
    "noise shared by groups of four heads": (
        lambda: noise.bits(rows(ROW // 4), noise.key_words(KEY)),
        of_normals,
        ("lags z, z", "near lags z, z"),
    ),
    "the seed added to the key": (
        lambda: noise.bits(rows(torch.tensor(3)), noise.key_words(ROW + KEY)),
        of_normals,
        ("every lag z, z", "near lags z, z"),
    ),
    "seed and head added": (coordinates_added, of_normals, ("every lag z, z", "every lag |z|, |z|")),
    "shifts and exclusive or": (shifted_and_exclusive_or, neighbours, ("xor upper cells", "xor parities")),
    "one counter over all rows": (
        lambda: noise.mix(noise.mix(ROW * SMALL[1] + KEY)),
        lambda x: repeats(x, SMALL[1]),
        ("collisions",),
    ),
    "uniform numbers of 16 bits": (
        lambda: noise.bits(rows(ROW), noise.key_words(KEY)) & -65536,
        lambda x: cells(x) | tails(exponentials(x), normals(x)),
        ("lower cells", "N(0, 1) below −5.0", "Exp(1) above 14.0"),
    ),
    "one per cent of the entries copied": (
        lambda: torch.from_numpy(copies(along("head", SMALL), 0.01).view(np.int32)),
        lambda x: neighbours(x) | of_normals(x) | repeats(x, SMALL[1]),
        ("xor bits", "lags z, z", "lags |z|, |z|", "collisions"),
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_faulty_generator_is_found(fault):
    make, check, found_by = BROKEN[fault]
    p = check(make().numpy().view(np.uint32))
    assert {name: p[name] for name in found_by if not p[name] < ALPHA} == {}


# The documentation.


def table() -> list[str]:
    """The rows of the table in docs/noise.md, but for what each check is."""
    size = detectable()

    def per_cent(name: str) -> str:
        return f"{size[name]:.1%}"

    return [
        f"| Cells | probabilities of cells off by {per_cent('cells')} (root mean square) |",
        f"| Kolmogorov–Smirnov | distribution function off by {size['Kolmogorov']:.4f} |",
        f"| Single bits | probability of a bit off ½ by {size['bits']:.4f} |",
        f"| Parities | probability of a parity off ½ by {size['parities']:.4f} |",
        "| Neighbours' bits | as the four above, of the exclusive or of neighbours |",
        f"| Pairs of bits | probability of agreeing off ½ by {size['pairs of bits']:.4f} |",
        f"| Chosen lags | a correlation of {size['lags']:.4f} |",
        f"| Near lags | correlations of {size['near lags']:.5f} (root mean square) |",
        f"| Every lag | a correlation of {size['every lag']:.4f} |",
        f"| Highest wave | a wave of amplitude {size['highest wave']:.4f} standard deviations |",
        f"| Spectrum | density of the ordinates off by {per_cent('spectrum')} (root mean square) |",
        f"| Permutations | probabilities off by {per_cent('permutations')} (root mean square) |",
        f"| Runs | turning points rarer or more frequent by {size['turns']:.4f} than ⅔ |",
        f"| Gaps | probabilities off by {per_cent('gaps')} (root mean square) |",
        f"| Collisions | {size['collisions']:.0%} more equal pairs |",
        f"| Birthday spacings | {size['birthday spacings']:.0%} more equal spacings |",
        f"| Normal tails | {1 + size['normal beyond 4']:.1f} times as many beyond 4, "
        f"{1 + size['normal beyond 5']:.0f} times beyond 5 |",
        f"| Exponential tails | {1 + size['exponential beyond 14']:.1f} times as many beyond 14 |",
    ]


def test_the_documentation_states_these_figures():
    page = Path(__file__).parents[2] / "docs" / "noise.md"
    if not page.exists():
        pytest.skip("a source distribution has no docs")
    text = page.read_text(encoding="utf-8")
    stated = {line.split("|")[1].strip(): f"| {line.split('|')[1].strip()} | {line.split('|')[-2].strip()} |"
              for line in text.splitlines() if line.count("|") == 4}  # fmt: skip
    for row in table():
        assert stated.get(row.split("|")[1].strip()) == row
    for figure in (f"{DRAWS:,}", f"{MODEL_DRAWS:,}", f"{SHARED_DRAWS:,}", "200 p-values", "5 · 10⁻⁹"):
        assert figure in text
