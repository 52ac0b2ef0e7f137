"""Fast weights inside a pretrained model of Transformers: a TTT layer beside its attention, or In-Place TTT in its
MLPs.

States live in the cache that `generate` and other callers hand from call to call, so they are reordered, repeated and
dropped with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial, reduce
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metattt.adaptation.in_place import InPlaceLinear
from metattt.adaptation.model_call import Call
from metattt.checkpoints.tensors import read_own, write_own
from metattt.combined import Combined
from metattt.composition.compose import build
from metattt.errors import MetaTTTError, check_choice
from metattt.inner.causality import require_causal
from metattt.optional import need

IN_PLACE = "in_place"
FORMAT = "metattt attached layers"
CODE = ("_target_", "custom", "hydra", "${", "://", "=")  # not in the settings of a file: they would name classes


def attach(
    model: nn.Module, pattern: str | Sequence[str], layer: str, how: str = "beside", **settings: Any
) -> Attached:
    """Puts fast weights into modules of a model, which is changed in place. At the start its logits stay what they
    were, bit for bit, but for `how="replace"`.

    ```
    attach(model, "model.layers.*.self_attn", layer="ttt_linear", num_heads=8)   # trains with the model, or alone
    attach(model, "model.layers.*.mlp.down_proj", layer="in_place", chunk=2048)  # In-Place TTT
    ```

    Args:
        model: a causal language model of Transformers.
        pattern: of the modules' names, or several.
        layer: a layer of `metattt.build` or a sum, `window_attention+ttt_linear`, for attentions: `y = attention(x) +
            tanh(a) layer(x)` with a = 0 at the start; or `in_place`, for linear maps: see `InPlaceLinear`.
        how: `beside`, or for attentions `replace`: the layer in place of them.
        settings: overrides of the layer, as for `metattt.build`; or of `InPlaceLinear`, and `labels`: `hidden`, what
            enters the MLP (the default), or `embeddings`, the model's embeddings of the tokens.

    Raises:
        MetaTTTError: no such module, one of another kind, settings that do not fit, or a layer whose outputs depend on
            later tokens.
    """
    check_choice("how", how, ("beside",) if layer == IN_PLACE else ("beside", "replace"))
    if not hasattr(model, "get_input_embeddings") or _type_of(model) in ("", "metattt"):
        raise MetaTTTError(f"attach takes a causal language model of Transformers, and not a {type(model).__name__}")
    known = [name for name, _ in model.named_modules() if name]
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    names = [name for name in known if any(fnmatchcase(name, one) for one in patterns)]
    unused = [one for one in patterns if not any(fnmatchcase(name, one) for name in known)]
    if unused or not names:
        near = [name for name in known if name.endswith(("attn", "attention", "mixer", "down_proj"))]
        raise MetaTTTError(
            f"{unused[0] if unused else pattern} names no module of the model: its attentions and MLPs "
            f"are called {', '.join(near[:3])}"
        )
    if fixed := settings.keys() & {"dim", "name"}:
        raise MetaTTTError(f"{min(fixed)} is no setting of attach: the model says how wide a layer is")
    width = int(model.config.get_text_config().hidden_size)  # type: ignore[union-attr, operator]
    call = Call(model, names[0])
    about = {"pattern": pattern, "layer": layer, "how": how, "settings": settings}
    made: dict[str, _Beside | _InPlace] = {}
    try:
        for name in names:
            module = model.get_submodule(name)
            if isinstance(module, _Beside | _InPlace):
                raise MetaTTTError(f"{name} has an attached layer already: call its `detach()` first")
            if layer == IN_PLACE:
                mlp = model.get_submodule(name.rpartition(".")[0])
                made[name] = _InPlace(name, module, call, mlp, width, dict(settings))
            else:
                made[name] = beside = _Beside(name, module, call, layer, how, width, settings)
                require_causal(beside.layer, width)
    except BaseException:
        call.end()
        raise
    for name, one in made.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, one)
    return Attached(model, made, call, about)


class Attached:
    """What was attached to a model.

    `model.save_pretrained` writes the pretrained tensors under the names that they had, and those of attached layers
    beside them: `from_pretrained` of that folder is the pretrained model. `save` is for the layers.

    Attributes:
        model: the model.
        modules: what stands in the places, by name.
    """

    def __init__(self, model: nn.Module, modules: dict[str, _Beside | _InPlace], call: Call, about: dict[str, Any]):
        self.model, self.modules, self._call, self._about = model, modules, call, about
        self._fixed = {name for name, parameter in self.named_parameters() if not parameter.requires_grad}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are new, by name. Adapters of peft inside of the attached layers are no part of these,
        and do not change their names."""
        for name, module in self.modules.items():
            held = {id(one) for one in module.pretrained.parameters()}
            wrapped = ("base_layer", "original_module")
            adapted = tuple(f"{one}." for one, part in module.named_modules() if any(hasattr(part, w) for w in wrapped))
            for own, parameter in module.named_parameters():
                plain = own.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")
                if id(parameter) not in held and (plain != own or not own.startswith(adapted)):
                    yield f"{name}.{plain}", parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of `named_parameters` that train, for an optimizer: without a W0 that stays 0, as that of delta rules.
        To train these alone, freeze the others first: `model.requires_grad_(False)`, then `requires_grad_()` of these.
        """
        return (parameter for name, parameter in self.named_parameters() if name not in self._fixed)

    def detach(self) -> None:
        """Puts the pretrained modules back into their places, but where something else stands by now."""
        for name, module in self.modules.items():
            if self.model.get_submodule(name) is not module:
                continue
            parent, _, attribute = name.rpartition(".")
            setattr(self.model.get_submodule(parent), attribute, module.pretrained)
        self._call.end()

    def save(self, path: str | Path) -> None:
        """Writes the new parameters to a file of safetensors, with what they belong to and the name of the pretrained
        model, which is not written.

        Raises:
            MetaTTTError: the file cannot be written.
        """
        base = getattr(self.model.config, "_name_or_path", "")
        about = {"base": base, "model_type": _type_of(self.model)} | self._about
        tensors = {name: one.detach() for name, one in self.named_parameters()}
        write_own(path, tensors, {"format": FORMAT} | about)


def load_attached(path: str | Path, model: nn.Module | None = None) -> Attached:
    """What `Attached.save` has written, attached again: `load_attached("my-layers.safetensors").model`.

    Args:
        path: the file.
        model: the pretrained model; None: the one that the file names.

    Raises:
        MetaTTTError: no such file, one that is damaged, of another model, or that names code.
    """
    missing = f"{path} does not exist: `attach(...).save(path)` writes it"
    other = "holds no attached layers: give a file that `attach(...).save` has written"
    file, tensors, about = read_own(path, "path", FORMAT, missing, other)
    pattern, settings = about.get("pattern"), about.get("settings")
    words = [about.get(key) for key in ("base", "layer", "how")]
    words += pattern if isinstance(pattern, list) else [pattern]
    known = isinstance(settings, dict) and not settings.keys() & {"model", *about}
    if not known or not all(isinstance(one, str) for one in words):
        raise MetaTTTError(f"{file} is damaged: it does not say what its parameters belong to")
    if any(word in json.dumps([about["layer"], settings]) for word in CODE):
        raise MetaTTTError(
            f"{file} names classes of its own, which a file cannot have run: attach such a layer yourself, then "
            "model.load_state_dict(safetensors.torch.load_file(path), strict=False)"
        )
    if model is None:
        if not about["base"]:
            raise MetaTTTError(f"{file} does not name its pretrained model, which had no name: give model=<the model>")
        need("transformers", extra="hf", what="the pretrained model")
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(about["base"], use_safetensors=True)
        except OSError as error:
            raise MetaTTTError(
                f"{file} belongs to the model {about['base']}, which cannot be read: give model=<the model>"
            ) from error
    if (kind := about.get("model_type", _type_of(model))) != _type_of(model):
        raise MetaTTTError(f"{file} is of another model: of the type {kind}, and this is a {_type_of(model)}")
    made = attach(model, pattern, about["layer"], about["how"], **settings)
    parameters = dict(made.named_parameters())
    wrong = tensors.keys() ^ parameters.keys() or {
        name for name, one in parameters.items() if one.shape != tensors[name].shape
    }
    if wrong:
        made.detach()
        raise MetaTTTError(f"{file} is of another model: it does not fit at {min(wrong)}")
    with torch.no_grad():
        for name, value in tensors.items():
            parameters[name].copy_(value)
    return made


def _type_of(model: nn.Module) -> str:
    """What Transformers calls such models; empty: it is none of them."""
    return str(getattr(getattr(model, "config", None), "model_type", ""))


# -- what stands in the places -----------------------------------------------------------------------------------------


def _as_before(module: nn.Module, inside: str) -> None:
    """What `module.<inside>` holds keeps the names in state dicts that it had without `module`: a folder that
    `save_pretrained` writes is still one of the pretrained model, with some tensors more."""
    module.register_state_dict_post_hook(partial(_without, inside))
    module.register_load_state_dict_pre_hook(partial(_within, inside))


def _without(inside: str, module: nn.Module, held: dict[str, Any], prefix: str, metadata: Any) -> None:
    adapted = tuple(  # peft looks for its tensors below the names of its modules
        f"{prefix}{inside}.{name}".rstrip(".") + "."
        for name, one in module.get_submodule(inside).named_modules()
        if hasattr(one, "active_adapters")
    )
    for name in [one for one in held if one.startswith(f"{prefix}{inside}.") and not one.startswith(adapted)]:
        held[prefix + name.removeprefix(f"{prefix}{inside}.")] = held.pop(name)


def _within(inside: str, module: nn.Module, held: dict[str, Any], prefix: str, *others: Any) -> None:
    for name in module.get_submodule(inside).state_dict():
        if prefix + name in held:
            held[f"{prefix}{inside}.{name}"] = held.pop(prefix + name)


class _Beside(nn.Module):
    """An attention with a sequence layer beside it, or in its place."""

    def __init__(
        self, name: str, attention: nn.Module, call: Call, layer: str, how: str, dim: int, settings: Mapping[str, Any]
    ):
        super().__init__()
        if not hasattr(attention, "layer_idx"):
            raise MetaTTTError(
                f"{name} is a {type(attention).__name__}: layer={layer} goes beside an attention of a language model"
            )
        if how == "replace" and "residual" in signature(attention.forward).parameters:
            raise MetaTTTError(f"{name} adds the residual connection itself, which how=replace would drop: use beside")
        if how == "replace" and any(isinstance(one, nn.Conv1d) for one in attention.modules()):  # as Mamba's mixers
            raise MetaTTTError(f"{name} is a {type(attention).__name__}: how=replace takes attentions, use beside")
        self.name, self.how = name, how
        self.pretrained = attention
        like = next(attention.parameters())
        heads = {"num_heads": _heads(attention, dim)} | dict(settings)
        parts: list[Any] = [build(one, dim=dim, **heads) for one in layer.split("+")]
        self.layer = reduce(partial(Combined, dim), parts).to(like.device, like.dtype)
        self.scale = nn.Parameter(like.new_zeros(()))
        self.call = call
        _as_before(self, "pretrained")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        state = self.call.state(self.name)
        y, state = self.layer(x, state, mask=self.call.valid(x.shape[1]), reset=self.call.starts(len(x)))
        self.call.keep(self.name, state)
        if self.how == "replace":
            if self.call.given.cache is not None:  # which counts the tokens by what its layers hold
                nothing = x.new_zeros(x.shape[0], 1, x.shape[1], 1)
                self.call.given.cache.update(nothing, nothing, self.pretrained.layer_idx)
            return y, None
        found = self.pretrained(*args, **kwargs)
        first, *others = found if isinstance(found, tuple) else (found,)
        first = first + torch.tanh(self.scale) * y
        return (first, *others) if isinstance(found, tuple) else first

    def __getattr__(self, name: str) -> Any:  # what blocks ask of their attention
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("pretrained"), name)


class _InPlace(nn.Module):
    """A linear map of an MLP with fast weights, and where its labels come from."""

    def __init__(self, name: str, linear: nn.Module, call: Call, mlp: nn.Module, width: int, settings: dict[str, Any]):
        super().__init__()
        labels = settings.pop("labels", "hidden")
        check_choice("labels", labels, ("hidden", "embeddings"))
        is_mlp = len(signature(mlp.forward).parameters) == 1
        if not isinstance(linear, nn.Linear) or not is_mlp or linear.out_features != width:
            raise MetaTTTError(
                f"{name} is a {type(linear).__module__}.{type(linear).__name__}: layer={IN_PLACE} takes linear maps of "
                f"MLPs (torch.nn.Linear, before peft wraps them), the last of each, which makes the {width} features "
                "of the model"
            )
        try:
            self.map = InPlaceLinear(linear, **settings)
        except TypeError as error:
            raise MetaTTTError(f"layer={IN_PLACE} has the settings chunk, lr, project and labels: {error}") from error
        self.name, self.labels = name, labels
        self.call = call
        _as_before(self, "map.linear")
        call.hooks.append(mlp.register_forward_pre_hook(self._enter, with_kwargs=True))

    @property
    def pretrained(self) -> nn.Module:
        return self.map.linear

    def forward(self, h: Tensor) -> Tensor:
        if h.ndim != 3:
            raise MetaTTTError(
                f"{self.name} is applied to rows [{h.shape[0]}, {h.shape[-1]}] of all sequences together, as in a "
                f"mixture of experts: layer={IN_PLACE} needs [B, T, F]; attach it to another MLP"
            )
        valid = self.call.valid(h.shape[1])
        ended = valid is not None and bool((valid == valid.cummin(1).values).all())  # nothing follows the padding
        if (valid is not None and not ended) or self.call.starts(len(h)) is not None:
            raise MetaTTTError(
                "In-Place TTT cuts a sequence into chunks, which padding before its tokens and other documents would "
                "shift: pad on the right, and give no packed documents"
            )
        labels = self.call.given.embeddings if self.labels == "embeddings" else self.call.given.entered
        y, state = self.map(h, labels, self.call.state(self.name))
        self.call.keep(self.name, None if ended else state)  # chunks with padding are learned, but read by padding only
        return y

    def _enter(self, mlp: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        (self.call.given.entered,) = (*args, *named.values())  # an MLP takes one argument


def _heads(attention: nn.Module, dim: int) -> int:
    """Heads of the width that the attention has, where they divide D."""
    width = getattr(attention, "head_dim", None)
    return dim // width if isinstance(width, int) and dim % width == 0 else 1
