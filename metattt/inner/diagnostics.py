"""What is wrong with the inputs of a call that has failed. Nothing here is asked while calls succeed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.modules import rounds
from metattt.state import State

FAILURES = (RuntimeError, TypeError, AttributeError, KeyError, IndexError)
"""What torch and Python raise for inputs of the wrong kind."""


def explain(
    error: Exception, x: object, parameters: Iterable[Tensor], state: object, flags: Mapping[str, object]
) -> None:
    """Raises what says which input of a layer has led to an error; returns where none has.

    Args:
        error: what came of the call.
        x: the tokens.
        parameters: of the layer.
        state: the state that was given, or None.
        flags: `mask` and `reset` by name.

    Raises:
        MetaTTTError: x, a flag or the state is not of the type, or not on the device, that the parameters are.
    """
    reason = next(filter(None, _reasons(x, list(parameters), state, flags)), None)
    if reason is not None:
        raise MetaTTTError(reason) from error


def _reasons(x: object, parameters: list[Tensor], state: object, flags: Mapping[str, object]) -> Iterable[str | None]:
    if not isinstance(x, Tensor):
        yield f"x is a {type(x).__name__}, expected a tensor [B, T, D] of floating point numbers"
        return
    floating = [parameter for parameter in parameters if parameter.is_floating_point()]
    if x.layout != torch.strided:
        yield f"x is {x.layout}, expected a dense tensor: x.to_dense()"
    elif not x.is_floating_point():
        yield (
            f"x is {x.dtype}, expected floating point numbers: convert it with "
            f"x.to({_types(floating) or 'torch.float32'})"
        )
    elif x.dtype not in (found := {parameter.dtype for parameter in floating}) and found and not rounds(x.device.type):
        yield (
            f"x is {x.dtype}, and the layer's parameters are {_types(floating)}: convert one of them, or use "
            "torch.autocast"
        )
    devices = {parameter.device for parameter in parameters}
    if devices and x.device not in devices:
        yield f"x is on {x.device}, and the layer on {', '.join(map(str, devices))}: move one of them with .to(device)"
    for name, flag in flags.items():
        if isinstance(flag, Tensor) and flag.device != x.device:
            yield f"{name} is on {flag.device}, and x on {x.device}: move one of them with .to(device)"
    if state is not None:
        yield _of_state(state, x)


def _types(tensors: list[Tensor]) -> str:
    return ", ".join(sorted({str(tensor.dtype) for tensor in tensors}))


def _of_state(state: object, x: Tensor) -> str | None:
    """What a state has that none of ours has."""
    if not isinstance(state, State):
        return f"state is a {type(state).__name__}, expected what an earlier call of the layer has returned, or None"
    slots = state.weights if isinstance(state.weights, Mapping) else None
    groups = [state.task, state.optimizer, state.learner, *(() if slots is None else slots.values())]
    if slots is None or not isinstance(state.pos, Tensor) or not all(isinstance(group, Mapping) for group in groups):
        return (
            "the state is damaged: its parts must be dictionaries of tensors, and pos a tensor; start with state=None"
        )
    tensors = {f"{key}": value for group in groups for key, value in group.items()} | {"pos": state.pos}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            return f"the state is damaged: {name} is a {type(tensor).__name__}, not a tensor; start with state=None"
        if tensor.device != x.device:
            return f"the state is on {tensor.device}, and x on {x.device}: move it with state.to(x.device)"
        if tensor.ndim == 0 or tensor.shape[0] != x.shape[0]:
            return (
                f"the state is damaged: {name} has shape {list(tensor.shape)}, and x holds {x.shape[0]} sequences; "
                "start with state=None"
            )
        if name != "pos" and tensor.is_complex():
            return f"the state is damaged: {name} is {tensor.dtype}; start with state=None"
        if tensor.is_inference() and torch.is_grad_enabled():
            return "the state was made in inference_mode, and cannot be trained on: pass state.map(torch.clone)"
    return None


def require_ids(ids: object, vocab_size: int, name: str = "ids") -> None:
    """Refuses what are no token ids.

    Raises:
        MetaTTTError: no tensor `[B, T]` of integers with T ≥ 1, or one with ids outside of the vocabulary.
    """
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] == 0:
        shown = f"of shape {list(ids.shape)}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise MetaTTTError(f"{name} are token ids [B, T] with T >= 1, not {shown}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise MetaTTTError(f"{name} are {ids.dtype}, expected integers: convert them with {name}.long()")
    if ids.numel() and not 0 <= (least := int(ids.min())) <= (most := int(ids.max())) < vocab_size:
        wrong = least if least < 0 else most
        raise MetaTTTError(f"{name} hold {wrong}, and the model's vocabulary has 0 to {vocab_size - 1}")
