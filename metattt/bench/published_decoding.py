"""Decoding in the style of the published PyTorch models: a baseline to time against.

What their code does for one token, with our parameters: Python calls a dozen small operations for every convolution, rotation
and norm; the inner loop carries the weights of the last commit and the sum of gradients since, and materialises the token's
gradient and weights with einsums (the primal form of arXiv 2407.04620, Sec. 2.3, with token steps). States are updated in place.
Left out is what costs time and computes nothing: trees of states, casts between equal types, arguments nobody uses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.bench.published_style import gelu_slope, inner_gradient, norm
from metattt.layer import TTTLayer
from metattt.models.language_model import Block, LanguageModel, LanguageModelState
from metattt.modules import CausalConv
from metattt.optimizers.gradient_descent import GradientDescent
from metattt.state import State, Tensors
from metattt.tasks.reconstruction import Reconstruction


class PublishedDecoding:
    """A TTT-Linear or TTT-MLP language model of the Mamba backbone (shared q and k, gate, convolution in front), token by token.

    Args:
        model: whose parameters are used.
        state: of `model` after a prompt; it is copied.
    """

    def __init__(self, model: LanguageModel, state: LanguageModelState):
        self.model = model
        self.position = int(state.layers[0].pos[0])
        pairs = zip(state.layers, state.tails, strict=True)
        self.caches = [_cache(layer, tail) for layer, tail in pairs]

    def step(self, ids: Tensor) -> Tensor:
        """Logits `[B, 1, V]` of the next token, for tokens `[B, 1]` that come after those read so far."""
        x = self.model.embedding(ids)
        for block, cache in zip(self.model.blocks, self.caches, strict=True):
            x = _block(block, x, cache, self.position)  # type: ignore[arg-type]
        self.position += 1
        logits: Tensor = self.model.head(_rms_norm(self.model.final_norm, x))
        return logits


def _cache(state: State, tail: Tensor | None) -> Tensors:
    """Weights W, accumulated gradients (without the token step), and the inputs of convolutions `[B, D, taps]`, newest last."""
    assert tail is not None
    cache = {name: w.clone() for name, w in state.weights["commit"].items()}
    for name, w in state.weights["commit"].items():
        update = state.weights.get("update")
        cache[f"{name}.gradient"] = torch.zeros_like(w) if update is None else -update[name]
    for name, inputs in (("block", tail), ("q", state.task["conv"]), ("k", state.task["conv"])):
        cache[name] = F.pad(inputs.mT, (1, 0))
    return cache


def _block(block: Block, x: Tensor, cache: Tensors, position: int) -> Tensor:
    assert block.conv is not None
    x = x + _conv(block.conv, _rms_norm(block.conv_norm, x), cache["block"])
    x = x + _layer(block.layer, _rms_norm(block.layer_norm, x), cache, position)  # type: ignore[arg-type]
    n, ffn = _rms_norm(block.ffn_norm, x), block.ffn
    return x + ffn.down(F.silu(ffn.gate(n)) * ffn.up(n))


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.eps))


def _conv(conv: CausalConv, x: Tensor, inputs: Tensor) -> Tensor:
    inputs.copy_(inputs.roll(-1, -1))
    inputs[:, :, -1] = x[:, 0]
    return ((inputs * conv.weight[:, 0]).sum(-1) + conv.bias).unsqueeze(1)


def _layer(layer: TTTLayer, x: Tensor, cache: Tensors, position: int) -> Tensor:
    task, rule = layer.task, layer.optimizer
    assert isinstance(task, Reconstruction) and isinstance(rule, GradientDescent)
    batch, heads, size = x.shape[0], layer.num_heads, rule.mini_batch_size
    place = position % size
    shared, v = task.q(x), task.v(x)
    q, k = _conv(task.conv_q, shared, cache["q"]), _conv(task.conv_k, shared, cache["k"])
    q, k, v = (view.view(batch, 1, heads, -1).transpose(1, 2) for view in (q, k, v))
    q, k = _rotate(q, k, torch.full((batch, 1), place, device=x.device), task.rope_theta)
    logit = torch.einsum("btc,hc->bht", x, rule.lr_weight) + rule.lr_bias.view(1, -1, 1)
    lr = rule.scale * torch.sigmoid(logit).unsqueeze(-1)  # [B, H, 1, 1]
    index = 1.0 / torch.arange(1, size + 1, device=x.device) + rule.token_step_offset
    tau = torch.clamp_min(index[:, place : place + 1], 0.0).view(1, 1, 1, 1)
    scale, shift = (layer.learner.slow[name].unsqueeze(1) for name in ("norm_scale", "norm_bias"))
    take = _mlp if "w2" in cache else _linear
    z, after = take(q, k, v, lr, tau, cache, scale, shift)
    for name, (weight, gradient) in after.items():
        if place == size - 1:
            cache[name].copy_(weight)
            cache[f"{name}.gradient"].zero_()
        else:
            cache[f"{name}.gradient"].copy_(gradient)
    y = (q + norm(z, scale, shift)).transpose(1, 2).reshape(batch, 1, -1)
    assert layer.norm is not None and layer.gate is not None
    y = layer.norm(y) * F.gelu(layer.gate(x), approximate="tanh")
    out: Tensor = layer.out(y)
    return out


def _rotate(q: Tensor, k: Tensor, position: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """Pairs (2i, 2i+1) are brought to (i, i + d/2), turned, and brought back."""
    width = q.shape[-1]
    frequency = 1.0 / theta ** (torch.arange(0, width, 2, device=q.device).float() / width)
    angle = (frequency[None, :, None] @ position[:, None, :].float()).transpose(1, 2)
    angle = torch.cat((angle, angle), dim=-1).unsqueeze(1)
    cos, sin = angle.cos(), angle.sin()
    turned = []
    for x in (q, k):
        x = x.reshape(*x.shape[:3], width // 2, 2).transpose(4, 3).reshape(x.shape)
        x = x * cos + torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1) * sin
        turned.append(x.reshape(*x.shape[:3], 2, width // 2).transpose(4, 3).reshape(x.shape))
    return turned[0], turned[1]


Taken = tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]  # z, and by name the token's weights and accumulated gradients


def _linear(
    q: Tensor, k: Tensor, v: Tensor, lr: Tensor, tau: Tensor, cache: Tensors, scale: Tensor, shift: Tensor
) -> Taken:
    g = inner_gradient(k @ cache["w1"] + cache["b1"].unsqueeze(2), v - k, scale, shift)
    return _read(q, k, g, lr, tau, cache, "1")


def _mlp(
    q: Tensor, k: Tensor, v: Tensor, lr: Tensor, tau: Tensor, cache: Tensors, scale: Tensor, shift: Tensor
) -> Taken:
    z1 = k @ cache["w1"] + cache["b1"].unsqueeze(2)
    x2 = F.gelu(z1, approximate="tanh")
    g2 = inner_gradient(x2 @ cache["w2"] + cache["b2"].unsqueeze(2), v - k, scale, shift)
    g1 = g2 @ cache["w2"].transpose(-2, -1) * gelu_slope(z1)
    read, first = _read(q, k, g1, lr, tau, cache, "1")
    z, second = _read(F.gelu(read, approximate="tanh"), x2, g2, lr, tau, cache, "2")
    return z, first | second


def _read(x: Tensor, a: Tensor, g: Tensor, lr: Tensor, tau: Tensor, cache: Tensors, layer: str) -> Taken:
    """`x W_t + b_t` with `W_t = W − τ_t (Σ + lr aᵀg)`: one layer of the learner with gradient g at its output."""
    w, b = f"w{layer}", f"b{layer}"
    steps = torch.tril(lr)  # [B, H, K, K] with K = 1
    each = torch.einsum("bhki,bhkj->bhkij", a, g)
    gradient_w = torch.einsum("bhnk,bhkij->bhnij", steps, each) + cache[f"{w}.gradient"].unsqueeze(2)
    gradient_b = torch.einsum("bhnk,bhki->bhni", steps, g) + cache[f"{b}.gradient"].unsqueeze(2)
    now_w = cache[w].unsqueeze(2) - tau.unsqueeze(-1) * gradient_w
    now_b = cache[b].unsqueeze(2) - tau * gradient_b
    z = (x.unsqueeze(3) @ now_w).squeeze(3) + now_b
    return z, {w: (now_w[:, :, -1], gradient_w[:, :, -1]), b: (now_b[:, :, -1], gradient_b[:, :, -1])}
