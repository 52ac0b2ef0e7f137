"""Language models in the style of the published PyTorch code, with our parameters: a baseline to time against.

Python calls a dozen small operations for every convolution, rotation and norm. Whole sequences go through the inner
loop of `published_style`, mini-batch by mini-batch, and autograd through all of it. While decoding, a token is a
sequence of mini-batches of which there is one, of one token; the inner loop carries the weights of the last commit and
the sum of gradients since, and materialises the token's gradient and weights with einsums (the primal form of arXiv
2407.04620, Sec. 2.3, with token steps). States are updated in place. Left out are calls of modules, casts between equal
types, and what is computed for other cases: their own code takes longer than this, never less.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from published_style import gelu_slope, inner_gradient, norm, published_style
from torch import Tensor, nn

from metattt.layer import TTTLayer
from metattt.models.block import Block
from metattt.models.language_model import LanguageModel, LanguageModelState
from metattt.modules import CausalConv
from metattt.optimizers.gradient_descent import GradientDescent
from metattt.state import State, Tensors
from metattt.tasks.reconstruction import Reconstruction


class PublishedModel:
    """A TTT-Linear or TTT-MLP language model of the Mamba backbone (shared q and k, gate, convolution in front).

    Args:
        model: whose parameters are used.
    """

    def __init__(self, model: LanguageModel):
        self.model = model

    def __call__(self, ids: Tensor, last_only: bool = False) -> Tensor:
        """Logits `[B, T, V]` for whole mini-batches of tokens `[B, T]`; of the last token alone `[B, 1, V]`."""
        return self._logits(ids, torch.arange(ids.shape[1], device=ids.device).expand(ids.shape), last_only)

    def _logits(self, ids: Tensor, position: Tensor, last_only: bool = False) -> Tensor:
        x = self.model.embedding(ids)
        for number, block in enumerate(self.model.blocks):
            assert isinstance(block, Block) and block.conv is not None
            x = x + self._conv(block.conv, _rms_norm(block.conv_norm, x), number, "block")
            x = x + self._layer(block.layer, _rms_norm(block.layer_norm, x), number, position)  # type: ignore[arg-type]
            n, ffn = _rms_norm(block.ffn_norm, x), block.ffn
            x = x + ffn.down(F.silu(ffn.gate(n)) * ffn.up(n))
        logits: Tensor = self.model.head(_rms_norm(self.model.final_norm, x[:, -1:] if last_only else x))
        return logits

    def _layer(self, layer: TTTLayer, x: Tensor, number: int, position: Tensor) -> Tensor:
        task, rule = layer.task, layer.optimizer
        assert isinstance(task, Reconstruction) and isinstance(rule, GradientDescent)
        assert layer.norm is not None and layer.gate is not None
        place = position % rule.mini_batch_size
        shared, v = task.q(x), task.v(x)
        q, k = self._conv(task.conv_q, shared, number, "q"), self._conv(task.conv_k, shared, number, "k")
        q, k, v = (view.view(*x.shape[:2], layer.num_heads, -1).transpose(1, 2) for view in (q, k, v))
        q, k = _rotate(q, k, place, task.rope_theta)
        y = self._learned(layer, q, k, v, x, number, place)
        y = layer.norm(y.transpose(1, 2).reshape(x.shape)) * F.gelu(layer.gate(x), approximate="tanh")
        result: Tensor = layer.out(y)
        return result

    def _conv(self, conv: CausalConv, x: Tensor, number: int, name: str) -> Tensor:
        width = conv.weight.shape[-1]
        y = F.conv1d(x.mT, conv.weight, conv.bias, padding=width - 1, groups=x.shape[-1])
        return y[..., : x.shape[1]].mT

    def _learned(
        self, layer: TTTLayer, q: Tensor, k: Tensor, v: Tensor, x: Tensor, number: int, place: Tensor
    ) -> Tensor:
        """Predictions `[B, H, T, d]` of the inner loop for the tokens `x` `[B, T, D]` at these places in mini-batches."""
        rule, learner = layer.optimizer, layer.learner
        lr, tau = _steps(rule, x)  # type: ignore[arg-type]
        start = {name: w.expand(x.shape[0], *w.shape) for name, w in learner.init.items()}
        scale, shift = learner.slow["norm_scale"], learner.slow["norm_bias"]
        return published_style(q, k, v, lr, tau.unsqueeze(0), start, scale, shift)[0]


class PublishedDecoding(PublishedModel):
    """The same, token by token.

    Args:
        model: whose parameters are used.
        state: of `model` after a prompt; it is copied.
    """

    def __init__(self, model: LanguageModel, state: LanguageModelState):
        super().__init__(model)
        self.position = int(state.layers[0].pos[0])
        pairs = zip(state.layers, state.tails, strict=True)
        self.caches = [_cache(layer, tail) for layer, tail in pairs]

    def step(self, ids: Tensor) -> Tensor:
        """Logits `[B, 1, V]` of the next token, for tokens `[B, 1]` that come after those read so far."""
        logits = self._logits(ids, torch.full(ids.shape, self.position, device=ids.device))
        self.position += 1
        return logits

    def _conv(self, conv: CausalConv, x: Tensor, number: int, name: str) -> Tensor:
        inputs = self.caches[number][name]
        inputs.copy_(inputs.roll(-1, -1))
        inputs[:, :, -1] = x[:, 0]
        assert conv.bias is not None
        return ((inputs * conv.weight[:, 0]).sum(-1) + conv.bias).unsqueeze(1)

    def _learned(
        self, layer: TTTLayer, q: Tensor, k: Tensor, v: Tensor, x: Tensor, number: int, place: Tensor
    ) -> Tensor:
        cache, (batch, heads) = self.caches[number], q.shape[:2]
        lr, tau = _steps(layer.optimizer, x)  # type: ignore[arg-type]
        inputs = {"q": q, "k": k, "v": v, "lr": lr, "tau": tau[place].unsqueeze(1).expand_as(lr)}
        inputs = {name: z.reshape(batch, heads, 1, 1, -1).permute(2, 0, 1, 3, 4) for name, z in inputs.items()}
        out = torch.empty_like(inputs["q"])
        take, slow = (_mlp if "w2" in cache else _linear), layer.learner.slow
        for i in range(out.shape[0]):
            out[i], after = take({name: z[i] for name, z in inputs.items()}, cache, slow)
        complete = (self.position + 1) % layer.optimizer.mini_batch_size == 0
        for name, (weight, gradient) in after.items():
            if complete:
                cache[name].copy_(weight)
                cache[f"{name}.gradient"].zero_()
            else:
                cache[f"{name}.gradient"].copy_(gradient)
        return out.permute(1, 2, 0, 3, 4).reshape(batch, heads, 1, -1)


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


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.eps))


def _steps(rule: GradientDescent, x: Tensor) -> tuple[Tensor, Tensor]:
    """Step sizes `[B, H, T]`, and token steps `[b]`."""
    each = torch.einsum("bnkc,hdc->bhnkd", x.unsqueeze(1), rule.lr_weight.unsqueeze(1))
    logit = each + rule.lr_bias.reshape(1, -1, 1, 1, 1)
    lr = rule.scale * torch.sigmoid(logit)
    index = 1.0 / torch.arange(1, rule.mini_batch_size + 1, device=x.device) + rule.token_step_offset[0]
    return lr.flatten(2), torch.clamp_min(index, 0.0)


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
