"""`metattt check`: prints the laws of a composed layer as a table."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from functools import partial

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from metattt.catalog.equations import computed
from metattt.composition.instantiate import instantiate_layer, instantiate_part
from metattt.errors import MetaTTTError, check_integer
from metattt.layer import TTTLayer
from metattt.state import WHOLE_CALL
from metattt.testing.foreign import Subject, examine
from metattt.testing.laws import LAWS
from metattt.testing.specimen import Found, Specimen, judged


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
    console, table, broken = Console(), Table("law", "worst error", "bound", "result"), 0
    for title, found in _of_module(cfg, console) if cfg.module is not None else _of_layer(cfg, console):
        result = "[bold red]FAIL[/] " if found.failed else "[green]pass[/] " if found.error is not None else ""
        worst = "" if found.error is None else f"{found.error:.1e}"
        table.add_row(title, worst, f"{found.bound:.0e}", result + escape(found.note))
        broken += found.failed
    console.print(table)
    if broken:
        console.print(f"broken laws: {broken}")
        raise SystemExit(1)


def _of_layer(cfg: DictConfig, console: Console) -> Iterator[tuple[str, Found]]:
    layer = instantiate_layer(cfg)
    if not isinstance(layer, TTTLayer):
        raise MetaTTTError(
            f"metattt check looks at the three parts of one layer, and this is a {type(layer).__name__}: choose a "
            "layer that has them, e.g. layer=window_attention; of two in the place of one, each, by layer=custom with "
            "its parts; a module of anybody's: metattt check module=<package.module>:<function that makes it>"
        )
    spec = specimen_of(cfg)
    console.print(
        f"[bold]{type(layer.learner).__name__}[/] learner, [bold]{type(layer.task).__name__}[/] task, "
        f"[bold]{type(layer.optimizer).__name__}[/] optimizer, dim={cfg.dim}, num_heads={cfg.num_heads}; float64 "
        "where no type is given"
    )
    for line in computed(layer):
        console.print(line, markup=False)
    size, used = layer.optimizer.mini_batch_size, spec.sample.optimizer.mini_batch_size
    whole_call = size == WHOLE_CALL
    if used < size:
        told = "one for each call" if whole_call else str(size)
        console.print(f"mini-batches of {used} tokens instead of {told}, so that short sequences cross their ends")
    for law in LAWS.values():
        found = judged(partial(law.judge, spec), law.bound)
        if whole_call and law.name == "splits":
            note = "does not apply: optimizer.mini_batch_size=null learns each call as one mini-batch"
            found = Found(None, law.bound, note, False)
        yield law.title, found


def _of_module(cfg: DictConfig, console: Console) -> Iterator[tuple[str, Found]]:
    for key in ("dim", "period"):
        check_integer(key, cfg[key], most=2**24)
    try:
        subject = Subject(pkgutil.resolve_name(cfg.module), cfg.dim, cfg.period)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise MetaTTTError(
            f"module={cfg.module}: {error}; give the import path of a class or function without arguments that makes a "
            "torch.nn.Module, module=package.file:name"
        ) from error
    console.print(f"[bold]{escape(cfg.module)}[/], dim={cfg.dim}; float64 where no type is given")
    yield from examine(subject)


def specimen_of(cfg: DictConfig) -> Specimen:
    """The composed layer as a test layer, which laws build repeatedly from the same configuration."""
    given = OmegaConf.to_container(cfg.layer, resolve=True)
    assert isinstance(given, dict)
    fixed = ("_target_", "dim", "num_heads", "task", "learner", "optimizer")
    options = {str(key): value for key, value in given.items() if key not in fixed}
    learner, task, optimizer = (partial(instantiate_part, cfg, key) for key in ("learner", "task", "optimizer"))
    return Specimen(learner, task, optimizer, cfg.dim, cfg.num_heads, options)
