"""The curves of several runs in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

NAMED_RUNS = 12  # in the legend: of more, the best

Curve = Sequence[tuple[int, float]]  # (step, value)


def draw(file: Path, curves: Sequence[tuple[str, Curve]], metric: str) -> bool:
    """Draws a metric against the steps of the outer loop as a PNG; whether there was anything to draw.

    Args:
        file: the picture.
        curves: name and points of every run, the best first: from dark to light.
        metric: for the axis.
    """
    drawn = [(name, points) for name, points in curves if points]
    if not drawn:
        return False
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    colours = matplotlib.colormaps["viridis"]
    markers = "osv^D<>pPX*h"
    for place, (name, points) in reversed(list(enumerate(drawn))):  # the best on top
        steps, values = zip(*points, strict=True)
        axes.plot(
            steps, values, color=colours(0.9 * place / max(1, len(drawn) - 1)), marker=markers[place % len(markers)],
            markersize=4, linewidth=1.5, label=name,
        )  # fmt: skip
    finite = sorted(value for _, points in drawn for _, value in points)
    if (
        len(finite) > 4 and finite[-1] > 3 * abs(finite[len(finite) // 2]) > 0
    ):  # a run that went astray squeezes no other
        axes.set_ylim(top=1.5 * finite[int(0.9 * (len(finite) - 1))])
    axes.set(xlabel="outer-loop steps", ylabel=metric)
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    best = list(zip(reversed(handles), reversed(labels), strict=True))[:NAMED_RUNS]
    title = None if len(drawn) <= NAMED_RUNS else f"the best {NAMED_RUNS} of {len(drawn)}"
    axes.legend(*zip(*best, strict=True), fontsize="small", title=title)
    FigureCanvasAgg(figure).print_png(file)
    return True
