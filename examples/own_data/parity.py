"""A kind of data of one's own: bits, and whether the number of ones so far is odd. Run it: `python parity.py`.

Four things make it: a class with `draw`, `NO_LABEL` where nothing is asked, the name it registers, and `configs/data/parity.yaml`.
Training, resuming and evaluating it is what `SequenceData` has for all of its kinds; text (`WindowData`) and images
(`Images`) have the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from metattt.composition.compose import compose
from metattt.data.sequences import NO_LABEL, SequenceData
from metattt.evaluation.evaluate import evaluate
from metattt.registry import register
from metattt.setting import setting
from metattt.training.train import train


@register(group="data", name="parity")
class Parity(SequenceData):
    """Bits drawn at random; every second token asks for the parity of all bits up to it.

    Args:
        length: T, tokens.
        batch_size, validation_size, seed, num_workers: see `SequenceData`.
    """

    vocab_size = 2
    validation_size = 256
    length: int = setting(default=32, least=16, most=2**16)

    def describe(self) -> str:
        return f"the parity of {self.length} bits"

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        bits = random.integers(0, 2, self.length)
        labels = np.where(np.arange(self.length) % 2, bits.cumsum() % 2, NO_LABEL)
        return bits, labels


def main(steps: int = 200, folder: str = "runs/parity", *overrides: str) -> Any:
    """Trains a small model and scores it on sequences that no run has trained on."""
    own = f"hydra.searchpath=[file://{Path(__file__).resolve().parent / 'configs'}]"
    size = ("model=language_model", "layer=delta_net", "dim=32", "num_heads=2", "model.num_layers=1", "model.vocab_size=2")
    run = (f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps}", f"output_dir={folder}", *overrides)
    train(compose(own, "data=parity", *size, *run))
    trusted = f"trust={Parity.__module__}"  # a checkpoint may not say alone what is run
    return evaluate(compose(f"checkpoint={folder}", trusted, "split=test", "device=cpu", job="eval"))


if __name__ == "__main__":
    main()
