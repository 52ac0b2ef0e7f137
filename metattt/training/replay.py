"""`metattt train replay=<folder>`: computes a step that diverged again, and shows where it stops being finite."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from metattt.checkpoints.record import checked_record, record_config
from metattt.composition.instantiate import instantiate_model, instantiate_part
from metattt.composition.settings import pick_device
from metattt.errors import MetaTTTError
from metattt.measures.inner_health import Health, inner_health
from metattt.training.diagnosis import names
from metattt.training.divergence import refuse_nan
from metattt.training.dump import RECORD, Step, read_dump, set_random_state
from metattt.training.finite import name_parameters, name_tokens
from metattt.training.text_module import LanguageModeling

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


def replay(folder: str, trust: Collection[str] = ()) -> int:
    """Prints the loss of a step that was written down, what is not finite first, by module, and what the inner loops
    of its first batch do. The batches of all processes of the run follow one after the other.

    Args:
        folder: `divergence-step-<n>` of a run.
        trust: modules of the user's whose classes it may name.

    Raises:
        MetaTTTError: a folder that is no such dump.
    """
    path = Path(folder).expanduser()
    record, weights, steps = read_dump(path)
    run = checked_record(record.get("run"), path / RECORD)
    cfg = record_config(run, path / RECORD, skip=("callback", "strategy", "data"), trust=trust)
    device = pick_device("auto")
    module = _module(cfg, run, record, steps[0].batches[0])
    try:
        module.model.load_state_dict(weights)
    except RuntimeError as error:
        raise MetaTTTError(f"replay={folder}: its weights are not those of its configuration") from error
    precision = str(record.get("precision"))
    module.to(device=device, dtype=TRUE.get(precision)).train()
    refuse_nan(module, False)
    autocast = torch.autocast(device.type, AUTOCAST[precision]) if precision in AUTOCAST else nullcontext()
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"replay  {path}: step {record.get('step')} on {device}", markup=False)
    console.print(f"found   {record.get('found')}", markup=False)
    _show(console, module, steps, device, autocast)
    return 0


def _module(cfg: Any, run: dict[str, Any], record: dict[str, Any], batch: Any) -> Any:
    """The Lightning module of the run, without its data."""
    model, recipe = instantiate_model(cfg), instantiate_part(cfg, "training")
    if not isinstance(batch, Tensor) and ("vocab_size" in cfg.model or "in_features" in cfg.model):
        from metattt.training.sequence_module import LabelledSequences

        return LabelledSequences(model, recipe, run)
    if "vocab_size" in cfg.model:
        return LanguageModeling(model, recipe, torch.zeros(model.vocab_size), run, record.get("document_start"))
    from metattt.training.image_module import ImageClassification

    return ImageClassification(model, recipe, run)  # type: ignore[arg-type]


def _show(
    console: Console,
    module: Any,
    steps: Iterable[Step],
    device: torch.device,
    autocast: AbstractContextManager[Any],
) -> None:
    watch = _Watch(module.model)
    steps = list(steps)
    count = sum(len(step.batches) for step in steps)
    number = 0
    for step in steps:
        set_random_state(step.random, device)
        for batch in step.batches:
            batch = batch.to(device) if isinstance(batch, Tensor) else tuple(part.to(device) for part in batch)
            with torch.set_grad_enabled(not getattr(module.recipe, "forward_only", False)), autocast:
                loss = module.batch_loss(batch)
            console.print(f"loss    {loss.item():.6g} of batch {number}, {_shape(batch)}", markup=False)
            if loss.requires_grad:
                (loss / count).backward()
            number += 1
    watch.remove()
    parameters = sum(1 for _ in module.model.parameters())
    weights, gradients = (name_parameters(module.model, gradients) for gradients in (False, True))
    console.print(f"weights {_of(names(weights, parameters) if weights else None)}", markup=False)
    console.print(f"forward {_of(watch.forward)}", markup=False)
    console.print(f"reverse {_of(watch.backward)}", markup=False)
    console.print(f"gradient {_of(names(gradients, parameters) if gradients else None)}", markup=False)
    batch = steps[0].batches[0]
    batch = batch.to(device) if isinstance(batch, Tensor) else tuple(part.to(device) for part in batch)
    with torch.no_grad(), autocast:
        places = name_tokens(module.item_losses(batch))
        health = inner_health(module.model, lambda: module.item_losses(batch))
    console.print(f"tokens  {_of(places)}", markup=False)
    if health:
        console.print(_table(health))


class _Watch:
    """The first modules whose output, or whose output's gradient, is not finite.

    Attributes:
        forward: of the forward pass; None: all were finite.
        backward: of the backward pass.
    """

    def __init__(self, model: nn.Module):
        self.forward: str | None = None
        self.backward: str | None = None
        self.hooks = [
            module.register_forward_hook(self._hook(f"{name} ({type(module).__name__})"))
            for name, module in model.named_modules()
            if name
        ]

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, arguments: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return
            if self.forward is None and (said := _said(value)):
                self.forward = f"{name}: {said}"
            if value.requires_grad:
                value.register_hook(lambda gradient: self._back(name, gradient))

        return look

    def _back(self, name: str, gradient: Tensor) -> None:
        if self.backward is None and (said := _said(gradient)):
            self.backward = f"{name}: {said}"

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


def _said(value: Tensor) -> str | None:
    """How much of a tensor is not finite; None if nothing is."""
    bad = ~torch.isfinite(value.detach())
    count = int(bad.sum())
    return f"{count:,} of {value.numel():,} numbers are not finite" if count else None


def _of(found: str | None) -> str:
    return "finite" if found is None else f"not finite: {found}"


def _shape(batch: Tensor | tuple[Tensor, ...]) -> str:
    return str(list(batch.shape if isinstance(batch, Tensor) else batch[0].shape))


def _table(health: dict[int, Health]) -> Table:
    """The inner loops of every layer, means or extremes over heads and places."""
    table = Table(title="inner loops on the first batch", title_justify="left")
    for name in (
        "layer",
        "ℓ(W_t−1)",
        "ℓ(W_t)",
        "share rising",
        "share worse than W0",
        "η at most",
        "α at most",
        "τ at least",
    ):
        table.add_column(name, justify="right")
    for index, one in health.items():
        row = [one.before.mean(), one.after.mean(), one.rising.mean(), one.worse.mean(), one.eta.max()]
        alpha, tau = (
            None if gate is None else pick(gate) for gate, pick in ((one.alpha, torch.max), (one.tau, torch.min))
        )
        table.add_row(
            str(index),
            *(f"{value.item():.4g}" for value in row[:2]),
            *(f"{value.item():.0%}" for value in row[2:4]),
            f"{row[4].item():.3g}",
            *("–" if gate is None else f"{gate.item():.3g}" for gate in (alpha, tau)),
        )
    return table
