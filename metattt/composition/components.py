"""Which classes can be composed: those registered in our packages, and in the installed packages of others."""

import importlib
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

from metattt.composition.announced import announced
from metattt.composition.signatures import Unreadable, constructor, registered, registering
from metattt.errors import MetaTTTError
from metattt.registry import PARAMETERS, store

COMPONENTS = ("metattt.learners", "metattt.tasks", "metattt.optimizers", "metattt.mixers")
"""Packages of ours with classes that register themselves."""

LAYERS = {"ttt_layer": ("metattt.layer", "TTTLayer"), "combined": ("metattt.combined", "Combined")}
"""Layers that no decorator registers: module and class. The composer names nothing of configurations."""

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
    _read_libraries()
    for package in packages:
        _read(package)
    for entry in announced("metattt.components"):
        try:
            importlib.import_module(entry.value)
        except Exception as error:  # whatever a module of others raises when imported
            owner = entry.dist.name if entry.dist else entry.name
            raise MetaTTTError(
                f"{entry.value}, an entry point of the installed package {owner}, cannot be imported: {error}\n"
                f"Repair the package, or remove it: pip uninstall {owner}"
            ) from error


@cache
def _read(package: str) -> None:
    """Stores the schemas of a package; a module that cannot be read is imported."""
    for module, _ in registering(package):
        try:
            for found in registered(module):
                store(*found)
        except Unreadable:
            importlib.import_module(module)


@cache
def _read_libraries() -> None:
    """Classes that no decorator registers."""
    for name, (module, cls) in LAYERS.items():
        store("layer", name, f"{module}.{cls}", constructor(module, cls))
    for target, keys in LOGGERS.items():
        PARAMETERS[f"lightning.pytorch.loggers.{target}"] = dict.fromkeys(keys.split(), ())
    if arguments := trainer_keys():
        PARAMETERS[TRAINER] = dict.fromkeys(arguments, ())


@cache
def trainer_keys() -> tuple[str, ...]:
    """The arguments of Lightning's Trainer; none where it is not installed, or of another version: then a new argument
    needs Hydra's `+`."""
    with suppress(Unreadable):
        return tuple(one.name for one in constructor("lightning.pytorch.trainer.trainer", "Trainer"))
    return ()
