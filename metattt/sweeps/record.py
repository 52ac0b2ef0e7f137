"""What a sweep leaves beside its runs: plain data, by which a run is known again and which the table reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omegaconf import OmegaConf

from metattt.errors import MetaTTTError
from metattt.io import digest, read_object, write_whole

CELL = "cell.json"  # in the folder of a cell
OUTPUT = "output.txt"  # in the folder of a cell: what it wrote to the terminal
LONGEST_NAME = 120  # characters of a cell's folder; file systems allow 255 bytes

State = Literal["running", "finished", "failed", "stopped"]
TYPES: dict[str, Any] = {"swept": list, "fixed": list, "state": str, "message": str, "seconds": int | float}


class Cell(NamedTuple):
    """One cell of a sweep.

    Attributes:
        swept: the overrides that tell it from other cells.
        fixed: those that all cells have.
        state: how it ended; `running` where nobody could write that it did.
        message: what the command said when it failed.
        seconds: of its last life.
    """

    swept: list[str]
    fixed: list[str]
    state: State
    message: str = ""
    seconds: float = 0.0


def cell_name(swept: str) -> str:
    """The name of a cell's folder, from its overrides with + between them (Hydra's `override_dirname`).

    Quotes are left out, and the + of a new key. Where other characters have to be, or it would be too long, a
    checksum tells the names apart.
    """
    unquoted = swept.replace("'", "").replace('"', "")
    plain = re.sub(r"(^|\+)\++(?=[\w.@/]+=)", r"\1", unquoted) or "run"
    name = re.sub(r"[^\w.,=+\-\[\]]", "_", plain)
    if name != plain or len(name) > LONGEST_NAME or name.startswith("."):
        name = f"{name[: LONGEST_NAME - 7].lstrip('.')}-{digest(swept.encode())[:6]}"
    return name


OmegaConf.register_new_resolver("metattt_cell", cell_name, replace=True)


def write_cell(folder: Path, cell: Cell) -> None:
    """Writes `cell.json`; a kill leaves a whole one or none."""
    write_whole(folder / CELL, (json.dumps({"version": 1, **cell._asdict()}, indent=1) + "\n").encode())


def read_cell(folder: Path) -> Cell | None:
    """The cell in a folder; None if there is none. A file that is none of ours raises an error."""
    file = folder / CELL
    if not file.exists():
        return None
    content = read_object(file, 2**26)
    good = content.pop("version", None) == 1 and content.keys() == TYPES.keys()
    good = good and all(isinstance(content[key], kind) for key, kind in TYPES.items())
    if not good or not all(isinstance(one, str) for one in (*content["swept"], *content["fixed"])):
        raise MetaTTTError(
            f"{file} was not written by a sweep of this version: move it, or choose another hydra.sweep.dir"
        )
    return Cell(**content)
