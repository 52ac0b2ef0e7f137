"""A run's folder, and where the run begins: anew, at a checkpoint, or at the beginning of one that was killed before it
wrote any. One run at a time, none over another, and nothing removed that is not a run's own."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from metattt.checkpoints import rolling
from metattt.checkpoints.files import find_checkpoint
from metattt.checkpoints.record import (
    RECORD,
    VERSION,
    check_plain,
    checked_record,
    modules,
    read_yaml,
    record_config,
    to_names,
)
from metattt.checkpoints.trained import check_resumed, read_checkpoint
from metattt.errors import MetaTTTError, check_integer
from metattt.io import write_whole
from metattt.locking import FolderLock
from metattt.metrics_file import read_rows
from metattt.training.csv_log import CSVLog
from metattt.training.resume import check_paths, resumed

AUTO = "auto"  # resume=auto
LEAST = {
    "max_steps": -1, "max_epochs": -1, "accumulate_grad_batches": 1, "check_val_every_n_epoch": 1,
    "log_every_n_steps": 0,
}  # fmt: skip
"""Integers of Lightning's Trainer."""
CONFIGURATION = "run.yaml"
"""In the folder of a run: its configuration, for people."""
LOG = "metrics.csv"
PICTURES = ("loss_curve.png", "inner_loss.png")  # written anew as a whole
_LEFTOVER = re.compile(rf"({re.escape(CONFIGURATION)}|{re.escape(LOG)})\.\d+\.part")


class Start(NamedTuple):
    """Where a run begins.

    Attributes:
        cfg: its configuration.
        folder: its folder.
        checkpoint: that it goes on from; None: it begins.
        content: of the checkpoint, without its tensors.
        done: steps done.
        moved: the command line says where the data is now.
        complete: there is nothing left to do.
    """

    cfg: DictConfig
    folder: Path
    checkpoint: Path | None
    content: Mapping[str, Any]
    done: int
    moved: bool
    complete: bool


class Opened(NamedTuple):
    """The folder of a run, kept from others.

    Attributes:
        folder: the run's.
        source: the folder of the run that is gone on with; None: a run begins.
        lock: held by the first process of the run; None in the others.
    """

    folder: Path
    source: Path | None
    lock: FolderLock | None


def check_given(cfg: DictConfig) -> None:
    """Refuses, before anything is read or made, what Lightning would take and train wrongly or not at all.

    Raises:
        MetaTTTError: words about the folder that do not go together; a number of steps that is none.
    """
    for key in ("resume", "output_dir"):
        if cfg[key] == "":
            raise MetaTTTError(f"{key}= is empty: give a folder, or leave it out (an empty variable of the shell?)")
    if cfg.resume == AUTO and not cfg.output_dir:
        raise MetaTTTError(
            f"resume={AUTO} goes on with the run in output_dir, or begins it there: add output_dir=<folder>"
        )
    if cfg.resume == AUTO and cfg.overwrite:
        raise MetaTTTError(f"resume={AUTO} keeps the run in output_dir, and overwrite=true does not: give one of them")
    trainer = cfg.trainer
    for key, least in LEAST.items():
        if trainer.get(key) is not None:
            check_integer(f"trainer.{key}", trainer[key], least)
    for key in ("max_steps", "max_epochs", "val_check_interval"):
        if trainer.get(key) == 0:
            raise MetaTTTError(
                f"trainer.{key}=0 trains nothing: give a number; metattt train --cfg shows a configuration"
            )
    if {trainer.get(key) for key in ("max_steps", "max_epochs")} <= {None, -1}:
        raise MetaTTTError(
            f"trainer.max_steps={trainer.get('max_steps')} is not allowed: it must be at least 1: a run must end"
        )


def open_run(cfg: DictConfig, first: bool) -> Opened:
    """Finds or makes the folder of a run, and locks it.

    Args:
        cfg: as it was composed.
        first: this is the first process of the run; the others make nothing.

    Raises:
        MetaTTTError: no such run, or a folder that cannot be used, or that another run uses.
    """
    given = Path(cfg.output_dir) if cfg.output_dir else None
    source = None
    if cfg.resume == AUTO:
        source = given
    elif cfg.resume:
        path = Path(cfg.resume).expanduser()
        if not path.exists():
            path = find_checkpoint(path)
        source = path if _is_folder(path) else rolling.run_of(path)
        source = source.parent if source.name == rolling.FOLDER else source
    folder = given or source
    if folder is None:
        folder = new_folder(cfg.get("name") or "run") if first else Path("runs")
    if not first:
        return Opened(folder, source, None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, "it is a file" if folder.is_file() else error.strerror) from error
    lock = FolderLock(folder, "a training run")
    lock.acquire()
    return Opened(folder, source, lock)


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
        raise _unusable(folder, error.strerror) from error


def start(cfg: DictConfig, opened: Opened, say: Callable[[str], None]) -> Start:
    """Decides where a run begins, and prepares its folder.

    Args:
        cfg: as it was composed.
        opened: its folder.
        say: prints a line for the user.

    Raises:
        MetaTTTError: a folder that holds another run, a checkpoint that cannot be used, settings that would make it
            another run, or nothing left to do.
    """
    folder, source, lock = opened
    given = cfg  # by the command line
    here = source is not None and folder.resolve() == source.resolve()
    checkpoint, done, moved = None, 0, False
    content: Mapping[str, Any] = {}
    if here and lock is not None:
        remove_leftovers(folder)
    if source is not None and (rolling.steps(source) or not (cfg.resume == AUTO or is_begun(source))):
        checkpoint = find_checkpoint(source if given.resume == AUTO else given.resume, fall_back=True)
        content = read_checkpoint(checkpoint, tensors="none")
        done = _steps_of(content, checkpoint)
        if here and lock is not None:
            _end_at(done, given, folder)
        cfg, moved = resumed(given, record_config(content[RECORD], checkpoint, trust=modules(given.trust)))
        check_resumed(checkpoint, cfg)
        cfg.resume = str(checkpoint)
    elif source is not None and cfg.resume != AUTO:
        cfg, moved = resumed(given, read_configuration(source, modules(given.trust)))
        say(f"{source} has no checkpoint yet: the run begins again, with its own configuration")
    if lock is not None and not (here and (checkpoint is not None or is_begun(folder))):
        make_room(folder, given.overwrite)
    cfg.output_dir = str(folder)
    if source is not None:
        check_paths(cfg, given.given)
    complete = 0 < cfg.trainer.get("max_steps", -1) <= done and _is_validated(cfg, done)
    if complete:
        line = f"the run {checkpoint} is complete at step {done}: to train on, add trainer.max_steps=<more>"
        if given.resume != AUTO:
            raise MetaTTTError(line)
        say(line)
    return Start(cfg, folder, checkpoint, content, done, moved, complete)


def is_begun(folder: Path) -> bool:
    """Whether a run was begun in a folder, and has no checkpoint, whole or damaged."""
    return (folder / CONFIGURATION).is_file() and not rolling.steps(folder)


def make_room(folder: Path, overwrite: bool) -> None:
    """Refuses a folder with a run in it, or with files that a run would write over; with `overwrite`, removes the run:
    checkpoints, log and configuration, if they are surely a run's, and nothing else.

    Raises:
        MetaTTTError: such a folder; a file of somebody else's in the place of one of a run's.
        OSError: one that cannot be removed.
    """
    foreign = [f"{rolling.FOLDER}/{path.name}" for _, path in rolling.steps(folder) if not rolling.is_ours(path)]
    for name, ours in ((LOG, _is_log), (CONFIGURATION, _is_configuration)):
        path = folder / name
        if path.is_symlink() or (path.exists() and not ours(path)):
            foreign.append(name)
    if overwrite:
        if foreign:
            raise MetaTTTError(
                f"overwrite=true: {', '.join(foreign)} in {folder} is not of a run; move it, or choose another "
                "output_dir"
            )
        rolling.remove_newer(folder, -1)
        remove_leftovers(folder)
        for name in (LOG, CONFIGURATION):
            (folder / name).unlink(missing_ok=True)
        return
    if not foreign and (rolling.steps(folder) or read_rows(folder / LOG)[0]):
        raise MetaTTTError(
            f"output_dir={folder} holds a run: go on with it (resume={folder}; resume=auto goes on or begins), "
            "begin it anew (overwrite=true), or choose another folder"
        )
    foreign += [name for name in PICTURES if os.path.lexists(folder / name)]
    if foreign:
        raise MetaTTTError(
            f"output_dir={folder} holds {', '.join(foreign)}, which the run would write over: choose another folder"
        )


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
        raise _unusable(folder, error.strerror) from error


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
    content = _moved(content, content["output_dir"].rstrip("/"), str(folder))
    check_plain(content, path)
    return record_config(checked_record({"version": VERSION, "config": to_names(content)}, path), path, trust=trust)


def _moved(node: Any, before: str, now: str) -> Any:
    """The configuration with paths below `before` put below `now`."""
    if isinstance(node, dict):
        return {key: value if key == "given" else _moved(value, before, now) for key, value in node.items()}
    if isinstance(node, list):
        return [_moved(value, before, now) for value in node]
    inside = isinstance(node, str) and (node == before or node.startswith(f"{before}/"))
    return now + node[len(before) :] if inside else node


def _steps_of(content: Mapping[str, Any], checkpoint: Path) -> int:
    """The steps that a checkpoint's run had made."""
    done = content.get("global_step")
    if type(done) is not int or not 0 <= done < 2**62:
        raise MetaTTTError(f"{checkpoint} has made {str(done)[:40]} steps: it is damaged, or not of a run")
    if rolling.step_of(checkpoint) not in (None, done):  # by the names it is known which ones come after it
        raise MetaTTTError(f"{checkpoint} is of step {done}, and was renamed: give it its name back, step-{done:08}")
    return done


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder with checkpoints in it, and not a checkpoint that is itself a folder."""
    return path.is_dir() and rolling.step_of(path) is None and not rolling.is_ours(path)


def _end_at(done: int, cfg: DictConfig, folder: Path) -> None:
    """What a run has after the checkpoint that it goes on from: damaged ones are set aside; others are not left to be
    taken for later ones of the run as it now goes on.

    Raises:
        MetaTTTError: such others, and the user has not said that they may be removed.
    """
    newer = [path for step, path in rolling.steps(folder) if step > done]
    if cfg.resume == AUTO or _is_folder(Path(cfg.resume).expanduser()):  # the newest that can be read was taken
        for path in newer:
            rolling.set_aside(path)
    elif newer and cfg.overwrite:
        rolling.remove_newer(folder, done)
    elif newer:
        raise MetaTTTError(
            f"the run has gone on from {cfg.resume} to {newer[0].name}: to go on from there once more, "
            "give another output_dir=<folder>, or overwrite=true to remove what came after"
        )


def _is_validated(cfg: DictConfig, step: int) -> bool:
    """Whether the validation after the last step is in the log; without a log of ours it is taken to be."""
    target = f"{CSVLog.__module__}.{CSVLog.__qualname__}"
    logs = [CSVLog(one.path) for one in (cfg.get("logger") or {}).values() if one.get("_target_") == target]
    return not logs or any(log.validated(step) for log in logs)


def _is_log(path: Path) -> bool:
    rows, damage = read_rows(path)
    return bool(rows) or not damage


def _is_configuration(path: Path) -> bool:
    try:
        content = read_yaml(path)
    except MetaTTTError:
        return False
    return isinstance(content, dict) and {"output_dir", "trainer", "layer"} <= set(content)


def _unusable(folder: Path, reason: str | None) -> MetaTTTError:
    return MetaTTTError(f"output_dir={folder} cannot be used: {reason}; choose another folder")
