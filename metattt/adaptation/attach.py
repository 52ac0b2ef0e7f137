"""Fast weights inside a pretrained model of Transformers: a TTT layer beside its attention, or In-Place TTT in its
MLPs.

States live in the cache that `generate` and other callers hand from call to call, so they are reordered, repeated and
dropped with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metattt.adaptation.in_place import InPlaceMemory
from metattt.checkpoints.tensors import read_tensors, write_tensors
from metattt.composition.compose import build
from metattt.errors import MetaTTTError, check_choice
from metattt.inner.causality import Causality
from metattt.io import check_own, replaced

IN_PLACE = "in_place"


def attach(model: nn.Module, pattern: str, layer: str, how: str = "beside", **settings: Any) -> Attached:
    """Puts fast weights into modules of a model, which is changed in place. At the start its logits stay what they
    were, bit for bit, but for `how="replace"`.

    ```
    attach(model, "model.layers.*.self_attn", layer="ttt_linear", num_heads=8)   # trains with the model, or alone
    attach(model, "model.layers.*.mlp.down_proj", layer="in_place", chunk=2048)  # In-Place TTT
    ```

    Args:
        model: a causal language model of Transformers.
        pattern: of the modules' names.
        layer: a layer of `metattt.build`, for attentions: `y = attention(x) + tanh(a) layer(x)` with a = 0 at the
            start; or `in_place`, for linear maps: see `InPlaceLinear`.
        how: `beside`, or `replace`: the layer in place of the attention.
        settings: overrides of the layer, as for `metattt.build`; or of `InPlaceLinear`, and `labels`: `hidden`, what
            enters the MLP (the default), or `embeddings`, the model's embeddings of the tokens.

    Raises:
        MetaTTTError: no such module, one of another kind, settings that do not fit, or a layer whose outputs depend on
            later tokens.
    """
    check_choice("how", how, ("beside", "replace"))
    names = [name for name, _ in model.named_modules() if fnmatchcase(name, pattern)]
    if not names:
        near = [name for name, one in model.named_modules() if name.endswith(("self_attn", "attn", "down_proj"))]
        raise MetaTTTError(
            f"{pattern} names no module of the model: its attentions and MLPs are called {', '.join(near[:3])}"
        )
    call, width = _Call(model), model.config.hidden_size  # type: ignore[union-attr]
    made: dict[str, _Beside | _InPlace] = {}
    for name in names:
        module = model.get_submodule(name)
        if isinstance(getattr(module.forward, "__self__", None), _Beside | _InPlace):
            raise MetaTTTError(f"{name} has an attached layer already: call its `detach()` first")
        if layer == IN_PLACE:
            made[name] = _InPlace(name, module, call, model.get_submodule(name.rpartition(".")[0]), **settings)
        else:
            made[name] = _Beside(name, module, call, layer, how, width, settings)  # type: ignore[arg-type]
    causality = Causality()
    for one in made.values():
        if isinstance(one, _Beside):
            causality.check(one.added["layer"], width)  # type: ignore[arg-type]
    for one in made.values():
        for attribute, part in one.added.items():
            setattr(one.module, attribute, part)
        one.module.forward = one.forward
    return Attached(model, made, call)


class Attached:
    """What was attached to a model.

    `model.save_pretrained` writes the pretrained tensors under the names that they had, and those of attached layers
    beside them: `from_pretrained` of that folder is the pretrained model. `save` and `load` are for the layers.

    Attributes:
        model: the model.
        modules: what was attached to which module, by its name.
    """

    def __init__(self, model: nn.Module, modules: dict[str, _Beside | _InPlace], call: _Call):
        self.model, self.modules, self._call = model, modules, call

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are new, by name. To train these alone, freeze the others first:
        `model.requires_grad_(False)`, then `requires_grad_()` of these."""
        for name, one in self.modules.items():
            for own, parameter in one.module.named_parameters():
                if own.partition(".")[0] in one.added:
                    yield f"{name}.{own}", parameter

    def detach(self) -> None:
        """Takes the layers away: the model is as it was."""
        for one in self.modules.values():
            del one.module.forward
            if one.module.forward != one.before:  # another library had put its own there
                one.module.forward = one.before
            for attribute in one.added:
                delattr(one.module, attribute)
        self._call.end()

    def save(self, path: str | Path) -> None:
        """Writes the new parameters to a file of safetensors, by name; the pretrained model is not written.

        Raises:
            OSError: the file cannot be written.
        """
        with replaced(Path(path).expanduser()) as part:
            write_tensors(part, dict(self.named_parameters()))

    def load(self, path: str | Path) -> None:
        """Takes the parameters of a file that `save` has written, of layers that were attached in the same way.

        Raises:
            MetaTTTError: no such file, one that is damaged, or of other layers.
        """
        check_own(file := Path(path).expanduser())
        tensors, parameters = read_tensors(file), dict(self.named_parameters())
        wrong = tensors.keys() ^ parameters.keys() or {
            name for name, one in parameters.items() if one.shape != tensors[name].shape
        }
        if wrong:
            raise MetaTTTError(f"{file} is of other layers: it does not fit at {min(wrong)}")
        with torch.no_grad():
            for name, value in tensors.items():
                parameters[name].copy_(value)


# -- one call of the model ---------------------------------------------------------------------------------------------


class _Call:
    """What the attached modules need of a call of the model, which their own arguments do not hold."""

    def __init__(self, model: nn.Module):
        base = getattr(model, getattr(model, "base_model_prefix", ""), model)
        blocks = max((one for one in base.modules() if isinstance(one, nn.ModuleList)), key=len)
        self.mask: Tensor | None = None
        self.cache: Any = None
        self.read_before: int | None = None  # tokens that the cache held before the call
        self.embeddings: Tensor | None = None
        embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self.hooks = [
            base.register_forward_pre_hook(self._begin, with_kwargs=True),
            embedding.register_forward_hook(self._embedded),
            *(one.register_forward_pre_hook(self._enter, with_kwargs=True) for one in blocks),
        ]

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def __getstate__(self) -> dict[str, Any]:  # a copy of the model has nothing of the last call
        return self.__dict__ | {"mask": None, "cache": None, "embeddings": None}

    def state(self, name: str) -> Any:
        """The state of a module before this call; None at the start."""
        held = _states(self.cache).get(name)
        if held is None and self.read_before:
            raise MetaTTTError("the cache has read tokens that the attached layers have not: begin with a new cache")
        return held

    def keep(self, name: str, state: Any) -> None:
        if self.cache is not None:
            _states(self.cache)[name] = state

    def valid(self, count: int) -> Tensor | None:
        """`[B, count]` real tokens of this call; None: all."""
        if self.mask is None:
            return None
        valid = self.mask[:, -count:].bool()
        return None if bool(valid.all()) else valid

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        mask = kwargs.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            raise MetaTTTError("attached layers need an attention_mask [B, T], 1 for real tokens, or none")
        self.mask, self.cache, self.read_before = mask, None, None

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if self.read_before is None:  # of the first block: attentions of later ones see that it has grown
            self.read_before = 0 if self.cache is None else self.cache.get_seq_length()

    def _embedded(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.embeddings = output


class _Followed:
    """Mixed into the class of a cache: what is done to the cache is done to the states of attached layers."""

    metattt_states: dict[str, Any]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        for name, state in self.metattt_states.items():
            count = len(state.inputs if hasattr(state, "inputs") else state.pos)
            self.metattt_states[name] = state.select(torch.arange(count).repeat_interleave(repeats))

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.metattt_states.clear()

    def crop(self, max_length: int) -> None:
        raise MetaTTTError("attached layers cannot forget tokens: assisted generation is not supported")

    def _select(self, index: Tensor) -> None:
        for name, state in self.metattt_states.items():
            self.metattt_states[name] = state.select(index)


def _states(cache: Any) -> dict[str, Any]:
    """The states of attached layers that a cache holds."""
    if cache is None:
        return {}
    if not isinstance(cache, _Followed):
        cache.__class__ = type(type(cache).__name__, (_Followed, type(cache)), {})
        cache.metattt_states = {}
    states: dict[str, Any] = cache.metattt_states
    return states


# -- what a module computes instead ------------------------------------------------------------------------------------


class _Beside:
    """An attention with a sequence layer beside it, or in its place."""

    def __init__(
        self, name: str, attention: nn.Module, call: _Call, layer: str, how: str, dim: int, settings: Mapping[str, Any]
    ):
        if not hasattr(attention, "layer_idx"):
            raise MetaTTTError(f"{name} is a {type(attention).__name__}: layer={layer} goes beside an attention")
        self.name, self.module, self.before, self.call, self.how = name, attention, attention.forward, call, how
        like = next(attention.parameters())
        width = getattr(attention, "head_dim", None)  # heads as wide as those of the attention, where these divide D
        heads = dim // width if isinstance(width, int) and dim % width == 0 else 1
        made = build(layer, dim=dim, **{"num_heads": heads} | dict(settings)).to(like.device, like.dtype)
        self.added: dict[str, Any] = {"scale": nn.Parameter(like.new_zeros(())), "layer": made}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        attention: Any = self.module
        y, state = attention.layer(x, self.call.state(self.name), mask=self.call.valid(x.shape[1]))
        self.call.keep(self.name, state)
        if self.how == "replace":
            if self.call.cache is not None:  # which counts the tokens by what its layers hold
                nothing = x.new_zeros(x.shape[0], 1, x.shape[1], 1)
                self.call.cache.update(nothing, nothing, attention.layer_idx)
            return y, None
        found = self.before(*args, **kwargs)
        first, *others = found if isinstance(found, tuple) else (found,)
        first = first + torch.tanh(attention.scale) * y
        return (first, *others) if isinstance(found, tuple) else first


class _InPlace:
    """A linear map of an MLP with fast weights, and where its labels come from."""

    def __init__(
        self, name: str, linear: nn.Module, call: _Call, mlp: nn.Module, labels: str = "hidden", **settings: Any
    ):
        check_choice("labels", labels, ("hidden", "embeddings"))
        if not isinstance(linear, nn.Linear):
            raise MetaTTTError(f"{name} is a {type(linear).__name__}: layer={IN_PLACE} takes linear maps of MLPs")
        self.name, self.module, self.before, self.call, self.labels = name, linear, linear.forward, call, labels
        self.added: dict[str, Any] = {"map": InPlaceMemory(linear, **settings)}
        self.entered: Tensor | None = None
        call.hooks.append(mlp.register_forward_pre_hook(self._enter))

    def forward(self, h: Tensor) -> Tensor:
        if self.call.valid(h.shape[1]) is not None:
            raise MetaTTTError("In-Place TTT cuts a sequence into chunks, which padding would shift: give no padding")
        linear: Any = self.module
        labels = self.call.embeddings if self.labels == "embeddings" else self.entered
        learned, state = linear.map(h, labels, self.call.state(self.name))
        self.call.keep(self.name, state)
        y = self.before(h)
        return y + linear.map.lr * learned.to(y.dtype)

    def __getstate__(self) -> dict[str, Any]:  # a copy of the model has nothing of the last call
        return self.__dict__ | {"entered": None}

    def _enter(self, mlp: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.entered = args[0]
