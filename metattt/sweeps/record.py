"""What a sweep leaves beside its runs: plain data, from which it goes on and its table is made."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omegaconf import OmegaConf

from metattt.errors import MetaTTTError
from metattt.io import digest, read_text, write_whole
from metattt.io import parse as parse_json

SWEEP = "sweep.json"  # in the folder of a sweep
CELL = "cell.json"  # in the folder of a cell
OUTPUT = "output.txt"  # in the folder of a cell: what it wrote to the terminal
LONGEST_NAME = 120  # characters of a cell's folder; file systems allow 255 bytes

State = Literal["running", "finished", "failed", "stopped"]


class Sweep(NamedTuple):
    """A sweep.

    Attributes:
        command: what every cell runs.
        fixed: the overrides that all cells have, as they were typed.
        cells: the others, for every cell that is known beforehand (an optimiser makes them up on the way).
    """

    command: str
    fixed: list[str]
    cells: list[list[str]]


class Cell(NamedTuple):
    """One cell of a sweep.

    Attributes:
        swept: the overrides that tell it from other cells.
        fixed: those that all cells have.
        state: how it ended; `running` where nobody could write that it did.
        message: what the command said when it failed.
        seconds: of its last life.
        files: name -> checksum of what it has left in its folder, for those who ask again; None: not written down.
    """

    swept: list[str]
    fixed: list[str]
    state: State
    message: str = ""
    seconds: float = 0.0
    files: dict[str, str] | None = None


def cell_name(swept: str) -> str:
    """The name of a cell's folder, from its overrides with + between them (Hydra's `override_dirname`).

    Quotes are left out. Where other characters have to be, or it would be too long, a checksum tells the names apart.
    """
    plain = swept.replace("'", "").replace('"', "") or "run"
    name = re.sub(r"[^\w.,=+\-\[\]]", "_", plain)
    if name != plain or len(name) > LONGEST_NAME or name.startswith("."):
        name = f"{name[: LONGEST_NAME - 7].lstrip('.')}-{digest(swept.encode())[:6]}"
    return name


OmegaConf.register_new_resolver("metattt_cell", cell_name, replace=True)


def write_sweep(folder: Path, sweep: Sweep) -> None:
    """Writes `sweep.json`; a kill leaves a whole one or none."""
    _write(folder / SWEEP, sweep._asdict())


def write_cell(folder: Path, cell: Cell) -> None:
    """Writes `cell.json`; a kill leaves a whole one or none."""
    _write(folder / CELL, cell._asdict())


def read_sweep(folder: Path) -> Sweep | None:
    """The sweep in a folder; None if there is none.

    Raises:
        MetaTTTError: a file that is none of ours.
    """
    content = _read(folder / SWEEP)
    if content is None:
        return None
    cells = content.get("cells")
    if not isinstance(cells, list) or not all(map(_are_texts, [content.get("fixed"), *cells])):
        raise _damaged(folder / SWEEP)
    if not isinstance(content.get("command"), str):
        raise _damaged(folder / SWEEP)
    return Sweep(content["command"], content["fixed"], cells)


def read_cell(folder: Path) -> Cell | None:
    """The cell in a folder; None if there is none.

    Raises:
        MetaTTTError: a file that is none of ours.
    """
    content = _read(folder / CELL)
    if content is None:
        return None
    good = (
        _are_texts(content.get("swept"))
        and _are_texts(content.get("fixed"))
        and isinstance(content.get("message"), str)
    )
    state, seconds, files = content.get("state"), content.get("seconds"), content.get("files")
    good = good and (files is None or (isinstance(files, dict) and _are_texts(list(files.values()))))
    if not good or state not in ("running", "finished", "failed", "stopped") or not isinstance(seconds, int | float):
        raise _damaged(folder / CELL)
    return Cell(content["swept"], content["fixed"], state, content["message"], float(seconds), files)


def same(first: Iterable[str], second: Iterable[str]) -> bool:
    """Whether overrides say the same, in whatever order."""
    return sorted(first) == sorted(second)


def difference(before: Sequence[str], now: Sequence[str]) -> str:
    """Which overrides are not the same: for messages."""
    gone = [one for one in before if one not in now]
    new = [one for one in now if one not in before]
    parts = [f"{word} {' '.join(ones)}" for word, ones in (("without", gone), ("with", new)) if ones]
    return " and ".join(parts)


def _write(file: Path, content: dict[str, Any]) -> None:
    write_whole(file, (json.dumps({"version": 1, **content}, indent=1) + "\n").encode())


def _read(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    content = parse_json(read_text(file, 2**26), str(file))
    if not isinstance(content, dict) or content.get("version") != 1:
        raise _damaged(file)
    return content


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _damaged(file: Path) -> MetaTTTError:
    return MetaTTTError(f"{file} is not of a sweep of this version: move it, or choose another hydra.sweep.dir")
