"""Long runs at constant memory: training steps and generated tokens leave nothing behind.

`python tests/training/test_long_runs.py 2000 20000` takes the figures of so many steps and tokens.
"""

import gc
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from runs_for_tests import column, write_corpus

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.data import ByteTokenizer
from metattt.generation.sampling import generate
from metattt.generation.text import Continuation

LOOKS = 8  # at a run, evenly spread; the first quarter is for what is made once
TRAIN = (
    "dim=16", "num_heads=2", "model.num_layers=2", "data.context_length=32", "data.batch_size=4", "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=5", "optimizer.mini_batch_size=8", "sample=false", "trainer.val_check_interval=50",
    "callbacks.checkpoint.every_steps=50",
)  # fmt: skip


class Figures(NamedTuple):
    """Of this process at one moment.

    Attributes:
        done: steps or tokens.
        resident: memory (MB).
        files: file descriptors.
        tensors: alive.
        objects: that the garbage collector knows.
        milliseconds: of the processor, per step or token since the look before, the least.
    """

    done: int
    resident: float
    files: int
    tensors: int
    objects: int
    milliseconds: float


def look(done: int, times: list[float]) -> Figures:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    known = gc.get_objects()
    tensors = sum(issubclass(type(one), torch.Tensor) for one in known)
    files = len(os.listdir("/proc/self/fd"))
    return Figures(done, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files, tensors, len(known), 1000 * min(times))


def complaints(figures: list[Figures]) -> list[str]:
    """What grows from the first quarter of a run to its end."""
    first, last = figures[LOOKS // 4], figures[-1]
    count = last.done - first.done
    found = []
    if last.resident - first.resident > 8 + 0.002 * count:
        found.append(f"{last.resident - first.resident:.1f} MB more")
    if last.files > first.files:
        found.append(f"{last.files - first.files} files more")
    if last.tensors - first.tensors > 10 + 0.05 * count:
        found.append(f"{last.tensors - first.tensors} tensors more")
    if last.objects - first.objects > count:  # the points of a curve are kept, one in five steps
        found.append(f"{last.objects - first.objects} objects more")
    return found


def train_for(steps: int, folder: Path) -> list[Figures]:
    """Trains and looks at the process on the way."""
    from metattt.training.callbacks import LossCurve
    from metattt.training.train import train

    torch.set_num_threads(1)
    write_corpus(folder / "text")
    original, figures, times, last = LossCurve.on_train_batch_end, [], [], [time.process_time()]

    def watched(self: Any, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        original(self, trainer, module, outputs, batch, index)
        times.append(time.process_time() - last[0])
        if trainer.global_step % (steps // LOOKS) == 0:
            figures.append(look(trainer.global_step, times))
            times.clear()
        last[0] = time.process_time()

    settings = (f"data.path={folder / 'text'}", f"output_dir={folder / 'run'}", f"trainer.max_steps={steps}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossCurve, "on_train_batch_end", watched)
        assert train(compose(*TRAIN, *settings)) == 0
    return figures


def generate_for(count: int, layer: str) -> list[Figures]:
    """Generates and looks at the process on the way."""
    torch.manual_seed(0)
    model = instantiate_model(compose("preset=tiny", "dim=32", "num_heads=2", "model.num_layers=2", f"layer={layer}")).eval()
    text, figures, times = Continuation(ByteTokenizer(), ["no such text, but the beginning"]), [], []
    last = time.process_time()
    for index, token in enumerate(generate(model, torch.tensor([[256, 65]]), count, seed=0), start=1):
        text.add(int(token) % 256)
        times.append(time.process_time() - last)
        if index % (count // LOOKS) == 0:
            figures.append(look(index, times))
            times.clear()
        last = time.process_time()
    return figures


def test_steps_leave_nothing_behind(tmp_path: Path) -> None:
    """In a process of its own, where nothing is left of other tests whose ends could be counted."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        figures = process.submit(train_for, 200, tmp_path).result()
    assert complaints(figures) == [], figures
    assert max(column(tmp_path / "run", "train/loss")) == 200


@pytest.mark.parametrize("layer", ["ttt_linear", "ttt_mlp", "delta_net"])
def test_tokens_leave_nothing_behind(layer: str) -> None:
    figures = generate_for(2000, layer)
    assert complaints(figures) == [], figures
    assert figures[-1].milliseconds < 2 * figures[LOOKS // 4].milliseconds


def test_text_of_many_tokens_takes_time_in_proportion() -> None:
    seen = []

    class Counting(ByteTokenizer):
        def decode(self, ids: Any) -> bytes:
            seen.append(len(ids))
            return super().decode(ids)

    text = Continuation(Counting(), ["stop"])
    written = "".join(text.add(token) for token in b"a s st sto " * 200) + text.finish()
    assert written == "a s st sto " * 200 and sum(seen) == len(written)


def show(title: str, unit: str, figures: list[Figures]) -> None:
    """A table as Markdown."""
    each = f"ms of the processor per {unit[:-1]}, least"
    print(f"\n## {title}\n\n| {unit} | resident (MB) | files | tensors | objects | {each} |\n|---:|---:|---:|---:|---:|---:|")
    for one in figures:
        print(f"| {one.done:,} | {one.resident:.1f} | {one.files} | {one.tensors} | {one.objects:,} | {one.milliseconds:.2f} |")
    print(f"\nGrows: {', '.join(complaints(figures)) or 'nothing'}.", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        show("Training", "steps", train_for(int(sys.argv[1]), Path(made)))
    for name in ("ttt_linear", "ttt_mlp", "delta_net"):
        show(f"Generation, {name}", "tokens", generate_for(int(sys.argv[2]), name))
