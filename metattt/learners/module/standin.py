"""The proxies that replace a module's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.learners.opaque import UnsupportedOperation

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "softplus": F.softplus,
    "relu": torch.relu,
    "silu": F.silu,
}


class Owner(Protocol):
    """The interface of the `ParameterTranslator` that makes a proxy."""

    def elementwise(self, name: str, a: Any, b: Any, /) -> Any: ...
    def matmul(self, a: Any, b: Any, /) -> Any: ...
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any: ...


class ParameterProxy:
    """A proxy of one parameter of a module.

    Args:
        owner: computes the operations on it.
        name: the weight's name in the accessor.
        shape: what the module sees.
        dtype, device: likewise.
        transposed: a matrix of which the module took the transpose.
        functions: what the module has applied to a vector, entry by entry.
    """

    requires_grad = True
    is_nested = is_sparse = is_meta = False

    def __init__(
        self,
        owner: Owner,
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        transposed: bool = False,
        functions: tuple[Callable[[Tensor], Tensor], ...] = (),
    ):
        self.owner, self.name, self.shape, self.dtype, self.device = owner, name, shape, dtype, device
        self.transposed, self.functions = transposed, functions

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        standin = next(standins((*args, *(kwargs or {}).values())))
        return standin.owner.__torch_function__(function, types, args, kwargs)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if attribute in UNARY and self.is_vector:
            return lambda: self.then(UNARY[attribute])
        raise self.refusal("." + attribute)

    def refusal(self, operation: str) -> UnsupportedOperation:
        return UnsupportedOperation(f"fast weight {self.name!r} is used by {operation}")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_vector(self) -> bool:
        return self.shape.numel() == max(self.shape, default=1)

    def dim(self) -> int:
        return self.ndim

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def numel(self) -> int:
        return self.shape.numel()

    def _with(self, **changes: Any) -> ParameterProxy:
        kept = {
            key: getattr(self, key) for key in ("owner", "name", "shape", "dtype", "device", "transposed", "functions")
        }
        return ParameterProxy(**{**kept, **changes})

    def then(self, function: Callable[[Tensor], Tensor]) -> ParameterProxy:
        return self._with(functions=(*self.functions, function))

    def t(self) -> ParameterProxy:
        if self.ndim != 2:
            raise self.refusal("a transpose")
        return self._with(shape=self.shape[::-1], transposed=not self.transposed)

    T = mT = property(t)

    def transpose(self, first: int, second: int) -> ParameterProxy:
        if {first % 2, second % 2} != {0, 1}:
            raise self.refusal("transpose")
        return self.t()

    def to(self, *target: Any, **options: Any) -> ParameterProxy:
        return self  # sums of the inner loop keep the weights' type

    def float(self) -> ParameterProxy:
        return self

    def view(self, *shape: Any) -> ParameterProxy:
        if not self.is_vector:
            raise self.refusal("view")
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self._with(shape=torch.empty(self.shape, device="meta").view(shape).shape)

    reshape = view

    def unsqueeze(self, axis: int) -> ParameterProxy:
        return self.view(torch.empty(self.shape, device="meta").unsqueeze(axis).shape)

    def __add__(self, other: Any) -> Any:
        return self.owner.elementwise("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return self.owner.elementwise("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return self.owner.elementwise("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self.owner.elementwise("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return self.owner.elementwise("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self.owner.elementwise("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self.owner.elementwise("div", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self.owner.elementwise("div", other, self)

    def __rmatmul__(self, other: Any) -> Any:
        return self.owner.matmul(other, self)

    def _refuse(self, *_: Any) -> Any:
        raise self.refusal("an arithmetic operator or indexing")

    __matmul__ = __pow__ = __getitem__ = __neg__ = _refuse


def standins(values: Iterable[Any]) -> Iterator[ParameterProxy]:
    """The proxies among arguments, also inside lists (one level)."""
    for value in values:
        if isinstance(value, ParameterProxy):
            yield value
        elif isinstance(value, list | tuple):
            yield from (x for x in value if isinstance(x, ParameterProxy))
