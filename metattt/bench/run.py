"""`metattt bench <name>`: run one benchmark and write what it found."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from metattt.bench.base import Benchmark
from metattt.bench.report import Report
from metattt.composition.instantiate import instantiate_part
from metattt.registry import REGISTERED


def bench(cfg: DictConfig) -> None:
    """Runs `cfg.benchmark` and writes Markdown, JSON and a picture to `cfg.output_dir`.

    Args:
        cfg: as `configs/bench.yaml` has it.

    Raises:
        MetaTTTError: a setting that cannot be used, or a check that failed.
    """
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(cfg.threads)
    torch.manual_seed(cfg.seed)
    folder = Path(cfg.output_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)  # now: a folder that cannot be made must not show after the work
    benchmark: Benchmark = instantiate_part(cfg, "benchmark")
    benchmark.keep_in(folder)
    target = str(cfg.benchmark._target_)
    name = next(
        (known for (group, known), path in REGISTERED.items() if (group, path) == ("benchmark", target)), "benchmark"
    )
    report = benchmark.run(lambda line: console.print(line, style="dim"))
    paths = report.write(folder, name)  # before anything is shown: it must not be lost to a terminal that went away
    _show(console, report)
    for path in paths:
        console.print(f"written  {path}")
    if report.panels and report.no_picture:
        console.print(report.no_picture, markup=False)


def _show(console: Console, report: Report) -> None:
    if not console.is_terminal:
        console = Console(highlight=False, width=300)  # a log may be wide; a cell that is cut says nothing
    for title, rows in report.tables.items():
        if not rows:
            console.print(f"{title}: (no rows)")
            continue
        table = Table(title=title, title_justify="left")
        for column in rows[0]:
            table.add_column(column, justify="right" if isinstance(rows[0][column], int | float) else "left")
        for row in rows:
            table.add_row(
                *(
                    f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)
                    for value in row.values()
                )
            )
        console.print(table)
