"""Resuming a run: its configuration with the changes of the command line, and its data, which may have moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from metattt.composition.choices import choices, leaves
from metattt.composition.compose import compose
from metattt.composition.overrides import key_of, left_out
from metattt.errors import MetaTTTError

#: what a resumed run may change: parts, and single values that leave its batches and its model as they are
RESUMABLE = ("trainer", "callbacks", "logger", "sample", "on_divergence", "compile", "data.num_workers")
BATCHES_OF_A_STEP = "trainer.accumulate_grad_batches"  # it follows the number of processes by itself
MOVABLE = ("data.path", "data.validation_path")  # where the same data is now
OF_THE_COMMAND = ("resume", "overwrite", "output_dir", "given", "name", "trust", "objective")
PATHS = ("path", "folder", "dirpath", "save_dir", "default_root_dir")  # keys of what they write
WRITE = ("trainer", "callbacks", "logger")  # parts that write files
PLACEMENT = ("trainer.strategy", "trainer.devices", "trainer.num_nodes")  # what a choice of trainer=<name> is about


def resumed(given: DictConfig, saved: DictConfig) -> tuple[DictConfig, bool]:
    """The configuration of the run, with what the command line changes.

    Values that were given (`given.given`) count even if they equal a default, and so do the values of a choice such as
    `layer=ttt_mlp` that differ from the defaults. Model, data and recipe must not change: it would be another run, and
    raises an error. Also returned: whether the command line gives a new place of the data.
    """
    default, before, wanted = (leaves(OmegaConf.to_container(one)) for one in (compose(job="train"), saved, given))
    keys, chosen, deleted = _said(given.given)
    for key in deleted:
        if OmegaConf.select(saved, key) is not None:
            _check_resumable(key, f"~{key}")
            owner, _, name = key.rpartition(".")
            del (OmegaConf.select(saved, owner) if owner else saved)[name]
    moved = False
    for key, value in wanted.items():
        part = key.partition(".")[0]
        explicit = _inside(key, keys) or (part in chosen and (key == f"{part}._target_" or _inside(key, PLACEMENT)))
        # data=images or logger=wandb once more says which it is, not that every setting is at its default
        kind = f"{'data' if part == 'data' else '.'.join(key.split('.')[:2])}._target_"
        repeated = part in ("data", "logger", "callbacks") and part in chosen and wanted.get(kind) == before.get(kind)
        silent = not explicit and (repeated or (key in default and default[key] == value))
        if key in OF_THE_COMMAND or silent or (key in before and before[key] == value):
            continue
        if key in MOVABLE and key in before:
            moved = True
        else:
            groups = [one for one in given.given if key_of(one) in chosen.difference(RESUMABLE)]
            _check_resumable(key, f"{key}={value}" if _inside(key, keys) or not groups else " ".join(groups))
        owner = key.rpartition(".")[0]
        if key.endswith("._target_"):  # another component: nothing of the old one stays
            OmegaConf.update(saved, owner, OmegaConf.select(given, owner), merge=False, force_add=True)
        OmegaConf.update(saved, key, value, force_add=True)
    said = {key_of(one): one for one in [*(saved.get("given") or []), *given.given] if key_of(one) != "resume"}
    OmegaConf.update(saved, "given", [*said.values()], force_add=True)
    OmegaConf.update(saved, "trust", given.get("trust"), force_add=True)  # never from the file
    return saved, moved


def check_paths(cfg: DictConfig, overrides: Iterable[str]) -> None:
    """Raises an error for output paths of a resumed run, whose configuration is from a file, that are outside the run's
    folder and not given on the command line (`overrides`)."""
    keys, _, _ = _said(overrides)
    home = Path(cfg.output_dir).resolve()
    for part in WRITE:
        for key, value in leaves(OmegaConf.to_container(cfg.get(part) or {}, resolve=True), part).items():
            leads = isinstance(value, str) and (
                key.rpartition(".")[2] in PATHS or value.startswith(("/", "~")) or ".." in value
            )
            if leads and not Path(value).expanduser().resolve().is_relative_to(home) and not _inside(key, keys):
                raise MetaTTTError(f"{key}={value} of the run is outside {home}: to allow it, add ++{key}={value}")


def _check_resumable(key: str, said: str) -> None:
    if key == BATCHES_OF_A_STEP:
        raise MetaTTTError(f"{said} would change how much a step of the run that is resumed reads: leave it out")
    if not _inside(key, RESUMABLE):
        allowed = ", ".join([*(f"{part}.*" if part in WRITE else part for part in RESUMABLE), *MOVABLE])
        raise MetaTTTError(
            f"{said} would change the run that is resumed: only {allowed} may be given. "
            "init_from=<run> in place of resume= starts another run from its weights"
        )


def _said(overrides: Iterable[str]) -> tuple[set[str], set[str], list[str]]:
    """The contents of overrides: keys with a value, groups with a choice, and removed keys."""
    keys: set[str] = set()
    chosen: set[str] = set()
    deleted: list[str] = []
    for override in (left_out(one.lstrip("+")) for one in overrides):  # +callbacks.<name>=null: of the run alone
        key = key_of(override)
        if override.startswith("~"):
            deleted.append(key)
        else:
            (chosen if "." not in key and choices(key) else keys).add(key)
    return keys, chosen, deleted


def _inside(key: str, owners: Iterable[str]) -> bool:
    return any(key == owner or key.startswith(f"{owner}.") for owner in owners)


def check_same_data(record: Mapping[str, Any], data: Any, moved: bool) -> str | None:
    """Compares the data of a resumed run, which is set up, with that in the record of its checkpoint. Other data at a
    place that the command line gives (`moved`) raises an error, as do classes of other names or in another order; of
    other data at the old place, a line says so."""
    before, now = record.get("data"), data.fingerprint()
    classes, named = record.get("classes"), getattr(data, "class_names", None)
    if classes and named and list(classes) != list(named):
        one, other = next((a, b) for a, b in zip_longest(classes, named) if a != b)
        raise MetaTTTError(
            f"data.path={getattr(data, 'path', None)} has the class {other!r} where the run that is resumed has "
            f"{one!r}: give folders their names back, or start a run with init_from=<the checkpoint>"
        )
    if before == now or str(now).startswith(f"{before} "):  # a record of an older version, which tells less
        return None
    if moved:
        raise MetaTTTError(
            f"data.path={getattr(data, 'path', None)} does not hold the data that the run was trained on, which resume "
            "needs. To train on other data, start a run with init_from=<the checkpoint>"
        )
    return "data    has changed since the run was started: its order, and perhaps the validation data, are others"
