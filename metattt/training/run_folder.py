"""The folder of a run: one run at a time, none over another, and nothing removed that is not a run's own."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from metattt.checkpoints import rolling
from metattt.checkpoints.naming import to_names
from metattt.checkpoints.record import VERSION, checked_record, read_yaml, record_config
from metattt.checkpoints.trust import check_plain
from metattt.errors import MetaTTTError
from metattt.io import write_whole
from metattt.locking import FolderLock
from metattt.metrics_file import read_rows
from metattt.training.csv_log import check_log

CONFIGURATION = "run.yaml"
"""In the folder of a run: its configuration, for people."""
LOG = "metrics.csv"
LOGGED_AS = "logged_as.json"
"""What W&B and MLflow call the run."""
PICTURES = ("loss_curve.png", "inner_loss.png", "inner_loss.csv")  # written anew as a whole

_LEFTOVER = re.compile(rf"({re.escape(CONFIGURATION)}|{re.escape(LOG)})\.\d+\.part")


def new_folder(name: str) -> Path:
    """Makes `runs/<time>-<name>`, or with a number after it: a folder that nobody else has.

    Raises:
        MetaTTTError: it cannot be made.
    """
    first = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    folder, count = first, 1
    try:
        first.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()  # of two runs that begin in one second, one makes it
                return folder
            except FileExistsError:
                count += 1
                folder = first.with_name(f"{first.name}-{count}")
    except OSError as error:
        raise MetaTTTError(
            f"{folder} cannot be made: {error.strerror}; choose another with output_dir=<folder>"
        ) from error


def lock_folder(folder: Path) -> FolderLock:
    """Makes the folder of a run if it is not there, and keeps other runs out of it until the lock is released.

    Raises:
        MetaTTTError: it cannot be made or written; another run is in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise MetaTTTError(f"output_dir={folder} cannot be used: {reason}; choose another folder") from error
    lock = FolderLock(folder, "a training run")
    lock.acquire()
    return lock


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has written a checkpoint in its folder, whole or damaged."""
    return bool(rolling.steps(folder))


def is_begun(folder: Path) -> bool:
    """Whether a run was begun in a folder, and has no checkpoint."""
    return (folder / CONFIGURATION).is_file() and not has_checkpoint(folder)


def check_free(folder: Path) -> None:
    """Refuses a folder with a run in it, or with files that a run would write over.

    Raises:
        MetaTTTError: such a folder.
    """
    foreign = _not_ours(folder)
    if not foreign and (has_checkpoint(folder) or _logged(folder)):
        raise MetaTTTError(
            f"output_dir={folder} holds a run: go on with it (resume={folder}; resume=auto goes on or begins), "
            "begin it anew (overwrite=true), or choose another folder"
        )
    foreign += [name for name in PICTURES if os.path.lexists(folder / name)]
    if foreign:
        raise MetaTTTError(
            f"output_dir={folder} holds {', '.join(foreign)}, which the run would write over: choose another folder"
        )


def clear(folder: Path) -> None:
    """Removes the run in a folder: checkpoints, log and configuration, if they are surely a run's; nothing else.

    Raises:
        MetaTTTError: a file of somebody else's in the place of one of a run's.
        OSError: one that cannot be removed.
    """
    if foreign := _not_ours(folder):
        raise MetaTTTError(
            f"overwrite=true: {', '.join(foreign)} in {folder} is not of a run; move it, or choose another output_dir"
        )
    rolling.remove_newer(folder, -1)
    remove_leftovers(folder)
    for name in (LOG, CONFIGURATION, LOGGED_AS):
        (folder / name).unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Removes what a killed process left half written. Only for who holds the run's lock: another may be writing.

    Raises:
        OSError: one that cannot be removed.
    """
    rolling.remove_leftovers(folder)
    for path in list(folder.iterdir()):
        if _LEFTOVER.fullmatch(path.name) and path.is_file():
            path.unlink()


def write_configuration(folder: Path, cfg: DictConfig) -> None:
    """Writes `run.yaml`, resolved; a kill leaves a whole one or none.

    Raises:
        MetaTTTError: it cannot be written.
    """
    try:
        write_whole(folder / CONFIGURATION, OmegaConf.to_yaml(cfg, resolve=True).encode())
    except OSError as error:
        raise MetaTTTError(f"output_dir={folder} cannot be used: {error.strerror}; choose another folder") from error


def read_configuration(folder: Path, trust: Collection[str] = ()) -> DictConfig:
    """The configuration of a run that was begun; where the folder has moved, its paths are in the new place.

    Args:
        folder: of the run.
        trust: modules of the user's whose classes it may name.

    Raises:
        MetaTTTError: a file that cannot be read, or names components that are not known.
    """
    path = folder / CONFIGURATION
    content = read_yaml(path)
    if not isinstance(content, dict) or not isinstance(content.get("output_dir"), str):
        raise MetaTTTError(f"{path} is not the configuration of a run: begin it anew with output_dir={folder}")
    before = content["output_dir"]
    if Path(before) != folder:
        content = _moved(content, before.rstrip("/"), str(folder))
    check_plain(content, path)
    record = {"version": VERSION, "config": to_names(content)}
    return record_config(checked_record(record, path), path, trust=trust)


def _moved(node: Any, before: str, now: str) -> Any:
    """The configuration with paths below `before` put below `now`."""
    if isinstance(node, dict):
        return {key: value if key == "given" else _moved(value, before, now) for key, value in node.items()}
    if isinstance(node, list):
        return [_moved(value, before, now) for value in node]
    inside = isinstance(node, str) and (node == before or node.startswith(f"{before}/"))
    return now + node[len(before) :] if inside else node


def _logged(folder: Path) -> list[Any]:
    """The rows of the log in a folder."""
    path = folder / LOG
    return read_rows(path)[0] if path.is_file() else []


def _not_ours(folder: Path) -> list[str]:
    """What stands in a folder under the names of a run's files, and is not a run's: nothing of it may be removed."""
    found = [f"{rolling.FOLDER}/{path.name}" for _, path in rolling.steps(folder) if not rolling.is_ours(path)]
    named = ((LOG, _is_log), (CONFIGURATION, _is_configuration))
    for name, ours in named:
        path = folder / name
        if path.is_symlink() or (path.exists() and not ours(path)):
            found.append(name)
    return found


def _is_log(path: Path) -> bool:
    try:
        check_log(path)
    except (MetaTTTError, OSError):
        return False
    return True


def _is_configuration(path: Path) -> bool:
    try:
        content = read_yaml(path)
    except MetaTTTError:
        return False
    return isinstance(content, dict) and {"output_dir", "trainer", "layer"} <= set(content)
