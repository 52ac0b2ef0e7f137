"""What files of ours are made of: plain data as JSON, without a pickle, and tensors as safetensors.

JSON knows no tuples, and no keys but texts. An object with one key that begins with `$` stands for what it has not:
`{"$tensor": name}`, `{"$tuple": [...]}`, `{"$items": [[key, value], ...]}` for a dictionary with other keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from metattt.composition.messages import first_line
from metattt.errors import MetaTTTError
from metattt.io import check_own, parse, path_of, replaced, sync

TENSOR, TUPLE, ITEMS = "$tensor", "$tuple", "$items"
SCALARS = (str, int, float, bool, type(None))
CHECKSUM, ABOUT = "xxh3", "about"  # entries of the header
UNREADABLE = (SafetensorError, OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError)
"""What safetensors raises for a file that is none."""


def take_apart(node: Any, tensors: dict[str, Tensor], path: str = "", seen: dict[Any, str] | None = None) -> Any:
    """What `json` can write; the tensors inside go into `tensors`, by their place:
    `optimizer_states/0/state/3/exp_avg`. One that is there twice goes there once; `seen` are those before.

    Raises:
        MetaTTTError: an object that is neither plain data nor a tensor.
    """
    seen = {} if seen is None else seen
    if isinstance(node, Tensor):
        while path in tensors:  # keys 1 and "1", or "a/b" beside "a" with "b" in it
            path += "+"
        shared = not isinstance(node, DTensor) and node.numel() > 0
        place = (node.device, node.data_ptr(), node.shape, node.stride(), node.dtype) if shared else path
        name = seen.setdefault(place, path)
        tensors[name] = node
        return {TENSOR: name}
    if isinstance(node, Mapping):
        items = [(key, take_apart(value, tensors, f"{path}/{key}".lstrip("/"), seen)) for key, value in node.items()]
        if all(type(key) is str and not key.startswith("$") for key in node):
            return dict(items)
        return {ITEMS: [[take_apart(key, tensors, f"{path}/key", seen), value] for key, value in items]}
    if isinstance(node, list | tuple):
        listed = [take_apart(one, tensors, f"{path}/{index}", seen) for index, one in enumerate(node)]
        return {TUPLE: listed} if isinstance(node, tuple) else listed
    if isinstance(node, SCALARS):
        return node
    if hasattr(node, "item") and getattr(node, "ndim", None) == 0:  # a scalar of numpy
        return node.item()
    raise MetaTTTError(
        f"a checkpoint cannot hold {type(node).__name__} ({path}): a callback's state may be numbers, texts, lists, "
        "dictionaries and tensors"
    )


def put_together(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `take_apart` took apart. Tensors that are not given are left out with their keys."""
    if isinstance(node, list):
        return [put_together(one, tensors) for one in node if not _absent(one, tensors)]
    if not isinstance(node, dict):
        return node
    mark = next((key for key in node if key.startswith("$")), None)
    if mark is None:
        return {key: put_together(value, tensors) for key, value in node.items() if not _absent(value, tensors)}
    value = node[mark]
    if len(node) == 1 and mark == TENSOR and isinstance(value, str) and value in tensors:
        return tensors[value]
    if len(node) == 1 and mark == TUPLE and isinstance(value, list):
        return tuple(put_together(one, tensors) for one in value)
    pairs = len(node) == 1 and mark == ITEMS and isinstance(value, list)
    if not pairs or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise MetaTTTError(f"`{mark}` is not allowed in a checkpoint")
    found = [(put_together(key, tensors), one) for key, one in value]
    if not all(isinstance(key, (*SCALARS, tuple)) for key, _ in found):
        raise MetaTTTError(f"`{ITEMS}` has a key that is none")
    return {key: put_together(one, tensors) for key, one in found if not _absent(one, tensors)}


def _absent(node: Any, tensors: Mapping[str, Tensor]) -> bool:
    name = node.get(TENSOR) if isinstance(node, dict) else None
    return isinstance(name, str) and name not in tensors


# -- one file, with one checksum in its header, so that it is checked wherever it is -----------------------------------


def checksum(tensors: Mapping[str, Tensor], about: str = "") -> str:
    """Of a text, and of the names, types, shapes and bytes of tensors on the CPU."""
    found = xxhash.xxh3_128(about.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}".encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def write_tensors(file: Path, tensors: Mapping[str, Tensor], about: str = "") -> None:
    """Writes a new file and waits until it is on the disk.

    Args:
        file: its path.
        tensors: by name, on any device; none shares its memory with another.
        about: a text that says what the tensors are.
    """
    kept = {name: alone(tensor) for name, tensor in tensors.items()}
    save(file, kept, {CHECKSUM: checksum(kept, about)} | ({ABOUT: about} if about else {}))


def alone(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, with no other in its memory: the format refuses those that share some."""
    tensor = tensor.detach().to("cpu").contiguous()
    if tensor.stride() != torch.empty(tensor.shape, device="meta").stride():  # of one number, any is called contiguous
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()


def save(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a file with the rights that the umask leaves (safetensors lets nobody else read what it writes)."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt", **metadata})
    file.chmod(mode)
    sync(file)


def read_described(file: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of a file of ours or of anybody on the CPU, compared with the checksum where there is one, and the
    text that says what they are; they may lie on the disk until they are used.

    Raises:
        MetaTTTError: it is truncated, damaged or of another kind.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            header: dict[str, Any] = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except UNREADABLE as error:
        raise damaged(file, error) from error
    about = header.get(ABOUT, "")
    if CHECKSUM in header and header[CHECKSUM] != checksum(tensors, about):
        raise MetaTTTError(f"{file} is damaged: it is not what was written (checksum); take another copy of the file")
    return tensors, about


def write_own(path: str | Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Writes a file of ours in the place of one that may be there, completely or not at all.

    Raises:
        MetaTTTError: it cannot be written.
    """
    file = Path(path).expanduser()
    try:
        with replaced(file) as part:
            write_tensors(part, tensors, json.dumps(about))
    except (OSError, SafetensorError) as error:
        raise MetaTTTError(f"{file} cannot be written: {getattr(error, 'strerror', None) or error}") from error


def read_own(path: str | Path, key: str, form: str, missing: str, other: str) -> tuple[Path, dict[str, Tensor], Any]:
    """A file of `write_own`, its tensors, and what it says of them; `missing` and `other`: what to say where there is
    no file, and of one that is not of this `form`."""
    file = path_of(str(path), key)
    if not file.exists():
        raise MetaTTTError(missing)
    check_own(file)
    tensors, text = read_described(file)
    about = parse(text, str(file)) if text else None
    if not isinstance(about, dict) or about.get("format") != form:
        raise MetaTTTError(f"{file} {other}")
    return file, tensors, about


def damaged(file: Path, error: BaseException) -> MetaTTTError:
    """The error for a file that safetensors cannot read."""
    return MetaTTTError(
        f"{file} cannot be read as safetensors: it is truncated, damaged or of another kind ({first_line(error):.200})"
    )
