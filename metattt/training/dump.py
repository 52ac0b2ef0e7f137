"""A training step on disk, to be looked at again: plain data and safetensors, nothing that could run code.

`divergence-step-<n>/` holds `record.json` (the configuration of the run and what was found), `model.safetensors` (the
weights before the update) and, for every process, `step-<rank>.safetensors` (its batches, and the random numbers' state
before the first of them).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from metattt.checkpoints.tensors import read_tensors, write_tensors
from metattt.errors import MetaTTTError
from metattt.io import read_object

RECORD, WEIGHTS, VERSION = "record.json", "model.safetensors", 1
BATCH, RANDOM = "batch", "random"  # first part of the names in `step-<rank>.safetensors`

Batch = Tensor | tuple[Tensor, ...]


class Step(NamedTuple):
    """What one process had when a step began.

    Attributes:
        batches: the batches of the step, windows `[B, T + 1]`, or images and their labels.
        random: state of the generators (`random_state`).
    """

    batches: Sequence[Batch]
    random: Mapping[str, Tensor]


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's generators, of the host and of `device`, and of NumPy's, as tensors."""
    _, key, position, *gauss = np.random.get_state()
    numpy = np.concatenate([np.asarray(key, np.float64), np.array([position, *gauss], np.float64)])
    state = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(numpy)}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Puts the generators into a state of `random_state`; that of a device which is not there is left out."""
    torch.set_rng_state(state["torch"])
    numpy = state["numpy"].numpy()
    key, (position, has_gauss, gauss) = numpy[:-3].astype(np.uint32), numpy[-3:]
    np.random.set_state(("MT19937", key, int(position), int(has_gauss), float(gauss)))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights on the host; of a model that processes share, all of them call this and the first gets them."""
    if isinstance(model, FSDPModule):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return {
            name: value
            for name, value in get_model_state_dict(model, options=options).items()
            if isinstance(value, Tensor)
        }
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def free_name(folder: Path, step: int) -> Path:
    """Where the dump of a step goes: a folder that does not exist yet."""
    name, count = folder / f"divergence-step-{step}", 1
    while name.exists():
        count += 1
        name = folder / f"divergence-step-{step}-{count}"
    return name


def begin_dump(target: Path, record: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Makes the folder of a dump, with all that one process writes. The folder has its name when it is whole.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    new = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        new.mkdir(parents=True)
        write_tensors(new / WEIGHTS, weights)
        text = json.dumps({"version": VERSION, **record}, ensure_ascii=False, indent=1)
        (new / RECORD).write_text(text, encoding="utf-8")
        new.rename(target)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def add_step(target: Path, rank: int, step: Step) -> None:
    """Writes what one process had into a folder of `begin_dump`.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    tensors = {f"{RANDOM}.{name}": tensor for name, tensor in step.random.items()}
    for number, batch in enumerate(step.batches):
        for part, tensor in enumerate([batch] if isinstance(batch, Tensor) else batch):
            tensors[f"{BATCH}.{number}.{part}"] = tensor
    write_tensors(target / f"step-{rank}.safetensors", tensors)


def read_dump(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], list[Step]]:
    """The record, the weights, and what every process had.

    Raises:
        MetaTTTError: no dump, one of another version, or one that is damaged.
    """
    try:
        record = read_object(folder / RECORD)
        if record.get("version") != VERSION:
            raise MetaTTTError(f"replay={folder} is not a dump that this release reads: {RECORD} has another version")
        weights = read_tensors(folder / WEIGHTS)
        files = [folder / f"step-{rank}.safetensors" for rank in range(int(record["processes"]))]
        steps = [_step(read_tensors(file)) for file in files]
        if not steps:
            raise KeyError("processes")
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, SafetensorError) as error:
        if isinstance(error, MetaTTTError):
            raise
        raise MetaTTTError(
            f"replay={folder} cannot be read as the dump of a step ({_first_line(error)}): "
            "give a folder divergence-step-<n> of a run"
        ) from error
    return record, weights, steps


def _step(tensors: Mapping[str, Tensor]) -> Step:
    batches: dict[int, dict[int, Tensor]] = {}
    random = {}
    for name, tensor in tensors.items():
        kind, *rest = name.split(".")
        if kind == RANDOM:
            random[rest[0]] = tensor
        else:
            batches.setdefault(int(rest[0]), {})[int(rest[1])] = tensor
    if not batches or not {"torch", "numpy"} <= random.keys():
        raise KeyError("it holds no batch, or no state of the random numbers")
    parts = [[batches[number][part] for part in range(len(batches[number]))] for number in range(len(batches))]
    return Step([one[0] if len(one) == 1 else tuple(one) for one in parts], random)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
