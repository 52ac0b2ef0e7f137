"""Operations of another library: differentiable more than once, and compared with ours before they are used."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("metattt")

AGREE = 0.03  # largest difference from the reference, relative to its largest value: rounding of 16 bits, and no more

Function = Callable[..., tuple[Tensor, Tensor]]


@cache
def operation(name: str) -> Function | None:
    """An operation of flash-linear-attention by module and name, or None where it cannot be imported."""
    module, _, function = name.partition(".")
    try:
        found: Function = getattr(importlib.import_module(f"fla.ops.{module}"), function)
    except Exception as error:  # a broken optional dependency must not stop the run
        log.debug("without flash-linear-attention's %s: %s", name, error)
        return None
    return found


class Foreign(torch.autograd.Function):
    """`Foreign.apply(run, reference, *tensors)`: `run(*tensors)`, whose derivatives cannot be differentiated, and would
    not say so. If second derivatives are needed, the reference computes the first ones, too."""

    @staticmethod
    def forward(ctx: Any, run: Function, reference: Function, *given: Tensor) -> tuple[Tensor, Tensor]:
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in given]
        with torch.enable_grad():
            y, h = run(*inputs)
        ctx.inputs, ctx.outputs, ctx.reference = inputs, (y, h), reference
        ctx.save_for_backward(*given)
        return y.detach(), h.detach()

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> tuple[Tensor | None, ...]:
        inputs, outputs, again = ctx.inputs, ctx.outputs, torch.is_grad_enabled()
        if again:  # by aliases, since one may have been computed from another
            inputs = [x.view_as(x) for x in ctx.saved_tensors]
            outputs = ctx.reference(*inputs)
        wanted = [x for x in inputs if x.requires_grad]
        slopes = iter(
            torch.autograd.grad(outputs, wanted, found, retain_graph=True, create_graph=again, allow_unused=True)
        )
        return None, None, *(next(slopes) if x.requires_grad else None for x in inputs)


def disagreement(name: str, run: Function, reference: Function, given: Sequence[Tensor]) -> str | None:
    """Why flash-linear-attention's operation `name` may not compute: what of its outputs and gradients is off from the
    reference, or its error, which the log tells, too; None if they are those of the reference."""
    draw, device = torch.Generator().manual_seed(1), given[0].device

    def all_of(function: Function) -> list[Tensor]:
        inputs = [x.detach().requires_grad_() for x in given]
        with torch.enable_grad():
            outputs = function(*inputs)
            total = sum((x.float() * weight).sum() for x, weight in zip(outputs, weights(outputs), strict=True))
            return [*(x.detach() for x in outputs), *torch.autograd.grad(total, inputs)]  # type: ignore[arg-type]

    def weights(outputs: Sequence[Tensor]) -> list[Tensor]:
        draw.manual_seed(1)
        return [torch.randn(x.shape, generator=draw).to(device) for x in outputs]

    try:
        pairs = zip(all_of(partial(Foreign.apply, run, reference)), all_of(reference), strict=True)
        off = [float((one - other).abs().max() / other.abs().max()) for one, other in pairs]
        if all(x <= AGREE for x in off):  # (NaN is not)
            log.debug("flash-linear-attention's %s on %s: within %.1e of ours", name, device, max(off))
            return None
        parts = ["output", "last state", *(f"gradient {number}" for number in range(1, len(off)))]
        told = ", ".join(f"{part} {x:.0%}" for part, x in zip(parts, off, strict=False) if not x <= AGREE)
        reason = f"off from ours on {device}: {told}"
    except Exception as error:  # whatever another library raises for this device and these widths
        reason = f"{type(error).__name__} on {device}: {(str(error).splitlines() or [''])[0]}"
    log.warning("flash-linear-attention's %s is not used, and a slower form computes: %s", name, reason)
    return reason
