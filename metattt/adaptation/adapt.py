"""`metattt adapt`: what a language model gains from learning the texts that it reads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import Tensor, nn

from metattt.adaptation.adapter import Adapter
from metattt.adaptation.audit import leaks, repeated, unseen
from metattt.checkpoints.files import home
from metattt.checkpoints.record import modules
from metattt.checkpoints.trained import load_model, open_trained
from metattt.composition.instantiate import instantiate_part
from metattt.composition.settings import NO_CHECKPOINT, pick_device, settings
from metattt.data.documents import read_documents
from metattt.data.tokenizers import MOST_BYTES, Tokenizer, document_tokens, tokenizer_of
from metattt.errors import MetaTTTError
from metattt.evaluation.by_position import Scores, bin_edges, bits_by_position
from metattt.evaluation.output import report, table, tracked, writable
from metattt.io import read_object, read_text
from metattt.optional import need

BINS = 12
AUDITED = 3  # mini-batches of the document that is audited


def adapt(cfg: DictConfig) -> dict[str, Scores]:
    """Scores texts with the model as it is and while it learns them; prints both, in all and by position, and writes
    them as CSV and PNG.

    Args:
        cfg: the configuration of the job `adapt`.

    Raises:
        MetaTTTError: a checkpoint, text or setting that cannot be used; `NotFinite`, if the weights diverge.
    """
    chosen = settings(cfg, checkpoint=NO_CHECKPOINT)
    if OmegaConf.is_missing(cfg.data, "path"):
        raise MetaTTTError("no texts are given: add data.path=<file, folder or list of these>")
    model, tokenizer, beside = load_causal(chosen)
    folder = writable(chosen.output_dir, beside / "eval")
    texts = read_documents(chosen.data["path"], chosen.data["text_key"], most=chosen.data["documents"])
    most = chosen.data["max_tokens"]  # copied: a view would keep all tokens of a long text
    documents = [torch.tensor(document_tokens(tokenizer, one.text)[:most]) for one in texts]
    adapter = Adapter(
        model, chosen.fast, instantiate_part(cfg, "optimizer"), chosen.rank, chosen.context, chosen.frozen_blocks,
        chosen.clip, chosen.seed,
    )  # fmt: skip
    console = Console(highlight=False, markup=False, soft_wrap=True)
    learned = sum(value.numel() for value in adapter.fast.start.values())
    count = f"{len(documents):,} documents, {sum(map(len, documents)):,} tokens"
    seen = "carries its state" if adapter.carries else f"sees {adapter.context:,} tokens before a mini-batch (context)"
    console.print(f"{count}; the model {seen}; {learned:,} numbers learn")
    if not chosen.reset and (same := repeated(documents)):
        console.print(f"{len(same)} documents are equal to an earlier one, which is learned first: leave them out")
    if chosen.reset and max(map(len, documents)) <= (most := adapter.rule.mini_batch_size):
        console.print(f"no document is longer than optimizer.mini_batch_size={most}: nothing that is learned is read")
    size = chosen.batch_size if chosen.reset else 1
    results = {
        "as it is": _scored(adapter, documents, size, tokenizer, learns=False, resets=True),
        "adapted": _scored(adapter, documents, size, tokenizer, learns=True, resets=chosen.reset),
    }
    columns = ("model", "tokens", "bits per byte", "seconds", "tokens/s")
    rows = (
        (name, one.tokens, one.bits_per_byte, f"{one.seconds:.1f}", round(one.tokens / one.seconds))
        for name, one in results.items()
    )
    console.print(table("while reading the texts", columns, rows))
    # (nothing predicts the first token)
    edges = [edge + 1 for edge in bin_edges(len(results["adapted"].nats) - 1, "log", BINS)]
    console.print(bits_by_position(results, edges))
    if chosen.audit:
        _audit(adapter, documents, chosen, console)
    with report(folder, "adapt", console) as made:
        made.csv("adapt", ("model", "position", "nats", "bytes"), _rows(results))
        curves = {
            f"{name}: {one.bits_per_byte:.3f}": [one.between(*bin_).bits_per_byte for bin_ in pairwise(edges)]
            for name, one in results.items()
        }
        labels = ("position in the document (tokens)", "bits per byte")
        made.plot("adapt", edges[1:], curves, "Learning while reading", labels)
    return results


def load_causal(chosen: Any) -> tuple[nn.Module, Tokenizer, Path]:
    """The model in evaluation mode, its tokenizer, and the folder that it came from.

    Raises:
        MetaTTTError: no such model, or one that does not predict the next token.
    """
    device, path = pick_device(chosen.device), Path(chosen.checkpoint).expanduser()
    kind = _model_type(path)
    if kind is None:
        trust = modules(chosen.trust)
        known = open_trained(chosen.checkpoint, trust=trust)
        vocab_size = known.config.model.get("vocab_size")
        tokenizer = tokenizer_of(chosen.checkpoint, known.tokenizer, vocab_size, chosen.tokenizer)
        return load_model(chosen.checkpoint, device, trust)[0], tokenizer, home(known.path)
    need("transformers", extra="hf", what=f"a model of type {kind}")
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(chosen.checkpoint, use_safetensors=True)
    except OSError as error:
        if path.exists():
            raise
        raise MetaTTTError(
            f"checkpoint={chosen.checkpoint} is no folder here, and could not be loaded from the Hub: {error}"
        ) from error
    model = model.to(device).eval()
    file = path / "tokenizer.json"
    content = read_text(file, MOST_BYTES) if file.is_file() else None
    given = chosen.tokenizer or (None if path.is_dir() else chosen.checkpoint)
    tokenizer = tokenizer_of(chosen.checkpoint, content, model.config.vocab_size, given)
    return model, tokenizer, path if path.is_dir() else Path.cwd()


def _model_type(path: Path) -> str | None:
    """The type of a model of Transformers; None for ours and published TTT models, which `load_model` reads."""
    if not path.exists():  # `runs/mistyped` is no name on the Hub where there is a folder `runs`
        return "the Hub" if len(path.parts) == 2 and not path.parent.exists() else None
    file = path / "config.json"
    if not file.is_file():
        return None
    kind = read_object(file).get("model_type")
    return None if kind in (None, "ttt", "metattt") else str(kind)


def _scored(
    adapter: Adapter, documents: Sequence[Tensor], size: int, tokenizer: Tokenizer, learns: bool, resets: bool
) -> Scores:
    """Scores all documents, `size` of them together."""
    longest, seconds, lengths = max(map(len, documents)), 0.0, tokenizer.token_bytes.numpy()
    nats, num_bytes, count = np.zeros(longest), np.zeros(longest, dtype=np.int64), np.zeros(longest, dtype=np.int64)
    groups = [documents[first : first + size] for first in range(0, len(documents), size)]
    adapter.reset()
    for group in tracked(groups, "adapting" if learns else "scoring"):
        began = time.perf_counter()
        adapter.reset() if resets else adapter.next_documents()  # which learns what is left of the documents before
        score = (adapter.read if learns else adapter.score)(list(group))
        found = score.nats.double().cpu()  # waits for the device
        seconds += time.perf_counter() - began
        if not unseen([score]):
            raise RuntimeError("a token was scored after it had been learned")
        valid = ~found.isnan()
        count[: found.shape[1]] += valid.sum(0).numpy()
        nats[: found.shape[1]] += found.nan_to_num().sum(0).numpy()
        for row, document in zip(valid, group, strict=True):
            num_bytes[: len(document)] += lengths[document.numpy()] * row[: len(document)].numpy()
    return Scores(nats, num_bytes, count, seconds)


def _audit(adapter: Adapter, documents: Sequence[Tensor], chosen: Any, console: Console) -> None:
    """Examines the beginning of the longest document."""
    length = AUDITED * adapter.rule.mini_batch_size + 1
    document = max(documents, key=len)[:length]
    # not at the ends: nothing is predicted before the first token, and no mini-batch is learned with the last
    places = sorted({round(place) for place in np.linspace(0, len(document) - 1, chosen.audit + 2)[1:-1]})

    def scorer(texts: list[Tensor]) -> list[Tensor]:
        adapter.reset()
        logits: Any = adapter.read(texts, logits=True).logits
        return [logits[0]]

    if leak := next(leaks(scorer, [document], int(document.max()) + 1, places), None):
        raise RuntimeError(f"a prediction depends on a token that it should not see: {leak}")
    console.print(f"audit: {len(document):,} tokens, changed from {len(places)} places on: no prediction saw its token")


def _rows(results: Mapping[str, Scores]) -> Iterator[tuple[Any, ...]]:
    for name, one in results.items():
        for place, (nats, count) in enumerate(zip(one.nats, one.bytes, strict=True)):
            yield name, place + 1, float(nats), int(count)
