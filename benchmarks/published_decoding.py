"""Decoding in the style of the published PyTorch models: a baseline to time against.

What their code does for one token, with our parameters: Python calls a dozen small operations for every convolution,
rotation and norm; a token is a sequence of mini-batches of which there is one, of one token; the inner loop carries the
weights of the last commit and the sum of gradients since, and materialises the token's gradient and weights with
einsums (the primal form of arXiv 2407.04620, Sec. 2.3, with token steps). States are updated in place. Left out are
calls of modules, casts between equal types, and what is computed for other cases: their own code takes longer than
this, never less.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from published_style import gelu_slope, inner_gradient, norm
from torch import Tensor, nn

from metattt.layer import TTTLayer
from metattt.models.block import Block
from metattt.models.language_model import LanguageModel, LanguageModelState
from metattt.modules import CausalConv
from metattt.optimizers.gradient_descent import GradientDescent
from metattt.state import State, Tensors
from metattt.tasks.reconstruction import Reconstruction


class PublishedDecoding:
    """A TTT-Linear or TTT-MLP language model of the Mamba backbone (shared q and k, gate, convolution in front), token
    by token.

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
    """Weights W, accumulated gradients (without the token step), and the inputs of convolutions `[B, D, taps]`, newest
    last."""
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
    assert conv.bias is not None
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
    inputs = {"q": q, "k": k, "v": v} | _steps(rule, x, place)
    inputs = {name: z.reshape(batch, heads, 1, 1, -1).permute(2, 0, 1, 3, 4) for name, z in inputs.items()}
    out = torch.empty_like(inputs["q"])
    take, slow = (_mlp if "w2" in cache else _linear), layer.learner.slow
    for i in range(out.shape[0]):
        out[i], after = take({name: z[i] for name, z in inputs.items()}, cache, slow)
    for name, (weight, gradient) in after.items():
        if place == size - 1:
            cache[name].copy_(weight)
            cache[f"{name}.gradient"].zero_()
        else:
            cache[f"{name}.gradient"].copy_(gradient)
    y = out.permute(1, 0, 3, 2, 4).reshape(batch, 1, -1)
    assert layer.norm is not None and layer.gate is not None
    y = layer.norm(y) * F.gelu(layer.gate(x), approximate="tanh")
    result: Tensor = layer.out(y)
    return result


def _steps(rule: GradientDescent, x: Tensor, place: int) -> Tensors:
    """Step sizes and token steps, `[B, H, 1, 1, 1]`."""
    each = torch.einsum("bnkc,hdc->bhnkd", x.unsqueeze(1), rule.lr_weight.unsqueeze(1))
    logit = each + rule.lr_bias.reshape(1, -1, 1, 1, 1)
    lr = rule.scale * torch.sigmoid(logit).permute(0, 1, 2, 4, 3)
    index = 1.0 / torch.arange(1, rule.mini_batch_size + 1, device=x.device) + rule.token_step_offset[0]
    tau = torch.clamp_min(index[place : place + 1], 0.0)
    return {"lr": lr, "tau": torch.broadcast_to(tau.reshape(1, 1, 1, 1, 1), lr.shape)}


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


Taken = tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]  # y, and by name the token's weights and accumulated gradients


def _linear(x: Tensors, cache: Tensors, slow: nn.ParameterDict) -> Taken:
    affine = slow["norm_scale"].unsqueeze(1), slow["norm_bias"].unsqueeze(1)
    g = inner_gradient(x["k"] @ cache["w1"] + cache["b1"].unsqueeze(2), x["v"] - x["k"], *affine)
    z, after = _read(x["q"], x["k"], g, x, cache, "1")
    return x["q"] + norm(z, *affine), after


def _mlp(x: Tensors, cache: Tensors, slow: nn.ParameterDict) -> Taken:
    affine = slow["norm_scale"].unsqueeze(1), slow["norm_bias"].unsqueeze(1)
    z1 = x["k"] @ cache["w1"] + cache["b1"].unsqueeze(2)
    x2 = F.gelu(z1, approximate="tanh")
    g2 = inner_gradient(x2 @ cache["w2"] + cache["b2"].unsqueeze(2), x["v"] - x["k"], *affine)
    g1 = g2 @ cache["w2"].transpose(-2, -1) * gelu_slope(z1)
    read, first = _read(x["q"], x["k"], g1, x, cache, "1")
    z, second = _read(F.gelu(read, approximate="tanh"), x2, g2, x, cache, "2")
    return x["q"] + norm(z, *affine), first | second


def _read(x: Tensor, a: Tensor, g: Tensor, inputs: Tensors, cache: Tensors, layer: str) -> Taken:
    """`x W_t + b_t` with `W_t = W − τ_t (Σ + lr aᵀg)`: one layer of the learner with gradient g at its output."""
    w, b, tau = f"w{layer}", f"b{layer}", inputs["tau"]
    each = torch.einsum("bhki,bhkj->bhkij", a, g)
    each = torch.einsum("bhnk,bhkij->bhnij", torch.tril(inputs["lr"]), each)
    gradient_w = each + cache[f"{w}.gradient"].unsqueeze(2)
    gradient_b = torch.einsum("bhnk,bhki->bhni", torch.tril(inputs["lr"]), g) + cache[f"{b}.gradient"].unsqueeze(2)
    now_w = cache[w].unsqueeze(2) - gradient_w * tau.unsqueeze(-1)
    now_b = cache[b].unsqueeze(2) - gradient_b * tau
    z = (x.unsqueeze(3) @ now_w).squeeze(3) + now_b
    return z, {w: (now_w[:, :, -1], gradient_w[:, :, -1]), b: (now_b[:, :, -1], gradient_b[:, :, -1])}
