"""How Lightning reads and writes the checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io import TorchCheckpointIO

from metattt.checkpoints.folder import write_checkpoint
from metattt.checkpoints.record import RECORD
from metattt.checkpoints.trained import read_checkpoint


class CheckpointFiles(TorchCheckpointIO):
    """How strategies whose first process has all of the model read and write checkpoints."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        write_run(Path(path), checkpoint)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read_checkpoint(path)


def write_run(path: Path, checkpoint: dict[str, Any], together: bool = False) -> None:
    """Writes what Lightning has collected of a run.

    Args:
        path: the checkpoint.
        checkpoint: with its record (`metattt.checkpoints.record`).
        together: all processes call this, each with the parts of the tensors that it holds.

    Raises:
        MetaTTTError: it cannot be written.
    """
    record = dict(checkpoint[RECORD])
    tokenizer = record.pop("tokenizer", None)
    content = {key: value for key, value in checkpoint.items() if key != RECORD}
    write_checkpoint(path, record, content, tokenizer, together)
