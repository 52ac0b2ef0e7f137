"""`metattt runs`: the final metrics of the runs in a folder, sorted, as a table, CSV and Markdown, and their curves."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from metattt.errors import MetaTTTError
from metattt.io import path_of, write_whole
from metattt.metrics_file import STEP, Row, of_validation, read_rows
from metattt.optional import absence
from metattt.sweeps.picture import draw
from metattt.sweeps.record import CELL, OUTPUT, read_cell, read_sweep

PREFERRED = ("validation/bits_per_byte", "validation/top1", "validation/loss")
LARGER_IS_BETTER = ("top1", "top5", "accuracy", "tokens_per_second", "images_per_second", "model_flops_utilization")
FILES = ("runs.csv", "runs.md", "runs.png")
DEPTH = 4  # of folders that runs are looked for in
FIXED = ("run", "state", STEP)


class Run(NamedTuple):
    """A run, or a cell that has none yet.

    Attributes:
        name: its folder, relative to that of the table.
        state: of a cell; empty for another run.
        swept: key -> value, of a cell.
        rows: of its log.
        message: why it did not finish.
    """

    name: str
    state: str
    swept: dict[str, str]
    rows: list[Row]
    message: str = ""

    def final(self, column: str) -> float:
        """The last value of a column; NaN if there is none."""
        rows = [row for row in self.rows if of_validation(row)] if column.startswith("validation/") else self.rows
        values = [row[column] for row in rows if row.get(column)]
        return float(values[-1]) if values else math.nan


def runs(cfg: DictConfig) -> int:
    """Prints the table of the runs in a folder, and writes its files.

    Args:
        cfg: `configs/runs.yaml`.

    Returns:
        The exit code, 0.

    Raises:
        MetaTTTError: no such folder, no runs in it, or no such column.
    """
    if OmegaConf.is_missing(cfg, "folder"):
        raise MetaTTTError("no folder is given: metattt runs <folder of a sweep, or of runs>")
    folder = path_of(cfg.folder, "folder")
    if not folder.is_dir():
        raise MetaTTTError(f"folder={folder} is no folder: give that of a sweep, or one that holds runs")
    tell(folder, cfg.sort, cfg.descending, None if cfg.output_dir is None else path_of(cfg.output_dir, "output_dir"))
    return 0


def tell(folder: Path, sort: str | None = None, descending: bool | None = None, output_dir: Path | None = None) -> int:
    """Prints the table and writes its files; the number of cells that have not finished.

    Args:
        folder: of a sweep, or of runs.
        sort: column; None chooses one.
        descending: the largest first; None chooses by the column.
        output_dir: for the files; None is the folder.

    Raises:
        MetaTTTError: as `runs`.
    """
    found = list(collect(folder))
    if not found:
        raise MetaTTTError(f"{folder} holds no runs: give the folder of a sweep, or one that holds runs")
    columns = _metrics(found)
    if sort is not None and sort not in columns:
        raise MetaTTTError(
            f"sort={sort} is not a column of the runs: choose from {', '.join(columns) or 'none: they have no metrics yet'}"
        )
    usual = [one for one in (*PREFERRED, *columns) if one in columns and one.startswith("validation/")]
    by = sort or next(iter(usual), STEP)
    down = by.endswith(LARGER_IS_BETTER) if descending is None else descending
    found.sort(key=lambda run: (math.isnan(run.final(by)), -run.final(by) if down else run.final(by), run.name))
    keys = list(dict.fromkeys(key for run in found for key in run.swept))
    shown = [column for column in columns if column.startswith("validation/") or column.endswith("_per_second")]
    shown.sort(key=lambda column: (column != by, not column.startswith("validation/")))
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:  # a file has no width
        console.width = 160
    told_apart = len({tuple(run.swept.items()) for run in found}) == len(found) and all(run.swept for run in found)
    few = [*(() if told_apart else FIXED[:1]), *keys, *FIXED[1:], *shown]
    console.print(_table(f"{folder}, by {by}", few, [_cells(run, few) for run in found]))
    means = _over_seeds(found, keys, by) if told_apart else []
    if means:
        console.print(_table("over seeds", list(means[0]), [list(row.values()) for row in means]))
    for run in found:
        if run.message:
            console.print(f"{run.name}: {run.state}: {run.message}", markup=False)
    _write(output_dir or folder, found, [FIXED[0], *keys, *FIXED[1:], *columns], few, means, by, console)
    return sum(run.state not in ("", "finished") for run in found)


def collect(folder: Path) -> Iterator[Run]:
    """The runs below a folder, and the cells of its sweep that have not begun.

    Raises:
        MetaTTTError: a file of a sweep that is damaged.
    """
    begun = []
    for path in _folders(folder, DEPTH):
        cell, log = read_cell(path), path / "metrics.csv"
        rows = read_rows(log)[0] if log.is_file() else []
        state = "" if cell is None else "unfinished" if cell.state == "running" else cell.state
        swept = {} if cell is None else _pairs(cell.swept)
        if cell is not None:
            begun.append(sorted(cell.swept))
        yield Run(str(path.relative_to(folder)), state, swept, rows, cell.message if cell else "")
    planned = read_sweep(folder)
    for overrides in planned.cells if planned else ():
        if sorted(overrides) not in begun:
            yield Run("+".join(overrides), "missing", _pairs(overrides), [])


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if not path.is_dir() or path.is_symlink() or path.name.startswith("."):
            continue
        if any((path / name).is_file() for name in (CELL, OUTPUT, "metrics.csv", "run.yaml")):
            yield path
        elif depth > 1:
            yield from _folders(path, depth - 1)


def _pairs(overrides: Sequence[str]) -> dict[str, str]:
    return {key.lstrip("+"): value.strip("'\"") for key, _, value in (one.partition("=") for one in overrides)}


def _metrics(found: Sequence[Run]) -> list[str]:
    """The columns of the logs that have a value in any."""
    names = dict.fromkeys(
        name for run in found for row in run.rows for name, value in row.items() if value and name != STEP
    )
    return sorted(names, key=lambda name: (not name.startswith("validation/"), name))


def _cells(run: Run, columns: Sequence[str], digits: int = 4) -> list[str]:
    """The values of a run, as they are shown."""
    plain = {"run": run.name, "state": run.state, **run.swept}
    texts = []
    for column in columns:
        value = run.final(column)
        if column in plain:
            texts.append(plain[column])
        elif math.isnan(value):
            texts.append("" if not run.rows or not any(row.get(column) for row in run.rows) else "nan")
        elif value == int(value) and abs(value) < 1e15:
            texts.append(str(int(value)))
        else:
            texts.append(f"{value:.{digits}f}" if 1e-3 < abs(value) < 1e4 else f"{value:.{digits}g}")
    return texts


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        numeric = column not in ("run", "state") and all(_is_number(row[columns.index(column)]) for row in rows)
        table.add_column(column.replace("validation/", ""), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _over_seeds(found: Sequence[Run], keys: Sequence[str], by: str) -> list[dict[str, str]]:
    """Mean and standard deviation of a metric over the seeds of a sweep, by its other keys, in the order of the runs; and
    those of the difference to the first of them with the same seed, which what a seed does to all of them leaves out."""
    others = [key for key in keys if key != "seed"]
    if "seed" not in keys or not others:
        return []
    groups: dict[tuple[str, ...], dict[str, float]] = {}
    for run in found:
        if not math.isnan(value := run.final(by)):
            groups.setdefault(tuple(run.swept.get(key, "") for key in others), {})[run.swept["seed"]] = value
    rows = []
    first = next(iter(groups.values()), {})
    for names, by_seed in groups.items():
        values = list(by_seed.values())
        paired = [] if by_seed is first else [value - first[seed] for seed, value in by_seed.items() if seed in first]
        difference = f"{statistics.fmean(paired):+.4f}" if paired else ""
        difference += f" ± {statistics.stdev(paired):.4f}" if len(paired) > 1 else ""
        deviation = f"{statistics.stdev(values):.4f}" if len(values) > 1 else ""
        figures = {f"mean {by}": f"{statistics.fmean(values):.4f}", "deviation": deviation, "seeds": str(len(values))}
        figures["difference to the first, by seed"] = difference
        rows.append({**dict(zip(others, names, strict=True)), **figures})
    return rows


def _write(
    folder: Path,
    found: Sequence[Run],
    every: Sequence[str],
    few: Sequence[str],
    means: Sequence[dict[str, str]],
    by: str,
    console: Console,
) -> None:
    """The table as CSV with every column, and as Markdown; the curves as PNG."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = io.StringIO(newline="")
        csv.writer(text).writerows([every, *(_cells(run, every, 8) for run in found)])
        write_whole(folder / FILES[0], text.getvalue().encode())
        tables = [_markdown(few, [_cells(run, few) for run in found])]
        if means:
            tables.append(_markdown(list(means[0]), [list(row.values()) for row in means]))
        write_whole(folder / FILES[1], "\n".join(tables).encode())
        if line := absence("matplotlib", extra="train", what="a picture"):
            console.print(line, markup=False)
        elif not draw(folder / FILES[2], [(_label(run), _curve(run, by)) for run in found], by):
            console.print(f"{folder / FILES[0]}  {folder / FILES[1]}", markup=False)
        else:
            console.print("  ".join(str(folder / name) for name in FILES), markup=False)
    except OSError as error:
        raise MetaTTTError(
            f"{folder} cannot be written to: {error.strerror}; choose another with output_dir=<folder>"
        ) from error


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(one.replace('|', chr(92) + '|') for one in line)} |\n" for line in lines)


def _label(run: Run) -> str:
    return ", ".join(f"{key}={value}" for key, value in run.swept.items()) or run.name


def _curve(run: Run, column: str) -> list[tuple[int, float]]:
    rows = [row for row in run.rows if row.get(column) and (of_validation(row) or not column.startswith("validation/"))]
    return [(int(row[STEP]), float(row[column])) for row in rows if math.isfinite(float(row[column]))]


def _is_number(text: str) -> bool:
    try:
        return not text or float(text) is not None
    except ValueError:
        return False
