"""`metattt reproduce <claim>`: runs the cells of a claim that have not been run, and writes its report."""

from __future__ import annotations

import os

from omegaconf import DictConfig
from rich.console import Console
from rich.markdown import Markdown

from metattt.composition.choices import choices
from metattt.composition.instantiate import instantiate_part
from metattt.composition.overrides import searched
from metattt.errors import MetaTTTError
from metattt.io import path_of
from metattt.locking import FolderLock
from metattt.reproduce.base import Claim
from metattt.reproduce.cells import Runner
from metattt.reproduce.progress import Progress
from metattt.reproduce.report import Heading, write


def reproduce(cfg: DictConfig) -> int:
    """Runs one claim at one size and writes `<output_dir>/<claim>/<size>.md`, `.csv` and `.png`; without a claim, lists
    them.

    Args:
        cfg: `configs/reproduce.yaml`.

    Returns:
        The exit code: 0; 1 if a cell did not finish.

    Raises:
        MetaTTTError: a setting that cannot be used, or a folder in which another process is at work.
    """
    console = Console(highlight=False, soft_wrap=True)
    if cfg.get("claim") is None:
        _list(console, cfg)
        return 0
    claim: Claim = instantiate_part(cfg, "claim")
    size = claim.size(str(cfg.size))
    total, name = claim.count(size), _chosen(cfg)
    cells, results = path_of(cfg.cells_dir, "cells_dir"), path_of(cfg.output_dir, "output_dir")
    folder = (cells / name / size.name).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (results / name).mkdir(parents=True, exist_ok=True)  # now: it must not show after the work
    except OSError as error:
        raise MetaTTTError(f"{error.filename} cannot be used: {error.strerror}; set cells_dir and output_dir") from error
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(cfg.threads)  # read by the cells when they start
    with FolderLock(folder, "a claim"):
        long = f"{total} cells, about {size.minutes / cfg.jobs:.0f} minutes"
        console.print(f"claim   {name}, size {size.name}: {long} -> {folder}", markup=False)
        with Progress(total, cfg.jobs, size.minutes) as progress:
            runner = Runner(folder, cfg.jobs, progress)
            report = claim.run(size, runner)
        given = [one for one in cfg.given if one.partition("=")[0] not in ("jobs", "cells_dir", "output_dir", "claim", "size", "threads")]
        heading = Heading(
            name, size.name, claim.title, claim.asked, " ".join(["metattt reproduce", name, f"size={size.name}", *given]),
            len(runner.results), sum(result.seconds for result in runner.results.values()), cfg.threads,
        )  # fmt: skip
        paths, no_picture = write(results / name, heading, report)
    if console.is_terminal:
        console.print(Markdown(paths[0].read_text(encoding="utf-8")))
    else:
        for line in (*report.seen, *report.failed):
            console.print(line, markup=False)
    for path in paths:
        console.print(f"written  {path}", markup=False)
    if no_picture:
        console.print(no_picture, markup=False)
    unfinished = [result for result in runner.results.values() if not result.finished]
    if unfinished:
        console.print(f"{len(unfinished)} cells have not finished: the same command tries them again", markup=False)
    return 1 if unfinished else 0


def _chosen(cfg: DictConfig) -> str:
    """The name of the claim, which is that of its folders."""
    return next(one.partition("=")[2] for one in reversed(cfg.given) if one.partition("=")[0] == "claim")


def _list(console: Console, cfg: DictConfig) -> None:
    found = choices("claim", searched(cfg.given))
    width = max(map(len, found))
    for name, summary in sorted(found.items()):
        console.print(f"{name:<{width}}  {summary}", markup=False)
    console.print("metattt reproduce <claim> size=smoke|cpu|gpu", markup=False)


