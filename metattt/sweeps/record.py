"""What a sweep leaves beside its runs: plain data, by which a run is known again and which the table reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omegaconf import OmegaConf

from metattt.errors import MetaTTTError
from metattt.io import digest, read_object, write_whole

STATUS = "status.json"  # in the folder of a run
OUTPUT = "output.txt"  # in the folder of a run: what it wrote to the terminal
LONGEST_NAME, MOST_BYTES = 120, 255  # characters and bytes of a run's folder, as file systems allow

State = Literal["running", "finished", "failed", "stopped"]
TYPES: dict[str, Any] = {"swept": list, "fixed": list, "state": str, "message": str, "seconds": int | float}


class Status(NamedTuple):
    """What is known of one run of a sweep."""

    swept: list[str]  # the overrides that tell it from other runs
    fixed: list[str]  # those that all runs have
    state: State  # how it ended; `running` where nobody could write that it did
    message: str = ""  # what the command said when it failed
    seconds: float = 0.0  # since it was last started


def folder_name(swept: str) -> str:
    """The name of a run's folder, from its overrides with + between them (Hydra's `override_dirname`).

    Quotes are left out, and the + of a new key. Where other characters have to be, or it would be too long, a
    checksum tells the names apart.
    """
    unquoted = swept.replace("'", "").replace('"', "")
    plain = re.sub(r"(^|\+)\++(?=[\w.@/]+=)", r"\1", unquoted) or "run"
    name = re.sub(r"[^\w.,=+\-\[\]]", "_", plain)
    if name != plain or len(name) > LONGEST_NAME or len(name.encode()) > MOST_BYTES or name.startswith("."):
        short = name[: LONGEST_NAME - 7].encode()[: MOST_BYTES - 7].decode(errors="ignore")
        name = f"{short.lstrip('.')}-{digest(swept.encode())[:6]}"
    return name


OmegaConf.register_new_resolver("metattt_run", folder_name, replace=True)


def write_status(folder: Path, status: Status) -> None:
    """Writes `status.json`; a kill leaves a whole one or none."""
    write_whole(folder / STATUS, (json.dumps({"version": 1, **status._asdict()}, indent=1) + "\n").encode())


def read_status(folder: Path) -> Status | None:
    """The status in a folder; None if there is none. A file that is none of ours raises an error."""
    file = folder / STATUS
    if not file.exists():
        return None
    content = read_object(file, 2**26)
    good = content.pop("version", None) == 1 and content.keys() == TYPES.keys()
    good = good and all(isinstance(content[key], kind) for key, kind in TYPES.items())
    if not good or not all(isinstance(one, str) for one in (*content["swept"], *content["fixed"])):
        raise MetaTTTError(
            f"{file} was not written by a sweep of this version: move it, or choose another hydra.sweep.dir"
        )
    return Status(**content)
