"""Which classes can be composed: those registered in our packages, and in the installed packages of others."""

import importlib
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

from metattt.composition.announced import announced
from metattt.composition.signatures import Unreadable, constructor, find_source, registered
from metattt.errors import MetaTTTError
from metattt.registry import PARAMETERS, store

COMPONENTS = ("metattt.learners", "metattt.tasks", "metattt.optimizers", "metattt.mixers")
"""Packages of ours with classes that register themselves."""

TRAINER = "lightning.Trainer"

LOGGERS = {
    "WandbLogger": "name save_dir id offline project entity group tags notes job_type",
    "MLFlowLogger": "experiment_name run_name run_id tracking_uri tags artifact_location",
}
"""Loggers of Lightning, and the keys that a configuration may set: all others go to their libraries as they are."""

JOB_COMPONENTS = {
    "train": ("metattt.models", "metattt.data", "metattt.training"),
    "language_model": ("metattt.models",),
}
"""The same for one job only."""


def load_components(packages: Iterable[str] = COMPONENTS) -> None:
    """Make the schema of every component known. Ours are read from their source (`signatures`), those of others
    imported.

    Raises:
        MetaTTTError: if a package that announces components cannot be imported.
    """
    importlib.import_module("metattt.composition.paper_rows")  # experiments that are made, not written in files
    _read_libraries()
    for package in packages:
        _read(package)
    for entry in announced("metattt.components"):
        try:
            importlib.import_module(entry.value)
        except Exception as error:  # whatever a module of others raises when imported
            owner = entry.dist.name if entry.dist else entry.name
            raise MetaTTTError(
                f"{entry.value}, which the installed package {owner} announces, cannot be imported: {error}\n"
                f"Repair the package, or remove it: pip uninstall {owner}"
            ) from error


@cache
def _read(package: str) -> None:
    """Stores the schemas of a package; a module that cannot be read is imported."""
    folder = find_source(package).parent
    for file in sorted(folder.rglob("*.py")):
        module = ".".join((package, *file.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
        if "@register(" not in file.read_text(encoding="utf-8"):
            continue
        try:
            for found in registered(module):
                store(*found)
        except Unreadable:
            importlib.import_module(module)


@cache
def _read_libraries() -> None:
    """Classes that no decorator registers: the composer, which names nothing of configurations, and Lightning's
    Trainer."""
    store("layer", "ttt_layer", "metattt.layer.TTTLayer", constructor("metattt.layer", "TTTLayer"))
    store("layer", "combined", "metattt.combined.Combined", constructor("metattt.combined", "Combined"))
    for target, keys in LOGGERS.items():
        PARAMETERS[f"lightning.pytorch.loggers.{target}"] = dict.fromkeys(keys.split(), ())
    with suppress(Unreadable):  # not installed, or of another version: then a new argument needs Hydra's `+`
        PARAMETERS[TRAINER] = {one.name: () for one in constructor("lightning.pytorch.trainer.trainer", "Trainer")}
