"""Claims of papers on a small scale: `python benchmarks/claims.py table1 size=cpu jobs=2`; alone, the list of claims.

Sizes: smoke (minutes: a few steps of a few rows, which say nothing), cpu (two cores), gpu (one GPU). Stopped, the same
command resumes: jobs that have finished in <runs_dir>/<claim>/<size> are not run again. `<output_dir>/<claim>/<size>.md`,
`.json`, `.csv` and `.png` are written. A claim of yours is a file like those of `benchmarks/configs`, by its path. What
a file has can be set: `sizes.cpu.seeds=[0,1]`.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from common import exit_code, settings
from comparisons.comparison import Asked, AtASize, Claim, Row
from comparisons.curves import inner_loss, position
from comparisons.jobs import Runner
from comparisons.rows import rows
from comparisons.sequences import in_context, recall
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from report import Report

from metattt.errors import MetaTTTError, check_choice
from metattt.locking import locked

CONFIGS = Path(__file__).with_name("configs")
KINDS: dict[str, Callable[[Claim, Runner], Report]] = {
    "rows": rows, "position": position, "inner_loss": inner_loss, "recall": recall, "in_context": in_context,
}  # fmt: skip


@dataclass(kw_only=True)
class File(Asked):
    """What is in the file of a claim."""

    kind: str = MISSING
    rows: dict[str, Any] = MISSING  # name -> overrides, or those and the paper's figure: `overrides`, `reported`
    sizes: dict[str, AtASize] = MISSING
    overrides: list[str] = field(default_factory=list)  # of every run, at every size


@dataclass
class Settings:
    """How a claim is run."""

    size: str = "cpu"
    jobs: int = 1  # that run at a time
    threads: int = 1  # of torch on the CPU, in every job
    runs_dir: str = "runs/claims"
    output_dir: str = "results"


def main(words: Sequence[str]) -> int:
    """Runs one claim; returns the exit code: 1 if a job did not finish.

    Raises:
        MetaTTTError: a setting that cannot be used, or a folder in which another process is at work.
    """
    if not words or {"-h", "--help"} & {*words}:
        print(__doc__)
        for file in sorted(CONFIGS.glob("*.yaml")):
            print(f"{file.stem:<12} {file.read_text(encoding='utf-8').splitlines()[0].removeprefix('# ')}")
        return 0
    own = [word for word in words[1:] if word.partition("=")[0] in {one.name for one in fields(Settings)}]
    given = settings(Settings, own)
    kind, claim = read(words[0], given.size, [word for word in words[1:] if word not in own])
    folder = Path(given.runs_dir).expanduser() / claim.name / claim.size
    results = Path(given.output_dir).expanduser() / claim.name
    for one in (folder, results):
        one.mkdir(parents=True, exist_ok=True)  # now: a folder that cannot be made must not show after the work
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(given.threads)  # for the jobs
    minutes = claim.minutes / given.jobs
    print(f"{claim.name}, size {claim.size}: {claim.jobs()} jobs, about {minutes:.0f} minutes -> {folder}")
    with locked(folder, "a claim"):
        runner = Runner(folder, given.jobs, claim.jobs(), lambda line: print(line, flush=True))
        report = KINDS[kind](claim, runner)
    took = sum(one.seconds for one in runner.results.values())
    report.notes = [
        "", f"`python benchmarks/claims.py {shlex.join(words)}`", "", *report.notes,
        f"- {len(runner.results)} jobs took {took / 60:.1f} minutes of computing together",
    ]  # fmt: skip
    for path in report.write(results, claim.size, threads=given.threads, cores=len(os.sched_getaffinity(0))):
        print(f"written  {path}")
    print(report.text)
    unfinished = [one for one in runner.results.values() if not one.finished]
    if unfinished:
        print(f"{len(unfinished)} jobs have not finished: the same command tries them again")
    return int(bool(unfinished))


def read(name: str, size: str, changes: Sequence[str] = ()) -> tuple[str, Claim]:
    """The kind of a claim, and the claim at a size.

    Args:
        name: of a file in `configs`, or the path of one.
        size: one of the file's sizes.
        changes: `key=value` of the file.

    Raises:
        MetaTTTError: no such claim, size, row or key.
    """
    file = Path(name) if name.endswith(".yaml") else CONFIGS / f"{name}.yaml"
    if not name.endswith(".yaml"):
        check_choice("claim", name, sorted(one.stem for one in CONFIGS.glob("*.yaml")))
    try:
        parts = OmegaConf.structured(File), OmegaConf.load(file), OmegaConf.from_dotlist(list(changes))
        content: Any = OmegaConf.to_object(OmegaConf.merge(*parts))
    except (OSError, OmegaConfBaseException) as error:
        where = f" at {key}" if (key := getattr(error, "full_key", None)) else ""
        own = f"; settings are {', '.join(x.name for x in fields(Settings))}, and keys of the file" * bool(changes)
        raise MetaTTTError(f"{file} cannot be read{where}: {str(error).splitlines()[0]}{own}") from error
    check_choice("kind", content.kind, KINDS)
    check_choice("size", size, content.sizes)
    section = content.sizes[size]
    for key, ones in (("seeds", section.seeds), ("learning_rates", section.learning_rates or [0])):
        if not ones or len({*ones}) < len(ones):
            raise MetaTTTError(f"sizes.{size}.{key}={ones} is not allowed: give different numbers")
    found = []
    for one in content.rows if section.rows is None else section.rows:
        check_choice(f"sizes.{size}.rows", one, content.rows)
        row = content.rows[one]
        row = {"overrides": row} if isinstance(row, list) else row
        if not isinstance(row, dict) or not isinstance(row.get("overrides"), list):
            raise MetaTTTError(f"rows.{one}={row} is not allowed: give a list of overrides, or `overrides: [...]`")
        found.append(Row(one, tuple(row["overrides"]), row.get("reported")))
    same = {one.name: getattr(content, one.name) for one in fields(Asked)}
    of_size = vars(section) | {"rows": found, "overrides": [*content.overrides, *section.overrides]}
    return content.kind, Claim(name=file.stem, size=size, **same, **of_size)


if __name__ == "__main__":
    sys.exit(exit_code(main, "the same command resumes from what is written"))
