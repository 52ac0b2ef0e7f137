"""The checkpoints of a run, `<run>/checkpoints/step-00000100`: the newest that is whole, and removal of old ones."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from metattt.checkpoints.folder import CONTENT, verify
from metattt.errors import MetaTTTError

FOLDER = "checkpoints"  # in the folder of a run
DAMAGED = ".damaged"  # after the name of a checkpoint that was set aside
_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"step-\d{8,}\.(part|old|gone)")


def path_of(run_folder: Path, step: int) -> Path:
    """The checkpoint of a run at a step."""
    return run_folder / FOLDER / f"step-{step:08}"


def run_of(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint is of; of other files, the folder that they are in."""
    if len(checkpoint.parts) < 3:  # as seen from inside the run's folder
        checkpoint = checkpoint.absolute()
    return checkpoint.parent.parent if step_of(checkpoint) is not None else checkpoint.parent


def step_of(checkpoint: Path) -> int | None:
    """The step of a checkpoint by where it is; None: it has another name, or is in another folder."""
    found = _NAME.fullmatch(checkpoint.name)
    return int(found[1]) if found and checkpoint.absolute().parent.name == FOLDER else None


def steps(run_folder: Path) -> list[tuple[int, Path]]:
    """Steps and paths of a run's checkpoints, whole or damaged, newest first."""
    found = ((step_of(path), path) for path in _entries(run_folder))
    return sorted(((step, path) for step, path in found if step is not None), reverse=True)


def _entries(run_folder: Path) -> list[Path]:
    folder = run_folder / FOLDER
    return list(folder.iterdir()) if folder.is_dir() else []  # (glob would find nothing where it may not look)


def newest_good(run_folder: Path) -> Path:
    """The newest checkpoint of a run that is as it was written; newer ones, which are damaged, are named on stderr.

    Raises:
        MetaTTTError: all of them are damaged.
    """
    reason: MetaTTTError | None = None
    passed: list[str] = []
    for _, path in steps(run_folder):
        try:
            verify(path)
        except MetaTTTError as error:
            passed.append(path.name)
            reason = reason or error
            continue
        if passed:
            said = f"damaged: {', '.join(passed)} in {path.parent} ({reason}); {path.name} is taken instead"
            print(said, file=sys.stderr, flush=True)
        return path
    raise MetaTTTError(f"no checkpoint of {run_folder} can be used, of {len(passed)}: {reason}") from reason


def set_aside(path: Path) -> Path:
    """Renames a damaged file or folder to `<name>.damaged-<n>`, the first that is free, and returns that. It is not
    removed."""
    number = 1
    while (target := path.with_name(f"{path.name}{DAMAGED}-{number}")).exists() or target.is_symlink():
        number += 1
    path.rename(target)
    return target


# -- removal: OSError where something cannot be removed ----------------------------------------------------------------


def prune(run_folder: Path, keep: int, best: int | None = None) -> None:
    """Removes all checkpoints but the newest `keep` and that of step `best`; nothing that is not surely one of ours."""
    for step, path in steps(run_folder)[keep:]:
        if step != best and is_ours(path):
            remove_checkpoint(path)


def remove_newer(run_folder: Path, step: int) -> None:
    """Removes the checkpoints after a step that are surely ours; −1 removes all of them."""
    for newer, path in steps(run_folder):
        if newer > step and is_ours(path):
            remove_checkpoint(path)


def remove_leftovers(run_folder: Path) -> None:
    """Removes what a killed process left half written. Only for who holds the run's lock: another may be writing."""
    for path in _entries(run_folder):
        if _LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            remove_checkpoint(path)


def is_ours(path: Path) -> bool:
    """Whether a path is a checkpoint that a run of ours wrote, and not reached by a link."""
    linked = path.is_symlink() or (path.parent.name == FOLDER and path.parent.is_symlink())
    return not linked and (path / CONTENT).is_file()


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint that is ours. Renamed first: what is removed half is no checkpoint any more. Links in it are
    removed, and never what they lead to."""
    gone = path.with_name(f"{path.name.partition('.')[0]}.gone")
    if gone != path:
        if gone.exists():
            shutil.rmtree(gone)
        path.rename(gone)
    shutil.rmtree(gone)
