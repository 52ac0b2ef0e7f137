"""How Lightning reads and writes the checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH

from metattt.checkpoints.sharded import NEW, remove
from metattt.checkpoints.trained import read_checkpoint


class CheckpointFiles(TorchCheckpointIO):
    """How strategies that save one file read and write it: sharded checkpoints are read too, and a kill leaves the old file or the new."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        file = Path(path)
        new = file.with_name(file.name + NEW)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, new)
        if file.is_dir():  # of a run that went on from a sharded one
            remove(file)
        new.replace(file)

    def load_checkpoint(self, path: _PATH, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read_checkpoint(Path(path))
