"""The counter-based generator, as a random number generator and as a pure function of the address.

Statistical tests have fixed coordinates; the false-alarm rate of each stands beside its bound.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from bayesian_attention.engine import noise

AXES = ("seed", "sample", "batch", "head", "query", "key")
#: Bounds of standard normal statistics: two-sided 6e-7, 4e-8, 2e-9 and 8e-11.
FIVE, FIVE_AND_HALF, SIX, SIX_AND_HALF = 5.0, 5.5, 6.0, 6.5


def random_bits(**coordinates: object) -> np.ndarray:
    """uint32 of shape (seeds, samples, batch, heads, queries, keys); coordinates left out are 3."""
    axes = [torch.as_tensor(coordinates.get(axis, 3)).reshape(-1) for axis in AXES]
    seed, sample, batch, head, query, key = (
        x.view(*(-1 if i == j else 1 for j in range(6))) for i, x in enumerate(axes)
    )
    words = noise.start(seed, sample).absorb(batch).absorb_position(torch.tensor(0))
    words = words.absorb_position(head).absorb_position(query)
    return noise.bits(words, noise.key_words(key)).numpy().view(np.uint32)


def along(axis: str, count: int, across: int = 1) -> np.ndarray:
    """Words (count, across): neighbours along ``axis``, and along keys (or queries) across."""
    other = "query" if axis == "key" else "key"
    x = random_bits(**{axis: torch.arange(count), other: torch.arange(across)})
    x = x.reshape(across, count).T if axis == "key" else x.reshape(count, across)
    return np.ascontiguousarray(x)


def unit(x: np.ndarray) -> np.ndarray:
    return noise.uniform(torch.from_numpy(x.view(np.int32)), torch.float64).numpy()


def bit_table(x: np.ndarray) -> np.ndarray:
    """(…, 32) zeros and ones."""
    return np.unpackbits(x[..., None].view(np.uint8), axis=-1, bitorder="little")


def normal(x: np.ndarray) -> np.ndarray:
    return special.ndtri(unit(x))


# An independent implementation, in Python's unbounded integers.


def mix_int(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def bits_int(seed: int, sample: int, batch: int, inner: int, head: int, query: int, key: int) -> int:
    words = [part for x in (seed, sample, batch) for part in (x % 2**32, (x >> 32) % 2**32)]
    words += [inner % 2**32, head % 2**32, query % 2**32]
    first, second = 0x3C6EF372, 0xA54FF53A
    for word in words:
        first = mix_int((first + word * 0x9E3779B1) % 2**32)
        second = mix_int((second + word * 0x85EBCA77) % 2**32)
    x = mix_int((key * 0x9E3779B1 + 0xA54FF53A) % 2**32) ^ first
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x = x ^ x >> 15 ^ second
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


EXTREME = (0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 0x0123456789ABCDEF)
POSITIONS = (0, 1, 17, 2**16, 2**31 - 1)


@pytest.mark.parametrize("axis", ["seed", "sample", "batch"])
def test_agrees_with_python_integers_for_64_bit_coordinates(axis):
    ours = random_bits(**{axis: torch.tensor(EXTREME)}).reshape(-1)
    expected = [bits_int(**{"seed": 3, "sample": 3, "batch": 3, "inner": 0, "head": 3, "query": 3, "key": 3, axis: x})
                for x in EXTREME]  # fmt: skip
    assert ours.tolist() == expected


@pytest.mark.parametrize("axis", ["head", "query", "key"])
def test_agrees_with_python_integers_for_positions(axis):
    ours = random_bits(**{axis: torch.tensor(POSITIONS)}).reshape(-1)
    expected = [bits_int(**{"seed": 3, "sample": 3, "batch": 3, "inner": 0, "head": 3, "query": 3, "key": 3, axis: x})
                for x in POSITIONS]  # fmt: skip
    assert ours.tolist() == expected


def test_agrees_with_python_integers_at_random_addresses():
    generator = np.random.default_rng(0)
    for _ in range(200):
        seed, sample, batch = (int(x) for x in generator.integers(-(2**63), 2**63 - 1, 3))
        head, query, key = (int(x) for x in generator.integers(0, 2**31, 3))
        ours = random_bits(seed=seed, sample=sample, batch=batch, head=head, query=query, key=key).item()
        assert ours == bits_int(seed, sample, batch, 0, head, query, key)


def test_mix_agrees_with_python_integers_and_undoes():
    # The inverse of lowbias32, from the page of its author.
    def undo(x: int) -> int:
        x ^= x >> 16
        x = x * 0x43021123 % 2**32
        x ^= x >> 15 ^ x >> 30
        x = x * 0x1D69E2A5 % 2**32
        return x ^ x >> 16

    x = np.random.default_rng(1).integers(0, 2**32, 2000, dtype=np.uint32)
    x[:4] = 0, 2**32 - 1, 2**31, 2**31 - 1
    mixed = noise.mix(torch.from_numpy(x.view(np.int32))).numpy().view(np.uint32)
    assert mixed.tolist() == [mix_int(int(v)) for v in x]
    assert [undo(int(v)) for v in mixed] == x.tolist()


GOLDEN = {
    # seed, sample, batch, head, query, key
    (0, 0, 0, 0, 0, 0): 0xB41DFC39,
    (1, 0, 0, 0, 0, 0): 0xF8B88857,
    (-1, 0, 0, 0, 0, 1): 0xFA5D30F8,
    (2**63 - 1, 5, 2, 11, 511, 511): 0xC077BDB2,
    (-(2**63), 19, 2**40 + 1, 3, 2**20, 2**31 - 1): 0x2185CF98,
}


@pytest.mark.parametrize(("address", "expected"), GOLDEN.items())
def test_bits_never_change(address, expected):
    # Stored results name their seeds: another generator would need another major version.
    assert random_bits(**dict(zip(AXES, address, strict=True))).item() == expected


def test_derived_seeds_never_change():
    assert noise.derive_seed(0).item() == 4057886200719762684
    assert noise.derive_seed(-7, 3, 2).item() == -1149444608860421828


@pytest.mark.parametrize("axis", ["seed", "sample", "batch"])
@pytest.mark.parametrize("value", [0, 7, -7, 2**31 - 1, -(2**31)])
def test_integer_and_tensors_of_either_width_mean_the_same(axis, value):
    plain, int64, int32 = (
        random_bits(**{axis: x})
        for x in (value, torch.tensor(value, dtype=torch.int64), torch.tensor(value, dtype=torch.int32))
    )
    assert plain == int64 == int32


@pytest.mark.parametrize("axis", ["head", "query", "key"])
def test_positions_of_either_width_mean_the_same(axis):
    x = torch.tensor(POSITIONS)
    np.testing.assert_array_equal(random_bits(**{axis: x}), random_bits(**{axis: x.to(torch.int32)}))


def test_high_words_of_a_seed_count():
    seeds = torch.tensor([5, 5 + 2**32, 5 - 2**32, 5 + 2**62, 5 - 2**63])
    assert len(np.unique(random_bits(seed=seeds))) == 5


def test_coordinates_do_not_commute():
    # (1, 2) and (2, 1) on any two coordinates are different rows, as is the key against the query.
    for a in range(6):
        for b in range(a):
            assert random_bits(**{AXES[a]: 1, AXES[b]: 2}) != random_bits(**{AXES[a]: 2, AXES[b]: 1})


def test_index_select_and_view_keep_the_words_together():
    words = noise.start(1).absorb(torch.arange(6))
    for a, b in (("first", "first"), ("second", "second")):
        assert torch.equal(
            getattr(words.index_select(torch.tensor([4, 0])).view(2, 1), a), getattr(words, b)[[4, 0]].unsqueeze(-1)
        )
    assert not torch.equal(words.first, words.second)


# Quality.


@pytest.mark.parametrize("axis", AXES)
def test_uniform_along_each_coordinate(axis):
    # Four p-values of 1e-6 and 32 bits at 4e-8: false alarms below 6e-6 an axis.
    x = along(axis, 1 << 19).reshape(-1)
    u = unit(x)
    assert stats.kstest(u, "uniform").pvalue > 1e-6
    for cells in (x >> 20, (x >> 9) & 4095, x & 4095):
        assert stats.chisquare(np.bincount(cells, minlength=4096)).pvalue > 1e-6
    z = (bit_table(x).mean(axis=0) - 0.5) * 2 * math.sqrt(x.size)
    assert np.abs(z).max() < FIVE_AND_HALF


@pytest.mark.parametrize("axis", AXES)
def test_exponential_and_normal_draws_along_each_coordinate(axis):
    # False-alarm rate 1e-6 each. Float32, as posteriors see it.
    u = torch.from_numpy(unit(along(axis, 700, 300))).float()
    assert stats.kstest(-u.log().double().numpy().reshape(-1), "expon").pvalue > 1e-6
    eps = math.sqrt(2) * torch.erfinv(2 * u - 1).double().numpy().reshape(-1)
    assert stats.kstest(eps, "norm").pvalue > 1e-6
    # Tails: counts beyond 4.5 sd are Poisson with mean n × 6.8e-6 (here about 1.4).
    assert (np.abs(eps) > 4.5).sum() <= stats.poisson.isf(1e-6, eps.size * 2 * stats.norm.sf(4.5))


@pytest.mark.parametrize("axis", AXES)
def test_neighbours_are_uncorrelated(axis):
    # 10 correlations at 6e-7 and 10 × 32 bits at 2e-9: false alarms below 7e-6 an axis.
    x = along(axis, 1536, 400)
    z, b = normal(x), bit_table(x)
    for lag in (1, 2, 3, 4, 8, 16, 64, 256, 1024, 12):
        n = z[lag:].size
        assert abs((z[lag:] * z[:-lag]).sum()) / math.sqrt(n) < FIVE
        equal = (b[lag:] == b[:-lag]).mean(axis=(0, 1))
        assert np.abs((equal - 0.5) * 2 * math.sqrt(n)).max() < SIX


@pytest.mark.parametrize("axis", AXES)
def test_pairs_and_triples_of_neighbours_fill_the_cube(axis):
    # False-alarm rate 2e-6 an axis. Only every third is used, so that counts are independent.
    x = along(axis, 1536, 400) >> 27
    a, b, c = x[0::3], x[1::3], x[2::3]
    pairs = np.bincount((a * 32 + b).reshape(-1), minlength=1024)
    triples = np.bincount(((a >> 1) * 256 + (b >> 1) * 16 + (c >> 1)).reshape(-1), minlength=4096)
    assert stats.chisquare(pairs).pvalue > 1e-6
    assert stats.chisquare(triples).pvalue > 1e-6


@pytest.mark.parametrize("axis", [axis for axis in AXES if axis != "key"])
def test_rows_and_columns_of_a_matrix_are_uncorrelated(axis):
    rows, keys = 384, 3072
    z = normal(along(axis, rows, keys))
    for x in (z, z[:, :rows].T):
        r = np.corrcoef(x)[np.triu_indices(rows, 1)] * math.sqrt(x.shape[1])
        # The largest of 73,536 correlations: false-alarm rate 6e-6.
        assert np.abs(r).max() < SIX_AND_HALF
        # Their mean square, 1 ± √(2/pairs): 6e-7.
        assert abs((r**2).mean() - 1) < FIVE * math.sqrt(2 / r.size) + 2 / x.shape[1]
    # The largest eigenvalue follows the Tracy-Widom law, whose tail beyond 6 is below 1e-6.
    edge = (math.sqrt(keys) + math.sqrt(rows)) ** 2
    spread = (math.sqrt(keys) + math.sqrt(rows)) * (1 / math.sqrt(keys) + 1 / math.sqrt(rows)) ** (1 / 3)
    assert np.linalg.norm(z, 2) ** 2 < edge + 6 * spread


def test_rows_of_different_blocks_are_uncorrelated():
    # Rows (seed, sample, batch, head, query) ∈ {0, 1, 2}⁵ at once: all 29,403 pairs, false-alarm rate 2e-6.
    z = normal(random_bits(**dict.fromkeys(AXES[:-1], torch.arange(3)), key=torch.arange(4096))).reshape(243, -1)
    r = np.corrcoef(z)[np.triu_indices(243, 1)] * 64
    assert np.abs(r).max() < SIX_AND_HALF
    assert abs((r**2).mean() - 1) < FIVE * math.sqrt(2 / r.size) + 2 / 4096


@pytest.mark.parametrize(("axis", "width"), [(axis, 64 if i < 3 else 31) for i, axis in enumerate(AXES)])
def test_flipping_any_bit_of_a_coordinate_flips_half_of_the_bits(axis, width):
    # Up to 64 × 32 cells at 8e-11 and 64 sums at 2e-9: false alarms below 3e-7 an axis.
    count, position = 4096, AXES.index(axis)
    generator = torch.Generator().manual_seed(position)
    base = [torch.randint(-(2**63), 2**63 - 1, (count, 1), generator=generator) for _ in range(3)]
    base += [torch.randint(0, 2**31 - 1, (count, 1), generator=generator) for _ in range(3)]

    def bits(address: list[torch.Tensor]) -> np.ndarray:
        seed, sample, batch, head, query, key = address
        words = noise.start(seed, sample).absorb(batch).absorb_position(torch.tensor(0))
        words = words.absorb_position(head).absorb_position(query)
        return noise.bits(words, noise.key_words(key)).numpy().view(np.uint32)

    flips = torch.tensor([1 << i if i < 63 else -(2**63) for i in range(width)])
    flipped = [x ^ flips if i == position else x for i, x in enumerate(base)]
    changed = bit_table(bits(base) ^ bits(flipped))  # (count, width, 32)
    assert np.abs((changed.mean(axis=0) - 0.5) * 2 * math.sqrt(count)).max() < SIX_AND_HALF
    assert np.abs((changed.mean(axis=(0, 2)) - 0.5) * 2 * math.sqrt(count * 32)).max() < SIX
    # Output bits flip independently of each other: the count is binomial, with variance 8 (sd of the
    # estimate 8√(2/n) up to the binomial's kurtosis).
    variance = changed.sum(axis=2, dtype=np.int64).var()
    assert abs(variance - 8) < FIVE_AND_HALF * 8 * math.sqrt(2 / (count * width)) + 0.02


def test_no_two_rows_share_their_words():
    # A million rows; the expected number of pairs that agree is 3e-8.
    side = torch.arange(16)
    words = noise.start(side.view(-1, 1, 1, 1, 1), side.view(-1, 1, 1, 1)).absorb(side.view(-1, 1, 1))
    words = words.absorb_position(torch.tensor(0)).absorb_position(side.view(-1, 1)).absorb_position(side)
    both = (words.first.long() << 32) | (words.second.long() & 0xFFFFFFFF)
    assert both.numel() == 16**5 == both.unique().numel()


def test_equal_bits_are_as_frequent_as_among_birthdays():
    # 2²¹ words in rows of 2¹⁰, none equal within a row: 512 pairs are expected, Poisson; rate 2e-9.
    x = np.sort(along("query", 1 << 11, 1 << 10).reshape(-1))
    expected = x.size**2 / 2**33
    assert abs((x[1:] == x[:-1]).sum() - expected) < SIX * math.sqrt(expected)


def test_no_bits_repeat_within_a_row():
    assert np.unique(along("key", 1 << 19)).size == 1 << 19


# Uniform numbers.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_bits_give_finite_noise(dtype):
    # All ones, all zeros, and the two beside one half.
    u = noise.uniform(torch.tensor([0, 511, 512, 2**31 - 1, -(2**31), -1], dtype=torch.int32), dtype)
    assert u.dtype == dtype
    expected = [2**-24, 2**-24, 3 * 2**-24, 0.5 - 2**-24, 0.5 + 2**-24, 1 - 2**-24]
    assert u.tolist() == expected
    assert bool((-u.log()).log().isfinite().all())
    quantile = torch.erfinv(2 * u - 1)
    assert bool(quantile.isfinite().all())
    # Symmetric about one half: erfinv is odd.
    torch.testing.assert_close(quantile[[0, 3]], -quantile[[5, 4]], rtol=0, atol=0)


def test_float32_and_float64_see_the_same_number():
    x = torch.from_numpy(along("query", 500, 500).view(np.int32))
    u = noise.uniform(x)
    assert u.dtype == torch.float32
    assert torch.equal(u.double(), noise.uniform(x, torch.float64))
    assert 0 < u.min() < u.max() < 1


# Seeds.


def test_global_generator_rules_new_seeds():
    state = torch.get_rng_state()
    try:
        torch.manual_seed(4)
        first = [noise.new_seed() for _ in range(3)]
        torch.manual_seed(4)
        second = [noise.new_seed() for _ in range(3)]
        torch.manual_seed(5)
        third = [noise.new_seed() for _ in range(3)]
    finally:
        torch.set_rng_state(state)
    assert first == second
    assert len({x.item() for x in first + third}) == 6
    assert first[0].dtype == torch.int64
    assert first[0].shape == ()


def test_new_seeds_use_all_64_bits():
    # 64 bits, 4,000 seeds, each bit at 4e-8.
    state = torch.get_rng_state()
    try:
        torch.manual_seed(6)
        seeds = np.array([noise.new_seed().item() for _ in range(4000)])
    finally:
        torch.set_rng_state(state)
    table = np.unpackbits(seeds[:, None].view(np.uint8), axis=1)
    assert np.abs((table.mean(axis=0) - 0.5) * 2 * math.sqrt(4000)).max() < FIVE_AND_HALF


def test_derived_seeds_are_distinct_and_depend_on_all_coordinates():
    coordinates = [(), *((i,) for i in range(20)), *((i, j) for i in range(20) for j in range(20))]
    start = torch.arange(-5, 5)
    seeds = torch.cat([noise.derive_seed(start, *x) for x in coordinates]).tolist()
    assert len(set(seeds)) == len(seeds) == 4210
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    # All 64 bits are used: each at 4e-8.
    table = np.unpackbits(np.array(seeds)[:, None].view(np.uint8), axis=1)
    assert np.abs((table.mean(axis=0) - 0.5) * 2 * math.sqrt(len(seeds))).max() < FIVE_AND_HALF


def test_derived_seed_takes_tensors():
    assert noise.derive_seed(torch.tensor(-9), 4) == noise.derive_seed(-9, 4)


def test_unsigned_seeds_are_the_same_64_bits() -> None:
    for seed in (2**63, 2**64 - 1, 2**63 + 12345):
        one, other = noise.start(seed), noise.start(seed - 2**64)
        assert (int(one.first), int(one.second)) == (int(other.first), int(other.second))


def test_rows_that_share_one_word_alone_are_independent() -> None:
    """Length of the mean direction of the difference of uniforms: by chance above 0.02 in 1e-10 of such tests.

    Words that differ in few bits do worse, but the second word comes from a mixer.
    """
    keys = noise.key_words(torch.arange(65536))
    first = torch.tensor(12345, dtype=torch.int32)
    uniforms = [
        noise.uniform(noise.bits(noise.RowWords(first, word), keys), torch.float64)
        for word in noise.mix(torch.arange(1, 9, dtype=torch.int32))
    ]
    for a, b in itertools.combinations(uniforms, 2):
        assert torch.exp(2j * math.pi * (a - b)).mean().abs() < 0.02
