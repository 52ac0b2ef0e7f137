"""A pretrained model with fast weights: which of its parameters learn, and how every document gets values of its own.

Parameters are found by the modules that hold them. The model's structure is copied, its tensors are shared, and in the
copy each of these modules computes with the values of the call, stacked by document. The model itself is not touched.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from metattt.errors import MetaTTTError, check_integer
from metattt.functional import replica, with_values
from metattt.inner.causality import same
from metattt.inner.diagnostics import require_ids
from metattt.models.language_model import LanguageModel
from metattt.state import Tensors

log = logging.getLogger(__name__)
CHOICES = ("lora", "mlp", "norms", "all")
LORA_RANK = 8
MLP = ("block_sparse_moe", "ffn", "feed_forward", "fc", "fc1", "fc2", "gate_proj", "up_proj", "down_proj")
"""Parts of a path outside of attentions that say that a linear map is of an MLP, where its name does not."""
DOWN, UP = "/down", "/up"  # what the names of the two factors of a low-rank change end with


class Place(NamedTuple):
    """A parameter that is fast: attribute `attribute` of the module `module`; `key` is its name among the weights. (A
    tensor that stands in two modules, as a tied embedding, has one key.)"""

    module: str
    attribute: str
    key: str


class Held(threading.local):
    """The fast weights of the call that runs, by name; every thread has its own."""

    values: Mapping[str, Tensor] = {}


class FastModel:
    """Logits of a causal language model whose fast weights are an argument.

    Args:
        model: a `LanguageModel`, or a causal language model of Transformers. It is neither changed nor copied.
        fast: which parameters are fast: `lora` (a change of rank `rank` to every linear map of the blocks), `mlp` (the
            linear maps of the MLPs), `norms` (scales and offsets of the norms), `all`, or patterns of parameter names,
            `["model.layers.*.mlp.down_proj.weight"]`.
        rank: of the change `W + up · down` to each chosen matrix, in place of the whole matrix; None: 8 for `lora`, and
            whole matrices for the others.
        frozen_blocks: the first so many blocks stay as they are.
        seed: of the first factors, which are drawn; the second are 0, so that the model is unchanged at the start.

    Attributes:
        start: name → W0 `[1, *shape]`, in fp32 or wider: what every document begins with.
        num_logits: V of the logits.

    Raises:
        MetaTTTError: no such parameter; one that no module applies to the tokens of a document by itself; a rank where
            there is no matrix; or a model that is not causal.
    """

    def __init__(
        self,
        model: nn.Module,
        fast: str | Sequence[str] = "lora",
        rank: int | None = None,
        frozen_blocks: int = 0,
        seed: int = 0,
    ):
        if not isinstance(model, nn.Module):  # such as the pair that `load_model` returns
            raise _no_language_model(model)
        check_integer("rank", 1 if rank is None else rank, 1)
        check_integer("frozen_blocks", frozen_blocks, 0)
        check_integer("seed", seed, 0)
        self._given: Any = model, fast, rank, frozen_blocks, seed
        self.ours = isinstance(model, LanguageModel)
        self.model = replica(model).eval()
        for one in self.model.modules():
            if hasattr(one, "checkpoint_blocks"):  # blocks that run again would not find the weights of the call
                one.checkpoint_blocks = False  # type: ignore[assignment]
        self.rank = LORA_RANK if fast == "lora" and rank is None else rank
        self._held = Held()
        called = self._called()
        places = _chosen(self.model, fast, frozen_blocks, called, self.rank is not None)
        self.start: Tensors = {}
        generator = torch.Generator().manual_seed(seed)
        for name in dict.fromkeys(place.module for place in places):
            held = {place.attribute: place.key for place in places if place.module == name}
            module = self.model.get_submodule(name)
            self._begin(module, held, generator)
            module.forward = self._forward(module, held)

    def __reduce__(self) -> tuple[Any, ...]:  # for `pickle` and `copy`: forwards of its modules look values up in it
        return FastModel, self._given

    def __call__(self, weights: Tensors, ids: Tensor, state: Any, last: int) -> tuple[Tensor, Any]:
        """Logits `[B, last, V]` of the last tokens of `ids` `[B, T]`, and the state after them.

        Args:
            weights: fast weights by name, `[B, 1, *shape]`.
            ids: tokens of B documents.
            state: of a `LanguageModel` before them; None: at the start. Models of Transformers get none.
            last: how many tokens.
        """
        self._held.values = weights
        try:
            if self.ours:
                features, state = self.model.features(ids, state)  # type: ignore[operator]
                return self.model.head(features[:, -last:]), state  # type: ignore[operator]
            keep = {"logits_to_keep": last} if "logits_to_keep" in signature(self.model.forward).parameters else {}
            found = self.model(input_ids=ids, use_cache=False, **keep)
            if not hasattr(found, "logits"):
                raise _no_language_model(self.model)
            return found.logits[:, -last:], None
        finally:
            self._held.values = {}

    def token_ids(self, ids: Tensor | Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """The ids of documents, `[B, n]` or B tensors, as `[B, n]` with zeros after the shorter ones, and the length of
        each.

        Raises:
            MetaTTTError: something else than token ids of the model's vocabulary.
        """
        rows = list(ids) if isinstance(ids, Tensor) and ids.ndim == 2 else ids
        if not isinstance(rows, Sequence) or not rows or any(not isinstance(x, Tensor) or x.ndim != 1 for x in rows):
            raise MetaTTTError("ids must be token ids [B, n], or a list of tensors [n] of B documents")
        whole = [row if row.is_floating_point() else row.long() for row in rows]
        padded = nn.utils.rnn.pad_sequence(whole, batch_first=True)
        require_ids(padded, min(self.num_logits, text_setting(self.model, "vocab_size")))
        return padded.to(next(self.model.parameters()).device), [len(row) for row in rows]

    def generating(self, weights: Tensors) -> nn.Module:
        """The model with these fast weights in its modules, until the next call."""
        self._held.values = weights
        return self.model

    def _called(self) -> set[str]:
        """The modules without children that a call of the model calls with one tensor whose first axis is the batch,
        and that return another. (No convolutions: with a cache, models read their weights and do not call them. No
        modules that have other parameters for the time of the call, as with `target_parameters` of peft.)

        Raises:
            MetaTTTError: a model that takes more than tokens, or that predicts a token from itself or later ones.
        """
        if not self.ours and getattr(getattr(self.model, "config", None), "is_encoder_decoder", True):
            raise _no_language_model(self.model)
        found: set[str] = set()
        leaves = {
            name: (module, dict(module.named_parameters()))
            for name, module in self.model.named_modules()
            if not list(module.children()) and not isinstance(module, nn.Conv1d)
        }

        def notice(name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], made: Any) -> None:
            kept = all(getattr(module, key) is parameter for key, parameter in leaves[name][1].items())
            if kept and _is_batch(given) and _is_batch((made,)) and not named:
                found.add(name)

        hooks = [
            module.register_forward_hook(partial(notice, name), with_kwargs=True)
            for name, (module, _) in leaves.items()
        ]
        ids = torch.ones(PROBED, dtype=torch.long, device=next(self.model.parameters()).device)
        ids[1, 1] = 0  # some models see no token 0
        try:
            with torch.no_grad():
                one, other, _ = self({}, ids, None, 2)[0][:, 0]
        finally:
            for hook in hooks:
                hook.remove()
        self.num_logits = one.numel()
        if self.num_logits < text_setting(self.model, "vocab_size") < sys.maxsize:  # classes, not tokens
            raise _no_language_model(self.model)
        if not same(one, other):
            raise MetaTTTError(
                f"{type(self.model).__name__} changes what it predicts when later tokens change, so that its scores "
                "would mean nothing: give a causal language model (one of BERT needs is_decoder=true in its config)"
            )
        return found

    def _begin(self, module: nn.Module, held: Mapping[str, str], generator: torch.Generator) -> None:
        """Adds the first values of a module's fast weights to `start`."""
        for attribute, key in held.items():
            value: Tensor = getattr(module, attribute).detach()
            wide = torch.promote_types(value.dtype, torch.float32)
            if self.rank is None:
                self.start.setdefault(key, value.to(wide).unsqueeze(0))
                continue
            widths = _widths(module)
            assert widths
            d_in, d_out = widths
            down = torch.randn(1, self.rank, d_in, generator=generator) / math.sqrt(d_in)
            self.start.setdefault(key + DOWN, down.to(value.device, wide))
            self.start.setdefault(key + UP, value.new_zeros(1, d_out, self.rank, dtype=wide))

    def _forward(self, module: nn.Module, held: Mapping[str, str]) -> Callable[..., Tensor]:
        """What takes the place of the module's `forward`."""
        plain = replica(module)
        plain._forward_hooks, plain._forward_pre_hooks = OrderedDict(), OrderedDict()  # `module` runs them
        key = next(iter(held.values()))

        def low_rank(x: Tensor) -> Tensor:
            y: Tensor = plain(x)
            if not self._held.values:
                return y
            down, up = (self._held.values[key + end].squeeze(1).to(x.dtype) for end in (DOWN, UP))
            _check_rows(key, x, len(down))
            flat = x.reshape(len(down), -1, x.shape[-1])  # [B, T, d_in]; one document may come in any shape
            return torch.baddbmm(y.reshape(len(down), -1, y.shape[-1]), flat @ down.mT, up.mT).view_as(y)

        def whole(x: Tensor) -> Tensor:
            if not self._held.values:
                return plain(x)
            values = {
                attribute: self._held.values[name].squeeze(1).to(getattr(plain, attribute).dtype)
                for attribute, name in held.items()
            }
            count = len(values[next(iter(held))])
            if count == 1:
                alone = {attribute: value[0] for attribute, value in values.items()}
                return with_values(plain, alone)(x)
            _check_rows(key, x, count)
            y: Tensor = vmap(lambda v, one: with_values(plain, v)(one.unsqueeze(0)).squeeze(0))(values, x)
            padding = getattr(plain, "padding_idx", None)  # vmap keeps it from learning in the first document alone
            return y if padding is None else torch.where((x == padding).unsqueeze(-1), y.detach(), y)

        return whole if self.rank is None else low_rank


def _no_language_model(given: object) -> MetaTTTError:
    return MetaTTTError(f"an adapter takes a causal language model, and not a {type(given).__name__}")


def text_setting(model: Any, name: str) -> int:
    """A number in the configuration of what reads text; the largest there is where it has none."""
    config = getattr(model, "config", model)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config  # of one that sees images, too
    found = getattr(config, name, None)
    return found if isinstance(found, int) else sys.maxsize


def _check_rows(key: str, x: Tensor, count: int) -> None:
    """Refuses tokens of `count` documents that are not sorted by document.

    Raises:
        MetaTTTError: they are not.
    """
    if count not in (1, len(x)):
        raise MetaTTTError(
            f"{key} is applied to {len(x)} rows of {count} documents, as by a mixture of experts: read one document at "
            "a time, or leave it out of fast"
        )


PROBED = 3, 2
"""Documents and tokens of the call that shows which modules are called. (Modules that mix documents would show another
first axis.)"""


def _is_batch(given: tuple[Any, ...]) -> bool:
    return len(given) == 1 and isinstance(given[0], Tensor) and given[0].ndim > 1 and len(given[0]) == PROBED[0]


def _chosen(
    model: nn.Module, fast: str | Sequence[str], frozen_blocks: int, called: set[str], low_rank: bool
) -> list[Place]:
    """The parameters that `fast` names, in every module that holds them.

    Raises:
        MetaTTTError: as `FastModel`.
    """
    patterns = None if fast in CHOICES else [fast] if isinstance(fast, str) else list(fast or ())
    blocks = _blocks(model, called)
    frozen = tuple(f"{blocks}.{number}." for number in range(frozen_blocks))
    held = [
        (name, module, attribute, parameter)
        for name, module in model.named_modules()
        for attribute, parameter in module.named_parameters(recurse=False)
        if parameter.is_floating_point() or (low_rank and _widths(module))
    ]
    keys: dict[int, str] = {}
    for name, module, attribute, parameter in held:
        path = f"{name}.{attribute}"
        named = any(fnmatchcase(path, one) for one in patterns or ()) or (
            patterns is None and _is_of(str(fast), name, module, blocks)
        )
        if named and not path.startswith(frozen):
            keys.setdefault(id(parameter), path)
    places, left = [], []
    for name, module, attribute, parameter in held:
        path = f"{name}.{attribute}"
        if id(parameter) not in keys:
            continue
        if name in called and (not low_rank or (parameter.ndim == 2 and _widths(module))):
            places.append(Place(name, attribute, keys[id(parameter)]))
        elif patterns is not None:
            why = "is no matrix of a linear map: leave out rank" if low_rank and name in called else (
                "is not applied by its own module to each document by itself, as a linear map, a norm or an embedding "
                "is: leave it out of fast"
            )  # fmt: skip
            raise MetaTTTError(f"{path} {why}")
        else:  # a bias, or a parameter that another module reads
            left += [path] if parameter.ndim == (2 if _widths(module) else 3 if _of_experts(name) else -1) else []
            key = keys.pop(id(parameter))
            places = [one for one in places if one.key != key]
    if left:
        what = "linear maps that are not applied to each document by itself"
        log.warning("fast=%s leaves out %d %s, for example %s", fast, len(left), what, left[0])
    known = [f"{name}.{attribute}" for name, _, attribute, parameter in held if id(parameter) in keys]
    unused = [one for one in patterns or () if not any(fnmatchcase(path, one) for path in known)]
    if unused or not places:
        raise MetaTTTError(
            f"fast={', '.join(unused) or fast} names no parameter that may learn: give one of {', '.join(CHOICES)}, or "
            f"patterns such as {next((name for name, one in model.named_parameters() if one.ndim == 2), '*')}"
            f"{'; rank is for the matrices of linear maps: leave it out' if low_rank and fast != 'lora' else ''}"
            f"{f'; frozen_blocks={frozen_blocks} may leave none' if frozen_blocks else ''}"
        )
    return places


def _is_of(fast: str, name: str, module: nn.Module, blocks: str) -> bool:
    """Whether a module's parameters belong to one of `CHOICES`."""
    if fast == "norms":
        return "norm" in type(module).__name__.lower()
    inside = name.startswith(f"{blocks}.") and (_widths(module) != () or _of_experts(name))
    if fast == "mlp":
        of_attention = "attn" in name or "attention" in name
        return inside and not of_attention and ("mlp" in name or bool(set(name.split(".")) & set(MLP)))
    return fast == "all" or inside


def _of_experts(name: str) -> bool:
    """Whether a module holds the experts of a mixture, whose matrices lie in one tensor."""
    return "experts" in name.split(".")


def _blocks(model: nn.Module, called: set[str]) -> str:
    """The name of the longest list of called modules that is in no other: the blocks. (Those that see images are not
    called.)"""
    lists = {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(one.startswith(f"{name}.") for one in called)
    }
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return max(outer, default="", key=lists.__getitem__)


def _widths(module: nn.Module) -> tuple[int, int] | tuple[()]:
    """Width of what a linear map takes and of what it makes; nothing for other modules. (`Conv1D` of Transformers is
    one whose matrix is transposed.)"""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and isinstance(module.weight, Tensor) and module.weight.ndim == 2:
        return module.weight.shape[0], module.weight.shape[1]
    return ()
