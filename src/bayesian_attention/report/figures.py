"""Charts as SVG for inlining into HTML, drawn with matplotlib.

Colours are references to variables of the page's style sheet, so that one chart serves light and dark pages, and
text takes the page's font. No chart holds a label of the user's.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bayesian_attention.report.curves import Reliability

try:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("the report needs matplotlib: pip install 'bayesian-attention[report]'") from error

#: How many colours lines have before they repeat.
SERIES = 8
#: Patterns of lines, in points; SVG's stroke-dasharray.
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))

# matplotlib takes colours only; each of these stands for a variable of the style sheet until the SVG is written.
_NAMES = ("ink", "muted", "grid", "accent", "gap", "right", "wrong", *(f"series{i}" for i in range(SERIES)))
_COLOURS = {name: f"#01ab{number:02x}" for number, name in enumerate(_NAMES)}

_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bayesian-attention",
    "font.size": 8.0,
    "axes.labelsize": 8.0,
    "axes.linewidth": 0.6,
    "axes.edgecolor": _COLOURS["muted"],
    "axes.labelcolor": _COLOURS["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": _COLOURS["grid"],
    "grid.linewidth": 0.6,
    "text.color": _COLOURS["ink"],
    "xtick.color": _COLOURS["muted"],
    "ytick.color": _COLOURS["muted"],
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "figure.dpi": 72.0,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True, eq=False)
class Curve:
    """A line with a band.

    Attributes:
        index: of the method; gives colour and pattern.
        x: abscissae.
        y: ordinates.
        half_width: of the band around ``y``, or None.
    """

    index: int
    x: np.ndarray
    y: np.ndarray
    half_width: np.ndarray | None


def reliability_panel(diagram: Reliability, highest_share: float) -> str:
    """Accuracy over confidence, with the gap to the diagonal, above a histogram of the confidences.

    Args:
        diagram: what is drawn.
        highest_share: where the axis of the histogram ends, so that panels can share it.
    """
    with matplotlib.rc_context(_SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=(3.1, 3.75))
        upper = figure.add_axes((0.185, 0.36, 0.785, 0.61))
        lower = figure.add_axes((0.185, 0.115, 0.785, 0.185))
        bins = len(diagram.count)
        width = 1 / bins
        upper.plot([0, 1], [0, 1], color=_COLOURS["muted"], linewidth=0.9, dashes=(4, 3), zorder=3)
        for number in np.flatnonzero(diagram.count):
            left, accuracy, confidence = number * width, diagram.accuracy[number], diagram.confidence[number]
            # A bar of few answers says little.
            strength = 1.0 if diagram.share[number] >= 0.01 else 0.35
            bar: dict[str, Any] = {"width": 0.92 * width, "align": "edge"}
            upper.bar(left + 0.04 * width, accuracy, color=_COLOURS["accent"], alpha=0.8 * strength, **bar)
            middle = left + width / 2
            upper.bar(middle, confidence - accuracy, 0.3 * width, accuracy, color=_COLOURS["gap"], alpha=strength)
            upper.plot(
                [left + 0.04 * width, left + 0.96 * width],
                [confidence, confidence],
                color=_COLOURS["ink"],
                linewidth=1.4,
                alpha=strength,
                zorder=4,
                solid_capstyle="butt",
            )
        upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="share of right answers")
        upper.set_xticks([0, 0.25, 0.5, 0.75, 1], [""] * 5)
        _per_cent(upper.yaxis, [0, 0.25, 0.5, 0.75, 1])
        left_edges = np.arange(bins) * width
        lower.bar(
            left_edges + 0.04 * width,
            diagram.share,
            width=0.92 * width,
            align="edge",
            color=_COLOURS["muted"],
            alpha=0.6,
        )
        lower.set(xlim=(0, 1), ylim=(0, highest_share * 1.05), xlabel="confidence", ylabel="share")
        _per_cent(lower.xaxis, [0, 0.25, 0.5, 0.75, 1])
        _per_cent(lower.yaxis, _few_ticks(highest_share))
        return _svg(figure, "Reliability diagram")


def risk_coverage_chart(curves: Sequence[Curve]) -> str:
    """Share of wrong answers over the share of questions answered, a line a method."""
    with matplotlib.rc_context(_SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=(4.3, 3.1))
        axes = figure.add_axes((0.135, 0.145, 0.845, 0.825))
        highest = 0.0
        for curve in curves:
            colour = _COLOURS[f"series{curve.index % SERIES}"]
            if curve.half_width is not None:
                low, high = np.clip(curve.y - curve.half_width, 0, None), curve.y + curve.half_width
                outline = np.concatenate([curve.x, curve.x[::-1]]), np.concatenate([low, high[::-1]])
                axes.fill(*outline, color=colour, alpha=0.13, linewidth=0)
                highest = max(highest, float(high.max()))
            dash = DASHES[curve.index % len(DASHES)]
            axes.plot(curve.x, curve.y, color=colour, linewidth=1.5, linestyle=(0, dash) if dash else "-")
            highest = max(highest, float(curve.y.max()))
        top = max(highest * 1.05, 0.01)
        axes.set(xlim=(0, 1), ylim=(0, top), xlabel="coverage: share answered, most certain first")
        axes.set_ylabel("risk: share of wrong answers")
        _per_cent(axes.xaxis, [0, 0.2, 0.4, 0.6, 0.8, 1])
        _per_cent(axes.yaxis, _few_ticks(top, 6))
        return _svg(figure, "Risk–coverage curves")


def uncertainty_panel(
    right: np.ndarray, wrong: np.ndarray, edges: np.ndarray, highest: float, *, label: str, logarithmic: bool = False
) -> str:
    """Histograms of the uncertainty of right and of wrong answers, over each other.

    Args:
        right: share of the right answers in each bin.
        wrong: share of the wrong answers in each bin.
        edges: of the bins.
        highest: where the axis of shares ends, so that panels can share it.
        label: of the axis of uncertainty.
        logarithmic: ``edges`` are log10 of the uncertainty.
    """
    with matplotlib.rc_context(_SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=(3.1, 2.1))
        axes = figure.add_axes((0.185, 0.2, 0.785, 0.75))
        for values, name, dash in ((right, "right", ()), (wrong, "wrong", (3, 1.5))):
            if values.any():
                axes.stairs(values, edges, fill=True, color=_COLOURS[name], alpha=0.3, linewidth=0)
                style: Any = (0, dash) if dash else "-"
                axes.stairs(values, edges, color=_COLOURS[name], linewidth=1.3, linestyle=style)
        axes.set(xlim=(edges[0], edges[-1]), ylim=(0, highest * 1.08), xlabel=label, ylabel="share of each group")
        if logarithmic:
            decades = range(int(np.ceil(edges[0])), int(np.floor(edges[-1])) + 1)
            axes.set_xticks(list(decades), [_decade(exponent) for exponent in decades])
        _per_cent(axes.yaxis, _few_ticks(highest))
        return _svg(figure, "Histograms of the uncertainty of right and wrong answers")


def _decade(exponent: int) -> str:
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _few_ticks(highest: float, count: int = 3) -> list[float]:
    """Round numbers from 0 to at most ``highest``."""
    for step in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5):
        if highest / step <= count:
            return [float(tick) for tick in np.arange(0, highest * 1.0001, step)]
    return [0.0, 0.5, 1.0]


def _per_cent(axis: Any, ticks: Sequence[float]) -> None:
    axis.set_ticks(list(ticks), [f"{round(100 * tick, 6):g}%" for tick in ticks])


def _svg(figure: Figure, title: str) -> str:
    """The figure as an ``svg`` element that asks for nothing from elsewhere."""
    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<style [^>]*>.*?</style>", "", text, flags=re.DOTALL)
    # Nothing leaves its axes, and there are no markers: so no clip paths, and no names that other charts repeat.
    text = re.sub(r"<defs>.*?</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:clip-path|id)="[^"]*"', "", text)
    text = re.sub(r"<g/>\s*", "", text)
    text = re.sub(r"font(?:-family)?: [^;\"]*sans-serif[^;\"]*;? ?", _without_family, text)
    width, height = 72 * figure.get_size_inches()
    view = f'viewBox="0 0 {width:g} {height:g}"'
    text = f'<svg class="chart" role="img" aria-label="{title}" {view}>' + text[text.index(">") + 1 :]
    for name, colour in _COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    return re.sub(r"\n\s*", "\n", text)


def _without_family(match: re.Match[str]) -> str:
    """The size of a font declaration, if it has one."""
    size = re.search(r"[\d.]+px", match.group())
    return f"font-size: {size.group()}; " if size else ""
