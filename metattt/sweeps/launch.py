"""`-m`: Hydra's multirun, with its sweepers and launchers; what is wrong with any value shows before anything runs."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metattt.composition.application import application
from metattt.composition.choices import choices, keys_of
from metattt.composition.components import COMPONENTS, JOB_COMPONENTS, load_components
from metattt.composition.compose import compose
from metattt.composition.messages import explain_composition
from metattt.composition.overrides import in_full, is_of_hydra, key_of, prepare, quoted, without_null
from metattt.errors import MetaTTTError, check_choice
from metattt.io import path_of
from metattt.locking import LOCK
from metattt.metrics_file import LOG
from metattt.optional import need
from metattt.sweeps.record import STATUS, read_status
from metattt.sweeps.run import STOPPED, STOPPING, SweptRun
from metattt.sweeps.table import tell

OF_THE_SWEEP = ("output_dir", "resume", "overwrite")
"""Keys of a command that a sweep sets, or that only a single run has."""

PLUGINS = {
    "launcher=joblib": "hydra_plugins.hydra_joblib_launcher",
    "launcher=submitit_": "hydra_plugins.hydra_submitit_launcher",
    "sweeper=optuna": "hydra_plugins.hydra_optuna_sweeper",
}

NOTE_SECONDS = 10  # for a run's process to end, and for its worker to write how

DEFAULTS = (  # a run is found again by what it is; a line for every one says it, its output is in a file
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
    "hydra.sweep.subdir='${metattt_run:${hydra.job.override_dirname}}'",
    "hydra.job.config.override_dirname.item_sep='+'",
)


def sweep(command: str, overrides: Sequence[str]) -> int:
    """Runs a command once for each combination of values, or goes on with a sweep that was stopped, and prints the
    table.

    Args:
        command: of metattt.
        overrides: as they were typed; some name several values.

    Returns:
        The exit code: 0; 1 if a run did not finish; 130 after Ctrl-C, 143 after SIGTERM, 138 after SIGUSR1.

    Raises:
        MetaTTTError: an override that is wrong for any run, or a folder that cannot be used.
    """
    for override in overrides:
        for choice in PLUGINS:
            if re.match(f"hydra/{choice}", override):
                need(PLUGINS[choice], extra="sweep", what=override)
    load_components(COMPONENTS + JOB_COMPONENTS.get(command, ()))
    with application(command) as app:
        prepared = prepare(overrides, command, sweep=True)
        parsed = OverridesParser.create(config_loader=app.config_loader).parse_overrides(prepared)
        rows = list(zip(parsed, prepared, without_null(overrides), strict=True))
        keys = [one.get_key_element() for one in parsed]
        # of several for one key the last counts, as in a single run
        given = [row for place, row in enumerate(rows) if keys[place] not in keys[place + 1 :]]
        for one, _, written in given:
            if one.key_or_group in OF_THE_SWEEP and one.key_or_group in keys_of(command):
                raise MetaTTTError(
                    f"`{written}` is of a single run: the runs of a sweep have folders of their own in "
                    "hydra.sweep.dir=<folder>, and the same command with that folder resumes the sweep"
                )
        ours = [(one, written) for one, _, written in given if not is_of_hydra(one.key_or_group)]
        try:
            cfg = app.compose_config(command, [text for _, text, _ in given], RunMode.MULTIRUN)
        except (HydraException, OmegaConfBaseException) as error:
            _check_every_value(ours, command)  # in the words for a single run, if it is about one
            raise MetaTTTError(explain_composition(error, command)) from error
        direction = OmegaConf.select(cfg, "hydra.sweeper.direction", default="minimize")  # a run tells one number
        check_choice("hydra.sweeper.direction", str(direction).removeprefix("Direction."), ("minimize", "maximize"))
        basic = str(cfg.hydra.sweeper._target_).endswith(".BasicSweeper")
        for one, written in ours if basic else ():
            if one.is_interval_sweep():
                way = f"add hydra/sweeper=optuna, or name values, {one.key_or_group}=a,b"
                raise MetaTTTError(f"`{written}` needs a sweeper that chooses values from it: {way}")
        _check_every_value(ours, command)
        # what the sweeper is told changes no run: with another objective a sweep goes on
        told = [one for one, _ in ours if one.key_or_group == "objective" and not one.is_sweep_override()]
        fixed = [written for one, written in ours if not one.is_sweep_override() and one not in told]
        folder = path_of(str(cfg.hydra.sweep.dir), "hydra.sweep.dir")
        _check_folder(folder, [f"metattt {command}", *fixed])
        known = keys_of(command)
        own = ["resume=auto"] if "resume" in known else []
        objective = str(cfg.get("objective") or "")
        run = SweptRun(command, fixed, own, "output_dir" in known, objective, not basic, os.getpid())
        print(f"sweep   `metattt {command}` -> {folder}", flush=True)
        # deletions are put back by the run: Hydra's sweepers would write `~key` as `~key=null`
        kept = [text for one, text, _ in given if one.type != OverrideType.DEL and one not in told]
        try:
            with _stopped_by_the_sweep(folder, run):
                app.multirun(command, run, [*_defaults(cfg, fixed), *kept, f"hydra.sweep.dir={quoted(str(folder))}"])
            code = 0
        except KeyboardInterrupt:
            code = 130
        except SystemExit as stop:
            code = int(str(stop.code))
        except (HydraException, OmegaConfBaseException) as error:
            raise MetaTTTError(explain_composition(error, command)) from error
        except ValueError as error:
            if "No trials are completed" not in str(error):  # Optuna's, where all runs failed: the table says why
                raise
            code = 1
    unfinished = tell(folder)
    if unfinished or code:
        print(f"sweep   not finished: the same command with hydra.sweep.dir={folder} resumes it", flush=True)
    return code or (1 if unfinished else 0)


def _values(override: Override, typed: str) -> list[str]:
    """The overrides that one stands for: one with several values for each of them, of a range the first, of an interval
    its ends; another for itself, as it was typed."""
    if not override.is_sweep_override():
        return [typed]
    key = override.get_key_element()
    if override.is_interval_sweep():
        value = override.value()
        return [f"{key}={value.start}", f"{key}={value.end}"]  # type: ignore[union-attr]
    found = [f"{key}={value}" for value in override.sweep_string_iterator()]
    if not found:
        names = ", ".join(sorted(choices(override.key_or_group)))
        why = f"fits none of the choices of {override.key_or_group}: {names}" if names else "is an empty range"
        raise MetaTTTError(f"`{override.input_line}` {why}")
    return found if not override.is_range_sweep() else found[:1]


def _check_every_value(ours: Sequence[tuple[Override, str]], command: str) -> None:
    """Composes single runs in which every value occurs: what is wrong with one shows before anything runs."""
    values = [_values(one, typed) for one, typed in ours]
    first = [several[0] for several in values]
    compose(*first, job=command)
    for place, several in enumerate(values):
        for value in several[1:]:
            compose(*first[:place], value, *first[place + 1 :], job=command)


def _check_folder(folder: Path, fixed: list[str]) -> None:
    """Refuses the folder of a run, and that of a sweep whose runs have other settings."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "run.yaml").exists() or (folder / LOG).exists():
        raise MetaTTTError(f"hydra.sweep.dir={folder} holds a run: choose another folder for the sweep")
    for file in sorted(folder.glob(f"*/{STATUS}")):
        before = read_status(file.parent)
        if before is not None and sorted(before.fixed) != sorted(fixed):
            gone = [one for one in before.fixed if one not in fixed]
            parts = {"with": gone, "without": [one for one in fixed if one not in before.fixed]}
            changed = " and ".join(f"{word} {' '.join(ones)}" for word, ones in parts.items() if ones)
            raise MetaTTTError(
                f"hydra.sweep.dir={folder} holds a sweep that was started {changed}: choose another folder"
            )


@contextmanager
def _stopped_by_the_sweep(folder: Path, run: SweptRun) -> Iterator[None]:
    """A context in which a signal first lets the runs write checkpoints: joblib then kills its workers, and all that
    they have started. A second signal does not wait."""
    mark = folder / STOPPING

    def stop(number: int, _: object) -> None:
        for one, previous in before.items():
            signal.signal(one, previous)
        mark.touch()
        found = [] if run.here else sorted(folder.glob(f"*/{LOCK}"))  # what runs here is stopped by the exception
        for file in found:
            with FileLock(file):  # which a training run holds until it has written all
                file.unlink(missing_ok=True)
        end = time.monotonic() + NOTE_SECONDS
        while time.monotonic() < end and any(getattr(read_status(x.parent), "state", "") == "running" for x in found):
            time.sleep(0.1)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    mark.unlink(missing_ok=True)
    heard = [code - 128 for code in STOPPED if signal.getsignal(code - 128) is not signal.SIG_IGN]  # as of one run
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
        mark.unlink(missing_ok=True)


def _defaults(cfg: DictConfig, fixed: Sequence[str]) -> list[str]:
    """Settings of Hydra's that a sweep has where nobody says otherwise."""
    keys = ",".join(quoted(key_of(in_full(one))) for one in fixed)
    settings = [*DEFAULTS, f"hydra.job.config.override_dirname.exclude_keys=[{keys}]"]
    if cfg.hydra.runtime.choices.get("hydra/sweeper") == "optuna":
        settings.append("hydra.sweeper.max_failure_rate=1.0")  # one bad run does not stop the others
        if OmegaConf.select(cfg, "hydra.sweeper.sampler.seed", default=0) is None:
            settings.append("hydra.sweeper.sampler.seed=0")  # so that it proposes the same runs when it goes on
    return settings
