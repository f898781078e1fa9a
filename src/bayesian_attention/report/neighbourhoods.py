"""Drawings of nodes with their neighbours and the attention between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from bayesian_attention.report.runs import Run

#: Steps of the scale of spreads; the style sheet has a colour for each, --spread0 and on.
SPREADS = 9
#: Colours of classes; they repeat, which is why a class's number is drawn too. With the colour of the number.
CLASSES: tuple[tuple[str, str], ...] = (
    ("#e69f00", "#1a1a1a"),
    ("#56b4e9", "#1a1a1a"),
    ("#009e73", "#ffffff"),
    ("#f0e442", "#1a1a1a"),
    ("#0072b2", "#ffffff"),
    ("#d55e00", "#ffffff"),
    ("#cc79a7", "#1a1a1a"),
    ("#8c8c8c", "#ffffff"),
)

_WIDTH = 28.0  # of an edge with all the weight
_RADIUS, _NODE, _CENTRE, _MIDDLE, _SIZE = 98.0, 12.5, 17.0, 150.0, 300


@dataclass(frozen=True)
class Choice:
    """A node worth looking at.

    Attributes:
        node: its number.
        reason: why.
    """

    node: int
    reason: str


@dataclass(frozen=True)
class Neighbour:
    """An edge into a node.

    Attributes:
        node: number of the source.
        label: its predicted class.
        mean: attention weight, the mean over posterior draws.
        std: its standard deviation over draws.
    """

    node: int
    label: int
    mean: float
    std: float


@dataclass(frozen=True)
class Neighbourhood:
    """A test node and the edges into it, as one run sees them.

    Attributes:
        node: its number.
        target: its class.
        label: its predicted class.
        confidence: in the prediction.
        entropy: of the prediction in nats.
        epistemic: the part of it that the attention's draws explain.
        neighbours: the edges from other nodes, the heaviest first.
        itself: the edge from the node to itself; None where there is none.
    """

    node: int
    target: int
    label: int
    confidence: float
    entropy: float
    epistemic: float
    neighbours: tuple[Neighbour, ...]
    itself: Neighbour | None


def choose(run: Run, each: int = 2, fewest: int = 3, most: int = 14) -> list[Choice]:
    """Nodes of a run to draw: confident and right, most uncertain, confident and wrong.

    Of the right answers, those with the most neighbours in the most confident tenth; of the others, the extremes.

    Args:
        run: whose predictions count.
        each: nodes of each kind.
        fewest: neighbours besides itself that a node must have.
        most: neighbours that it may have.
    """
    sources, targets = run.edge_index
    degree = np.bincount(targets[sources != targets], minlength=len(run.label_all))[run.node]
    fits = (degree >= fewest) & (degree <= most)
    if not fits.any():
        fits = (degree >= 1) & (degree <= most)
    uncertainty = run.epistemic if run.has_epistemic else run.entropy
    kind = "epistemic uncertainty" if run.has_epistemic else "entropy"
    right = fits & run.correct
    if right.any():
        right &= run.confidence >= np.quantile(run.confidence[right], 0.9)
    wishes = (
        ("confident and right", degree, right),
        (f"among the highest {kind}", uncertainty, fits),
        ("confident and wrong", run.confidence, fits & ~run.correct),
    )
    chosen: dict[int, Choice] = {}
    # The rarest kind first, so that a node of two kinds counts as that; then back into reading order.
    for reason, score, allowed in reversed(wishes):
        found = 0
        for index in np.argsort(-score, kind="stable"):
            node = int(run.node[index])
            if found == each:
                break
            if allowed[index] and node not in chosen:
                chosen[node] = Choice(node, reason)
                found += 1
    order = [reason for reason, _, _ in wishes]
    return sorted(chosen.values(), key=lambda choice: order.index(choice.reason))


def neighbourhood(run: Run, node: int) -> Neighbourhood | None:
    """A node as a run sees it; None where it is not among the run's test nodes."""
    places = np.flatnonzero(run.node == node)
    if len(places) == 0:
        return None
    place = places[0]
    sources, targets = run.edge_index
    edges = [
        Neighbour(
            int(sources[edge]),
            int(run.label_all[sources[edge]]),
            float(run.attention_mean[edge]),
            float(run.attention_std[edge]),
        )
        for edge in np.flatnonzero(targets == node)
    ]
    others = sorted((edge for edge in edges if edge.node != node), key=lambda edge: (-edge.mean, edge.node))
    return Neighbourhood(
        node,
        int(run.target[place]),
        int(run.label[place]),
        float(run.confidence[place]),
        float(run.entropy[place]),
        float(run.epistemic[place]),
        tuple(others),
        next((edge for edge in edges if edge.node == node), None),
    )


def spread_step(std: float, highest: float) -> int:
    """The step of the scale of spreads, which ends at ``highest``."""
    return min(int(std / highest * SPREADS), SPREADS - 1) if highest > 0 else 0


def draw(view: Neighbourhood, order: Sequence[int], highest: float) -> str:
    """The neighbourhood as an ``svg`` element; its colours are in the page's style sheet.

    Args:
        view: what is drawn.
        order: numbers of the neighbours, clockwise from the top, so that several drawings of a node agree.
        highest: end of the scale of spreads.
    """
    places = {number: place for place, number in enumerate(dict.fromkeys(order))}
    neighbours = sorted(view.neighbours, key=lambda edge: places.get(edge.node, len(places)))
    edges, circles = [], []
    top, bottom = _MIDDLE - 50, _MIDDLE + 50
    for place, edge in enumerate(neighbours):
        angle = 2 * math.pi * place / len(neighbours) - math.pi / 2
        across, down = math.cos(angle), math.sin(angle)
        x, y = _MIDDLE + _RADIUS * across, _MIDDLE + _RADIUS * down
        edges.append(
            f'<line class="spread{spread_step(edge.std, highest)}" x1="{x:.1f}" y1="{y:.1f}" x2="{_MIDDLE:g}" '
            f'y2="{_MIDDLE:g}" stroke-width="{_thickness(edge):.2f}">'
            f"<title>{_title(edge, str(edge.node))}</title></line>"
        )
        far = _RADIUS + _NODE + (12 if abs(across) < 0.3 else 5)
        side = "start" if across >= 0.3 else "end" if across <= -0.3 else "middle"
        text_x, text_y = _MIDDLE + far * across, _MIDDLE + far * down
        top, bottom = min(top, text_y - 8, y - 15), max(bottom, text_y + 8, y + 15)
        circles.append(
            _circle(x, y, _NODE, edge.label, f"node {edge.node}, predicted class {edge.label}")
            + f'<text class="number" text-anchor="{side}" x="{text_x:.1f}" y="{text_y:.1f}">{edge.node}</text>'
        )
    if view.itself is not None:
        thickness = _thickness(view.itself)
        edges.append(
            f'<circle class="ring spread{spread_step(view.itself.std, highest)}" cx="{_MIDDLE:g}" cy="{_MIDDLE:g}" '
            f'r="{_CENTRE + 2.5 + thickness / 2:.2f}" stroke-width="{thickness:.2f}">'
            f"<title>{_title(view.itself, 'itself')}</title></circle>"
        )
    circles.append(
        _circle(_MIDDLE, _MIDDLE, _CENTRE, view.label, f"node {view.node}, predicted class {view.label}", "centre")
    )
    label = f"Node {view.node} with its {len(neighbours)} neighbours"
    return (
        f'<svg class="neighbourhood" role="img" aria-label="{label}" viewBox="0 {top:.0f} {_SIZE} {bottom - top:.0f}">'
        + "".join(edges)
        + "".join(circles)
        + "</svg>"
    )


def _thickness(edge: Neighbour) -> float:
    return max(_WIDTH * edge.mean, 0.6)


def _title(edge: Neighbour, name: str) -> str:
    return escape(f"{name}: {edge.mean:.3f} ± {edge.std:.3f}")


def _circle(x: float, y: float, radius: float, label: int, title: str, kind: str = "") -> str:
    fill, ink = CLASSES[label % len(CLASSES)]
    return (
        f'<circle class="node {kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}">'
        f"<title>{escape(title)}</title></circle>"
        f'<text class="class" text-anchor="middle" x="{x:.1f}" y="{y:.1f}" fill="{ink}">{label}</text>'
    )
