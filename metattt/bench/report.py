"""What a benchmark found out, as Markdown, JSON and a picture."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from metattt.optional import absence

Row = dict[str, Any]  # JSON values by column


@dataclass(frozen=True)
class Check:
    """A comparison that was made before anything was timed: the relative error, and what it may be at most."""

    name: str
    error: float
    bound: float


@dataclass(frozen=True)
class Panel:
    """One plot: curves by name, each a list of x and a list of y."""

    title: str
    x: str
    y: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]


@dataclass(frozen=True)
class Report:
    """Results of one benchmark.

    Attributes:
        title: one line.
        text: what was measured and how, as Markdown.
        tables: rows by the tables' titles. All rows of a table have the same columns.
        checks: what held before the measurement.
        settings: the benchmark's settings, for the JSON file.
        panels: plots, side by side.
        file: path under the output folder to write instead of the benchmark's name, without ending.
        environment: where it was measured; None: here.
    """

    title: str
    text: str
    tables: Mapping[str, Sequence[Row]]
    checks: Sequence[Check]
    settings: Mapping[str, Any]
    panels: Sequence[Panel] = field(default_factory=tuple)
    file: str | None = None
    environment: Mapping[str, Any] | None = None

    def markdown(self) -> str:
        lines = [f"# {self.title}", "", self.text, ""]
        for title, rows in self.tables.items():
            lines += [f"## {title}", "", *markdown_table(rows), ""]
        lines += ["Checked before anything was timed:", ""] if self.checks else []
        lines += [
            f"- {check.name}: relative error {check.error:.1e} (at most {check.bound:.0e})" for check in self.checks
        ]
        return "\n".join([*lines, "", _sentence(self.environment or environment()), ""])

    @property
    def no_picture(self) -> str | None:
        """Why `write` draws no picture of the panels; None if it does."""
        return absence("matplotlib", extra="train", what="drawing the picture")

    def write(self, folder: Path, name: str) -> list[Path]:
        """Writes `<name>.md`, `.json` and, if there are panels (and `no_picture` is None), `.png`, and returns their
        paths."""
        folder, name = (folder / (self.file or name)).parent, (self.file or name).rsplit("/", 1)[-1]
        folder.mkdir(parents=True, exist_ok=True)
        content = {"environment": self.environment or environment()} | {
            key: value for key, value in asdict(self).items() if key not in ("panels", "file", "environment")
        }
        paths = [folder / f"{name}.md", folder / f"{name}.json"]
        paths[0].write_text(self.markdown(), encoding="utf-8")
        paths[1].write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        if self.panels and self.no_picture is None:
            paths.append(folder / f"{name}.png")
            _draw(self.panels, paths[-1])
        return paths


def environment() -> dict[str, Any]:
    """Versions and the kind of machine: what a number depends on beside the code."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "device": device,
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def markdown_table(rows: Sequence[Row]) -> list[str]:
    """Lines of a table, numbers to the right."""
    if not rows:
        return ["(no rows)"]
    columns = list(rows[0])
    numeric = [all(isinstance(row[column], int | float | None) for row in rows) for column in columns]
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join("---:" if right else "---" for right in numeric) + "|"]
    return lines + ["| " + " | ".join(_cell(row[column]) for column in columns) + " |" for row in rows]


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _sentence(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items()) + "."


MOST_TICKS, IN_A_COLUMN = 8, 20
LOOKS: Sequence[dict[str, Any]] = (  # of every ten curves
    {"linestyle": "-", "marker": "o"}, {"linestyle": "--", "marker": "o"}, {"linestyle": ":", "marker": "s"},
    {"linestyle": "-.", "marker": "^"}, {"linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "D"},
)  # fmt: skip


def looks_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A look for every curve, in all panels the same: fifty of them, before they repeat."""
    return {name: LOOKS[i // 10 % len(LOOKS)] | {"color": f"C{i % 10}"} for i, name in enumerate(names)}


def _draw(panels: Sequence[Panel], path: Path) -> None:
    from matplotlib.figure import Figure  # not pyplot: no window system is asked for
    from matplotlib.ticker import LogFormatter

    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    looks = looks_of(names)
    columns = math.ceil(len(names) / IN_A_COLUMN)
    figure = Figure(figsize=(6.5 * len(panels) + 2.2 * (columns - 1), 5), layout="constrained")
    shown: dict[str, Any] = {}
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(
            1, len(panels), number, xscale="log", yscale="log", title=panel.title, xlabel=panel.x, ylabel=panel.y
        )
        for name, (x, y) in panel.curves.items():
            shown[name] = axes.plot(x, y, markersize=3, **looks[name])[0]
        lengths = sorted({value for x, _ in panel.curves.values() for value in x})
        if 0 < len(lengths) <= MOST_TICKS:  # what was measured, not powers of ten around it
            axes.set_xticks(lengths, [f"{value:,g}" for value in lengths])
            axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter(LogFormatter())  # numbers as people write them
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        axes.grid(alpha=0.3)
    figure.legend(list(shown.values()), list(shown), loc="outside right center", ncols=columns, fontsize="small")
    figure.savefig(path, dpi=120)
