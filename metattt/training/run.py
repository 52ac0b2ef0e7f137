"""The folder of a run and its starting point: new, at a checkpoint, or again from the start if it was killed before its
first checkpoint. A folder has one run at a time, no run overwrites another, and only files of a run are removed."""

from __future__ import annotations

import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf

from metattt.checkpoints import rolling
from metattt.checkpoints.files import find_checkpoint
from metattt.checkpoints.record import RECORD, modules, record_config
from metattt.checkpoints.trained import check_resumed, read_checkpoint
from metattt.errors import MetaTTTError, check_integer, check_number
from metattt.io import path_of, read_text, write_whole
from metattt.locking import locked
from metattt.metrics_file import LOG, STEP, of_validation, read_rows
from metattt.training.resume import check_paths, resumed
from metattt.training.saving import flag_of

AUTO = "auto"  # resume=auto
CONFIGURATION = "run.yaml"
"""In the folder of a run: its configuration, for people."""
PICTURE = "loss_curve.png"
_LEFTOVER = re.compile(rf"({re.escape(CONFIGURATION)}|{re.escape(LOG)})\.\d+\.part")


class Start(NamedTuple):
    """The starting point of a run."""

    cfg: DictConfig
    folder: Path
    checkpoint: Path | None  # from which it resumes; None: a new run
    content: Mapping[str, Any]  # of the checkpoint, without its tensors
    done: int  # steps
    moved: bool  # the command line says where the data is now
    complete: bool  # there is nothing left to do
    clear: Callable[[], object]  # removes what the run replaces: to be called when all else is known to be right


def check_given(cfg: DictConfig) -> None:
    """Raises an error for settings that exclude each other, or that Lightning would accept but train nothing with."""
    if cfg.resume == AUTO and not cfg.output_dir:
        raise MetaTTTError(f"resume={AUTO} resumes the run in output_dir, or starts it there: add output_dir=<folder>")
    if cfg.resume == AUTO and cfg.overwrite:
        raise MetaTTTError(f"resume={AUTO} keeps the run in output_dir, and overwrite=true does not: give one of them")
    steps = cfg.trainer.get("max_steps")
    check_integer("trainer.max_steps", steps, advice=": a run is counted in steps, and must end")
    for key, least in (("accumulate_grad_batches", 1), ("log_every_n_steps", 0)):  # Lightning fails later, unnamed
        if (value := cfg.trainer.get(key, 1)) is not None or least:
            check_integer(f"trainer.{key}", value, least)
    every, advice = cfg.trainer.get("val_check_interval"), ": give steps, or a share of the run as 0.25"
    if isinstance(every, float):
        check_number("trainer.val_check_interval", every, above=0, most=1, advice=advice)
    elif every is not None and not isinstance(every, str):  # a text is a time
        check_integer("trainer.val_check_interval", every, advice=advice)
    if cfg.trainer.get("gradient_clip_val") is not None:  # Lightning takes one below 0 for none
        check_number(
            "trainer.gradient_clip_val", cfg.trainer.gradient_clip_val, least=0, advice=", or null for no clipping"
        )
    if cfg.trainer.get("max_epochs") not in (None, -1):
        raise MetaTTTError(
            f"trainer.max_epochs={cfg.trainer.max_epochs} is not allowed: a run is counted in steps, set "
            "trainer.max_steps=<steps>"
        )
    if cfg.trainer.get("use_distributed_sampler"):  # each process would read a part of its part
        raise MetaTTTError("trainer.use_distributed_sampler=true is not allowed: the data divides itself, leave it out")
    saving = OmegaConf.select(cfg, "callbacks.checkpoint")
    if saving is not None and "folder" in saving and saving.folder != cfg.output_dir:
        raise MetaTTTError(
            f"callbacks.checkpoint.folder={saving.folder} is not allowed: a run and its checkpoints have one folder, "
            "set output_dir="
        )


@contextmanager
def opened(cfg: DictConfig, first: bool, say: Callable[[str], None]) -> Iterator[Start]:
    """A context with the starting point of a run, whose folder is locked meanwhile.

    Args:
        cfg: as it was composed.
        first: this is the first process of the run; the others lock, make and remove nothing.
        say: prints a line for the user.

    Raises:
        MetaTTTError: a folder that cannot be used or holds another run, a checkpoint that cannot be used, settings that
            would make it another run, or nothing left to do.
    """
    given = path_of(cfg.output_dir, "output_dir") if cfg.output_dir else None
    source = None  # the folder of the run that is resumed
    if cfg.resume == AUTO:
        source = given
    elif cfg.resume:
        path = Path(cfg.resume).expanduser()
        path = path if path.exists() else find_checkpoint(path)
        source = path if _is_folder(path) else rolling.run_of(path)
        source = source.parent if source.name == rolling.FOLDER else source
    folder = given or source
    try:
        if folder is None:
            folder = new_folder(cfg.get("name") or "run") if first else Path("runs")
        elif first:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if folder is not None and folder.is_file() else error.strerror
        place = folder or error.filename
        raise MetaTTTError(f"output_dir={place} cannot be used: {reason}; choose another folder") from error
    with locked(folder, "a training run") if first else nullcontext():
        yield _start(cfg, folder, source, first, say)


def new_folder(name: str) -> Path:
    """Makes a new folder `runs/<time>-<name>`, with a number after it if needed."""
    start = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    folder, count = start, 1
    start.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            folder.mkdir()  # of two runs that begin in one second, one makes it
            return folder
        except FileExistsError:
            count += 1
            folder = start.with_name(f"{start.name}-{count}")


def _start(given: DictConfig, folder: Path, source: Path | None, first: bool, say: Callable[[str], None]) -> Start:
    cfg, here = given, source is not None and folder.resolve() == source.resolve()
    checkpoint, done, moved = None, 0, False
    content: Mapping[str, Any] = {}
    clear: Callable[[], object] = lambda: None  # noqa: E731
    if here and first:
        remove_leftovers(folder)
    begun = source is not None and (source / CONFIGURATION).is_file() and not rolling.steps(source)
    if begun and given.resume != AUTO:
        raise MetaTTTError(
            f"{source} has no checkpoint yet: start the run again with the same command and overwrite=true or "
            "resume=auto"
        )
    if source is not None and (given.resume != AUTO or rolling.steps(source)):
        checkpoint = find_checkpoint(source if given.resume == AUTO else given.resume, fall_back=True)
        content = read_checkpoint(checkpoint, tensors="none")
        done = _steps_of(content, checkpoint)
        if here and first:
            clear = _end_at(done, given, folder)
        cfg, moved = resumed(given, record_config(content[RECORD], checkpoint, trust=modules(given.trust)))
        check_resumed(checkpoint, cfg)
        cfg.resume = str(checkpoint)
    cfg.output_dir = str(folder)
    mine = here and (checkpoint is not None or begun)
    if first:
        _check_logs(cfg, folder, mine or given.overwrite)
    if first and not mine:
        make_room(folder, given.overwrite)
        if given.overwrite:
            clear = partial(remove_run, folder)
    if source is not None:
        check_paths(cfg, given.given)
    last = _validations(cfg, done)
    complete = 0 < cfg.trainer.get("max_steps", -1) <= done and len(last) > 0
    if complete:
        line = f"the run {checkpoint} is complete at step {done}: to train on, add trainer.max_steps=<more>"
        if given.resume != AUTO:
            raise MetaTTTError(line)
        if not math.isfinite(last[-1]):  # again: a sweep that is resumed takes it for no result either
            raise MetaTTTError(
                f"{line}. Its last validation loss is {last[-1]}: to start again, give overwrite=true in place of "
                f"resume={AUTO}"
            )
        say(line)
    elif given.resume == AUTO and flag_of(content, "ended_early"):
        complete = True
        say(f"the run {checkpoint} is complete: it was stopped early at step {done}; resume={folder} trains on")
    return Start(cfg, folder, checkpoint, content, done, moved, complete, clear)


def make_room(folder: Path, overwrite: bool) -> None:
    """Raises an error for a folder with a run in it, unless `overwrite`, and for other files that a run would write
    over."""
    foreign = [f"{rolling.FOLDER}/{path.name}" for _, path in rolling.steps(folder) if not rolling.is_ours(path)]
    for name, ours in ((LOG, _is_log), (CONFIGURATION, _is_configuration)):
        path = folder / name
        if path.is_symlink() or (path.exists() and not ours(path)):
            foreign.append(name)
    if not overwrite and not foreign and (rolling.steps(folder) or read_rows(folder / LOG)[0]):
        raise MetaTTTError(
            f"output_dir={folder} holds a run: resume it (resume={folder}; resume=auto resumes or starts), "
            "replace it (overwrite=true), or choose another folder"
        )
    if not overwrite:
        foreign += [PICTURE] if os.path.lexists(folder / PICTURE) else []
    if foreign:
        raise MetaTTTError(
            f"output_dir={folder} holds {', '.join(foreign)}, which does not belong to a run and would be written "
            "over: move it, or choose another folder"
        )


def _check_logs(cfg: DictConfig, folder: Path, mine: bool) -> None:
    """Raises an error for a log outside the folder that is not `mine` and has rows, or is no log, such as /dev/null."""
    for path in _logs(cfg):
        elsewhere = path.parent.resolve() != folder.resolve()
        if elsewhere and (path.is_symlink() or (path.exists() and not _is_log(path))):
            raise MetaTTTError(f"{path} is no log of a run: give another path, or logger.csv=null to write none")
        if elsewhere and not mine and read_rows(path)[0]:
            raise MetaTTTError(f"{path} is the log of another run: give another path, or overwrite=true")


def remove_run(folder: Path) -> None:
    """Removes a run: its checkpoints, log and configuration, and nothing else."""
    rolling.remove_newer(folder, -1)
    remove_leftovers(folder)
    events = (folder / "tensorboard").glob("events.out.tfevents.*")  # TensorBoard would join them with the next run's
    for path in (folder / LOG, folder / CONFIGURATION, *events):
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Removes incomplete files of a killed process. Only for who holds the run's lock: another may be writing."""
    rolling.remove_leftovers(folder)
    for path in list(folder.iterdir()):
        if _LEFTOVER.fullmatch(path.name) and path.is_file():
            path.unlink()


def write_configuration(folder: Path, cfg: DictConfig) -> None:
    """Writes `run.yaml`, resolved, completely or not at all, below the versions that the run has."""
    from metattt import __version__

    versions = f"# metattt {__version__}, torch {torch.__version__}, Python {platform.python_version()}\n"
    write_whole(folder / CONFIGURATION, (versions + OmegaConf.to_yaml(cfg, resolve=True)).encode())


def _steps_of(content: Mapping[str, Any], checkpoint: Path) -> int:
    """The number of steps of a checkpoint."""
    done = content.get("global_step")
    if type(done) is not int or not 0 <= done < 2**62:
        raise MetaTTTError(
            f"{checkpoint} is not a checkpoint of a run: to start a run from its weights, set init_from="
        )
    if rolling.step_of(checkpoint) not in (None, done):  # by the names it is known which ones come after it
        raise MetaTTTError(f"{checkpoint} is of step {done}, and was renamed: give it its name back, step-{done:08}")
    return done


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder with checkpoints in it, and not a checkpoint that is itself a folder."""
    return path.is_dir() and rolling.step_of(path) is None and not rolling.is_ours(path)


def _end_at(done: int, cfg: DictConfig, folder: Path) -> Callable[[], object]:
    """What is done to checkpoints after the one from which a run resumes: damaged ones are renamed; others, which must
    not be mistaken for later checkpoints of the resumed run, are removed if `overwrite` is set, or raise an error."""
    newer = [path for step, path in rolling.steps(folder) if step > done]
    if cfg.resume == AUTO or _is_folder(Path(cfg.resume).expanduser()):  # the newest readable one was used
        return lambda: [rolling.set_aside(path) for path in newer]
    if newer and not cfg.overwrite:
        raise MetaTTTError(
            f"the run has later checkpoints than {cfg.resume}, up to {newer[0].name}: to resume from there again, "
            "give another output_dir=<folder>, or overwrite=true to remove what came after"
        )
    return partial(rolling.remove_newer, folder, done)


def _validations(cfg: DictConfig, step: int) -> list[float]:
    """The losses of validations after a step in the logs, 0 where a validation has none; one 0 without a CSV log."""
    logs = _logs(cfg)
    rows = [row for path in logs for row in read_rows(path)[0] if int(row[STEP]) == step and of_validation(row)]
    return [float(row.get("validation/loss") or 0) for row in rows] if logs else [0.0]


def _logs(cfg: DictConfig) -> list[Path]:
    """The files of the CSV logs of a run."""
    made = [one for one in (cfg.get("logger") or {}).values() if isinstance(one, DictConfig)]
    return [Path(one.path) for one in made if str(one.get("_target_")).endswith(".CSVLog")]


def _is_log(path: Path) -> bool:
    rows, damage = read_rows(path)
    return bool(rows) or not damage


def _is_configuration(path: Path) -> bool:
    try:
        text = read_text(path, 2**20)
    except MetaTTTError:
        return False
    return all(re.search(f"^{key}:", text, re.MULTILINE) for key in ("output_dir", "trainer", "layer"))
