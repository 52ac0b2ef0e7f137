"""The folder of a run and its starting point: new, at a checkpoint, or again from the start if it was killed before its
first checkpoint. A folder has one run at a time, no run overwrites another, and only files of a run are removed."""

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
from metattt.errors import MetaTTTError, check_integer, check_number
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
    """The starting point of a run.

    Attributes:
        cfg: its configuration.
        folder: its folder.
        checkpoint: from which it resumes; None: a new run.
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
        source: the folder of the run that is resumed; None: a new run.
        lock: held by the first process of the run; None in the others.
    """

    folder: Path
    source: Path | None
    lock: FolderLock | None


def check_given(cfg: DictConfig) -> None:
    """Checks settings, before anything is read or written, that Lightning would accept but train wrongly or not at all.

    Raises:
        MetaTTTError: settings of the folder that exclude each other; an invalid number of steps.
    """
    for key in ("resume", "output_dir"):
        if cfg[key] == "":
            raise MetaTTTError(f"{key}= is empty: give a folder, or leave it out (an empty variable of the shell?)")
    if cfg.resume == AUTO and not cfg.output_dir:
        raise MetaTTTError(
            f"resume={AUTO} resumes the run in output_dir, or starts it there: add output_dir=<folder>"
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
                f"trainer.{key}=0 trains nothing: give a number; metattt train --cfg job shows the configuration"
            )
    if trainer.get("gradient_clip_val") is not None:  # Lightning takes one below 0 for none
        check_number("trainer.gradient_clip_val", trainer.gradient_clip_val, least=0, advice=", or null for no clipping")
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
    """Makes a new folder `runs/<time>-<name>`, with a number after it if needed.

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
    """Decides where a run starts, and prepares its folder.

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
        say(f"{source} has no checkpoint yet: the run starts again, with its own configuration")
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
    """Whether a run was started in a folder and has no checkpoint, complete or damaged."""
    return (folder / CONFIGURATION).is_file() and not rolling.steps(folder)


def make_room(folder: Path, overwrite: bool) -> None:
    """Raises an error for a folder with a run in it, or with files that a run would overwrite. With `overwrite`,
    removes the run: its checkpoints, log and configuration, and nothing else.

    Raises:
        MetaTTTError: such a folder; a foreign file in the place of a run's file.
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
                f"overwrite=true: {', '.join(foreign)} in {folder} does not belong to a run; move it, or choose "
                "another output_dir"
            )
        rolling.remove_newer(folder, -1)
        remove_leftovers(folder)
        for name in (LOG, CONFIGURATION):
            (folder / name).unlink(missing_ok=True)
        return
    if not foreign and (rolling.steps(folder) or read_rows(folder / LOG)[0]):
        raise MetaTTTError(
            f"output_dir={folder} holds a run: resume it (resume={folder}; resume=auto resumes or starts), "
            "replace it (overwrite=true), or choose another folder"
        )
    foreign += [name for name in PICTURES if os.path.lexists(folder / name)]
    if foreign:
        raise MetaTTTError(
            f"output_dir={folder} holds {', '.join(foreign)}, which the run would write over: choose another folder"
        )


def remove_leftovers(folder: Path) -> None:
    """Removes incomplete files of a killed process. Call it only with the run's lock: another process may be writing.

    Raises:
        OSError: one that cannot be removed.
    """
    rolling.remove_leftovers(folder)
    for path in list(folder.iterdir()):
        if _LEFTOVER.fullmatch(path.name) and path.is_file():
            path.unlink()


def write_configuration(folder: Path, cfg: DictConfig) -> None:
    """Writes `run.yaml`, resolved, completely or not at all.

    Raises:
        MetaTTTError: it cannot be written.
    """
    try:
        write_whole(folder / CONFIGURATION, OmegaConf.to_yaml(cfg, resolve=True).encode())
    except OSError as error:
        raise _unusable(folder, error.strerror) from error


def read_configuration(folder: Path, trust: Collection[str] = ()) -> DictConfig:
    """The configuration of a started run; if the folder has moved, with paths in the new place.

    Args:
        folder: of the run.
        trust: modules of the user's whose classes it may name.

    Raises:
        MetaTTTError: a file that cannot be read, or names components that are not known.
    """
    path = folder / CONFIGURATION
    content = read_yaml(path)
    if not isinstance(content, dict) or not isinstance(content.get("output_dir"), str):
        raise MetaTTTError(f"{path} is not the configuration of a run: start the run again with output_dir={folder}")
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
    """The number of steps of a checkpoint."""
    done = content.get("global_step")
    if type(done) is not int or not 0 <= done < 2**62:
        raise MetaTTTError(
            f"{checkpoint} says that it has made {str(done)[:40]} steps: it is damaged, or not from a run"
        )
    if rolling.step_of(checkpoint) not in (None, done):  # by the names it is known which ones come after it
        raise MetaTTTError(f"{checkpoint} is of step {done}, and was renamed: give it its name back, step-{done:08}")
    return done


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder with checkpoints in it, and not a checkpoint that is itself a folder."""
    return path.is_dir() and rolling.step_of(path) is None and not rolling.is_ours(path)


def _end_at(done: int, cfg: DictConfig, folder: Path) -> None:
    """Handles checkpoints after the one from which a run resumes: damaged ones are renamed; others must not be mistaken
    for later checkpoints of the resumed run.

    Raises:
        MetaTTTError: there are such checkpoints, and `overwrite` is not set.
    """
    newer = [path for step, path in rolling.steps(folder) if step > done]
    if cfg.resume == AUTO or _is_folder(Path(cfg.resume).expanduser()):  # the newest readable one was used
        for path in newer:
            rolling.set_aside(path)
    elif newer and cfg.overwrite:
        rolling.remove_newer(folder, done)
    elif newer:
        raise MetaTTTError(
            f"the run has later checkpoints than {cfg.resume}, up to {newer[0].name}: to resume from there again, "
            "give another output_dir=<folder>, or overwrite=true to remove what came after"
        )


def _is_validated(cfg: DictConfig, step: int) -> bool:
    """Whether the validation after the last step is in the log; True without a CSV log."""
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
