"""Ways in which files are damaged: by a disk, by a copy that was cut off, by another file in its place, by hand."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

PAGE = 4096
WORDS = re.compile(r'"(?:[^"\\]|\\.)+"|-?\d[\d.e+-]*|true|false|null')  # of JSON: keys and values


def of_file(file: Path, foreign: Path | None, seed: int, flips: int = 24) -> Iterator[tuple[str, Callable[[], object]]]:
    """Damages to one file, each with its name; each is done to a fresh copy.

    Args:
        file: it is damaged in its place.
        foreign: a file of the same name that belongs elsewhere.
        seed: of the places.
        flips: number of single bits.
    """
    content = file.read_bytes()
    size, drawn = len(content), random.Random(f"{seed} {file.name}")
    places = {0, 1, 7, 8, size // 2, size - 1, *(drawn.randrange(size) for _ in range(flips))}
    for place in sorted(places & set(range(size))):
        yield f"bit {place}", partial(_put, file, place, bytes([content[place] ^ 1 << drawn.randrange(8)]))
    for place in sorted({0, size // 3, max(0, size - PAGE)}):
        yield f"zeros at {place}", partial(_put, file, place, bytes(min(PAGE, size - place)))
    for left in sorted({0, 1, 8, size // 2, size - 1} & set(range(size))):
        yield f"cut to {left}", partial(os.truncate, file, left)
    yield "bytes more", partial(file.write_bytes, content + b"x" * 100)
    half = size // 2
    yield "halves changed places", partial(file.write_bytes, content[half:] + content[:half])
    yield "other bytes", partial(file.write_bytes, drawn.randbytes(size))
    yield "missing", file.unlink
    yield "a folder", lambda: (file.unlink(), file.mkdir())
    yield "a link out", partial(_link_out, file)
    if foreign is not None and foreign.is_file() and foreign.read_bytes() != content:
        yield "of another", partial(shutil.copyfile, foreign, file)
    if file.suffix == ".json":
        text = content.decode()
        words = list(WORDS.finditer(text))
        for word in drawn.sample(words, min(len(words), 40)):
            changed = text[: word.start()] + _other(word[0]) + text[word.end() :]
            yield f"{word[0]:.40} at {word.start()} changed by hand", partial(file.write_text, changed)
        yield "nested deeply", partial(file.write_text, "[" * 100_000 + "]" * 100_000)
        yield "no object", partial(file.write_text, "[1, 2]")


def _other(word: str) -> str:
    """Another key or value of the same type."""
    if word[0] == '"':
        return f'{word[:-2]}{"y" if word[-2] == "x" else "x"}"'
    return {"true": "false", "false": "true", "null": "1"}.get(word) or f"{word[:-1]}{(int(word[-1]) + 1) % 10}"


def _put(file: Path, place: int, content: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(place)
        stream.write(content)


def _link_out(file: Path) -> None:
    """The same content, by way of a link to somewhere else."""
    elsewhere = file.parent.parent.parent / f"elsewhere-{file.name}"
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)
