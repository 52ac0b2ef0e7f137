"""A second device for machines that have none: its tensors say that they are on `meta`, have values all the same, and may not meet
tensors of the host, as those of a GPU may not. What a card would refuse is refused here, and what it would compute is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = "meta"
BOTH = {"aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class There(Tensor):
    """A tensor of the second device; `held` has its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        held = held.resolve_conj().resolve_neg()
        about = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype, "device": DEVICE}
        made: There = Tensor._make_wrapper_subclass(cls, held.size(), **about)  # type: ignore[attr-defined]
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"There({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    there, name = [x for x in tensors if isinstance(x, There)], func._schema.name
    wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    if not there and wanted != DEVICE:
        return func(*args, **kwargs)
    here = [x for x in tensors if not isinstance(x, There) and x.ndim]  # a number may be anywhere
    if there and here and (name not in BOTH or (name.startswith("aten::index") and not isinstance(args[0], There))):
        raise RuntimeError(f"{name}: {[x.shape for x in there]} on the second device, {[x.shape for x in here]} on the host")
    own, given = tree_map(lambda x: x.held if isinstance(x, There) else x, (args, kwargs))
    out = func(*own, **given | ({"device": torch.device("cpu")} if wanted == DEVICE else {}))
    if name == "aten::_local_scalar_dense" or (name == "aten::_to_copy" and wanted == "cpu"):
        return out
    out = tree_map(lambda x: There(x) if isinstance(x, Tensor) else x, out)
    return return_and_correct_aliasing(func, args, kwargs, out) if there else out


class _Operations(TorchDispatchMode):
    """Those that make a tensor there are given none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Makers(TorchFunctionMode):
    """Of lists and numbers, torch makes tensors out of sight of operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu").type == DEVICE:
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        if func is Tensor.new_tensor and isinstance(args[0], There):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs).to(DEVICE)
        if func is Tensor.tolist and isinstance(args[0], There):
            return args[0].held.tolist()
        return func(*args, **kwargs)


class _Generators:
    """What `torch.cuda` is to CUDA, as far as `torch.utils.checkpoint` asks."""

    device = mock.MagicMock()
    get_rng_state = staticmethod(lambda *_: torch.zeros(1))
    set_rng_state = staticmethod(lambda *_: None)


@contextmanager
def second_device() -> Iterator[None]:
    """A context in which there is a second device, `DEVICE`. (Tensors there cannot be made in inference mode.)"""
    cast = torch.autocast
    with (
        mock.patch.object(torch, DEVICE, _Generators, create=True),
        mock.patch.object(torch, "inference_mode", lambda mode=True: torch.set_grad_enabled(torch.is_grad_enabled() and not mode)),
        mock.patch.object(torch, "autocast", lambda kind, *args, **given: cast("cpu" if kind == DEVICE else kind, *args, **given)),
        _Operations(),
        _Makers(),
    ):
        yield


def moved(module: nn.Module) -> nn.Module:
    """The module with its parameters and buffers on the second device, as `module.to(device)` leaves them."""
    known: dict[Tensor, Tensor] = {}
    for one in module.modules():
        for held in (one._parameters, one._buffers):
            for name, value in held.items():
                if value is not None and value not in known:
                    there = There(value.detach().clone())
                    trained = isinstance(value, nn.Parameter)
                    known[value] = nn.Parameter(there, requires_grad=value.requires_grad) if trained else there
                held[name] = None if value is None else known[value]  # type: ignore[assignment]
    return module
