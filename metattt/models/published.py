"""Published checkpoints of TTT language models: their names for our parameters, and the way there and back.

Two releases exist. The PyTorch one stores linear maps as `(out, in)`, as we do, and gives per-head vectors an axis
more. The JAX trainer stores the transposes, and names the leaves of its parameter tree by paths with `/`. Both compute
the same function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import reduce
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.models.language_model import LanguageModel
from metattt.models.published_config import PublishedConfig
from metattt.optimizers.gradient_descent import GradientDescent

Side = Literal["ours", "published", "jax"]


class Layout(NamedTuple):
    """How a tensor is stored elsewhere: `write` makes it so, `read` undoes it."""

    write: Callable[[Tensor], Tensor] = lambda x: x
    read: Callable[[Tensor], Tensor] = lambda x: x


SAME = Layout()
ROW = Layout(lambda x: x.unsqueeze(1), lambda x: x.squeeze(1))  # [H, n] as [H, 1, n]
FLAT = Layout(lambda x: x.squeeze(0), lambda x: x.unsqueeze(0))  # [1, b] as [b]
SWAP = Layout(lambda x: x.mT, lambda x: x.mT)  # the last two axes
TAPS = Layout(lambda x: x.permute(2, 1, 0), lambda x: x.permute(2, 1, 0))  # [D, 1, width] as [width, 1, D]


class Name(NamedTuple):
    """One parameter under its three names; `#` is the number of the block.

    `published_layout` leads from our tensor to the PyTorch release's, `jax_layout` from there to the JAX trainer's.
    """

    ours: str
    published: str
    jax: str
    published_layout: Layout = SAME
    jax_layout: Layout = SAME

    def write(self, tensor: Tensor, side: Side) -> Tensor:
        """Our tensor as `side` stores it."""
        if side == "ours":
            return tensor
        tensor = self.published_layout.write(tensor)
        return self.jax_layout.write(tensor) if side == "jax" else tensor

    def read(self, tensor: Tensor, side: Side) -> Tensor:
        """A tensor of `side` as we store it."""
        if side == "ours":
            return tensor
        tensor = self.jax_layout.read(tensor) if side == "jax" else tensor
        return self.published_layout.read(tensor)


def _inside(ours: str, published: str, jax: str, *names: Name) -> list[Name]:
    """The names with what stands before them."""
    return [n._replace(ours=ours + n.ours, published=published + n.published, jax=jax + n.jax) for n in names]


NAMES = [
    Name("embedding.weight", "model.embed_tokens.weight", "model/wte/embedding"),
    Name("final_norm.weight", "model.norm.weight", "model/ln_f/kernel"),
    Name("head.weight", "lm_head.weight", "lm_head/kernel", SAME, SWAP),
    *_inside(
        "blocks.#.",
        "model.layers.#.",
        "model/h/#/",
        Name("conv_norm.weight", "conv.norm.weight", "conv/conv_norm/kernel"),
        Name("conv.weight", "conv.conv.weight", "conv/conv1/kernel", SAME, TAPS),
        Name("conv.bias", "conv.conv.bias", "conv/conv1/bias"),
        Name("layer_norm.weight", "seq_norm.weight", "seq_norm/kernel"),
        Name("ffn_norm.weight", "ffn_norm.weight", "ffn_norm/kernel"),
        Name("ffn.gate.weight", "mlp.gate_proj.weight", "feed_forward/w1/kernel", SAME, SWAP),
        Name("ffn.up.weight", "mlp.up_proj.weight", "feed_forward/w3/kernel", SAME, SWAP),
        Name("ffn.down.weight", "mlp.down_proj.weight", "feed_forward/w2/kernel", SAME, SWAP),
    ),
    *_inside(
        "blocks.#.layer.",
        "model.layers.#.seq_modeling_block.",
        "model/h/#/seq_modeling_block/",
        Name("task.q.weight", "q_proj.weight", "wq/kernel", SAME, SWAP),
        Name("task.k.weight", "k_proj.weight", "wk/kernel", SAME, SWAP),
        Name("task.v.weight", "v_proj.weight", "wv/kernel", SAME, SWAP),
        Name("task.conv_q.weight", "conv_q.weight", "conv_q/kernel", SAME, TAPS),
        Name("task.conv_q.bias", "conv_q.bias", "conv_q/bias"),
        Name("task.conv_k.weight", "conv_k.weight", "conv_k/kernel", SAME, TAPS),
        Name("task.conv_k.bias", "conv_k.bias", "conv_k/bias"),
        Name("learner.init.w1", "W1", "ttt_dense_0"),
        Name("learner.init.b1", "b1", "ttt_bias_0", ROW),
        Name("learner.init.w2", "W2", "ttt_dense_1"),
        Name("learner.init.b2", "b2", "ttt_bias_1", ROW),
        Name("learner.slow.norm_scale", "ttt_norm_weight", "ttt_norm/scale"),
        Name("learner.slow.norm_bias", "ttt_norm_bias", "ttt_norm/bias"),
        Name("optimizer.lr_weight", "learnable_ttt_lr_weight", "learnable_ttt_lr/kernel", ROW, SWAP),
        Name("optimizer.lr_bias", "learnable_ttt_lr_bias", "learnable_ttt_lr/bias", ROW),
        Name("optimizer.token_step_offset", "learnable_token_idx", "learnable_token_idx", FLAT),
        Name("norm.weight", "post_norm.weight", "post_norm/scale"),
        Name("norm.bias", "post_norm.bias", "post_norm/bias"),
        Name("gate.weight", "g_proj.weight", "wg/kernel", SAME, SWAP),
        Name("out.weight", "o_proj.weight", "wo/kernel", SAME, SWAP),
    ),
]
BY_OURS = {name.ours: name for name in NAMES}


def from_published(
    state_dict: Mapping[str, Any], config: Mapping[str, Any] | object, side: Side = "published"
) -> LanguageModel:
    """A model from a published checkpoint: `model(ids)` gives logits `[B, T, V]`.

    Args:
        state_dict: tensors by published name; `lm_head.weight` may be left out where it is tied. Of the JAX trainer
            arrays by path (`model/wte/embedding`), or the nested tree; what stands before `wte/embedding` may be more
            or less. Parameters have the widest of the tensors' types.
        config: the published configuration (`config.json`), as a mapping or as an object with these attributes.
        side: `published`, the PyTorch release; or `jax`.

    Raises:
        MetaTTTError: a configuration that cannot be used; every name that is unknown, missing or of the wrong shape.
    """
    model = PublishedConfig.read(config).build()
    return fill(model, to_ours(state_dict, model, side))


def to_published(model: LanguageModel, side: Side = "published") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name and configuration of the PyTorch release, or of the JAX trainer (`side="jax"`), for `model`; the
    tensors share memory with it where they can.

    Raises:
        MetaTTTError: a model that the release cannot express; the differences are listed.
    """
    config = PublishedConfig.of(model)
    keys = config.jax() if side == "jax" else config.published()
    return from_ours(with_clipped_steps(own_tensors(model), model), side), keys


# -- tensors by name, without a model's values -------------------------------------------------------------------------


def own_tensors(model: LanguageModel) -> dict[str, Tensor]:
    """The model's parameters by our name; one that is shared appears once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def with_clipped_steps(tensors: dict[str, Tensor], model: LanguageModel) -> dict[str, Tensor]:
    """Our tensors of `model`, with the token steps of published models, max(0, 1/i + δ_i), where it makes them
    otherwise: other δ, the same steps."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, TTTLayer)}
    rules = {f"{name}.optimizer.token_step_offset": layer.optimizer for name, layer in layers.items()}
    return {
        name: rule.published_offset(tensor) if isinstance(rule := rules.get(name), GradientDescent) else tensor
        for name, tensor in tensors.items()
    }


def from_ours(tensors: Mapping[str, Tensor], side: Side) -> dict[str, Tensor]:
    """Our tensors under the names and in the layout of `side`."""
    return {_named(ours, side): _row(ours).write(tensor, side).contiguous() for ours, tensor in tensors.items()}


def to_ours(tensors: Mapping[str, Any], model: LanguageModel, side: Side) -> dict[str, Tensor]:
    """Tensors of `side` as the parameters of `model`, which may be on the meta device.

    Raises:
        MetaTTTError: every name that is unknown, missing or of the wrong shape, and a tied head that differs from the
            embedding.
    """
    flat = flatten(tensors)
    given = {name: _tensor(name, value) for name, value in (_rooted(flat) if side == "jax" else flat).items()}
    wanted = {_named(ours, side): ours for ours in own_tensors(model)}
    shapes = {_named(ours, side): _row(ours).write(tensor, side).shape for ours, tensor in own_tensors(model).items()}
    problems = []
    head, embedding = _named("head.weight", side), _named("embedding.weight", side)
    if head not in wanted and head in given and embedding in given:
        table = given[embedding].mT if side == "jax" else given[embedding]
        if not torch.equal(given.pop(head), table):
            problems.append(
                f"{head} differs from {embedding}, to which the configuration ties it (tie_word_embeddings)"
            )
    held = [name for name in wanted if name in given]
    sizes = {name: f"{name} {list(given[name].shape)} instead of {list(shapes[name])}" for name in held}
    found = {
        "missing": wanted.keys() - given.keys(),
        "unknown": given.keys() - wanted.keys(),
        "wrong shape": [sizes[name] for name in held if given[name].shape != shapes[name]],
        "not floating point": [f"{name} {given[name].dtype}" for name in held if not given[name].is_floating_point()],
        "without values, on the meta device": [name for name in held if given[name].is_meta],
    }
    problems += [f"{kind}: {first_names(names)}" for kind, names in found.items() if names]
    if problems:
        raise MetaTTTError("the tensors do not fit the configuration. " + "; ".join(problems))
    return {ours: _row(ours).read(given[name], side).contiguous() for name, ours in wanted.items()}


def fill(model: LanguageModel, tensors: Mapping[str, Tensor]) -> LanguageModel:
    """Gives a model on the meta device its parameters: copies of the tensors by our name. Evaluation mode is set."""
    tied = model.head.weight is model.embedding.weight
    kind = widest_type(tensors.values())
    copies = {name: tensor.to(kind, copy=True) for name, tensor in tensors.items()}
    if tied:
        copies["head.weight"] = copies["embedding.weight"]
    model.load_state_dict(copies, assign=True)
    if tied:  # assigning made two parameters of it
        model.head.weight = model.embedding.weight
    return model.eval()


def widest_type(tensors: Iterable[Tensor]) -> torch.dtype:
    """The type for all parameters of a model: none of its layers computes with several. (Types of 8 bits are refused
    elsewhere.)"""
    kinds = [x.dtype for x in tensors if x.is_floating_point() and x.itemsize > 1]
    return reduce(torch.promote_types, kinds) if kinds else torch.float32


def guess_side(names: Iterable[str]) -> Side | None:
    """Whose names these are; None if nobody's."""
    for name in names:
        if name == "embedding.weight":
            return "ours"
        if name == "model.embed_tokens.weight":
            return "published"
        if name.endswith("wte/embedding"):
            return "jax"
    return None


def _row(ours: str) -> Name:
    name = BY_OURS.get(re.sub(r"^blocks\.\d+\.", "blocks.#.", ours))
    if name is None:
        raise MetaTTTError(f"{ours} has no published name: only TTT-Linear and TTT-MLP models have")
    return name


def _named(ours: str, side: Side) -> str:
    """Our name as `side` says it."""
    block = re.match(r"blocks\.(\d+)\.", ours)
    name: str = getattr(_row(ours), side)
    return name.replace("#", block[1]) if block else name


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested mapping by path; a key may hold `/` itself."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _rooted(flat: dict[str, Any]) -> dict[str, Any]:
    """Paths that start at `model/` and `lm_head/`, whatever stood before them."""
    table = next((path for path in flat if path.endswith("wte/embedding")), "")
    body = table.removesuffix("wte/embedding")
    head = body.removesuffix("model/") + "lm_head/"
    if not table:
        return flat
    rooted = {}
    for path, value in flat.items():
        if path.startswith(head):
            path = "lm_head/" + path.removeprefix(head)
        elif path.startswith(body):
            path = "model/" + path.removeprefix(body)
        rooted[path] = value
    return rooted


def _tensor(name: str, value: Any) -> Tensor:
    """A tensor from what a checkpoint holds: a tensor, or an array (bfloat16, which numpy lacks, included)."""
    if isinstance(value, Tensor):
        return value.detach()
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    try:
        return torch.from_numpy(array.copy())
    except TypeError as error:
        raise MetaTTTError(f"{name} holds {type(value).__name__}, not a tensor: give the parameters alone") from error


def first_names(names: Collection[str]) -> str:
    """The first names in order, and how many more there are."""
    first, more = sorted(names)[:8], len(names) - 8
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")
