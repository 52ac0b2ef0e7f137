"""Any `torch.nn.Module` as a learner, unmodified."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.component import unchanged_on_error
from metattt.errors import MetaTTTError
from metattt.functional import materialized, replica
from metattt.learners.base import Learner, Weight
from metattt.learners.fast_weights import FastWeights
from metattt.learners.module.composed import Normalize
from metattt.learners.module.standin import ParameterProxy
from metattt.learners.module.translation import ParameterTranslator
from metattt.learners.opaque import UnsupportedOperation
from metattt.registry import register
from metattt.setting import setting


@register(group="learner", name="module")
class ModuleLearner(Learner):
    """`f` is a module of PyTorch or of yours; its trainable parameters are W0, one copy for each head.

    The module maps tokens `[N, d_in]` to predictions `[N, d_out]`, d the head width. What it does with its parameters
    is translated to the accessor's primitives, so that the dual form is exact: linear maps, convolutions, embeddings,
    normalisations with an affine, sums and products with vectors. A module that uses a parameter in another way gets
    another form (`layer.form=auto`), in which it runs once for each sequence and head. Buffers and frozen parameters
    are shared by all heads and do not change.

    Args:
        module: copied when the layer is built.
        learn_init: train W0 in the outer loop.
        mixes_tokens: declare that the module mixes tokens. It then sees the tokens of one mini-batch, `[n, d_in]`, and
            must be causal.

    Raises:
        MetaTTTError: when the layer is built, for a module without trainable parameters, of another width, with
            dropout, buffers that it changes (batch statistics), or parameters that cannot be replaced.
    """

    module: nn.Module = setting()
    mixes_tokens: bool = setting(default=False, kw_only=True)

    def configure(self) -> None:
        super().configure()
        self.refusal: str | None = None  # why the module cannot run on all sequences and heads at once
        self.batched = True  # whether torch.vmap can run it, where it cannot
        self._slots: dict[str, list[tuple[str, str]]] = {}  # where each weight lives: submodules and attributes
        self._shapes: dict[str, torch.Size] = {}  # what the module sees

    def check_settings(self) -> None:
        super().check_settings()
        if not isinstance(self.module, nn.Module):
            raise MetaTTTError(
                f"learner.module={self.module!r} is not a torch.nn.Module: set learner.module._target_ to its class"
            )

    def setup(self, num_heads: int, d_in: int, d_out: int) -> Learner:
        with unchanged_on_error(self):
            super().setup(num_heads, d_in, d_out)
            kept, self.module = self.module, self._with_values()
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                self._examine(num_heads, d_in, d_out)
            here = torch.empty(0).device  # where parameters are made now (`with torch.device(...)`)
            self.module = kept if any(x.is_meta for x in chain(kept.parameters(), kept.buffers())) else kept.to(here)
        return self

    def _with_values(self) -> nn.Module:
        """The module, or a copy on the CPU if its constants are elsewhere; tensors without values get random ones."""
        constants = chain(self.module.parameters(), self.module.buffers())  # the trained parameters are taken out
        if any(constant.is_meta and not constant.is_floating_point() for constant in constants):
            raise MetaTTTError(
                f"{type(self.module).__name__} has buffers without values, such as indices or masks: "
                "make it outside torch.device('meta')"
            )
        return materialized(self.module)

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        name = type(self.module).__name__
        for part in self.module.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
                raise MetaTTTError(
                    f"{name} has {part}, which would differ between training and reading a token: set its p to 0"
                )
            if isinstance(part, nn.RNNBase):
                raise MetaTTTError(
                    f"{name} has {type(part).__name__}, whose parameters cannot be replaced: write it with nn.Linear"
                )
            if isinstance(part, nn.Embedding) and (part.max_norm is not None or part.scale_grad_by_freq):
                raise MetaTTTError(
                    f"{name} has an Embedding with max_norm or scale_grad_by_freq, which act on the table or batch "
                    "as a whole: leave them out"
                )
        self.module = copy.deepcopy(self.module)
        self._slots, self._shapes = {}, {}
        found: dict[str, Weight] = {}
        names: dict[int, str] = {}
        for prefix, part in self.module.named_modules():
            for attribute, parameter in part._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                weight = names.setdefault(id(parameter), f"{prefix}.{attribute}".lstrip(".").replace(".", "/"))
                layer = weight.rpartition("/")[0]
                found[weight] = Weight(tuple(parameter.shape) or (1,), value=parameter, layer=layer)
                self._shapes[weight] = parameter.shape
                self._slots.setdefault(weight, []).append((prefix, attribute))
                part._parameters[attribute] = None
        return found

    def equations(self) -> list[str]:
        return [f"f(x; W) = {self.wrapped(f'{type(self.module).__name__}(x; W)')}, W its trainable parameters"]

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        if self.refusal is None and not self.mixes_tokens:
            return self._together(w, x)
        if w.factored:
            raise UnsupportedOperation(self.refusal or "the module mixes tokens")
        return self._apart(w, x)

    def _together(self, w: FastWeights, x: Tensor) -> Tensor:
        """All tokens in one batch, on the accessor's primitives."""
        batch, heads, count = x.shape[:3]
        translation = ParameterTranslator(w, (batch, heads, count))
        standins = {
            name: ParameterProxy(translation, name, shape, x.dtype, x.device) for name, shape in self._shapes.items()
        }
        with translation:
            y = self._run(self._own(), standins, x.flatten(0, 2))
        return y.unflatten(0, (batch, heads, count))

    def _apart(self, w: FastWeights, x: Tensor) -> Tensor:
        """Each sequence and head with its own weights, as tensors."""
        batch, heads = x.shape[:2]
        names = list(self._shapes)
        values = [w[name].expand(batch, *w[name].shape[1:]) for name in names]
        if batch == 0:  # one sequence of zeros, of which nothing is kept
            x, *values = (F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, 1)) for tensor in (x, *values))
            return self._apart(FastWeights(dict(zip(names, values, strict=True)), {}, x.dtype), x)[:0]
        module = self._own()

        def one(x: Tensor, *values: Tensor) -> Tensor:
            with Normalize():
                return self._run(module, {n: v.view(self._shapes[n]) for n, v in zip(names, values, strict=True)}, x)

        if self.can_vmap():
            return torch.vmap(torch.vmap(one))(x, *values)
        rows = [torch.stack([one(x[i, j], *(v[i, j] for v in values)) for j in range(heads)]) for i in range(batch)]
        return torch.stack(rows)

    def can_vmap(self) -> bool:
        """Whether `torch.vmap` can run the module; otherwise sequences and heads run one after the other."""
        return self.batched

    def _own(self) -> nn.Module:
        """A copy of the module for one call, which no other thread sees. (Under a compiler there is one thread.)"""
        return self.module if torch.compiler.is_compiling() else replica(self.module)

    def _run(self, module: nn.Module, values: Mapping[str, Any], x: Tensor) -> Tensor:
        with self._holding(module, values, x.dtype):
            y = module(x)
        if not isinstance(y, Tensor) or y.ndim != 2 or y.shape[0] != x.shape[0]:
            found = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise MetaTTTError(
                f"{type(self.module).__name__} maps {list(x.shape)} to {found}: expected [{x.shape[0]}, d_out]"
            )
        return y

    @contextmanager
    def _holding(self, module: nn.Module, values: Mapping[str, Any], dtype: torch.dtype) -> Iterator[None]:
        """The module with `values` for its parameters, and with its constants in the type of the inner loop."""
        places: list[tuple[dict[str, Any], str, Any]] = [
            (module.get_submodule(path)._parameters, attribute, values[name])
            for name, slots in self._slots.items()
            for path, attribute in slots
        ]
        for part in module.modules():
            for constants in (part._parameters, part._buffers):
                for attribute, constant in constants.items():
                    if constant is not None and constant.is_floating_point() and constant.dtype != dtype:
                        places.append((constants, attribute, constant.to(dtype)))
        before = [holder[attribute] for holder, attribute, _ in places]
        try:
            for holder, attribute, value in places:
                holder[attribute] = value
            yield
        finally:
            for (holder, attribute, _), value in zip(places, before, strict=True):
                holder[attribute] = value

    # -- once, when the layer is built ---------------------------------------------------------------------------------

    def _examine(self, num_heads: int, d_in: int, d_out: int) -> None:
        """Finds out how the module can run, by tests on random weights and tokens.

        A translation is used only if it equals the module for one sequence and head at a time. This finds modules whose
        batch axis is not the first one, and modules that mix tokens.
        """
        name = type(self.module).__name__
        fast = {key: torch.randn(1, *value.shape, dtype=torch.float64) / 2 for key, value in self.init.items()}
        slow = {key: torch.randn(*value.shape, dtype=torch.float64) / 2 for key, value in self.slow.items()}
        plain = FastWeights(fast, slow, torch.float64)
        for count in (3, 5):
            x = torch.randn(1, num_heads, count, d_in, dtype=torch.float64)
            try:
                expected = self._try_apart(plain, x)
            except RuntimeError as error:
                if d_in == d_out:
                    raise
                what = f"the keys of the task, which are {d_in} wide in heads of {d_out}"
                raise MetaTTTError(f"{name} cannot run on {what}: {_first_line(error)}") from error
            if expected.shape[-1] != d_out:
                raise MetaTTTError(
                    f"{name} gives predictions of width {expected.shape[-1]}: they must have the head width {d_out}"
                )
            if expected.requires_grad:
                raise MetaTTTError(
                    f"{name} keeps its parameters in places where they cannot be replaced: use them as attributes"
                )
            if self.refusal is None and not self.mixes_tokens:
                self.refusal = self._try_together(plain, x, expected)
        self._check_buffers(plain, x)

    def _try_apart(self, plain: FastWeights, x: Tensor) -> Tensor:
        try:
            return self._apart(plain, x)
        except RuntimeError:
            if not self.batched:
                raise
        self.batched = False  # torch.vmap cannot run everything
        return self._try_apart(plain, x)

    def _try_together(self, plain: FastWeights, x: Tensor, expected: Tensor) -> str | None:
        """Why the module cannot run on all tokens at once; None if it can."""
        try:
            found = self._together(plain, x)
        except UnsupportedOperation as error:
            return str(error)
        except (MetaTTTError, RuntimeError, TypeError, AttributeError) as error:
            return f"{type(self.module).__name__} does not run with parameter proxies: {_first_line(error)}"
        if found.shape == expected.shape and torch.allclose(
            found, expected, rtol=1e-9, atol=1e-9 * expected.abs().max().item()
        ):
            return None
        return f"{type(self.module).__name__} mixes the tokens of a batch"

    def _check_buffers(self, plain: FastWeights, x: Tensor) -> None:
        """Raises an error for a module that changes a buffer in training, or that answers by chance there, in whatever
        mode it is now: the form decides when, how often and for which tokens the module runs."""
        kept, self.module = self.module, replica(self.module).train()
        before = [(name, buffer, buffer.clone()) for name, buffer in kept.named_buffers()]
        dtype = next((buffer.dtype for _, buffer, _ in before if buffer.is_floating_point()), x.dtype)
        weights = FastWeights({name: plain[name].to(dtype) for name in self._shapes}, {}, dtype)
        try:
            with torch.no_grad():
                together = self.refusal is None and not self.mixes_tokens
                run = self._together if together else self._try_apart
                once, again = (run(weights, x.to(dtype)) for _ in range(2))
        finally:
            self.module = kept
        changed = next((name for name, buffer, old in before if not torch.equal(buffer, old)), None)
        if changed is not None:
            raise MetaTTTError(
                f"{type(kept).__name__} changes its buffer {changed} when it runs in training, as spectral_norm and "
                "BatchNorm do: leave that out, the buffers of a learner stay as they are"
            )
        if not torch.allclose(once, again, rtol=1e-3, atol=1e-3 * float(once.abs().max()), equal_nan=True):
            raise MetaTTTError(
                f"{type(kept).__name__} depends on chance in training (two equal calls differ), which would differ "
                "between training and reading a token: set its dropout to 0"
            )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
