"""Where a run begins: anew, at a checkpoint, or at the beginning of one that was killed before it wrote any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from metattt.checkpoints import rolling
from metattt.checkpoints.files import find_checkpoint
from metattt.checkpoints.record import RECORD, record_config
from metattt.checkpoints.trained import check_resumed, read_checkpoint
from metattt.checkpoints.trust import modules
from metattt.errors import MetaTTTError
from metattt.locking import FolderLock
from metattt.training.beforehand import AUTO, check_before_training
from metattt.training.csv_log import CSVLog
from metattt.training.resume import check_paths, resumed
from metattt.training.run_folder import (
    check_free,
    clear,
    has_checkpoint,
    is_begun,
    lock_folder,
    new_folder,
    read_configuration,
    remove_leftovers,
    write_configuration,
)


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


def open_run(cfg: DictConfig, first: bool) -> Opened:
    """Finds or makes the folder of a run, and locks it.

    Args:
        cfg: as it was composed.
        first: this is the first process of the run; the others make nothing.

    Raises:
        MetaTTTError: no such run, or a folder that cannot be used.
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
    return Opened(folder, source, lock_folder(folder) if first else None)


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
    if source is not None and (has_checkpoint(source) or not (cfg.resume == AUTO or is_begun(source))):
        checkpoint = find_checkpoint(source if given.resume == AUTO else given.resume, fall_back=True)
        content = read_checkpoint(checkpoint, tensors="none")
        done = _steps_of(content, checkpoint)
        if here and lock is not None:
            _end_at(done, given, folder)
        record = record_config(content[RECORD], checkpoint, trust=modules(given.trust))
        cfg, moved = resumed(given, record)
        check_resumed(checkpoint, cfg)
        cfg.resume = str(checkpoint)
    elif source is not None and cfg.resume != AUTO:
        cfg, moved = resumed(given, read_configuration(source, modules(given.trust)))
        say(f"{source} has no checkpoint yet: the run begins again, with its own configuration")
    if lock is not None and not (here and (checkpoint is not None or is_begun(folder))):
        clear(folder) if given.overwrite else check_free(folder)
    cfg.output_dir = str(folder)
    if source is not None:
        check_paths(cfg, given.given)
    complete = 0 < cfg.trainer.get("max_steps", -1) <= done and _is_validated(cfg, done)
    if complete:
        line = f"the run {checkpoint} is complete at step {done}: to train on, add trainer.max_steps=<more>"
        if given.resume != AUTO:
            raise MetaTTTError(line)
        say(line)
    else:
        check_before_training(cfg)
        if lock is not None:
            write_configuration(folder, cfg)
    return Start(cfg, folder, checkpoint, content, done, moved, complete)


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
