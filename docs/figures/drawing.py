"""What the figures share: how they look, and how they are written so that the same data gives the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
INK, SOFT, BLUE, ORANGE, GREEN = "#1f2430", "#8a92a6", "#3f6fd8", "#d9822b", "#3a9a6b"
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "metattt", "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10, "text.color": INK, "axes.edgecolor": SOFT, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white", "mathtext.fontset": "dejavusans",
}  # fmt: skip


def new(width: float, height: float, **kwargs: Any) -> tuple[Figure, Any]:
    """A figure of a size in inches, and its axes."""
    plt.rcParams.update(STYLE)
    return plt.subplots(figsize=(width, height), layout="constrained", **kwargs)


def write(figure: Figure, name: str, data: Any, folder: Path = HERE) -> Path:
    """Writes `<name>.svg`, with the numbers that it shows as its description."""
    file = folder / f"{name}.svg"
    figure.savefig(file, metadata={"Date": None, "Creator": "MetaTTT", "Description": json.dumps(data)})
    plt.close(figure)
    text = file.read_text(encoding="utf-8")
    file.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    return file


def all_of_them(folder: Path = HERE) -> list[Path]:
    """Draws every figure."""
    import coefficients
    import layer
    import online

    return [one.draw(folder) for one in (layer, coefficients, online)]


if __name__ == "__main__":
    for path in all_of_them():
        print(path)
