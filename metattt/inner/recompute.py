"""Recomputation through time: save what enters a group of mini-batches, run the group again in the backward pass.

`torch.utils.checkpoint` cannot hold an inner `autograd.grad`: each one would recompute the group. One
`autograd.Function` per group costs two runs of it (three inside a user's own checkpoint) and can itself be
differentiated again.

Derivatives reach what enters a group: tokens, weights, and the parameters of the parts. Where a part comes to another
tensor that wants one (`captured`), nothing is recomputed: every mini-batch is stored, which is exact and takes as much
memory as `layer.group_size=0`. The layer says so once, in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from metattt.inner.tokens import Block, Carry, Tokens
from metattt.replica import with_values
from metattt.state import Tensors

if TYPE_CHECKING:
    from metattt.inner.loop import InnerLoop


def recompute(body: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """`body(*tensors)`, keeping only `tensors` for the backward pass. `body` must reach parameters through `tensors`
    alone."""
    return _Recompute.apply(body, *tensors)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, body: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.body = body
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.device = tensors[0].device
        ctx.random = _random_state(ctx.device)
        # Identity hooks: the inner gradients' own saved tensors are none of a surrounding checkpoint's business.
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            outputs = body(*tensors)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        keep = torch.is_grad_enabled()  # someone differentiates this backward pass again
        with torch.enable_grad(), _replay(ctx.random, ctx.device):
            # Aliases cut the inputs off from each other (weights may have been computed from parameters that are inputs
            # too).
            inputs = [
                (x.view_as(x) if keep else x.detach().requires_grad_()) if need else x
                for x, need in zip(ctx.saved_tensors, needed, strict=True)
            ]
            outputs = ctx.body(*inputs)
            pairs = [(y, dy) for y, dy in zip(outputs, cotangents, strict=True) if dy is not None and y.requires_grad]
            wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
            found = iter(
                torch.autograd.grad(
                    [y for y, _ in pairs], wanted, [dy for _, dy in pairs], create_graph=keep, allow_unused=True
                )
                if pairs and wanted
                else [None] * len(wanted)
            )
        return (None, *(next(found) if need else None for need in needed))


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(
        device
    ) if device.type != "cpu" else None


class _replay:
    """Runs a block with the random state of the forward pass, then goes on with the present one."""

    def __init__(self, state: tuple[Tensor, Tensor | None], device: torch.device):
        self.state, self.device = state, device
        self.fork: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> None:
        devices = [self.device] if self.device.type != "cpu" else []
        self.fork = torch.random.fork_rng(devices=devices, device_type=self.device.type if devices else "cuda")
        self.fork.__enter__()
        torch.set_rng_state(self.state[0])
        if self.state[1] is not None:
            torch.get_device_module(self.device).set_rng_state(self.state[1], self.device)

    def __exit__(self, *error: Any) -> None:
        self.fork.__exit__(*error)


def recomputed(
    loop: InnerLoop,
    tokens: Tokens,
    carry: Carry,
    blocks: Sequence[Block],
    read: bool,
    operand: torch.dtype,
    through: Callable[..., Sequence[Tensor]] = recompute,
) -> tuple[Tensor | None, Carry]:
    """`InnerLoop.forward`, recomputed in the backward pass. Parameters travel as inputs, and are put into copies of the
    parts.

    (`torch.func.functional_call` would put them into the parts themselves, where another thread finds them.) `through`
    runs a function of tensors: `recompute`, or what writes it out for an export.
    """
    body, given, after = _as_function(loop, tokens, carry, blocks, read, operand, buffers=through is not recompute)
    outputs = iter(through(body, *given))
    y = next(outputs) if read else None
    leaving: Carry = {}
    for role, name in after:
        leaving.setdefault(role, {})[name] = next(outputs)
    return y, leaving


def captured(loop: InnerLoop, tokens: Tokens, carry: Carry, read: bool, operand: torch.dtype) -> list[str]:
    """Names of tensors that a derivative must reach and recomputation would miss: those that the inner loop comes to by
    a way of its own (a closure, a partial, what `views` made and `loss` uses), not as a token, weight or parameter.

    The graph of one token says so: it ends in leaves that are none of its inputs. The token completes a mini-batch,
    since a read may look at commits alone.
    """
    one = tokens.map(lambda x: x[:, :, :1])
    body, given, _ = _as_function(loop, one, carry, [Block(1, 0, True, 1)], read, operand)
    # All inputs are differentiated, so that no leaf has to be made inside.
    inputs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in given]
    device = inputs[0].device
    with torch.enable_grad(), _replay(_random_state(device), device), saved_tensors_hooks(lambda x: x, lambda x: x):
        outputs = body(*inputs)
    known, seen, leaves = {id(x) for x in inputs}, set(), []
    ahead = [y.grad_fn for y in outputs]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)
            leaves += [leaf] if leaf is not None and id(leaf) not in known else []
            ahead += [following for following, _ in node.next_functions]
    parts = {"task": loop.task, "learner": loop.learner, "optimizer": loop.optimizer}
    names = {id(x): f"{part}.{name}" for part, module in parts.items() for name, x in module.named_parameters()}
    return sorted({names.get(id(leaf), f"a tensor of shape {list(leaf.shape)}") for leaf in leaves})


def _as_function(
    loop: InnerLoop,
    tokens: Tokens,
    carry: Carry,
    blocks: Sequence[Block],
    read: bool,
    operand: torch.dtype,
    buffers: bool = False,
) -> tuple[Callable[..., list[Tensor]], list[Tensor], list[tuple[str, str]]]:
    """`InnerLoop.forward` as a function of tensors, these tensors, and (once it has run) what its outputs after the
    predictions are."""
    parts = nn.ModuleList((loop.task, loop.learner, loop.optimizer))
    parameters: Tensors = dict(parts.named_parameters())
    if buffers:
        parameters |= dict(parts.named_buffers())
    present = [x is not None for x in tokens.tensors]
    keys = [(role, name) for role, weights in carry.items() for name in weights]
    after: list[tuple[str, str]] = []

    def body(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)
        given = Tokens.from_tensors([next(rest) if here else None for here in present])
        entering: Carry = {}
        for role, name in keys:
            entering.setdefault(role, {})[name] = next(rest)
        values = dict(zip(parameters, rest, strict=True))
        inside = loop.with_parts(*with_values(parts, values))
        y, leaving = inside.forward(given, entering, blocks, read, operand)
        after[:] = [(role, name) for role, weights in leaving.items() for name in weights]
        return ([y] if y is not None else []) + [leaving[role][name] for role, name in after]

    entering = [carry[role][name] for role, name in keys]
    return body, [*[x for x in tokens.tensors if x is not None], *entering, *parameters.values()], after
