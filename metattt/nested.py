"""Functions over all tensors of nested tuples, lists and dictionaries, as the states of layers and models are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from metattt.errors import MetaTTTError

S = TypeVar("S")


def map_tensors(function: Callable[[Any], Any], value: S, kind: type = Tensor) -> S:
    """`value` with `function` applied to every tensor in its tuples, lists and dictionaries, whatever their types; or
    to everything of another `kind`."""
    found: Any = value
    if isinstance(value, kind):
        found = function(value)
    elif isinstance(value, Mapping):
        found = {key: map_tensors(function, item, kind) for key, item in value.items()}
    elif isinstance(value, tuple | list):
        items = [map_tensors(function, item, kind) for item in value]
        found = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return found


def move_tensors(
    state: S,
    device: torch.device | str | int | torch.dtype | Tensor | None = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    copy: bool = False,
) -> S:
    """A state with every tensor moved, as by `Tensor.to`, whose arguments it takes (a device, a type, or a tensor for
    both).

    Positions and flags keep their type. Weights are kept in fp32 or wider, and floating-point tensors move to no other.

    Raises:
        MetaTTTError: a type that is narrower, or has no fractions.
    """
    if isinstance(device, Tensor):
        dtype, device = device.dtype, device.device
    elif isinstance(device, torch.dtype):
        dtype, device = device, None
    if dtype is not None and not (dtype.is_floating_point and torch.promote_types(dtype, torch.float32) == dtype):
        raise MetaTTTError(
            f"a state is kept in float32 or wider, not {dtype}: move it to a device alone, state.to(device)"
        )

    def moved(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else None
        return tensor.to(device=device, dtype=wanted, non_blocking=non_blocking, copy=copy)

    return map_tensors(moved, state)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in its tuples, lists and dictionaries."""
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    return found


def refill(shape: S, tensors: Iterable[Tensor]) -> S:
    """`shape` with `tensors`, in the order of `tensors_of`, in the places of its own."""
    rest = iter(tensors)
    return map_tensors(lambda _: next(rest), shape)


def count_bytes(state: Any) -> int:
    """Bytes of all distinct tensors."""
    sizes: dict[int, int] = {}
    for tensor in tensors_of(state):
        place = tensor.data_ptr() or id(tensor)  # on meta, none has a place in memory
        sizes[place] = max(tensor.nbytes, sizes.get(place, 0))
    return sum(sizes.values())


def count_sequences(state: Any) -> int:
    """B, the sequences that a state is of; −1 of one without tensors."""
    found = tensors_of(state)
    return len(found[0]) if found else -1
