"""The proxy of a raw fast weight while only primitives can use weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from metattt.errors import MetaTTTError


class UnsupportedOperation(MetaTTTError):
    """A fast weight was used outside the primitives, so that its per-token gradient has no factored form."""


class OpaqueWeight:
    """A proxy of a raw fast weight while recording: any operation on it raises an error that names the weight."""

    def __init__(self, name: str, value: Tensor):
        self._name, self.shape, self.ndim = name, value.shape, value.ndim
        self.dtype, self.device = value.dtype, value.device

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = next((a._name for a in (*args, *(kwargs or {}).values()) if isinstance(a, OpaqueWeight)), "?")
        raise UnsupportedOperation(f"fast weight {name!r} is used by {getattr(function, '__name__', function)}")

    def __getattr__(self, attribute: str) -> Any:
        raise UnsupportedOperation(f"fast weight {self._name!r} is used by .{attribute}")

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedOperation(f"fast weight {self._name!r} is used by an arithmetic operator or by indexing")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __getitem__ = _refuse
