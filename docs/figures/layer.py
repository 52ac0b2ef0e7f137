"""One layer: views of a token, the learner's loss and gradient, the rule, the read."""

from __future__ import annotations

from pathlib import Path

from drawing import BLUE, GREEN, HERE, INK, ORANGE, new, write
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

BOXES = {  # name: (x, y, width, height, colour, title, text)
    "x": (0.1, 1.55, 1.0, 0.7, INK, "token", "$x_t$"),
    "task": (1.75, 0.9, 1.75, 2.0, ORANGE, "Task", "$k_t,\\ v_t,\\ q_t$\n\n$\\ell\\,(f(k_t;W),\\,v_t)$"),
    "learner": (4.25, 2.05, 1.95, 1.15, BLUE, "Learner", "$f(\\,\\cdot\\,;\\,W_{t-1})$"),
    "rule": (7.0, 2.05, 2.45, 1.15, GREEN, "InnerOptimizer", "$W_t=\\alpha_t W_{t-1}-\\eta_t\\nabla\\ell_t$"),
    "read": (7.0, 0.45, 2.45, 0.95, BLUE, "read", "$z_t=f(q_t;\\,W_t)$"),
    "y": (10.05, 0.57, 1.0, 0.7, INK, "output", "$y_t$"),
}
ARROWS = [  # from, to, label and its place
    ((1.1, 1.9), (1.75, 1.9), "", None),
    ((3.5, 2.45), (4.25, 2.62), "$k_t, v_t$", (3.87, 2.78)),
    ((6.2, 2.62), (7.0, 2.62), "$\\nabla_W\\,\\ell_t$", (6.6, 2.8)),
    ((3.5, 1.2), (7.0, 0.92), "$q_t$", (5.2, 1.25)),
    ((8.2, 2.05), (8.2, 1.4), "$W_t$", (8.47, 1.72)),
    ((9.45, 0.92), (10.05, 0.92), "", None),
]


def draw(folder: Path = HERE) -> Path:
    figure, axes = new(9.2, 3.2)
    axes.set(xlim=(0, 11.2), ylim=(0.2, 4.0))
    axes.axis("off")
    for x, y, width, height, colour, title, text in BOXES.values():
        axes.add_patch(
            FancyBboxPatch(
                (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", fc=f"{colour}14", ec=colour
            )
        )
        axes.text(x + width / 2, y + height - 0.1, title, ha="center", va="top", color=colour, size=9, weight="bold")
        axes.text(x + width / 2, y + height / 2 - 0.12, text, ha="center", va="center", size=10)
    for start, end, label, place in ARROWS:
        axes.add_patch(
            FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=INK, shrinkA=1, shrinkB=1)
        )
        if place:
            axes.text(*place, label, ha="center", va="center", size=9)
    back = FancyArrowPatch(
        (8.2, 3.2), (5.2, 3.2), connectionstyle="arc3,rad=0.22", arrowstyle="-|>", mutation_scale=11, color=BLUE
    )
    axes.add_patch(back)
    axes.text(6.7, 3.82, "the state: $W_t$ is carried to the next token", ha="center", va="center", size=9, color=BLUE)
    return write(figure, "layer", {"boxes": sorted(BOXES)}, folder)
