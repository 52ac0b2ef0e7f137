"""`-m`: from overrides that name several values to the cells of a sweep, by Hydra's own sweepers and launchers."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metattt.composition.choices import choices, keys_of
from metattt.composition.compose import compose
from metattt.composition.flags import SEARCH_PATH
from metattt.composition.information import application
from metattt.composition.messages import explain_composition
from metattt.composition.overrides import prepare
from metattt.errors import MetaTTTError
from metattt.locking import FolderLock
from metattt.optional import need
from metattt.sweeps.cell import RunCell
from metattt.sweeps.record import Sweep, difference, read_sweep, same, write_sweep

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

OF_THE_SWEEP = ("output_dir", "resume", "overwrite")
"""Keys of a command that a sweep sets, or that only a single run has."""

LIBRARIES = ("joblib", "loky", "submitit", "optuna", "hydra_plugins", "sqlalchemy")
"""Of launchers and sweepers: what they raise is a line, and no bug of ours."""


def sweep(command: str, module: str, overrides: Sequence[str]) -> int:
    """Runs a command once for each cell, or goes on with a sweep that was stopped, and prints the table.

    Args:
        command: of metattt.
        module: that it is in.
        overrides: as they were typed; some name several values.

    Returns:
        The exit code: 0; 1 if a cell did not finish; 130 after Ctrl-C.

    Raises:
        MetaTTTError: an override that is wrong for any cell, or a folder that cannot be used.
    """
    _check_plugins(overrides)
    with application(command) as app:
        prepared, parsed, typed = _read(overrides, command, app)
        for one in parsed:
            if one.key_or_group in OF_THE_SWEEP and one.key_or_group in keys_of(command):
                raise MetaTTTError(
                    f"`{one.input_line}` is of a single run: the cells of a sweep have folders of their own in "
                    "hydra.sweep.dir=<folder>, and the same command with that folder goes on with the sweep"
                )
        ours = [(one, written) for one, written in zip(parsed, typed, strict=True) if not _is_of_hydra(one)]
        try:
            cfg = app.compose_config(command, prepared, RunMode.MULTIRUN)
            _check_intervals(parsed, cfg)
        except (HydraException, OmegaConfBaseException) as error:
            _check_every_value(ours, command)  # in the words for a single run, if it is about one
            raise MetaTTTError(explain_composition(error, command)) from error
        _check_every_value(ours, command)
        folder = Path(str(cfg.hydra.sweep.dir))
        fixed = [written for one, written in ours if not one.is_sweep_override()]
        fixed_keys = [one.key_or_group for one, _ in ours if not one.is_sweep_override()]
        planned = Sweep(command, fixed, _cells(parsed, cfg, fixed_keys))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MetaTTTError(
                f"hydra.sweep.dir={folder} cannot be used: {error.strerror}; choose another folder"
            ) from error
        with FolderLock(folder, "a sweep"):
            planned = _planned(folder, planned)
            write_sweep(folder, planned)
            cell = RunCell(
                command, module, fixed, fixed_keys, tuple(key for key in ("output_dir", "resume", "trust") if key in keys_of(command)),
                _trusted(overrides), str(cfg.get("objective") or ""), not _is_basic(cfg), os.getpid(),
            )  # fmt: skip
            count = f"{len(planned.cells)} cell{'s' if len(planned.cells) > 1 else ''}" if planned.cells else "cells"
            print(f"sweep   {count} of `metattt {command}` -> {folder}", flush=True)
            # deletions are put back by the cell: Hydra's sweepers would write `~key` as `~key=null`
            kept = [text for text, one in zip(prepared, parsed, strict=True) if one.type != OverrideType.DEL]
            code = _launch(app, command, cell, [*kept, *_defaults(cfg, overrides, folder, fixed_keys)])
    return _report(folder, command, code)


def _launch(app: Hydra, command: str, cell: RunCell, overrides: list[str]) -> int:
    """Hydra's sweep; its exit code."""
    try:
        app.multirun(command, cell, overrides)
    except KeyboardInterrupt:
        return 130
    except (HydraException, OmegaConfBaseException) as error:
        raise MetaTTTError(explain_composition(error, command)) from error
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if not any(f"/{library}/" in frame.filename for library in LIBRARIES):
            raise
        lines = str(error).strip().splitlines()
        print(f"sweep   {type(error).__name__}: {lines[0] if lines else ''}", flush=True)
        return 1
    return 0


def _report(folder: Path, command: str, code: int) -> int:
    """The table, and what is left to do; the exit code."""
    from metattt.sweeps.table import tell

    unfinished = tell(folder)
    if unfinished or code:
        count = f"{unfinished} cells have" if unfinished != 1 else "1 cell has"
        print(f"sweep   {count} not finished: the same command with hydra.sweep.dir={folder} goes on", flush=True)
    return code or (1 if unfinished else 0)


def _check_plugins(overrides: Sequence[str]) -> None:
    """Refuses launchers and sweepers that are not installed."""
    for override in overrides:
        if override == "hydra/launcher=joblib":
            need("hydra_plugins.hydra_joblib_launcher", extra="sweep", what=override)
        elif override.startswith("hydra/launcher=submitit_"):
            need("hydra_plugins.hydra_submitit_launcher", extra="sweep", what=override)
        elif override == "hydra/sweeper=optuna":
            need("hydra_plugins.hydra_optuna_sweeper", extra="sweep", what=override)


def _read(overrides: Sequence[str], command: str, app: Hydra) -> tuple[list[str], list[Override], list[str]]:
    """Overrides in Hydra's syntax, what they say, and as they were typed. Of several for one key the last counts, as
    in a single run: it may name one value where an earlier one names several, and the other way round."""
    prepared = prepare(overrides, command, sweep=True)
    parsed = OverridesParser.create(config_loader=app.config_loader).parse_overrides(prepared)
    typed = [one for one in overrides if one != "experiment=null"]  # which `prepare` leaves out
    last = {one.get_key_element(): place for place, one in enumerate(parsed)}
    kept = sorted(last.values())
    return [prepared[place] for place in kept], [parsed[place] for place in kept], [typed[place] for place in kept]


def _is_of_hydra(override: Override) -> bool:
    """Whether it is a setting of the sweep; where files are is one of every cell."""
    key = override.key_or_group
    return key.partition("/")[0].partition(".")[0] == "hydra" and key != SEARCH_PATH


def _values(override: Override) -> list[str]:
    """The overrides that one with several values stands for; of a range the first, of an interval its ends.

    Raises:
        MetaTTTError: a pattern that nothing fits.
    """
    key = override.get_key_element()
    if override.is_interval_sweep():
        value = override.value()
        return [f"{key}={value.start}", f"{key}={value.end}"]  # type: ignore[union-attr]
    found = [f"{key}={value}" for value in override.sweep_string_iterator()]
    if not found:
        names = ", ".join(sorted(choices(override.key_or_group)))
        raise MetaTTTError(f"`{override.input_line}` fits none of the choices of {override.key_or_group}: {names}")
    return found if not override.is_range_sweep() else found[:1]


def _check_every_value(ours: Sequence[tuple[Override, str]], command: str) -> None:
    """Composes single runs in which every value occurs: what is wrong with one shows before anything runs.

    Raises:
        MetaTTTError: what is wrong.
    """
    values = [_values(one) if one.is_sweep_override() else [typed] for one, typed in ours]
    first = [several[0] for several in values]
    compose(*first, job=command)
    for place, several in enumerate(values):
        for value in several[1:]:
            compose(*first[:place], value, *first[place + 1 :], job=command)


def _is_basic(cfg: DictConfig) -> bool:
    return str(cfg.hydra.sweeper._target_).endswith(".BasicSweeper")


def _check_intervals(parsed: Sequence[Override], cfg: DictConfig) -> None:
    for one in parsed:
        if one.is_interval_sweep() and _is_basic(cfg):
            raise MetaTTTError(
                f"`{one.input_line}` is for a sweeper that chooses in it: add hydra/sweeper=optuna, or name values, {one.key_or_group}=a,b"
            )


def _cells(parsed: Sequence[Override], cfg: DictConfig, fixed_keys: Sequence[str]) -> list[list[str]]:
    """The cells of a grid; none if the sweeper makes them up on the way."""
    if not _is_basic(cfg):
        return []
    words = [f"{key}={value}" for key, value in (cfg.hydra.sweeper.params or {}).items()]
    given = OverridesParser.create(config_loader=None).parse_overrides(words) if words else []
    swept = [*given, *(one for one in parsed if not _is_of_hydra(one) and one.key_or_group not in fixed_keys)]
    batches = BasicSweeper.split_arguments(swept, None)
    return [sorted(cell) for batch in batches for cell in batch]


def _planned(folder: Path, planned: Sweep) -> Sweep:
    """The sweep with the cells that it had before, in the same folder.

    Raises:
        MetaTTTError: the folder holds another sweep, or a run.
    """
    before = read_sweep(folder)
    if before is None:
        if (folder / "run.yaml").exists() or (folder / "metrics.csv").exists():
            raise MetaTTTError(f"hydra.sweep.dir={folder} holds a run: choose another folder for the sweep")
        return planned
    if before.command != planned.command or not same(before.fixed, planned.fixed):
        changed = difference(
            [f"metattt {before.command}", *before.fixed], [f"metattt {planned.command}", *planned.fixed]
        )
        raise MetaTTTError(
            f"hydra.sweep.dir={folder} holds a sweep that was started {_reversed(changed)}: choose another folder"
        )
    known = [cell for cell in before.cells if cell not in planned.cells]
    return planned._replace(cells=[*known, *planned.cells])


def _reversed(changed: str) -> str:
    """What differs, as the earlier sweep had it."""
    return changed.replace("without ", "\0").replace("with ", "without ").replace("\0", "with ")


def _trusted(overrides: Sequence[str]) -> str | None:
    """The modules of the user's whose classes the overrides name: a checkpoint of a cell may name them as well."""
    if any(one.startswith("trust=") for one in overrides):
        return None
    found = [one.partition("=")[2] for one in overrides if one.partition("=")[0].endswith("._target_")]
    named = sorted(
        {one.rpartition(".")[0] for one in found if not one.startswith(("metattt.", "torch.", "lightning."))} - {""}
    )
    return None if not named else named[0] if len(named) == 1 else f"[{','.join(named)}]"


def _defaults(cfg: DictConfig, overrides: Sequence[str], folder: Path, fixed_keys: Sequence[str]) -> list[str]:
    """Settings of Hydra's that a sweep has where nobody says otherwise."""
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    settings = [f"hydra.sweep.dir='{quoted}'"]  # with the time that the lock was taken for
    node = OmegaConf.to_container(cfg.hydra, resolve=False)
    assert isinstance(node, dict)
    if node["sweep"]["subdir"] == "${hydra.job.num}":  # a cell is found again by what it is
        settings.append("hydra.sweep.subdir='${metattt_cell:${hydra.job.override_dirname}}'")
        settings.append("hydra.job.config.override_dirname.item_sep='+'")  # a comma would separate values in an override
        keys = ",".join(f"'{key}'" for key in fixed_keys)
        settings.append(f"hydra.job.config.override_dirname.exclude_keys=[{keys}]")
    for group in ("hydra/job_logging", "hydra/hydra_logging"):  # a line for every cell says it; its output is in a file
        if cfg.hydra.runtime.choices.get(group) == "default":
            settings.append(f"{group}=none")
    if cfg.hydra.runtime.choices.get("hydra/sweeper") == "optuna":
        if not any(one.startswith("hydra.sweeper.max_failure_rate=") for one in overrides):
            settings.append("hydra.sweeper.max_failure_rate=1.0")  # one bad cell does not stop the others
        sampler = node["sweeper"].get("sampler") or {}
        if "seed" in sampler and sampler["seed"] is None:
            settings.append("hydra.sweeper.sampler.seed=0")  # so that it proposes the same cells when it goes on
    return settings
