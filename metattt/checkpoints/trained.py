"""Trained models on disk, of any origin: a run's checkpoint, a folder of `metattt convert`, a published checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule

from metattt.checkpoints.files import find_checkpoint, read_content
from metattt.checkpoints.folder import WEIGHTS, Tensors, is_checkpoint, read_tokenizer, shapes
from metattt.checkpoints.record import (
    OF_TRAINING,
    PUBLISHED_CONFIG,
    RECORD,
    check_amounts,
    checked_record,
    record_config,
)
from metattt.composition.instantiate import instantiate_model
from metattt.composition.messages import first_line
from metattt.errors import MetaTTTError
from metattt.io import read_object
from metattt.models.language_model import LanguageModel
from metattt.models.published import Side, first_names, flatten, guess_side, to_ours, widest_type
from metattt.models.published_config import PublishedConfig, build_empty

PREFIX = "model."  # of the model's parameters in a run's state_dict, and for Transformers
CLASSIFIER = "head.logits."  # of the parameters that give a model for images its classes
INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
EXPORTED = "metattt"  # the entry of a config.json of Transformers with the record of a model of ours


class Trained(NamedTuple):
    """What is known of a model without its weights."""

    path: Path  # the checkpoint: a folder, or a file
    config: DictConfig  # of the run; of the model alone, where it does not come from a run of ours
    tokenizer: str | None  # `bytes`, or the text of its tokenizer.json; None: not known
    # of a classifier, how its run made images of pictures (`metattt.data.images.Images`); None: not known
    evaluation: dict[str, Any] | None = None
    data: str | None = None  # the fingerprint of the data of its run (`metattt.data.base.Data`)
    classes: list[str] | None = None  # of a classifier, their names by number, as its run has recorded them


class Weights(NamedTuple):
    """A model and the weights that it was trained to."""

    about: Trained
    tensors: dict[str, Tensor]  # by the names of our parameters
    side: Side  # whose names they have on disk
    of_run: bool  # from a run's checkpoint; else from a model that was saved alone, whose type of numbers is kept


def read_checkpoint(path: str | Path, tensors: Tensors = "all") -> dict[str, Any]:
    """Reads a run's checkpoint on the CPU; arguments and errors as of `metattt.checkpoints.files.read_content`."""
    file = find_checkpoint(path)
    return _checked(file, read_content(file, tensors))


def open_trained(path: str | Path, skip: Collection[str] = OF_TRAINING, trust: Collection[str] = ()) -> Trained:
    """Configuration and tokenizer of a model on disk; no weights are read.

    Args:
        path: as for `find_checkpoint`.
        skip: keys of the configuration whose classes need not be known here (`record_config`).
        trust: modules of the user's whose classes it may name.

    Raises:
        MetaTTTError: no checkpoint, or one that cannot be read; a component that is not known or not allowed.
    """
    file = find_checkpoint(path)
    if is_checkpoint(file) or not (file.parent / PUBLISHED_CONFIG).is_file():
        return _of_run(file, _checked(file, read_content(file, "none")), skip, trust)
    return _theirs(file, trust)


def read_weights(path: str | Path, trust: Collection[str] = ()) -> Weights:
    """A model on disk with its weights.

    Args:
        path: as for `find_checkpoint`.
        trust: modules of the user's whose classes it may name.

    Raises:
        MetaTTTError: as `open_trained`; names or shapes that are neither ours nor published.
    """
    file = find_checkpoint(path)
    content = read_content(file, "weights")
    if RECORD in content:
        about = _of_run(file, _checked(file, content), (*OF_TRAINING, "data"), trust)
        of_run = "global_step" in content
        held = content[WEIGHTS].items()
        tensors = {name.removeprefix(PREFIX): one for name, one in held if not of_run or name.startswith(PREFIX)}
        return Weights(about, tensors, "ours", of_run)
    if set(content) == {WEIGHTS} and isinstance(content[WEIGHTS], Mapping):
        content = dict(content[WEIGHTS])
    beside = file.parent / PUBLISHED_CONFIG
    if beside.is_file() and EXPORTED in read_object(beside):
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in content.items()}
        return Weights(_theirs(file, trust), tensors, "ours", False)
    side = guess_side(flatten(content))
    if side is None:
        names = ", ".join(list(content)[:3]) or "nothing"
        theirs = "published names (model.embed_tokens.weight, wte/embedding)"
        raise MetaTTTError(
            f"{file} is not a checkpoint of metattt train, and has neither {theirs} nor ours: it holds {names}"
        )
    if side == "ours":
        advice = "give a run's folder or a checkpoint in it, or a folder of metattt export or convert"
        raise MetaTTTError(f"{file} holds weights by our names without a configuration: {advice}")
    about = _theirs(file, trust)
    return Weights(about, to_ours(content, build_empty(about.config), side), side, False)


def load_model(
    path: str | Path, device: torch.device | str = "cpu", trust: Collection[str] = ()
) -> tuple[LanguageModel, DictConfig]:
    """A trained model and its configuration: `model, config = metattt.load_model("runs/…")`.

    Args:
        path: a run's folder or a checkpoint in it, a folder of `metattt convert`, or a published checkpoint with its
            `config.json`.
        device: where the model goes.
        trust: modules of yours whose classes the checkpoint may name: `trust=["my_learner"]`.

    Returns:
        The model in evaluation mode, and the configuration: of the run, or of the model alone where there was no run.
        Parameters of a run are in fp32, after `trainer.precision=64-true` in fp64; those of a model that was saved
        alone have the widest of their types. torch's global generator is left as it was.

    Raises:
        MetaTTTError: no checkpoint, one that cannot be read, or parameters that are not those of the configured model.
    """
    found = read_weights(path, trust)
    complaint = f"{path} does not fit the model of its own configuration"
    check_shapes(found, complaint)
    with torch.random.fork_rng(devices=[]):  # not on the meta device: a layer may compute buffers that no file holds
        model = instantiate_model(found.about.config)
    kind = widest_type(found.tensors.values())
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.promote_types(kind, torch.float32) if found.of_run else kind)
    fill(model, found, complaint)
    if found.about.evaluation is not None and "num_classes" in found.about.config.model:
        model.evaluated_with("vision_transformer", **found.about.evaluation)  # type: ignore[operator]
    return model.to(device).eval(), found.about.config


def fill(model: LanguageModel, found: Weights, complaint: str, but: str | None = None) -> None:
    """Gives a model, whole or divided among processes, the weights of a model alike. Buffers may be absent: the model
    computes them. Names or shapes that do not fit raise an error that begins with `complaint`; parameters of another
    shape whose names begin with `but` stay as they are."""
    given = _compared(model, found, complaint, but)
    check_numbers(((name, given[name]) for name, _ in model.named_parameters() if name in given), found.about.path)
    absent = model.state_dict().keys() - given.keys()
    if isinstance(model, FSDPModule):
        set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=True, strict=not absent))
    else:
        model.load_state_dict(given, strict=not absent)


def _compared(model: LanguageModel, found: Weights, complaint: str, but: str | None = None) -> dict[str, Any]:
    """The weights by every name that the model has for them; not those of other shapes whose names begin with `but`."""
    given: dict[str, Any] = dict(found.tensors)
    state = model.state_dict()
    others = {x for x in given.keys() & state.keys() if but and x.startswith(but) and given[x].shape != state[x].shape}
    given, state = ({x: one[x] for x in one if x not in others} for one in (given, state))
    if not found.of_run:  # a tied parameter is saved once there
        given |= _tied(model, given)
    missing = state.keys() - given.keys() - {name for name, _ in model.named_buffers()}
    problems = [f"missing: {first_names(missing)}"] if missing else []
    problems += [f"unknown: {first_names(unknown)}"] if (unknown := given.keys() - state.keys()) else []
    shapes = [(name, list(given[name].shape), list(state[name].shape)) for name in state if name in given]
    problems += [f"{name} is {found} and not {wanted}" for name, found, wanted in shapes if found != wanted]
    if problems:
        raise MetaTTTError(f"{complaint}: {'; '.join(problems[:3])}")
    return given


def check_resumed(file: Path, config: DictConfig) -> None:
    """Compares a run's configuration with the shapes of the weights in its checkpoint; no tensors are read.

    Raises:
        MetaTTTError: sizes that they do not have.
    """
    held = {name.removeprefix(PREFIX): shape for name, shape in shapes(file).items() if name.startswith(PREFIX)}
    tensors = {name: torch.empty(shape, device="meta") for name, shape in held.items()}
    found = Weights(Trained(file, config, None), tensors, "ours", True)
    check_shapes(found, f"{file} does not fit the model of its own configuration")


def check_shapes(found: Weights, complaint: str) -> None:
    """Compares the shapes that a configuration asks for with those of the weights, before any is allocated.

    Raises:
        MetaTTTError: `complaint`, and what does not fit.
    """
    check_amounts(found.about.config, found.about.path, len(found.tensors))
    try:
        with torch.random.fork_rng(devices=[]):
            empty = build_empty(found.about.config)
    except Exception as error:  # as many kinds as there are values that no layer can have
        if isinstance(error, MetaTTTError):
            raise
        raise MetaTTTError(
            f"{found.about.path} has a configuration that makes no model ({first_line(error):.200}): it is damaged"
        ) from error
    _compared(empty, found, complaint)


def check_numbers(tensors: Iterable[tuple[str, Tensor]], origin: object) -> None:
    """Raises an error for weights that are no finite real numbers."""
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            raise MetaTTTError(f"{origin} holds {name} as {tensor.dtype}: weights are floats of 16 bits or more")
        if tensor.numel() and not torch.isfinite(torch.stack(torch.aminmax(tensor.detach()))).all():
            raise MetaTTTError(
                f"{origin} holds numbers in {name} that are not finite: its run diverged, or it is damaged"
            )


def _checked(file: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """A run's checkpoint with its record checked."""
    record = checked_record(content.get(RECORD), file)
    if not is_checkpoint(file):
        raise MetaTTTError(
            f"{file} is not a checkpoint of metattt train: that is a folder with weights and checkpoint.json"
        )
    return {**content, RECORD: record}


def _of_run(file: Path, content: Mapping[str, Any], skip: Collection[str], trust: Collection[str]) -> Trained:
    config = record_config(content[RECORD], file, skip, trust)
    evaluation = _evaluation(file, content[RECORD].get("evaluation"))
    tokenizer = read_tokenizer(file) or ("bytes" if "global_step" in content else None)
    names = content[RECORD].get("classes")
    classes = names if isinstance(names, list) and names and all(isinstance(name, str) for name in names) else None
    return Trained(file, config, tokenizer, evaluation, content[RECORD].get("data"), classes)


def _evaluation(file: Path, saved: Any) -> dict[str, Any] | None:
    """How images were made, within what a file may ask for: a small `crop_pct` means a large picture."""
    match saved:
        case None:
            return None
        case {"crop_pct": float() | int() as crop, "interpolation": how, **more} if not more:
            if 0.1 <= crop <= 1 and how in INTERPOLATIONS:
                return dict(saved)
    raise MetaTTTError(
        f"{file} has evaluation={str(saved)[:80]}, which does not describe how to resize and crop: it is damaged"
    )


def _theirs(file: Path, trust: Collection[str]) -> Trained:
    """A published model, or one of ours that Transformers wrote."""
    origin = file.parent / PUBLISHED_CONFIG
    content = read_object(origin)
    if EXPORTED in content:
        config = record_config(checked_record(content[EXPORTED], origin), origin, (), trust)
    else:
        if (kind := content.get("model_type")) not in (None, "ttt") and "seq_modeling_block" not in content:
            raise MetaTTTError(f"{file.parent} holds a model of type {kind}: only adapt and attach take it")
        config = PublishedConfig.read(content).compose()
    return Trained(file, config, read_tokenizer(file.parent))


def _tied(model: LanguageModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of parameters that are another one by a second name."""
    names = list(model.named_parameters(remove_duplicate=False))
    held = {id(parameter): tensors[name] for name, parameter in names if name in tensors}
    return {name: held[id(parameter)] for name, parameter in names if name not in tensors and id(parameter) in held}
