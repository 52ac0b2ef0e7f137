"""The parts of the oracle (`oracle.py`): what tasks make of tokens, what learners make of weights, as functions.

Of one document: x `[T, D]`, views `[T, H, d]`; a weight is `[H, 1, *shape]`, and where queries have weights of their
own `[H, n, *shape]`; inputs of a learner are `[H, n, d]`.
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

Weights = dict[str, Tensor]


def settings(part: nn.Module) -> SimpleNamespace:
    """What a part was made with, defaults included; `kind` is the name of its class."""
    found: dict[str, Any] = {}
    for cls in reversed(type(part).__mro__):
        if "__init__" in vars(cls) and issubclass(cls, nn.Module) and cls is not nn.Module:
            found |= {name: one.default for name, one in inspect.signature(cls.__init__).parameters.items()}
    return SimpleNamespace(kind=type(part).__name__, **found | part._made_with)


# -- views: what is learned from a token -------------------------------------------------------------------------------


class Pair(NamedTuple):
    """What a token learns: k, v `[H, d]`; the erase view p and its direction b; a weight `[H]` of its loss; δ `[H]`."""

    k: Tensor
    v: Tensor
    p: Tensor | None = None
    b: Tensor | None = None
    weight: Tensor | float = 1.0
    delta: Tensor | None = None

    @staticmethod
    def of_heads(pairs: Sequence[Pair]) -> Pair:
        """Head h of the pair number h."""
        rows = {name: [getattr(pair, name) for pair in pairs] for name in Pair._fields}
        rows = {name: xs for name, xs in rows.items() if isinstance(xs[0], Tensor)}
        return Pair(**{name: torch.stack([x[h] for h, x in enumerate(xs)]) for name, xs in rows.items()})


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


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "elu": lambda x: F.elu(x) + 1,
    "silu": F.silu,
}


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

    def one_each(self, k: Tensor, v: Tensor, **more: Tensor | None) -> list[list[Pair]]:
        rows = {"k": k, "v": v, **more}
        rows = {name: self.every_head(x) for name, x in rows.items() if x is not None}
        if self.s.huber_delta_from != "constant":  # the threshold of a Huber loss is the token's own
            logit = self.x @ self.p["task.delta_weight"].T + self.p["task.delta_bias"]
            rows["delta"] = self.every_head(F.softplus(logit))
        return [[Pair(**{name: x[t] for name, x in rows.items()})] for t in range(len(self.x))]

    def of_reconstruction(self) -> tuple[Tensor, list[list[Pair]]]:
        q, k, v = self.views()
        return q, self.one_each(k, v)

    def of_nexttoken(self) -> tuple[Tensor, list[list[Pair]]]:
        q, k, v = self.views()
        return q, self.one_each(torch.cat([self.p["task.start"][None, :, 0], k[:-1]]), v)

    def of_gatedviews(self) -> tuple[Tensor, list[list[Pair]]]:
        """p = e ∘ k is erased and w ∘ v is written; `q − g p` is read."""
        s, (q, k, v) = self.s, self.views()
        erased = s.erase_scale * k
        if s.erase == "constant":
            erased = s.erase_scale * torch.sigmoid(self.p["task.erase_logit"]).view(1, -1, 1) * k
        elif s.erase == "per_channel":
            erased = s.erase_scale * torch.sigmoid(self.apart(affine(self.p, "task.erase_gate", self.x))) * k
        if s.write == "per_channel":
            v = torch.sigmoid(self.apart(affine(self.p, "task.write_gate", self.x))) * v
        if s.correction is not None:
            q = q - self.p["task.correction_factor"].view(1, -1, 1) * self.every_head(erased)
        return q, self.one_each(k, v, p=None if (s.erase, s.erase_scale) == ("none", 1) else erased)

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
                root = self.p["task.coefficient_roots"][degree - 1]
                columns.append(root * math.sqrt(count) * x[..., places].prod(-1))
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
    log_cosh = torch.logaddexp(10 * e, -10 * e) - math.log(2)  # whose second derivative does not overflow
    return torch.where(far, delta * log_cosh.sum(-1) / 10, 0.5 * size)  # mixed_huber


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


def linear(s: SimpleNamespace, w: Weights, x: Tensor, learner: Any) -> Tensor:
    return times(x, w["w1"]) + (w["b1"] if s.bias else 0)


def mlp(s: SimpleNamespace, w: Weights, x: Tensor, learner: Any) -> Tensor:
    for i in range(1, s.depth + 1):
        x = times(x, w[f"w{i}"]) + (w[f"b{i}"] if s.bias else 0)
        x = ACTIVATIONS[s.activation](x) if i < s.depth else x
    return x


def swiglu(s: SimpleNamespace, w: Weights, x: Tensor, learner: Any) -> Tensor:
    return times(F.silu(times(x, w["w0"])) * times(x, w["w2"]), w["w1"])


def glu(s: SimpleNamespace, w: Weights, x: Tensor, learner: Any) -> Tensor:
    return times(x, w["w1"]) * F.silu(times(x, w["w2"]))


def convolution(s: SimpleNamespace, w: Weights, x: Tensor, learner: Any) -> Tensor:
    act = ACTIVATIONS[s.activation]
    if s.over == "tokens":  # the last taps, zeros before the mini-batch
        near = F.pad(x, (0, 0, s.width - 1, 0)).unfold(1, s.width, 1).mT.flatten(2)
        return times(act(times(near, w["w1"].flatten(2, 3)) + w["b1"]), w["w2"]) + w["b2"]

    def inside(x: Tensor, i: int) -> Tensor:
        """A token's features as a signal: `[H, n, d, channels]`."""
        near = F.pad(x, (0, 0, (s.width - 1) // 2, s.width // 2)).unfold(2, s.width, 1).mT.flatten(3)
        return near @ w[f"w{i}"].flatten(2, 3) + w[f"b{i}"].unsqueeze(2)

    return inside(act(inside(x.unsqueeze(-1), 1)), 2).squeeze(-1)


def transformer(s: SimpleNamespace, w: Weights, x: Tensor, learner: Any) -> Tensor:
    """`h = x + A(LN(x))`, `f(x) = h + MLP(LN(h))`; attention to the tokens up to each one."""
    z = standardized(x) * w["scale1"] + w["shift1"]
    q, k, v = (times(z, w[name]).unflatten(-1, (s.num_heads, -1)).transpose(1, 2) for name in ("wq", "wk", "wv"))
    score = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(torch.ones(2 * x.shape[1:2]).triu(1).bool(), -torch.inf)
    h = x + times((score.softmax(-1) @ v).transpose(1, 2).flatten(2), w["wo"])
    hidden = times(standardized(h) * w["scale2"] + w["shift2"], w["w1"]) + w["b1"]
    return h + times(ACTIVATIONS["gelu_tanh"](hidden), w["w2"]) + w["b2"]


def module(s: SimpleNamespace, w: Weights, x: Tensor, learner: Any) -> Tensor:
    """The module itself, with the weights of one head after the other."""
    ys = []
    for h in range(len(x)):
        own = copy.deepcopy(learner.module)
        for name in filter(lambda name: not name.startswith("norm_"), w):
            path, _, attribute = name.rpartition("/")
            own.get_submodule(path.replace("/", "."))._parameters[attribute] = w[name][h, 0]
        ys.append(own(x[h]))
    return torch.stack(ys)


def layers_of(kind: str, names: Sequence[str]) -> dict[str, str]:
    """The layer of f that a weight belongs to."""
    found = {}
    for name in names:
        number = name[len(name.rstrip("0123456789")) :]
        number = {"w0": "1", "w1": "2", "w2": "1"}.get(name, number) if kind == "SwiGLU" else number
        number = "1" if kind == "GLU" and number else number
        found[name] = "norm" if name.startswith("norm_") else name.rpartition("/")[0] if "/" in name else number
    return found


# -- learners that keep their data -------------------------------------------------------------------------------------


class Data(NamedTuple):
    """What a learner without weights has read: k, v `[T, H, d]` and what its rule gives, `[T, H]`, λ and a `[T, H, n]`."""

    k: Tensor
    v: Tensor
    write: Tensor
    keep: Tensor
    levels: Tensor | None
    channels: Tensor | None
    blend: Tensor | None


def kernel_estimator(s: SimpleNamespace, w: Weights, q: Tensor, t: int, data: Data) -> Tensor:
    """`Σ_s κ(q, k_s) v_s / Σ_s κ(q, k_s)` over the s that token t sees."""
    first = 0 if s.window is None else max(0, t - s.window + 1)
    seen = [i for i in range(t + 1) if i >= first or i < s.sinks]
    k, v = data.k[seen].transpose(0, 1), data.v[seen].transpose(0, 1)  # [H, S, d]
    if s.learn_init:
        k, v = torch.cat([w["k0"], k], 1), torch.cat([w["v0"], v], 1)
    h = s.bandwidth or math.sqrt(q.shape[-1])
    distance = (k - q.unsqueeze(1)).square().sum(-1)
    if s.kernel == "nearest":
        last = distance.sort(1).values[:, : s.neighbours][:, -1:]
        closer, tied = (distance < last).double(), (distance == last).double()  # equally near: they share the places
        left = min(s.neighbours, distance.shape[1]) - closer.sum(1, keepdim=True)
        chosen = closer + tied * left / tied.sum(1, keepdim=True)
        y = (chosen.unsqueeze(1) @ v).squeeze(1) / chosen.sum(1, keepdim=True)
    else:
        logit = (k @ q.unsqueeze(-1)).squeeze(-1) / h if s.kernel == "exponential" else -distance / (2 * h)
        y = (logit.softmax(1).unsqueeze(1) @ v).squeeze(1)
    return y + w["bias"][:, 0] if s.bias else y


def kernel_ridge(s: SimpleNamespace, w: Weights, q: Tensor, t: int, data: Data) -> Tensor:
    """`κ(q, K) (κ(K, K) + λI)⁻¹ V`."""
    k, v = (x[: t + 1].transpose(0, 1) for x in (data.k, data.v))

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        h, inner = s.bandwidth or math.sqrt(a.shape[-1]), a @ b.mT
        if s.kernel == "gaussian":
            return (-(a.unsqueeze(2) - b.unsqueeze(1)).square().sum(-1) / (2 * h)).exp()
        return inner if s.kernel == "linear" else (inner / h).exp()

    fit = torch.linalg.solve(kernel(k, k) + s.ridge * torch.eye(t + 1, dtype=q.dtype), v)
    return (kernel(q.unsqueeze(1), k) @ fit).squeeze(1)


def recurrent_ridge(s: SimpleNamespace, w: Weights, q: Tensor, t: int, data: Data) -> Tensor:
    """`G (H + Λ)⁻¹ q`."""
    gram = moment = torch.zeros(q.shape[0], q.shape[1], q.shape[1], dtype=q.dtype)
    for i in range(t + 1):
        k, v, write, keep = data.k[i], data.v[i], data.write[i].view(-1, 1, 1), data.keep[i].view(-1, 1, 1)
        gram = keep * gram + write * k.unsqueeze(2) * k.unsqueeze(1)
        moment = keep * moment + write * v.unsqueeze(2) * k.unsqueeze(1)
    ridge = F.softplus(w["ridge"][:, 0]) + s.ridge_floor
    return (moment @ torch.linalg.solve(gram + torch.diag_embed(ridge), q).unsqueeze(-1)).squeeze(-1)


def chebyshev_ridge(s: SimpleNamespace, w: Weights, q: Tensor, t: int, data: Data) -> Tensor:
    """`U (q + α (x − q))`, `(H + λ) x = q` by Chebyshev's iteration, `λ = ridge ‖H‖_F`."""
    gram = moment = torch.zeros(q.shape[0], q.shape[1], q.shape[1], dtype=q.dtype)
    for i in range(t + 1):
        factor, keep = data.write[i].unsqueeze(1) + 1e-6, data.keep[i].view(-1, 1, 1)
        k, v = factor * data.k[i], factor * data.v[i]
        gram = keep * gram + k.unsqueeze(2) * k.unsqueeze(1)
        moment = keep * moment + v.unsqueeze(2) * k.unsqueeze(1)
    size = gram.square().sum((1, 2)).sqrt().unsqueeze(1)
    ridge, span = s.ridge * size, (2 * s.ridge + 1) * size
    x, before, omega = 2 / span * q, torch.zeros_like(q), 2.0
    for _ in range(s.iterations):
        omega = 1 / (1 - (size / span).square() / 4 * omega)
        residual = (gram @ x.unsqueeze(-1)).squeeze(-1) + ridge * x - q
        x, before = before + omega * (x - 2 / span * residual - before), x
    x = x if data.blend is None else q + data.blend[t].unsqueeze(1) * (x - q)
    return (moment @ x.unsqueeze(-1)).squeeze(-1)


def log_linear(s: SimpleNamespace, w: Weights, q: Tensor, t: int, data: Data) -> Tensor:
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
        found = (q.unsqueeze(1) @ memory).squeeze(1)
        if data.levels is not None:
            found = found * data.levels[t, :, min((t ^ i).bit_length(), data.levels.shape[2] - 1), None]
        y = y + found
    return y


def oja(s: SimpleNamespace, w: Weights, q: Tensor, t: int, data: Data) -> Tensor:
    """`S = S Diag(a)`, `S = S + β (k − S v) vᵀ`, `qᵀ S`, with v of unit length."""
    assert data.channels is not None
    memory = torch.zeros(*q.shape, q.shape[1], dtype=q.dtype)
    for i in range(t + 1):
        k, v = data.k[i], data.v[i] / data.v[i].norm(dim=-1, keepdim=True)
        memory = memory * data.channels[i].unsqueeze(1)
        error = k - (memory @ v.unsqueeze(-1)).squeeze(-1)
        memory = memory + data.write[i].view(-1, 1, 1) * error.unsqueeze(2) * v.unsqueeze(1)
    return (q.unsqueeze(1) @ memory).squeeze(1)


def slots(s: SimpleNamespace, w: Weights, q: Tensor, t: int, data: Data) -> Tensor:
    """Of each slot `k̃ = a k̃ + (1 − a) k` and ṽ likewise; `Σ_j softmax(q·k̃)_j ṽ_j`."""
    assert data.channels is not None
    act = F.silu if s.silu else lambda x: x
    keys = values = torch.zeros(*data.channels.shape[1:], q.shape[1], dtype=q.dtype)  # [H, m, d]
    for i in range(t + 1):
        a = data.channels[i].unsqueeze(2)
        keys = a * keys + (1 - a) * data.k[i].unsqueeze(1)
        values = a * values + (1 - a) * act(data.v[i]).unsqueeze(1)
    return act(((keys @ q.unsqueeze(2)).softmax(1) * values).sum(1))


def global_estimator(s: SimpleNamespace, w: Weights, q: Tensor, t: int, data: Data) -> Tensor:
    """An average over all tokens of the call."""
    inner, v = (data.k.transpose(0, 1) @ q.unsqueeze(-1)).squeeze(-1), data.v.transpose(0, 1)
    if s.kernel == "exponential":
        weight = (inner / (s.bandwidth or math.sqrt(q.shape[-1]))).softmax(1)
    else:
        weight = inner / (inner.sum(1, keepdim=True) if s.normalize else inner.shape[1] * (s.bandwidth or q.shape[-1]))
    return (weight.unsqueeze(1) @ v).squeeze(1)


LEARNERS: dict[str, Callable[..., Tensor]] = {
    "Linear": linear, "MLP": mlp, "SwiGLU": swiglu, "GLU": glu, "Convolution": convolution, "Transformer": transformer,
    "ModuleLearner": module, "KernelEstimator": kernel_estimator, "KernelRidge": kernel_ridge,
    "RecurrentRidge": recurrent_ridge, "LogLinear": log_linear, "GlobalEstimator": global_estimator, "Oja": oja, "Slots": slots,
    "ChebyshevRidge": chebyshev_ridge,
}  # fmt: skip

# -- steps -------------------------------------------------------------------------------------------------------------

SCHEDULED = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
             (2.8366, -3.0525, 1.2012))  # fmt: skip


def polar(x: Tensor, schedule: str) -> Tensor:
    """Five iterations of Newton and Schulz towards the polar factor (Muon)."""
    x = x / (x.square().sum((-2, -1), keepdim=True) + 1e-14).sqrt()
    for a, b, c in SCHEDULED if schedule == "scheduled" else ((3.4445, -4.7750, 2.0315),) * 5:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def mass(s: SimpleNamespace, x: Tensor) -> float:
    """What the weights of a simplex sum to; the taps of a convolution are matrices."""
    return s.mass * math.sqrt(x.shape[-2] if s.simplex == "output" and x.ndim > 3 else x[0].numel())


def mirror(s: SimpleNamespace, x: Tensor) -> Tensor:
    """m(A) of mirror descent, for one weight."""
    if s.retention == "lq":
        size = (x.square() + 1e-6).flatten(1).pow(s.q / 2).sum(1).pow((s.q - 2) / s.q)
        return x / size.view(-1, *(1,) * (x.ndim - 1))
    if s.retention == "softmax":
        by_output = s.simplex == "output" and x.ndim > 3
        return mass(s, x) * (x.softmax(-2) if by_output else x.flatten(1).softmax(1).view_as(x))
    return torch.sigmoid(x) if s.retention == "sigmoid" else x.sign() * (x.abs() - s.threshold).clamp(min=0)
