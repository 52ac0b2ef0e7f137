"""`metattt bench checkpoint`: what checksums cost when a checkpoint is written and read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from metattt.bench.base import Benchmark, check_counts, require
from metattt.bench.report import Report, Row
from metattt.bench.timing import in_turn, ratios, summary
from metattt.checkpoints import folder, writing
from metattt.checkpoints.files import read_content
from metattt.checkpoints.record import VERSION, make_record
from metattt.checkpoints.trained import load_model
from metattt.checkpoints.writing import write_checkpoint, write_model
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.errors import MetaTTTError, check_number
from metattt.registry import register

MODEL = ("preset=125m", "seed=0")
"""What `load_model` is timed on: it also makes the model, and looks whether its weights are finite."""

RECORD = {"version": VERSION, "config": {}}


@register(group="benchmark", name="checkpoint")
class Checkpoint(Benchmark):
    """A checkpoint of weights and Adam's two moments, fp32, written until it is on the disk, and read until every byte
    was copied; and a model of 125M parameters loaded. With checksums and, for the comparison alone, without.

    Args:
        megabytes: of the tensors together.
        tensors: number of weights, of equal size.
        rounds: timed calls of each way, in turn.
        folder: where it is written; null is the system's temporary folder.
        at_least: the speed with checksums over that without, at least (median); 0 accepts anything.
    """

    def __init__(
        self,
        megabytes: int = 1024,
        tensors: int = 64,
        rounds: int = 7,
        folder: str | None = None,
        at_least: float = 0.8,
    ):
        check_counts(megabytes=megabytes, tensors=tensors, rounds=rounds)
        check_number("benchmark.at_least", at_least, least=0)
        self.megabytes, self.tensors, self.rounds, self.folder, self.at_least = (
            megabytes,
            tensors,
            rounds,
            folder,
            at_least,
        )

    def run(self, say: Callable[[str], None]) -> Report:
        count = max(1, self.megabytes * 10**6 // (4 * 3 * self.tensors))
        weights = {f"w{number}": torch.randn(count) for number in range(self.tensors)}
        state = {number: {"exp_avg": w * 0.9, "exp_avg_sq": w * w} for number, w in enumerate(weights.values())}
        content = {"state_dict": weights, "global_step": 1, "optimizer_states": [{"state": state, "param_groups": []}]}
        rows: list[Row] = []
        with tempfile.TemporaryDirectory(dir=self.folder) as home:
            path = Path(home) / "step"
            say("checking")
            write_checkpoint(path, RECORD, content)
            found = read_content(path)
            wrong = sum(not torch.equal(found["state_dict"][name], tensor) for name, tensor in weights.items())
            checks = [require("tensors that are not what was written", float(wrong), 0.0)]
            model = Path(home) / "model"
            cfg = compose(*MODEL, job="language_model")
            write_model(model, make_record(cfg), instantiate_model(cfg).state_dict(), None)
            calls: dict[str, Callable[[], object]] = {
                "write": partial(_write, path, content), "read": partial(_read, path), "load_model": partial(load_model, model),
            }  # fmt: skip
            for what, call in calls.items():
                say(f"{what}: timing {self.rounds} rounds")
                ways: dict[str, Callable[[], object]] = {"without": partial(_without, call), "with": call}
                seconds = in_turn(ways, self.rounds)
                share = ratios(seconds["without"], seconds["with"])
                for way, took in seconds.items():
                    row: Row = {"": what, "checksums": way}
                    row |= {f"s, {key}": value for key, value in summary(took)._asdict().items()}
                    row |= {
                        f"speed, {key}": v
                        for key, v in (share if way == "with" else ratios(took, took))._asdict().items()
                    }
                    rows.append(row)
                if what != "read" and share.median < self.at_least:
                    raise MetaTTTError(
                        f"{what}: with checksums {share.median:.2f} of the speed without, not {self.at_least}"
                    )
        text = (
            f"{self.megabytes} MB in {3 * self.tensors} tensors, {self.rounds} rounds in turn in one process. Files are synced before a "
            "write counts as done, and every byte is copied before a read does. What is read lies in the page cache, so that the disk does "
            "not hide what the checksums cost."
        )
        settings = {"megabytes": self.megabytes, "tensors": self.tensors, "rounds": self.rounds}
        return Report("Checkpoints with and without checksums", text, {"Time": rows}, checks, settings)


def _write(path: Path, content: dict[str, object]) -> None:
    shutil.rmtree(path, ignore_errors=True)
    write_checkpoint(path, RECORD, content)


def _read(path: Path) -> None:
    found = read_content(path)
    _touch(found["state_dict"].values())
    for state in found["optimizer_states"][0]["state"].values():
        _touch(state.values())


def _touch(tensors: Iterator[Tensor]) -> None:
    """Copies tensors, as a model that takes them does."""
    for tensor in tensors:
        tensor.clone()


def _without(call: Callable[[], object]) -> None:
    with _no_checksums():
        call()


@contextmanager
def _no_checksums() -> Iterator[None]:
    """Nothing is summed; what was written with sums is read as if they were right."""
    with patch.object(writing, "checksum", lambda file: "0"), patch.object(folder, "verify", lambda of, *rest: folder.read_content(of)):
        yield
