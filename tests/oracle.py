"""What a `TTTLayer` computes, written a second time: a plain loop over tokens in float64, from the equations alone.

Of the layer it takes settings and parameters, and none of its code: no form, accessor, coefficient, frame or kernel. So
it is slow, and short enough to be read as a specification. `outputs` takes calls apart into documents; `Document` reads
one of them, token by token. Random numbers (noise, permutations) are the package's own draws.

Rows are tokens. Of one document: x `[T, D]`; views `[T, H, d]`; gates `[T, H]`; a weight is `[H, 1, *shape]`, and where
queries have weights of their own `[H, n, *shape]`; inputs of a learner are `[H, n, d]`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.tasks.corruption import normal, uniform  # numbers that are drawn, and no equation

NOT_COVERED = {
    "mixers, Combined": "they are no TTTLayer: `test_mamba.py` and `test_combined.py` have references of their own",
    "parts of third parties": "nothing is known of them but their code",
    "layer.outer=implicit": "its derivative is that of a fixed point, which this loop does not reach",
    "learner=recurrent_ridge, stopped early": "fewer iterations than features, or a tolerance: derivatives are then those "
    "of the exact solution, answers are not",
    "task.seed=null, optimizer.seed=null": "the numbers are drawn anew in every call",
    "learner=module with normalisations": "torch's own have wrong third derivatives, with which this loop would compare",
    "optimizer=preconditioned with several pairs a token": "the curvature is that of one key a token",
}

Weights = dict[str, Tensor]
Memory = dict[str, Any]


def not_covered(layer: Any) -> str | None:
    """The entry of `NOT_COVERED` that a layer falls under, if any."""
    task, learner, rule = (settings(part) for part in (layer.task, layer.learner, layer.optimizer))
    early = learner.kind == "RecurrentRidge" and learner.solver != "exact"
    early = early and (learner.iterations < layer.dim // layer.num_heads or learner.tolerance > 0)
    unseeded = getattr(task, "corruption", "none") != "none" and task.seed is None
    unseeded = unseeded or (getattr(rule, "sampling", "full") == "sgd" and rule.seed is None)
    found = {
        "layer.outer=implicit": layer.outer == "implicit",
        "learner=recurrent_ridge, stopped early": early,
        "task.seed=null, optimizer.seed=null": unseeded,
        "optimizer=preconditioned with several pairs a token": rule.kind == "Preconditioned"
        and task.kind in ("Pairs", "WindowViews"),
    }
    return next((name for name, applies in found.items() if applies), None)


def settings(part: nn.Module) -> SimpleNamespace:
    """What a part was made with, defaults included; `kind` is the name of its class."""
    found: dict[str, Any] = {}
    for cls in reversed(type(part).__mro__):
        if "__init__" in vars(cls) and issubclass(cls, nn.Module) and cls is not nn.Module:
            found |= {name: one.default for name, one in inspect.signature(cls.__init__).parameters.items()}
    return SimpleNamespace(kind=type(part).__name__, **found | part._made_with)


# -- a call ------------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """What one call is given: x `[B, T, D]`, and `[B, T]` flags."""

    x: Tensor
    mask: Tensor | None = None
    reset: Tensor | None = None


def outputs(layer: Any, calls: Sequence[Call]) -> list[Tensor]:
    """The outputs `[B, T, D]` of calls that hand their state on: every document starts from W0 and reads its own tokens,
    padding is not there, and its outputs are 0. A start that is marked on padding belongs to the next real token."""
    p = dict(layer.named_parameters())
    ys = [[list(torch.zeros_like(sequence).unbind(0)) for sequence in call.x] for call in calls]
    for i in range(len(calls[0].x)):
        documents: list[list[tuple[int, int]]] = [[]]  # (call, column) of every token
        starts = False
        for c, call in enumerate(calls):
            for t in range(call.x.shape[1]):
                starts = starts or (call.reset is not None and bool(call.reset[i, t]))
                if call.mask is None or bool(call.mask[i, t]):
                    documents += [[]] if starts else []
                    documents[-1].append((c, t))
                    starts = False
        for places in filter(None, documents):
            x = torch.stack([calls[c].x[i, t] for c, t in places])
            cuts = [n for n in range(1, len(places)) if places[n][0] != places[n - 1][0]]
            for (c, t), y in zip(places, Document(layer, p, x, cuts, i).outputs(), strict=True):
                ys[c][i][t] = y
    return [torch.stack([torch.stack(sequence) for sequence in call]) for call in ys]


# -- views: what is learned from a token -------------------------------------------------------------------------------


class Pair(NamedTuple):
    """What a token learns: k, v `[H, d]`; the erase view p and its direction b; a weight `[H]` of its loss; δ `[H]`."""

    k: Tensor
    v: Tensor
    p: Tensor | None = None
    b: Tensor | None = None
    weight: Tensor | float = 1.0
    delta: Tensor | None = None


def affine(p: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def standardized(x: Tensor, eps: float = 1e-6) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt()


def root_mean_square(x: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def causal_conv(p: Weights, name: str, x: Tensor) -> Tensor:
    """`y_t = b + Σ_j w_j x_{t−width+1+j}`, each channel by itself, zeros before the document."""
    w, rows = p[f"{name}.weight"][:, 0], []
    for t in range(len(x)):
        near = [(j, t - w.shape[1] + 1 + j) for j in range(w.shape[1])]
        rows.append(torch.stack([w[:, j] * x[s] for j, s in near if s >= 0]).sum(0))
    return torch.stack(rows) + p.get(f"{name}.bias", 0)


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Turns the pairs (2i, 2i + 1) of `[T, H, d]` by `position · θ^(−2i/d)`."""
    angle = positions.view(-1, 1, 1) * theta ** (-torch.arange(0, x.shape[-1], 2).double() / x.shape[-1])
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()
    return torch.stack(turned, -1).flatten(-2)


def unit(x: Tensor, eps: float = 1e-12) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=eps)


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {"identity": lambda x: x, "elu": lambda x: F.elu(x) + 1, "silu": F.silu}


class Tokens:
    """The views of a document: `pairs` that each token learns, and q `[T, H, d]`."""

    def __init__(self, layer: Any, p: Weights, x: Tensor, sequence: int):
        self.s, self.p, self.x, self.heads = settings(layer.task), p, x, layer.num_heads
        self.width, self.sequence = layer.dim // layer.num_heads, sequence
        self.place, self.b = torch.arange(len(x)), layer.optimizer.mini_batch_size
        self.shared = self.heads // (getattr(self.s, "kv_heads", None) or self.heads)
        self.q, self.pairs = getattr(self, f"of_{self.s.kind.lower()}")()

    def apart(self, x: Tensor) -> Tensor:
        """`[T, n d]` to `[T, n, d]`."""
        return x.unflatten(-1, (-1, self.width))

    def every_head(self, x: Tensor) -> Tensor:
        """`[T, G, ·]` to `[T, H, ·]`: a head of k and v for H/G neighbouring heads of q."""
        return x.repeat_interleave(self.shared, 1)

    def projected(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v with what comes before their heads are told apart."""
        s, p = self.s, self.p
        q, v = affine(p, "task.q", self.x), affine(p, "task.v", self.x)
        if s.views == "shared_qk":
            q, k = causal_conv(p, "task.conv_q", q), causal_conv(p, "task.conv_k", q)
        else:
            k = affine(p, "task.k", self.x)
        if s.qk_norm:
            q, k = (root_mean_square(z) * p[f"task.{name}_norm.weight"] for name, z in (("q", q), ("k", k)))
        if s.short_conv is not None:
            q, k = (F.silu(causal_conv(p, f"task.conv_{name}", z)) for name, z in (("q", q), ("k", k)))
            v = F.silu(causal_conv(p, "task.conv_v", v)) if s.short_conv_v else v
        if not (s.feature_map == "silu" and s.short_conv is not None):
            q, k = FEATURES[s.feature_map](q), FEATURES[s.feature_map](k)
        return q, k, v

    def views(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of `Reconstruction`, for its heads and groups."""
        s = self.s
        if s.views == "no_key":
            q = FEATURES[s.feature_map](self.apart(affine(self.p, "task.q", self.x)))
            return q, torch.ones_like(q), self.apart(affine(self.p, "task.v", self.x))
        q, k, v = (self.apart(z) for z in self.projected())
        if s.normalize_qk:
            q, k = unit(q), unit(k)
        if s.rope != "none":
            place = self.place % self.b if s.rope == "mini_batch" else self.place
            q, k = rope(q, place, s.rope_theta), rope(k, place, s.rope_theta)
        if s.corruption != "none":
            drawn = normal if s.corruption == "noise" else uniform
            noise = drawn(torch.tensor([s.seed + self.sequence]), self.place[None], *k.shape[1:])[0].transpose(0, 1)
            k = k + s.corruption_rate * noise if s.corruption == "noise" else k * (noise >= s.corruption_rate)
        return q, k, v

    def delta(self) -> Tensor | None:
        """The threshold of the Huber losses, where it is the token's own."""
        if self.s.huber_delta_from == "constant":
            return None
        return self.every_head(F.softplus(self.x @ self.p["task.delta_weight"].T + self.p["task.delta_bias"]).unsqueeze(-1))

    def one_each(self, k: Tensor, v: Tensor, **more: Tensor | None) -> list[list[Pair]]:
        rows = [self.every_head(x) if x.ndim == 3 else x for x in (k, v)]
        given = {name: None if x is None else self.every_head(x) for name, x in more.items()}
        delta = self.delta()
        return [
            [Pair(rows[0][t], rows[1][t], delta=None if delta is None else delta[t, :, 0],
                  **{name: None if x is None else x[t] for name, x in given.items()})]
            for t in range(len(self.x))
        ]  # fmt: skip

    def of_reconstruction(self) -> tuple[Tensor, list[list[Pair]]]:
        q, k, v = self.views()
        return q, self.one_each(k, v)

    def of_nexttoken(self) -> tuple[Tensor, list[list[Pair]]]:
        q, k, v = self.views()
        return q, self.one_each(torch.cat([self.p["task.start"][None, :, 0], k[:-1]]), v)

    def of_gatedviews(self) -> tuple[Tensor, list[list[Pair]]]:
        """p = e ∘ k is erased and w ∘ v is written; `q − g p` is read."""
        s, (q, k, v) = self.s, self.views()
        erased = k
        if s.erase == "constant":
            erased = s.erase_scale * torch.sigmoid(self.p["task.erase_logit"]).view(1, -1, 1) * k
        elif s.erase == "per_channel":
            erased = s.erase_scale * torch.sigmoid(self.apart(affine(self.p, "task.erase_gate", self.x))) * k
        if s.write == "per_channel":
            v = torch.sigmoid(self.apart(affine(self.p, "task.write_gate", self.x))) * v
        if s.correction is not None:
            q = q - self.p["task.correction_factor"].view(1, -1, 1) * self.every_head(erased)
        return q, self.one_each(k, v, p=None if s.erase == "none" else erased)

    def of_lactviews(self) -> tuple[Tensor, list[list[Pair]]]:
        q, k, v = self.projected()
        wide, turned = self.x.shape[1] // (self.s.rope_heads or self.heads), []
        for i, z in enumerate((q, k)):
            z = self.apart(F.silu(z * self.p["task.qk_scale"][i] + self.p["task.qk_offset"][i]))
            z = (z / (z.norm(dim=-1, keepdim=True) + 1e-5)).flatten(1).unflatten(1, (-1, wide))
            turned.append(self.apart(rope(z, self.place, self.s.rope_theta).flatten(1)))
        return turned[0], self.one_each(turned[1], self.apart(F.silu(v) if self.s.silu_v else v))

    def of_rwkv7views(self) -> tuple[Tensor, list[list[Pair]]]:
        """p = ξ ∘ θK x of unit length, erased along a ∘ p; k = θK x ∘ (1 + (a − 1) ∘ s)."""
        q, k, v = self.projected()
        rate = self.x @ self.p["task.rate_down"].T @ self.p["task.rate_up"].T + self.p["task.rate_bias"]
        rate, removal = torch.sigmoid(rate), unit(self.apart(k * self.p["task.removal_scale"]))
        k = self.apart(k * (1 + (rate - 1) * self.p["task.replacement_rate"]))
        return self.apart(q), self.one_each(k, self.apart(v), p=removal, b=self.apart(rate) * removal)

    def of_decodedreconstruction(self) -> tuple[Tensor, list[list[Pair]]]:
        k, q = (self.apart(affine(self.p, f"task.{name}", self.x)) for name in ("phi", "psi"))
        return q, [[Pair(k[t], self.x[t].expand(self.heads, -1))] for t in range(len(self.x))]

    def of_pairs(self) -> tuple[Tensor, list[list[Pair]]]:
        """n pairs a token, each with a weight `scale · σ(θ x)`."""
        s, (q, k, v) = self.s, self.projected()
        q, k, v = self.apart(q), *(z.unflatten(-1, (s.count, self.heads, -1)) for z in (k, v))
        q, k = (unit(q), unit(k)) if s.normalize_qk else (q, k)
        weight = s.scale * torch.sigmoid(affine(self.p, "task.strength", self.x)).unflatten(-1, (s.count, -1))
        return q, [[Pair(k[t, j], v[t, j], weight=weight[t, j]) for j in range(s.count)] for t in range(len(self.x))]

    def of_windowviews(self) -> tuple[Tensor, list[list[Pair]]]:
        """The pairs of the last tokens, each with the gate γ of the token that it comes from."""
        s, (q, k, v) = self.s, self.views()
        gamma = torch.ones(len(self.x), self.heads, dtype=self.x.dtype)
        if s.gate == "per_head":
            gamma = torch.sigmoid(self.x @ self.p["task.gate_weight"].T + self.p["task.gate_bias"])
        q, k = self.monomials(q), self.monomials(k)
        own = [Pair(k[t], v[t], weight=gamma[t]) for t in range(len(self.x))]
        return q, [own[max(0, t - s.window + 1) : t + 1] for t in range(len(self.x))]

    def monomials(self, x: Tensor) -> Tensor:
        """φ with `φ(a)·φ(b) = Σ_i s_i (a·b)^i`."""
        columns = []
        for degree in range(1, self.s.degree + 1) if self.s.degree > 1 else ():
            for places in combinations_with_replacement(range(x.shape[-1]), degree):
                count = math.factorial(degree) / math.prod(math.factorial(places.count(i)) for i in set(places))
                columns.append(self.p["task.coefficient_roots"][degree - 1] * math.sqrt(count) * x[..., places].prod(-1))
        return torch.stack(columns, -1) if columns else x


def losses(s: SimpleNamespace, p: Weights, y: Tensor, pair: Pair) -> Tensor:
    """ℓ `[H]` of predictions y `[H, d]`."""
    if s.kind == "DecodedReconstruction":
        y = (y.unsqueeze(-2) @ p["task.decoder"]).squeeze(-2) + p["task.decoder_bias"]
        y = standardized(y) * p["task.norm_scale"] + p["task.norm_bias"] if s.decoder_norm else y
        return 0.5 * (y - pair.v).square().sum(-1)
    name, e = "dot" if s.kind == "LaCTViews" else s.loss, y - pair.v
    size, delta = e.square().sum(-1), s.huber_delta if pair.delta is None else pair.delta
    if name == "squared":
        return 0.5 * size
    if name == "mean_squared":
        return size / e.shape[-1]
    if name == "dot":
        return -(y * pair.v).sum(-1)
    if name == "cosine":
        return 1 - (y * pair.v).sum(-1) / ((y.square().sum(-1) + 1e-6) * (pair.v.square().sum(-1) + 1e-6)).sqrt()
    if name == "lp":
        return (e.square() + 1e-6).pow(s.loss_p / 2).sum(-1)
    if name == "kl":
        return (pair.v.softmax(-1) * (pair.v.log_softmax(-1) - y.log_softmax(-1))).sum(-1)
    if name == "huber":
        delta = delta if pair.delta is None else pair.delta.unsqueeze(-1)
        return torch.where(e.abs() <= delta, 0.5 * e.square(), delta * (e.abs() - 0.5 * delta)).sum(-1)
    far = size > delta**2
    if name == "norm_huber":
        return torch.where(far, delta * (torch.where(far, size, 1).sqrt() - 0.5 * delta), 0.5 * size)
    return torch.where(far, delta * ((10 * e).cosh().log() / 10).sum(-1), 0.5 * size)  # mixed_huber


# -- learners: f(x; W) -------------------------------------------------------------------------------------------------


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "relu": torch.relu,
    "silu": lambda x: x * torch.sigmoid(x),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


def times(x: Tensor, w: Tensor) -> Tensor:
    """`x W`: `[H, n, i]` and `[H, n or 1, i, j]` to `[H, n, j]`."""
    return (x.unsqueeze(-2) @ w).squeeze(-2)


def linear(layer: Any, s: SimpleNamespace, w: Weights, x: Tensor) -> Tensor:
    return times(x, w["w1"]) + (w["b1"] if s.bias else 0)


def mlp(layer: Any, s: SimpleNamespace, w: Weights, x: Tensor) -> Tensor:
    for i in range(1, s.depth + 1):
        x = times(x, w[f"w{i}"]) + (w[f"b{i}"] if s.bias else 0)
        x = ACTIVATIONS[s.activation](x) if i < s.depth else x
    return x


def swiglu(layer: Any, s: SimpleNamespace, w: Weights, x: Tensor) -> Tensor:
    return times(F.silu(times(x, w["w0"])) * times(x, w["w2"]), w["w1"])


def convolution(layer: Any, s: SimpleNamespace, w: Weights, x: Tensor) -> Tensor:
    act = ACTIVATIONS[s.activation]
    if s.over == "tokens":  # the last taps, zeros before the mini-batch
        near = F.pad(x, (0, 0, s.width - 1, 0)).unfold(1, s.width, 1).mT.flatten(2)
        return times(act(times(near, w["w1"].flatten(2, 3)) + w["b1"]), w["w2"]) + w["b2"]

    def inside(x: Tensor, i: int) -> Tensor:
        """A token's features as a signal: `[H, n, d, channels]`."""
        near = F.pad(x, (0, 0, (s.width - 1) // 2, s.width // 2)).unfold(2, s.width, 1).mT.flatten(3)
        return near @ w[f"w{i}"].flatten(2, 3) + w[f"b{i}"].unsqueeze(2)

    return inside(act(inside(x.unsqueeze(-1), 1)), 2).squeeze(-1)


def transformer(layer: Any, s: SimpleNamespace, w: Weights, x: Tensor) -> Tensor:
    """`h = x + A(LN(x))`, `f(x) = h + MLP(LN(h))`; attention to the tokens up to each one."""
    z = standardized(x) * w["scale1"] + w["shift1"]
    q, k, v = (times(z, w[name]).unflatten(-1, (s.num_heads, -1)).transpose(1, 2) for name in ("wq", "wk", "wv"))
    score = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(torch.ones(2 * x.shape[1:2]).triu(1).bool(), -torch.inf)
    h = x + times((score.softmax(-1) @ v).transpose(1, 2).flatten(2), w["wo"])
    hidden = times(standardized(h) * w["scale2"] + w["shift2"], w["w1"]) + w["b1"]
    return h + times(ACTIVATIONS["gelu_tanh"](hidden), w["w2"]) + w["b2"]


def modulelearner(layer: Any, s: SimpleNamespace, w: Weights, x: Tensor) -> Tensor:
    """The module itself, with the weights of one head after the other."""
    ys = []
    for h in range(len(x)):
        module = copy.deepcopy(layer.learner.module)
        for name in filter(lambda name: not name.startswith("norm_"), w):
            path, _, attribute = name.rpartition("/")
            module.get_submodule(path.replace("/", "."))._parameters[attribute] = w[name][h, 0]  # type: ignore[assignment]
        ys.append(module(x[h]))
    return torch.stack(ys)


def nestedttt(layer: Any, s: SimpleNamespace, w: Weights, x: Tensor) -> Tensor:
    """A layer that reads the tokens of the mini-batch from its own W0: this oracle, once more."""
    inner, ys = layer.learner.module.layer, []
    for h in range(len(x)):
        own = {name.replace("/", ".").removeprefix("layer."): value[h, 0] for name, value in w.items() if "/" in name}
        ys.append(torch.stack(Document(inner, dict(inner.named_parameters()) | own, x[h], [], 0).outputs()))
    return torch.stack(ys)


def layers_of(kind: str, names: Sequence[str]) -> dict[str, str]:
    """The layer of f that a weight belongs to."""
    swiglu = {"w0": "1", "w1": "2", "w2": "1"} if kind == "SwiGLU" else {}
    found = {}
    for name in names:
        number = name[len(name.rstrip("0123456789")) :]
        found[name] = "norm" if name.startswith("norm_") else name.rpartition("/")[0] if "/" in name else number
    return found | {name: layer for name, layer in swiglu.items() if name in found}


# -- learners that keep their data -------------------------------------------------------------------------------------


class Data(NamedTuple):
    """What a learner without weights has read: k, v `[T, H, d]` and what its rule gives, `[T, H]`, λ `[T, H, n]`."""

    k: Tensor
    v: Tensor
    write: Tensor
    keep: Tensor
    levels: Tensor | None


def kernelestimator(s: SimpleNamespace, w: Weights, q: Tensor, t: int, data: Data) -> Tensor:
    """`Σ_s κ(q, k_s) v_s / Σ_s κ(q, k_s)` over the s that token t sees."""
    first = 0 if s.window is None else max(0, t - s.window + 1)
    seen = [i for i in range(t + 1) if i >= first or i < s.sinks]
    k, v = data.k[seen].transpose(0, 1), data.v[seen].transpose(0, 1)  # [H, S, d]
    if s.learn_init:
        k, v = torch.cat([w["k0"], k], 1), torch.cat([w["v0"], v], 1)
    h = s.bandwidth or math.sqrt(q.shape[-1])
    distance = (k - q.unsqueeze(1)).square().sum(-1)
    if s.kernel == "nearest":
        near = distance.argsort(1)[:, : s.neighbours]
        y = torch.stack([v[i, near[i]].mean(0) for i in range(len(v))])
    else:
        logit = (k @ q.unsqueeze(-1)).squeeze(-1) / h if s.kernel == "exponential" else -distance / (2 * h)
        y = (logit.softmax(1).unsqueeze(1) @ v).squeeze(1)
    return y + w["bias"][:, 0] if s.bias else y


def kernelridge(s: SimpleNamespace, w: Weights, q: Tensor, t: int, data: Data) -> Tensor:
    """`κ(q, K) (κ(K, K) + λI)⁻¹ V`."""
    k, v = (x[: t + 1].transpose(0, 1) for x in (data.k, data.v))

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        h, inner = s.bandwidth or math.sqrt(a.shape[-1]), a @ b.mT
        if s.kernel == "gaussian":
            return (-(a.unsqueeze(2) - b.unsqueeze(1)).square().sum(-1) / (2 * h)).exp()
        return inner if s.kernel == "linear" else (inner / h).exp()

    fit = torch.linalg.solve(kernel(k, k) + s.ridge * torch.eye(t + 1, dtype=q.dtype), v)
    return (kernel(q.unsqueeze(1), k) @ fit).squeeze(1)


def recurrentridge(s: SimpleNamespace, w: Weights, q: Tensor, t: int, data: Data) -> Tensor:
    """`G (H + Λ)⁻¹ q`."""
    gram = moment = torch.zeros(q.shape[0], q.shape[1], q.shape[1], dtype=q.dtype)
    for i in range(t + 1):
        k, v, write, keep = data.k[i], data.v[i], data.write[i].view(-1, 1, 1), data.keep[i].view(-1, 1, 1)
        gram = keep * gram + write * k.unsqueeze(2) * k.unsqueeze(1)
        moment = keep * moment + write * v.unsqueeze(2) * k.unsqueeze(1)
    ridge = F.softplus(w["ridge"][:, 0]) + s.ridge_floor
    return (moment @ torch.linalg.solve(gram + torch.diag_embed(ridge), q).unsqueeze(-1)).squeeze(-1)


def loglinear(s: SimpleNamespace, w: Weights, q: Tensor, t: int, data: Data) -> Tensor:
    """`Σ_ℓ λ_t^ℓ q_t S_t^ℓ`; S^ℓ is the memory of the tokens i for which t xor i has ℓ bits (at most n − 1)."""
    y = torch.zeros_like(q)
    for i in range(t + 1):
        k, v = data.k[i], data.v[i]
        memory = data.write[i].view(-1, 1, 1) * k.unsqueeze(2) * v.unsqueeze(1)  # what token i wrote, as it is at t
        for r in range(i + 1, t + 1):
            if s.update == "delta":
                found = data.k[r].unsqueeze(1) @ memory
                memory = memory - data.write[r].view(-1, 1, 1) * data.k[r].unsqueeze(2) * found
            memory = data.keep[r].view(-1, 1, 1) * memory
        level = 1.0 if data.levels is None else data.levels[t, :, min((t ^ i).bit_length(), data.levels.shape[2] - 1), None]
        y = y + level * (q.unsqueeze(1) @ memory).squeeze(1)
    return y


def globalestimator(s: SimpleNamespace, w: Weights, q: Tensor, t: int, data: Data) -> Tensor:
    """An average over all tokens of the call."""
    inner, v = (data.k.transpose(0, 1) @ q.unsqueeze(-1)).squeeze(-1), data.v.transpose(0, 1)
    if s.kernel == "exponential":
        weight = (inner / (s.bandwidth or math.sqrt(q.shape[-1]))).softmax(1)
    else:
        weight = inner / (inner.sum(1, keepdim=True) if s.normalize else inner.shape[1] * (s.bandwidth or q.shape[-1]))
    return (weight.unsqueeze(1) @ v).squeeze(1)


# -- rules: how gradients move the weights, and which of them a query reads --------------------------------------------


def spread(gate: Tensor, w: Tensor) -> Tensor:
    """A number for each head, to multiply `[H, 1, *shape]`."""
    return gate.view(-1, *(1,) * (w.ndim - 1))


def plus(a: Weights | None, b: Weights) -> Weights:
    return b if a is None else {name: a[name] + x for name, x in b.items()}


def by(gate: Tensor | None, w: Weights) -> Weights:
    return w if gate is None else {name: spread(gate, x) * x for name, x in w.items()}


SCHEDULED = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)]
SCHEDULED += [(2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)]


def polar(x: Tensor, schedule: str) -> Tensor:
    """Five iterations of Newton and Schulz towards the polar factor (Muon)."""
    x = x / (x.square().sum((-2, -1), keepdim=True) + 1e-14).sqrt()
    for a, b, c in SCHEDULED if schedule == "scheduled" else [(3.4445, -4.7750, 2.0315)] * 5:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Document:
    """One document, read token by token: x `[T, D]`; `cuts` are the tokens at which later calls begin."""

    def __init__(self, layer: Any, p: Weights, x: Tensor, cuts: Sequence[int], sequence: int):
        self.layer, self.p, self.x = layer, p, x
        self.task, self.learner, self.rule = (settings(one) for one in (layer.task, layer.learner, layer.optimizer))
        self.heads, self.width = layer.num_heads, layer.dim // layer.num_heads
        self.tokens = Tokens(layer, p, x, sequence)
        self.calls = list(zip([0, *cuts], [*cuts, len(x)], strict=True))
        self.b, self.anchor = layer.optimizer.mini_batch_size, layer.optimizer.anchor
        self.read, self.steps = layer.optimizer.read, layer.optimizer.steps
        self.w0 = {name.removeprefix("learner.init."): w.unsqueeze(1) for name, w in p.items() if "learner.init." in name[:13]}
        self.slow = {name.removeprefix("learner.slow."): w.unsqueeze(1) for name, w in p.items() if "learner.slow." in name[:13]}
        self.f = globals()[self.learner.kind.lower()]
        self.mixes = self.learner.kind in ("Transformer", "NestedTTT") or getattr(self.learner, "mixes_tokens", False)
        self.mixes = self.mixes or (getattr(self.learner, "over", "") == "tokens" and self.learner.width > 1)
        self.by_block = self.rule.kind in ("BlockMomentum", "Sign", "Adam", "MirrorDescent")
        self.step_scales = self.factors(layer.learner.step_scale)
        self.graph = any(w.requires_grad for w in (x, *p.values()))
        self.gates()

    def factors(self, given: Any) -> dict[str, float]:
        """c of every fast weight: by name, or ρ^(L−l) in layer l of L."""
        if not isinstance(given, float | int):
            return {name: (given or {}).get(name, 1.0) for name in self.w0}
        of = layers_of(self.learner.kind, list(self.w0))
        order = list(dict.fromkeys(of.values()))
        return {name: float(given) ** (len(order) - 1 - order.index(of[name])) for name in self.w0}

    # -- gates of the tokens -------------------------------------------------------------------------------------------

    def logit(self, name: str) -> Tensor:
        return (self.x @ self.p[f"optimizer.{name}weight"].T + self.p[f"optimizer.{name}bias"]).expand(-1, self.heads)

    def gate(self, name: str, source: str, initial: float) -> Tensor | None:
        """A gate `[T, H]` by where it comes from."""
        if source == "none":
            return None
        if source == "constant":
            return torch.full((len(self.x), self.heads), initial, dtype=self.x.dtype)
        if source == "retnet":
            return (1 - 2.0 ** (-5 - torch.arange(self.heads).double())).expand(len(self.x), -1)
        logit = self.logit(f"{name}.")
        if source in ("softplus", "mamba2"):
            return torch.exp(-self.p[f"optimizer.{name}.log_rate"].exp() * F.softplus(logit))
        return torch.sigmoid(logit)

    def gates(self) -> None:
        """η, α, β `[T, H]`, rates `[T, H, n]` and decays of channels `[T, H, d]`; and what the rule makes of the pairs."""
        s, p, x, count = self.rule, self.p, self.x, len(self.x)
        one, pairs = x.new_ones(count, self.heads), self.tokens.pairs
        self.alpha = self.beta = self.rates = self.channels = self.tau = None
        if s.kind == "WholeSequence":
            sizes = torch.tensor([stop - start for start, stop in self.calls for _ in range(start, stop)]).view(-1, 1)
            self.eta = one * s.base_lr / (self.width * sizes / (self.steps if s.sampling == "sgd" else 1))
            return
        decay = getattr(s, "decay", "none")
        if s.kind != "ChannelDecay":
            self.alpha = self.gate("decay_gate", decay, getattr(s, "decay_init", 0.0))
        if s.kind == "Append":
            step = F.softplus(self.logit("decay_gate.")) if s.write == "step" else None
            write = step if s.write == "step" else self.gate("write_gate", s.write, s.write_init)
            levels = None
            if s.levels:
                logit = torch.einsum("td,hnd->thn", x, p["optimizer.level_weight"])
                levels = F.softplus(p["optimizer.level_scale"] * logit)
            keep = one if self.alpha is None else self.alpha
            self.data = one if write is None else write, keep, levels
            return
        self.scale = s.base_lr / (self.width if s.lr_scale == "head_dim" else 1)
        if decay == "mamba2":
            self.eta = F.softplus(self.logit("decay_gate."))
        else:
            self.eta = self.scale * (one if s.lr in ("constant", "per_weight") else torch.sigmoid(self.logit("lr_")))
        if s.kind not in ("Preconditioned", "GradientDescent"):
            self.beta = self.gate("momentum_gate", getattr(s, "momentum", "none"), getattr(s, "momentum_init", 0.0))
        if s.kind == "BlockMomentum":
            if s.lr == "per_weight":
                self.eta = one
                self.rates = F.softplus(x @ p["optimizer.rate_weight"].T + p["optimizer.rate_bias"]).unflatten(1, (self.heads, -1))
            for name, gate in (("alpha", "decay"), ("beta", "momentum")):
                if s.pool == "logits" and getattr(s, gate) in ("shared", "per_head"):
                    setattr(self, name, self.logit(f"{gate}_gate."))
        if getattr(s, "token_steps", "none") != "none" and s.kind == "GradientDescent":
            share, offset = 1 / torch.arange(1, self.b + 1).double(), p["optimizer.token_step_offset"].expand(self.heads, -1)
            z = 15 / 16 * share + offset
            self.tau = torch.relu(share + offset) if s.token_step_map == "relu" else (z + (z**2 + share**2 / 4).sqrt()) / 2
        if s.kind == "ChannelDecay":
            hidden = x if s.rank is None else x @ p["optimizer.down"].T
            z = ((torch.tanh(hidden) if s.tanh else hidden) @ p["optimizer.up"].T + p["optimizer.bias"]).unflatten(1, (self.heads, -1))
            if decay == "softplus":
                self.channels = torch.exp(-p["optimizer.log_rate"].exp().view(1, -1, 1) * F.softplus(z))
            elif decay == "bounded":
                self.channels = torch.exp(-s.strongest * torch.sigmoid(z))
            else:
                self.channels = s.lower_bound + (1 - s.lower_bound) * torch.sigmoid(z) ** (1 / s.temperature)
            if s.tied:
                pairs = [[one._replace(k=one.k * (1 - a)) for one in some] for some, a in zip(pairs, self.channels, strict=True)]
        if s.kind == "DeltaGradientDescent":
            self.eta = self.eta / (1 + self.eta)
            pairs = [[one._replace(p=one.k + (one.k if one.p is None else one.p)) for one in some] for some in pairs]
        if s.kind == "Preconditioned":
            curvature: Tensor | float = 0.0
            gamma, omega = self.gate("curvature_decay", s.curvature_decay, 0.0), self.gate("curvature_step", "per_head", 0.5)
            for t, (own,) in enumerate(pairs):
                curvature = gamma[t].unsqueeze(1) * curvature + omega[t].unsqueeze(1) * own.k.square()
                r = (curvature + 1e-6).log() - p["optimizer.centre"].unsqueeze(1)
                pairs[t] = [own._replace(k=own.k * s.squash ** (-r / (1 + r.abs())), p=own.k if own.p is None else own.p)]
        self.tokens.pairs = pairs

    # -- f, ℓ and G ----------------------------------------------------------------------------------------------------

    def predict(self, w: Weights, x: Tensor) -> Tensor:
        """`f(x; W)` of tokens `[H, n, d]` that see each other, if f looks at several."""
        w = self.slow | w
        return self.wrapped(w, x, self.f(self.layer, self.learner, w, x))

    def wrapped(self, w: Weights, x: Tensor, y: Tensor) -> Tensor:
        if getattr(self.learner, "norm", False):
            y = standardized(y) * w["norm_scale"] + w["norm_bias"]
        return x + y if getattr(self.learner, "residual", False) else y

    def loss(self, w: Weights, start: int, t: int, pair: Pair) -> Tensor:
        """ℓ `[H]` of a pair of token t, whose mini-batch starts at `start`."""
        before = [self.tokens.pairs[s][0].k for s in range(start, t)] if self.mixes else []
        y = self.predict(w, torch.stack([*before, pair.k], 1))
        return losses(self.task, self.p, y[:, -1], pair)

    def gradient(self, w: Weights, start: int, t: int, pair: Pair) -> Weights:
        """`∇ℓ(W)`, or with an erase view `bᵀ(p W) − kᵀ v`."""
        if pair.p is not None or pair.b is not None:
            ((name, weight),) = w.items()
            p, b = (pair.k if z is None else z for z in (pair.p, pair.b))
            erased = b.unsqueeze(2) * (p.unsqueeze(1) @ weight[:, 0])
            found = [(erased - pair.k.unsqueeze(2) * pair.v.unsqueeze(1)).unsqueeze(1)]
        else:
            w = {name: x if x.requires_grad else x.detach().requires_grad_() for name, x in w.items()}
            total = self.loss(w, start, t, pair).sum()
            found = list(torch.autograd.grad(total, list(w.values()), create_graph=self.graph, materialize_grads=True))
        found = [g.detach() for g in found] if self.layer.outer == "first_order" else found
        return dict(zip(w, found, strict=True))

    def surprise(self, committed: Weights, start: int, t: int) -> Tensor:
        """s_t of `state_gated`, in sight of the last commit."""
        (pair,) = self.tokens.pairs[t]
        if self.rule.step_gate == "loss":
            return self.loss(committed, start, t, pair)
        if self.rule.step_gate == "gradient":
            found = self.gradient(committed, start, t, pair)
            return (sum(g.flatten(1).square().sum(1) for g in found.values()) + 1e-12).sqrt()
        before = [self.tokens.pairs[s][0].k for s in range(start, t)] if self.mixes else []
        y = self.predict(committed, torch.stack([*before, pair.k], 1))[:, -1]
        return (y * pair.v).sum(-1) / math.sqrt(pair.v.shape[-1])

    # -- one token, one commit -----------------------------------------------------------------------------------------
    # Memory: W_a (a), the point of a batch anchor (g), the newest weights (w), what came since the commit (u), momentum
    # (s), the dual state (dual), the moments and the tokens since the commit (seen).

    def begin(self) -> Memory:
        w = self.w0
        if self.rule.kind == "MirrorDescent" and self.rule.retention != "elastic_net":
            w = {name: self.mirror(x) for name, x in w.items()}
        return {"a": w, "g": w, "w": w, "u": None, "s": None, "dual": self.w0, "second": None, "age": 0, "seen": []}

    def token(self, m: Memory, t: int, start: int) -> Memory:
        """The memory after one more token: `S_t = β_t S_{t−1} − η_t G_t`, `W_t = α_t W_{t−1} + S_t`."""
        eta, pairs, s = self.eta[t], self.tokens.pairs[t], self.rule
        if s.kind == "StateGated":
            signal = self.surprise(m["a"], start, t)
            if s.step_gate_params == "learned":
                signal = self.p["optimizer.step_gate_scale"] * signal + self.p["optimizer.step_gate_bias"]
            eta = eta * torch.sigmoid(signal)
        rounds = [[pair] for pair in pairs] if self.task.kind == "Pairs" else [pairs]  # one after the other, or together
        for i, some in enumerate(rounds):
            alpha = None if self.alpha is None or i else self.alpha[t]
            kept = m["w"] if self.by_block else by(alpha, m["w"])
            if self.channels is not None and i == 0:
                kept = {name: self.channels[t].view(self.heads, 1, -1, 1) * w for name, w in kept.items()}
            online = kept if getattr(s, "gradient_at", "") == "decayed" else m["w"]
            point = {"minibatch": m["a"], "batch": m["g"], "online": online}[self.anchor]
            step: Weights | None = None
            for pair in some:
                found = self.gradient(point, start, t, pair)
                rates = [1.0] * len(found) if self.rates is None else self.rates[t].unbind(1)
                scaled = zip(found.items(), rates, strict=True)
                step = plus(step, {n: -self.step_scales[n] * spread(eta * pair.weight * r, g) * g for (n, g), r in scaled})
            assert step is not None
            m = self.moved(m, t, kept, alpha, step)
        return m | {"seen": [*m["seen"], t]}

    def moved(self, m: Memory, t: int, kept: Weights, alpha: Tensor | None, step: Weights) -> Memory:
        s = self.rule
        if s.kind == "MirrorDescent":
            return m | {"dual": plus(by(alpha, m["dual"]), step)}
        if self.by_block:
            return m | {"u": plus(m["u"], step)}
        if self.tau is not None or getattr(s, "max_norm", None) is not None:  # W_t = W_a + τ_i min(1, c/‖U‖) U
            u = plus(m["u"], step)
            factor = torch.ones(self.heads, dtype=self.x.dtype) if self.tau is None else self.tau[:, t % self.b]
            if s.max_norm is not None:
                size = sum(x.flatten(1).square().sum(1) for x in u.values())
                factor = factor * s.max_norm / size.clamp(min=s.max_norm**2).sqrt()
            return m | {"u": u, "w": plus(m["a"], by(factor, u))}
        memory = step
        if self.beta is not None:
            memory = step if m["s"] is None else plus(by(self.beta[t], m["s"]), step)
        written = plus(by(self.beta[t], memory), step) if getattr(s, "nesterov", False) else memory
        w = plus(kept, written)
        if getattr(s, "pull", False) and alpha is not None:
            w = plus(by(1 - alpha, self.w0), w)
        return m | {"w": w, "s": memory}

    def newest(self, m: Memory) -> Weights:
        """W_t; of a rule that acts once per mini-batch, as if it ended here."""
        return self.commit(m)["a"] if self.by_block and m["seen"] else m["a"] if self.by_block else m["w"]

    def commit(self, m: Memory) -> Memory:
        """The memory when a mini-batch is complete."""
        closed = m | {"u": None, "seen": []}
        if not self.by_block:
            return closed | {"a": m["w"]}
        return closed | getattr(self, f"commit_{self.rule.kind.lower()}")(m)

    def commit_sign(self, m: Memory) -> Memory:
        return {"a": plus(m["a"], {name: abs(self.scale) * u.sign() for name, u in m["u"].items()})}

    def commit_adam(self, m: Memory) -> Memory:
        s, age = self.rule, m["age"] + 1
        first = plus(None if m["s"] is None else {n: s.beta1 * x for n, x in m["s"].items()}, {n: (1 - s.beta1) * u for n, u in m["u"].items()})
        second = plus(None if m["second"] is None else {n: s.beta2 * x for n, x in m["second"].items()}, {n: (1 - s.beta2) * u**2 for n, u in m["u"].items()})
        step = {}
        for name, x in first.items():
            root = (second[name] / (1 - s.beta2**age)).clamp(min=s.eps**2).sqrt()
            step[name] = abs(self.scale) * x / (1 - s.beta1**age) / (root + s.eps)
        return {"a": plus(m["a"], step), "s": first, "second": second, "age": age}

    def pooled(self, gate: Tensor | None, source: str, seen: list[int]) -> Tensor | None:
        """The mean of a gate over a mini-batch, or the gate of its mean logit."""
        if gate is None:
            return None
        mean = gate[seen].mean(0)
        return torch.sigmoid(mean) if self.rule.pool == "logits" and source in ("shared", "per_head") else mean

    def commit_blockmomentum(self, m: Memory) -> Memory:
        s, after = self.rule, {}
        alpha, beta = self.pooled(self.alpha, s.decay, m["seen"]), self.pooled(self.beta, s.momentum, m["seen"])
        memory = m["u"] if beta is None or m["s"] is None else plus(by(beta, m["s"]), m["u"])
        for name, w in by(alpha, m["a"]).items():
            matrix = w.ndim == 4
            w = w + (polar(memory[name], s.newton_schulz) if matrix and s.orthogonalize else memory[name])
            if matrix and s.row_norm:
                sizes = [(x.square().sum(-2, keepdim=True) + 1e-12).sqrt() for x in (self.w0[name], w)]
                w = w * sizes[0] / sizes[1]
            after[name] = w
        return {"a": after, "s": memory}

    def commit_mirrordescent(self, m: Memory) -> Memory:
        after = {name: self.mirror(x) for name, x in m["dual"].items()}
        dual = m["dual"]
        if self.rule.retention == "softmax":
            dual = {name: (x / self.mass(x)).log() for name, x in after.items()}
        return {"a": after, "dual": after if self.rule.retention == "elastic_net" else dual}

    def mass(self, x: Tensor) -> float:
        return self.rule.mass * math.sqrt(x.shape[-2] if self.rule.simplex == "output" and x.ndim == 4 else x[0].numel())

    def mirror(self, x: Tensor) -> Tensor:
        """m(A) of one weight."""
        s = self.rule
        if s.retention == "lq":
            size = (x.square() + 1e-6).flatten(1).pow(s.q / 2).sum(1).pow((s.q - 2) / s.q)
            return x / spread(size, x)
        if s.retention == "softmax":
            by_output = s.simplex == "output" and x.ndim == 4
            return self.mass(x) * (x.softmax(-2) if by_output else x.flatten(1).softmax(1).view_as(x))
        return torch.sigmoid(x) if s.retention == "sigmoid" else x.sign() * (x.abs() - s.threshold).clamp(min=0)

    # -- the document --------------------------------------------------------------------------------------------------

    def outputs(self) -> list[Tensor]:
        """`[D]` of every token: answers of the heads, then norm, gate and projection."""
        p, kept = self.p, self.learner.kind in DATA
        y = self.attended() if kept else self.final() if self.read == "final" else self.answers()
        norm, y = type(self.layer.norm).__name__, torch.stack(y)
        if norm == "HeadLayerNorm":
            y = standardized(y, 1e-5).flatten(1) * p["norm.weight"] + p["norm.bias"]
        elif norm == "HeadRMSNorm":
            y = (root_mean_square(y) * p["norm.weight"]).flatten(1)
        else:
            y = y.flatten(1)
            y = standardized(y) * p["norm.weight"] + p["norm.bias"] if norm == "LayerNorm" else y
            y = root_mean_square(y) * p["norm.weight"] if norm == "RMSNorm" else y
        if self.layer.gate is not None:
            low = "gate.0.weight" in p
            gate = affine(p, "gate.1", affine(p, "gate.0", self.x)) if low else affine(p, "gate", self.x)
            y = y * ACTIVATIONS[{"gelu": "gelu_tanh"}.get(self.layer.gate_function, self.layer.gate_function)](gate)
        return list(affine(p, "out", y).unbind(0))

    def attended(self) -> list[Tensor]:
        """The answers of a learner that keeps its data."""
        k, v = (torch.stack([getattr(pair, name) for (pair,) in self.tokens.pairs]) for name in ("k", "v"))
        data = Data(k, v, *self.data)
        ys = [self.f(self.learner, self.slow, q, t, data) for t, q in enumerate(self.tokens.q)]
        return [self.wrapped(self.slow, q.unsqueeze(1), y.unsqueeze(1))[:, 0] for q, y in zip(self.tokens.q, ys, strict=True)]

    def answer(self, w: Weights | list[Weights], start: int, stop: int) -> Tensor:
        """What the queries `start` to `stop − 1` are answered, `[H, n, d]`, by one W, or each by its own."""
        q = self.tokens.q[start:stop].transpose(0, 1)
        if isinstance(w, list):
            w = {name: torch.cat([one[name] for one in w], 1) for name in w[0]}
        return self.predict(w, q)

    def after(self, m: Memory, start: int, t: int) -> Memory:
        """The memory after the tokens `start` to t of the open mini-batch, which began with m: so many steps on them."""
        for step in range(self.steps):
            m = self.commit(m) if step else m
            for s in range(start, t + 1):
                m = self.token(m, s, start)
        return m

    def answers(self) -> list[Tensor]:
        """The answers `[H, d]` of every token, for all reads but `final`."""
        m, ys = self.begin(), []
        for start in range(0, len(self.x), self.b):
            stop, rows, row, told = min(start + self.b, len(self.x)), [], m, start
            for t in range(start, stop):
                first = start if self.mixes else t
                if self.read == "exclusive":
                    rows.append(self.newest(row))
                last = t + 1 == stop or any(t + 1 == end for _, end in self.calls)
                row = self.token(row, t, start) if self.steps == 1 else self.after(m, start, t) if last else row
                if self.read == "inclusive":
                    rows.append(self.newest(row))
                if self.read in ("inclusive", "exclusive"):
                    ys.append(self.answer(rows if self.mixes else rows[-1], first, t + 1)[:, -1])
                elif self.read == "previous" or (self.read == "committed" and t + 1 < start + self.b):
                    ys.append(self.answer(m["a"], first, t + 1)[:, -1])
                elif self.read == "committed":
                    ys.append(self.answer(self.commit(row)["a"], first, t + 1)[:, -1])
                elif last:  # block: of the mini-batch, as far as the call goes
                    ys += self.answer(self.newest(row), start, t + 1)[:, told - start :].unbind(1)
                    told = t + 1
            m = self.commit(row)
        return ys

    def final(self) -> list[Tensor]:
        """All tokens of a call first, so many times over; then all its queries."""
        m, ys = self.begin(), []
        for begin, end in self.calls:
            if getattr(self.rule, "sampling", "full") == "sgd":
                m = self.sampled(m, begin, end)
            for step in range(0 if getattr(self.rule, "sampling", "full") == "sgd" else self.steps):
                if step:  # the next pass goes on from the weights that this one ended with
                    m = self.commit(m) if m["seen"] else m
                    m = m | {"g": m["a"]}
                for t in range(begin, end):
                    m = self.token(m, t, max(begin, t - t % self.b))
                    m = self.commit(m) if (t + 1) % self.b == 0 else m
            ys += self.answer(self.newest(m), begin, end).unbind(1)
        return ys

    def sampled(self, m: Memory, begin: int, end: int) -> Memory:
        """A step on each part of a random order of the tokens, which every head has for itself."""
        order = self.layer.optimizer.permutation(end - begin, self.x.device)[0] + begin
        pairs, size = self.tokens.pairs, (end - begin) // self.steps
        heads = range(self.heads)

        def mixed(name: str, t: int) -> Tensor:
            return torch.stack([getattr(pairs[int(order[h, t - begin])][0], name)[h] for h in heads])

        self.tokens.pairs = pairs[:begin] + [[Pair(mixed("k", t), mixed("v", t))] for t in range(begin, end)]
        for t in range(begin, end):
            m = self.token(m, t, t - (t - begin) % size)
            m = self.commit(m) if (t - begin + 1) % size == 0 else m
        self.tokens.pairs = pairs
        return m


DATA = ("KernelEstimator", "KernelRidge", "RecurrentRidge", "LogLinear", "GlobalEstimator")
