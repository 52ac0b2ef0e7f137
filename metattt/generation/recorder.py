"""Records the torch functions that a call makes: a graph that makes them again without the Python between them.

A layer decides in Python, from shapes and settings, what to compute: for one token that takes longer than the
computation. A recording keeps what was decided. It holds for tensors of the same shapes, types and strides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from metattt.kernels.operator import BEHIND
from metattt.modules import RECORDING, transformed


class NotStatic(Exception):
    """A call that cannot be made again for other values; the message says why."""


ABOUT_TYPES = {
    Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_contiguous,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.get_device, Tensor.storage_offset,
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
"""Functions of a tensor whose results depend on no value. (Attributes are known by being attributes.)"""

MAYBE_NOTHING = {Tensor.to, Tensor.contiguous, Tensor.float, Tensor.double, Tensor.type_as, Tensor.expand_as}
"""Functions that return the tensor itself where there is nothing to do."""

PLAIN = {
    bool, int, float, complex, str, type(None), type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip
"""Types of arguments, besides tensors and what holds them, that can be written into a graph."""

PURE = {
    torch.ones_like, torch.zeros_like, torch.arange, Tensor.add, Tensor.mul, Tensor.remainder, Tensor.unsqueeze,
    getattr, Tensor.__eq__, Tensor.eq, Tensor.gt, Tensor.lt, Tensor.__and__, Tensor.__getitem__,
}  # fmt: skip
"""Functions that are left out where nobody uses the result. (Of others it is not known what they write over.)"""


class Recorder(TorchFunctionMode):
    """A context; inside, functions of torch are computed and recorded.

    Args:
        inputs: tensors that later calls give anew. All others that are met from outside (parameters, tables) are kept,
            as `constants`.
        count: calls to come.

    Raises:
        NotStatic: a value is read back, a function transform runs, or a function is given what no graph can hold.
    """

    def __init__(self, inputs: Sequence[Tensor], count: int = 1):
        super().__init__()
        self._count = count
        self.graph = fx.Graph()
        self.constants: list[Tensor] = []
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []  # an id is that of a tensor only as long as it lives
        for number, x in enumerate(inputs):
            self._last = self._know(x, self.graph.placeholder(f"input_{number}"))

    def __enter__(self) -> Recorder:
        self._before = RECORDING.set(self._count)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        RECORDING.reset(self._before)

    def function(self, outputs: Sequence[Tensor], operators: bool = True) -> Callable[..., tuple[Tensor, ...]]:
        """What was recorded, as a function of `inputs` and `constants` that returns `outputs`.

        `operators`: it calls the operators of kernels, as a compiler needs it, and not their Python.
        """
        self.graph.output(tuple(map(self._node, outputs)))
        self.graph.eliminate_dead_code(lambda node: node.op != "call_function" or node.target not in PURE)
        for node in () if operators else self.graph.nodes:
            node.target = BEHIND.get(node.target, node.target)
        return fx.GraphModule({}, self.graph).forward

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if transformed():
            raise NotStatic(f"{_name(func)} runs in a function transform")
        is_attribute = _name(func) == "__get__"
        made = [result] if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else []
        if not any(isinstance(x, Tensor) for x in made):
            read = result is not None and not is_attribute and func not in ABOUT_TYPES
            if read and any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
                raise NotStatic(f"{_name(func)} reads a value")
            if result is not None:
                return result
        if func in MAYBE_NOTHING and result is args[0]:
            return result
        given = map_aggregate((args, kwargs), self._node)
        if is_attribute:
            name = func.__self__.__name__  # type: ignore[attr-defined]
            node = self.graph.call_function(getattr, (given[0][0], name))
        else:
            node = self.graph.call_function(func, *given)
        if isinstance(result, Tensor):
            self._know(result, node)
        else:
            for number, x in enumerate(made):
                if isinstance(x, Tensor):
                    self._know(x, self.graph.call_function(operator.getitem, (node, number)))
        return result

    def _know(self, x: Tensor, node: fx.Node) -> fx.Node:
        self._nodes[id(x)] = node
        self._alive.append(x)
        return node

    def _node(self, x: Any) -> Any:
        """What stands for an argument in the graph."""
        if not isinstance(x, Tensor):
            if type(x) not in PLAIN:
                raise NotStatic(f"a function was given a {type(x).__name__}")
            return x
        if id(x) not in self._nodes:
            with self.graph.inserting_after(self._last):
                self._last = self._know(x, self.graph.placeholder(f"constant_{len(self.constants)}"))
            self.constants.append(x)
        return self._nodes[id(x)]


def _name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", func))
