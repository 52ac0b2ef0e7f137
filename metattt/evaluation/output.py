"""Files of results that do not write over those before them."""

from __future__ import annotations

import itertools
from pathlib import Path


def claim(folder: Path, name: str) -> str:
    """Takes the first free number for `<name><number>.csv` in a folder: nothing, `-2`, `-3`, …; another process at the
    same time takes another one.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for count in itertools.count(1):
        number = f"-{count}" if count > 1 else ""
        try:
            (folder / f"{name}{number}.csv").touch(exist_ok=False)
        except FileExistsError:
            continue
        break
    return number
