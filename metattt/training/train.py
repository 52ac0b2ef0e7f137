"""`metattt train`: from a configuration to a trained model, a log, a loss curve and a sample."""

from __future__ import annotations

import copy
import csv
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import hydra
import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from metattt.compose import compose, instantiate_model
from metattt.data.text import Split, TextData
from metattt.errors import MetaTTTError
from metattt.evaluation.ngram import NGram
from metattt.models.generation import generate
from metattt.training.callbacks import Interrupted, LossCurve
from metattt.training.checkpoint import FILE_NAME, checkpoint_config, find_checkpoint, read_checkpoint
from metattt.training.lightning_module import LanguageModeling

SAMPLE_PROMPT_BYTES = 64
SAMPLE_BYTES = 200
SPLITS: tuple[Split, ...] = ("train", "validation")
RESUMABLE = ("trainer", "callbacks", "logger")  # parts of the configuration that a resumed run may change


def train(cfg: DictConfig) -> int:
    """Trains a model, validates it, compares it with an order-2 byte model, and prints what came out.

    Args:
        cfg: the configuration, as `metattt.compose.compose(job="train")` makes it.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        MetaTTTError: a setting, a path or a checkpoint that cannot be used, or a loss that is not finite.
    """
    console = Console(highlight=False, soft_wrap=True)
    _quiet_lightning()
    cfg = copy.deepcopy(cfg)  # the caller's stays as it is
    cfg.data.path = _absolute(cfg.data.path)  # so that the checkpoint can be used from another folder
    checkpoint = find_checkpoint(cfg.resume) if cfg.resume else None
    done = 0
    if checkpoint is not None:
        content = read_checkpoint(checkpoint)
        cfg, done = _resumed(cfg, checkpoint_config(content), checkpoint), int(content["global_step"])
        if 0 < cfg.trainer.max_steps <= done:
            raise MetaTTTError(f"the run {checkpoint} is complete at step {done}: to train on, add trainer.max_steps=<more>")
    cfg.output_dir = cfg.output_dir or _new_folder(cfg)
    folder = Path(cfg.output_dir)

    lightning.seed_everything(cfg.seed, verbose=False)
    data = _data(cfg)
    model = instantiate_model(cfg)
    module = LanguageModeling(
        model,
        _instantiate(cfg, "training"),
        data.tokenizer.token_bytes,
        OmegaConf.to_container(cfg),  # type: ignore[arg-type]
    )
    trainer = _trainer(cfg)
    baseline = NGram(data.tokenizer.vocab_size).fit(data.windows("train"))
    baseline_bits = baseline.bits_per_byte(data.windows("validation"), data.tokenizer.token_bytes.numpy())
    for curve in _curves(trainer):
        curve.baseline = baseline_bits
    if checkpoint is not None:
        _replay_log(trainer, done)
    _header(console, cfg, trainer, data, module, done)

    started = time.monotonic()
    try:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
    except Interrupted:
        console.print(f"stopped at step {trainer.global_step}. To go on: metattt train resume={folder}")
        return 130
    trainer.save_checkpoint(folder / FILE_NAME)
    seconds = time.monotonic() - started
    if not _validated_last(trainer):
        trainer.validate(module, datamodule=data, verbose=False)
    bits = trainer.callback_metrics["validation/bits_per_byte"].item()
    _report(console, trainer, folder, bits, baseline_bits, seconds)
    _sample(console, module, data, cfg.seed)
    return 0


def _resumed(given: DictConfig, saved: DictConfig, checkpoint: Path) -> DictConfig:
    """The configuration of the run, with what the command line changes.

    What is neither at its default nor as it was has been changed. Model, data and recipe stay: else it would be another run.
    """
    default, before = (_leaves(OmegaConf.to_container(one)) for one in (compose(job="train"), saved))
    for key, value in _leaves(OmegaConf.to_container(given)).items():
        unchanged = any(key in known and known[key] == value for known in (default, before))
        if key in ("resume", "output_dir") or unchanged:
            continue
        if key.partition(".")[0] not in RESUMABLE:
            allowed = ", ".join(f"{part}.*" for part in RESUMABLE)
            raise MetaTTTError(f"{key}={value} would change the run that resume goes on with: only {allowed} may be given")
        OmegaConf.update(saved, key, value, force_add=True)
    saved.resume, saved.output_dir = str(checkpoint), given.output_dir or str(checkpoint.parent)
    return saved


def _leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """Every value of a nested configuration, by dotted key."""
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    items = ((f"{prefix}.{key}" if prefix else str(key), value) for key, value in node.items())
    return {leaf: value for key, child in items for leaf, value in _leaves(child, key).items()}


def _absolute(path: Any) -> Any:
    """A path, or a list of paths, that does not depend on the working directory."""
    if path is None:
        return None
    return str(Path(path).expanduser().absolute()) if isinstance(path, str) else [_absolute(one) for one in path]


def _new_folder(cfg: DictConfig) -> str:
    """`runs/<time>-<learner>`, a folder that does not exist yet."""
    learner = cfg.learner._target_.rpartition(".")[2]
    name = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{learner}"
    folder, count = name, 1
    while folder.exists():
        count += 1
        folder = name.with_name(f"{name.name}-{count}")
    return str(folder)


def _instantiate(cfg: DictConfig, key: str) -> Any:
    """`hydra.utils.instantiate` of one node; what a constructor refuses becomes one line."""
    try:
        return hydra.utils.instantiate(cfg[key], _convert_="all")
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, MetaTTTError):
            raise cause from None
        raise MetaTTTError(f"{key}: {str(cause).splitlines()[0]}") from error


def _data(cfg: DictConfig) -> TextData:
    """The data module, read and checked against the model's vocabulary."""
    data: TextData = _instantiate(cfg, "data")
    data.setup()
    if data.tokenizer.vocab_size > cfg.model.vocab_size:
        raise MetaTTTError(
            f"the text has {data.tokenizer.vocab_size} different tokens and the model {cfg.model.vocab_size}: "
            f"set model.vocab_size={data.tokenizer.vocab_size}"
        )
    return data


def _trainer(cfg: DictConfig) -> lightning.Trainer:
    """Lightning's Trainer with the configured callbacks and loggers, each a named entry of its group."""
    callbacks = [_instantiate(cfg.callbacks, name) for name in cfg.callbacks or {}]
    loggers = [_instantiate(cfg.logger, name) for name in cfg.logger or {}]
    try:
        return hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=loggers or False)
    except Exception as error:  # Lightning's own checks of its arguments
        raise MetaTTTError(f"trainer: {str(error.__cause__ or error).splitlines()[0]}") from error


def _curves(trainer: lightning.Trainer) -> list[LossCurve]:
    return [callback for callback in trainer.callbacks if isinstance(callback, LossCurve)]  # type: ignore[attr-defined]


def _replay_log(trainer: lightning.Trainer, done: int) -> None:
    """Logs again what the run had logged up to step `done`: Lightning's CSV log starts as an empty file."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            file = Path(logger.log_dir) / "metrics.csv"
            rows = list(csv.DictReader(file.open(newline=""))) if file.is_file() else []
            for row in rows:
                if int(row["step"]) <= done:
                    metrics: dict[str, torch.Tensor | float] = {key: float(value) for key, value in row.items() if value and key != "step"}
                    logger.log_metrics(metrics, step=int(row["step"]))
            logger.save()


def _validated_last(trainer: lightning.Trainer) -> bool:
    """Whether the last validation was after the last step."""
    interval = trainer.val_check_batch
    batches = trainer.global_step * trainer.accumulate_grad_batches
    return isinstance(interval, int) and interval > 0 and batches % interval == 0


def _header(console: Console, cfg: DictConfig, trainer: lightning.Trainer, data: TextData, module: LanguageModeling, done: int) -> None:
    """What is about to run, in three lines."""
    if not trainer.is_global_zero:
        return
    tokens = data.batch_size * data.context_length * trainer.accumulate_grad_batches * trainer.world_size
    source = "the Python standard library" if data.path is None else data.path
    sizes = [data.windows(name).size / 1e6 for name in SPLITS]
    console.print(f"text    {source}: {sizes[0]:.1f} MB to train, {sizes[1]:.2f} MB to validate")
    console.print(f"model   {module.model.num_parameters():,} parameters on {trainer.strategy.root_device}")
    start = f", from step {done:,}" if done else ""
    console.print(f"run     {trainer.max_steps:,} steps of {tokens:,} tokens{start} -> {cfg.output_dir}")


def _report(console: Console, trainer: lightning.Trainer, folder: Path, bits: float, baseline: float, seconds: float) -> None:
    """The final table: the model against the baseline, and where the files are."""
    if not trainer.is_global_zero:
        return
    table = Table(title=f"after {trainer.global_step:,} steps ({seconds:.0f} s)", title_justify="left")
    table.add_column("validation")
    table.add_column("bits per byte", justify="right")
    table.add_row("model", f"{bits:.4f}")
    table.add_row("order-2 byte model, same training text", f"{baseline:.4f}")
    table.add_row("model / order-2", f"{bits / baseline:.4f} ({100 * (bits / baseline - 1):+.1f}%)")
    console.print(table)
    console.print(f"checkpoint  {folder / FILE_NAME}")
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            console.print(f"log         {Path(logger.log_dir) / 'metrics.csv'}")
    for curve in _curves(trainer):
        console.print(f"loss curve  {curve.path}")


def _sample(console: Console, module: LanguageModeling, data: TextData, seed: int) -> None:
    """A continuation of the beginning of a held-out document."""
    prompt = data.split("validation")[0][:SAMPLE_PROMPT_BYTES]
    ids = [data.tokenizer.separator, *data.tokenizer.encode(prompt).tolist()]
    model = module.model.eval()
    tokens = generate(
        model, torch.tensor([ids], device=module.device), SAMPLE_BYTES, temperature=0.7, stop=[data.tokenizer.separator], seed=seed
    )
    text = data.tokenizer.decode([int(token) for token in tokens])
    console.print(f"\nsample, temperature 0.7, after a prompt of {len(prompt)} bytes:")
    console.print(prompt.decode(errors="replace"), style="dim", end="", markup=False)
    console.print(text.decode(errors="replace"), markup=False)


def _quiet_lightning() -> None:
    """Only what a user can act on: no lines about devices, workers and tips."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in ("does not have many workers", "dataloader is not resumable", "exists and is not empty", "isinstance.treespec"):
        warnings.filterwarnings("ignore", f".*{message}.*")
