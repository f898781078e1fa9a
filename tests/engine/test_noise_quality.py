"""The counter-based generator at 10⁷ draws: what is tested, how often it fails by chance, what it would find.

Every check computes p-values (a maximum over many statistics is multiplied by their number) and fails if one
is below ``ALPHA``. There are 200 p-values in this file, so a perfect generator with addresses chosen at random
fails it with probability below 10⁻⁶; as the addresses are fixed, a pass is a pass for ever.

The second half shows that the checks can fail. Defects of exactly the size that docs/noise.md calls
detectable (with probability 0.99) are planted into the generator's own words, and whole generators with a
step missing go through the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import fft, optimize, special, stats
from torch import Tensor

from bayesian_attention.engine import noise
from bayesian_attention.engine.rows import DenseRows, NoiseAddress

#: Smallest p-value that passes.
ALPHA = 5e-9
#: Probability with which a "detectable" defect is found.
POWER = 0.99
#: Entries along the axis under test, and beside it; odd, so that no lag of the circle is its own opposite.
ALONG, ACROSS = 10125, 1001
DRAWS = ALONG * ACROSS
#: A tenth of them, for generators with defects.
SMALL = (2025, 501)
PIECE = 1 << 16
AXES = ("seed", "sample", "batch", "head", "query", "key")
LAGS = (1, 2, 3, 4, 8, 16, 64, 256, 1024, 4096)
NEAR, TUPLE, GAP, GAP_CELLS, BIRTHDAYS, ORDINATE_CELLS = 32, 5, 1 / 16, 96, 3375, 1024
NORMAL_TAILS = (3.0, 4.0, 4.5, 5.0)
EXPONENTIAL_TAILS = (8.0, 10.0, 12.0, 14.0)
MODEL_DRAWS = 9 * 11 * 3 * 15 * 49 * 49
PAIRS, SHARED_QUERIES, SHARED_KEYS = 29, 577, 601
SHARED_DRAWS = PAIRS * SHARED_QUERIES * SHARED_KEYS
#: p-values of each test; "axis" comes six times.
P_VALUES = {"axis": 25, "model": 36, "pairs": 14}

PValues = dict[str, float]


# Statistics: functions of 32-bit words or of normal draws that return p-values.


def pieces(x: np.ndarray) -> Iterator[np.ndarray]:
    """The flattened array in parts that fit into a processor's cache, which halves the time."""
    flat = x.reshape(-1)
    return (flat[i : i + PIECE] for i in range(0, flat.size, PIECE))


def normal_p(scores: np.ndarray, count: int | None = None) -> float:
    """p-value of the largest of ``count`` standard normal scores, two-sided."""
    return min(1.0, 2 * stats.norm.sf(float(np.abs(scores).max())) * (count or np.size(scores)))


def chi2_p(counts: np.ndarray, probabilities: np.ndarray | float) -> float:
    expected = counts.sum() * probabilities
    return float(stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), counts.size - 1))


def poisson_p(count: int, mean: float) -> float:
    """Two-sided."""
    return float(min(1.0, 2 * min(stats.poisson.cdf(count, mean), stats.poisson.sf(count - 1, mean))))


def kolmogorov_p(counts: np.ndarray) -> float:
    """Kolmogorov-Smirnov at the edges of equal cells."""
    n, edges = counts.sum(), np.arange(1, counts.size + 1) / counts.size
    return float(stats.kstwobign.sf(np.abs(np.cumsum(counts) / n - edges).max() * math.sqrt(n)))


def walsh(counts: np.ndarray) -> np.ndarray:
    """Score of the parity of every subset of the bits of a cell's number."""
    x = counts.astype(np.float64)
    for i in range(counts.size.bit_length() - 1):
        x = x.reshape(-1, 2, 1 << i)
        x = np.stack([x[:, 0] + x[:, 1], x[:, 0] - x[:, 1]], axis=1)
    return x.reshape(-1)[1:] / math.sqrt(counts.sum())


def cells(x: np.ndarray) -> PValues:
    """Upper and lower 16 bits over 65,536 cells; each bit; each parity of bits of one half."""
    upper, lower = np.zeros((2, 1 << 16), dtype=np.int64)
    for part in pieces(x):
        upper += np.bincount(part >> np.uint32(16), minlength=1 << 16)
        lower += np.bincount(part & np.uint32(0xFFFF), minlength=1 << 16)
    scores = np.stack([walsh(upper), walsh(lower)])
    return {
        "upper cells": chi2_p(upper, 2.0**-16),
        "lower cells": chi2_p(lower, 2.0**-16),
        "Kolmogorov": kolmogorov_p(upper),
        "bits": normal_p(scores[:, [(1 << i) - 1 for i in range(16)]]),
        "parities": normal_p(scores),
    }


def neighbours(x: np.ndarray) -> PValues:
    """The same for the exclusive or of neighbours along the first axis: which bits agree, and how."""
    return {f"xor {name}": p for name, p in cells(x[1:] ^ x[:-1]).items()}


def uniform(x: np.ndarray) -> Tensor:
    return noise.uniform(torch.from_numpy(x.view(np.int32)))


def exponentials(x: np.ndarray) -> np.ndarray:
    """float32 exponential draws as the Weibull posterior makes them."""
    return np.concatenate([(-uniform(part).log()).numpy() for part in pieces(x)]).reshape(x.shape)


def normals(x: np.ndarray) -> np.ndarray:
    """float32 normal draws as the lognormal posterior makes them."""
    root = math.sqrt(2)
    return np.concatenate([(torch.erfinv(2 * uniform(p) - 1) * root).numpy() for p in pieces(x)]).reshape(x.shape)


def correlations(z: np.ndarray) -> PValues:
    """Autocorrelations of z and of |z| at every lag of the lattice at once; z with |z| along the axis; spectrum of z.

    The lattice is taken as a circle, which adds the few pairs of its two ends.
    """
    size, along = z.size, [lag for lag in LAGS if lag < len(z)]
    centre, spread = math.sqrt(2 / math.pi), math.sqrt(1 - 2 / math.pi)
    magnitude = (np.abs(z) - np.float32(centre)) * np.float32(1 / spread)
    products = [float(np.vdot(magnitude[lag:], z[:-lag])) / math.sqrt(z[lag:].size) for lag in along]
    products += [float(np.vdot(z[lag:], magnitude[:-lag])) / math.sqrt(z[lag:].size) for lag in along]
    results = {"lags z, |z|": normal_p(np.array(products))}
    waves, other = fft.rfftn(z), fft.rfftn(magnitude, overwrite_x=True)
    spectrum, other = waves.real**2 + waves.imag**2, other.real**2 + other.imag**2
    for name, power in (("z, z", spectrum), ("|z|, |z|", other)):
        lags = fft.irfftn(power, s=z.shape)
        lags *= np.float32(1 / math.sqrt(size))
        lags[(0,) * z.ndim] = 0.0
        results[f"every lag {name}"] = normal_p(np.array([lags.max(), lags.min()]), size)
        results[f"lags {name}"] = normal_p(lags.reshape(len(z), -1)[along, 0])
        near = lags[tuple(slice(min(NEAR, n // 2 + 1)) for n in z.shape)].astype(np.float64)
        results[f"near lags {name}"] = float(stats.chi2.sf((near**2).sum(), near.size - 1))
    ordinates = spectrum[..., 1:] / np.float32(size)  # the first column holds the mean and conjugates
    results["highest wave"] = min(1.0, ordinates.size * math.exp(-float(ordinates.max())))
    cell = np.minimum(np.exp(-ordinates) * ORDINATE_CELLS, ORDINATE_CELLS - 1).astype(np.int16)
    results["spectrum"] = chi2_p(np.bincount(cell.reshape(-1), minlength=ORDINATE_CELLS), 1 / ORDINATE_CELLS)
    return results


def order(x: np.ndarray) -> PValues:
    """Permutations of five, turning points (ends of runs up and down), and gaps, along the first axis."""
    lines = np.ascontiguousarray(x.T)  # lines run along the axis
    length = lines.shape[1]
    tuples = lines[:, : length // TUPLE * TUPLE].reshape(-1, TUPLE).T
    code = np.zeros(tuples.shape[1], dtype=np.int16)
    for i in range(TUPLE):
        for j in range(i):
            code = 2 * code + (tuples[i] > tuples[j])
    counts = np.zeros(math.factorial(TUPLE))
    seen = np.bincount(code)
    seen = seen[seen > 0]  # the other codes contradict themselves
    counts[: seen.size] = seen
    up = lines[:, 1:] > lines[:, :-1]
    turns = np.count_nonzero(up[:, 1:] != up[:, :-1])
    count = lines.shape[0]
    results = {
        "permutations": chi2_p(counts, 1 / counts.size),
        "turns": normal_p(
            np.array((turns - count * 2 * (length - 2) / 3) / math.sqrt(count * (16 * length - 29) / 90))
        ),
    }
    for name, word in (("upper", lines), ("lower", lines << np.uint32(16))):
        gaps = np.diff(np.flatnonzero(word.reshape(-1) < np.uint32(GAP * 2**32))) - 1
        mass = stats.geom.pmf(np.arange(1, GAP_CELLS), GAP)
        counts = np.bincount(np.minimum(gaps, GAP_CELLS - 1), minlength=GAP_CELLS)
        results[f"gaps {name}"] = chi2_p(counts, np.append(mass, 1 - mass.sum()))
    return results


def collision_mean(size: int, row: int) -> float:
    """Expected pairs of equal words; there are none within a row of attention, of ``row`` entries."""
    return (math.comb(size, 2) - size / row * math.comb(row, 2)) / 2**32


def spacing_mean(days: int) -> float:
    """Expected repeated spacings of ``days`` sorted words: λ = n³ / (4 · 2³²), less the threefold ones."""
    return days**3 / 2**34 - days**5 / (18 * 2**64)


def repeats(x: np.ndarray, row: int) -> PValues:
    """Equal words anywhere, and equal spacings between sorted words of a stretch of the first axis."""
    ordered = np.sort(x, axis=None)
    equal = int((ordered[1:] == ordered[:-1]).sum())
    lines = np.ascontiguousarray(x.T)
    days = min(BIRTHDAYS, lines.shape[1])
    blocks = np.sort(lines[:, : lines.shape[1] // days * days].reshape(-1, days), axis=1)
    spacings = np.sort(np.diff(blocks, axis=1), axis=1)
    repeated = int((spacings[:, 1:] == spacings[:, :-1]).sum())
    return {
        "collisions": poisson_p(equal, collision_mean(x.size, row)),
        "birthday spacings": poisson_p(repeated, blocks.shape[0] * spacing_mean(days)),
    }


def quantiles(draws: np.ndarray, distribution: Callable[[Tensor], Tensor]) -> PValues:
    """Draws over 65,536 cells of equal probability."""
    counts = np.zeros(1 << 16, dtype=np.int64)
    for part in pieces(draws):
        cell = (distribution(torch.from_numpy(part).double()) * 2**16).to(torch.int32).clamp_(max=2**16 - 1)
        counts += np.bincount(cell.numpy(), minlength=1 << 16)
    return {"cells": chi2_p(counts, 2.0**-16), "Kolmogorov": kolmogorov_p(counts)}


def laws(x: np.ndarray) -> PValues:
    """Float32 draws of the posteriors against Exp(1) and N(0, 1): distribution functions and tails."""
    e, z = exponentials(x), normals(x)
    results = {f"Exp(1) {name}": p for name, p in quantiles(e, lambda t: torch.exp(-t)).items()}
    results |= {f"N(0, 1) {name}": p for name, p in quantiles(z, torch.special.ndtr).items()}
    return results | tails(e, z)


def tails(e: np.ndarray, z: np.ndarray) -> PValues:
    """Counts beyond thresholds of exponential and of normal draws."""
    results = {}
    for t in NORMAL_TAILS:
        mean = z.size * stats.norm.sf(t)
        results[f"N(0, 1) above {t}"] = poisson_p(np.count_nonzero(z > t), mean)
        results[f"N(0, 1) below −{t}"] = poisson_p(np.count_nonzero(z < -t), mean)
    for t in EXPONENTIAL_TAILS:
        small = math.exp(-t)
        results[f"Exp(1) above {t}"] = poisson_p(np.count_nonzero(e > t), e.size * small)
        results[f"Exp(1) below exp(−{t})"] = poisson_p(np.count_nonzero(e < small), -e.size * math.expm1(-small))
    return results


def bit_pairs(x: np.ndarray) -> PValues:
    """All pairs of bits of a word, and of the two words of every other pair of neighbours along the last axis."""
    together, count = np.zeros((64, 64)), x.size // 2
    doubles = x.reshape(-1)[: 2 * count].view(np.uint64)
    for i in range(0, count, 4096):
        bits = np.unpackbits(doubles[i : i + 4096].view(np.uint8).reshape(-1, 8), axis=1).astype(np.float32)
        together += bits.T @ bits
    ones = together.diagonal()
    agree = count - 2 * (ones + ones[:, None]) + 4 * together  # agreements less disagreements
    within = agree[:32, :32] + agree[32:, 32:]
    return {
        "pairs of bits within": normal_p(within[np.triu_indices(32, 1)] / math.sqrt(2 * count)),
        "pairs of bits between": normal_p(agree[32:, :32] / math.sqrt(count)),
    }


def battery(x: np.ndarray, row: int) -> PValues:
    """Everything that is computed for each axis."""
    return cells(x) | neighbours(x) | correlations(normals(x)) | order(x) | repeats(x, row)


def pair(x: np.ndarray, y: np.ndarray) -> PValues:
    """Two sets of words, entry against entry."""
    results = {f"xor {name}": p for name, p in cells(x ^ y).items()}
    results |= {f"difference {name}": p for name, p in cells(x - y).items()}
    a, b = (normals(w).reshape(-1).astype(np.float64) for w in (x, y))
    centre, spread = math.sqrt(2 / math.pi), math.sqrt(1 - 2 / math.pi)
    c, d = ((np.abs(w) - centre) / spread for w in (a, b))
    for name, left, right in (("z, z", a, b), ("|z|, |z|", c, d), ("z, |z|", a, d), ("|z|, z", c, b)):
        results[f"correlation {name}"] = normal_p(left @ right / math.sqrt(a.size))
    return results


def passes(p: PValues, count: int) -> None:
    """``count`` p-values, all large enough."""
    assert len(p) == count
    failed = {name: value for name, value in p.items() if not value >= ALPHA}
    assert not failed


# Addresses.


def along(axis: str, shape: tuple[int, int] = (ALONG, ACROSS)) -> np.ndarray:
    """Words of this shape: neighbours along ``axis`` and, across, along keys (or queries)."""
    x = np.empty(shape, dtype=np.uint32)
    for i in range(0, shape[0], 64):
        address = dict.fromkeys(AXES, torch.tensor(3))
        address["query" if axis == "key" else "key"] = torch.arange(shape[1])
        address[axis] = torch.arange(i, min(i + 64, shape[0])).unsqueeze(-1)
        rows = noise.start(address["seed"], address["sample"]).absorb(address["batch"])
        rows = rows.absorb_position(torch.tensor(0)).absorb_position(address["head"])
        bits = noise.bits(rows.absorb_position(address["query"]), noise.key_words(address["key"]))
        x[i : i + 64] = bits.numpy().view(np.uint32)
    return x


def model() -> np.ndarray:
    """(sample, layer, example, head, query, key): what a model with 11 layers and 15 heads draws in 9 passes."""
    heads, positions, ids = 15, 49, torch.tensor([17, 40_000, 3])
    keys, parts = noise.key_words(torch.arange(positions)), []
    for sample in range(9):
        for layer in range(11):
            address = NoiseAddress(noise.derive_seed(2024, layer), sample, ids)
            rows = DenseRows().words(address, (3, heads, positions), ids.device)
            parts.append(noise.bits(rows.view(3, heads, positions, 1), keys))
    return torch.stack(parts).view(9, 11, 3, heads, positions, positions).numpy().view(np.uint32)


def seeds_that_share_the_first_word(count: int = PAIRS) -> list[tuple[int, int]]:
    """Pairs of derived seeds whose rows have their first word in common, address by address.

    Some 32 pairs of half a million 64-bit seeds do. (Of 2³² consecutive seeds, no two.)
    """
    seeds = noise.derive_seed(torch.arange(1 << 19))
    first, order = noise.start(seeds).first.sort()
    (at,) = torch.nonzero(first[1:] == first[:-1], as_tuple=True)
    return list(zip(seeds[order[at]].tolist(), seeds[order[at + 1]].tolist(), strict=True))[:count]


def rows_of_pairs(pairs: list[tuple[int, int]], queries: int) -> tuple[noise.RowWords, noise.RowWords]:
    """The words of rows (pair, query, 1), for the first and for the second seed of each pair."""
    one, other = (
        noise.start(torch.tensor(seeds).unsqueeze(-1)).absorb_position(torch.arange(queries)).view(-1, queries, 1)
        for seeds in zip(*pairs, strict=True)
    )
    return one, other


# The generator passes.


@pytest.fixture(scope="module")
def base() -> np.ndarray:
    return along("query")


@pytest.mark.parametrize("axis", AXES)
def test_neighbours_along_a_coordinate(axis, base):
    x = base if axis == "query" else along(axis)
    passes(battery(x, row=ALONG if axis == "key" else ACROSS), P_VALUES["axis"])


def test_a_model_with_derived_seeds_samples_and_identities():
    # Correlations at every lag in six dimensions: diagonals, and the heads of a group that shares its keys.
    x = model()
    assert x.size == MODEL_DRAWS
    passes(cells(x) | laws(x) | bit_pairs(x) | correlations(normals(x)), P_VALUES["model"])


def test_rows_that_have_their_first_word_in_common():
    pairs, keys = seeds_that_share_the_first_word(), noise.key_words(torch.arange(SHARED_KEYS))
    one, other = rows_of_pairs(pairs, SHARED_QUERIES)
    assert torch.equal(one.first, other.first)
    x, y = (noise.bits(rows, keys).numpy().view(np.uint32) for rows in (one, other))
    assert x.size == SHARED_DRAWS
    passes(pair(x, y), P_VALUES["pairs"])


def test_false_alarms_of_the_whole_file():
    total = P_VALUES["axis"] * len(AXES) + sum(count for name, count in P_VALUES.items() if name != "axis")
    assert total == 200
    assert total * ALPHA <= 1e-6
    assert min(DRAWS, MODEL_DRAWS, SHARED_DRAWS) >= 10**7


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
