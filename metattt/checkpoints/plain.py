"""Nested Python data as JSON, its tensors apart: what a checkpoint holds beside weights, without a pickle.

JSON knows no tuples, and no keys but texts. An object with one key that begins with `$` stands for what it has not:
`{"$tensor": name}`, `{"$tuple": [...]}`, `{"$items": [[key, value], ...]}` for a dictionary with other keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from metattt.errors import MetaTTTError

TENSOR, TUPLE, ITEMS = "$tensor", "$tuple", "$items"
SCALARS = (str, int, float, bool, type(None))


def take_apart(node: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """What `json` can write; the tensors inside go into `tensors`, by their place:
    `optimizer_states/0/state/3/exp_avg`. One that is there twice goes there once.

    Raises:
        MetaTTTError: an object that is neither plain data nor a tensor.
    """
    return _take_apart(node, tensors, {}, path)


def _take_apart(node: Any, tensors: dict[str, Tensor], seen: dict[Any, str], path: str) -> Any:
    if isinstance(node, Tensor):
        shared = not isinstance(node, DTensor) and node.numel() > 0
        place = (node.device, node.data_ptr(), node.shape, node.stride(), node.dtype) if shared else path
        name = seen.setdefault(place, path)
        tensors[name] = node
        return {TENSOR: name}
    if isinstance(node, Mapping):
        items = [(key, _take_apart(value, tensors, seen, f"{path}/{key}".lstrip("/"))) for key, value in node.items()]
        if all(type(key) is str and not key.startswith("$") for key in node):
            return dict(items)
        return {ITEMS: [[_take_apart(key, tensors, seen, f"{path}/key"), value] for key, value in items]}
    if isinstance(node, list | tuple):
        listed = [_take_apart(one, tensors, seen, f"{path}/{index}") for index, one in enumerate(node)]
        return {TUPLE: listed} if isinstance(node, tuple) else listed
    if isinstance(node, SCALARS):
        return node
    if hasattr(node, "item") and getattr(node, "ndim", None) == 0:  # a scalar of numpy
        return node.item()
    raise MetaTTTError(
        f"a checkpoint cannot hold {type(node).__name__} ({path}): a callback's state may be numbers, texts, lists, "
        "dictionaries and tensors"
    )


def put_together(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `take_apart` took apart. Tensors that are not given are left out with their keys.

    Raises:
        MetaTTTError: a mark that is none of ours.
    """
    if isinstance(node, list):
        return [put_together(one, tensors) for one in node if not _absent(one, tensors)]
    if not isinstance(node, dict):
        return node
    mark = next((key for key in node if key.startswith("$")), None)
    if mark is None:
        return {key: put_together(value, tensors) for key, value in node.items() if not _absent(value, tensors)}
    value = node[mark]
    if len(node) == 1 and mark == TENSOR and isinstance(value, str):
        return tensors[value]
    if len(node) == 1 and mark == TUPLE and isinstance(value, list):
        return tuple(put_together(one, tensors) for one in value)
    if len(node) == 1 and mark == ITEMS and isinstance(value, list):
        pairs = [(put_together(key, tensors), one) for key, one in _pairs(value)]
        return {_hashable(key): put_together(one, tensors) for key, one in pairs if not _absent(one, tensors)}
    raise MetaTTTError(f"`{mark}` is not what a checkpoint of ours holds")


def _absent(node: Any, tensors: Mapping[str, Tensor]) -> bool:
    name = node.get(TENSOR) if isinstance(node, dict) else None
    return isinstance(name, str) and name not in tensors


def _pairs(value: list[Any]) -> list[Any]:
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise MetaTTTError(f"`{ITEMS}` is not a list of pairs")
    return value


def _hashable(key: Any) -> Any:
    if not isinstance(key, (*SCALARS, tuple)):
        raise MetaTTTError(f"a key of `{ITEMS}` is {type(key).__name__}")
    return key
