"""`metattt eval`: scores of checkpoints on the data of their runs, or on tasks of the evaluation harness."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from metattt.checkpoints.files import SAFETENSORS, find_checkpoint, home
from metattt.checkpoints.record import modules
from metattt.checkpoints.trained import Trained, load_model, open_trained
from metattt.composition.instantiate import instantiate_part
from metattt.composition.settings import NO_CHECKPOINT, pick_device, settings
from metattt.errors import MetaTTTError
from metattt.evaluation.output import Report, report, writable

TEXT = "metattt.evaluation.text"  # scores models of text, and those of data that names no other module


@dataclass(frozen=True)
class Evaluation:
    """What `metattt eval` is asked for. The module that scores a kind of data has `evaluate(job)`, which takes this,
    prints and writes the scores, and returns them by label.

    Attributes:
        chosen: the settings, by the keys of `configs/eval.yaml`.
        known: label -> what is known of the checkpoint.
        device: where the models compute.
        trust: modules of the user's whose classes the checkpoints may name.
        folder: of the files that are written: `output_dir`, or beside the first checkpoint.
        console: to print on.
    """

    chosen: Any
    known: Mapping[str, Trained]
    device: torch.device
    trust: Sequence[str]
    folder: Path
    console: Console

    @property
    def changes(self) -> dict[str, Any]:
        """The fields of the data that the command line sets."""
        return {key: value for key, value in self.chosen.data.items() if value is not None}

    def model(self, label: str) -> Any:
        """The model, in evaluation mode."""
        return load_model(self.known[label].path, self.device, self.trust)[0]

    def data(self, source: dict[str, Any]) -> Any:
        """The data set of a configuration."""
        return instantiate_part(OmegaConf.create({"data": source}), "data")

    def report(self, name: str, *more: str) -> AbstractContextManager[Report]:
        """The files that are written; `more`: names that other evaluations write, too."""
        return report(self.folder, name, self.console, *more)


def evaluate(cfg: DictConfig) -> dict[str, Any]:
    """Prints the scores of checkpoints as tables, writes them as CSV and PNG, and returns them by label.

    Raises:
        MetaTTTError: a checkpoint, data or a setting that cannot be used, models of different kinds.
    """
    chosen = settings(cfg, checkpoint=NO_CHECKPOINT)
    device, trust = pick_device(chosen.device), modules(chosen.trust)
    files = checkpoints(chosen.checkpoint)
    names = labels(files, chosen.labels)
    known = [open_trained(file, trust=trust) for file in files]  # all of them: a mistake shows before the work
    folder = writable(chosen.output_dir, home(known[0].path) / "eval")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    kinds = ["metattt.evaluation.tasks"] if chosen.tasks else [scored_by(one) for one in known]
    for name, kind in zip(names, kinds, strict=False):
        if kind != kinds[0]:
            one, other = (module.rpartition(".")[2] for module in (kinds[0], kind))
            raise MetaTTTError(
                f"{names[0]} is a model of {one}, and {name} one of {other}: evaluate them one after the other"
            )
    job = Evaluation(chosen, dict(zip(names, known, strict=True)), device, trust, folder, console)
    scores: dict[str, Any] = importlib.import_module(kinds[0]).evaluate(job)
    return scores


def scored_by(model: Trained) -> str:
    """The module that scores a model, as the data of its run says."""
    if "data" not in model.config:
        return "metattt.evaluation.images" if "num_classes" in model.config.model else TEXT
    return getattr(hydra.utils.get_class(model.config.data["_target_"]), "scored_by", None) or TEXT


def data_of(model: Trained) -> dict[str, Any]:
    """The configuration of the data of a run, as a plain dictionary; empty if the model comes without a run."""
    run: Any = OmegaConf.to_container(model.config.data, resolve=True) if "data" in model.config else {}
    return run


def checkpoints(given: Any) -> list[Path]:
    """The checkpoint files that `checkpoint=` names: one, or a list."""
    paths = [given] if isinstance(given, str) else given
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) for path in paths):
        raise MetaTTTError(
            f"checkpoint={given} is not allowed: give a run's folder, a checkpoint in it, or a list of these, [a,b]"
        )
    return [find_checkpoint(path) for path in paths]


def labels(files: Sequence[Path], given: Sequence[str] | None) -> list[str]:
    """A name for every checkpoint: the given ones, or those of the run's folders (numbered where they are the same)."""
    if given is not None:
        if len(given) != len(files) or len(set(given)) != len(given):
            raise MetaTTTError(
                f"labels=[{','.join(given)}] must be {len(files)} different names, one for every checkpoint"
            )
        return list(given)
    alone = [file.is_file() and file.name != SAFETENSORS for file in files]
    names = [file.stem if one else home(file).absolute().name for file, one in zip(files, alone, strict=True)]
    once, found = {name for name in names if names.count(name) == 1}, list[str]()
    for name in names:
        numbered = (f"{name}-{number}" for number in itertools.count(1))
        found.append(name if name in once else next(one for one in numbered if one not in {*once, *found}))
    return found
