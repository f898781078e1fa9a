import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from bayesian_attention.engine import noise
from bayesian_attention.engine.rows import DenseRows, NoiseAddress, SegmentRows, log_normalise


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_mask(*shape: int, keep: float = 0.6, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < keep


def graph(nodes: int = 7, keep: float = 0.4, seed: int = 2) -> tuple[Tensor, SegmentRows]:
    """An adjacency matrix (target, source), whose row 2 is empty, and its edges in shuffled order."""
    adjacency = random_mask(nodes, nodes, keep=keep, seed=seed)
    adjacency[2] = False
    edges = adjacency.nonzero()
    edges = edges[torch.randperm(len(edges), generator=torch.Generator().manual_seed(seed))]
    return adjacency, SegmentRows(edges[:, 0], edges[:, 1], nodes)


def edge_values(dense: Tensor, rows: SegmentRows) -> Tensor:
    """(H, N, N) → (E, H)."""
    return dense[:, rows.index, rows.source].T


# Log-sum-exp and normalisation, dense.

MASKS = [(2, 3, 5, 6), (5, 6), (3, 1, 6), (2, 1, 1, 6), (5, 1), (1,), ()]


@pytest.mark.parametrize("shape", MASKS)
def test_dense_log_sum_exp_is_that_of_the_valid_entries(shape):
    x, valid = randn(2, 3, 5, 6) * 5, random_mask(*shape)
    ours = DenseRows(valid).log_sum_exp(x)
    assert ours.shape == (2, 3, 5, 1)
    full = valid.expand_as(x)
    for place in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(5)).tolist():
        kept = x[tuple(place)][full[tuple(place)]]
        # torch's own log-sum-exp of an empty vector is −∞.
        torch.testing.assert_close(ours[tuple(place)].squeeze(), torch.logsumexp(kept, 0), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("valid", [None, torch.ones(5, 6, dtype=torch.bool)])
def test_dense_without_masked_entries(valid):
    x = randn(2, 5, 6)
    log_p, lse = log_normalise(x, DenseRows(valid))
    torch.testing.assert_close(lse, x.logsumexp(-1, keepdim=True), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(log_p, x.log_softmax(-1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("valid", [None, torch.zeros(5, 0, dtype=torch.bool)])
def test_dense_without_keys(valid):
    log_p, lse = log_normalise(torch.zeros(2, 5, 0), DenseRows(valid))
    assert log_p.shape == (2, 5, 0)
    assert torch.equal(lse, torch.full((2, 5, 1), -math.inf))


@pytest.mark.parametrize("size", [1e4, -1e4, 3e38])
def test_dense_log_sum_exp_of_large_values(size):
    x = torch.tensor([[size, size / 2, 0.0]])
    log_p, lse = log_normalise(x, DenseRows(torch.tensor([True, True, False])))
    assert lse.item() == pytest.approx(max(size, size / 2), rel=1e-6)
    assert log_p[0, 2] == -math.inf
    assert log_p.exp().sum() == 1


def test_normalised_rows_sum_to_one_and_empty_rows_to_zero():
    valid = random_mask(2, 1, 5, 6)
    valid[0, :, 3] = False
    log_p, lse = log_normalise(randn(2, 3, 5, 6), DenseRows(valid))
    total = log_p.exp().sum(-1)
    full = valid.any(-1).expand(2, 3, 5)
    torch.testing.assert_close(total[full], torch.ones_like(total[full]), rtol=1e-14, atol=0)
    assert bool((total[~full] == 0).all())
    assert torch.equal(lse.squeeze(-1).isneginf(), ~full)
    assert torch.equal(log_p.isneginf(), ~valid.expand_as(log_p))


@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 5), (4, 1), (1, 5)])
def test_dense_gradients(shape):
    valid = random_mask(*shape)
    valid[..., -1, :] = False
    x = randn(3, 4, 5).requires_grad_()

    def weights_and_lse(x: Tensor) -> tuple[Tensor, Tensor]:
        log_p, lse = log_normalise(x, DenseRows(valid))
        return log_p.exp(), lse.masked_fill(lse.isneginf(), 0.0)

    assert torch.autograd.gradcheck(weights_and_lse, (x,))
    assert torch.autograd.gradgradcheck(weights_and_lse, (x,))


def test_gradients_of_masked_entries_and_empty_rows_are_exactly_zero():
    valid = torch.tensor([[True, True, False], [False, False, False]])
    x = randn(2, 2, 3).requires_grad_()
    log_p, lse = log_normalise(x, DenseRows(valid))
    ((log_p.exp() * randn(2, 2, 3, seed=4)).sum() + lse[lse.isfinite()].sum()).backward()
    assert bool((x.grad[:, ~valid] == 0).all())
    assert bool((x.grad[:, valid] != 0).all())


def test_one_value_a_key_is_normalised_over_the_valid_keys_of_each_query():
    per_key, valid = randn(2, 3, 6), random_mask(2, 1, 5, 6)
    rows = DenseRows(valid)
    ours = log_normalise(rows.keys_over_entries(per_key), rows)
    full = log_normalise(per_key.unsqueeze(-2).expand(2, 3, 5, 6), rows)
    torch.testing.assert_close(ours, full, rtol=0, atol=0)


@pytest.mark.parametrize("segments", [False, True])
def test_no_nan_arises_even_inside_the_backward_pass(segments):
    # Anomaly detection raises on a NaN that a mask hides later.
    adjacency, rows = graph()
    x = randn(3, 7, 7)
    x = (edge_values(x, rows) if segments else x).requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        log_p, lse = log_normalise(x, rows if segments else DenseRows(adjacency))
        (log_p.exp().square().sum() + lse[lse.isfinite()].sum()).backward()
    assert bool(x.grad.isfinite().all())


# Log-sum-exp and normalisation, by segments.


def test_segments_equal_dense_rows_masked_by_the_adjacency():
    adjacency, rows = graph()
    dense = randn(3, 7, 7)
    dense_p, dense_lse = log_normalise(dense, DenseRows(adjacency))
    log_p, lse = log_normalise(edge_values(dense, rows), rows)
    assert lse.shape == (7, 3)
    torch.testing.assert_close(lse.T, dense_lse.squeeze(-1), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(log_p, edge_values(dense_p, rows), rtol=1e-14, atol=1e-14)
    assert bool(lse[2].isneginf().all())


def test_segment_gradients():
    _, rows = graph(4)
    x = randn(len(rows.index), 2).requires_grad_()

    def weights_and_lse(x: Tensor) -> tuple[Tensor, Tensor]:
        log_p, lse = log_normalise(x, rows)
        return log_p.exp(), lse.masked_fill(lse.isneginf(), 0.0)

    assert torch.autograd.gradcheck(weights_and_lse, (x,))
    assert torch.autograd.gradgradcheck(weights_and_lse, (x,))


def test_segment_log_sum_exp_of_large_and_masked_values():
    rows = SegmentRows(torch.tensor([0, 0, 1, 1, 2]), torch.arange(5), 4)
    x = torch.tensor([[1e4], [1e4], [-1e4], [-math.inf], [-math.inf]], requires_grad=True)
    lse = rows.log_sum_exp(x)
    expected = [1e4 + math.log(2), -1e4, -math.inf, -math.inf]
    torch.testing.assert_close(lse.squeeze(), torch.tensor(expected), rtol=1e-6, atol=0)
    lse[:2].sum().backward()
    assert x.grad.squeeze().tolist() == [0.5, 0.5, 1, 0, 0]


def test_segments_leave_out_what_is_not_valid():
    _, rows = graph()
    dense, valid = randn(1, 7, 7), random_mask(len(rows.index), 1, seed=5)
    kept = torch.zeros(7, 7, dtype=torch.bool)
    kept[rows.index, rows.source] = valid.squeeze(-1)
    dense_p, dense_lse = log_normalise(dense, DenseRows(kept))
    masked = SegmentRows(rows.index, rows.source, 7, valid)
    log_p, lse = log_normalise(edge_values(dense, rows), masked)
    torch.testing.assert_close(lse.T, dense_lse.squeeze(-1), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(log_p, edge_values(dense_p, rows), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("count", [0, 3])
def test_zero_edges(count):
    none = torch.empty(0, dtype=torch.int64)
    rows = SegmentRows(none, none, count)
    x = torch.empty(0, 2, requires_grad=True)
    log_p, lse = log_normalise(x, rows)
    assert log_p.shape == (0, 2)
    assert torch.equal(lse, torch.full((count, 2), -math.inf))
    assert rows.uniform(NoiseAddress(1), x).shape == (0, 2)
    assert rows.keys_over_entries(torch.zeros(2, count)).shape == (0, 2)
    log_p.exp().sum().backward()
    assert x.grad.shape == (0, 2)


# Laying out.


def test_keys_and_heads_over_entries_agree_between_dense_and_segments():
    _, rows = graph()
    dense = DenseRows()
    per_key, per_head, like = randn(3, 7), randn(3, seed=1), torch.zeros(3, 7, 7, dtype=torch.float64)
    for ours, full in (
        (rows.keys_over_entries(per_key), like + dense.keys_over_entries(per_key)),
        (
            rows.heads_over_entries(per_head) + torch.zeros(len(rows.index), 3),
            like + dense.heads_over_entries(per_head),
        ),
    ):
        torch.testing.assert_close(ours, edge_values(full, rows), rtol=0, atol=0)
    assert torch.equal((like + dense.keys_over_entries(per_key))[1, 4], per_key[1])
    assert bool(((like + dense.heads_over_entries(per_head))[2] == per_head[2]).all())


# Noise.


def dense_noise(*shape: int, offset: int = 0, dtype: torch.dtype = torch.float32, **address: object) -> Tensor:
    return DenseRows(query_offset=offset).uniform(
        NoiseAddress(**{"seed": 5, **address}), torch.empty(shape, dtype=dtype)
    )


def test_dense_noise_has_the_documented_address():
    u = dense_noise(2, 3, 4, 6, offset=10, sample=9, batch_ids=torch.tensor([30, 2**40]))
    words = noise.start(5, 9).absorb(2**40).absorb_position(torch.tensor(0))
    words = words.absorb_position(torch.tensor(2)).absorb_position(torch.tensor(13))
    assert u[1, 2, 3, 5] == noise.uniform(noise.bits(words, noise.key_words(torch.tensor(5))))


def test_dense_noise_does_not_depend_on_what_else_is_there():
    full = dense_noise(4, 3, 6, 8)
    assert torch.equal(full, dense_noise(4, 3, 6, 8, batch_ids=torch.arange(4)))
    assert torch.equal(full[1:3, :2, :, :5], dense_noise(2, 2, 6, 5, batch_ids=torch.tensor([1, 2])))
    assert torch.equal(full[:, :, 4:], dense_noise(4, 3, 2, 8, offset=4))
    assert torch.equal(full[0], dense_noise(3, 6, 8))
    assert torch.equal(full.view(2, 2, 3, 6, 8), dense_noise(2, 2, 3, 6, 8))
    assert torch.equal(full.double(), dense_noise(4, 3, 6, 8, dtype=torch.float64))
    assert torch.equal(full, dense_noise(4, 3, 6, 8, seed=torch.tensor(5), sample=torch.tensor(0)))
    assert full.unique().numel() > 570  # of 576, so nothing is shared along any dimension


@pytest.mark.parametrize("change", [{"seed": 6}, {"sample": 1}, {"offset": 8}, {"batch_ids": torch.tensor([4, 5])}])
def test_dense_noise_changes_with_every_part_of_the_address(change):
    assert (dense_noise(2, 2, 8, 8) == dense_noise(2, 2, 8, 8, **change)).sum() <= 1


def test_a_sample_number_for_each_batch_row():
    ids, numbers = torch.tensor([7, 7, 9]), torch.tensor([0, 3, 3])
    u = dense_noise(3, 2, 4, 5, batch_ids=ids, sample=numbers)
    for row in range(3):
        alone = dense_noise(1, 2, 4, 5, batch_ids=ids[row : row + 1], sample=int(numbers[row]))
        assert torch.equal(u[row : row + 1], alone)


def test_batch_ids_spread_over_rows_folded_into_the_batch():
    # Two examples of three windows each, in a batch of six, or in a batch of shape (2, 3).
    ids = torch.tensor([11, 12])
    folded = dense_noise(6, 2, 4, 5, batch_ids=ids)
    assert torch.equal(folded.view(2, 3, 2, 4, 5), dense_noise(2, 3, 2, 4, 5, batch_ids=ids))
    assert torch.equal(folded[3:], dense_noise(3, 2, 4, 5, batch_ids=ids[1:]))
    assert torch.equal(folded[::3], dense_noise(2, 2, 4, 5, batch_ids=ids))
    assert folded.unique().numel() == folded.numel()
    numbered = dense_noise(6, 2, 4, 5, batch_ids=ids, sample=torch.tensor([0, 1]))
    assert torch.equal(numbered[:3], folded[:3])
    assert torch.equal(numbered[3:], dense_noise(6, 2, 4, 5, batch_ids=ids, sample=1)[3:])


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ({"batch_ids": torch.arange(3)}, "batch_ids"),
        ({"batch_ids": torch.arange(8)}, "batch_ids"),
        ({"batch_ids": torch.arange(0)}, "batch_ids"),
        ({"sample": torch.arange(4)}, "sample_index"),
        ({"sample": torch.arange(3), "batch_ids": torch.arange(4)}, "sample_index"),
        ({"sample": torch.arange(4), "batch_ids": torch.arange(1)}, "sample_index"),
    ],
)
def test_addresses_that_do_not_fit_dense_rows(address, name):
    with pytest.raises(ValueError, match=f"^{name}: "):
        dense_noise(4, 2, 3, 3, **address)


@pytest.mark.parametrize("sample", [0, 4, torch.tensor(4)])
@pytest.mark.parametrize("seed", [3, -(2**60)])
def test_segment_noise_equals_dense_noise_under_the_adjacency(seed, sample):
    _, rows = graph()
    address = NoiseAddress(seed, sample)
    dense = DenseRows().uniform(address, torch.empty(3, 7, 7))
    ours = rows.uniform(address, torch.empty(len(rows.index), 3))
    assert torch.equal(ours, edge_values(dense, rows))


def test_segment_noise_of_a_subgraph_is_that_of_the_graph():
    _, rows = graph(12)
    full = rows.uniform(NoiseAddress(3), torch.empty(len(rows.index), 2))
    nodes = torch.tensor([9, 1, 4, 7, 10])
    place = torch.full((12,), -1)
    place[nodes] = torch.arange(5)
    inside = (place[rows.index] >= 0) & (place[rows.source] >= 0)
    part = SegmentRows(place[rows.index[inside]], place[rows.source[inside]], 5)
    ours = part.uniform(NoiseAddress(3, batch_ids=nodes), torch.empty(int(inside.sum()), 2))
    assert torch.equal(ours, full[inside])


def test_parallel_edges_share_their_noise_and_others_do_not():
    rows = SegmentRows(torch.tensor([0, 0, 1, 0]), torch.tensor([1, 1, 0, 0]), 2)
    u = rows.uniform(NoiseAddress(3), torch.empty(4, 2))
    assert torch.equal(u[0], u[1])
    assert u.unique().numel() == 6


def test_segment_noise_is_uniform():
    # False-alarm rate 1e-6.
    edges = torch.randint(0, 1000, (2, 50_000), generator=torch.Generator().manual_seed(0)).unique(dim=1)
    u = SegmentRows(*edges, 1000).uniform(NoiseAddress(1), torch.empty(edges.shape[1], 4))
    assert stats.kstest(u.double().numpy().reshape(-1), "uniform").pvalue > 1e-6


@pytest.mark.parametrize(
    ("address", "name"),
    [({"batch_ids": torch.arange(6)}, "batch_ids"), ({"sample": torch.arange(7)}, "sample_index")],
)
def test_addresses_that_do_not_fit_segments(address, name):
    _, rows = graph()
    with pytest.raises(ValueError, match=f"^{name}: "):
        rows.uniform(NoiseAddress(3, **address), torch.empty(len(rows.index), 2))
