"""A checkpoint: a folder with weights as safetensors, and `checkpoint.json` with everything else as plain data.

    checkpoint.json       format, version, configuration, state of the training; the files with their sizes and checksums
    model.safetensors     the weights
    training.safetensors  what optimizers and callbacks hold in tensors; not of a model alone
    tokenizer.json        where there is one

Several processes that divide the tensors write a file each, `model-00001-of-00004.safetensors`, with the pieces that
they hold; any number of processes read them (`metattt.checkpoints.writing` writes).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from metattt.checkpoints.plain import put_together
from metattt.checkpoints.tensors import Piece, TensorFile, header_checksum, open_tensors
from metattt.errors import MetaTTTError
from metattt.io import check_own, digest, inside, read_object, read_text

CONTENT = "checkpoint.json"
TOKENIZER = "tokenizer.json"  # of the `tokenizers` library
FORMAT = "metattt checkpoint"
WEIGHTS, STATES = "state_dict", "optimizer_states"  # the entries with the many tensors
MODEL, TRAINING = "model", "training"  # how the names of the files with tensors begin
OLD = ".old"  # after a folder's name while another takes its place


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a folder with a checkpoint."""
    return (path / CONTENT).is_file()


def is_of_run(path: Path) -> bool:
    """Whether a checkpoint is of a run that can go on, and not of a model alone."""
    return "global_step" in (read_object(path / CONTENT).get("content") or ())


def standing(path: Path) -> Path:
    """The path, or the checkpoint that was about to be replaced by it when the process was killed."""
    old = path.with_name(path.name + OLD)
    return old if old.exists() and not path.exists() else path


def canonical(content: Mapping[str, Any]) -> bytes:
    """What the checksum of a `checkpoint.json` is of."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def offset_of(tensor: DTensor) -> tuple[int, ...]:
    """Where this process's part of a tensor begins in it."""
    (chunk,) = tensor.__create_chunk_list__()  # what torch's own checkpoints ask of a tensor
    return tuple(chunk.offsets)


def read_content(folder: Path) -> dict[str, Any]:
    """What `checkpoint.json` says, compared with its checksum; and whether the files are there with the sizes and
    headers that it names. No tensors are read.

    Raises:
        MetaTTTError: a file that is missing, of another checkpoint, or damaged.
    """
    path = folder / CONTENT
    content = read_object(path)
    if content.get("format") != FORMAT:
        raise MetaTTTError(f"{path} is not a checkpoint of metattt: its format is {str(content.get('format'))[:40]!r}")
    stored = content.pop("checksum", None)
    if stored != digest(canonical(content)):  # its depth was bounded when it was read
        raise MetaTTTError(f"{path} is damaged or was edited: it is not what was written (checksum)")
    files = content.get("files")
    if not isinstance(files, dict) or not isinstance(content.get("content"), dict):
        raise MetaTTTError(f"{path} names no files: it is of another program")
    for name, about in files.items():
        _check_file(folder, name, about)
    return content


def _check_file(folder: Path, name: str, about: Any) -> None:
    """Compares a file with what is known of it: its size, and its header or text."""
    file = inside(folder, name)
    check_own(file)
    if not isinstance(about, dict):
        raise MetaTTTError(f"{folder / CONTENT} says nothing of {name}")
    if file.stat().st_size != about.get("bytes"):
        raise MetaTTTError(
            f"{file} has {file.stat().st_size} bytes and not {about.get('bytes')}: it is truncated or of another checkpoint"
        )
    found = header_checksum(file) if "header" in about else digest(file.read_bytes())
    if found != about.get("header", about.get("xxh3")):
        raise MetaTTTError(f"{file} is damaged or of another checkpoint: it is not what was written (checksum)")


def read_checkpoint(
    folder: Path, content: Mapping[str, Any], weights: bool = True, states: bool = True
) -> dict[str, Any]:
    """The content of a checkpoint with its tensors on the CPU, put together from the pieces of all processes. Every
    tensor that is read is compared with its checksum.

    Args:
        folder: the checkpoint.
        content: as `read_content` found it.
        weights: with `state_dict`.
        states: with what optimizers hold for every weight.

    Raises:
        MetaTTTError: a tensor that is not what was written, or not all there.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for kind, wanted in ((MODEL, weights), (TRAINING, states)):
        with _opened(folder, content, kind) as files:
            held = {name: files for name, files in _holders(files).items() if wanted or not _is_large(name, kind)}
            found[kind] = {name: _whole(folder, name, files) for name, files in held.items()}
    rest: dict[str, Any] = put_together(content["content"], found[TRAINING])
    return rest | ({WEIGHTS: found[MODEL]} if weights else {})


def _is_large(name: str, kind: str) -> bool:
    """Whether a tensor is a weight, or of a weight."""
    return kind == MODEL or (name.startswith(f"{STATES}/") and "/state/" in name)


def read_tokenizer(folder: Path) -> str | None:
    """The text of the tokenizer.json in a folder; None if there is none.

    Raises:
        MetaTTTError: it cannot be read.
    """
    file = folder / TOKENIZER
    return read_text(inside(folder, TOKENIZER)) if file.exists() or file.is_symlink() else None


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights by name; no tensors are read."""
    with _opened(folder, read_content(folder), MODEL) as files:
        return {
            name: held[0].pieces[name].whole if name in held[0].pieces else held[0].shape(name)
            for name, held in _holders(files).items()
        }


def verify(folder: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Reads all of a checkpoint and compares it with its checksums.

    Args:
        folder: the checkpoint.
        share: (i, n): every n-th file from the i-th on.

    Raises:
        MetaTTTError: naming the first file that is not what was written.
    """
    content = read_content(folder)
    tensors = [name for name, about in sorted(content["files"].items()) if "header" in about]
    for name in tensors[share[0] :: share[1]]:
        with open_tensors(folder / name) as file:
            file.verify()


def load_parts(folder: Path, content: Mapping[str, Any], kind: str, tensors: Mapping[str, Tensor]) -> None:
    """Fills tensors, whole or divided among processes, from the pieces that others wrote; in place, and every process
    reads what it needs. `verify` compares the files.

    Args:
        folder: the checkpoint.
        content: as `read_content` found it.
        kind: `MODEL` or `TRAINING`.
        tensors: by their names in the checkpoint.

    Raises:
        MetaTTTError: a tensor that the checkpoint does not have, or of another shape.
    """
    with _opened(folder, content, kind) as files:
        holders = _holders(files)
        for name, tensor in tensors.items():
            if name not in holders:
                raise MetaTTTError(f"{folder} has no {name}: it is of another model")
            mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            divided = isinstance(tensor, DTensor) and mine.shape != tensor.shape
            offset = offset_of(tensor) if divided else (0,) * tensor.dim()  # type: ignore[arg-type]
            if mine.numel():
                with torch.no_grad():
                    _fill(folder, name, holders[name], mine, offset, tuple(tensor.shape))


@contextmanager
def _opened(folder: Path, content: Mapping[str, Any], kind: str) -> Iterator[list[TensorFile]]:
    """The files of one kind."""
    names = sorted(name for name in content["files"] if name.startswith(kind) and name.endswith(".safetensors"))
    with ExitStack() as stack:
        yield [stack.enter_context(open_tensors(folder / name)) for name in names]


def _holders(files: list[TensorFile]) -> dict[str, list[TensorFile]]:
    """Which files hold a tensor, or pieces of it."""
    holders: dict[str, list[TensorFile]] = {}
    for file in files:
        if file.checksums is None:
            raise MetaTTTError(f"{file.file} has no checksums: it is not of this checkpoint")
        for name in file.names:
            holders.setdefault(name, []).append(file)
    return holders


def _whole(folder: Path, name: str, held: list[TensorFile]) -> Tensor:
    """A tensor, put together from its pieces."""
    first = held[0]
    if name not in first.pieces:
        return first[name]
    whole = first.pieces[name].whole
    counts = sum(_count(file.shape(name)) for file in held)
    if counts != _count(whole):  # before it is allocated
        raise MetaTTTError(f"{folder} does not hold all of {name}: it has {counts} of {_count(whole)} numbers")
    found = torch.zeros(whole, dtype=first[name].dtype)
    for file in held:
        part = file[name]
        found[_within(folder, name, file.pieces.get(name), tuple(part.shape), whole)] = part
    return found


def _fill(
    folder: Path, name: str, held: list[TensorFile], mine: Tensor, offset: tuple[int, ...], whole: tuple[int, ...]
) -> None:
    """Copies what files hold of the part of a tensor that begins at `offset`."""
    copied = 0
    for file in held:
        shape = file.shape(name)
        piece = file.pieces.get(name, Piece((0,) * len(shape), shape))
        if piece.whole != whole:
            raise MetaTTTError(
                f"{folder} holds {name} as {list(piece.whole)} and not as {list(whole)}: it is of another model"
            )
        _within(folder, name, piece, shape, whole)
        start = [max(a, b) for a, b in zip(piece.offset, offset, strict=True)]
        stop = [min(a + n, b + m) for a, n, b, m in zip(piece.offset, shape, offset, mine.shape, strict=True)]
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            continue
        there = tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, piece.offset, strict=True))
        here = tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, offset, strict=True))
        part = file.part(name, there) if there else file[name]  # a number alone has no slices
        mine[here].copy_(part) if here else mine.copy_(part)
        copied += part.numel()
        if file.pieces.get(name) is None:
            break
    if copied < mine.numel():
        raise MetaTTTError(f"{folder} does not hold all of {name}")


def _within(
    folder: Path, name: str, piece: Piece | None, shape: tuple[int, ...], whole: tuple[int, ...]
) -> tuple[slice, ...]:
    """Where a piece goes."""
    fits = piece is not None and piece.whole == whole and len(piece.offset) == len(shape) == len(whole)
    if not fits or any(o < 0 or o + n > m for o, n, m in zip(piece.offset, shape, whole, strict=True)):  # type: ignore[union-attr]
        raise MetaTTTError(f"{folder} holds a piece of {name} that does not fit it: it is damaged")
    return tuple(slice(o, o + n) for o, n in zip(piece.offset, shape, strict=True))  # type: ignore[union-attr]


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
