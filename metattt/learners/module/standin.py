"""The proxies that replace a module's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.learners.opaque import UnsupportedOperation

if TYPE_CHECKING:
    from metattt.learners.module.translation import ParameterTranslator

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    function.__name__: function for function in (torch.sigmoid, torch.tanh, torch.exp, F.softplus, torch.relu, F.silu)
}


def _operator(name: str, swapped: bool = False) -> Callable[[ParameterProxy, Any], Any]:
    """The method for `proxy ∘ other`, or `other ∘ proxy`."""
    if swapped:
        return lambda proxy, other: proxy.owner.elementwise(name, other, proxy)
    return lambda proxy, other: proxy.owner.elementwise(name, proxy, other)


@dataclass(eq=False, repr=False)
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

    owner: ParameterTranslator
    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    transposed: bool = False
    functions: tuple[Callable[[Tensor], Tensor], ...] = ()

    requires_grad: ClassVar[bool] = True
    is_nested: ClassVar[bool] = False
    is_sparse: ClassVar[bool] = False
    is_meta: ClassVar[bool] = False

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

    def then(self, function: Callable[[Tensor], Tensor]) -> ParameterProxy:
        return replace(self, functions=(*self.functions, function))

    def t(self) -> ParameterProxy:
        if self.ndim != 2:
            raise self.refusal("a transpose")
        return replace(self, shape=self.shape[::-1], transposed=not self.transposed)

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
        return replace(self, shape=torch.empty(self.shape, device="meta").view(shape).shape)

    reshape = view

    def unsqueeze(self, axis: int) -> ParameterProxy:
        return self.view(torch.empty(self.shape, device="meta").unsqueeze(axis).shape)

    __add__, __sub__, __mul__, __truediv__ = (_operator(name) for name in ("add", "sub", "mul", "div"))
    __radd__, __rsub__, __rmul__, __rtruediv__ = (_operator(name, True) for name in ("add", "sub", "mul", "div"))

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
