import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bayesian_attention.metrics import CalibrationError
from tests.metrics.helpers import check_splits, classification, fed


def one_error(confidence, hit, n_bins):
    """Bin by bin, straight from the definition."""
    error = 0.0
    for b in range(n_bins):
        low, high = b / n_bins, (b + 1) / n_bins
        inside = [i for i, c in enumerate(confidence) if (low < c <= high) or (b == 0 and c == 0)]
        if inside:
            accuracy = sum(hit[i] for i in inside) / len(inside)
            mean = sum(confidence[i] for i in inside) / len(inside)
            error += len(inside) / len(confidence) * abs(accuracy - mean)
    return error


def brute_force(p, y, n_bins, classwise=False):
    if classwise:
        classes = p.shape[1]
        return sum(one_error(p[:, c].tolist(), (y == c).tolist(), n_bins) for c in range(classes)) / classes
    top, label = p.max(dim=1)
    return one_error(top.tolist(), (label == y).tolist(), n_bins)


@pytest.mark.parametrize("classwise", [False, True])
@pytest.mark.parametrize("n_bins", [1, 10, 15])
@pytest.mark.parametrize("classes", [2, 5])
def test_agrees_with_the_definition(classes, n_bins, classwise):
    p, y = classification(classes=classes)
    error = fed(CalibrationError(n_bins, classwise=classwise), p, y).compute()
    assert error.item() == pytest.approx(brute_force(p, y, n_bins, classwise), rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 12), st.booleans())
def test_probabilities_on_the_edges_agree_with_the_definition(data, n_bins, classwise):
    tenths = data.draw(st.lists(st.integers(0, n_bins), min_size=1, max_size=8))
    p = torch.tensor([[t / n_bins, 1 - t / n_bins] for t in tenths], dtype=torch.float64)
    y = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=len(tenths), max_size=len(tenths))))
    error = fed(CalibrationError(n_bins, classwise=classwise), p, y).compute()
    assert error.item() == pytest.approx(brute_force(p, y, n_bins, classwise), rel=1e-12, abs=1e-15)


def test_default_has_ten_bins_of_the_top_label():
    p, y = classification()
    assert fed(CalibrationError(), p, y).compute().item() == pytest.approx(brute_force(p, y, 10), rel=1e-12)
    assert fed(CalibrationError(), p, y).bins().counts.shape == (10,)


def test_confidences_of_exactly_one_and_zero_fall_into_the_last_and_the_first_bin():
    p = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    y = torch.tensor([0, 0, 0])
    bins = fed(CalibrationError(5), p, y).bins()
    assert bins.counts.tolist() == [0, 0, 0, 0, 3]
    assert bins.accuracy.tolist() == pytest.approx([0, 0, 0, 0, 2 / 3])
    classwise = fed(CalibrationError(5, classwise=True), p, y)
    assert classwise.bins().counts.tolist() == [3, 0, 0, 0, 3]
    assert classwise.compute().item() == pytest.approx(1 / 3)


def test_confidence_above_one_by_rounding_falls_into_the_last_bin():
    p = torch.tensor([[1.0 + 1e-6, 0.0]])
    assert p[0, 0] > 1
    assert fed(CalibrationError(4), p, torch.tensor([0])).bins().counts.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("tenths", [6, 7, 8, 9])
def test_an_edge_belongs_to_the_bin_below_it_in_every_precision(tenths, dtype):
    p = torch.tensor([[tenths / 10, 1 - tenths / 10]], dtype=dtype)
    assert fed(CalibrationError(10), p, torch.tensor([0])).bins().counts.argmax() == tenths - 1


def test_bins_are_the_reliability_diagram():
    p = torch.tensor([[0.7, 0.3], [0.35, 0.65], [0.95, 0.05], [0.1, 0.9]], dtype=torch.float64)
    bins = fed(CalibrationError(10), p, torch.tensor([0, 0, 0, 1])).bins()
    assert bins.counts.tolist() == [0, 0, 0, 0, 0, 0, 2, 0, 1, 1]
    assert bins.confidence[6].item() == pytest.approx(0.675)
    assert bins.accuracy[6].item() == 0.5
    assert bins.confidence[8:].tolist() == pytest.approx([0.9, 0.95])


@pytest.mark.parametrize("classwise", [False, True])
def test_more_bins_than_examples_give_no_nan(classwise):
    p, y = classification(n=3)
    metric = fed(CalibrationError(1000, classwise=classwise), p, y)
    assert metric.compute().item() == pytest.approx(brute_force(p, y, 1000, classwise), rel=1e-12)
    assert not any(bool(column.isnan().any()) for column in metric.bins())


def test_binary_top_label_differs_from_the_probability_of_class_one():
    p, y = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64), torch.tensor([1, 0])
    assert fed(CalibrationError(), p, y).compute().item() == pytest.approx(0.9)


@pytest.mark.parametrize("classwise", [False, True])
def test_cutting_into_batches_changes_nothing(classwise):
    check_splits(CalibrationError(classwise=classwise), *classification())


def test_classwise_refuses_a_change_of_classes_even_after_a_merge():
    merged = CalibrationError(classwise=True)
    merged.merge_state(fed(CalibrationError(classwise=True), *classification(classes=4)))
    with pytest.raises(ValueError, match="probabilities: have 3 classes; earlier batches 4"):
        merged.update(*classification(classes=3))


def test_after_a_reset_the_number_of_classes_is_free():
    metric = fed(CalibrationError(classwise=True), *classification(classes=4))
    metric.reset()
    p, y = classification(classes=3)
    metric.update(p, y)
    assert metric.compute().item() == pytest.approx(brute_force(p, y, 10, classwise=True), rel=1e-12)


@pytest.mark.filterwarnings("ignore:The ``compute`` method:UserWarning")
def test_bins_need_data():
    with pytest.raises(ValueError, match="CalibrationError: no data"):
        CalibrationError().bins()


@pytest.mark.parametrize("n_bins", [0, -1, 2.5, True])
def test_bad_number_of_bins_is_named(n_bins):
    with pytest.raises(ValueError, match="n_bins must be a whole number of at least 1"):
        CalibrationError(n_bins)
