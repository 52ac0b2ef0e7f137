"""Faults that a programmer could make, planted one at a time: which test finds each.

    python tests/planted_faults.py [name ...] [--tests PATH ...] [--tier first|all] [--tree FOLDER]

The faults are in `tests/planted/*.yaml`, by name:

    says    what is wrong, in a sentence
    file    of the package, relative to `metattt/`
    old     text that stands there once
    new     what takes its place
    was     the same three for an older commit, where they differ; `none` where it has no such place
    hints   words in the paths of the test files that are asked first

Each fault goes into a copy of the tree in a temporary folder, whose tests run with one thread until one fails: files that
the hints fit, then (with `--rest`) all others of the tier. It counts as found by a test that fails with it and passes
without it. Files that cannot be imported, and tests that compare the text of sources, do not count.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).resolve().parent
OF_SOURCES = ("documents", "imports", "installation", "families", "experiments")  # these compare texts, or run everything
LONGEST = 900  # seconds of one run of pytest: a fault may make a test wait for ever
COLUMNS = {"old": "old suite", "all": "all tests", "first": "first tier"}
PAGE = HERE.parent / "results" / "planted_faults.md"


class Edit(NamedTuple):
    """One place in the package."""

    file: str
    old: str
    new: str

    def fits(self, tree: Path) -> bool:
        """Whether the old text stands there once."""
        path = tree / "metattt" / self.file
        return path.is_file() and path.read_text().count(self.old) == 1

    def apply(self, tree: Path) -> None:
        path = tree / "metattt" / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


def faults() -> dict[str, dict[str, Any]]:
    """All faults by name."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted((HERE / "planted").glob("*.yaml")):
        found |= yaml.safe_load(file.read_text())
    return found


def edit_for(fault: dict[str, Any], tree: Path) -> Edit | None:
    """The edit that fits a tree: the present one, or that of an older commit."""
    was = fault.get("was")
    places = [fault] + ([{**fault, **was}] if isinstance(was, dict) else [])
    edits = [Edit(one["file"], one["old"], one["new"]) for one in places]
    return next((one for one in edits if one.fits(tree)), None)


class Suite:
    """The tests of a tree, run on copies of it.

    Args:
        tree: a checkout.
        tier: `first`, or `all`.
        work: folder of the copies.
    """

    def __init__(self, tree: Path, tier: str, work: Path):
        self.tree, self.tier, self.work = tree, tier, work
        self.broken: list[str] = []  # tests that fail without any fault
        self.clean = self.copy("clean")
        self.files = sorted(str(one.relative_to(tree)) for one in (tree / "tests").rglob("test_*.py"))
        self.files = [one for one in self.files if not any(word in one for word in OF_SOURCES)]

    def copy(self, name: str) -> Path:
        """A new copy of the tree."""
        target = self.work / name
        skipped = shutil.ignore_patterns(".git", "runs", "shared", ".*cache")
        shutil.copytree(self.tree, target, symlinks=True, ignore=skipped)
        return target

    def run(self, tree: Path, tests: Sequence[str]) -> tuple[str | None, float]:
        """The first test that fails, and the seconds it took; `timeout` where none ended."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += ["--no-header", "--tb=no", "-rfE", *(["-m", ""] if self.tier == "all" else [])]
        command += [word for test in self.broken for word in ("--deselect", test)]
        threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree), "COLUMNS": "400", "PYTHONDONTWRITEBYTECODE": "1"}
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, *tests], cwd=tree, env=os.environ | threads, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output = process.communicate(timeout=LONGEST)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return "timeout", time.monotonic() - began
        found = re.findall(r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - .*)?$", output, flags=re.MULTILINE)
        if not found and process.returncode not in (0, 5):  # 5: nothing was selected
            found = [f"crash of pytest: {(output.strip().splitlines() or [''])[-1]}"]
        return (found[0] if found else None), time.monotonic() - began

    def find(self, name: str, edit: Edit, groups: Sequence[Sequence[str]]) -> str:
        """Which test finds a fault, among groups of test files that are asked one after the other."""
        tree = self.copy(name)
        edit.apply(tree)
        try:
            for tests in filter(None, groups):
                while (failed := self.run(tree, tests)[0]) is not None:
                    if "::" not in failed:
                        print(f"{name}: {failed} in {' '.join(tests)}", file=sys.stderr, flush=True)
                        break  # no test of ours said it
                    if self.run(self.clean, [failed])[0] is None:
                        return failed.removeprefix("tests/")
                    self.broken.append(failed)
            return ""
        finally:
            shutil.rmtree(tree)

    def hinted(self, words: Sequence[str]) -> list[str]:
        """The files that words fit, in the order of the words."""
        return list(dict.fromkeys(one for word in words for one in self.files if word in one))


def rows() -> Iterator[tuple[str, dict[str, str]]]:
    """The faults of the page and what finds them."""
    titles = list(COLUMNS.values())
    for line in PAGE.read_text().splitlines() if PAGE.is_file() else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == len(titles) + 1 and cells[0] != "fault":
            yield cells[0], dict(zip(titles, cells[1:], strict=True))


def write(name: str, column: str, found: str) -> None:
    """Puts a result into the table of the page."""
    known, listed = dict(rows()), faults()
    known.setdefault(name, {})[COLUMNS[column]] = found
    titles = list(COLUMNS.values())
    head, _, _ = (PAGE.read_text() if PAGE.is_file() else "# Planted faults\n\n").partition("| fault |")
    lines = [f"| fault | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    for one in (one for one in listed if one in known):
        cells = [known[one].get(title, "") for title in titles]
        lines.append(f"| {one} | {' | '.join(cells)} |")
    PAGE.write_text(head + "\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of faults; none: all")
    parser.add_argument("--tests", nargs="+", help="these test files and no hints")
    parser.add_argument("--tier", choices=("first", "all"), default="first")
    parser.add_argument("--tree", type=Path, default=HERE.parent, help="the checkout")
    parser.add_argument("--rest", action="store_true", help="after the hints all other files of the tier")
    parser.add_argument("--column", choices=COLUMNS, help="of results/planted_faults.md, to write into")
    parser.add_argument("--check", action="store_true", help="only look whether every old text stands there once")
    chosen = parser.parse_args()
    known = faults()
    if unknown := [name for name in chosen.names if name not in known]:
        parser.error(f"no faults of these names: {', '.join(unknown)}")
    tree, missing = chosen.tree.resolve(), 0
    with tempfile.TemporaryDirectory(prefix="planted-") as work:
        suite = None if chosen.check else Suite(tree, chosen.tier, Path(work))
        for name in chosen.names or known:
            fault = known[name]
            edit = edit_for(fault, tree)
            if edit is None:
                gone = fault.get("was") == "none"
                missing += not gone
                found = "no such place" if gone else "the old text does not stand there once"
            elif suite is None:
                continue
            else:
                asked = chosen.tests or suite.hinted(fault["hints"])
                rest = [one for one in suite.files if one not in asked] if chosen.rest else []
                test = suite.find(name, edit, [asked, rest])
                found = f"found by {test}" if test else "not found"
            print(f"{name} · {found}", flush=True)
            if chosen.column:
                write(name, chosen.column, found.removeprefix("found by ").replace("|", "/"))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
