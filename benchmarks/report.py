"""The one writer of results: a page of Markdown tables, JSON, and where there are such a CSV and a picture."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common import Check, Row

from metattt.optional import absence

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Report:
    """What a benchmark or a claim came to.

    Attributes:
        title: one line.
        text: what was measured and how, or asked and seen, as Markdown.
        tables: rows by the tables' titles; a table has the columns of all its rows.
        checks: what held before the measurement.
        settings: for the JSON file.
        draw: draws into an empty figure; None draws nothing.
        records: every figure that the tables and the picture are made from, for a CSV; none: no CSV.
        notes: lines below the tables.
    """

    title: str
    text: str
    tables: Mapping[str, Sequence[Row]]
    checks: Sequence[Check] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    draw: Callable[[Figure], None] | None = None
    records: Sequence[Row] = ()
    notes: Sequence[str] = ()

    def markdown(self, facts: Mapping[str, Any], picture: str | None = None) -> str:
        """The page; `picture` is the name of the file beside it."""
        lines = [f"# {self.title}", "", self.text, ""]
        for title, rows in self.tables.items():
            lines += [f"## {title}", "", *markdown_table(rows), ""]
        lines += [f"![{self.title}]({picture})", ""] if picture else []
        lines += ["Checked before anything was timed:", ""] if self.checks else []
        lines += [f"- {one.name}: relative error {one.error:.1e} (at most {one.bound:.0e})" for one in self.checks]
        told = ", ".join(f"{key} {value}" for key, value in facts.items())
        return "\n".join([*lines, *self.notes, "", f"{told}.", ""])

    def write(self, folder: Path, name: str, **facts: Any) -> list[Path]:
        """Writes `<name>.md` and `.json`, `.csv` if there are records, and `.png` if something is drawn and Matplotlib
        is installed; returns their paths.

        Args:
            folder, name: where.
            facts: beside those of `environment`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        facts = environment() | facts
        paths = [folder / f"{name}.md", folder / f"{name}.json"]
        if self.records:
            paths.append(folder / f"{name}.csv")
            with paths[-1].open("w", newline="", encoding="utf-8") as stream:
                writer = csv.DictWriter(stream, list(self.records[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(self.records)
        picture = None
        if self.draw is not None and absence("matplotlib", extra="train", what="drawing the picture") is None:
            from matplotlib.figure import Figure  # not pyplot: no window system is asked for

            figure, picture = Figure(figsize=(8, 5), layout="constrained"), f"{name}.png"
            self.draw(figure)
            paths.append(folder / picture)
            figure.savefig(paths[-1], dpi=110, metadata={"Software": None})
        content = {
            "environment": facts, "title": self.title, "text": self.text, "tables": self.tables,
            "checks": [one._asdict() for one in self.checks], "settings": self.settings,
        }  # fmt: skip
        paths[1].write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        paths[0].write_text(self.markdown(facts, picture), encoding="utf-8")
        return paths


def environment() -> dict[str, Any]:
    """Versions and the kind of machine: what a number depends on beside the code."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def markdown_table(rows: Sequence[Row]) -> list[str]:
    """Lines of a table, numbers to the right."""
    if not rows:
        return ["(no rows)"]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    numeric = [all(isinstance(row.get(column), int | float | None) for row in rows) for column in columns]
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join("---:" if right else "---" for right in numeric) + "|"]
    return lines + ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
