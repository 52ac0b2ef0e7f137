"""Tensors in a safetensors file, each with a checksum, whole or a piece of one that several processes divide.

The checksums (XXH3, 64 bits, the fastest) stand in the file's own header beside the names, so that a file is checked wherever it
is: a flipped bit, a zeroed page and tensors that changed places are found. They are no protection against somebody who
wants to deceive; what a file may do is bounded elsewhere (`metattt.checkpoints.trust`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.io import digest, sync

OURS = "metattt"  # the entry of the header with what is ours in it
LONGEST_HEADER = 100 * 2**20  # bytes; the limit of the format


class Piece(NamedTuple):
    """Where a part of a tensor lies in it.

    Attributes:
        offset: of its first element, by dimension.
        whole: the shape of the tensor.
    """

    offset: tuple[int, ...]
    whole: tuple[int, ...]


def checksum(name: str, tensor: Tensor) -> str:
    """Of the name, the type, the shape and every byte of a tensor on the CPU."""
    found = xxhash.xxh3_64(f"{name}|{tensor.dtype}|{list(tensor.shape)}".encode())
    found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def write_tensors(
    file: Path,
    tensors: Mapping[str, Tensor],
    pieces: Mapping[str, Piece] | None = None,
    beside: Mapping[str, str] | None = None,
    about: str | None = None,
) -> str:
    """Writes a file and waits until it is on the disk.

    Args:
        file: the new file.
        tensors: by name, on any device; a tensor with several names is written once.
        pieces: of the tensors that are not whole.
        beside: files of text that belong to it, with their checksums.
        about: a text that says what the tensors are.

    Returns:
        The checksum of the header, which holds those of the tensors.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    kept: dict[str, Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, given in tensors.items():
        tensor = given.detach()
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
            continue
        seen[place] = name
        kept[name] = tensor.to("cpu").contiguous()
    kept = {name: _alone(tensor) for name, tensor in kept.items()}
    ours: dict[str, Any] = {"xxh3": {name: checksum(name, tensor) for name, tensor in kept.items()}}
    ours |= {"aliases": aliases} if aliases else {}
    ours |= {"pieces": pieces} if pieces else {}
    ours |= {"beside": dict(beside)} if beside else {}
    ours |= {"about": about, "about_xxh3": digest(about.encode())} if about is not None else {}
    file.touch()
    mode = file.stat().st_mode  # as the umask and the folder have it; safetensors lets nobody else read what it writes
    save_file(kept, file, metadata={"format": "pt", OURS: json.dumps(ours, sort_keys=True)})
    file.chmod(mode)
    sync(file)
    return header_checksum(file)


def header_checksum(file: Path) -> str:
    """Of a file's header: names, types, shapes, places, and the checksums of the tensors."""
    with file.open("rb") as stream:
        length = stream.read(8)
        size = struct.unpack("<Q", length)[0] if len(length) == 8 else LONGEST_HEADER + 1
        if size > LONGEST_HEADER:
            raise damaged(file)
        return digest(length + stream.read(size))


class TensorFile:
    """An open file of tensors.

    Args:
        file: its path.
        opened: by safetensors.

    Attributes:
        names: of its tensors; aliases included.
        pieces: of the tensors that are not whole.
        beside: files that belong to it, with their checksums.
        about: what the tensors are, compared with its checksum; None where the file does not say.
    """

    def __init__(self, file: Path, opened: Any):
        self.file, self._opened = file, opened
        stored = (opened.metadata() or {}).get(OURS)
        try:
            ours = json.loads(stored) if stored is not None else {}
            self.checksums = _texts(ours["xxh3"]) if "xxh3" in ours else None
            self.aliases = _texts(ours.get("aliases", {}))
            self.beside = _texts(ours.get("beside", {}))
            self.about: str | None = ours.get("about")
            if self.about is not None and digest(self.about.encode()) != ours.get("about_xxh3"):
                raise ValueError("about")
            self.pieces = {
                name: Piece(*(tuple(map(int, one)) for one in piece))
                for name, piece in dict(ours.get("pieces", {})).items()
            }
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(file) from error
        held = list(opened.keys())
        if self.checksums is not None and (
            set(held) != set(self.checksums) or not set(self.aliases.values()) <= set(held)
        ):
            raise MetaTTTError(f"{file} is damaged: its tensors are not those that its checksums are of")
        self.names: list[str] = [*held, *self.aliases]

    def __getitem__(self, name: str) -> Tensor:
        """A tensor, compared with its checksum where it has one.

        Raises:
            MetaTTTError: it is not the one that was written.
        """
        original = self.aliases.get(name, name)
        tensor: Tensor = self._opened.get_tensor(original)
        if self.checksums is not None and checksum(original, tensor) != self.checksums[original]:
            raise MetaTTTError(
                f"{self.file} is damaged: {original} is not what was written (checksum); take another copy of the file"
            )
        return tensor

    def part(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """A part of a tensor, read alone and not compared."""
        tensor: Tensor = self._opened.get_slice(self.aliases.get(name, name))[where]
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of what the file holds of a tensor."""
        return tuple(self._opened.get_slice(self.aliases.get(name, name)).get_shape())

    def verify(self) -> None:
        """Compares every tensor with its checksum.

        Raises:
            MetaTTTError: one is not what was written.
        """
        for name in self.checksums or ():
            self[name]


@contextmanager
def open_tensors(file: Path) -> Iterator[TensorFile]:
    """Opens a file of tensors, of ours or of anybody.

    Raises:
        MetaTTTError: it is truncated, damaged or of another kind.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            yield TensorFile(file, opened)
    except (SafetensorError, OSError, RuntimeError, KeyError) as error:
        raise damaged(file, str(error).splitlines()[0] if str(error) else "") from error


def read_tensors(file: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a file on the CPU, compared with their checksums where it has them; they may lie on the disk until
    they are used.

    Raises:
        MetaTTTError: as `open_tensors`.
    """
    with open_tensors(file) as opened:
        return {name: opened[name] for name in (opened.names if names is None else names)}


def damaged(file: Path, reason: str = "") -> MetaTTTError:
    """The error for a file that safetensors cannot read."""
    return MetaTTTError(
        f"{file} cannot be read as safetensors: it is truncated, damaged or of another kind"
        + (f" ({reason})" if reason else "")
    )


def _texts(stored: Any) -> dict[str, str]:
    """Texts by name, as they stand in a header."""
    if not isinstance(stored, dict) or not all(isinstance(value, str) for value in stored.values()):
        raise TypeError("texts by name were written")
    return stored


def _alone(tensor: Tensor) -> Tensor:
    """The tensor, with no other in its memory: the format refuses those that share some."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()
