"""Benchmarks on a CPU or one GPU: `python benchmarks/speed.py layer "lengths=[512,1024]"`.

Every benchmark first checks that what it times is right; a wrong result stops it before anything is reported. Without a
name the benchmarks are listed, `<name> --help` shows the settings. Of all: `threads=1` of torch, `seed=0`, and
`output_dir=results`, where <name>.md and .json are written.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import exit_code, settings
from report import markdown_table
from rich.console import Console

from metattt.errors import check_choice

BENCHMARKS = {"layer": "Layers", "model": "Models", "time_parallel": "TimeParallel"}
"""Name of the file in `speeds` -> its class."""


@dataclasses.dataclass
class Common:
    """Settings of all benchmarks."""

    MAY_BE_ZERO = ("seed",)
    threads: int = 1
    seed: int = 0
    output_dir: str = "results"


def main(words: Sequence[str]) -> int:
    """Runs one benchmark; returns the exit code.

    Args:
        words: the benchmark's name, and settings `key=value`.

    Raises:
        MetaTTTError: no such benchmark or setting, or a check that failed.
    """
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        for name, kind in BENCHMARKS.items():
            print(f"{name:<14} {_class(name, kind).__doc__.splitlines()[0]}")
        return 0
    name = words[0]
    check_choice("benchmark", name, BENCHMARKS)
    kind = _class(name, BENCHMARKS[name])
    if "--help" in words or "-h" in words:
        print(inspect.cleandoc(kind.__doc__))
        for field in dataclasses.fields(kind):
            print(f"    {field.name}={str(getattr(kind(), field.name)).replace(', ', ',')}")
        return 0
    names = [field.name for field in dataclasses.fields(Common)]
    shared = [word for word in words[1:] if word.partition("=")[0] in names]
    common = settings(Common, shared)
    benchmark = settings(kind, [word for word in words[1:] if word not in shared])
    torch.set_num_threads(common.threads)
    torch.manual_seed(common.seed)
    folder = Path(common.output_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)  # now: a folder that cannot be made must not show after the work
    console = Console(highlight=False, soft_wrap=True)
    report = benchmark.run(lambda line: console.print(line, style="dim", markup=False))
    at = getattr(benchmark, "at", torch.device("cpu"))  # processes that read a sequence together have no GPU
    for path in report.write(folder, name, **({} if at.type == "cuda" else {"device": at.type})):
        console.print(f"written  {path}", markup=False)
    for title, rows in report.tables.items():
        console.print("\n".join([title, *markdown_table(rows), ""]), markup=False)
    return 0


def _class(name: str, kind: str) -> Any:
    return getattr(importlib.import_module(f"speeds.{name}"), kind)


if __name__ == "__main__":
    sys.exit(exit_code(main))
