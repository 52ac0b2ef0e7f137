"""`metattt eval`: loss, perplexity and bits per byte of checkpoints on a text, by position; and the losses of their
inner loops."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from metattt.checkpoints.files import SAFETENSORS, find_checkpoint, home
from metattt.checkpoints.record import modules
from metattt.checkpoints.trained import Trained, load_model, open_trained
from metattt.composition.instantiate import instantiate_part
from metattt.composition.settings import NO_CHECKPOINT, pick_device, settings
from metattt.data.manifest import MANIFEST
from metattt.data.shards import ShardData
from metattt.data.text import TextData
from metattt.data.tokenizers import tokenizer_of
from metattt.data.windows import Split, Tokenizer, WindowData
from metattt.errors import MetaTTTError, NotFinite, check_choice
from metattt.evaluation import by_position
from metattt.evaluation.by_position import Scores, bin_edges, score
from metattt.evaluation.output import Report, check_same, report, table
from metattt.measures import inner_loss
from metattt.models.language_model import LanguageModel
from metattt.registry import PARAMETERS

ROWS = 40  # a table with more positions than this is left to the CSV
# fields of the data that split=all does not depend on
ORDER_ONLY = ("seed", "split_seed", "validation_fraction", "test_fraction", "max_bytes")
CONTEXT = 2048  # tokens, of a model that does not say
SHARED = ("context_length", "batch_size", "seed", "num_workers", "document_reset")  # fields of every kind of text
NOT_TEXT = ("batch_size", "num_workers", "document_reset")  # fields that do not choose the text


@dataclass
class EvalData:
    """Text to evaluate on. None: as in training."""

    path: Any = None
    text_key: str | None = None
    context_length: int | None = None
    batch_size: int | None = None
    validation_max_bytes: int | None = None
    validation_max_tokens: int | None = None
    dataset: str | None = None
    validation_path: str | None = None
    validation_split: str | None = None


@dataclass
class EvalSettings:
    """The keys of `configs/eval.yaml`."""

    checkpoint: Any
    labels: list[str] | None = None
    split: str = "validation"
    device: str = "auto"
    segment: int = 2048
    bins: str = "log"
    num_bins: int = 16
    inner_loss: bool = False
    inner_loss_windows: int = 32
    tasks: Any = None
    task_path: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int = 16
    tokenizer: str | None = None
    output_dir: str | None = None
    trust: Any = None
    data: EvalData = field(default_factory=EvalData)


def evaluate(cfg: DictConfig) -> dict[str, Any]:
    """Prints the scores of checkpoints on one text as tables, writes them by position as CSV and PNG, and returns them
    by label; or those of classifiers on images (`metattt.evaluation.images`), of models of synthetic sequences
    (`metattt.evaluation.sequences`), or the figures of tasks.

    Args:
        cfg: the configuration of the job `eval`.

    Raises:
        MetaTTTError: a checkpoint, a text or a setting that cannot be used.
    """
    chosen = settings(EvalSettings, cfg, checkpoint=NO_CHECKPOINT)
    check_choice("split", chosen.split, ("train", "validation", "test", "all"))
    split: Split = chosen.split  # type: ignore[assignment]
    if chosen.inner_loss_windows < 1:
        raise MetaTTTError(f"inner_loss_windows={chosen.inner_loss_windows} is not allowed: it must be at least 1")
    device = pick_device(chosen.device)
    files = checkpoints(chosen.checkpoint)
    names = labels(files, chosen.labels)
    console = Console(highlight=False, soft_wrap=True)
    trust = modules(chosen.trust)
    if chosen.tasks:
        return _evaluate_tasks(chosen, files, names, console)
    known = [open_trained(file, trust=trust) for file in files]  # all of them: a mistake shows before the work
    for module in filter(None, map(scored_by, known)):  # of other data than text
        return importlib.import_module(module).evaluate(chosen, files, names, known, device, trust, console)
    texts = [_text(one, chosen.data) for one in known]
    tokenizers = [_tokenizer(one, chosen.tokenizer) for one in known]
    for name, tokenizer in zip(names[1:], tokenizers[1:], strict=True):
        if tokenizer.identity != tokenizers[0].identity:
            raise MetaTTTError(f"{names[0]} and {name} have different tokenizers: they cannot be compared by position")
    _check_same_text(names, texts, split)
    data = _data(texts[0], tokenizers[0])
    edges = bin_edges(data.context_length, chosen.bins, chosen.num_bins)

    scores: dict[str, Scores] = {}
    curves: dict[str, dict[int, inner_loss.Curves]] = {}
    for name, file, text in zip(names, files, texts, strict=True):
        model, _ = load_model(file, device, trust)
        start = data.tokenizer.separator if text.get("document_reset") else None
        try:
            scores[name] = score(
                model, data.loader(split), data.tokenizer.token_bytes, chosen.segment, start, progress=True
            )
            if chosen.inner_loss and _can_measure(console, name, model):
                curves[name] = inner_loss.average(
                    model, data.loader(split), chosen.inner_loss_windows, chosen.segment, progress=True
                )
        except NotFinite as error:
            raise MetaTTTError(f"{file}: {error}") from error
    _print(console, scores, edges, f"{split} text of {data.source}")
    trained = {
        name: int(one.config.data.context_length)
        for name, one in zip(names, known, strict=True)
        if "data" in one.config
    }
    with report(chosen.output_dir, home(files[0]) / "eval", "by_position", console) as made:
        _write(made, scores, edges, chosen.bins, trained, curves)
    if made.no_pictures is not None:
        console.print(made.no_pictures, markup=False)
    return scores


def scored_by(model: Trained) -> str | None:
    """The module that scores a model, as the data of its run says; None: it is a model of text."""
    if "data" not in model.config:
        return "metattt.evaluation.images" if "num_classes" in model.config.model else None
    return getattr(hydra.utils.get_class(model.config.data["_target_"]), "scored_by", None)


def _evaluate_tasks(
    chosen: EvalSettings, files: Sequence[Path], names: Sequence[str], console: Console
) -> dict[str, Any]:
    """Tasks of the evaluation harness, for every checkpoint."""
    from metattt.evaluation import tasks
    from metattt.evaluation.harness import MetaTTTLM, ModelSettings

    wanted = [chosen.tasks] if isinstance(chosen.tasks, str) else chosen.tasks
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise MetaTTTError(
            f"tasks={chosen.tasks} is not allowed: give names of tasks, tasks=[lambada_openai,hellaswag]"
        )
    for key, value in vars(chosen.data).items():
        if value is not None:
            raise MetaTTTError(
                f"data.{key}={value} does not apply to tasks=[...], which bring their own texts: leave it out"
            )
    manager = tasks.find_tasks(wanted, chosen.task_path)
    results: dict[str, Any] = {}
    for name, file in zip(names, files, strict=True):
        given = ModelSettings(
            str(file), chosen.tokenizer, chosen.device, chosen.batch_size, chosen.segment, chosen.trust
        )
        try:
            results[name] = tasks.run_tasks(MetaTTTLM.load(given), wanted, manager, chosen.num_fewshot, chosen.limit)
        except NotFinite as error:
            raise MetaTTTError(f"{file}: {error}") from error
    console.print(tasks.table_of(results))
    with report(chosen.output_dir, home(files[0]) / "eval", "tasks", console) as made:
        tasks.write_results(made, results)
    return results


def checkpoints(given: Any) -> list[Path]:
    """The checkpoint files that `checkpoint=` names: one, or a list.

    Raises:
        MetaTTTError: as `find_checkpoint`; what is neither a path nor a list of paths.
    """
    paths = [given] if isinstance(given, str) else given
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) for path in paths):
        raise MetaTTTError(
            f"checkpoint={given} is not allowed: give a run's folder, its .ckpt file, or a list of these, [a,b]"
        )
    return [find_checkpoint(path) for path in paths]


def labels(files: Sequence[Path], given: Sequence[str] | None) -> list[str]:
    """A name for every checkpoint: the given ones, or those of the run's folders (numbered where they are the same).

    Raises:
        MetaTTTError: not one label for each checkpoint, or the same label twice.
    """
    if given is not None:
        if len(given) != len(files) or len(set(given)) != len(given):
            raise MetaTTTError(
                f"labels=[{','.join(given)}] must be {len(files)} different names, one for every checkpoint"
            )
        return list(given)
    alone = [file.is_file() and file.name != SAFETENSORS for file in files]
    names = [file.stem if one else home(file).absolute().name for file, one in zip(files, alone, strict=True)]
    return _numbered(names)


def _numbered(names: Sequence[str]) -> list[str]:
    """Names that differ: those that occur more than once get a number."""
    return [name if names.count(name) == 1 else f"{name}-{names[: i + 1].count(name)}" for i, name in enumerate(names)]


def _text(model: Trained, changes: EvalData) -> dict[str, Any]:
    """The data of a run, as a plain dictionary, with what the command line changes: shards or text, as its path is."""
    run: Any = OmegaConf.to_container(model.config.data, resolve=True) if "data" in model.config else {}
    given = {key: value for key, value in vars(changes).items() if value is not None}
    if changes.path is None:
        if not run:
            raise MetaTTTError(
                f"{home(model.path)} comes with no text: add data.path=<shards of metattt prepare, or a file or "
                "folder of text>"
            )
    else:
        run.pop("validation_path", None)  # of the other text
        shards = isinstance(changes.path, str) and (Path(changes.path).expanduser() / MANIFEST).is_file()
        kind: type[WindowData] = ShardData if shards else TextData
        target = f"{kind.__module__}.{kind.__qualname__}"
        if run.get("_target_") != target:  # what both kinds have
            run = {"_target_": target, "context_length": CONTEXT} | {key: run[key] for key in SHARED if key in run}
    allowed = PARAMETERS.get(run["_target_"], given)
    for key in given:
        if key not in allowed:
            raise MetaTTTError(
                f"data.{key} does not apply: {changes.path or run.get('path')} has "
                f"{', '.join(sorted(set(vars(changes)) & set(allowed)))}"
            )
    return run | given


def _tokenizer(model: Trained, given: str | None) -> Tokenizer:
    """The tokenizer of a model.

    Raises:
        MetaTTTError: it is not known.
    """
    return tokenizer_of(str(home(model.path)), model.tokenizer, int(model.config.model.vocab_size), given)


def _data(text: dict[str, Any], tokenizer: Tokenizer) -> WindowData:
    """The data module of a text, with the tokens of the model; what it refuses becomes one line."""
    data: WindowData = instantiate_part(OmegaConf.create({"data": text}), "data")
    data.read_as(tokenizer)
    return data


def _check_same_text(names: Sequence[str], texts: Sequence[dict[str, Any]], split: Split) -> None:
    """Refuses a comparison on different texts, or on a text that one of the two was trained on. Fields that only one
    kind of text has are not compared."""
    ignored = NOT_TEXT + (ORDER_ONLY if split == "all" else () if texts[0].get("split_seed") is None else ("seed",))
    for name, text in zip(names[1:], texts[1:], strict=True):
        common = [{key: one[key] for key in texts[0].keys() & text.keys()} for one in (texts[0], text)]
        advice = "compare them with split=all data.path=<a text that none has seen>"
        check_same((names[0], name), common, ignored, "texts", tuple(vars(EvalData())), advice)


def _can_measure(console: Console, name: str, model: LanguageModel) -> bool:
    """Whether any layer has inner-loss curves; a line for those that have none."""
    skipped = inner_loss.unmeasured(model)
    for reason in dict.fromkeys(skipped.values()):
        blocks = ", ".join(str(index) for index, other in skipped.items() if other == reason)
        console.print(f"no inner-loss curves of {name}, layer {blocks}: {reason}", markup=False)
    return len(skipped) < len(model.blocks)


def _print(console: Console, scores: dict[str, Scores], edges: Sequence[int], title: str) -> None:
    """The totals, and below them the table by position if it is not too long."""
    columns = ("model", "tokens", "loss (nats per token)", "perplexity (per token)", "bits per byte")
    rows = (
        (label, f"{one.tokens:,}", f"{one.loss:.4f}", f"{one.perplexity:.4f}", f"{one.bits_per_byte:.4f}")
        for label, one in scores.items()
    )
    console.print(table(title, columns, rows))
    if len(edges) - 1 <= ROWS:
        console.print(by_position.bits_by_position(scores, edges))


def _write(
    made: Report,
    scores: dict[str, Scores],
    edges: Sequence[int],
    bins: str,
    trained: dict[str, int],
    curves: dict[str, dict[int, inner_loss.Curves]],
) -> None:
    """The files of an evaluation."""
    made.csv("by_position", by_position.COLUMNS, by_position.rows(scores, edges))
    if made.no_pictures is None:
        by_position.plot(scores, edges, bins, trained, made.path("by_position", ".png"))
    if curves:
        made.csv("inner_loss", ("model", "layer", "mini_batch", *inner_loss.COLUMNS), inner_loss.rows(curves))
    safe = _numbered([re.sub(r"[^\w.-]+", "-", name) for name in curves])
    for (name, found), part in zip(curves.items(), safe, strict=True) if made.no_pictures is None else ():
        path = made.path(f"inner_loss_{part}" if len(scores) > 1 else "inner_loss", ".png")
        inner_loss.plot(found, f"Inner loss of {name}", path)
