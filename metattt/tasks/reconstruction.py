"""Reconstruct one view of a token from another: the self-supervised task of the TTT papers."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.errors import MetaTTTError, check_number, divisors
from metattt.modules import (
    CausalConv,
    RMSNorm,
    affine,
    convolution,
    document_tail,
    made_once,
    normalize,
    projection,
    rms_norm,
    rotary_table,
    rotate,
)
from metattt.registry import register
from metattt.setting import setting
from metattt.state import WHOLE_CALL, Context, Tensors
from metattt.tasks import corruption
from metattt.tasks.base import Task, Views
from metattt.tasks.losses import IN_SYMBOLS, WITH_THRESHOLD, loss_per_token

Projected = tuple[Tensor, Tensor, Tensor]
"""q, k and v `[B, T, ·]` before they are split into heads."""

NORM_EPS = 1e-5  # of `qk_norm`, as in the released code of LaCT
MOST_TURNS = 65536  # tokens of a mini-batch whose rotations are kept in a table for decoding

FEATURE_MAPS = {"identity": lambda x: x, "elu": lambda x: F.elu(x) + 1, "silu": F.silu}


@made_once
def _known_turns(count: int, width: int, theta: float, dtype: torch.dtype) -> Tensor:
    """For the first `count` positions `[count, 2, width]`: what features are multiplied by, and their neighbours."""
    cos, sin = rotary_table(torch.arange(count, device="cpu").unsqueeze(0), width, theta, dtype)
    pairs = torch.stack([cos, cos], -1), torch.stack([-sin, sin], -1)
    return torch.stack([pair.flatten(-2) for pair in pairs], -2)[0, 0]


@register(group="task", name="reconstruction")
class Reconstruction(Task):
    """Predict `v = θV x` from `k = θK x`; read with `q = θQ x` (arXiv 2407.04620, Eq. 4 and Sec. 2.3).

    Args:
        views: `separate` projections, or `shared_qk`: one projection for q and k, each with its own causal convolution;
            `no_key`: only q and v, and k = 1, for rules whose step is derived from the decay of each channel (HGRN2).
        kv_heads: heads G of k and v, each shared by H / G neighbouring heads of q (grouped-query attention, arXiv
            2305.13245); None: H. Attention keeps G of them; a learner with weights keeps its H.
        qk_norm: RMSNorm of the projected q and k over all their heads, with a learned scale (QK-norm).
        conv_width: taps of these convolutions (tokens).
        short_conv: taps (tokens) of a causal convolution of every channel after each of the separate projections, with
            silu after it, instead of feature_map=silu for q and k (the published delta rules have 4); None: none.
        short_conv_v: also for v (MesaNet has none).
        rope: rotary position encoding of q and k by position in the document (`full`), in the mini-batch
            (`mini_batch`), or in the map that the tokens of a call are, row by row (`map`, ViT³, arXiv 2512.01643, as
            released): of the features of all heads together, the first half turns by row, the second by column.
        rope_theta: base of its frequencies.
        rope_columns: width of the map (tokens); None: it is a square.
        feature_map: applied to q and k; `elu` is elu(x) + 1.
        normalize_qk: scale q and k to unit length.
        bias: biases in the projections.
        corruption: replace the training view by one with `noise`, or with a `mask` of zeros. The labels and the test
            view stay clean.
        corruption_rate: factor of the standard normal that is added, or share of the entries that are masked.
        seed: seed of the corruption. None draws a new one for every sequence; it is part of the state.
        loss: `squared` ½‖f(k) − v‖², `mean_squared` ‖f(k) − v‖²/d (Titans), `dot` −⟨v, f(k)⟩, `huber` per feature, both
            summed over the width, `cosine` 1 − cos(f(k), v), or of MIRAS (arXiv 2504.13173): `lp` ‖f(k) − v‖_p^p,
            `norm_huber` the Huber loss of ‖f(k) − v‖, `mixed_huber` (Yaad) ½‖·‖² up to δ and δ‖·‖₁ beyond it; `kl`
            KL(softmax(v) ‖ softmax(f(k))).
        loss_p: p of `lp`.
        huber_delta: δ, where the Huber losses turn linear, or its initial value.
        huber_delta_from: a `constant` δ, or softplus(θ x + c) of the token `per_head`; it travels as the last feature
            of the label view.

    Raises:
        MetaTTTError: a value that is not allowed, an odd head width with rope, `kv_heads` with views=shared_qk, or a δ
            of the token for a loss without δ; when the layer is built, for `kv_heads` that do not divide its heads;
            from a call with rope=map, tokens that are no square.
    """

    projections: Literal["separate", "shared_qk", "no_key"] = setting(default="separate", alias="views", fixed=True)
    conv_width: int = setting(default=4, fixed=True)
    rope: Literal["none", "mini_batch", "full", "map"] = setting(default="none", fixed=True)
    rope_theta: float = setting(default=10000.0, above=0)
    feature_map: Literal["identity", "elu", "silu"] = setting(default="identity")
    normalize_qk: bool = setting(default=False)
    bias: bool = setting(default=False, fixed=True)
    corruption: Literal["none", "noise", "mask"] = setting(default="none")
    corruption_rate: float = setting(default=0.1, least=0)
    seed: int | None = setting(default=None, least=0, most=2**62)
    loss_name: Literal["squared", "mean_squared", "dot", "huber", "cosine", "lp", "norm_huber", "mixed_huber", "kl"] = (
        setting(default="squared", alias="loss")
    )
    huber_delta: float = setting(default=1.0, above=0)
    kv_heads: int | None = setting(default=None, kw_only=True, advice=", or null for one of each head", fixed=True)
    qk_norm: bool = setting(default=False, kw_only=True, fixed=True)
    loss_p: float = setting(default=3.0, kw_only=True, least=1)
    huber_delta_from: Literal["constant", "per_head"] = setting(default="constant", kw_only=True, fixed=True)
    short_conv: int | None = setting(default=None, kw_only=True, advice=" (taps), or null for none", fixed=True)
    short_conv_v: bool = setting(default=True, kw_only=True, fixed=True)
    rope_columns: int | None = setting(default=None, kw_only=True, advice=", or null for a square map")

    def configure(self) -> None:
        super().configure()
        self.causal = type(self).causal and self.rope != "map"  # the shape of the map depends on the number of tokens
        self.shared_qk, self.no_key = self.projections == "shared_qk", self.projections == "no_key"
        self.learned_delta = self.huber_delta_from == "per_head"
        self.squared_error = self.loss_name == "squared"

    def check_settings(self) -> None:
        if self.corruption == "mask":
            check_number("task.corruption_rate", self.corruption_rate, least=0, most=1)
        super().check_settings()
        if self.huber_delta_from != "constant" and self.loss_name not in WITH_THRESHOLD:
            raise MetaTTTError(
                f"task.huber_delta_from={self.huber_delta_from} is for losses with a threshold, and "
                f"task.loss={self.loss_name} has none: set task.loss to one of {', '.join(WITH_THRESHOLD)}"
            )
        if self.kv_heads is not None and self.projections != "separate":
            raise MetaTTTError(
                f"task.kv_heads={self.kv_heads} needs keys of their own, and task.views={self.projections} has none: "
                "set task.views=separate, or task.kv_heads=null"
            )
        if self.short_conv is not None and self.projections != "separate":
            raise MetaTTTError(
                f"task.short_conv={self.short_conv} is for separate projections, and task.views={self.projections}: "
                "set task.views=separate, or task.short_conv=null"
            )
        if self.no_key and (self.rope != "none" or self.corruption != "none" or self.qk_norm or self.normalize_qk):
            raise MetaTTTError(
                "task.views=no_key has the key 1 for every token: set task.rope=none, task.corruption=none, "
                "task.qk_norm=false and task.normalize_qk=false"
            )

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        if self.rope != "none" and head_dim % 2:
            raise MetaTTTError(
                f"rope turns pairs of features, and the head width {head_dim} is odd: set task.rope=none or num_heads"
            )
        groups = num_heads if self.kv_heads is None else self.kv_heads
        if num_heads % groups:
            raise MetaTTTError(
                f"task.kv_heads={groups} does not divide num_heads={num_heads}: choose from {divisors(num_heads)}"
            )
        self.num_heads, self.head_dim, self.groups = num_heads, head_dim, groups
        width = num_heads * head_dim
        if self.rope == "map" and (width % 4 or groups != num_heads):
            raise MetaTTTError(
                f"task.rope=map turns pairs of features of {num_heads} heads of {head_dim} by row and by column: "
                "set dim to a multiple of 4, and task.kv_heads=null"
            )
        self.q = projection(dim, width, self.bias)  # shared by q and k in `shared_qk`
        self.v = projection(dim, groups * head_dim, self.bias)
        if self.shared_qk:
            self.conv_q, self.conv_k = CausalConv(width, self.conv_width), CausalConv(width, self.conv_width)
        elif not self.no_key:
            self.k = projection(dim, groups * head_dim, self.bias)
        if self.qk_norm:
            keys = width if self.shared_qk else groups * head_dim
            self.q_norm, self.k_norm = RMSNorm(width, eps=NORM_EPS), RMSNorm(keys, eps=NORM_EPS)
        if self.short_conv is not None:
            self.make_convolutions(width, groups * head_dim)
        if self.learned_delta:
            self.label_dim = head_dim + 1
            self.delta_weight = nn.Parameter(torch.randn(groups, dim) * 0.02)
            start = self.huber_delta + math.log(-math.expm1(-self.huber_delta))  # softplus of it is δ
            self.delta_bias = nn.Parameter(torch.full((groups,), start))

    def make_convolutions(self, q: int, kv: int) -> None:
        """The short convolutions for so many features of q, and of k and v each."""
        assert self.short_conv is not None
        self.conv_q, self.conv_k = convolution(q, self.short_conv, False), convolution(kv, self.short_conv, False)
        if self.short_conv_v:
            self.conv_v = convolution(kv, self.short_conv, False)

    def equations(self) -> list[str]:
        loss = IN_SYMBOLS[self.loss_name][0]
        lines = [
            "k_t = 1 in every channel" if self.no_key else f"k_t = {self._in_symbols('K')}",
            f"v_t = {self._in_symbols('V')}",
            f"q_t = {self._in_symbols('Q')}",
            f"ℓ_t(W) = {loss.format(p='f(k_t; W)', delta=self._threshold(), power=self.loss_p)}",
        ]
        if self.learned_delta:
            lines.append("δ_t = softplus(θ_δ x_t + c_δ), θ and c of each head")
        if self.shared_qk:
            lines.append(f"conv_K, conv_Q: causal, {self.conv_width} tokens, each channel by itself, with a bias")
        elif self.short_conv is not None:
            which = "conv_K, conv_V, conv_Q" if self.short_conv_v else "conv_K, conv_Q"
            lines.append(f"{which}: causal, {self.short_conv} tokens, each channel by itself")
        if self.rope != "none":
            place = {"mini_batch": "the position of t in its mini-batch", "full": "the position of t in its document"}
            by = place.get(self.rope, "row and column of t in the map, half of all features each")
            lines.append(f"RoPE_t: turns features 2i and 2i + 1 by {by}, base {self.rope_theta:g}")
        if self.groups != self.num_heads:
            lines.append(f"k and v have {self.groups} heads, each for {self.num_heads // self.groups} of q")
        return lines

    def slope(self, prediction: str) -> str | None:
        slope = IN_SYMBOLS[self.loss_name][1]
        return None if slope is None else slope.format(p=prediction, delta=self._threshold(), power=self.loss_p)

    def _threshold(self) -> str:
        return "δ_t" if self.learned_delta else f"{self.huber_delta:g}"

    def _in_symbols(self, view: str) -> str:
        """The view K, V or Q of x_t."""
        short = self.short_conv is not None and (view != "V" or self.short_conv_v)
        shared = self.shared_qk and view != "V"
        value = "θQ x" if shared else f"θ{view} x" if short else f"θ{view} x_t"
        if self.bias:
            value += f" + b_{'Q' if shared else view}"
        if shared:
            value = f"conv_{view}({value})_t"
        if self.qk_norm and view != "V":
            value = f"RMSNorm({value})"
        if short:
            value = f"silu(conv_{view}({value})_t)"
        if view == "V":
            return value
        if self.feature_map != "identity" and not (short and self.feature_map == "silu"):
            value = f"elu({value}) + 1" if self.feature_map == "elu" else f"{self.feature_map}({value})"
        where = ""
        if self.normalize_qk:
            value, where = "u/‖u‖", f", u = {value}"
        if self.rope != "none":
            value = f"RoPE_t({value})"
        if view == "K" and self.corruption == "noise":
            value = f"{value} + {self.corruption_rate:g} ε, ε normal"
        elif view == "K" and self.corruption == "mask":
            value = f"({value}) ∘ m, m = 0 for {self.corruption_rate:g} of the entries and 1 elsewhere"
        return value + where

    def project(self, x: Tensor) -> Projected:
        if self.shared_qk or self.no_key:
            views = "shared_qk" if self.shared_qk else "no_key"
            raise MetaTTTError(f"task.views={views} has no keys that two layers can share: set task.views=separate")
        q, k = self.q(x), self.k(x)
        return (rms_norm(self.q_norm, q), rms_norm(self.k_norm, k), self.v(x)) if self.qk_norm else (q, k, self.v(x))

    def borrow(self, lender: Task) -> None:
        if not isinstance(lender, Reconstruction) or lender.shared_qk or self.shared_qk or lender.no_key or self.no_key:
            raise MetaTTTError(
                f"{type(self).__name__} and {type(lender).__name__} share projections of their own for q, k and v "
                "each: set task.views=separate, or layer.shared=false"
            )
        ours, theirs = (
            [getattr(part, "out_features", None) for part in (one.q, one.k, one.v)] for one in (self, lender)
        )
        if any(a != b for a, b in zip(ours, theirs, strict=True) if a and b):  # a module of one's own may not tell
            raise MetaTTTError(
                f"layers that share q, k and v have as many features of them, not {ours} and {theirs}: set kv_heads, "
                "or another task"
            )
        if self.qk_norm:
            raise MetaTTTError(
                "task.qk_norm is the first layer's where q and k are shared: set layer.first.task.qk_norm"
            )
        del self.q, self.k, self.v

    def views(
        self, x: Tensor, state: Tensors, ctx: Context, projected: Projected | None = None
    ) -> tuple[Views, Tensors]:
        kept: Tensors = {}
        if self.no_key:
            q = FEATURE_MAPS[self.feature_map](self._heads(self.q(x)))
            v = self._heads(self.v(x))
            return Views(torch.ones_like(q), self._with_delta(v, x) if self.learned_delta else v, q), kept
        if self.shared_qk:
            shared = self.conv_q.pad(self.q(x), state.get("conv"))
            q, k = self.conv_q.convolve(shared, ctx), self.conv_k.convolve(shared, ctx)
            kept["conv"] = document_tail(shared, self.conv_width - 1, ctx)
            q, k = (rms_norm(self.q_norm, q), rms_norm(self.k_norm, k)) if self.qk_norm else (q, k)
            v = self.v(x)
        else:
            q, k, v = self.project(x) if projected is None else projected
            (q, k, v), kept = self.convolved((q, k, v), state, ctx)
        q, k, v = self._heads(self.mapped(q)), self._heads(self.mapped(k)), self._heads(v)
        if self.normalize_qk:
            q, k = normalize(q), normalize(k)
        if self.rope != "none":
            positions = ctx.positions
            if self.rope == "mini_batch":
                positions = ctx.places if ctx.mini_batch_size == WHOLE_CALL else positions % ctx.mini_batch_size
            if q.shape[2] == 1 and ctx.mini_batch_size <= MOST_TURNS and self._decodes(q):
                # for one token the number of operations counts: q and k together, features 2i and 2i+1 exchanged
                both = torch.stack([q, k])
                exchanged = both.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
                table = _known_turns(ctx.mini_batch_size, self.head_dim, self.rope_theta, q.dtype)
                cos, sin = table[positions].unsqueeze(1).unbind(-2)
                q, k = torch.addcmul(both * cos, exchanged, sin).unbind(0)
            else:
                if self.rope == "map":
                    cos, sin = self._turns_of_map(ctx.places, q)
                else:
                    cos, sin = rotary_table(positions, self.head_dim, self.rope_theta, q.dtype)
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.corruption != "none":
            kept["seed"] = state["seed"] if "seed" in state else self.draw_seed(x)
            k = self.corrupt(k, kept["seed"], ctx)
        return Views(k, self._with_delta(v, x) if self.learned_delta else v, q), kept

    def convolved(self, projected: Projected, state: Tensors, ctx: Context) -> tuple[Projected, Tensors]:
        """q, k and v after their short convolutions and silu, where the task has them, and the convolutions' tails."""
        found, tails = list(projected), {}
        for place, name in enumerate(() if self.short_conv is None else ("conv_q", "conv_k", "conv_v")):
            if name != "conv_v" or self.short_conv_v:
                conv: CausalConv = getattr(self, name)
                y, tails[name] = conv(found[place], state.get(name), ctx)
                found[place] = F.silu(y)
        return (found[0], found[1], found[2]), tails

    def mapped(self, x: Tensor) -> Tensor:
        """The feature map of q or k; after a short convolution silu is not applied again."""
        done = self.feature_map == "identity" or (self.feature_map == "silu" and self.short_conv is not None)
        return x if done else FEATURE_MAPS[self.feature_map](x)

    def _turns_of_map(self, places: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[B, H, T, d/2]` for q `[B, H, T, d]` and tokens at `places` `[B, T]` of a map."""
        count = q.shape[2]
        columns = math.isqrt(count) if self.rope_columns is None else self.rope_columns
        if self.rope_columns is None and columns**2 != count:
            raise MetaTTTError(
                f"task.rope=map: {count} tokens are no square map: set task.rope_columns to its width; class tokens "
                "have no place in it"
            )
        half = self.num_heads * self.head_dim // 2
        rows, across = places.div(columns, rounding_mode="floor"), places.remainder(columns)
        tables = zip(*(rotary_table(one, half, self.rope_theta, q.dtype) for one in (rows, across)), strict=True)
        cos, sin = (torch.cat(one, -1)[:, 0].unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in tables)
        return cos, sin

    def _with_delta(self, v: Tensor, x: Tensor) -> Tensor:
        """v `[B, G, T, d]`, followed by the token's δ."""
        delta = F.softplus(affine(x, self.delta_weight, self.delta_bias)).mT.unsqueeze(-1)  # in fp32 or wider
        return torch.cat([v, delta.to(v.dtype)], dim=-1)

    def _heads(self, x: Tensor) -> Tensor:
        """`[B, T, n d]` to `[B, n, T, d]`."""
        return x.view(*x.shape[:2], x.shape[2] // self.head_dim, self.head_dim).transpose(1, 2)

    def _decodes(self, q: Tensor) -> bool:
        """Whether one token per sequence is decoded on the CPU, with positions in the mini-batch and without
        derivatives."""
        plain = type(q) is Tensor and q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64)
        one = plain and self.rope == "mini_batch" and q.shape[2] == 1 and self.groups == self.num_heads
        return one and not torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def draw_seed(self, x: Tensor) -> Tensor:
        """One seed per sequence, `[B]`."""
        if self.seed is None:
            return torch.randint(2**31, (x.shape[0],), device=x.device)
        return self.seed + torch.arange(x.shape[0], device=x.device)

    def corrupt(self, k: Tensor, seed: Tensor, ctx: Context) -> Tensor:
        """The training view with noise or holes that depend on (seed, position) alone."""
        if self.corruption == "noise":
            noise = corruption.normal(seed, ctx.positions, self.groups, self.head_dim)
            return k + self.corruption_rate * noise.to(k.dtype)
        keep = corruption.uniform(seed, ctx.positions, self.groups, self.head_dim) >= self.corruption_rate
        return k * keep

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        if self.loss_name == "squared":
            return 0.5 * (prediction - v).square().sum(-1)
        delta: float | Tensor = self.huber_delta
        if self.learned_delta:
            v, delta = v[..., :-1], v[..., -1]
        return loss_per_token(self.loss_name, prediction, v, self.loss_p, delta)
