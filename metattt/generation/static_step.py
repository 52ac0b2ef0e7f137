"""The one-token step of generation: on CUDA captured once in a graph and replayed, with the state where it was; on the
CPU recorded once, as the torch functions that it calls; elsewhere a call of the model.

A replay costs the host one launch in place of hundreds, a recorded step no Python between the functions. Both hold for
one structure of the state: each sequence stands at a place of its own in its mini-batch, a tensor in place of a number.
What is captured must also find its state at the same addresses in every step: what a layer returns elsewhere is copied
back as part of the graph.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.generation.recorder import NotStatic, Recorder
from metattt.memory import content
from metattt.models.language_model import LanguageModel, LanguageModelState
from metattt.modules import TRACED
from metattt.nested import count_sequences, map_tensors, refill, tensors_of
from metattt.state import State
from metattt.torch_private import pytree

log = logging.getLogger("metattt")

WORTH = {"cuda": 8, "cpu": 32}  # tokens: capturing or recording takes the time that as many steps save


class PlainStep:
    """A call of the model for every token.

    Args:
        model: in evaluation mode.
        state: given up; in inference mode, as every call.
    """

    def __init__(self, model: LanguageModel, state: LanguageModelState):
        self.model, self.state = model, state

    def __call__(self, token: Tensor) -> Tensor:
        """The token of every sequence `[B]` to the logits `[B, V]` of the next one."""
        logits, self.state = self.model.step(token.unsqueeze(1), self.state, donate_state=True)
        return logits[:, -1]


class CapturedStep:
    """The same from a CUDA graph. Logits stand until the next call.

    Args:
        model: in evaluation mode, on a CUDA device. Its parameters must stay where they are.
        state: stays as it is; the steps go on from a copy.

    Raises:
        NotStatic: a state that grows, or is of another structure after a token, or modules with hooks.
        RuntimeError: a step that waits for the device, or does what a graph cannot hold.
    """

    def __init__(self, model: LanguageModel, state: LanguageModelState):
        device = model.embedding.weight.device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream), _no_reading_back():
                self.state, self.token = static_state(model, state)
        finally:  # the caller may write over what is being copied
            torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.logits = step_in_place(model, self.token, self.state)

    def __call__(self, token: Tensor) -> Tensor:
        """As `PlainStep`."""
        self.token.copy_(token)
        self.graph.replay()
        return self.logits


class RecordedStep:
    """The same from a recording (`metattt.generation.recorder`): bit by bit what a call of the model computes.

    Args:
        model: in evaluation mode, on the CPU. Its parameters may change in place, but not be replaced; what its modules
            do besides computing with tensors is done once.
        state: stays as it is; the steps go on from a copy.
        count: tokens to come; gradients inside a layer are recorded for many (`TRACED`), and to be compiled.
        compiled: `torch.compile` the recording, which takes seconds (fewer where its cache on the disk knows the step)
            and rounds otherwise. Where torch cannot, a warning says why, and the recording runs as it is.

    Raises:
        NotStatic: a state that grows, a step that reads a value back, modules with hooks or compiled ones, or a second
            token for which the recording computes something else than the model.
    """

    def __init__(self, model: LanguageModel, state: LanguageModelState, count: int = 1, compiled: bool = False):
        for module in model.modules():
            if module._compiled_call_impl is not None:
                raise NotStatic(f"{type(module).__name__} is compiled")
        static, token = static_state(model, state)
        _, after = model.step(token.unsqueeze(1), static.map(torch.clone), donate_state=True)
        start = list(map(_laid_out, tensors_of(static), tensors_of(after)))  # as a step leaves it
        given = list(map(_laid_out, start, start))
        with Recorder([token, *given], TRACED if compiled else count) as recorder:
            logits, after = model.step(token.unsqueeze(1), refill(static, given), donate_state=True)
            logits = logits[:, -1]
        _check_structure(static, after)
        found = tensors_of(after)
        if [x.stride() for x in found] != [x.stride() for x in start]:
            raise NotStatic("the state is laid out in another way after each token")
        # those of the state that are other tensors after a token; the rest is written over
        self._new = [at for at, (x, y) in enumerate(zip(given, found, strict=True)) if x is not y]
        self._constants, self._static = recorder.constants, static
        self._function = recorder.function([logits, *(found[at] for at in self._new)], operators=compiled)
        token, self._tensors = (token + 1) % model.vocab_size, [x.clone() for x in found]
        logits, after = model.step(token.unsqueeze(1), self.state.map(torch.clone), donate_state=True)
        if not torch.equal(self(token), logits[:, -1]) or not all(map(torch.equal, self._tensors, tensors_of(after))):
            raise NotStatic("the step does something that is no function of torch")
        if compiled:
            # called with tensors of the same shapes for good: nothing has to be looked at before each token
            options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "size_asserts": False}
            try:  # compiles at its first call: an error belongs here, not to the first token that is drawn
                made = torch.compile(self._function, fullgraph=True, dynamic=False, options=options)
                made(token, *map(_laid_out, start, start), *self._constants)
                self._function = made
            except (RuntimeError, OSError) as error:
                log.warning("generation: a token's step is not compiled: %s", str(error).partition("\n\n")[0])
        self._tensors = start

    def __call__(self, token: Tensor) -> Tensor:
        """As `PlainStep`."""
        logits, *made = self._function(token, *self._tensors, *self._constants)
        for at, x in zip(self._new, made, strict=True):
            self._tensors[at] = x
        return logits

    @property
    def state(self) -> LanguageModelState:
        """The state after the last token."""
        return refill(self._static, self._tensors)


Step = PlainStep | CapturedStep | RecordedStep


def one_token_step(model: LanguageModel, state: LanguageModelState, count: int, compiled: bool = False) -> Step:
    """What takes the next `count` tokens: a graph or a recording where there can be one and it is worth it.

    Args:
        model: in evaluation mode.
        state: after the prompt; given up.
        count: steps to come, at most.
        compiled: see `RecordedStep`; on CUDA it changes nothing.
    """
    device = model.embedding.weight.device
    if count < WORTH.get(device.type, math.inf):
        return PlainStep(model, state)
    try:
        made = CapturedStep(model, state) if device.type == "cuda" else RecordedStep(model, state, count, compiled)
    except (NotStatic, RuntimeError, MetaTTTError) as reason:
        level = logging.WARNING if compiled else logging.DEBUG
        log.log(level, "generation: every token is a call of the model, which is not compiled: %s", reason)
        return PlainStep(model, state)
    log.debug("generation: the one-token step is a %s", "CUDA graph" if device.type == "cuda" else "recording")
    return made


@contextmanager
def _no_reading_back() -> Iterator[None]:
    """An operation for which the host waits is an error: a capture that fails at one would leave the generators of
    random numbers in disorder."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def static_state(model: LanguageModel, state: LanguageModelState) -> tuple[LanguageModelState, Tensor]:
    """A copy of a state whose structure no step changes, and the token `[B]` to step with.

    Raises:
        NotStatic: there is none, or modules have hooks, which would be called once and not for every token.
    """
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise NotStatic(f"{type(module).__name__} has hooks")
    # sequences at places of their own: no place in a mini-batch is a number
    apart = map_tensors(lambda x: x._replace(phase=None), state, State)
    token = torch.zeros(count_sequences(apart), dtype=torch.long, device=model.embedding.weight.device)
    # also compiles what is compiled
    _, after = model.step(token.unsqueeze(1), apart.map(torch.clone), donate_state=True)
    static = _filled(apart, after).map(torch.clone)
    _check_structure(static, after)
    return static, token


def step_in_place(model: LanguageModel, token: Tensor, static: LanguageModelState) -> Tensor:
    """Logits `[B, V]` of one step that leaves the new state where `static` is, the copies included."""
    old = dict(_leaves(static))
    logits, after = model.step(token.unsqueeze(1), static, donate_state=True)
    held = {x.untyped_storage().data_ptr() for x in old.values() if isinstance(x, Tensor)}
    copies: list[tuple[Tensor, Tensor]] = []
    for path, new in _leaves(after):
        at = old[path]
        if isinstance(new, Tensor) and (new.data_ptr() != at.data_ptr() or new.stride() != at.stride()):
            # a part of the old state, moved along, must be read before it is written over
            copies.append((at, new.clone() if new.untyped_storage().data_ptr() in held else new))
    for at, new in copies:
        at.copy_(new)
    return logits[:, -1]


def _filled(before: Any, after: Any) -> Any:
    """`before` with what a state leaves away where a mini-batch has just begun: zeros, and weights that have not moved
    from the last commit. A rule that counts no places keeps its number."""

    def fill(old: Any, new: Any) -> Any:
        if not isinstance(old, State):
            return old
        weights = dict(old.weights)
        for slot in new.weights.keys() - weights.keys():
            nothing = {name: torch.zeros_like(x) for name, x in new.weights[slot].items()}
            weights[slot] = content(old.weights, slot) or nothing
        return old._replace(weights=weights, phase=new.phase)

    try:
        return pytree.tree_map(fill, before, after, is_leaf=lambda x: isinstance(x, State))
    except ValueError as error:
        raise NotStatic(f"the state is of another structure after a token: {error}") from error


def _leaves(state: Any) -> list[tuple[str, Any]]:
    """All tensors and numbers of a state by their place in it."""
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_leaves_with_path(state)]


def _structure(state: Any) -> dict[str, Any]:
    """What must be the same after a token: shapes and types of tensors, and the numbers beside them."""
    return {path: (list(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else (x,) for path, x in _leaves(state)}


def _check_structure(before: Any, after: Any) -> None:
    if not {id(x) for _, x in _leaves(before) if isinstance(x, Tensor)} <= set(map(id, tensors_of(before))):
        raise NotStatic("the state keeps tensors outside of tuples, lists and dictionaries")
    wanted, found = _structure(before), _structure(after)
    for path in {**wanted, **found}:
        if wanted.get(path) != found.get(path):
            raise NotStatic(f"the state's {path} is {wanted.get(path)} before a token and {found.get(path)} after it")
    if [*wanted] != [*found]:  # tensors are matched by their order
        raise NotStatic("the state is of another structure after a token")


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """A copy of `x` with the strides of `like`."""
    return x.new_empty_strided(x.shape, like.stride()).copy_(x)
