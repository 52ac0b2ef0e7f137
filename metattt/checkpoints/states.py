"""States on disk: what a model has learned while it read, apart from the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from metattt.checkpoints.tensors import SCALARS, checksum, put_together, read_own, take_apart, write_own
from metattt.errors import MetaTTTError
from metattt.models.language_model import LanguageModelState
from metattt.state import State

S = TypeVar("S")

FORMAT, VERSION = "metattt state", 1
KIND = "kind"  # the entry that says which named tuple a dictionary stands for


def kinds() -> dict[str, Any]:
    """The named tuples that a state may be made of, by name: those that torch itself may make of a file."""
    known = [one for one in torch.serialization.get_safe_globals() if isinstance(one, type) and hasattr(one, "_fields")]
    return {one.__name__: one for one in (*known, State, LanguageModelState)}


def write_state(path: str | Path, state: Any, model: nn.Module | None = None) -> None:
    """What `State.save` and `LanguageModelState.save` do.

    Raises:
        MetaTTTError: a state of a layer that carries other things than tensors and plain data, or a file that cannot be
            written.
    """
    tensors: dict[str, Tensor] = {}
    held = take_apart(_as_plain(state), tensors)
    known = None if model is None else fingerprint(model)
    about = {"format": FORMAT, "version": VERSION, "model": known, "state": held}
    write_own(path, tensors, about)


def read_state(path: str | Path, kind: type[S], device: torch.device | str, model: nn.Module | None = None) -> S:
    """What `State.load` and `LanguageModelState.load` do.

    Raises:
        MetaTTTError: as they say.
    """
    missing = f"no state: {path} does not exist; state.save(path) writes one"
    other = "holds tensors, but not a state: give a file that state.save has written"
    file, tensors, about = read_own(path, "state", FORMAT, missing, other)
    if about.get("version") != VERSION:
        raise MetaTTTError(
            f"{file} has a state of version {about.get('version')!r:.20}; this release reads version {VERSION}"
        )
    if model is not None and (known := about.get("model")) != fingerprint(model):
        if known is None:
            raise MetaTTTError(f"{file} does not name its model: save it with state.save(path, model=model)")
        raise MetaTTTError(
            f"{file} was learned by another model, or with other weights: load that one, or leave out model="
        )
    moved = {name: one.to(device, copy=True) for name, one in tensors.items()}
    state = _as_state(put_together(about.get("state"), moved), file)
    if type(state) is not kind:
        found = type(state)
        raise MetaTTTError(f"{file} holds a {found.__name__}: load it with {found.__module__}.{found.__name__}.load")
    return state


def fingerprint(model: nn.Module) -> str:
    """What identifies a model: the names, shapes, types and values of its parameters and buffers."""
    return checksum({name: tensor.cpu() for name, tensor in model.state_dict().items()})


def _as_plain(node: Any) -> Any:
    """The states as dictionaries, with what else there is in them."""
    if kinds().get(type(node).__name__) is type(node):
        return {KIND: type(node).__name__} | {key: _as_plain(value) for key, value in node._asdict().items()}
    if isinstance(node, Mapping):
        return {key: _as_plain(value) for key, value in node.items()}
    if isinstance(node, list | tuple) and not hasattr(node, "_fields"):
        return type(node)(_as_plain(value) for value in node)
    if isinstance(node, (Tensor, *SCALARS)):
        return node
    raise MetaTTTError(
        f"a state that holds {type(node).__name__} cannot be saved: tensors, numbers, texts, lists and dictionaries can"
    )


def _as_state(node: Any, file: Path) -> Any:
    """What `_as_plain` was made of."""
    if isinstance(node, list | tuple):
        return type(node)(_as_state(value, file) for value in node)
    if not isinstance(node, dict):
        return node
    read = {key: _as_state(value, file) for key, value in node.items()}
    kind = read.pop(KIND) if isinstance(read.get(KIND), str) else None
    if kind is None:
        return read
    cls = kinds().get(kind)
    if cls is None or read.keys() != set(cls._fields) or not _fits(cls, read):
        raise MetaTTTError(f"{file} is damaged: it does not hold what a state holds")
    return cls(**read)


def _fits(cls: type, read: Mapping[str, Any]) -> bool:
    """Whether fields have the types that they must have; shapes are compared by the layer that continues from them."""
    if cls is LanguageModelState:
        layers, tails = read["layers"], read["tails"]
        return isinstance(layers, tuple) and isinstance(tails, tuple) and len(layers) == len(tails)
    if cls is not State:
        return True
    parts = [read[name] for name in ("task", "optimizer", "learner")]
    weights = list(read["weights"].values()) if isinstance(read["weights"], dict) else [None]
    tensors = all(
        isinstance(part, dict) and all(isinstance(one, Tensor) for one in part.values()) for part in parts + weights
    )
    pos, phase = read["pos"], read["phase"]
    return tensors and isinstance(pos, Tensor) and pos.dtype == torch.long and (phase is None or type(phase) is int)
