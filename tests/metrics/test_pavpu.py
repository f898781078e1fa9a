import math

import numpy as np
import pytest
import torch
from scipy import stats
from torchmetrics import MetricCollection

from bayesian_attention.metrics import PAvPU
from tests.metrics.helpers import check_splits, fed


def draws(n=60, count=6, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(1, n, classes, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, n, classes, generator=generator, dtype=torch.float64)
    target = torch.multinomial(centre[0].softmax(dim=1), 1, generator=generator).squeeze(1)
    return (centre + 0.7 * noise).log_softmax(dim=-1), target


def brute_force(x, y, level, test, values):
    """The authors' mean of accuracy·(1 − uncertain) + (1 − accuracy)·uncertain."""
    agreed = []
    for i in range(len(y)):
        mean = x[:, i].exp().mean(dim=0).numpy()
        order = np.argsort(mean)[::-1]
        compared = (x[:, i] if values == "log_probabilities" else x[:, i].exp()).numpy()
        pair = compared[:, order[0]], compared[:, order[1]]
        result = stats.ttest_rel(*pair) if test == "paired" else stats.ttest_ind(*pair, equal_var=False)
        accuracy, uncertain = float(order[0] == y[i]), float(result.pvalue > level)
        agreed.append(accuracy * (1 - uncertain) + (1 - accuracy) * uncertain)
    return np.mean(agreed)


@pytest.mark.parametrize("values", ["log_probabilities", "probabilities"])
@pytest.mark.parametrize("test", ["paired", "welch"])
@pytest.mark.parametrize("level", [0.01, 0.05, 0.1])
def test_agrees_with_the_definition(level, test, values):
    x, y = draws()
    pavpu = fed(PAvPU(level, test=test, values=values), x, y, dim=1).compute()
    assert pavpu.item() == pytest.approx(brute_force(x, y, level, test, values), rel=1e-12)
    assert 0 < pavpu < 1


def test_options_matter_on_this_data():
    x, y = draws()
    default = fed(PAvPU(0.05), x, y, dim=1).compute()
    for other in (PAvPU(0.01), PAvPU(0.1), PAvPU(test="welch"), PAvPU(values="probabilities")):
        assert fed(other, x, y, dim=1).compute() != default


def test_default_is_the_paired_test_at_five_per_cent():
    x, y = draws()
    reference = brute_force(x, y, 0.05, "paired", "log_probabilities")
    assert fed(PAvPU(), x, y, dim=1).compute().item() == pytest.approx(reference, rel=1e-12)


def test_of_a_deterministic_model_it_is_the_error_rate():
    x, y = draws()
    same = x[:1].expand(5, -1, -1)
    error = (same[0].argmax(dim=-1) != y).double().mean()
    assert 0 < error < 1
    assert fed(PAvPU(), same, y, dim=1).compute().item() == pytest.approx(error.item(), rel=1e-12)


def test_a_certain_right_and_an_uncertain_wrong_example_count():
    certain = torch.tensor([[3.0, 0.0], [3.1, 0.0], [2.9, 0.0]])
    uncertain = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.2, 0.0]])
    x = torch.stack([certain, uncertain], dim=1).log_softmax(dim=-1)
    assert fed(PAvPU(), x, torch.tensor([0, 1]), dim=1).compute() == 1
    assert fed(PAvPU(), x, torch.tensor([1, 0]), dim=1).compute() == 0


def test_cutting_into_batches_changes_nothing():
    check_splits(PAvPU(), *draws(), dim=1)


def test_a_collection_keeps_levels_and_tests_apart():
    # All are certain at first, so that every state is equal after the first batch.
    metrics = {"low": PAvPU(0.01), "high": PAvPU(0.1), "welch": PAvPU(0.01, test="welch")}
    together = MetricCollection(metrics)
    noise = torch.randn(5, 8, 2, generator=torch.Generator().manual_seed(0))
    together.update((torch.tensor([9.0, 0.0]) + 0.01 * noise).log_softmax(dim=-1), torch.zeros(8).long())
    assert {metric.total.item() for metric in together.values()} == {8.0}
    x, y = draws()
    together.update(x, y)
    for name, level, test in [("low", 0.01, "paired"), ("high", 0.1, "paired"), ("welch", 0.01, "welch")]:
        expected = (8 + len(y) * brute_force(x, y, level, test, "log_probabilities")) / (8 + len(y))
        assert together.compute()[name].item() == pytest.approx(expected, rel=1e-12)


def test_zero_probabilities_are_taken():
    x, y = draws()
    x = x.clone()
    x[0, 0, 0] = x[:, 1, 1] = -math.inf
    assert 0 <= fed(PAvPU(), x, y, dim=1).compute() <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_decides_as_float32_does(dtype):
    x, y = draws()
    x = x.to(dtype)
    assert fed(PAvPU(), x, y, dim=1).compute() == fed(PAvPU(), x.float(), y, dim=1).compute()


@pytest.mark.filterwarnings("ignore:The ``compute`` method:UserWarning")
def test_no_data_is_an_error():
    with pytest.raises(ValueError, match="PAvPU: no data"):
        PAvPU().compute()


@pytest.mark.parametrize("level", [0, 1, -0.1, 5, math.nan, "low"])
def test_bad_level_is_named(level):
    with pytest.raises(ValueError, match="level"):
        PAvPU(level)


def test_unknown_names_are_refused_at_once():
    with pytest.raises(ValueError, match=r"test: .* got 'z'"):
        PAvPU(test="z")
    with pytest.raises(ValueError, match=r"values: .* got 'logits'"):
        PAvPU(values="logits")


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(4, 2), torch.zeros(4).long(), r"log_probabilities: .*\(draws, examples, classes\); got \(4, 2\)"),
        (torch.zeros(1, 4, 2), torch.zeros(4).long(), "log_probabilities: .* at least two"),
        (torch.ones(3, 4, 2), torch.zeros(4).long(), "log_probabilities: must be at most 0"),
        (torch.zeros(3, 4, 2), torch.full((4,), 2), "target: must lie in 0 … 1; got 2"),
        (torch.zeros(3, 4, 2), torch.zeros(3).long(), r"target: must hold 4 integers .* \(3,\)"),
    ],
)
def test_bad_input_is_named(x, y, message):
    with pytest.raises(ValueError, match=message):
        PAvPU().update(x, y)
