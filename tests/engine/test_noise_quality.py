"""The counter-based generator at 10⁷ draws: what is tested, and how often it fails by chance.

A check fails if one of its p-values is below ``ALPHA``. There are 200 p-values in this file, so a perfect generator
with addresses chosen at random fails it with probability below 10⁻⁶; as the addresses are fixed, a pass is a pass for
ever. That the checks can fail is shown in test_noise_power.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bayesian_attention.engine import noise
from tests.engine.noise_statistics import (
    ACROSS,
    ALONG,
    ALPHA,
    AXES,
    DRAWS,
    MODEL_DRAWS,
    P_VALUES,
    SHARED_DRAWS,
    SHARED_KEYS,
    SHARED_QUERIES,
    along,
    battery,
    bit_pairs,
    cells,
    correlations,
    laws,
    model,
    normals,
    pair,
    passes,
    rows_of_pairs,
    seeds_that_share_the_first_word,
)


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
