"""How Lightning reads and writes the checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO

from metattt.checkpoints.files import write_file
from metattt.checkpoints.trained import read_checkpoint


class CheckpointFiles(TorchCheckpointIO):
    """How strategies that save one file read and write it: sharded checkpoints are read too, and a kill leaves the old
    file or the new."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        write_file(Path(path), checkpoint)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read_checkpoint(path)
