"""What is attacked: small things that the commands themselves have made, and what the commands do with them."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib
import io
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from metattt.composition.compose import compose

TINY = (
    "dim=8", "num_heads=2", "model.num_layers=1", "model.ffn_dim=16", "data.context_length=24", "data.batch_size=4",
    "trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "optimizer.mini_batch_size=8", "trainer.val_check_interval=2",
    "callbacks.checkpoint.every_steps=2", "sample=false", "~callbacks.loss_curve",
)  # fmt: skip
STEPS, MORE = 4, 6  # of a run, and of the run that goes on
WORDS = ("state", "model", "learns", "while", "it", "reads", "token", "by", "token", "and", "forgets", "nothing")


class Artifacts:
    """The things under attack, each a folder below `home`.

    Args:
        home: a new folder, or one of an attack before: then what is there is used again.
        sharded: also the checkpoint of two processes, which takes some seconds.
    """

    def __init__(self, home: Path, sharded: bool = True):
        self.home, self.work = home, home / "work"
        self.text, self.it = home / "text", home / "work" / "it"
        if not (home / "foreign shards" / "manifest.json").is_file():  # made last
            self._make(sharded)
        self.commands = self._commands()

    def _make(self, sharded: bool) -> None:
        home = self.home
        shutil.rmtree(home, ignore_errors=True)
        self.text.mkdir(parents=True)
        for index in range(6):
            drawn = random.Random(index)
            words = " ".join(drawn.choice(WORDS) for _ in range(300))
            (self.text / f"{index}.txt").write_text(words)
        data = f"data.path={self.text}"
        for name, seed in (("run", 0), ("foreign run", 1)):
            call("train", *TINY, data, f"seed={seed}", f"output_dir='{home / name}'", f"trainer.max_steps={STEPS}")
        if sharded:
            given = [
                *TINY,
                data,
                f"output_dir={home / 'sharded'}",
                f"trainer.max_steps={STEPS}",
                "trainer=fsdp",
                "trainer.devices=2",
            ]
            subprocess.run(
                [sys.executable, "-m", "metattt.cli", "train", *given], check=True, capture_output=True, timeout=300
            )
        call("convert", f"source={home / 'run'}", f"target={home / 'published'}", "direction=to_published")
        call("convert", f"source={home / 'published'}", f"target={home / 'converted'}")
        for name, seed in (("shards", 0), ("foreign shards", 1)):
            folder = f"target='{home / name}'"
            call(
                "prepare",
                f"source={self.text}",
                folder,
                f"seed={seed}",
                "validation_fraction=0.3",
                "workers=1",
            )

    def fresh(self, name: str) -> Path:
        """A copy of a thing, to be damaged and read, in the place that the commands are given."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.home / name, self.it, symlinks=True)
        return self.it

    def _commands(self) -> Mapping[str, Callable[[], str]]:
        """Name -> what a command makes of the thing in its place, as a text; each composed once."""
        it, text, new = self.it, f"data.path={self.text}", self.work / "new"
        here = ("device=cpu", f"output_dir={self.work / 'eval'}")
        alone = ("data.context_length=24", "split=all")
        start = (*TINY, f"output_dir={new}", "trainer.max_steps=1")
        words: dict[str, tuple[str, ...]] = {
            "eval": (f"checkpoint={it}", text, *here, *alone),
            "generate": (f"checkpoint={it}", "prompt=the state", "max_new_tokens=8", "temperature=0", "device=cpu"),
            "convert": (f"source={it}", f"target={new}"),
            "resume": (f"resume={it}", f"trainer.max_steps={MORE}"),
            "resume in one process": (
                f"resume={it}",
                f"trainer.max_steps={MORE}",
                "trainer=default",
                "trainer.devices=1",
            ),
            "init_from": (*start, text, f"init_from={it}"),
            "train on": (*start, "data=shards", f"data.path={it}"),
            "eval on": (f"checkpoint={self.home / 'run'}", f"data.path={it}", *here, *alone),
        }
        return {name: _command(name, given, it, new) for name, given in words.items()}


def _command(name: str, words: tuple[str, ...], it: Path, new: Path) -> Callable[[], str]:
    trained = name.startswith(("resume", "init_from", "train"))
    job = "train" if trained else name.partition(" ")[0]
    cfg = compose(*words, job=job)

    def command() -> str:
        found = io.StringIO()
        with contextlib.redirect_stdout(found):
            given = cfg.copy()
            if name == "convert" and not (it / "config.json").exists():
                given.direction = "to_published"
            scores = _job(job)(given)
        if job == "eval":
            return " ".join(repr(one.loss) for one in scores.values())
        if job == "train":
            return _losses((it if name.startswith("resume") else new) / "metrics.csv")
        return found.getvalue() if job == "generate" else _tensors(new)

    return command


def call(job: str, *words: str) -> None:
    """Runs a command as the command line would, without its output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _job(job)(compose(*words, job=job))


def _job(job: str) -> Callable[[DictConfig], Any]:
    from metattt.cli import COMMANDS

    _, module, function = COMMANDS[job]
    found: Callable[[DictConfig], Any] = getattr(importlib.import_module(module), function)
    return found


def _losses(file: Path) -> str:
    """The losses after the checkpoint that a run went on from."""
    with file.open(newline="") as stream:
        rows = [(row["step"], row.get("train/loss")) for row in csv.DictReader(stream)]
    return " ".join(f"{step}:{loss}" for step, loss in rows if loss and (int(step) > STEPS or len(rows) < STEPS))


def _tensors(folder: Path) -> str:
    """A text that stands for every tensor in a folder of weights."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
