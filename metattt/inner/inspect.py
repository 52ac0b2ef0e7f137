"""What a combination of learner, task and optimizer can do, found out on a tiny input when a layer is built."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError, check_choice
from metattt.inner.accessors import Record, UnsupportedOperation
from metattt.kernels.base import covering, explain
from metattt.learners.base import Learner
from metattt.learners.fast_weights import FastWeights
from metattt.optimizers.base import InnerOptimizer
from metattt.tasks.base import Task

P = TypeVar("P", bound=nn.Module)

FORMS = ("primal", "dual", "summed", "fused")


def choose_form(form: str, task: Task, learner: Learner, optimizer: InnerOptimizer, num_heads: int, d_in: int) -> str:
    """The form a layer uses.

    `auto` takes `fused` where a kernel covers the combination, else `dual` where every fast weight reaches only primitives, else `summed`
    where the read needs no per-token weights, else `primal` if tokens do not mix.

    Raises:
        MetaTTTError: the form cannot compute this combination exactly, or the learner mixes tokens without saying so.
    """
    check_choice("layer.form", form, ("auto", *FORMS))
    name = type(learner).__name__
    summed = optimizer.read in ("previous", "committed", "block", "final") or optimizer.steps > 1
    task, learner = materialized(task), materialized(learner)
    reason = unsupported(task, learner, num_heads, d_in)
    if learner.mixes_tokens:
        if optimizer.read not in ("block", "final"):
            check_token_local(task, learner, num_heads, d_in)
        return _mixing_form(form, name, optimizer, reason, summed)
    check_token_local(task, learner, num_heads, d_in)
    covered, reasons = covering(task, learner, optimizer) if form in ("auto", "fused") and reason is None else ([], {})
    if form == "fused" and not covered:
        raise MetaTTTError(f"layer.form=fused has no kernel for this combination ({reason or explain(reasons)}): set layer.form=auto")
    if form == "dual" and reason:
        raise MetaTTTError(f"layer.form=dual cannot express {name}: {reason}. Use its accessor's primitives, or set layer.form=auto")
    if form == "summed" and not summed:
        raise MetaTTTError(f"layer.form=summed has no weights per token, which optimizer.read={optimizer.read} needs: set layer.form=auto")
    if form != "auto":
        return form
    return "fused" if covered else "dual" if reason is None else "summed" if summed else "primal"


def _mixing_form(form: str, name: str, optimizer: InnerOptimizer, reason: str | None, summed: bool) -> str:
    """The form for a learner whose tokens look at each other inside a mini-batch."""
    if optimizer.anchor == "online" and optimizer.mini_batch_size > 1:
        raise MetaTTTError(f"{name} mixes the tokens of a mini-batch, which optimizer.anchor=online takes apart: use minibatch")
    if form == "fused":
        raise MetaTTTError(f"layer.form=fused has no kernel for {name}, which mixes tokens: set layer.form=auto")
    if form == "primal":
        raise MetaTTTError(f"layer.form=primal takes tokens apart, and {name} mixes them: set layer.form=auto")
    if summed:
        if form == "dual":
            raise MetaTTTError(f"layer.form=dual takes a backward pass per token for {name}, which this read does not need: use auto")
        return "summed"
    if form == "summed":
        raise MetaTTTError(f"layer.form=summed has no weights per token, which optimizer.read={optimizer.read} needs: set layer.form=auto")
    if reason is not None:
        raise MetaTTTError(f"optimizer.read={optimizer.read} cannot express {name}: {reason}. Set optimizer.read=previous")
    if optimizer.max_norm is not None:
        raise MetaTTTError(f"optimizer.max_norm needs gradients of single tokens, and {name} mixes them: set optimizer.max_norm=null")
    if optimizer.anchor != "minibatch":
        raise MetaTTTError(f"{name} mixes the tokens of a mini-batch: optimizer.read={optimizer.read} needs optimizer.anchor=minibatch")
    return "dual"


def materialized(part: P) -> P:
    """The part, or a copy on the CPU where its tensors are elsewhere: random where they have no values yet."""
    tensors = [*part.parameters(), *part.buffers()]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return part
    copied = copy.deepcopy(part)
    if not any(tensor.is_meta for tensor in tensors):
        return copied.to("cpu")
    copied.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*copied.parameters(), *copied.buffers()):
            tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
    return copied


def unsupported(task: Task, learner: Learner, num_heads: int, d_in: int) -> str | None:
    """Why the dual form cannot express a learner (the weight and the operation), or None if it can."""
    with torch.device("cpu"), torch.enable_grad():
        fast, slow, k, v = _tiny(task, learner, num_heads, d_in)
        record = Record(fast, slow, k.dtype)
        try:
            task.loss(learner.predict(record, k), v)
        except UnsupportedOperation as error:
            return str(error)
    return None


def check_token_local(task: Task, learner: Learner, num_heads: int, d_in: int) -> None:
    """Refuses a learner or loss that looks at other tokens without declaring it, or at later ones: its gradients would be wrong.

    Raises:
        MetaTTTError: `∂ℓ_s/∂k_r ≠ 0` for some `r ≠ s`, or `r > s` for a learner that declares `mixes_tokens`.
    """
    with torch.device("cpu"), torch.enable_grad():
        fast, slow, k, v = _tiny(task, learner, num_heads, d_in)
        k = k.requires_grad_()
        losses = task.loss(learner.predict(FastWeights(fast, slow, k.dtype), k), v)
        if losses.shape != k.shape[:-1]:
            raise MetaTTTError(
                f"{type(task).__name__}.loss returned shape {list(losses.shape)} for tokens {list(k.shape[:-1])}: expected one a token"
            )
        for s in range(k.shape[2]):
            (grad,) = torch.autograd.grad(losses[:, :, s].sum(), k, retain_graph=True, allow_unused=True, materialize_grads=True)
            grad[:, :, s] = 0
            if learner.mixes_tokens and grad[:, :, s:].abs().max() > 0:
                raise MetaTTTError(
                    f"{type(learner).__name__} lets tokens look at later ones: make it causal, or set optimizer.read=block"
                )
            if not learner.mixes_tokens and grad.abs().max() > 0:
                raise MetaTTTError(
                    f"{type(learner).__name__} lets tokens look at each other but does not say so: "
                    "set mixes_tokens = True on the class, or make forward act on each token alone"
                )


def _tiny(task: Task, learner: Learner, num_heads: int, d_in: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
    """Random weights (W0 may be zero, which hides everything), three random tokens and labels, in double precision."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    fast = {name: random(1, *weight.shape) for name, weight in learner.init.items()}
    slow = {name: random(*weight.shape) for name, weight in learner.slow.items()}
    return fast, slow, random(1, num_heads, 3, d_in), random(1, num_heads, 3, task.label_dim)
