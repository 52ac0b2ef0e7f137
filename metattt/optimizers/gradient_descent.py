"""The step size of a token, which rules of every kind share, and gradient descent: online, mini-batch or batch, with
token steps."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.modules import RECORDING, affine, made_once, product_type, transformed
from metattt.optimizers.base import Gates, InnerOptimizer
from metattt.registry import register
from metattt.setting import setting
from metattt.state import WHOLE_CALL, Context, Tensors

SHARING = {"per_head": "θ and c of each head", "shared": "one θ and c for all heads"}
"""Phrases for what the heads share in learned gates."""
RATE_ADVICE = " (0 freezes the weights, below 0 climbs the loss)"


class StepSize(InnerOptimizer):
    """A rule whose tokens have a step size, `η = η_base · σ(θ_lr x + c)` (arXiv 2407.04620, Sec. 2.7).

    A negative η_base increases the loss, and 0 keeps the weights.

    Args:
        mini_batch_size, anchor, read, steps, compute_chunk: see `InnerOptimizer`.
        base_lr: η_base, or η itself if `lr` is constant.
        lr: θ_lr `per_head` (as published), `shared` by the heads, or a `constant` η.
        lr_scale: `head_dim` divides η by the head width, as the published models do.

    Raises:
        MetaTTTError: a value that is not allowed.
    """

    follows_base_lr = True  #: whether a step size changes with η_base at any time (`callbacks=inner_warmup`)
    base_lr: float = setting(default=1.0, fixed=True, advice=RATE_ADVICE)
    lr: Literal["per_head", "shared", "constant"] = setting(default="per_head", fixed=True)
    lr_scale: Literal["head_dim", "none"] = setting(default="head_dim", fixed=True)

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        self.num_heads = num_heads
        # η_base divided as `lr_scale` says; a 0-dimensional tensor during warm-up
        self.scale: float = self.base_lr / head_dim if self.lr_scale == "head_dim" else self.base_lr
        if self.lr != "constant":
            heads = num_heads if self.lr == "per_head" else 1
            self.lr_weight = nn.Parameter(torch.randn(heads, dim) * 0.02)
            self.lr_bias = nn.Parameter(torch.zeros(heads))

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        accum_dtype = torch.promote_types(x.dtype, torch.float32)
        if self.lr == "constant":
            eta = x.new_ones((1, 1, 1), dtype=accum_dtype) * self.scale
            return Gates(eta.expand(x.shape[0], self.num_heads, x.shape[1])), state
        if x.shape[1] == 1 and x.dtype == self.lr_weight.dtype == accum_dtype and product_type(x) == x.dtype:
            # for one token the number of operations counts
            eta = (torch.sigmoid(F.linear(x, self.lr_weight, self.lr_bias)) * self.scale).mT
            return Gates(eta if len(self.lr_weight) == self.num_heads else eta.expand(-1, self.num_heads, -1)), state
        eta = self.scale * torch.sigmoid(affine(x, self.lr_weight, self.lr_bias)).mT
        return Gates(eta.expand(-1, self.num_heads, -1)), state

    def equations(self) -> list[str]:
        if self.lr == "constant":
            return [] if self.scale == 1 else [f"η_t = {self.scale:g}"]
        factor = "" if self.base_lr == 1 else f"{self.base_lr:g} "
        value = f"{factor}σ(θ_η x_t + c_η){'/d' if self.lr_scale == 'head_dim' else ''}"
        return [f"η_t = {value}, {SHARING[self.lr]}; c = 0 at the start"]


CORNER = 4.0  # first τ by the c of its corner at 0


@register(group="optimizer", name="gradient_descent", version=2)
class GradientDescent(StepSize):
    """`W_t = W_{t−1} − η_t ∇ℓ_t` with `η = η_base · σ(θ_lr x + c)` (arXiv 2407.04620, Sec. 2.4 and 2.7).

    Args:
        mini_batch_size, anchor, read, steps, compute_chunk: see `InnerOptimizer`.
        base_lr: η_base, or η itself if `lr` is constant; below 0 it increases the loss, 0 keeps the weights.
        lr: θ_lr `per_head` (as published), `shared` by the heads, or a `constant` η.
        lr_scale: `head_dim` divides η by the head width, as the published models do.
        token_steps: τ_i, `shared` by the heads (as published) or `per_head`: query i of a mini-batch sees
            W_a − τ_i Σ_{s≤i} η_s ∇ℓ_s. `none` sets τ = 1.
        token_step_map: how τ comes from a learned δ that begins with 0, such that τ begins with 1/(i+1): `relu` is
            max(0, 1/(i+1) + δ_i), as published, which stays at 0 for good where a large step of the outer optimizer has
            led below it; `squareplus` is that with a round corner (arXiv 2112.11687), (x + √(x² + 4c²))/2 with c =
            1/(4(i+1)) and x = 15/(16(i+1)) + δ_i, above 0, with a derivative that is never 0 and begins with 16/17.
        max_norm: clip what a mini-batch adds to the weights of a head to this norm, for every query up to its own
            token; null: no clipping.
    """

    token_step_sharing: Literal["none", "shared", "per_head"] = setting(default="none", alias="token_steps", fixed=True)
    max_norm: float | None = setting(default=None, above=0, advice=", or null for no clipping")
    token_step_map: Literal["squareplus", "relu"] = setting(default="squareplus", kw_only=True)

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        if self.token_step_sharing != "none":
            heads = num_heads if self.token_step_sharing == "per_head" else 1
            if self.mini_batch_size == WHOLE_CALL:
                raise MetaTTTError(
                    f"optimizer.token_steps={self.token_step_sharing} has a number for each place in a mini-batch, and "
                    "with optimizer.mini_batch_size=null it is as long as the call: set optimizer.token_steps=none"
                )
            self.token_step_offset = nn.Parameter(torch.zeros(heads, self.mini_batch_size))
            self.fixed = (*self.fixed, "mini_batch_size")

    def equations(self) -> list[str]:
        lines = super().equations()
        if self.token_step_sharing != "none":
            heads = "shared by the heads" if self.token_step_sharing == "shared" else "of each head"
            value = (
                "max(0, 1/i + δ_i)"
                if self.token_step_map == "relu"
                else "(z_i + √(z_i² + 1/(4 i²)))/2, z_i = 15/(16 i) + δ_i"
            )
            lines.append(f"τ_i = {value}, i = 1…b the place of t in its mini-batch, δ learned, {heads}")
        return lines

    def token_steps(self) -> Tensor | None:
        if self.token_step_sharing == "none":
            return None
        offset = self.token_step_offset
        plain = type(offset) is nn.Parameter and offset.device.type == "cpu" and not torch.is_grad_enabled()
        if not plain or torch.compiler.is_compiling() or transformed() or RECORDING.get():
            return self._steps(offset)
        # the same for every token while decoding: cached with the parameter and its version
        map_, known, tau = self.__dict__.get("_kept_steps", (None, offset, offset))
        if map_ != self.token_step_map or known.dtype != offset.dtype or not torch.equal(known, offset):
            known, tau = offset.detach().clone(), self._steps(offset)
            self.__dict__["_kept_steps"] = self.token_step_map, known, tau
        return tau

    def published_offset(self, offset: Tensor) -> Tensor:
        """The δ for which `token_step_map=relu` has the τ that this rule has for `offset`: `[1 or H, b]`, in its
        type."""
        if self.token_step_map == "relu":
            return offset
        place = offset.to(torch.promote_types(offset.dtype, torch.float32))
        return (self._steps(place) - _places(self.mini_batch_size, place)).to(offset.dtype)

    def _steps(self, offset: Tensor) -> Tensor:
        """τ for δ."""
        places = _places(self.mini_batch_size, offset)
        if self.token_step_map == "relu":
            return torch.relu(places + offset)
        # (A softplus of δ + c begins with a derivative of 1 − exp(−1/i), so that late places learn i times as slowly,
        # and one steep enough for 1 has none left a little below 0.)
        square = (places / CORNER).square()
        x = places - square / places + offset
        root = (x.square() + 4 * square).sqrt()
        # both are the same number; the first is found without a difference
        return torch.where(x < 0, 2 * square / (root + x.abs()), (x + root) / 2)


def _places(count: int, like: Tensor) -> Tensor:
    """1, 1/2, …, 1/count."""
    kept = type(like) is nn.Parameter and not like.is_meta and not torch.compiler.is_compiling()
    return (_known_places if kept else _new_places)(count, like.device, like.dtype)


def _new_places(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return 1 / torch.arange(1, count + 1, device=device, dtype=dtype)


_known_places = made_once(_new_places)
