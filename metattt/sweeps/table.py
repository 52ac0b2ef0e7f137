"""`metattt runs`: the final metrics of the runs in a folder, sorted, as a table, CSV and Markdown, and their curves."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Column, Table

from metattt.errors import MetaTTTError, check_choice, printable
from metattt.io import path_of, replaced, write_whole
from metattt.metrics_file import LOG, STEP, Row, larger_is_better, of_validation, read_rows
from metattt.optional import absence
from metattt.sweeps.record import STATUS, read_status

PREFERRED = ("validation/bits_per_byte", "validation/top1", "validation/loss")
FILES = ("runs.csv", "runs.md", "runs.png")
DONE = ("", "finished")  # states of runs whose values count: not of a sweep, or finished
DEPTH = 4  # of folders that runs are looked for in
NAMED_RUNS = 12  # in the legend of the picture: of more, the best


class Run(NamedTuple):
    """A run, of a sweep or not."""

    name: str  # its folder, relative to that of the table
    state: str  # of a run of a sweep; empty for another
    swept: dict[str, str]  # key -> value, of a run of a sweep
    rows: list[Row]  # of its log
    message: str = ""  # why it did not finish
    fixed: tuple[str, ...] = ()  # what all runs of its sweep have
    damage: str = ""  # why rows of its log cannot be read

    def curve(self, column: str) -> list[tuple[int, float]]:
        """The values of a column by step; those of validation only, if it is one of these."""
        rows = [row for row in self.rows if row.get(column)]
        rows = list(filter(of_validation, rows)) if column.startswith("validation/") else rows
        return [(int(row[STEP]), float(row[column])) for row in rows]

    def final(self, column: str) -> float:
        """The last value of a column; NaN if there is none."""
        return next((value for _, value in reversed(self.curve(column))), math.nan)

    def texts(self, columns: Sequence[str], digits: int = 4) -> list[str]:
        """What it has in columns of the table."""
        plain = {"run": self.name, "state": self.state, **self.swept}
        return [plain.get(one) or (_number(self.final(one), digits) if self.curve(one) else "") for one in columns]


def read_run(folder: Path, name: str = "") -> Run:
    """The run in a folder, and what is known of it."""
    status = read_status(folder)
    pairs = [one.partition("=") for one in status.swept] if status else []
    swept = {key.lstrip("+"): value.strip("'\"") for key, _, value in pairs}
    state = "" if status is None else "unfinished" if status.state == "running" else status.state
    told = (status.message, tuple(status.fixed)) if status else ("", ())
    rows, damage = read_rows(folder / LOG) if (folder / LOG).exists() else ([], "")
    return Run(name, state, swept, rows, *told, damage)


def runs(cfg: DictConfig) -> None:
    """Prints the table of the runs in a folder, and writes its files; `cfg` is `configs/runs.yaml`.

    Raises:
        MetaTTTError: no such folder, no runs in it, or no such column.
    """
    if OmegaConf.is_missing(cfg, "folder"):
        raise MetaTTTError("no folder is given: metattt runs <folder of a sweep, or of runs>")
    folder = path_of(cfg.folder, "folder")
    if not folder.is_dir():
        raise MetaTTTError(f"folder={folder} is not a folder: give that of a sweep, or one that holds runs")
    tell(folder, cfg.sort, cfg.descending, None if cfg.output_dir is None else path_of(cfg.output_dir, "output_dir"))


def tell(folder: Path, sort: str | None = None, descending: bool | None = None, output_dir: Path | None = None) -> int:
    """Prints the table and writes its files; returns the number of runs of a sweep that have not finished.

    Args:
        folder: of a sweep, or of runs.
        sort: column; None chooses one.
        descending: the largest first; None chooses by the column.
        output_dir: for the files; None is the folder.
    """
    found = list(collect(folder, DEPTH))
    if not found:
        raise MetaTTTError(f"{folder} holds no runs: give the folder of a sweep, or one that holds runs")
    named = {name for run in found for row in run.rows for name, value in row.items() if value and name != STEP}
    columns = sorted(named, key=lambda name: (not name.startswith("validation/"), name))
    if sort is not None:
        check_choice("sort", sort, columns or ["none: they have no metrics yet"])
    by = sort or next((one for one in (*PREFERRED, *columns) if one in columns and one.startswith("validation/")), STEP)
    down = larger_is_better(by) if descending is None else descending

    def place(run: Run) -> tuple[bool, bool, float, str]:
        value = run.final(by)
        return run.state not in DONE, math.isnan(value), -value if down else value, run.name

    found.sort(key=place)
    keys = list(dict.fromkeys(key for run in found for key in run.swept))
    shown = [one for one in columns if one == by or one.startswith("validation/") or one.endswith("_per_second")]
    shown.sort(key=lambda column: (column != by, not column.startswith("validation/")))
    told_apart = len({tuple(run.swept.items()) for run in found}) == len(found) and all(run.swept for run in found)
    few = [*([] if told_apart else ["run"]), *keys, "state", STEP, *shown]
    every = ["run", *keys, "state", STEP, *columns]
    means = _over_seeds(found, keys, by, down) if told_apart else []
    tables = [[few, *(run.texts(few) for run in found)]]
    tables += [[list(means[0]), *(list(row.values()) for row in means)]] if means else []
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:  # a file has no width
        console.width = 10**4
    for title, (head, *lines) in zip((printable(f"{folder}, by {by}"), "over seeds"), tables, strict=False):
        names = [printable(one.replace("validation/", "")) for one in head]
        widths, kept = [max(map(len, cells)) + 3 for cells in zip(names, *lines, strict=True)], len(names)
        while sum(widths[:kept]) >= console.width and not head[kept - 1].endswith(by):
            kept -= 1
        folded = (Column(one, overflow="fold") for one in names[:kept])
        table = Table(*folded, title=title, title_justify="left")
        for line in lines:
            table.add_row(*map(printable, line[:kept]))
        console.print(table, soft_wrap=False)
        if names[kept:]:
            console.print(f"for a wider terminal: {', '.join(names[kept:])}")
    for run in found:
        if run.message:
            console.print(printable(f"{run.name}: {run.state}: {run.message}"))
        if run.damage:
            console.print(printable(f"{run.name}: {LOG} is damaged ({run.damage}): only its readable rows count"))
    home = output_dir or folder
    home.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    csv.writer(text).writerows([every, *(run.texts(every, 8) for run in found)])
    write_whole(home / FILES[0], text.getvalue().encode())
    write_whole(home / FILES[1], "\n".join(map(_markdown, tables)).encode())
    if missing := absence("matplotlib", extra="train", what="a picture"):
        console.print(missing)
    drawn = missing is None and _draw(home / FILES[2], found, by)
    console.print("  ".join(str(home / name) for name in FILES[: 3 if drawn else 2]))
    return sum(run.state not in DONE for run in found)


def collect(folder: Path, depth: int = DEPTH, home: Path | None = None) -> Iterator[Run]:
    """The runs below a folder."""
    for path in sorted(folder.iterdir()):
        if not path.is_dir() or path.is_symlink() or path.name.startswith("."):
            continue
        if any((path / name).is_file() for name in (STATUS, LOG, "run.yaml")):
            yield read_run(path, str(path.relative_to(home or folder)))
        elif depth > 1:
            yield from collect(path, depth - 1, home or folder)


def _number(value: float, digits: int) -> str:
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    if 1e4 <= abs(value) < 1e15:  # never with an exponent
        digits = max(digits, len(str(int(abs(value)))))
    return f"{value:.{digits}f}" if 1e-3 < abs(value) < 1e4 else f"{value:.{digits}g}"


def _over_seeds(found: Sequence[Run], keys: Sequence[str], by: str, down: bool = False) -> list[dict[str, str]]:
    """Mean and standard deviation of a metric over the seeds of a sweep, by its other keys, the best mean first; and of
    the difference to the first of them with the same seed, which leaves out what a seed does to all. Nothing where the
    runs differ in what their sweeps have fixed."""
    others = [key for key in keys if key != "seed"]
    if "seed" not in keys or len({run.fixed for run in found}) > 1:
        return []
    groups: dict[tuple[str, ...], dict[str, float]] = {}
    for run in found:
        if run.state in DONE and "seed" in run.swept and run.curve(by):
            group = groups.setdefault(tuple(run.swept.get(key, "") for key in others), {})
            group[run.swept["seed"]] = run.final(by)  # NaN, too: the mean of a variant that diverged is NaN
    rows = []
    averages = {names: sum(by_seed.values()) / len(by_seed) for names, by_seed in groups.items()}
    order = sorted(groups, key=lambda names: (math.isnan(averages[names]), averages[names] * (-1 if down else 1)))
    first = groups[order[0]] if order else {}
    for names in order:
        by_seed = groups[names]
        paired = [] if by_seed is first else [value - first[seed] for seed, value in by_seed.items() if seed in first]
        (mean, deviation), (apart, spread) = _summary([*by_seed.values()]), _summary(paired)
        figures = {f"mean {by}": mean, "deviation": deviation, "seeds": str(len(by_seed))}
        if len(order) > 1:
            sign, between = "+" if sum(paired) > 0 else "", " ± " if spread else ""
            figures["difference to the first, by seed"] = f"{sign}{apart}{between}{spread}"
        rows.append({**dict(zip(others, names, strict=True)), **figures})
    return rows


def _summary(values: Sequence[float]) -> tuple[str, str]:
    deviation = _number(statistics.stdev(values), 4) if len(values) > 1 and math.isfinite(sum(values)) else ""
    return _number(sum(values) / len(values), 4) if values else "", deviation


def _markdown(table: Sequence[Sequence[str]]) -> str:
    head, *lines = ([one.replace("|", "\\|") for one in line] for line in table)
    return printable("".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *lines]))


def _draw(file: Path, found: Sequence[Run], metric: str) -> bool:
    """Draws a metric of the runs against the steps, the best dark and on top; whether there was anything to draw."""
    curves = [(run, [point for point in run.curve(metric) if math.isfinite(point[1])]) for run in found]
    if not (curves := [one for one in curves if one[1]]):
        return False
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for place, (run, points) in enumerate(curves):
        label = ", ".join(f"{key}={value}" for key, value in run.swept.items()) or run.name
        style: dict[str, Any] = {"marker": "osv^D<>pPX*h"[place % 12], "markersize": 4, "zorder": -place}
        style["color"] = matplotlib.colormaps["viridis"](0.9 * place / max(1, len(curves) - 1))
        axes.plot(*zip(*points, strict=True), label=label if place < NAMED_RUNS else None, **style)
    axes.set(xlabel="outer-loop steps", ylabel=metric)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", title=f"the best {NAMED_RUNS} of {len(curves)}" if place >= NAMED_RUNS else None)
    with replaced(file) as part:
        figure.savefig(part, format="png")
    return True
