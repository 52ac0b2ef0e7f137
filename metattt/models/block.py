"""A block of a model around any sequence layer, and which layers the blocks of a model get."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from metattt.declared import Declared
from metattt.errors import MetaTTTError
from metattt.inner.causality import require_causal
from metattt.inner.packing import Packing
from metattt.modules import CausalConv, RMSNorm, transformed
from metattt.native import passes
from metattt.sequence_layer import SequenceLayer
from metattt.state import Context

OVERHEAD = 2**13  # of a block, in the size of as many numbers: its modules in Python, at least
INIT_STD = 0.02  # of embeddings and projections, as in the published models


class SwiGLU(nn.Module):
    """`W_down(silu(W_gate x) ∘ W_up x)`, without biases (arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)
        for projection in (self.gate, self.up, self.down):
            nn.init.normal_(projection.weight, std=INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[..., D]` to `[..., D]`."""
        gate, up = self.gate(x), self.up(x)
        fits = gate.shape == up.shape and gate.numel() % passes.LEAST == 0 and passes.ready(gate, up)
        plain = not torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed()
        if not fits and (plain or gate.dtype != up.dtype):
            return self.down(F.silu(gate) * up)
        return self.down(passes.Gated.apply(gate, up, fits))


class BlockNorm(RMSNorm):
    """RMSNorm over the last axis, on a CPU in one pass over memory where `metattt.native.passes` can."""

    def forward(self, x: Tensor) -> Tensor:
        fits = self.eps is not None and x.shape[-1:] == self.weight.shape and x.shape[-1] % passes.LEAST == 0
        fits = fits and passes.ready(x, self.weight)
        return passes.Scaled.apply(x, self.weight, self.eps) if fits else super().forward(x)


class Block(nn.Module):
    """Pre-norm block: `x += conv(norm(x))` (optional), `x += layer(norm(x))`, `x += SwiGLU(norm(x))`."""

    def __init__(self, dim: int, layer: nn.Module, ffn_dim: int, conv_width: int | None, norm_eps: float):
        super().__init__()
        self.conv_norm = BlockNorm(dim, eps=norm_eps) if conv_width else None
        self.conv = CausalConv(dim, conv_width) if conv_width else None
        self.layer_norm = BlockNorm(dim, eps=norm_eps)
        self.layer = layer
        # others are told of padding and documents by mask= and reset=
        self.ours = isinstance(layer, SequenceLayer)
        self.ffn_norm = BlockNorm(dim, eps=norm_eps)
        self.ffn = SwiGLU(dim, ffn_dim)

    def forward(
        self, x: Tensor, state: Any, tail: Any, ctx: Context, packing: Packing | None = None, donate_state: bool = False
    ) -> tuple[Tensor, Any, Any]:
        """`x` `[B, T, D]`, the layer's state and the convolution's tail to the same three, one call later.

        `packing`: of the model's call; `donate_state`: the state may be written over.
        """
        if self.conv is not None and self.conv_norm is not None:
            y, tail = self.conv(self.conv_norm(x), tail, ctx)
            x = x + y
        y, state = self.mix(x, state, ctx, packing, donate_state)
        x = x + y
        return x + self.ffn(self.ffn_norm(x)), state, tail

    def mix(
        self, x: Tensor, state: Any, ctx: Context, packing: Packing | None = None, donate_state: bool = False
    ) -> tuple[Tensor, Any]:
        """`layer(norm(x))`, and the state of the layer after it."""
        if self.ours:
            return self.layer(self.layer_norm(x), state, packing=packing, donate_state=donate_state)
        return self.layer(self.layer_norm(x), state, mask=ctx.valid, reset=ctx.first)


class Backbone(Declared):
    """What models of blocks around sequence layers share; a subclass declares the settings `dim`, `ffn_dim`,
    `pre_conv`, `conv_width` and `norm_eps`."""

    _group = "model"
    checkpoint_blocks = False

    def make_blocks(self, layers: Sequence[Callable[[], nn.Module]], count: int, causal: bool = True) -> None:
        """`count` blocks, whose layers the functions make in turn.

        Raises:
            MetaTTTError: more blocks than the machine can hold; no layer, or one that sees the future, if `causal`.
        """
        dim: Any = self.dim
        hidden: Any = getattr(self, "ffn_dim", None)
        self.ffn_dim = 16 * math.ceil(dim * 8 / 3 / 16) if hidden is None else hidden  # rounded up to a multiple of 16
        check_blocks("model.num_layers", count, 3 * dim * self.ffn_dim + dim * dim)
        self.blocks = nn.ModuleList()
        for number in range(count):
            made = layers[number % len(layers)]()
            if not isinstance(made, nn.Module):
                kind = type(made).__name__
                raise MetaTTTError(f"the layer of block {number} is a {kind}: it must be a torch.nn.Module")
            if causal:
                require_causal(made, dim)
            self.blocks.append(self._block(number, made))

    def _block(self, number: int, layer: nn.Module) -> Block:
        """The block of this number around a layer."""
        width: Any = self.conv_width if self.pre_conv else None
        return Block(self.dim, layer, self.ffn_dim, width, self.norm_eps)  # type: ignore[arg-type]

    def _through(
        self, count: int, x: Tensor, before: Any, ctx: Context, packing: Packing | None, donate_state: bool
    ) -> tuple[Tensor, list[Any], list[Any]]:
        """`x` `[B, T, D]` after the first `count` blocks, with their states and tails, from a state `before`."""
        layers, tails = [], []
        for number, (state, tail) in enumerate(zip(before.layers[:count], before.tails, strict=False)):
            x, state, tail = self.run_block(number, x, state, tail, ctx, packing, donate_state)
            layers.append(state)
            tails.append(tail)
        return x, layers, tails

    def run_block(
        self, number: int, x: Tensor, state: Any, tail: Any, ctx: Context, packing: Packing | None, donate_state: bool
    ) -> tuple[Tensor, Any, Any]:
        """The block of this number, called as `Block.forward` says; with `checkpoint_blocks` it is run again in the
        backward pass."""
        block = self.blocks[number]
        if self.checkpoint_blocks and torch.is_grad_enabled():
            return checkpoint(block, x, state, tail, ctx, packing, use_reentrant=False)
        return block(x, state, tail, ctx, packing, donate_state)

    def check_blocks_of(self, count: int) -> None:
        """Raises an error for the state of a model with another number of blocks."""
        if count != len(self.blocks):
            raise MetaTTTError(f"the state is of a model with {count} blocks, this one has {len(self.blocks)}")

    def check_causal(self) -> None:
        """Looks at the layers as they are now: on their device, with their weights, whoever has put them there.

        Raises:
            MetaTTTError: a layer that sees the future.
        """
        for block in self.blocks:
            require_causal(block.layer, self.dim)  # type: ignore[arg-type]

    def num_parameters(self) -> int:
        """Number of parameters, shared ones counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _key(self, name: str) -> str:
        return "dim" if name == "dim" else super()._key(name)


def take(model: nn.Module, name: str) -> Any:
    """A setting of a model that is no part of it once its blocks are made: what makes a layer, or is copied."""
    value = model._modules.pop(name, getattr(model, name, None))
    model.__dict__.pop(name, None)
    return value


def pattern_of(layer: object, blocks: object, count: int) -> Sequence[Callable[[], nn.Module]]:
    """What makes the layers of `count` blocks, in turn: `layer` for all, or a pattern `blocks`.

    Raises:
        MetaTTTError: both or none of them, no functions, or more of them than blocks.
    """
    if blocks is None:
        check_function("layer", layer)
        return [layer]  # type: ignore[list-item]
    if layer is not None:
        raise MetaTTTError("layer is for every block, and blocks a pattern of layers: give one of them")
    if not isinstance(blocks, Sequence) or isinstance(blocks, str) or not blocks:
        raise MetaTTTError(f"blocks is {blocks!r:.60}: it must be a list of functions that make layers, one at least")
    for number, make in enumerate(blocks):
        check_function(f"blocks[{number}]", make)
    if len(blocks) > count:
        raise MetaTTTError(
            f"model.blocks is a pattern of {len(blocks)} blocks, and model.num_layers={count}: set "
            f"model.num_layers={len(blocks)}, or more"
        )
    return blocks


def check_function(name: str, function: object) -> None:
    """Refuses what cannot be called to make something; a module is made already.

    Raises:
        MetaTTTError: naming it.
    """
    if not callable(function) or isinstance(function, nn.Module):
        kind = type(function).__name__
        raise MetaTTTError(f"{name} is a {kind}: it must be a function, such as one that makes a layer")


def check_blocks(key: str, count: int, numbers: int) -> None:
    """Refuses more blocks than this machine can hold, before any is made.

    Args:
        key: the override that sets their number.
        count: of the blocks.
        numbers: parameters of one block, at least.

    Raises:
        MetaTTTError: they take more than the machine's memory, on whatever device their parameters are.
    """
    size = 4 * count * max(OVERHEAD, numbers if torch.get_default_device().type == "cpu" else 0)
    if size > (room := memory()):
        raise MetaTTTError(
            f"a model of {key}={count} would take {size / 1e9:,.1f} GB, and this machine has {room / 1e9:,.1f} GB: "
            f"lower {key}, dim or the width of the MLPs"
        )


@cache
def memory() -> float:
    """Bytes of memory that this process may use; infinite if the system does not report it."""
    found = []
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        found.append(float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        found += [float(text)] if text.isdigit() else []
    return min(found, default=math.inf)
