import importlib
import sys

import pytest
import torch

from bayesian_attention.metrics import AURC, Accuracy, BrierScore, CalibrationError, NegativeLogLikelihood, RiskCoverage
from tests.metrics.helpers import classification

CLASSIFICATION = [Accuracy, BrierScore, CalibrationError, NegativeLogLikelihood]


@pytest.mark.parametrize("metric", CLASSIFICATION)
@pytest.mark.parametrize(
    ("probabilities", "target", "message"),
    [
        (torch.tensor([0.5, 0.5]), torch.tensor([0]), r"probabilities: .*\(examples, classes\).* got .*\(2,\)"),
        (torch.ones(3, 1), torch.zeros(3).long(), r"probabilities: .*at least two classes; got .*\(3, 1\)"),
        (torch.ones(1, 2).long(), torch.tensor([0]), "probabilities: must be floating point .* got torch.int64"),
        (torch.tensor([[1.5, -0.5]]), torch.tensor([0]), "probabilities: must not be negative or NaN; .* -0.5"),
        (torch.tensor([[float("nan"), 0.5]]), torch.tensor([0]), "probabilities: must not be negative or NaN"),
        (torch.tensor([[float("inf"), 0.0]]), torch.tensor([0]), "probabilities: each row must sum to 1; .* inf"),
        (torch.tensor([[0.5, 0.6]]), torch.tensor([0]), "probabilities: each row must sum to 1; one is off by 0.1"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([2]), "target: must lie in 0 … 1; got 2"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([-1]), "target: must lie in 0 … 1; got -1"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0.0]), "target: must hold 1 integers .* got torch.float32"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([True]), "target: must hold 1 integers .* got torch.bool"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0, 1]), r"target: must hold 1 integers .* \(2,\)"),
    ],
)
def test_bad_classification_input_is_named(metric, probabilities, target, message):
    with pytest.raises(ValueError, match=message):
        metric().update(probabilities, target)


@pytest.mark.parametrize(
    ("uncertainty", "correct", "message"),
    [
        (torch.zeros(2, 1), torch.ones(2, 1).bool(), r"uncertainty: .* one dimension; got .*\(2, 1\)"),
        (torch.zeros(2).long(), torch.ones(2).bool(), "uncertainty: must be floating point .* got torch.int64"),
        (torch.zeros(2), torch.ones(2), "correct: must be boolean .* got torch.float32"),
        (torch.zeros(2), torch.ones(3).bool(), r"correct: must be boolean of shape \(2,\); got .*\(3,\)"),
        (torch.tensor([0.0, float("nan")]), torch.ones(2).bool(), "uncertainty: must not be NaN"),
    ],
)
def test_bad_scores_are_named(uncertainty, correct, message):
    with pytest.raises(ValueError, match=message):
        AURC().update(uncertainty, correct)


@pytest.mark.filterwarnings("ignore:The ``compute`` method:UserWarning")
@pytest.mark.parametrize("metric", [*CLASSIFICATION, AURC, RiskCoverage])
def test_no_data_is_an_error(metric):
    with pytest.raises(ValueError, match=f"{metric.__name__}: no data; call update first"):
        metric().compute()


@pytest.mark.parametrize("metric", CLASSIFICATION)
def test_an_empty_batch_is_no_data(metric):
    empty = metric()
    empty.update(torch.zeros(0, 3), torch.zeros(0).long())
    with pytest.raises(ValueError, match="no data"):
        empty.compute()


@pytest.mark.parametrize("metric", CLASSIFICATION)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_scored_as_the_numbers_that_it_holds(metric, dtype):
    probabilities, target = classification(dtype=dtype)
    # In half precision rows sum to 1 only roughly; the check has to let them pass.
    assert float((probabilities.double().sum(dim=1) - 1).abs().max()) > 0
    narrow, wide = metric(), metric()
    narrow.update(probabilities, target)
    normalised = probabilities.double() / probabilities.double().sum(dim=1, keepdim=True)
    wide.update(normalised, target)
    assert narrow.compute().dtype == torch.float64
    # A confidence beside an edge of a bin may fall on the other side of it.
    torch.testing.assert_close(narrow.compute(), wide.compute(), rtol=0.02, atol=0.01)


@pytest.mark.parametrize(
    "change", [lambda m: m.set_dtype(torch.float16), lambda m: m.half(), lambda m: m.to(torch.float16)]
)
def test_sums_stay_in_float64(change):
    metric = change(Accuracy())
    for _ in range(3):
        # 2049 is no float16.
        metric.update(torch.full((683, 2), 0.5), torch.zeros(683).long())
        change(metric)
    assert metric.count.dtype == torch.float64
    assert metric.count.item() == 2049


@pytest.mark.parametrize("metric", CLASSIFICATION)
def test_gradients_are_not_kept(metric):
    probabilities, target = classification(n=10)
    scored = metric()
    scored.update(probabilities.requires_grad_(), target)
    assert not scored.compute().requires_grad


def test_without_torchmetrics_the_error_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("bayesian_attention.metrics")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ImportError, match=r"pip install '?bayesian-attention\[metrics\]"):
        importlib.import_module("bayesian_attention.metrics")
