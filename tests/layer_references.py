"""The known layers as plain loops over tokens, written from their published equations. Nothing here uses the package.

Every function takes the parameters of a layer by name, tokens `x` `[B, T, D]`, the number of heads and the mini-batch
size b, and returns the outputs `[B, T, D]`. Rows are tokens, so a matrix maps `k` to `k W`. Gradients of simple
learners are written out; where the publication leaves them to automatic differentiation, `torch.autograd.grad` takes
them token by token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Parameters = dict[str, Tensor]
EPS = 1e-6  # of every layer norm

# -- what all layers share ---------------------------------------------------------------------------------------------


def heads_of(x: Tensor, num_heads: int) -> Tensor:
    """`[B, T, D]` to `[B, H, T, d]`."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def views(p: Parameters, x: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, each with a projection of its own."""
    q, k, v = (heads_of(x @ p[f"task.{name}.weight"].T, num_heads) for name in ("q", "k", "v"))
    return q, k, v


def gate(p: Parameters, name: str, x: Tensor) -> Tensor:
    """`θ x + c` per head, `[B, H, T]`."""
    return torch.einsum("btd,hd->bht", x, p[f"optimizer.{name}weight"]) + p[f"optimizer.{name}bias"].view(1, -1, 1)


def standardize(z: Tensor) -> tuple[Tensor, Tensor]:
    """`(z − μ)/s` and s."""
    s = torch.sqrt(z.var(-1, unbiased=False, keepdim=True) + EPS)
    return (z - z.mean(-1, keepdim=True)) / s, s


def output(p: Parameters, x: Tensor, rows: list[Tensor]) -> Tensor:
    """Answers `[B, H, d]` of every token to outputs: layer norm over D, gate, projection, as far as the layer has
    them."""
    y = torch.stack(rows, dim=1).flatten(2)
    if "norm.weight" in p:
        y = standardize(y)[0] * p["norm.weight"] + p["norm.bias"]
    if "gate.weight" in p:
        y = y * F.gelu(x @ p["gate.weight"].T, approximate="tanh")
    y = y @ p["out.weight"].T
    return y + p["out.bias"] if "out.bias" in p else y


def rope(x: Tensor, positions: list[int], theta: float = 10000.0) -> Tensor:
    """Turns the pairs (2i, 2i+1) of `x` `[B, H, T, d]` by `position · θ^(−2i/d)`."""
    width, rows = x.shape[-1], []
    for t, position in enumerate(positions):
        pairs = []
        for i in range(0, width, 2):
            angle = position * theta ** (-i / width)
            a, b = x[:, :, t, i], x[:, :, t, i + 1]
            pairs += [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
        rows.append(torch.stack(pairs, -1))
    return torch.stack(rows, 2)


def times(x: Tensor, w: Tensor) -> Tensor:
    """`x W` for one token: `[B, H, d_in]`, `[B or 1, H, d_in, d_out]`."""
    return torch.einsum("bhi,bhij->bhj", x, w.expand(x.shape[0], *w.shape[1:]))


def outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def weights_of(p: Parameters, batch: int) -> Parameters:
    """W0 for every sequence, `[B, H, ...]`, by the learner's names."""
    prefix = "learner.init."
    return {name.removeprefix(prefix): w.expand(batch, *w.shape) for name, w in p.items() if name.startswith(prefix)}


def residual_norm(p: Parameters, x: Tensor, z: Tensor) -> Tensor:
    """`x + LN(z)` for one token or a list of tokens stacked on axis 2; the norm's affine is per head."""
    scale, shift = p["learner.slow.norm_scale"], p["learner.slow.norm_bias"]
    if z.ndim == 4:
        scale, shift = scale.unsqueeze(1), shift.unsqueeze(1)
    return x + standardize(z)[0] * scale + shift


def gradient(loss: Tensor, weights: Parameters) -> Parameters:
    """Of a sum of losses, with a graph for the outer loop."""
    found = torch.autograd.grad(
        loss, list(weights.values()), create_graph=True, allow_unused=True, materialize_grads=True
    )
    return dict(zip(weights, found, strict=True))


def spread(g: Tensor, like: Tensor) -> Tensor:
    return g.view(*g.shape, *(1,) * (like.ndim - g.ndim))


# -- linear attention and its relatives --------------------------------------------------------------------------------


def decayed_sums(q: Tensor, k: Tensor, v: Tensor, write: Tensor, keep: Tensor) -> list[Tensor]:
    """`S_t = keep_t S_{t−1} + write_t k_tᵀ v_t`, `y_t = q_t S_t`."""
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    rows = []
    for t in range(q.shape[2]):
        state = spread(keep[:, :, t], state) * state + spread(write[:, :, t], state) * outer(k[:, :, t], v[:, :, t])
        rows.append(times(q[:, :, t], state))
    return rows


def linear_attention(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    q, k, v = views(p, x, num_heads)
    one = torch.ones_like(q[..., 0])
    return output(p, x, decayed_sums(q, k, v, one, one))


def linear_attention_elu(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    q, k, v = views(p, x, num_heads)
    one = torch.ones_like(q[..., 0])
    return output(p, x, decayed_sums(F.elu(q) + 1, F.elu(k) + 1, v, one, one))


def retnet(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`γ_h = 1 − 2^(−5−h)`; q and k are turned by their position."""
    q, k, v = views(p, x, num_heads)
    q, k = (rope(z, list(range(x.shape[1]))) for z in (q, k))
    one = torch.ones_like(q[..., 0])
    decay = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(num_heads)], dtype=x.dtype).view(1, -1, 1)
    return output(p, x, decayed_sums(q, k, v, one, decay * one))


def mamba2(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`h_t = exp(−Δ_t a) h_{t−1} + Δ_t k_tᵀ v_t`, `Δ = softplus(θ x + c)`."""
    q, k, v = views(p, x, num_heads)
    step = F.softplus(gate(p, "decay_gate.", x))
    return output(p, x, decayed_sums(q, k, v, step, softplus_decay(p, "decay_gate.", x)))


def softplus_decay(p: Parameters, name: str, x: Tensor) -> Tensor:
    """`exp(−A softplus(θ x + c))` per head, `[B, H, T]`."""
    rate = p[f"optimizer.{name}log_rate"].exp().view(1, -1, 1)
    return torch.exp(-rate * F.softplus(gate(p, name, x)))


def unit(z: Tensor) -> Tensor:
    return z / z.norm(dim=-1, keepdim=True)


def rule(
    q: Tensor, k: Tensor, v: Tensor, erase: Tensor, remove: Tensor, decay: Tensor, eta: Tensor, decayed: bool = True
) -> list[Tensor]:
    """`S_t = Diag(a_t) S_{t−1} − η_t (remove_tᵀ (erase_t S') − k_tᵀ v_t)`, S' after its decay or before, `y_t = q_t S_t`."""
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    rows = []
    for t in range(q.shape[2]):
        kept = decay[:, :, t].unsqueeze(-1) * state
        made = times(erase[:, :, t], kept if decayed else state)
        change = outer(remove[:, :, t], made) - outer(k[:, :, t], v[:, :, t])
        state = kept - spread(eta[:, :, t], state) * change
        rows.append(times(q[:, :, t], state))
    return rows


def delta_net(p: Parameters, x: Tensor, num_heads: int, b: int, decays: bool = False) -> Tensor:
    """`S_t = α_t S_{t−1} − β_t k_tᵀ (k_t α_t S_{t−1} − v_t)`, with q and k of unit length; α = 1 without decays."""
    q, k, v = views(p, x, num_heads)
    q, k = unit(F.silu(q)), unit(F.silu(k))
    keep = softplus_decay(p, "decay_gate.", x).unsqueeze(-1).expand_as(k) if decays else torch.ones_like(k)
    return output(p, x, rule(q, k, v, k, k, keep, torch.sigmoid(gate(p, "lr_", x))))


def gated_delta_net(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    return delta_net(p, x, num_heads, b, decays=True)


# -- TTT-Linear and TTT-MLP --------------------------------------------------------------------------------------------


def causal_conv(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Depthwise, the last tap at the token itself; `u` `[B, T, D]`, weight `[D, 1, width]`."""
    width, rows = weight.shape[-1], []
    for t in range(u.shape[1]):
        y = bias
        for tap in range(width):
            if t - (width - 1) + tap >= 0:
                y = y + weight[:, 0, tap] * u[:, t - (width - 1) + tap]
        rows.append(y)
    return torch.stack(rows, 1)


def output_gradient(z: Tensor, target: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Of `½‖LN(z) − target‖²` with respect to z, in closed form."""
    normed, s = standardize(z)
    back = scale * (scale * normed + shift - target)
    return (back - back.mean(-1, keepdim=True) - normed * (back * normed).mean(-1, keepdim=True)) / s


def gelu_slope(z: Tensor) -> Tensor:
    """Derivative of the tanh-GELU."""
    inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z**2)
    return 0.5 * (1 + torch.tanh(inner)) + 0.5 * z * (1 - torch.tanh(inner) ** 2) * slope


def linear_predict(w: Parameters, x: Tensor) -> Tensor:
    return times(x, w["w1"]) + w["b1"]


def linear_gradient(w: Parameters, k: Tensor, target: Tensor, scale: Tensor, shift: Tensor) -> Parameters:
    g = output_gradient(linear_predict(w, k), target, scale, shift)
    return {"w1": outer(k, g), "b1": g}


def mlp_predict(w: Parameters, x: Tensor) -> Tensor:
    return times(F.gelu(times(x, w["w1"]) + w["b1"], approximate="tanh"), w["w2"]) + w["b2"]


def mlp_gradient(w: Parameters, k: Tensor, target: Tensor, scale: Tensor, shift: Tensor) -> Parameters:
    before = times(k, w["w1"]) + w["b1"]
    hidden = F.gelu(before, approximate="tanh")
    g2 = output_gradient(times(hidden, w["w2"]) + w["b2"], target, scale, shift)
    g1 = times(g2, w["w2"].mT) * gelu_slope(before)
    return {"w1": outer(k, g1), "b1": g1, "w2": outer(hidden, g2), "b2": g2}


def ttt(
    p: Parameters, x: Tensor, num_heads: int, b: int, base_lr: float, predict: Callable, gradients: Callable
) -> Tensor:
    """`W_t = W_start − τ_i Σ_j lr_j ∇ℓ_j(W_start)`, token i of its mini-batch of b."""
    count, shared = x.shape[1], x @ p["task.q.weight"].T
    places = [t % b for t in range(count)]
    q, k = (
        rope(heads_of(causal_conv(shared, p[f"task.conv_{n}.weight"], p[f"task.conv_{n}.bias"]), num_heads), places)
        for n in ("q", "k")
    )
    v = heads_of(x @ p["task.v.weight"].T, num_heads)
    lr = base_lr * torch.sigmoid(gate(p, "lr_", x)) / q.shape[-1]
    share = 1 / torch.arange(1, b + 1, dtype=x.dtype)
    corner = p["optimizer.token_step_offset"][0] + 15 / 16 * share
    tau = (corner + (corner**2 + share**2 / 4).sqrt()) / 2
    scale, shift = p["learner.slow.norm_scale"], p["learner.slow.norm_bias"]
    start = now = weights_of(p, x.shape[0])
    total: Parameters = {}
    rows = []
    for t, place in enumerate(places):
        if place == 0:
            start, total = now, {name: torch.zeros_like(w) for name, w in start.items()}
        found = gradients(start, k[:, :, t], v[:, :, t] - k[:, :, t], scale, shift)
        total = {name: total[name] + spread(lr[:, :, t], g) * g for name, g in found.items()}
        now = {name: w - tau[place] * total[name] for name, w in start.items()}
        rows.append(residual_norm(p, q[:, :, t], predict(now, q[:, :, t])))
    return output(p, x, rows)


def ttt_linear(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    return ttt(p, x, num_heads, b, 1.0, linear_predict, linear_gradient)


def ttt_mlp(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    return ttt(p, x, num_heads, b, 0.1, mlp_predict, mlp_gradient)


# -- memories that move once per chunk ---------------------------------------------------------------------------------


def titans(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """Gradients at W_0 of the mean squared error; at a chunk's end `S_j = β_j S_{j−1} − g_j`,
    `W_j = (1 − α_j) W_{j−1} + S_j`.

    β_j and 1 − α_j are sigmoids of the chunk's mean. Token t reads after ⌊(t+1)/b⌋ chunks.
    """
    q, k, v = views(p, x, num_heads)
    q, k = unit(q), unit(k)
    lr = torch.sigmoid(gate(p, "lr_", x))
    momentum, keep = gate(p, "momentum_gate.", x), gate(p, "decay_gate.", x)
    start = now = weights_of(p, x.shape[0])
    memory = {name: torch.zeros_like(w) for name, w in start.items()}
    total = dict(memory)
    rows = []
    for t in range(x.shape[1]):
        loss = (residual_norm(p, k[:, :, t], mlp_predict(start, k[:, :, t])) - v[:, :, t]).square().mean(-1)
        found = gradient(loss.sum(), start)
        total = {name: total[name] + spread(lr[:, :, t], g) * g for name, g in found.items()}
        if (t + 1) % b == 0:
            chunk = slice(t + 1 - b, t + 1)
            beta, kept = (torch.sigmoid(z[:, :, chunk].mean(-1)) for z in (momentum, keep))
            memory = {name: spread(beta, s) * s - total[name] for name, s in memory.items()}
            now = {name: spread(kept, w) * w + memory[name] for name, w in now.items()}
            total = {name: torch.zeros_like(g) for name, g in total.items()}
        rows.append(residual_norm(p, q[:, :, t], mlp_predict(now, q[:, :, t])))
    return output(p, x, rows)


MUON = [(3.4445, -4.7750, 2.0315)] * 5
LACT = [
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]  # fmt: skip


def polar_factor(matrix: Tensor, steps: list[tuple[float, float, float]]) -> Tensor:
    """Five Newton–Schulz steps, from a matrix of norm 1 but for an ε of 1e-7."""
    x = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix
    x = x / (x.square().sum((-2, -1), keepdim=True) + 1e-14).sqrt()
    for first, third, fifth in steps:
        a = x @ x.mT
        x = first * x + third * (a @ x) + fifth * (a @ a @ x)
    return x.mT if matrix.shape[-2] > matrix.shape[-1] else x


def lact(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`f(x) = (silu(x W0) ∘ x W2) W1`, `ℓ = −⟨v, f(k)⟩`; a token reads the weights that earlier chunks left.

    At a chunk's end `m ← g + μ̄ m` with its mean gate μ̄, `W ← W + polar(m)`, and the weights of each output regain
    their norm in W0.
    """
    q, k, v = views(p, x, num_heads)
    q, k = unit(F.silu(q)), unit(F.silu(k))
    return output(p, x, lact_rows(p, x, (q, k, v), num_heads, b, MUON))


def lact_rows(
    p: Parameters,
    x: Tensor,
    views: tuple[Tensor, Tensor, Tensor],
    num_heads: int,
    b: int,
    steps: list[tuple[float, float, float]],
) -> list[Tensor]:
    q, k, v = views
    projected = torch.einsum("btd,nd->btn", x, p["optimizer.rate_weight"]) + p["optimizer.rate_bias"]
    lr = F.softplus(projected).unflatten(-1, (num_heads, 3)).transpose(1, 2)  # [B, H, T, matrix]
    momentum = torch.sigmoid(gate(p, "momentum_gate.", x))
    start = now = weights_of(p, x.shape[0])
    memory = {name: torch.zeros_like(w) for name, w in start.items()}
    total = dict(memory)
    rows = []
    for t in range(x.shape[1]):
        rows.append(times(F.silu(times(q[:, :, t], now["w0"])) * times(q[:, :, t], now["w2"]), now["w1"]))
        before, other = times(k[:, :, t], now["w0"]), times(k[:, :, t], now["w2"])
        back = times(v[:, :, t], now["w1"].mT)
        sigma = torch.sigmoid(before)
        step = {
            "w0": outer(k[:, :, t], back * other * sigma * (1 + before * (1 - sigma))),
            "w1": outer(F.silu(before) * other, v[:, :, t]),
            "w2": outer(k[:, :, t], back * F.silu(before)),
        }
        for i, name in enumerate(step):
            total[name] = total[name] + spread(lr[:, :, t, i], step[name]) * step[name]
        if (t + 1) % b == 0:
            mean = momentum[:, :, t + 1 - b : t + 1].mean(-1)
            memory = {name: total[name] + spread(mean, m) * m for name, m in memory.items()}
            total = {name: torch.zeros_like(g) for name, g in total.items()}
            for name, m in memory.items():
                moved = now[name] + polar_factor(m, steps)
                before, after = ((w.square().sum(-2, keepdim=True) + 1e-12).sqrt() for w in (start[name], moved))
                now = now | {name: moved / after * before}
    return rows


# -- layers whose state is the data ------------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, window: int, always: tuple[Tensor, ...] = ()) -> list[Tensor]:
    """Softmax over the last `window` keys, for every query, and over one more key and value `[H, d]` of every head."""
    rows = []
    for t in range(q.shape[2]):
        seen = slice(max(0, t + 1 - window), t + 1)
        keys, values = k[:, :, seen], v[:, :, seen]
        if always:
            more = (one.expand_as(k[:, :, 0]).unsqueeze(2) for one in always)
            keys, values = (torch.cat([one, z], 2) for one, z in zip(more, (keys, values), strict=True))
        scores = torch.einsum("bhd,bhsd->bhs", q[:, :, t], keys) / math.sqrt(q.shape[-1])
        weight = scores.exp()
        rows.append(torch.einsum("bhs,bhsd->bhd", weight / weight.sum(-1, keepdim=True), values))
    return rows


def attention(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    return window_attention(p, x, num_heads, b, window=x.shape[1])


def window_attention(p: Parameters, x: Tensor, num_heads: int, b: int, window: int = 3) -> Tensor:
    q, k, v = views(p, x, num_heads)
    q, k = (rope(z, list(range(x.shape[1]))) for z in (q, k))
    always = [p[f"learner.slow.{name}"] for name in ("k0", "v0") if f"learner.slow.{name}" in p]
    return output(p, x, attend(q, k, v, window, tuple(always)))


def nearest(p: Parameters, x: Tensor, num_heads: int, b: int, neighbours: int = 3) -> Tensor:
    q, k, v = views(p, x, num_heads)
    rows = []
    for t in range(x.shape[1]):
        distance = (q[:, :, t].unsqueeze(2) - k[:, :, : t + 1]).norm(dim=-1)
        index = distance.argsort(-1)[..., :neighbours]
        rows.append(v.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, v.shape[-1])).mean(2))
    return output(p, x, rows)


def kernel_ridge(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`κ(q, K) (κ(K, K) + I)⁻¹ V` with the Gaussian kernel, solved anew at every token."""
    q, k, v = views(p, x, num_heads)

    def kernel(a: Tensor, c: Tensor) -> Tensor:
        return torch.exp(-(a.unsqueeze(-2) - c.unsqueeze(-3)).square().sum(-1) / (2 * math.sqrt(a.shape[-1])))

    rows = []
    for t in range(x.shape[1]):
        data = k[:, :, : t + 1]
        system = kernel(data, data) + torch.eye(t + 1, dtype=x.dtype)
        fit = torch.linalg.solve(system, v[:, :, : t + 1])
        rows.append((kernel(q[:, :, t : t + 1], data) @ fit).squeeze(2))
    return output(p, x, rows)


# -- networks whose tokens look at each other --------------------------------------------------------------------------


def transformer_block(w: Parameters, tokens: list[Tensor]) -> list[Tensor]:
    """`h = x + A(LN(x))`, `f(x) = h + MLP(LN(h))`, one attention head over the tokens so far; each token is
    `[B, H, d]`."""
    keys, values, ys = [], [], []
    for x in tokens:
        normed = standardize(x)[0] * w["scale1"] + w["shift1"]
        keys.append(times(normed, w["wk"]))
        values.append(times(normed, w["wv"]))
        query = times(normed, w["wq"])
        scores = torch.stack([(query * key).sum(-1) for key in keys], -1) / math.sqrt(x.shape[-1])
        share = scores.softmax(-1)
        seen = sum(share[..., j : j + 1] * value for j, value in enumerate(values))
        h = x + times(seen, w["wo"])
        normed = standardize(h)[0] * w["scale2"] + w["shift2"]
        ys.append(h + times(F.gelu(times(normed, w["w1"]) + w["b1"], approximate="tanh"), w["w2"]) + w["b2"])
    return ys


def ttt_block(w: Parameters, tokens: list[Tensor]) -> list[Tensor]:
    """TTT-Linear with one head and mini-batches of four tokens, without token steps; its own parameters are the weights
    `w`."""
    w = {name.removeprefix("layer/"): value for name, value in w.items()}
    start = now = {name: w[f"learner/init/{name}"].squeeze(2) for name in ("w1", "b1")}
    scale, shift = w["learner/slow/norm_scale"].squeeze(2), w["learner/slow/norm_bias"].squeeze(2)
    ys = []
    for place, x in enumerate(tokens):
        if place % 4 == 0:
            start = now
        q, k, v = (times(x, w[f"task/{name}/weight"].mT) for name in ("q", "k", "v"))
        logit = (x * w["optimizer/lr_weight"].squeeze(2)).sum(-1) + w["optimizer/lr_bias"].squeeze(2)
        lr = 0.1 * torch.sigmoid(logit) / x.shape[-1]
        found = linear_gradient(start, k, v - k, scale, shift)
        now = {name: now[name] - spread(lr, g) * g for name, g in found.items()}
        y = q + standardize(linear_predict(now, q))[0] * scale + shift
        y = standardize(y)[0] * w["norm/weight"] + w["norm/bias"]
        ys.append(times(y, w["out/weight"].mT))
    return ys


def nested(p: Parameters, x: Tensor, num_heads: int, b: int, block: Callable, residual: bool) -> Tensor:
    """`W ← W − Σ η_s ∇ℓ_s(W)` after each mini-batch, `ℓ = ½‖f(k) − v‖²`; f sees the mini-batch, queries read the last
    weights."""
    q, k, v = views(p, x, num_heads)
    lr = 0.1 * torch.sigmoid(gate(p, "lr_", x)) / q.shape[-1]
    now = weights_of(p, x.shape[0])
    rows = []

    def answers(x: Tensor) -> list[Tensor]:
        ys = block(now, list(x.unbind(2)))
        return [
            residual_norm(p, token if residual else torch.zeros_like(token), y)
            for token, y in zip(x.unbind(2), ys, strict=True)
        ]

    for begin in range(0, x.shape[1], b):
        piece = slice(begin, begin + b)
        rows += answers(q[:, :, piece])
        if begin + b <= x.shape[1]:
            losses = [0.5 * (y - v[:, :, begin + i]).square().sum(-1) for i, y in enumerate(answers(k[:, :, piece]))]
            found = gradient(sum((lr[:, :, begin + i] * loss).sum() for i, loss in enumerate(losses)), now)
            now = {name: w - found[name] for name, w in now.items()}
    return output(p, x, rows)


def nested_transformer(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    return nested(p, x, num_heads, b, transformer_block, residual=False)


def nested_ttt(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    return nested(p, x, num_heads, b, ttt_block, residual=True)


# -- layers for images: every token sees all tokens --------------------------------------------------------------------


def mttt(p: Parameters, x: Tensor, num_heads: int, mlp: bool) -> Tensor:
    """One step on `(1/2Nd) Σ_t ‖LN(f(φ x_t) g + c) − x_t‖²` per head, then `y_t = h(f(ψ x_t; W_1))`; the gradient is
    written out.

    MTTT-Linear has no norm in its decoder.
    """
    k, q = (heads_of(x @ p[f"task.{name}.weight"].T + p[f"task.{name}.bias"], num_heads) for name in ("phi", "psi"))
    count, width = x.shape[1], k.shape[-1]
    start = now = weights_of(p, x.shape[0])
    decoder = p["task.decoder"].unsqueeze(0)
    for t in range(count):
        token, target = k[:, :, t], x[:, t].unsqueeze(1)
        before = times(token, start["w1"]) + start.get("b1", 0)
        hidden = F.gelu(before, approximate="tanh")
        z = times(hidden, start["w2"]) + start["b2"] if mlp else before
        o = times(z, decoder) + p["task.decoder_bias"]
        error = (output_gradient(o, target, p["task.norm_scale"], p["task.norm_bias"]) if mlp else o - target) / (
            count * width
        )
        dz = times(error, decoder.mT)
        if mlp:
            du = times(dz, start["w2"].mT) * gelu_slope(before)
            found = {"w1": outer(token, du), "b1": du, "w2": outer(hidden, dz), "b2": dz}
        else:
            found = {"w1": outer(token, dz)}
        now = {name: w - found[name] for name, w in now.items()}
    predict = mlp_predict if mlp else lambda w, z: times(z, w["w1"])
    return output(p, x, [predict(now, q[:, :, t]) for t in range(count)])


def mttt_linear(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    return mttt(p, x, num_heads, mlp=False)


def mttt_mlp(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    return mttt(p, x, num_heads, mlp=True)


def to_all(
    p: Parameters, x: Tensor, num_heads: int, kernel: Callable[[Tensor, Tensor], Tensor], normalize: bool
) -> Tensor:
    """`y_t = Σ_s κ(q_t, k_s) v_s / Σ_s κ(q_t, k_s)` over all tokens s, or divided by their number."""
    q, k, v = (heads_of(x @ p[f"task.{name}.weight"].T + p[f"task.{name}.bias"], num_heads) for name in ("q", "k", "v"))
    rows = []
    for t in range(x.shape[1]):
        weight = torch.stack([kernel(q[:, :, t], k[:, :, s]) for s in range(x.shape[1])], -1)
        weight = weight / (weight.sum(-1, keepdim=True) if normalize else x.shape[1])
        rows.append(torch.einsum("bhs,bhsd->bhd", weight, v))
    return output(p, x, rows)


def self_attention(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    return to_all(p, x, num_heads, lambda q, k: ((q * k).sum(-1) / math.sqrt(q.shape[-1])).exp(), normalize=True)


def linear_attention_image(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`q (kᵀ v) / (N d)`."""
    return to_all(p, x, num_heads, lambda q, k: (q * k).sum(-1) / q.shape[-1], normalize=False)


def linear_attention_elu_image(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    return to_all(p, x, num_heads, lambda q, k: ((F.elu(q) + 1) * (F.elu(k) + 1)).sum(-1), normalize=True)


# -- two layers in the place of one ------------------------------------------------------------------------------------


def within(p: Parameters, prefix: str) -> Parameters:
    """The parameters of one of the layers."""
    return {name.removeprefix(prefix): x for name, x in p.items() if name.startswith(prefix)}


def rms(x: Tensor, scale: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * scale


def titans_mag(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    attended = window_attention(within(p, "first."), x, num_heads, b)
    remembered = titans(within(p, "second."), x, num_heads, b)
    return rms(attended, p["norms.0.weight"]) * torch.sigmoid(rms(remembered, p["norms.1.weight"]))


def titans_mal(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    remembered = titans(within(p, "first."), x, num_heads, b)
    return window_attention(within(p, "second."), remembered, num_heads, b)


def lact_block(p: Parameters, x: Tensor, num_heads: int, b: int, memory_heads: int | None = None) -> Tensor:
    """q, k, v of one projection, q and k normed over D; attention turns them, and the memory its own of them:
    `u = silu(s ∘ q + o)`, of unit length in each of its heads, turned in those of the attention; `silu(v)`.
    """
    few = num_heads if memory_heads is None else memory_heads
    q, k, v = (x @ p[f"first.task.{name}.weight"].T for name in ("q", "k", "v"))
    q, k = rms(q, p["first.task.q_norm.weight"]), rms(k, p["first.task.k_norm.weight"])
    positions = list(range(x.shape[1]))
    turned = [rope(heads_of(z, num_heads), positions) for z in (q, k)]
    attended = torch.stack(attend(*turned, heads_of(v, num_heads), window=3), 1).flatten(2)
    own = []
    for i, z in enumerate((q, k)):
        u = heads_of(F.silu(z * p["second.task.qk_scale"][i] + p["second.task.qk_offset"][i]), few)
        u = u / (u.norm(dim=-1, keepdim=True) + 1e-5)
        u = rope(heads_of(u.transpose(1, 2).flatten(2), num_heads), positions)
        own.append(heads_of(u.transpose(1, 2).flatten(2), few))
    memory = within(p, "second.")
    rows = lact_rows(memory, x, (own[0], own[1], heads_of(F.silu(v), few)), few, b, LACT)
    remembered = rms(torch.stack(rows, 1), p["head_norm.weight"])  # [B, T, H, d]
    scale = F.silu(x @ p["head_scale.weight"].T + p["head_scale.bias"])
    return (attended + (remembered * scale.unsqueeze(-1)).flatten(2)) @ p["out.weight"].T
