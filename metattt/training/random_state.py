"""The random generators of a process: Python's, numpy's, torch's, and its GPU's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of all random generators that a step may use, as numbers and tensors, for a checkpoint; `device` is
    that of the process."""
    version, words, gauss = random.getstate()
    of_numpy: Any = np.random.get_state(legacy=True)
    kind, table, *rest = of_numpy
    return {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [str(kind), torch.from_numpy(table.astype(np.int64)), int(rest[0]), int(rest[1]), float(rest[2])],
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(data: Mapping[str, Any], device: torch.device) -> None:
    """Restores the states of `random_state`; that of the GPU if there was one then and is one now."""
    version, words, gauss = data["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, table, *rest = data["numpy"]
    np.random.set_state((kind, table.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(data["cpu"])
    if device.type == "cuda" and data["cuda"] is not None:
        torch.cuda.set_rng_state(data["cuda"], device)


def apart_from_the_run(device: torch.device) -> AbstractContextManager[None]:
    """A context: random numbers drawn inside do not change those of the run; `device` is that of the process."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
