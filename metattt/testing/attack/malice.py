"""Files made to have something run, read, written or allocated when they are opened. Each is well-formed and signed as
ours are: a checksum keeps nobody out."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from metattt.checkpoints.folder import CONTENT, canonical
from metattt.io import digest

PAYLOADS: dict[str, dict[str, Any]] = {
    "os.system": {"_args_": ["touch {canary}"]},
    "subprocess.run": {"_args_": [["touch", "{canary}"]]},
    "builtins.open": {"file": "{canary}", "mode": "w"},
    "builtins.exec": {"_args_": ["open('{canary}', 'w')"]},
    "pathlib.Path.write_text": {"_args_": [{"_target_": "pathlib.Path", "_args_": ["{canary}"]}, "x"]},
    "pathlib.Path": {"_args_": ["{canary}"]},
    "torch.hub.load": {"repo_or_dir": "{folder}", "model": "x", "source": "local"},
    "torch.load": {"f": "{folder}/pickle.pt", "weights_only": False},
    "torch.utils.collect_env.run": {"command": "touch {canary}"},
    "torch.nn.modules.module.torch.os.system": {"_args_": ["touch {canary}"]},
    "numpy.load": {"file": "{folder}/pickle.npy", "allow_pickle": True},
    "pandas.read_pickle": {"filepath_or_buffer": "{folder}/pickle.pt"},
    "metattt.cli.main": {"_args_": [["prepare", "source={folder}", "target={canary}"]]},
    "hydra.utils.get_method": {"path": "payload.run"},
    "payload.Learner": {},
    "importlib.import_module": {"name": "payload"},
}
"""What a configuration might have called, and with what."""

PLACES: tuple[tuple[Any, ...], ...] = (
    ("learner",), ("task",), ("optimizer",), ("layer",), ("model",), ("model", "ffn_dim"), ("layer", "gate"),
    ("learner", "bias"), ("data",), ("data", "path"), ("training",), ("training", "betas", 0), ("trainer",),
    ("trainer", "strategy"), ("trainer", "+plugins"), ("trainer", "+profiler"), ("callbacks", "+one"),
    ("callbacks", "progress", "lines"), ("logger", "+one"), ("+another",), ("seed",),
)  # fmt: skip
"""Where in the configuration; `+` adds a key."""

SIZES: tuple[tuple[str, Any], ...] = (
    ("model.vocab_size", 10**12), ("model.vocab_size", 10**25), ("model.num_layers", 10**9), ("dim", 2**40),
    ("num_heads", 2**40), ("model.ffn_dim", 10**13), ("optimizer.steps", 10**9), ("optimizer.mini_batch_size", 10**15),
    ("model.conv_width", 10**12), ("data.num_workers", 10**6), ("data.batch_size", 10**15), ("data.context_length", 10**15),
    ("trainer.devices", 10**6), ("model.num_layers", -5), ("dim", 0), ("num_heads", 0), ("model.vocab_size", 2.5),
    ("dim", "8; ls"), ("dim", None), ("task.conv_width", 10**9), ("layer", []), ("callbacks", 3), ("learner", "mlp"),
    ("training.lr", float("nan")),
)  # fmt: skip

TEXTS = (
    "${oc.env:HOME}", "${oc.decode:'1'}", "${oc.create:{}}", "${hydra:runtime.cwd}", "${dim", "${${dim}}", "${layer}",
    "x" * 10**6, "${.dim}",
)  # fmt: skip


Make = Callable[[Path, Path], object]
Change = Callable[[Path, Callable[[dict[str, Any]], object]], None]


class Malicious(NamedTuple):
    """A file made to harm.

    Attributes:
        kind: the way.
        name: what exactly.
        thing: which artifact it is made of.
        make: changes a copy of the artifact; given the copy and the path that shows that something was run.
    """

    kind: str
    name: str
    thing: str
    make: Make


class _Run:
    """Unpickled, it runs a program."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> Any:
        import os

        return os.system, (self.command,)


def malicious() -> Iterator[Malicious]:
    """Every file."""
    for index, target in enumerate(PAYLOADS):
        for place in PLACES[index % 3 :: 3]:
            yield Malicious(
                "a class in a checkpoint", f"{target} as {_dotted(place)}", "run", _calling(target, place, sign)
            )
    for target in list(PAYLOADS)[:6]:
        yield Malicious("a class in run.yaml", target, "run", _calling(target, ("learner",), _change_yaml))
        yield Malicious("a class in a model", target, "converted", _calling(target, ("learner",), sign))
    for dotted, value in SIZES:
        yield Malicious("sizes", f"{dotted}={value}", "run", _putting(tuple(dotted.split(".")), value))
    for text in TEXTS:
        yield Malicious("references", text[:30], "run", _putting(("model", "ffn_dim"), text))
    for key in ("_args_", "_partial_", "_recursive_", "_convert_", "_target_", "_component_", "__class__"):
        given: Any = ["x"] if key == "_args_" else "all"
        yield Malicious("keys with a meaning", key, "run", _putting(("learner", f"+{key}"), given))
    yield from _links()
    yield from _pickles()
    yield from _texts()
    yield from _formats()


# -- ways --------------------------------------------------------------------------------------------------------------


def _calling(target: str, place: tuple[Any, ...], change: Change) -> Make:
    """A class that is called, somewhere in a configuration."""
    return lambda copy, canary: change(copy, lambda config: put(config, place, payload(target, copy, canary)))


def _putting(place: tuple[Any, ...], value: Any) -> Make:
    """Any value, somewhere in the configuration of a run."""
    return lambda copy, canary: sign(copy, lambda config: put(config, place, value))


def _links() -> Iterator[Malicious]:
    for name in ("model.safetensors", CONTENT):
        yield Malicious("links", name, "run", partial(_lead_out, name))
    yield Malicious("links", "the tokens", "shards", partial(_lead_out, "tokens.bin"))
    for name in ("../secret", "/etc/hostname", "a/b", "..", ""):
        about = {name: {"bytes": 1, "xxh3": "0"}}
        yield Malicious("names of files", repr(name), "run", _with_files(about))
    for part in (("callbacks", "progress", "+path"), ("logger", "csv", "path"), ("callbacks", "checkpoint", "folder")):
        yield Malicious("paths to write to", _dotted(part), "run", _to_canary(part))


def _with_files(about: dict[str, Any]) -> Make:
    return lambda copy, canary: change_content(copy, lambda content: content["files"].update(about))


def _to_canary(place: tuple[str, ...]) -> Make:
    return lambda copy, canary: sign(copy, lambda config: put(config, place, str(canary)))


def _lead_out(name: str, copy: Path, canary: Path) -> None:
    """A file, by way of a link to another folder."""
    file = next(one for one in sorted(copy.rglob(name), reverse=True))
    elsewhere = copy.parent / f"secret-{file.name}"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def _write(name: str, content: bytes, copy: Path, canary: Path) -> None:
    """Other content in a file of a copy, or in the newest one of its name."""
    file = next((one for one in sorted(copy.rglob(name), reverse=True)), copy / name)
    file.write_bytes(content)


def _pickles() -> Iterator[Malicious]:
    def saved(copy: Path, canary: Path) -> None:
        torch.save({"model.embed_tokens.weight": _Run(f"touch {canary}")}, _torch_file(copy))

    def bare(copy: Path, canary: Path) -> None:
        _torch_file(copy).write_bytes(pickle.dumps(_Run(f"touch {canary}")))

    yield Malicious("pickles", "pytorch_model.bin", "published", saved)
    yield Malicious("pickles", "a bare one", "published", bare)


def _torch_file(copy: Path) -> Path:
    """A file of torch.save in the place of the weights."""
    (copy / "model.safetensors").unlink()
    return copy / "pytorch_model.bin"


def _texts() -> Iterator[Malicious]:
    nine = "abcdefghi"
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n"
    bomb += "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairwise(nine))
    documents = {
        "aliases that multiply": f"output_dir: x\n{bomb}",
        "a tag of Python": "!!python/object/apply:os.system ['touch {canary}']",
        "nested deeply": "[" * 50_000,
        "a mapping nested deeply": "output_dir: x\nmodel: " + "{a: " * 20_000 + "1" + "}" * 20_000,
        "a circle": "output_dir: x\nmodel: &a {b: *a}",
        "ten megabytes": "output_dir: x\nmodel: {a: '" + "x" * 10**7 + "'}",
    }
    for name, document in documents.items():

        def write(copy: Path, canary: Path, document: str = document) -> None:
            _configuration(copy).write_text(document.replace("{canary}", str(canary)))

        yield Malicious("YAML", name, "run", write)
    numbers = {
        "a long number": '{"version": 3, "checksum": ' + "9" * 10_000 + "}", "nested deeply": '{"a":' * 100_000,
        "a surrogate": '{"format": "\\ud800"}',
    }  # fmt: skip
    for name, document in numbers.items():
        yield Malicious("JSON", name, "run", partial(_write, CONTENT, document.encode()))
        beside = f"{name}, config.json"
        yield Malicious("JSON", beside, "published", partial(_write, "config.json", document.encode()))
    marks: tuple[Any, ...] = (
        {"$tensor": "nowhere"}, {"$tensor": 3}, {"$tuple": 3}, {"$items": [[{"$items": []}, 1]]}, {"$run": "x"}, {"$items": [[1]]},
    )  # fmt: skip
    for mark in marks:
        yield Malicious("marks", json.dumps(mark), "run", _with("loops", mark))
    for key in ("global_step", "epoch", "loops", "callbacks", "lr_schedulers", "optimizer_states"):
        for value in (None, "x", -1, [1], {"a": 1}, 10**30):
            yield Malicious("state of a run", f"{key}={value}", "run", _with(key, value))


def _with(key: str, value: Any) -> Make:
    """Another value in the state of a run."""
    return lambda copy, canary: change_content(copy, lambda content: content["content"].update({key: value}))


def _formats() -> Iterator[Malicious]:
    one = ("F32", [1], [0, 4])
    headers = {
        "a long header": struct.pack("<Q", 2**62) + b"{}", "no header": b"",
        "a tensor larger than its file": _safetensors({"a": ("F32", [2**40], [0, 2**42])}),
        "negative": _safetensors({"a": ("F32", [-1], [0, 4])}), "overlapping": _safetensors({"a": one, "b": one}, b"1234"),
        "an unknown type": _safetensors({"a": ("Q99", [1], [0, 4])}, b"1234"),
    }  # fmt: skip
    for name, header in headers.items():
        yield Malicious("safetensors", name, "published", partial(_write, "model.safetensors", header))
    indices: tuple[Any, ...] = (
        {"a": "../x.safetensors"},
        {"a": "model.safetensors.index.json"},
        {"a": 3},
        [],
        {"a": "/etc/hostname"},
    )
    for parts in indices:

        def index(copy: Path, canary: Path, parts: Any = parts) -> None:
            (copy / "model.safetensors").unlink()
            (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))

        yield Malicious("an index", json.dumps(parts), "published", index)

    def zipped(copy: Path, canary: Path) -> None:
        with zipfile.ZipFile(_torch_file(copy), "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", b"\0" * 10**8)

    yield Malicious("archives", "a zip that unfolds", "published", zipped)
    tokenizers = {
        "a slow expression": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
        "no expression": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    }
    for name, splitter in tokenizers.items():

        def tokenizer(copy: Path, canary: Path, splitter: Any = splitter) -> None:
            vocabulary = {chr(33 + i): i for i in range(200)} | {"a" * 40 + "b": 256}
            content = {
                "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": splitter,
                "post_processor": None, "decoder": None, "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
            }  # fmt: skip
            (copy / "tokenizer.json").write_text(json.dumps(content))

        yield Malicious("tokenizers", name, "published", tokenizer)
    for content in ("{}", "[]", '{"model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}', "\0\0"):
        yield Malicious("tokenizers", content[:20], "published", partial(_write, "tokenizer.json", content.encode()))


# -- tools -------------------------------------------------------------------------------------------------------------


def sign(copy: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the configuration of every checkpoint in a copy, and signs it."""
    change_content(copy, lambda content: change(content["config"]))


def change_content(copy: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes what stands beside the weights in every checkpoint of a copy, and signs it."""
    for file in copy.rglob(CONTENT):
        content = json.loads(file.read_text())
        del content["checksum"]
        change(content)
        file.write_text(json.dumps({"checksum": digest(canonical(content)), **content}))


def _change_yaml(copy: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = _configuration(copy)
    content = yaml.safe_load(file.read_text())
    change(content)
    file.write_text(yaml.safe_dump(content))


def _configuration(copy: Path) -> Path:
    """The file that a run begins again from when it has no checkpoint."""
    shutil.rmtree(copy / "checkpoints")
    return copy / "run.yaml"


def payload(target: str, copy: Path, canary: Path) -> dict[str, Any]:
    """A node that would call something."""
    text = json.dumps({"_target_": target, **PAYLOADS[target]})
    node: dict[str, Any] = json.loads(text.replace("{canary}", str(canary)).replace("{folder}", str(copy.parent)))
    return node


def put(config: Any, place: tuple[Any, ...], value: Any) -> None:
    """Puts a value at a place of a configuration."""
    for key in place[:-1]:
        config = config[key]
    key = place[-1]
    config[key.removeprefix("+") if isinstance(key, str) else key] = value


def _dotted(place: tuple[Any, ...]) -> str:
    return ".".join(map(str, place))


def _safetensors(tensors: dict[str, tuple[str, list[int], list[int]]], data: bytes = b"") -> bytes:
    entries = {
        name: {"dtype": kind, "shape": shape, "data_offsets": place} for name, (kind, shape, place) in tensors.items()
    }
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + data
