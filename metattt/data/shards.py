"""Windows of the tokens that `metattt prepare` has written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from metattt.data.manifest import read_manifest, refuse_strangers
from metattt.data.shard_file import Seen, ShardFile, check_together, trust
from metattt.data.tokenizers import read_tokenizer
from metattt.data.windows import Split, WindowArray, WindowData, no_test_text
from metattt.errors import MetaTTTError, check_integer
from metattt.io import path_of
from metattt.registry import register

DOCUMENT_TOKENS = 1024  # of a held-out document, for a sample


class ShardWindows:
    """Windows `[N, width]` of the tokens of several files, as if they were one, read from the disk as they are needed.

    Args:
        pieces: the files.
        width: tokens per window.
        rows: the windows to take; None takes all.
    """

    def __init__(self, pieces: Sequence[ShardFile], width: int, rows: np.ndarray | None = None):
        self.pieces, self.width, self.rows = list(pieces), width, rows
        self.ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        self.num_windows = int(self.ends[-1]) // width if pieces else 0
        self._seen: list[Seen] = []

    def __len__(self) -> int:
        return self.num_windows if self.rows is None else len(self.rows)

    def __getitem__(self, index: Sequence[int]) -> np.ndarray:
        rows = index if self.rows is None else self.rows[index]
        return np.stack([self.tokens(int(row) * self.width, self.width) for row in rows])

    def __setstate__(self, state: dict[str, Any]) -> None:  # in a process that makes batches
        self.__dict__.update(state)
        trust(self._seen)

    @property
    def size(self) -> int:
        return len(self) * self.width

    def check(self) -> None:
        """Checks the files now, and not where they are read first.

        Raises:
            DamagedShard: one that is not as its record says.
        """
        self._seen = [piece.check() for piece in self.pieces if piece.whole]

    def tokens(self, start: int, count: int) -> np.ndarray:
        """Consecutive tokens, whatever files they are in.

        Raises:
            DamagedShard: a file that is not as its record says.
        """
        found: list[np.ndarray] = []
        piece = int(np.searchsorted(self.ends, start, side="right"))
        while count > 0 and piece < len(self.pieces):
            offset = start - int(self.ends[piece]) + len(self.pieces[piece])
            found.append(self.pieces[piece].read(offset, count))
            start, count, piece = start + len(found[-1]), count - len(found[-1]), piece + 1
        return np.concatenate(found)


@register(group="data", name="shards")
class ShardData(WindowData):
    """Prepared tokens, cut into windows without overlap.

    Args:
        path: a folder that `metattt prepare` has written.
        context_length: T, tokens that the model reads (a window has one more: the last label).
        batch_size: windows per batch in each process, at most.
        validation_max_tokens: validate on at most this many tokens, evenly spread. None: on all.
        seed: of the order of the windows.
        num_workers: processes that make batches; 0 makes them in the training process.
        document_reset: the inner loop starts again where a document starts, so that documents do not see each other.
        verify: check every shard against its checksum before its first token is read (`metattt.data.shard_file` has the
            price). False: sizes alone, and that the tokenizer has the tokens that are read.

    Raises:
        MetaTTTError: a size that is not allowed; from `setup`: a folder that is not complete, or files that are not its
            own.
    """

    def __init__(
        self,
        path: str,
        context_length: int = 2048,
        batch_size: int = 8,
        validation_max_tokens: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        document_reset: bool = False,
        verify: bool = True,
    ):
        super().__init__(context_length, batch_size, seed, num_workers, document_reset)
        if validation_max_tokens is not None:
            check_integer("data.validation_max_tokens", validation_max_tokens)
        self.path, self.validation_max_tokens, self.verify = path, validation_max_tokens, verify
        self.folder = path_of(path, "data.path")
        self._windows: dict[Split, ShardWindows] = {}

    def setup(self, stage: str | None = None) -> None:
        """Reads the manifest, once; for a run, checks all shards, together with its other processes."""
        if not hasattr(self, "manifest"):
            self._read()
        if self.verify and self.trainer is not None:  # now, and not at the first validation
            check_together(list(self._shards.values()))

    def _read(self) -> None:
        """The manifest, the tokenizer, and what can be said of the shards without reading them."""
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise MetaTTTError(
                f"data.path={self.path} holds no shards: write them with metattt prepare source=<text> target={self.path}"
            )
        if not manifest["complete"]:
            raise MetaTTTError(
                f"the shards of data.path={self.path} are not complete: run the same metattt prepare again"
            )
        refuse_strangers(self.folder, {shard["file"] for shard in manifest["shards"]})
        self.tokenizer = read_tokenizer(self.folder, manifest["settings"]["tokenizer"])
        dtype = np.dtype(manifest["dtype"])
        self._shards = {
            shard["file"]: ShardFile.of(self.folder, shard, dtype, self.tokenizer.vocab_size, self.verify)
            for shard in manifest["shards"]
        }
        self.manifest = manifest

    @property
    def source(self) -> str:
        return self.path

    def windows(self, name: Split) -> WindowArray:
        """The windows of one split; `all` is the training windows and then those of validation.

        Raises:
            MetaTTTError: if the split is shorter than one window; `test`.
        """
        if name == "test":
            raise no_test_text(self.path)
        if name not in self._windows:
            self.setup()
            width = self.context_length + 1
            pieces = [
                self._shards[shard["file"]] for shard in self.manifest["shards"] if name in (shard["split"], "all")
            ]
            windows = ShardWindows(pieces, width)
            count = len(windows)
            if not count:
                tokens = int(windows.ends[-1]) if pieces else 0
                raise MetaTTTError(
                    f"the {name} shards of data.path={self.path} have {tokens} tokens, fewer than the {width} of one window: "
                    f"set data.context_length={max(1, tokens - 1)} or less, or prepare more text"
                )
            if name != "train" and self.validation_max_tokens is not None:
                keep = min(count, max(1, self.validation_max_tokens // width))
                windows = ShardWindows(pieces, width, np.arange(keep) * count // keep)
            self._windows[name] = windows
        return self._windows[name]

    def before_reading(self, windows: WindowArray) -> None:
        """Checks the files that the windows are in."""
        if isinstance(windows, ShardWindows):
            windows.check()

    def sample_document(self) -> bytes:
        windows = self.windows("validation")
        assert isinstance(windows, ShardWindows)
        ids = windows.tokens(0, DOCUMENT_TOKENS).tolist()
        starts = [place for place, token in enumerate(ids) if token == self.tokenizer.separator and place]
        return self.tokenizer.decode(ids[: starts[0] if starts else None])
