"""`metattt check`: prints the laws of a composed layer as a table."""

from __future__ import annotations

import pkgutil
from functools import partial

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from metattt.composition.instantiate import instantiate_layer, instantiate_part
from metattt.errors import MetaTTTError
from metattt.inner.planning import explain
from metattt.inner.trial import unsupported
from metattt.layer import TTTLayer
from metattt.testing.foreign import Subject, examine
from metattt.testing.laws import LAWS
from metattt.testing.specimen import NotApplicable, Specimen


def check(cfg: DictConfig) -> None:
    """Checks every law on the composed layer, or the laws of any layer on `module`, and prints law, worst error,
    bound and verdict.

    Args:
        cfg: the composed configuration, with `dim`, `num_heads`, `task`, `learner`, `optimizer` and `layer`; and
            `module`, `period` of a layer of anybody's.

    Raises:
        SystemExit: code 1, if a law is broken.
        MetaTTTError: the configuration does not make a layer.
    """
    if cfg.module is not None:
        _check_module(cfg)
        return
    layer = instantiate_layer(cfg)
    if not isinstance(layer, TTTLayer):
        raise MetaTTTError(
            f"metattt check looks at the three parts of one layer, and this is a {type(layer).__name__}: choose a "
            "layer that has them, e.g. layer=window_attention; of two in the place of one, each, by layer=custom with "
            "its parts"
        )
    spec = specimen_of(cfg)
    console = Console()
    console.print(
        f"[bold]{type(layer.learner).__name__}[/] learner, [bold]{type(layer.task).__name__}[/] task, "
        f"[bold]{type(layer.optimizer).__name__}[/] optimizer, dim={cfg.dim}, num_heads={cfg.num_heads}; float64 "
        "where no type is given"
    )
    console.print(f"form={layer.form}: {why_this_form(layer, str(cfg.layer.get('form', 'auto')))}")
    size, used = layer.optimizer.mini_batch_size, spec.make().optimizer.mini_batch_size
    if used < size:
        console.print(f"mini-batches of {used} tokens instead of {size}, so that short sequences cross their ends")
    table = Table("law", "worst error", "bound", "result")
    broken = 0
    for law in LAWS.values():
        try:
            verdict = law.judge(spec)
        except NotApplicable as reason:
            table.add_row(law.title, "", f"{law.bound:.0e}", f"does not apply: {reason}")
            continue
        broken += not verdict.holds
        result = "[green]pass[/]" if verdict.holds else "[bold red]FAIL[/]"
        why = f": {verdict.reason}" if verdict.reason else ""
        table.add_row(law.title, f"{verdict.error:.1e}", f"{verdict.bound:.{1 if why else 0}e}", result + why)
    console.print(table)
    if broken:
        console.print(f"{broken} of {len(LAWS)} laws are broken")
        raise SystemExit(1)


def _check_module(cfg: DictConfig) -> None:
    """Checks the module that `module` makes.

    Raises:
        SystemExit: code 1, if a law is broken.
        MetaTTTError: nothing of that name, or it makes no module.
    """
    try:
        made = pkgutil.resolve_name(cfg.module)
        subject = Subject(made, cfg.dim, cfg.period)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise MetaTTTError(
            f"module={cfg.module}: {error}; give the import path of a class or function without arguments that makes a "
            "torch.nn.Module, module=package.file:name"
        ) from error
    console, table = Console(), Table("law", "worst error", "bound", "result")
    console.print(f"[bold]{type(subject.module).__name__}[/], dim={cfg.dim}; float64 where no type is given")
    broken = 0
    for title, found in examine(subject):
        result = "[bold red]FAIL[/] " if found.failed else "" if found.note else "[green]pass[/]"
        worst = "" if found.error is None else f"{found.error:.1e}"
        table.add_row(title, worst, f"{found.bound:.0e}", result + escape(found.note))
        broken += found.failed
    console.print(table)
    if broken:
        console.print(f"{broken} laws are broken")
        raise SystemExit(1)


def specimen_of(cfg: DictConfig) -> Specimen:
    """The composed layer as a test layer, which laws build repeatedly from the same configuration."""
    given = OmegaConf.to_container(cfg.layer, resolve=True)
    assert isinstance(given, dict)
    fixed = ("_target_", "dim", "num_heads", "task", "learner", "optimizer")
    options = {str(key): value for key, value in given.items() if key not in fixed}
    learner, task, optimizer = (partial(instantiate_part, cfg, key) for key in ("learner", "task", "optimizer"))
    return Specimen(learner, task, optimizer, cfg.dim, cfg.num_heads, options)


def why_this_form(layer: TTTLayer, asked: str) -> str:
    """One line that says why the layer uses its form."""
    learner = layer.learner
    if not learner.has_weights:
        return "the learner keeps its data and needs no gradient steps"
    if asked != "auto":
        return f"layer.form={asked} was asked for"
    if layer.form == "fused":
        return "kernels " + ", ".join(f"{kernel.name} ({kernel.device})" for kernel in layer.plan.kernels)
    if learner.mixes_tokens:
        return "the learner mixes tokens, so no token has a gradient of its own"
    width = layer.dim // layer.num_heads
    reason = unsupported(layer.task, learner, layer.num_heads, width)
    if reason is None:
        return f"every fast weight reaches only primitives; no kernel covers the combination ({explain(layer.plan.reasons)})"
    return f"{reason}, so the dual form cannot express the learner"
