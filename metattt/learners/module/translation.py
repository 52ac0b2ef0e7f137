"""Runs an unmodified module on fast weights: its parameters are replaced by proxies, whose uses become accessor
primitives.

The module sees the tokens of all sequences and heads as one batch `[N, ...]`, N = B·H·T; the accessor knows which of
them share weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from operator import add, mul, sub, truediv
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from metattt.learners.fast_weights import FastWeights
from metattt.learners.module.composed import NORMS, Normalize, unpadded
from metattt.learners.module.standin import UNARY, ParameterProxy, standins

ELEMENTWISE: dict[str, Callable[[Any, Any], Any]] = {"add": add, "sub": sub, "mul": mul, "div": truediv}
PRIMITIVES = ("linear", "matmul", "addmm", "embedding", "conv1d", "conv2d", "prelu")  # methods of the translator
ALIASES = {"subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "mm": "matmul"}


class ParameterTranslator(Normalize):
    """Computes the operations of a module on its parameters with the accessor's primitives.

    Args:
        w: the accessor.
        tokens: (B, H, T); the module's batch axis is their product.
    """

    def __init__(self, w: FastWeights, tokens: tuple[int, int, int]):
        super().__init__()
        self.w, self.tokens, self.count = w, tokens, tokens[0] * tokens[1] * tokens[2]
        self.kinds: dict[str, str] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        standin = next(standins((*args, *kwargs.values())), None)
        if standin is None or function in NORMS:
            return super().__torch_function__(function, types, args, kwargs)
        name = getattr(function, "__name__", str(function))
        return self.translate(ALIASES.get(name, name), standin, args, kwargs)

    def translate(self, name: str, standin: ParameterProxy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ELEMENTWISE and kwargs.get("alpha", 1) == 1 and kwargs.get("rounding_mode") is None:
            return self.elementwise(name, args[0], args[1] if len(args) > 1 else kwargs.get("other"))
        if name in UNARY and standin.is_vector and len(args) == 1 and not kwargs.get("inplace"):
            return standin.then(UNARY[name])
        if name not in PRIMITIVES:
            raise standin.refusal(name)
        return getattr(self, name)(*args, **kwargs)

    # -- the primitives ------------------------------------------------------------------------------------------------

    def split(self, x: Any, standin: ParameterProxy, operation: str) -> Tensor:
        """`[N, ...]` to `[B, H, T, ...]`."""
        if not isinstance(x, Tensor) or x.ndim == 0 or x.shape[0] != self.count:
            raise standin.refusal(f"{operation} on something that is not a batch of tokens")
        return x.unflatten(0, self.tokens)

    def use(self, standin: ParameterProxy, kind: str) -> str:
        """The weight's name, after a check that it is used in one way only (as a matrix, or entry by entry)."""
        if self.kinds.setdefault(standin.name, kind) != kind or (kind == "matrix" and standin.functions):
            raise standin.refusal("a matrix product and an elementwise operation")
        return standin.name

    def linear(self, input: Any, weight: Any, bias: Any = None) -> Any:
        if not isinstance(weight, ParameterProxy):
            if isinstance(input, ParameterProxy):
                raise input.refusal("linear as an input")
            return F.linear(input, weight) + bias
        if weight.ndim != 2:
            raise weight.refusal("linear as a vector")
        x = self.split(input, weight, "linear")
        if x.ndim == 3:
            raise weight.refusal("linear on something that is not a batch of tokens")
        fused = None
        if isinstance(bias, ParameterProxy) and bias.shape == weight.shape[:1] and not bias.functions:
            fused = self.use(bias, "entries")
        z = self.w.linear(x, self.use(weight, "matrix"), fused, transpose=not weight.transposed).flatten(0, 2)
        return z if bias is None or fused is not None else z + bias

    def matmul(self, input: Any, other: Any = None, mat2: Any = None) -> Any:
        other = mat2 if other is None else other
        if not isinstance(other, ParameterProxy):
            raise next(standins((input,))).refusal("matmul on the left")
        return (input * other).sum(-1) if other.ndim == 1 else self.linear(input, other.mT)

    def addmm(self, input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        if (beta, alpha) != (1, 1):
            raise next(standins((input, mat1, mat2))).refusal(f"addmm with beta={beta}, alpha={alpha}")
        return self.matmul(mat1, mat2) + input if isinstance(mat2, ParameterProxy) else mat1 @ mat2 + input

    def embedding(
        self,
        input: Any,
        weight: ParameterProxy,
        padding_idx: int | None = None,
        max_norm: Any = None,
        *options: Any,
        **named: Any,
    ) -> Tensor:
        if max_norm is not None or weight.transposed:
            raise weight.refusal("embedding with max_norm")
        index = self.split(input, weight, "embedding")
        rows = self.w.embedding(index, self.use(weight, "matrix"))
        return unpadded(rows, index, padding_idx, weight.shape[0]).flatten(0, 2)

    def convolution(
        self,
        axes: int,
        input: Tensor,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        """Over one axis or two, `[N, C, (h,) w]` to `[N, C', (h',) w']`: a matrix product with unfolded windows."""
        operation = f"conv{axes}d"
        if not isinstance(weight, ParameterProxy):
            raise bias.refusal(f"{operation} with a weight that is not trained")
        if groups != 1:
            raise weight.refusal(f"{operation} with groups={groups}")
        if input.ndim != 2 + axes:
            raise weight.refusal(f"{operation} on something that is not a batch of tokens")
        x = input.unsqueeze(-2) if axes == 1 else input

        def pair(value: Any, missing: int) -> tuple[int, ...]:
            return (missing, *((value,) * axes if isinstance(value, int) else value))[-2:]

        stride, dilation, size = pair(stride, 1), pair(dilation, 1), pair(weight.shape[2:], 1)
        if padding == "same":
            high, wide = (d * (k - 1) for d, k in zip(dilation, size, strict=True))
            x = F.pad(x, (wide // 2, wide - wide // 2, high // 2, high - high // 2))
        before = pair(0 if isinstance(padding, str) else padding, 0)
        windows = F.unfold(x, size, dilation, before, stride).mT  # [N, places, C·k]
        tokens = self.split(windows, weight, operation)
        z = self.w.linear(tokens, self.use(weight, "matrix"), transpose=True).flatten(0, 2)
        z = z if bias is None else z + bias
        places = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, p, d, k, s in zip(x.shape[2:], before, dilation, size, stride, strict=True)
        ]
        y: Tensor = z.mT.unflatten(-1, places)
        return y.squeeze(-2) if axes == 1 else y

    conv1d, conv2d = partialmethod(convolution, 1), partialmethod(convolution, 2)

    def prelu(self, input: Tensor, weight: ParameterProxy) -> Any:
        negative = input.clamp(max=0)
        moved = negative * weight if weight.shape[0] == 1 else (negative.movedim(1, -1) * weight).movedim(-1, 1)
        return input.clamp(min=0) + moved

    def elementwise(self, name: str, a: Any, b: Any) -> Any:
        """A sum, difference, product or quotient of a proxy with tokens, or of a vector with a number."""
        operation = ELEMENTWISE[name]
        standin, other = (a, b) if isinstance(a, ParameterProxy) else (b, a)
        swapped = standin is b
        if isinstance(other, int | float) and standin.is_vector:
            return standin.then(lambda z: operation(other, z) if swapped else operation(z, other))
        if isinstance(other, ParameterProxy):
            raise standin.refusal(f"{name} with the fast weight {other.name!r}")
        self.split(other, standin, name)
        shape = standin.shape[1:] if standin.ndim == other.ndim and standin.shape[0] == 1 else standin.shape
        if len(shape) >= other.ndim or shape.numel() > other.shape[1:].numel() or standin.transposed:
            raise standin.refusal(f"{name} on something that is not a batch of tokens")
        z = self.entries(standin).view(self.count, *(1,) * (other.ndim - 1 - len(shape)), *shape)
        return operation(other, z) if swapped else operation(z, other)

    def entries(self, standin: ParameterProxy) -> Tensor:
        """The weight of every token, `[N, entries]`: the gradient of an elementwise operation has no smaller form."""
        value = self.w._value(self.use(standin, "entries"))
        z = self.w.bias(value.new_zeros(*self.tokens, value.shape[2:].numel()), standin.name).flatten(0, 2)
        for function in standin.functions:
            z = function(z)
        return z
