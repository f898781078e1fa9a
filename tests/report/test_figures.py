from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from bayesian_attention.report import figures
from bayesian_attention.report.curves import entropy_edges, error_auroc, log_edges, reliability, risk_at, shares
from bayesian_attention.report.neighbourhoods import SPREADS, choose, draw, neighbourhood, spread_step
from bayesian_attention.report.runs import Run, load_runs
from tests.report.runs import make_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    runs, complaints = load_runs(tmp_path, [make_run(tmp_path, "weibull", 0)])
    assert not complaints
    return runs[0]


def check_svg(text: str) -> ET.Element:
    """Well-formed, made for both themes, and without references to elsewhere or between elements."""
    assert "http" not in text
    assert not re.search(r"\b(id|href|url)\b", text)
    assert "#01ab" not in text
    root = ET.fromstring(text)  # noqa: S314
    assert root.tag == "svg"
    assert "viewBox" in root.attrib
    return root


def inside(root: ET.Element) -> None:
    """Every text starts within the picture."""
    left, top, width, height = (float(number) for number in root.attrib["viewBox"].split())
    for text in root.iter("text"):
        assert left <= float(text.attrib["x"]) <= left + width
        assert top <= float(text.attrib["y"]) <= top + height


def test_bins_are_open_below_and_closed_above() -> None:
    diagram = reliability(np.array([0.0, 0.1, 0.1000001, 0.5, 1.0]), np.array([True, False, True, True, False]))
    np.testing.assert_array_equal(diagram.count, [2, 1, 0, 0, 1, 0, 0, 0, 0, 1])
    np.testing.assert_allclose(diagram.accuracy[[0, 1, 4, 9]], [0.5, 1, 1, 0])
    assert np.isnan(diagram.accuracy[2])
    assert diagram.ece == pytest.approx((2 * 0.45 + 0.9 + 0.5 + 1) / 5, abs=1e-6)


def test_risk_over_coverage() -> None:
    uncertainty = np.array([0.3, 0.1, 0.2, 0.4])
    correct = np.array([False, True, True, False])
    np.testing.assert_allclose(
        risk_at(uncertainty, correct, np.array([0.25, 0.5, 0.75, 0.9, 1.0])), [0, 0, 1 / 3, 0.5, 0.5]
    )


def test_ties_have_no_order() -> None:
    correct = np.array([True, False, True, False])
    for order in (correct, correct[::-1]):
        np.testing.assert_allclose(risk_at(np.zeros(4), order, np.array([0.25, 0.5, 1.0])), 0.5)
    assert error_auroc(np.zeros(4), correct) == 0.5


def test_curves_agree_with_the_metrics() -> None:
    torch = pytest.importorskip("torch")
    metrics = pytest.importorskip("bayesian_attention.metrics")
    generator = np.random.default_rng(3)
    uncertainty = generator.integers(0, 40, 200) / 40
    correct = generator.random(200) > uncertainty
    tensors = torch.from_numpy(uncertainty), torch.from_numpy(correct)
    coverage = np.arange(1, 201) / 200
    assert risk_at(uncertainty, correct, coverage).mean() == pytest.approx(float(metrics.AURC()(*tensors)))
    assert error_auroc(uncertainty, correct) == pytest.approx(float(metrics.ErrorAUROC()(*tensors)))
    probabilities = generator.dirichlet(np.ones(4), 200)
    target = generator.integers(0, 4, 200)
    ece = float(metrics.CalibrationError()(torch.from_numpy(probabilities), torch.from_numpy(target)))
    assert reliability(probabilities.max(axis=1), probabilities.argmax(axis=1) == target).ece == pytest.approx(ece)


def test_auroc_needs_both_kinds() -> None:
    assert error_auroc(np.arange(3.0), np.ones(3, dtype=bool)) is None
    assert error_auroc(np.arange(3.0), np.array([True, True, False])) == 1.0


def test_shares_keep_what_lies_beyond_the_ends() -> None:
    np.testing.assert_allclose(shares(np.array([-5.0, 0.5, 1.5, 9.0]), np.array([0.0, 1.0, 2.0])), [0.5, 0.5])
    np.testing.assert_array_equal(shares(np.array([]), np.array([0.0, 1.0, 2.0])), [0, 0])


@pytest.mark.parametrize("values", [np.zeros(3), np.full(3, 0.01), np.array([1e-9, 1e-4, 0.5])])
def test_log_edges_span_a_decade(values: np.ndarray) -> None:
    edges = log_edges([values, np.array([])])
    assert np.isfinite(edges).all()
    assert (np.diff(edges) > 0).all()
    assert edges[-1] - edges[0] >= 1


def test_entropy_edges_leave_out_an_empty_half() -> None:
    wide, high = np.linspace(0, 1, 1001), np.linspace(0.9, 1, 1001)
    assert entropy_edges([wide, high], 3)[[0, -1]] == pytest.approx([0, np.log(3)])
    assert entropy_edges([high, high], 3)[[0, -1]] == pytest.approx([0.9005, np.log(3)])
    assert (np.diff(entropy_edges([np.full(5, np.log(3))], 3)) > 0).all()


def test_reliability_panel() -> None:
    generator = np.random.default_rng(0)
    confidence = generator.uniform(0.3, 1, 300)
    diagram = reliability(confidence, generator.random(300) < confidence)
    root = check_svg(figures.reliability_panel(diagram, 0.3))
    inside(root)
    assert "confidence" in [text.text for text in root.iter("text")]
    check_svg(figures.reliability_panel(reliability(np.array([0.7]), np.array([True])), 1.0))


def test_risk_coverage_chart() -> None:
    grid = np.linspace(0.1, 1, 10)
    curves = [figures.Curve(index, grid, grid / 5, grid / 50 if index else None) for index in range(10)]
    text = figures.risk_coverage_chart(curves)
    inside(check_svg(text))
    assert text.count("var(--series1)") == 2 * text.count("var(--series2)") == 4
    inside(check_svg(figures.risk_coverage_chart([figures.Curve(0, grid, grid * 0, None)])))


@pytest.mark.parametrize("logarithmic", [False, True])
def test_uncertainty_panel(logarithmic: bool) -> None:
    edges = np.linspace(-4, -1, 11) if logarithmic else np.linspace(0, 2, 11)
    right, wrong = np.full(10, 0.1), np.zeros(10)
    text = figures.uncertainty_panel(right, wrong, edges, 0.1, label="entropy", logarithmic=logarithmic)
    inside(check_svg(text))
    assert "var(--right)" in text
    assert "var(--wrong)" not in text
    assert ("10⁻²" in text) == logarithmic


def test_charts_repeat_themselves_and_leave_settings_alone() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    diagram = reliability(np.array([0.2, 0.9]), np.array([True, False]))
    assert figures.reliability_panel(diagram, 1.0) == figures.reliability_panel(diagram, 1.0)
    assert dict(matplotlib.rcParams) == before


def test_chosen_nodes(run: Run) -> None:
    chosen = choose(run)
    reasons = [choice.reason for choice in chosen]
    assert len({choice.node for choice in chosen}) == 6
    assert reasons == sorted(reasons, key=reasons.index)
    correct = dict(zip(run.node.tolist(), run.correct.tolist(), strict=True))
    for choice in chosen:
        assert correct[choice.node] or choice.reason != "confident and right"
        assert not correct[choice.node] or choice.reason != "confident and wrong"
    assert choose(run, most=2) == []


def test_neighbourhood_has_the_weights_of_its_edges(run: Run) -> None:
    view = neighbourhood(run, 20)
    assert view is not None
    assert view.itself is not None
    assert sorted(edge.node for edge in view.neighbours) == [21, 22, 23, 24]
    assert sum(edge.mean for edge in view.neighbours) + view.itself.mean == pytest.approx(1)
    means = [edge.mean for edge in view.neighbours]
    assert means == sorted(means, reverse=True)
    assert neighbourhood(run, 0) is None


def test_drawing(run: Run) -> None:
    view = neighbourhood(run, 20)
    assert view is not None
    text = draw(view, [24, 23, 22, 21], 0.1)
    root = check_svg(text)
    inside(root)
    numbers = [element.text for element in root.iter("text") if element.attrib["class"] == "number"]
    assert numbers == ["24", "23", "22", "21"]
    widths = [float(element.attrib["stroke-width"]) for element in root.iter("line")]
    weights = {edge.node: edge.mean for edge in view.neighbours}
    np.testing.assert_allclose(widths, [max(28 * weights[node], 0.6) for node in (24, 23, 22, 21)], atol=0.01)
    assert text.count("ring") == 1


def test_spread_steps() -> None:
    assert spread_step(0.0, 0.0) == 0
    assert spread_step(0.0, 1.0) == 0
    assert spread_step(1.0, 1.0) == SPREADS - 1
