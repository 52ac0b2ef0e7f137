"""The random generators of a process: Python's, numpy's, torch's, and its GPU's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class RandomState(NamedTuple):
    """Where all generators stand that a step may draw from. Taken before every step, so as they give it.

    Attributes:
        python: of `random`.
        numpy: of `numpy.random`.
        cpu: of torch on the CPU.
        cuda: of the process's GPU, if it has one.
    """

    python: tuple[Any, ...]
    numpy: Any
    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """The states at this moment; `device` is that of the process."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state(), cuda)

    def data(self) -> dict[str, Any]:
        """Numbers and tensors, for a checkpoint."""
        version, words, gauss = self.python
        kind, table, *rest = self.numpy
        return {
            "python": [version, torch.tensor(words), gauss],
            "numpy": [str(kind), torch.from_numpy(table.astype(np.int64)), int(rest[0]), int(rest[1]), float(rest[2])],
            "cpu": self.cpu,
            "cuda": self.cuda,
        }


def set_random_state(data: Mapping[str, Any], device: torch.device) -> None:
    """Puts all generators where `RandomState.data` found them; the GPU's if there was one then and is one now."""
    version, words, gauss = data["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, table, *rest = data["numpy"]
    np.random.set_state((kind, table.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(data["cpu"])
    if device.type == "cuda" and data["cuda"] is not None:
        torch.cuda.set_rng_state(data["cuda"], device)
