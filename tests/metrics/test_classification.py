import copy
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss
from torchmetrics import MetricCollection

from bayesian_attention.metrics import AURC, Accuracy, BrierScore, CalibrationError, NegativeLogLikelihood
from tests.metrics.helpers import check_splits, classification, fed


@pytest.mark.parametrize("classes", [2, 5])
def test_accuracy_agrees_with_scikit_learn(classes):
    p, y = classification(classes=classes)
    assert fed(Accuracy(), p, y).compute().item() == accuracy_score(y, p.argmax(dim=1))


@pytest.mark.parametrize("classes", [2, 5])
def test_nll_agrees_with_scikit_learn(classes):
    p, y = classification(classes=classes)
    reference = log_loss(y, p, labels=range(classes))
    assert fed(NegativeLogLikelihood(), p, y).compute().item() == pytest.approx(reference, rel=1e-12)


@pytest.mark.parametrize("classes", [2, 5])
def test_brier_agrees_with_its_definition(classes):
    p, y = classification(classes=classes)
    squares = [sum((p[i, c].item() - (c == y[i].item())) ** 2 for c in range(classes)) for i in range(len(y))]
    assert fed(BrierScore(), p, y).compute().item() == pytest.approx(np.mean(squares), rel=1e-12)


def test_worst_and_best_answers():
    p = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    right, wrong = torch.tensor([0, 0]), torch.tensor([1, 1])
    assert fed(BrierScore(), p, wrong).compute() == 2
    assert fed(BrierScore(), p, right).compute() == 0
    assert fed(Accuracy(), p, wrong).compute() == 0
    assert fed(Accuracy(), p, right).compute() == 1
    assert fed(NegativeLogLikelihood(), p, right).compute() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nll_of_a_zero_is_that_of_the_smallest_normal_number(dtype):
    nll = fed(NegativeLogLikelihood(), torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([1])).compute()
    assert nll.item() == pytest.approx(-math.log(torch.finfo(dtype).tiny), rel=1e-12)


def test_of_equal_probabilities_the_first_class_is_the_answer():
    p = torch.tensor([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4]])
    assert fed(Accuracy(), p, torch.tensor([0, 1])).compute() == 1
    assert fed(Accuracy(), p, torch.tensor([1, 2])).compute() == 0


@pytest.mark.parametrize("metric", [Accuracy, BrierScore, NegativeLogLikelihood])
def test_cutting_into_batches_changes_nothing(metric):
    check_splits(metric(), *classification())


def test_a_collection_keeps_metrics_apart_whose_sums_start_equal():
    # On this batch both sums are 1: one right with certainty, one wrong with a squared error of 1.
    p, y = torch.tensor([[1.0, 0.0], [math.sqrt(0.5), 1 - math.sqrt(0.5)]]).double(), torch.tensor([0, 1])
    both = MetricCollection([Accuracy(), BrierScore()])
    both.update(p, y)
    assert both["Accuracy"].total.item() == pytest.approx(both["BrierScore"].total.item())
    more = classification(classes=2)
    both.update(*more)
    p, y = torch.cat([p, more[0]]), torch.cat([y, more[1]])
    assert both.compute()["BrierScore"].item() == pytest.approx(fed(BrierScore(), p, y).compute().item(), rel=1e-12)


@pytest.mark.parametrize("metric", [Accuracy(), AURC(), CalibrationError(classwise=True)])
def test_a_batch_that_forward_refuses_changes_nothing(metric):
    first = (torch.tensor([0.2, 0.9]), torch.tensor([True, False]))
    if not isinstance(metric, AURC):
        first = (torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([0, 0]))
    undisturbed = copy.deepcopy(metric)
    metric.update(*first)
    with pytest.raises(ValueError, match=r"target|correct"):
        metric(first[0], torch.tensor([7, 7]))
    for each in (undisturbed, undisturbed, metric):
        each.update(*first)
    assert torch.equal(metric.compute(), undisturbed.compute())
