"""Runs whole mini-batches, and open ones while decoding, by kernels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.columns import to_device
from metattt.inner.documents import between_starts, packed
from metattt.inner.execution import in_groups
from metattt.inner.packing import Packing
from metattt.inner.parts import Parts
from metattt.inner.plan import Kernel, Plan
from metattt.inner.tokens import Block, MiniBatches, Tokens, consecutive, each
from metattt.memory import Memory, choose, content
from metattt.modules import stands_for_others, transformed
from metattt.state import Tensors

log = logging.getLogger("metattt")


def scan(
    loop: Parts,
    tokens: Tokens,
    memory: Memory,
    blocks: Sequence[Block],
    padded: bool,
    donate_state: bool,
) -> tuple[Tensor, Memory]:
    """Runs the blocks one after the other: by a kernel if one accepts the block, otherwise by the forms.

    Args:
        padded: some columns are unfilled.
        donate_state: the weights of `memory` may be written over.
    """
    size, tau, decoding = loop.rule.mini_batch_size, loop.rule.token_steps(), not torch.is_grad_enabled()
    sums = "update" in loop.plan.slots  # without token steps a rule carries W_t of an open mini-batch, not M
    slow = {name: value for name, value in loop.learner.slow.items()}  # noqa: C416 (as compile traces it)
    outputs: list[Tensor] = []
    committed = set(memory) == {"commit"}
    runs = _runs(blocks if committed else each(blocks), size, committed, decoding)
    parts = [tokens] if len(runs) == 1 else tokens.split([sum([block.columns for block in run]) for _, run in runs])
    for (whole, run), part in zip(runs, parts, strict=True):
        given = MiniBatches(part, memory.get("commit", {}), slow, tau, size, loop.matmul_dtype, loop.group_size)
        y: Tensor | None = None
        if whole:
            for block in run:
                if block.begins is not None:
                    given = with_documents(loop, given, run)
                    break
            kernel = kernel_of(loop.plan, given)
            if kernel is not None:
                compute = kernel.scan if given.begins is None else partial(packed, kernel)
                with torch.autocast(part.views.k.device.type, enabled=False):
                    y, weights = compute(given, partial(_reference, loop, "commit"))
                after, here = {"commit": weights}, run[0].filled
                if isinstance(here, Tensor):  # some sequences have ended before, with a mini-batch that stays open
                    after = choose(here > 0, after, {**memory, **after}, memory)
                memory = after
        elif decoding and sums and _open(run[0], padded):
            kernel = decoder_of(loop.plan, given)
            if kernel is not None:
                y, weights, update = kernel.advance(given, memory.get("update"), run[0].phase, donate_state)
                memory = {"commit": weights} if update is None else {"commit": weights, "update": update}
        if y is None:
            y, memory = in_groups(loop, part, memory, run, True)
        donate_state = True  # what follows was made in this call
        outputs.append(y)  # type: ignore[arg-type]
    return (torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]), memory


def online(loop: Parts, tokens: Tokens, memory: Memory, packing: Packing | None) -> tuple[Tensor, Memory] | None:
    """The tokens of a call in one call of a kernel, for a rule that knows no mini-batches and so needs no columns; None
    if no kernel accepts them."""
    rule, slot = loop.rule, "weights" if "weights" in memory else "anchor"
    if packing is not None and packing.valid is not None:
        tokens = tokens.masked(packing.valid)
    given = MiniBatches(
        tokens, memory[slot], {}, None, 1, loop.matmul_dtype, loop.group_size,
        rule.read == "exclusive", rule.gradient_at == "decayed",
    )  # fmt: skip
    if packing is not None and packing.first is not None:
        begins = packing.first if packing.host is None else packing.host[1]
        fresh = loop.start(1, tokens.gates.eta.dtype)
        given = given._replace(begins=begins, origin=content(fresh, slot) or {})
    kernel = kernel_of(loop.plan, given)
    if kernel is None:
        return None
    compute = kernel.scan if given.begins is None else partial(packed, kernel)
    with torch.autocast(tokens.views.k.device.type, enabled=False):
        y, weights = compute(given, partial(_reference, loop, "weights"))
    if given.begins is not None and "anchor" in memory:  # W0, which a new document has as it is now
        memory = choose(to_device(given.begins.any(1), y.device), fresh, memory, ["anchor"])
    return y, {**memory, "weights": weights}


def with_documents(loop: Parts, given: MiniBatches, run: Sequence[Block]) -> MiniBatches:
    """`given`, the mini-batches of `run`, with the documents that begin in it."""
    none = torch.zeros(given.tokens.views.q.shape[0], dtype=torch.bool, device="cpu")
    begins = torch.stack([none if block.begins is None else block.begins for block in run], 1)
    return given._replace(begins=begins, origin=loop.start(1, given.tokens.gates.eta.dtype)["commit"])


def kernel_of(plan: Plan, given: MiniBatches) -> Kernel | None:
    """The first kernel that accepts these whole mini-batches.

    Raises:
        MetaTTTError: no kernel does, and `layer.form=fused` is set.
    """
    q, reasons = given.tokens.views.q, []
    device = q.device.type
    if transformed() and not torch.compiler.is_compiling():  # (to a compiler every call looks like one)
        reasons = ["kernels do not run inside torch.func transforms"]
    elif type(q) is not Tensor and stands_for_others(q) and not torch.compiler.is_compiling():
        reasons = ["kernels read plain tensors"]
    elif torch.compiler._is_exporting_flag:  # not is_exporting(): under torch.compile, torch 2.11 takes it for true
        reasons = ["not under torch.export, so that the program loads where MetaTTT is not installed"]
    else:
        for kernel in plan.kernels:
            if kernel.device != device:
                reason: str | None = f"for {kernel.device}"
            elif kernel.anchor != "online" and given.tokens.generalised:
                reason = "it knows no erase views, no several pairs a token and no labels of another shape than keys"
            elif torch.compiler.is_compiling() and (not kernel.traceable or given.begins is not None):
                reason = "not under torch.compile, or not with packed documents there"
            else:
                reason = kernel.reason_rejected(given)
            if reason is None:
                _say(plan, "fused", device, kernel.name)
                return kernel
            reasons.append(f"{kernel.name}: {reason}")
    message = "; ".join(reasons)
    if plan.strict:
        raise MetaTTTError(f"layer.form=fused: no kernel takes this call on {device} ({message}): set layer.form=auto")
    _say(plan, "dual", device, message)
    return None


def _say(plan: Plan, form: str, device: str, why: str) -> None:
    """Writes the choice of a kernel to the debug log, once."""
    if not torch.compiler.is_compiling() and (form, device, why) not in plan.said:
        plan.said.add((form, device, why))
        log.debug("form=%s on %s: %s", form, device, why)


def decoder_of(plan: Plan, given: MiniBatches) -> Kernel | None:
    """The first kernel that accepts these tokens of an open mini-batch."""
    if transformed() or torch.compiler.is_compiling() or given.tokens.generalised:
        return None
    q = given.tokens.views.q
    if type(q) is not Tensor and stands_for_others(q):
        return None
    device = q.device.type
    here = (kernel for kernel in plan.kernels if kernel.device == device)
    return next((kernel for kernel in here if kernel.reason_not_decoded(given) is None), None)


def _reference(loop: Parts, slot: str, given: MiniBatches) -> tuple[Tensor, Tensors]:
    """The reference of a kernel: the same tokens by the forms."""
    if given.begins is not None:
        return between_starts(given, partial(_reference, loop, slot))
    blocks, _ = consecutive(given.tokens.views.q.shape[2], 0, loop.plan.block)
    rule = loop.rule.bound(token_steps=lambda: given.tau)  # the tensor that the derivatives are wanted for
    loop = loop._replace(rule=rule, slow=given.slow)
    y, memory = loop.mini_batches(given.tokens, {slot: given.weights}, blocks, True)
    assert y is not None
    return y, memory[slot]


def _open(block: Block, padded: bool) -> bool:
    """Whether these columns are part of one mini-batch and filled in all sequences."""
    same = isinstance(block.phase, int) and isinstance(block.filled, int) and isinstance(block.commit, bool)
    return block.restart is None and (same or (isinstance(block.phase, Tensor) and not padded))


def _runs(blocks: Sequence[Block], size: int, committed: bool, decoding: bool) -> list[tuple[bool, list[Block]]]:
    """Blocks together, and whether they are whole mini-batches (of `size` tokens for all sequences, from the first
    token to the commit), as a kernel takes them; what lies between, block by block while decoding.

    `committed`: a mini-batch begins with the first block; otherwise an earlier call began it.
    """
    runs: list[tuple[bool, list[Block]]] = []
    for block in blocks:
        whole = False
        if block.length == size:  # a branch: under torch.compile the comparison itself is symbolic
            begins = isinstance(block.phase, int) and block.phase == 0 and (committed or len(runs) > 0)
            whole = begins and (block.commit is True or block.whole)
        if runs and runs[-1][0] == whole and (whole or not decoding):
            runs[-1][1].append(block)
        else:
            runs.append((whole, [block]))
    return runs
