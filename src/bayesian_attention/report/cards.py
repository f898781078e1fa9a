"""The cards of the report: some nodes, their neighbours and the attention on each edge, as the template shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bayesian_attention.report import neighbourhoods as hoods
from bayesian_attention.report.neighbourhoods import Neighbour
from bayesian_attention.report.runs import Run

#: Drawings of one node, side by side.
_MOST_DRAWINGS = 4


def neighbourhood_cards(by_method: Mapping[str, list[Run]]) -> dict[str, Any] | None:
    """Some nodes of the first seed as the deterministic and the stochastic methods see them."""
    leading = next((run for runs in by_method.values() for run in runs if run.stochastic), None)
    if leading is None:
        leading = next((run for runs in by_method.values() for run in runs), None)
    if leading is None:
        return None
    seed = leading.record.seed
    same_seed = [run for runs in by_method.values() for run in runs if run.record.seed == seed]
    fixed = [run for run in same_seed if not run.stochastic and run is not leading][:1]
    others = [run for run in same_seed if run.stochastic and run is not leading]
    shown = [*fixed, leading, *others][:_MOST_DRAWINGS]
    labels = list(by_method)
    nodes = []
    for choice in hoods.choose(leading):
        seen = [(run, view) for run in shown if (view := hoods.neighbourhood(run, choice.node)) is not None]
        nodes.append((choice, seen))
    if not nodes:
        return None
    highest = max(
        (
            edge.std
            for _, seen in nodes
            for _, view in seen
            for edge in (*view.neighbours, *([view.itself] if view.itself else []))
        ),
        default=0.0,
    )
    cards = []
    for choice, seen in nodes:
        own = next(view for run, view in seen if run is leading)
        order = [edge.node for edge in own.neighbours]
        weights: list[dict[int, Neighbour]] = [{edge.node: edge for edge in view.neighbours} for _, view in seen]
        rows = [
            {
                "name": str(edge.node),
                "label": edge.label,
                "cells": [_weight(column.get(edge.node)) for column in weights],
            }
            for edge in own.neighbours
        ]
        if own.itself is not None:
            cells = [_weight(view.itself) for _, view in seen]
            rows.append({"name": "itself", "label": own.label, "cells": cells})
        drawings = [
            {
                "label": run.record.method,
                "index": labels.index(run.record.method),
                "svg": hoods.draw(view, order, highest),
                "class": view.label,
                "right": view.label == view.target,
                "confidence": f"{100 * view.confidence:.0f}%",
                "entropy": f"{view.entropy:.2f}",
                "epistemic": _small(view.epistemic) if run.stochastic else "",
            }
            for run, view in seen
        ]
        cards.append(
            {
                "node": choice.node,
                "reason": choice.reason,
                "target": own.target,
                "drawings": drawings,
                "rows": rows,
            }
        )
    views = [view for _, seen in nodes for _, view in seen]
    used = {label for view in views for label in (view.label, view.target)}
    used |= {edge.label for view in views for edge in view.neighbours}
    return {
        "cards": cards,
        "method": leading.record.method,
        "seed": seed,
        "stochastic": leading.stochastic,
        "left_out": [run.record.method for run in [*fixed, leading, *others][_MOST_DRAWINGS:]],
        "highest": f"{highest:.2f}",
        "middle": f"{highest / 2:.2f}",
        "used": sorted(used),
        "colours": [hoods.CLASSES[label % len(hoods.CLASSES)] for label in range(max(used) + 1)],
    }


def _small(number: float) -> str:
    return f"{number:.4f}" if number >= 5e-5 else "< 0.0001"


def _weight(edge: Neighbour | None) -> dict[str, str]:
    if edge is None:
        return {"mean": "–", "std": ""}
    return {"mean": f"{edge.mean:.3f}", "std": f"{edge.std:.3f}" if edge.std > 0 else ""}
