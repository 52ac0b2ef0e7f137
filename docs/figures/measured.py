"""The inner operation alone: closed form, generic dual form and the published style, from `results/cpu/inner.json`."""

from __future__ import annotations

import json
from pathlib import Path

from drawing import BLUE, GREEN, HERE, SOFT, new, write

SOURCE = HERE.parents[1] / "results" / "cpu" / "inner.json"
WAYS = {"fused": BLUE, "dual": GREEN, "published style": SOFT}


def times() -> dict[str, dict[str, tuple[float, float, float]]]:
    """Least, median and most milliseconds by learner and way: forward and backward, one thread."""
    rows = json.loads(SOURCE.read_text(encoding="utf-8"))["tables"]["Time"]
    found: dict[str, dict[str, tuple[float, float, float]]] = {}
    for row in rows:
        if row["pass"] == "training" and row["threads"] == 1:
            low, median, high = (round(row[f"ms, {one}"], 3) for one in ("least", "median", "most"))
            found.setdefault(f"TTT-{ {'linear': 'Linear', 'mlp': 'MLP'}[row['learner']] }", {})[row["way"]] = (
                low,
                median,
                high,
            )
    return found


def draw(folder: Path = HERE) -> Path:
    found = times()
    figure, axes = new(7.2, 2.6)
    ticks = []
    for block, (learner, ways) in enumerate(found.items()):
        for place, (way, colour) in enumerate(WAYS.items()):
            low, median, high = ways[way]
            y = 4 * block + place
            axes.barh(y, median, color=colour, height=0.8)
            axes.plot([low, high], [y, y], color="#1f2430", lw=1)
            axes.text(high + 25, y, f"{median:.0f} ms", va="center", size=9)
            ticks.append((y, f"{learner}, {way}"))
    axes.set(
        xlim=(0, 2500),
        xlabel="ms, median; lines: least to most",
    )
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.invert_yaxis()
    return write(figure, "measured", found, folder)
