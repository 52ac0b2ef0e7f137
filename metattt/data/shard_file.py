"""One file of tokens: checked as a whole before its first token is read, once in a process, then read in pieces.

The check reads the file once and computes its checksum and its largest token: 4 GB/s on one busy core where the file is
in memory, so what it costs is reading the file from its disk. The processes of one machine share the files among them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
import xxhash

from metattt.data.base import ReadError
from metattt.data.manifest import CHECKSUM
from metattt.io import inside

CHUNK = 2**20  # bytes that are read and checked at a time


class Seen(NamedTuple):
    """A file as it was when it was checked: another size, time or inode is another file."""

    path: str
    checksum: str
    device: int
    inode: int
    size: int
    modified: int
    changed: int


_checked: set[Seen] = set()  # by this process, or by one that it trusts: its parent, or another of its run


class DamagedShard(ReadError):
    """A shard that is not as its record says."""


@dataclass(frozen=True)
class ShardFile:
    """A shard and its record.

    Args:
        path: the file.
        record: of the manifest: its tokens and its checksum.
        dtype: of the tokens.
        vocab_size: V; a token is less.
        whole: check the checksum of the file before it is read; else its size, and the tokens that are read.
    """

    path: Path
    record: dict[str, Any]
    dtype: np.dtype
    vocab_size: int
    whole: bool = True

    @classmethod
    def of(cls, folder: Path, record: dict[str, Any], dtype: np.dtype, vocab_size: int, whole: bool) -> ShardFile:
        """The shard of a record, in its folder; what can be seen without reading it is checked.

        Raises:
            MetaTTTError: it is missing, a link out of the folder, or has another size.
        """
        shard = cls(inside(folder, record["file"]), record, dtype, vocab_size, whole)
        if not shard.path.is_file():
            raise DamagedShard(f"{shard.path} is missing: run metattt prepare again with another target")
        with shard._open() as opened:
            shard._see(opened)
        return shard

    def __len__(self) -> int:
        return int(self.record["tokens"])

    def check(self) -> Seen:
        """Compares the whole file with its record, unless this process has done so since it was written.

        Raises:
            DamagedShard: it is another file, or damaged, or has tokens that the tokenizer does not have.
        """
        with self._open() as opened:
            return self._check(opened)

    def read(self, start: int, count: int) -> np.ndarray:
        """Consecutive tokens, from `start` on: `count` of them, or as many as there are.

        Raises:
            DamagedShard: as `check`.
        """
        count = min(count, len(self) - start)
        with self._open() as opened:
            if self.whole:
                self._check(opened)
            tokens = np.empty(count, self.dtype)
            if opened.fill(tokens.view(np.uint8).data, start * self.dtype.itemsize) < tokens.nbytes:
                raise DamagedShard(f"{self.path} ends before its record does: it has been cut")
        if not self.whole:
            self._check_largest(int(tokens.max(initial=0)))
        return tokens

    def _open(self) -> _OpenFile:
        return _OpenFile(self.path)

    def _see(self, opened: _OpenFile) -> Seen:
        """The file as it is now.

        Raises:
            DamagedShard: it has not the size of its record.
        """
        now, expected = os.fstat(opened.number), len(self) * self.dtype.itemsize
        if now.st_size != expected:
            raise DamagedShard(
                f"{self.path} has {now.st_size} bytes and not the {expected} of its record: it is half-written or of another run; remove it"
            )
        of_file = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
        return Seen(str(self.path.absolute()), self.record[CHECKSUM], *of_file)

    def _check(self, opened: _OpenFile) -> Seen:
        seen = self._see(opened)
        if seen in _checked:
            return seen
        hasher, largest = xxhash.xxh3_128(), 0
        buffer = memoryview(bytearray(min(CHUNK, max(seen.size, 1))))
        for place in range(0, seen.size, CHUNK):
            piece = buffer[: opened.fill(buffer[: seen.size - place], place)]
            hasher.update(piece)
            if len(piece) % self.dtype.itemsize == 0:  # else it was cut meanwhile, and the checksum says so
                largest = max(largest, int(np.frombuffer(piece, self.dtype).max(initial=0)))
        if hasher.hexdigest() != self.record[CHECKSUM] or self._see(opened) != seen:
            raise DamagedShard(
                f"{self.path} is not the shard of its record (checksum): it is half-written, damaged or of another run; remove it"
            )
        self._check_largest(largest)
        _checked.add(seen)
        return seen

    def _check_largest(self, token: int) -> None:
        if token >= self.vocab_size:
            raise DamagedShard(
                f"{self.path} holds the token {token}, and its tokenizer has {self.vocab_size}: it is damaged or of another tokenizer"
            )


def trust(seen: Sequence[Seen]) -> None:
    """Takes files for checked that another process of this run has checked."""
    _checked.update(seen)


def check_together(shards: Sequence[ShardFile]) -> None:
    """Checks shards; in a run of several processes, each checks the part that falls to it among those of its machine.

    Every process of the run has to call it: each learns what any of them found. Another machine may have another copy
    of the files, so each machine checks all of them once.

    Raises:
        DamagedShard: in all processes, naming the first that one of them found.
    """
    if not (dist.is_available() and dist.is_initialized()):
        for shard in shards:
            shard.check()
        return
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    mates = [rank for rank, host in enumerate(hosts) if host == hosts[dist.get_rank()]]
    found: list[Seen] = []
    failure: str | None = None
    try:
        for shard in shards[mates.index(dist.get_rank()) :: len(mates)]:
            found.append(shard.check())
    except Exception as error:  # whatever it is: the others wait for what this process has to say
        failure = str(error) or type(error).__name__
    reports: list[Any] = [None] * len(hosts)
    dist.all_gather_object(reports, (failure, found))
    for said, _ in reports:
        if said is not None:
            raise DamagedShard(said)
    for rank in mates:
        trust(reports[rank][1])


class _OpenFile:
    """A file that is open for the time of a `with`; an error of the disk becomes one line."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> _OpenFile:
        try:
            self.number = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DamagedShard(f"{self.path} cannot be read: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.number)

    def fill(self, buffer: memoryview, place: int) -> int:
        """Reads bytes from a place on; returns how many: fewer than the buffer holds only at the end of the file."""
        done = 0
        try:
            while done < len(buffer) and (count := os.preadv(self.number, [buffer[done:]], place + done)):
                done += count
        except OSError as error:
            raise DamagedShard(f"{self.path} cannot be read: {error.strerror}") from error
        return done
