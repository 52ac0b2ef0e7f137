"""Files made to have something run, read, written or allocated when they are opened. Each is well-formed and signed as
ours are: a checksum keeps nobody out."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from metattt.checkpoints.folder import CONTENT
from metattt.io import seal

CALLS: dict[str, dict[str, Any]] = {
    "os.system": {"_args_": ["touch {canary}"]},
    "subprocess.run": {"_args_": [["touch", "{canary}"]]},
    "builtins.open": {"file": "{canary}", "mode": "w"},
    "builtins.exec": {"_args_": ["open('{canary}', 'w')"]},
    "pathlib.Path.write_text": {"_args_": [{"_target_": "pathlib.Path", "_args_": ["{canary}"]}, "x"]},
    "torch.hub.load": {"repo_or_dir": "{folder}", "model": "x", "source": "local"},
    "torch.load": {"f": "{folder}/pickle.pt", "weights_only": False},
    "torch.nn.modules.module.torch.os.system": {"_args_": ["touch {canary}"]},
    "metattt.cli.main": {"_args_": [["prepare", "source={folder}", "target={canary}"]]},
    "hydra.utils.get_method": {"path": "payload.run"},
    "payload.Learner": {},
    "importlib.import_module": {"name": "payload"},
}
"""What a configuration might have called, and with what."""

PLACES = (
    "learner task optimizer layer model model.ffn_dim layer.gate data data.path training training.betas.0 trainer "
    "trainer.strategy trainer.plugins callbacks.one callbacks.progress.lines logger.one another seed"
)
"""Where in the configuration, or a key that it does not have."""

VALUES: dict[str, tuple[Any, ...]] = {
    "model.vocab_size model.num_layers dim num_heads model.conv_width optimizer.steps": (10**12, 10**25, -5, 0, 2.5),
    "data.num_workers data.batch_size data.context_length trainer.devices": (10**6, 10**15, -1),
    "layer callbacks learner training.lr dim": ([], 3, "mlp; ls", None, float("nan")),
    "model.ffn_dim": ("${oc.env:HOME}", "${oc.decode:'1'}", "${hydra:runtime.cwd}", "${dim", "${${dim}}", "x" * 10**6),
    "learner._args_ learner._partial_ learner._component_ learner.__class__": ("all",),
}
"""Sizes, kinds, references and words with a meaning, by their places in the configuration of a run."""

STATES: dict[str, tuple[Any, ...]] = {
    "global_step epoch loops callbacks lr_schedulers optimizer_states": (None, "x", -1, [1], {"a": 1}, 10**30),
    "loops": ({"$tensor": "nowhere"}, {"$tuple": 3}, {"$items": [[{"$items": []}, 1]]}, {"$items": [[1]]}),
}
"""The same in the state of a run."""


class Malicious(NamedTuple):
    """A file made to harm: the way, what exactly, which artifact it is made of, and what changes a copy of that, given
    the copy and the path that shows that something was run."""

    kind: str
    name: str
    thing: str
    make: Callable[[Path, Path], object]


class _Run:
    """Unpickled, it runs a program."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def malicious() -> Iterator[Malicious]:
    """Every file."""
    for index, target in enumerate(CALLS):
        node = {"_target_": target, **CALLS[target]}
        for place in PLACES.split()[index % 3 :: 3]:
            make = partial(_put, f"config.{place}".split("."), node)
            yield Malicious("a class in a checkpoint", f"{target} as {place}", "run", make)
        yield Malicious("a class in run.yaml", target, "run", partial(_call_in_yaml, node))
        yield Malicious("a class in a model", target, "converted", partial(_put, ["config", "learner"], node))
    for part, table in (("config", VALUES), ("content", STATES)):
        for keys, values in table.items():
            for key, value in product(keys.split(), values):
                make = partial(_put, f"{part}.{key}".split("."), value)
                yield Malicious(f"values in {part}", f"{key}={value!r:.30}", "run", make)
    for name in ("../secret", "/etc/hostname", "a/b", "..", ""):
        yield Malicious("names of files", repr(name), "run", partial(_put, ["files", name], {"bytes": 1, "xxh3": "0"}))
    for name, thing in (("*.safetensors", "run"), (CONTENT, "run"), ("*.bin", "shards")):
        yield Malicious("links", name, thing, partial(_lead_out, name))
    for save in (torch.save, lambda content, file: file.write_bytes(pickle.dumps(content))):
        yield Malicious("pickles", save.__name__, "published", partial(_pickle, save))
    for name, content in _contents():
        thing = "run" if name in ("run.yaml", CONTENT) else "published"
        what = f"{content[:30]!r} of {len(content)} bytes"
        yield Malicious(f"content of {name}", what, thing, partial(_write, name, content))


def _put(place: list[str], value: Any, copy: Path, canary: Path) -> None:
    """A value in what stands beside the weights in every checkpoint of a copy, signed."""
    filled = json.dumps(value).replace("{canary}", str(canary)).replace("{folder}", str(copy.parent))
    for file in copy.rglob(CONTENT):
        content = json.loads(file.read_text())
        del content["checksum"]
        owner: Any = content
        for key in place[:-1]:
            owner = owner[key]
        owner[int(place[-1]) if isinstance(owner, list) else place[-1]] = json.loads(filled)
        file.write_text(json.dumps({"checksum": seal(content), **content}))


def _call_in_yaml(node: dict[str, Any], copy: Path, canary: Path) -> None:
    """In the file that a run begins again from when it has no checkpoint."""
    shutil.rmtree(copy / "checkpoints")
    content = yaml.safe_load((copy / "run.yaml").read_text())
    content["learner"] = json.loads(json.dumps(node).replace("{canary}", str(canary)))
    (copy / "run.yaml").write_text(yaml.safe_dump(content))


def _lead_out(name: str, copy: Path, canary: Path) -> None:
    """A file, by way of a link to another folder."""
    file = max(copy.rglob(name))
    elsewhere = copy.parent / f"secret-{file.name}"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def _pickle(save: Callable[[Any, Path], object], copy: Path, canary: Path) -> None:
    """In the place of the weights."""
    (copy / "model.safetensors").unlink()
    save({"model.embed_tokens.weight": _Run(f"touch {canary}")}, copy / "pytorch_model.bin")


def _write(name: str, content: bytes, copy: Path, canary: Path) -> None:
    """Other content in a file of a copy, or in the newest one of its name."""
    if name == "run.yaml":  # read where a run has no checkpoint
        shutil.rmtree(copy / "checkpoints")
    if name.endswith("index.json"):
        (copy / "model.safetensors").unlink()
    file = max(copy.rglob(name), default=copy / name)
    file.write_bytes(content.replace(b"{canary}", str(canary).encode()))


def _contents() -> Iterator[tuple[str, bytes]]:
    """File -> a content that harms a careless reader."""
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n"
    bomb += "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi"))
    for model in (f"x\n{bomb}", "{a: " * 20_000 + "1" + "}" * 20_000, "&a {b: *a}", "{a: '" + "x" * 10**7 + "'}"):
        yield "run.yaml", f"output_dir: x\nmodel: {model}".encode()
    yield "run.yaml", b"!!python/object/apply:os.system ['touch {canary}']"
    for text in (b'{"version": 3, "checksum": ' + b"9" * 10_000 + b"}", b'{"a":' * 100_000, b'{"format": "\\ud800"}'):
        yield CONTENT, text
        yield "config.json", text
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    large = {"shape": [2**40], "data_offsets": [0, 2**42]}
    for header in ({"a": one | large}, {"a": one | {"shape": [-1]}}, {"a": one, "b": one}, {"a": one | {"dtype": "Q9"}}):
        text = json.dumps(header).encode()
        yield "model.safetensors", struct.pack("<Q", len(text)) + text + b"1234"
    yield "model.safetensors", struct.pack("<Q", 2**62) + b"{}"
    for name in ("../x.safetensors", "model.safetensors.index.json", 3, "/etc/hostname"):
        yield "model.safetensors.index.json", json.dumps({"weight_map": {"a": name}}).encode()
    for expression in ("(a+)+$", "("):
        splitter = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        model = {"type": "BPE", "vocab": {chr(33 + i): i for i in range(200)} | {"a" * 40 + "b": 256}, "merges": []}
        content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": splitter, "model": model}
        yield "tokenizer.json", json.dumps(content).encode()
    for text in (b"{}", b"[]", b'{"model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}', b"\0\0"):
        yield "tokenizer.json", text
