"""`metattt eval` of language models: loss, perplexity and bits per byte on a text, by position; and the losses of their
inner loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from metattt.checkpoints.files import home
from metattt.checkpoints.trained import Trained
from metattt.data.manifest import MANIFEST
from metattt.data.shards import ShardData
from metattt.data.text import TextData
from metattt.data.tokenizers import tokenizer_of
from metattt.data.windows import Split, WindowData
from metattt.errors import MetaTTTError, NotFinite
from metattt.evaluation import by_position
from metattt.evaluation.by_position import Scores, bin_edges, score
from metattt.evaluation.evaluate import Evaluation, data_of
from metattt.evaluation.output import check_same, drawn_alike, table, tracked
from metattt.measures import inner_loss
from metattt.registry import PARAMETERS

ROWS = 40  # a table with more positions than this is left to the CSV
# fields of the data that split=all does not depend on
ORDER_ONLY = ("seed", "split_seed", "validation_fraction", "test_fraction", "max_bytes")
CONTEXT = 2048  # tokens, of a model that does not say
SHARED = ("context_length", "batch_size", "seed", "num_workers", "document_reset")  # fields of every kind of text
NOT_TEXT = ("batch_size", "num_workers", "document_reset")  # fields that do not choose the text


def evaluate(job: Evaluation) -> dict[str, Scores]:
    """Scores language models on one text, by position; see `Evaluation`.

    Raises:
        MetaTTTError: models of different texts or tokenizers, a text or a setting that cannot be used.
    """
    chosen, names = job.chosen, list(job.known)
    split: Split = chosen.split
    texts = {name: _text(one, chosen.data) for name, one in job.known.items()}
    tokenizers = [
        tokenizer_of(str(home(one.path)), one.tokenizer, int(one.config.model.vocab_size), chosen.tokenizer)
        for one in job.known.values()
    ]
    for name, tokenizer in zip(names[1:], tokenizers[1:], strict=True):
        if not tokenizer.equals(tokenizers[0]):
            raise MetaTTTError(f"{names[0]} and {name} have different tokenizers: eval each alone, by bits per byte")
    _check_same_text(texts, split, tuple(chosen.data))
    data: WindowData = job.data(texts[names[0]])
    data.read_as(tokenizers[0])
    edges = bin_edges(data.context_length, chosen.bins, chosen.num_bins)
    scores: dict[str, Scores] = {}
    curves: dict[str, dict[int, inner_loss.Curves]] = {}
    for name, text in texts.items():
        model = job.model(name)
        start = data.tokenizer.separator if text.get("document_reset") else None
        sizes, count = data.tokenizer.token_bytes, chosen.inner_loss_windows
        try:
            with drawn_alike(model):
                scores[name] = score(model, tracked(data.loader(split), "evaluating"), sizes, chosen.segment, start)
            if len(texts) > 1:  # now: the next one may be damaged
                job.console.print(f"{name}: {scores[name].loss:.4f} nats per token")
            skipped = inner_loss.unmeasured(model) if chosen.inner_loss else {}
            for number, reason in skipped.items():
                job.console.print(f"no inner-loss curves of {name}, layer {number}: {reason}")
            if chosen.inner_loss and len(skipped) < len(model.blocks):
                windows = tracked(data.loader(split), "inner losses")
                with drawn_alike(model):
                    curves[name] = inner_loss.average(model, windows, count, chosen.segment)
        except NotFinite as error:
            raise MetaTTTError(f"{job.known[name].path}: {error}") from error
    columns = ("model", "tokens", "loss (nats per token)", "perplexity (per token)", "bits per byte")
    totals = ((name, one.tokens, one.loss, one.perplexity, one.bits_per_byte) for name, one in scores.items())
    others = [name for name, one in job.known.items() if data_of(one).get("path") != texts[name].get("path")]
    if split == "validation" and others:  # a copy of the text, or its path written in another way, is its text
        as_the_run = {key: one if key in ("path", "text_key") else None for key, one in chosen.data.items()}
        for name in [one for one in others if job.known[one].data is not None]:
            with suppress(MetaTTTError):  # one that has nothing to train on is no run's
                read: WindowData = job.data(_text(job.known[name], as_the_run))
                read.read_as(tokenizers[0])
                others = [one for one in others if one != name or read.fingerprint() != job.known[name].data]
    if split == "validation" and others:
        line = f"{', '.join(others)}: this is not the text of its run, which may have trained on what is held out here"
        job.console.print(line)
    elif split == "validation" and not job.changes and (changed := _changed(job.known, data)):
        line = f"{', '.join(changed)}: the text has changed since, and the run may have trained on what is held out now"
        job.console.print(line)
    job.console.print(table(f"{split} text of {data.source}", columns, totals))
    if len(edges) - 1 <= ROWS:
        job.console.print(by_position.bits_by_position(scores, edges))
    with job.report("by_position", "inner_loss") as made:
        made.csv("by_position", by_position.COLUMNS, by_position.rows(scores, edges))
        if curves:
            made.csv("inner_loss", ("model", "layer", "mini_batch", *inner_loss.COLUMNS), inner_loss.rows(curves))
        contexts = {int(one.config.data.context_length) for one in job.known.values() if "data" in one.config}
        losses = {name: [one.between(*bin_).loss for bin_ in pairwise(edges)] for name, one in scores.items()}
        axes = ("position (tokens of context)", "loss (nats per token)")
        marks = sorted(length for length in contexts if length < data.context_length)
        where = by_position.places(edges, chosen.bins)
        made.plot("by_position", where, losses, "Loss by position", axes, chosen.bins == "log", marks)
    return scores


def _changed(known: Mapping[str, Trained], data: WindowData) -> list[str]:
    """The names of models whose run has read other text than is there now."""
    before = {name: one.data for name, one in known.items() if one.data is not None}
    now = str(data.fingerprint()).partition(" ")[0] if before else None  # of a stream, what is held out
    return [name for name, one in before.items() if one.partition(" ")[0] != now]


def _text(model: Trained, changes: dict[str, Any]) -> dict[str, Any]:
    """The data of a run with what the command line changes: shards or text, as its path is."""
    run, path = data_of(model), changes["path"]
    given = {key: value for key, value in changes.items() if value is not None}
    if path is None:
        if not run:
            raise MetaTTTError(
                f"{home(model.path)} comes with no text: add data.path=<shards of metattt prepare, or a file or "
                "folder of text>"
            )
    else:
        run.pop("validation_path", None)  # of the other text
        shards = isinstance(path, str) and (Path(path).expanduser() / MANIFEST).is_file()
        kind: type[WindowData] = ShardData if shards else TextData
        target = f"{kind.__module__}.{kind.__qualname__}"
        if run.get("_target_") != target:  # what both kinds have
            run = {"_target_": target, "context_length": CONTEXT} | {key: run[key] for key in SHARED if key in run}
    allowed = PARAMETERS.get(run["_target_"], given)
    for key in given:
        if key not in allowed:
            raise MetaTTTError(
                f"data.{key} does not apply: {path or run.get('path')} has "
                f"{', '.join(sorted(changes.keys() & set(allowed)))}"
            )
    return run | given


def _check_same_text(texts: Mapping[str, dict[str, Any]], split: Split, changes: Sequence[str]) -> None:
    """Refuses a comparison on different texts, or on a text that one of the two was trained on. Fields that only one
    kind of text has are not compared."""
    (first, known), *others = texts.items()
    ignored = NOT_TEXT + (ORDER_ONLY if split == "all" else () if known.get("split_seed") is None else ("seed",))
    for name, text in others:
        common = {
            label: {key: one[key] for key in known.keys() & text.keys()}
            for label, one in ((first, known), (name, text))
        }
        advice = "compare them with split=all data.path=<a text that none has seen>"
        check_same(common, ignored, "texts", changes, advice)
