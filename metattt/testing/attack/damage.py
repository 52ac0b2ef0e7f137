"""Ways in which files are damaged: by a disk, by a copy that was cut off, by another file in its place, by hand."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

PAGE = 4096
Damage = tuple[str, Callable[[], object]]


def of_file(file: Path, foreign: Path | None, seed: int, flips: int = 24) -> Iterator[Damage]:
    """Damages to one file, each with its name; each is done to a fresh copy.

    Args:
        file: it is damaged in its place.
        foreign: a file of the same name that belongs elsewhere.
        seed: of the places.
        flips: number of single bits.
    """
    size = file.stat().st_size
    drawn = random.Random(f"{seed} {file.name}")
    places = sorted(
        {0, 1, 7, 8, size // 2, size - 1, *(drawn.randrange(size) for _ in range(flips))} & set(range(size))
    )
    for place in places:
        yield f"bit {place}", partial(_flip, file, place, drawn.randrange(8))
    for place in sorted({0, size // 3, max(0, size - PAGE)}):
        yield f"zeros at {place}", partial(_edit, file, place, bytes(min(PAGE, size - place)))
    for left in sorted({0, 1, 8, size // 2, size - 1} & set(range(size))):
        yield f"cut to {left}", partial(os.truncate, file, left)
    for more in (b"\0", b"x" * 100):
        yield f"{len(more)} bytes more", partial(_append, file, more)
    if size >= 64:
        a, b = sorted(drawn.sample(range(size // 16), 2))
        yield "two pieces changed places", lambda: _swap(file, a * 16, b * 16, 16)
    yield "other bytes", lambda: file.write_bytes(random.Random(seed).randbytes(size))
    yield "missing", file.unlink
    yield "a folder", partial(_make_folder, file)
    yield "a link out", lambda: _link_out(file)
    if foreign is not None and foreign.is_file() and foreign.read_bytes() != file.read_bytes():
        yield "of another", lambda: shutil.copyfile(foreign, file)
    if file.suffix in (".json", ".yaml") and size < 2**20:
        yield from _of_json(file)
    elif file.suffix == ".csv":
        yield "a row cut", lambda: file.write_text(file.read_text()[: size * 2 // 3])


def _of_json(file: Path) -> Iterator[Damage]:
    """Values changed by hand, the checksum of the file left as it was."""
    try:
        content = json.loads(file.read_text())
    except ValueError:
        return
    paths = [path for path in _leaves(content) if path[0] != "checksum"]
    for path in paths[:: max(1, len(paths) // 20)]:
        yield f"{'.'.join(map(str, path))} changed", partial(_rewrite, file, path, _other)
        yield f"{'.'.join(map(str, path))} removed", partial(_rewrite, file, path, None)
    yield "nested deeply", lambda: file.write_text("[" * 100_000 + "]" * 100_000)
    yield "no object", lambda: file.write_text("[1, 2]")
    yield "no JSON", lambda: file.write_text("{'a': 1,}")


def _leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if isinstance(value, dict | list) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)


def _other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value[:-1] + ("x" if value[-1:] != "x" else "y")
    return 1 if value is None else None


def _rewrite(file: Path, path: tuple[Any, ...], change: Callable[[Any], Any] | None) -> None:
    content = json.loads(file.read_text())
    owner = content
    for key in path[:-1]:
        owner = owner[key]
    if change is None:
        del owner[path[-1]]
    else:
        owner[path[-1]] = change(owner[path[-1]])
    file.write_text(json.dumps(content, indent=1))


def _at(file: Path, place: int) -> int:
    with file.open("rb") as stream:
        stream.seek(place)
        return stream.read(1)[0]


def _flip(file: Path, place: int, bit: int) -> None:
    _edit(file, place, bytes([_at(file, place) ^ 1 << bit]))


def _append(file: Path, more: bytes) -> None:
    with file.open("ab") as stream:
        stream.write(more)


def _make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _edit(file: Path, place: int, content: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(place)
        stream.write(content)


def _swap(file: Path, a: int, b: int, count: int) -> None:
    content = bytearray(file.read_bytes())
    content[a : a + count], content[b : b + count] = content[b : b + count], content[a : a + count]
    file.write_bytes(bytes(content))


def _link_out(file: Path) -> None:
    """The same content, by way of a link to somewhere else."""
    elsewhere = file.parent.parent.parent / f"elsewhere-{file.name}"
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)
