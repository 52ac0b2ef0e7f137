"""Writes the versions of an environment whose tests passed, as constraints for pip.

    python requirements/write.py tested    # after `pytest -m ""` with the newest versions
    python requirements/write.py oldest    # the same with the oldest torch that pyproject.toml allows, and numpy<2.4:
                                           # the interpreter of its Triton, 3.6, fails with NumPy 2.4

Only packages that `pip install -e ".[dev]"` brings are listed, with what they need themselves. Packages that exist on one
platform alone (Triton, CUDA's libraries) do no harm elsewhere: a constraint installs nothing.
"""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

WHICH = {"tested": "newest", "oldest": "oldest"}


def closure(name: str, extras: set[str]) -> dict[str, str]:
    """Name → version of everything that `name[extras]` needs in this environment, itself left out."""
    found: dict[str, str] = {}
    waiting, seen = [(name, frozenset(extras))], set()
    while waiting:
        package, wanted = entry = waiting.pop()
        if entry in seen:
            continue
        seen.add(entry)
        try:
            installed = distribution(package)
        except PackageNotFoundError:
            continue  # of another platform, or another Python
        if package != name:
            found[package] = installed.version.partition("+")[0]  # `2.14.1+cpu` is 2.14.1 to a constraint
        for line in installed.requires or ():
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                waiting.append((canonicalize_name(need.name), frozenset(need.extras)))
    return found


def main(which: str) -> None:
    header = (
        f"# The {WHICH[which]} versions that the tests of this commit passed with, on Python {platform.python_version()}.\n"
        f"# Written by `python requirements/write.py {which}`; used as `pip install -c requirements/{which}.txt`.\n"
    )
    pins = "".join(f"{name}=={version}\n" for name, version in sorted(closure("metattt", {"dev"}).items()))
    Path(__file__).with_name(f"{which}.txt").write_text(header + pins, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in WHICH:
        sys.exit(f"usage: python requirements/write.py {'|'.join(WHICH)}")
    main(sys.argv[1])
