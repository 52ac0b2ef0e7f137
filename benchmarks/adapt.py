"""What adaptation gains on texts of other kinds, beside a longer context and a cache of n-grams:
`python benchmarks/adapt.py models=[runs/a-0,runs/a-1,runs/b-0] texts=/my/texts`.

`models` are runs of `metattt train`; those whose names differ after the last `-` alone are seeds of one. `texts` has a
folder for every kind of text. Of each kind, every second document chooses the settings (with the first seed), and the
others are reported. For the other settings see `Settings`. `<output_dir>/adapt.md`, `.json` and `.csv` are written.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from common import Row, exit_code, settings
from omegaconf import MISSING
from report import Report
from torch import Tensor

import metattt
from metattt import Adapter
from metattt.data.documents import read_documents
from metattt.data.tokenizers import ByteTokenizer, document_tokens
from metattt.errors import MetaTTTError
from metattt.optimizers import Adam, BlockMomentum
from metattt.optimizers.block import BlockRule

MIXES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # weights of the n-gram cache
CONTEXTS = (0, 64, 192, 448, 960)  # tokens that are read once more for 64 others
SIZE = 64  # tokens of a mini-batch, where nothing is learned


@dataclass
class Settings:
    """What is measured."""

    models: list[str] = field(default_factory=list)
    texts: str = MISSING
    documents: int = 8  # of a kind
    tokens: int = 4096  # of a document, at most
    least: int = 2048
    order: int = 5  # tokens of context of the n-gram cache
    output_dir: str = "results"


class Choice(NamedTuple):
    """One way to adapt."""

    fast: str
    rule: str
    lr: float
    size: int

    def made(self) -> BlockRule:
        if self.rule == "Adam":
            return Adam(base_lr=self.lr, eps=1e-11, mini_batch_size=self.size)
        return BlockMomentum(base_lr=self.lr, lr="constant", momentum="constant", mini_batch_size=self.size)


GRID = [
    Choice(fast, rule, lr, size)
    for fast, (rule, lr), size in itertools.product(
        ("lora", "mlp", "all"),
        (("Adam", 1e-3), ("Adam", 3e-3), ("Adam", 1e-2), ("momentum", 0.1), ("momentum", 0.3)),
        (32, 64),
    )
] + [Choice("norms", "Adam", lr, 32) for lr in (3e-3, 1e-2)]


def ngrams(ids: Sequence[int], order: int) -> np.ndarray:
    """`[n]` probability of every byte of a document, from what has followed the last `order` bytes, and fewer, so far
    (Witten and Bell, as `metattt.measures.ngram`, counted while reading)."""
    counts: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
    found = np.empty(len(ids))
    for place, token in enumerate(ids):
        contexts = [counts[tuple(ids[place - k : place])] for k in range(min(order, place) + 1)]
        probability = 1 / ByteTokenizer.vocab_size
        for seen in itertools.takewhile(bool, contexts):
            total = sum(seen.values()) + len(seen)
            probability = (seen.get(token, 0) + len(seen) * probability) / total
        found[place] = probability
        for seen in contexts:
            seen[token] = seen.get(token, 0) + 1
    return found


class Scored(NamedTuple):
    """Nats of every predicted token of some documents, and the seconds that they took."""

    nats: np.ndarray
    seconds: float

    @property
    def bits(self) -> float:
        """Per token: tokens are bytes."""
        return float(self.nats.mean()) / math.log(2)


def scored(adapter: Adapter, documents: Sequence[Tensor], learns: bool) -> Scored:
    """All documents together, each with weights of its own."""
    adapter.reset()
    began = time.perf_counter()
    nats = (adapter.read if learns else adapter.score)(documents).nats
    seconds = time.perf_counter() - began
    rows = [row[1 : len(one)].double().numpy() for row, one in zip(nats, documents, strict=True)]
    return Scored(np.concatenate(rows), seconds)


def read_only(model: torch.nn.Module, documents: Sequence[Tensor], context: int | None) -> Scored:
    """The model as it is. `context` tokens are read once more for 64 others; None: its state is carried on."""
    return scored(Adapter(model, "norms", Choice("norms", "Adam", 0.0, SIZE).made(), context=context), documents, False)


def mixed(model: Scored, cache: Scored, mix: float) -> Scored:
    """With a share `mix` of the cache's probability."""
    both = (1 - mix) * np.exp(-model.nats) + mix * np.exp(-cache.nats)
    return Scored(-np.log(both), model.seconds + cache.seconds)


def cached(documents: Sequence[Tensor], order: int) -> Scored:
    began = time.perf_counter()
    found = np.concatenate([ngrams(one.tolist(), order)[1:] for one in documents])
    return Scored(-np.log(found), time.perf_counter() - began)


def main(words: Sequence[str]) -> int:
    """Measures and writes; returns the exit code."""
    chosen = settings(Settings, words)
    torch.set_num_threads(1)
    tuned: dict[str, list[Tensor]] = {}
    reported: dict[str, list[Tensor]] = {}
    for folder in sorted(Path(chosen.texts).expanduser().glob("*/")):
        texts = [one.text for one in read_documents(str(folder), "text") if len(one.text) >= chosen.least]
        ids = [torch.from_numpy(document_tokens(ByteTokenizer(), one))[: chosen.tokens] for one in texts]
        tuned[folder.name], reported[folder.name] = ids[: chosen.documents : 2], ids[1 : chosen.documents : 2]
    if not reported or not all(reported.values()):
        raise MetaTTTError(f"texts={chosen.texts} is not allowed: give a folder of folders of two or more long texts")
    caches = {kind: cached(documents, chosen.order) for kind, documents in reported.items()}
    first: dict[str, tuple[Choice, float, float, int | None]] = {}
    records: list[Row] = []
    for path in chosen.models:
        name, _, seed = Path(path).name.rpartition("-")
        model, _ = metattt.load_model(path)
        if name not in first:
            first[name] = tune(model, tuned, chosen.order)
            print(name, *first[name], flush=True)
        choice, mix, adapted_mix, context = first[name]
        longer = f"longer context ({'state' if context is None else context + SIZE})"
        for kind, documents in reported.items():
            adapter = Adapter(model, choice.fast, choice.made())
            plain, adapted = read_only(model, documents, None), scored(adapter, documents, True)
            conditions = {
                "trained context (256 tokens)": read_only(model, documents, 192),
                "all tokens before, by the state": plain,
                longer: read_only(model, documents, context),
                "with a cache of n-grams": mixed(plain, caches[kind], mix),
                "adapted": adapted,
                "adapted, with the cache": mixed(adapted, caches[kind], adapted_mix),
            }
            for condition, one in conditions.items():
                records.append({
                    "model": name, "seed": seed, "text": kind, "condition": condition, "bits per byte": one.bits,
                    "µs per token": 1e6 * one.seconds / len(one.nats),
                })  # fmt: skip
                print(*records[-1].values(), flush=True)
    tables = {name: table([row for row in records if row["model"] == name]) for name in first}
    notes = [
        f"{name}: {one.fast} by {one.rule}, η = {one.lr:g}, mini-batches of {one.size} tokens; the cache's share {mix:g}, "
        f"after adaptation {adapted_mix:g}." for name, (one, mix, adapted_mix, _) in first.items()
    ]  # fmt: skip
    text = (
        f"Bits per byte of documents of other kinds than the model was trained on, mean (least to most) over seeds; "
        f"{chosen.documents // 2} documents of at most {chosen.tokens:,} bytes of each kind. Fast weights begin again with "
        "every document. Settings were chosen on other documents, with the first seed. The longer context is the best that "
        "takes no more time than adaptation."
    )
    report = Report("Learning while reading", text, tables, settings=asdict(chosen), records=records, notes=notes)
    for written in report.write(Path(chosen.output_dir), "adapt", device="cpu"):
        print(f"written  {written}")
    return 0


def tune(model: torch.nn.Module, texts: dict[str, list[Tensor]], order: int) -> tuple[Choice, float, float, int | None]:
    """The best way to adapt, the cache's best share without and with it, and the best context in the same time."""
    documents = [one for kind in texts.values() for one in kind]
    found = {one: scored(Adapter(model, one.fast, one.made()), documents, True) for one in GRID}
    for one, result in sorted(found.items(), key=lambda item: item[1].bits):
        print(f"  {result.bits:.4f} {result.seconds:6.1f} s {one}", flush=True)
    best = min(found, key=lambda one: found[one].bits)
    plain, cache = read_only(model, documents, None), cached(documents, order)
    alone, after = (min(MIXES, key=lambda mix: mixed(read, cache, mix).bits) for read in (plain, found[best]))
    contexts = {context: read_only(model, documents, context) for context in (*CONTEXTS, None)}
    for context, read in contexts.items():
        print(f"  {read.bits:.4f} {read.seconds:6.1f} s context {context}", flush=True)
    affordable = [context for context, read in contexts.items() if read.seconds <= found[best].seconds]
    return best, alone, after, min(affordable, key=lambda context: contexts[context].bits)


def table(records: Sequence[Row]) -> list[Row]:
    """A row for every condition: each kind of text, and the time of a token."""
    rows: list[Row] = []
    for condition in dict.fromkeys(one["condition"] for one in records):
        here = [one for one in records if one["condition"] == condition]
        row: Row = {"condition": condition}
        for kind in dict.fromkeys(one["text"] for one in here):
            bits = [one["bits per byte"] for one in here if one["text"] == kind]
            row[kind] = f"{statistics.mean(bits):.3f} ({min(bits):.3f} to {max(bits):.3f})"
        row["µs per token"] = round(statistics.median(one["µs per token"] for one in here))
        rows.append(row)
    return rows


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
