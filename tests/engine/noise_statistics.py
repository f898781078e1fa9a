"""Statistics of 32-bit words, and addresses of the generator to compute them at: for the tests of the noise.

Every check computes p-values (a maximum over many statistics is multiplied by their number).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from scipy import fft, stats
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
