"""Faults that a programmer could make, planted one at a time: which test finds each.

    python tests/planted_faults.py [name ...] [--tests PATH ...] [--tier first|all]

The faults are in `tests/planted/*.yaml`, by name:

    says    what is wrong, in a sentence
    file    of the package, relative to `metattt/`
    old     text that stands there once
    new     what takes its place
    hints   words in the paths of the test files that are asked first, each with `::` and an expression of `pytest -k`

Each fault goes into a copy of the tree in a temporary folder, whose tests run with one thread until one fails: those that
the hints fit, then (with `--rest`) all others of the tier. It counts as found by a test that fails with it and passes
without it; the latter is asked for all faults together at the end, and corrects what was printed. Files that cannot be
imported, and tests that compare the text of sources, do not count.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

os.environ.update(OMP_NUM_THREADS="1", TRITON_INTERPRET="1")  # read by what is imported next, once for all runs
for heavy in ("torch._dynamo", "torch.distributed.checkpoint", "lightning.pytorch", "transformers", "hydra"):
    importlib.import_module(heavy)

HERE = Path(__file__).resolve().parent
OF_SOURCES = ("documents", "imports", "installation", "families", "experiments")  # these compare texts, or run everything
LONGEST = 900  # seconds of one run of pytest: a fault may make a test wait for ever
COLUMNS = {"old": "old suite", "all": "all tests", "first": "first tier"}
PAGE = HERE.parent / "results" / "planted_faults.md"


def faults() -> dict[str, dict[str, Any]]:
    """All faults by name."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted((HERE / "planted").glob("*.yaml")):
        found |= yaml.safe_load(file.read_text())
    return found


def fits(fault: dict[str, Any], tree: Path) -> bool:
    """Whether the old text stands there once."""
    path = tree / "metattt" / fault["file"]
    return path.is_file() and path.read_text().count(fault["old"]) == 1


class Suite:
    """The tests of a tree, run on copies of it.

    Args:
        tree: a checkout.
        tier: `first`, or `all`.
        work: folder of the copies.
    """

    def __init__(self, tree: Path, tier: str, work: Path):
        self.work, self.clean, self.tier = work, work / "clean", tier
        self.broken: set[str] = set()  # tests that fail without any fault
        skipped = shutil.ignore_patterns(".git", "runs", "shared", ".*cache")
        shutil.copytree(tree, self.clean, symlinks=True, ignore=skipped)
        compileall.compile_dir(self.clean / "metattt", quiet=2)
        files = sorted(str(one.relative_to(self.clean)) for one in (self.clean / "tests").rglob("test_*.py"))
        self.files = [one for one in files if not any(word in one for word in OF_SOURCES)]

    def run(self, tree: Path, tests: Sequence[str], chosen: str = "", every: bool = False) -> list[str]:
        """The first test that fails (or all of them) of test files, or of those among them that `chosen` fits."""
        words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=no", "-rfE", *tests]
        words += [*([] if every else ["-x"]), *(["-m", ""] if self.tier == "all" else [])]
        words += [*(["-k", chosen] if chosen else []), *(f"--deselect={test}" for test in self.broken)]
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()  # what all runs import is there already
            if not child:
                _pytest(tree, words, output.fileno())
            began = time.monotonic()
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                if time.monotonic() - began > LONGEST:
                    os.killpg(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    return ["timeout"]
                time.sleep(0.2)
            output.seek(0)
            text = output.read()
        found = re.findall(r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - .*)?$", text, flags=re.MULTILINE)
        if not found and os.waitstatus_to_exitcode(ended[1]) not in (0, 5):  # 5: nothing was selected
            return [f"crash of pytest: {(text.strip().splitlines() or [''])[-1]}"]
        return found

    def find(self, name: str, fault: dict[str, Any], asked: Sequence[tuple[str, Sequence[str]]]) -> str:
        """Which test finds a fault, of expressions and files that are asked one after the other; empty: none."""
        tree = self.work / name
        shutil.copytree(self.clean, tree, symlinks=True)
        path = tree / "metattt" / fault["file"]
        path.write_text(path.read_text().replace(fault["old"], fault["new"]))
        try:
            for chosen, files in asked:
                for failed in self.run(tree, files, chosen):
                    if "::" in failed:
                        return failed
                    print(f"{name}: {failed} ({' '.join(files)})", file=sys.stderr, flush=True)  # no test said it
            return ""
        finally:
            shutil.rmtree(tree)

    def hinted(self, hints: Sequence[str]) -> list[tuple[str, list[str]]]:
        """Expressions and the files that words fit, in the order of the hints."""
        pairs = [hint.partition("::")[::2] for hint in hints]
        found = [(chosen, [file for file in self.files if word in file]) for word, chosen in pairs]
        return [(chosen, files) for chosen, files in found if files]


def _pytest(tree: Path, words: Sequence[str], output: int) -> NoReturn:
    """Runs pytest in this process, which is another one's child, and ends it."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(tree), COLUMNS="400")
    os.chdir(tree)
    sys.path[:] = [str(tree), *(one for one in sys.path if Path(one) != HERE)]
    code = 3
    try:
        code = int(pytest.main(list(words)))
    finally:
        sys.stdout.flush()
        os._exit(code)


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
    parser.add_argument("--rest", action="store_true", help="after the hints all other files of the tier")
    parser.add_argument("--column", choices=("all", "first"), help="of results/planted_faults.md, to write into")
    parser.add_argument("--check", action="store_true", help="only look whether every old text stands there once")
    chosen = parser.parse_args()
    known = faults()
    if unknown := [name for name in chosen.names if name not in known]:
        parser.error(f"no faults of these names: {', '.join(unknown)}")
    tree, missing, found = HERE.parent, 0, dict[str, str]()

    def tell(name: str, text: str) -> None:
        print(f"{name} · {text}", flush=True)
        if chosen.column:
            write(name, chosen.column, text.removeprefix("found by ").replace("|", "/"))

    with tempfile.TemporaryDirectory(prefix="planted-") as work:
        suite = None if chosen.check else Suite(tree, chosen.tier, Path(work))

        def look(name: str) -> None:
            assert suite is not None
            asked = [("", chosen.tests)] if chosen.tests else suite.hinted(known[name]["hints"])
            asked += [("", [one]) for one in suite.files] if chosen.rest else []
            found[name] = suite.find(name, known[name], asked)
            tell(name, f"found by {found[name].removeprefix('tests/')}" if found[name] else "not found")

        for name in chosen.names or known:
            if not fits(known[name], tree):
                missing += 1
                tell(name, "the old text does not stand there once")
            elif suite is not None:
                look(name)
        while suite is not None and (tests := sorted(set(found.values()) - {""})):
            bad = set(suite.run(suite.clean, tests, every=True)) & set(tests)  # they fail without a fault as well
            if not bad:
                break
            suite.broken |= bad
            for name in [name for name, test in found.items() if test in bad]:
                look(name)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
