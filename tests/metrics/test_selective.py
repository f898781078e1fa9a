import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torchmetrics import MetricCollection

from bayesian_attention.metrics import AURC, ErrorAUROC, RiskCoverage
from tests.metrics.helpers import check_splits, fed

ties = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6)


def data(n=150, levels=None, seed=0):
    generator = np.random.default_rng(seed)
    uncertainty = generator.normal(size=n) if levels is None else generator.integers(levels, size=n) / 7
    correct = generator.random(n) > 1 / (1 + np.exp(1 - uncertainty))
    return torch.tensor(uncertainty, dtype=torch.float64), torch.tensor(correct)


def average_risks(uncertainty, correct):
    """Selective risks averaged over every order of the data that sorts the uncertainty."""
    risks = []
    for order in itertools.permutations(range(len(uncertainty))):
        if all(uncertainty[a] <= uncertainty[b] for a, b in itertools.pairwise(order)):
            wrong = np.cumsum([not correct[i] for i in order])
            risks.append(wrong / np.arange(1, len(order) + 1))
    return np.mean(risks, axis=0)


def test_curve_without_ties_agrees_with_the_definition():
    u, c = data()
    curve = fed(RiskCoverage(), u, c).compute()
    order = np.argsort(u.numpy())
    risk = [1 - c.numpy()[order[:k]].mean() for k in range(1, len(u) + 1)]
    np.testing.assert_allclose(curve.risk.numpy(), risk, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(curve.coverage.numpy(), np.arange(1, len(u) + 1) / len(u), rtol=1e-15)
    assert fed(AURC(), u, c).compute().item() == pytest.approx(np.mean(risk), rel=1e-12)


@settings(deadline=None, max_examples=40)
@given(ties)
def test_ties_are_averaged_over_their_orders(examples):
    u, c = zip(*examples, strict=True)
    metric, area = RiskCoverage(), AURC()
    for m in (metric, area):
        m.update(torch.tensor(u, dtype=torch.float64), torch.tensor(c))
    expected = average_risks(u, c)
    np.testing.assert_allclose(metric.compute().risk.reshape(-1).numpy(), expected, rtol=1e-12, atol=1e-14)
    assert area.compute().item() == pytest.approx(expected.mean(), rel=1e-12, abs=1e-14)


def test_order_of_the_data_does_not_matter():
    u, c = data(levels=4)
    shuffled = torch.randperm(len(u), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        fed(RiskCoverage(), u, c).compute(), fed(RiskCoverage(), u[shuffled], c[shuffled]).compute(), rtol=1e-12, atol=0
    )


def test_aurc_of_best_worst_and_constant_uncertainty():
    c = torch.tensor([True, True, True, False])
    rising = torch.arange(4.0)
    assert fed(AURC(), rising, c).compute().item() == pytest.approx(1 / 16)
    assert fed(AURC(), -rising, c).compute().item() == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert fed(AURC(), torch.zeros(4), c).compute().item() == pytest.approx(1 / 4)


def test_last_point_of_the_curve_is_the_error_rate():
    u, c = data(levels=5)
    curve = fed(RiskCoverage(), u, c).compute()
    assert curve.coverage[-1] == 1
    assert curve.risk[-1].item() == pytest.approx((~c).double().mean().item(), rel=1e-12)


@pytest.mark.parametrize("levels", [None, 4])
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_error_auroc_agrees_with_scikit_learn(levels, scale):
    u, c = data(levels=levels)
    auroc = fed(ErrorAUROC(), u * scale, c).compute()
    assert auroc.item() == pytest.approx(roc_auc_score(~c, u), rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(ties.filter(lambda examples: len({right for _, right in examples}) == 2))
def test_error_auroc_counts_pairs(examples):
    wrong = [u for u, right in examples if not right]
    right = [u for u, right in examples if right]
    won = [(w > r) + 0.5 * (w == r) for w in wrong for r in right]
    u, c = zip(*examples, strict=True)
    auroc = fed(ErrorAUROC(), torch.tensor(u, dtype=torch.float32), torch.tensor(c)).compute()
    assert auroc.item() == pytest.approx(np.mean(won), rel=1e-12)


@pytest.mark.parametrize("correct", [True, False])
def test_error_auroc_of_one_kind_of_answers_is_nan_with_one_warning(correct):
    metric = fed(ErrorAUROC(), torch.rand(5), torch.full((5,), correct))
    with pytest.warns(UserWarning, match="ErrorAUROC is NaN: it needs right and wrong answers") as warned:
        assert math.isnan(metric.compute().item())
    assert len(warned) == 1


def test_infinite_uncertainty_comes_last():
    u, c = torch.tensor([math.inf, 0.0, -math.inf]), torch.tensor([False, True, True])
    assert fed(ErrorAUROC(), u, c).compute() == 1
    assert fed(RiskCoverage(), u, c).compute().risk.tolist() == pytest.approx([0, 0, 1 / 3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_uncertainty_is_ranked_as_it_is(dtype):
    u, c = data()
    u = u.to(dtype)
    assert fed(ErrorAUROC(), u, c).compute().item() == pytest.approx(roc_auc_score(~c, u.double()), rel=1e-12)


@pytest.mark.parametrize("metric", [RiskCoverage, AURC, ErrorAUROC])
@pytest.mark.parametrize("levels", [None, 3])
def test_cutting_into_batches_changes_nothing(metric, levels):
    check_splits(metric(), *data(levels=levels))


def test_a_collection_gives_what_its_metrics_give():
    u, c = data(levels=6)
    together = MetricCollection([RiskCoverage(), AURC(), ErrorAUROC()])
    together.update(u[:0], c[:0])
    together.update(u[:70], c[:70])
    together.update(u[70:], c[70:])
    # The curve is a tuple of tensors, which a collection spreads over nothing: ask for it by name.
    assert together["AURC"].compute() == fed(AURC(), u, c).compute()
    assert together["ErrorAUROC"].compute() == fed(ErrorAUROC(), u, c).compute()
    torch.testing.assert_close(together["RiskCoverage"].compute(), fed(RiskCoverage(), u, c).compute())


@pytest.mark.filterwarnings("ignore:The ``compute`` method:UserWarning")
@pytest.mark.parametrize("metric", [RiskCoverage, AURC, ErrorAUROC])
def test_no_data_is_an_error(metric):
    with pytest.raises(ValueError, match=f"{metric.__name__}: no data"):
        metric().compute()
    empty = fed(metric(), torch.zeros(0), torch.zeros(0).bool())
    with pytest.raises(ValueError, match=f"{metric.__name__}: no data"):
        empty.compute()


def test_buffers_that_are_filled_again_change_nothing():
    metric = AURC()
    scores, flags = torch.tensor([0.1, 0.2], dtype=torch.float64), torch.tensor([True, False])
    metric.update(scores, flags)
    before = metric.compute()
    scores.fill_(9.0)
    flags.fill_(True)
    metric._computed = None
    assert torch.equal(metric.compute(), before)
