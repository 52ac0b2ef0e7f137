"""What a claim came to, as Markdown, CSV and a picture."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metattt.bench.report import environment, markdown_table
from metattt.io import write_whole
from metattt.optional import absence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = dict[str, Any]  # a row of the CSV


@dataclass
class Report:
    """What came out of the cells of a claim.

    Attributes:
        seen: sentences, every one made from the figures.
        tables: title -> rows, all with the same columns.
        records: every figure that the tables and the picture are made from; the first names the columns of the CSV.
        draw: draws into an empty figure; None draws nothing.
        settings: what the runs had in common, as Markdown.
        failed: a line for every cell that did not finish.
    """

    seen: Sequence[str]
    tables: Mapping[str, Sequence[Record]]
    records: Sequence[Record]
    draw: Callable[[Figure], None] | None = None
    settings: Sequence[str] = field(default_factory=list)
    failed: Sequence[str] = field(default_factory=list)


@dataclass(frozen=True)
class Heading:
    """What a report says beside its figures.

    Attributes:
        name: of the claim.
        size: of it.
        title: one line.
        asked: what the paper says.
        command: that makes the report again.
        cells: their number.
        seconds: that they took together.
        threads: of every cell.
    """

    name: str
    size: str
    title: str
    asked: str
    command: str
    cells: int
    seconds: float
    threads: int


def markdown(heading: Heading, report: Report, picture: str | None) -> str:
    """The report as Markdown; `picture` is the name of the file beside it."""
    lines = [f"# {heading.title}", "", f"**Asked.** {heading.asked}", "", "**Seen.**", ""]
    lines += [f"- {one}" for one in report.seen] + [""]
    for title, rows in report.tables.items():
        lines += [f"## {title}", "", *markdown_table(rows), ""]
    if picture is not None:
        lines += [f"![{heading.title}]({picture})", ""]
    if report.failed:
        lines += ["## Cells that did not finish", "", *(f"- {one}" for one in report.failed), ""]
    facts = environment() | {"threads": heading.threads}
    facts["processor"] = f"{facts['processor']}, {len(os.sched_getaffinity(0))} cores"
    lines += ["## How", "", f"`{heading.command}`", "", *(f"- {one}" for one in report.settings)]
    lines += [f"- {heading.cells} cells took {heading.seconds / 60:.1f} minutes of computing together"]
    return "\n".join([*lines, f"- {', '.join(f'{key} {value}' for key, value in facts.items())}", ""])


def write(folder: Path, heading: Heading, report: Report) -> tuple[list[Path], str | None]:
    """Writes `<size>.md`, `.csv` and `.png`; their paths, and why there is no picture.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{heading.size}.{ending}" for ending in ("md", "csv")]
    reason = absence("matplotlib", extra="train", what="drawing the picture") if report.draw else None
    picture = folder / f"{heading.size}.png" if report.draw and reason is None else None
    text = io.StringIO(newline="")
    if report.records:
        writer = csv.DictWriter(text, list(report.records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(report.records)
    write_whole(paths[1], text.getvalue().encode())
    if picture is not None and report.draw is not None:
        from matplotlib.figure import Figure  # not pyplot: no window system is asked for

        figure = Figure(figsize=(8, 5), layout="constrained")
        report.draw(figure)
        figure.savefig(picture, dpi=110, metadata={"Software": None})
        paths.append(picture)
    write_whole(paths[0], markdown(heading, report, picture.name if picture else None).encode())
    return paths, reason
