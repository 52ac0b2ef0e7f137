"""The checkpoints of a run: `<run>/checkpoints/step-00000100`."""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINTS = "checkpoints"  # the folder in a run's folder
NAME = re.compile(r"step-(\d{8,})")


def steps(run: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run with the steps that it had made, the newest first."""
    found = []
    for path in (run / CHECKPOINTS).glob("step-*"):
        match = NAME.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)
