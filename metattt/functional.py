"""Calls a module with other values for its parameters and buffers, without changing it, so threads may share it.

`torch.func.functional_call` puts the values into the module for the time of the call, where every other thread sees
them.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from types import FunctionType, MethodType, NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

PLAIN = {NoneType, bool, int, float, str, set, OrderedDict, Tensor}
"""Types of attributes that cannot refer to a module. (Hooks are in an `OrderedDict`.)"""


def replica(module: M) -> M:
    """A copy of the structure: modules of its own, down to the last, that share all tensors and other values.

    What refers to a module from a list, a tuple, a dictionary, a bound method or a `functools.partial` refers to the
    copy. What is compiled runs uncompiled there.
    """
    copied: M = _copied(module, {})
    return copied


def with_values(module: M, values: Mapping[str, Tensor]) -> M:
    """A copy of the module with `values` for the parameters and buffers of these names. A tensor may have several
    names."""
    made = replica(module)
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    new = {id(tensor): values[name] for name, tensor in tensors if name in values}
    for part in made.modules():
        for registry in (part._parameters, part._buffers):
            for name, tensor in registry.items():
                registry[name] = new.get(id(tensor), tensor)  # type: ignore[assignment]
    # also where nothing stands now, as in a module that holds its parameters for a call only
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        part = made.get_submodule(path)
        held: Any = part._buffers if attribute in part._buffers else part._parameters
        held[attribute] = value
    return made


def materialized(module: M) -> M:
    """The module, or a copy on the CPU where its tensors are elsewhere: random where they have no values yet."""
    tensors = [*module.parameters(), *module.buffers()]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return module
    copied = copy.deepcopy(module)
    if not any(tensor.is_meta for tensor in tensors):
        return copied.to("cpu")
    copied.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*copied.parameters(), *copied.buffers()):
            tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
    return copied


def _copied(value: Any, made: dict[int, Any]) -> Any:
    """`value` with every module in it replaced by its copy; `value` itself if there is no module in it."""
    kind = type(value)
    if kind is list or kind is tuple:
        items = [_copied(item, made) for item in value]
        return value if all(map(operator.is_, items, value)) else kind(items)
    if kind is dict:
        held = value.copy()
        entries = {key: _copied(item, made) for key, item in held.items()}
        return value if all(map(operator.is_, entries.values(), held.values())) else entries
    if kind is MethodType and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, _copied(value.__self__, made))
    if kind is partial:
        parts = value.func, value.args, value.keywords
        found = _copied(parts, made)
        if found is parts:
            return value
        again = partial(found[0], *found[1], **found[2])
        again.__dict__.update(value.__dict__)
        return again
    if kind is FunctionType and hasattr(value, "_torchdynamo_orig_callable"):  # of torch.compile
        plain = value._torchdynamo_orig_callable
        found = _copied(plain, made)
        return value if found is plain else found
    if not isinstance(value, nn.Module):
        return value
    if id(value) not in made:
        copy = made[id(value)] = object.__new__(kind)
        attributes = value.__dict__.copy()  # as all copies here, in one step: another thread may add to the original
        attributes.pop("_compiled_call_impl", None)  # `module.compile()`, which would call the original
        copy.__dict__.update(attributes)
        for name, held in attributes.items():
            if name in ("_parameters", "_buffers"):
                copy.__dict__[name] = held.copy()
            elif name == "_modules":
                copy.__dict__[name] = {key: _copied(child, made) for key, child in held.copy().items()}
            elif type(held) not in PLAIN:
                copy.__dict__[name] = _copied(held, made)
        if "_orig_mod" in copy.__dict__["_modules"]:  # `torch.compile(module)`, which would call that module
            copy.__dict__["forward"] = copy.__dict__["_modules"]["_orig_mod"]
    return made[id(value)]
