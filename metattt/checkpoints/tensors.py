"""Tensors in one safetensors file with one checksum in its header, so that the file is checked wherever it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.io import sync

CHECKSUM, ABOUT = "xxh3", "about"  # entries of the header
UNREADABLE = (SafetensorError, OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError)
"""What safetensors raises for a file that is none."""


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

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    kept = {name: alone(tensor) for name, tensor in tensors.items()}
    save(file, kept, {CHECKSUM: checksum(kept, about)} | ({ABOUT: about} if about else {}))


def alone(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, with no other in its memory: the format refuses those that share some."""
    tensor = tensor.detach().to("cpu").contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()


def save(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a file with the rights that the umask leaves (safetensors lets nobody else read what it writes)."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt", **metadata})
    file.chmod(mode)
    sync(file)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file of ours or of anybody on the CPU, compared with the checksum where there is one; they may
    lie on the disk until they are used.

    Raises:
        MetaTTTError: it is truncated, damaged or of another kind.
    """
    return read_described(file)[0]


def read_described(file: Path) -> tuple[dict[str, Tensor], str]:
    """As `read_tensors`, with the text that says what the tensors are.

    Raises:
        MetaTTTError: as `read_tensors`.
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


def damaged(file: Path, error: BaseException) -> MetaTTTError:
    """The error for a file that safetensors cannot read."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return MetaTTTError(
        f"{file} cannot be read as safetensors: it is truncated, damaged or of another kind ({reason:.200})"
    )
