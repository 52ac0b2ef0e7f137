"""What a `TTTLayer` computes, written a second time: a plain loop over tokens in float64, from the equations alone.

Of the layer it takes settings and parameters, and none of its code: no form, accessor, coefficient, frame or kernel. So
it is slow, and short enough to be read as a specification. `outputs` takes calls apart into documents, `Document` reads
one of them token by token; tasks, losses and learners are in `oracle_parts.py`. Random numbers (noise, permutations)
are the package's own draws.

Of one document: x `[T, D]`, views `[T, H, d]`, gates `[T, H]`; a weight is `[H, 1, *shape]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import oracle_parts as parts
import torch
import torch.nn.functional as F
from oracle_parts import Pair, Weights, settings
from torch import Tensor

from metattt.state import WHOLE_CALL

RULES = (
    *("GradientDescent", "Momentum", "DeltaGradientDescent", "ChannelDecay", "Preconditioned", "StateGated", "KeyStep"),
    *("WholeSequence", "BlockMomentum", "Bounded", "Sign", "Adam", "MirrorDescent", "Append"),
)
LEARNED = ("shared", "per_head")  # gates of the token
NOT_COVERED = {
    "mixers, Combined": "they are no TTTLayer; test_mamba.py and test_combined.py have references of their own",
    "parts of third parties": "nothing is known of them but their code",
    "learner=recurrent_ridge, stopped early": "with a tolerance, or fewer steps than features, answers are not "
    "exact, and their derivatives are those of the exact solution",
    "task.seed=null or optimizer.seed=null": "the numbers are drawn anew for every sequence or call",
    "learner=module with norms or attention": "torch's own have wrong third derivatives, and none could be compared",
    "learner=depthwise": "tokens see later ones; test_vittt.py compares it with torch's, test_layer_table.py with the released block",
    "optimizer.mini_batch_size=null": "a mini-batch is a call; inner/test_whole_call.py compares it with one of that size",
    "optimizer=preconditioned with several pairs": "the curvature is that of one key a token",
}


def not_covered(layer: Any) -> str | None:
    """The entry of `NOT_COVERED` that a layer falls under, if any."""
    task, learner, rule = (settings(part) for part in (layer.task, layer.learner, layer.optimizer))
    steps = layer.dim // layer.num_heads if getattr(learner, "solver", "exact") != "exact" else 0
    noisy, sampled = getattr(task, "corruption", "none") != "none", getattr(rule, "sampling", "full") != "full"
    known = hasattr(parts.Tokens, f"of_{task.kind.lower()}") and learner.kind in (*parts.LEARNERS, "NestedTTT")
    found = {
        "learner=depthwise": learner.kind == "Depthwise",
        "optimizer.mini_batch_size=null": layer.optimizer.mini_batch_size == WHOLE_CALL,
        "parts of third parties": not known or rule.kind not in RULES,
            "learner=recurrent_ridge, stopped early": steps and (learner.iterations < steps or learner.tolerance > 0),
        "task.seed=null or optimizer.seed=null": (noisy and task.seed is None) or (sampled and rule.seed is None),
        "optimizer=preconditioned with several pairs": rule.kind == "Preconditioned"
        and task.kind in ("Pairs", "WindowViews"),
    }
    return next((name for name, applies in found.items() if applies), None)


# -- a call ------------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """What one call is given: x `[B, T, D]`, and flags `[B, T]`."""

    x: Tensor
    mask: Tensor | None = None
    reset: Tensor | None = None


def outputs(layer: Any, calls: Sequence[Call]) -> list[Tensor]:
    """The outputs `[B, T, D]` of calls that hand their state on: every document starts from W0 and reads its own
    tokens, padding is not there, and its outputs are 0. A start that is marked on padding belongs to the next token."""
    p = dict(layer.named_parameters())
    ys = [[list(torch.zeros_like(sequence).unbind(0)) for sequence in call.x] for call in calls]
    for i in range(len(calls[0].x)):
        documents: list[list[tuple[int, int]]] = [[]]  # call and column of every token
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


# -- rules: how gradients move the weights, and which of them a query reads --------------------------------------------


def spread(gate: Tensor, w: Tensor) -> Tensor:
    """A number for each head, to multiply `[H, 1, *shape]`."""
    return gate.view(-1, *(1,) * (w.ndim - 1))


def times(gate: Tensor | float | None, w: Weights | None) -> Weights:
    """The weights times a number, or one for each head. No gate is 1; weights that are not there are 0."""
    if gate is None or w is None:
        return w or {}
    return {name: (spread(gate, x) if isinstance(gate, Tensor) else gate) * x for name, x in w.items()}


def plus(a: Weights, b: Weights) -> Weights:
    return {name: a[name] + x if name in a else x for name, x in b.items()}


class Memory(NamedTuple):
    """What is carried from token to token: W_a, the point of a batch anchor, the newest weights, what came together
    since the commit, S, the second moment with its age, the dual state, and the tokens since the commit."""

    commit: Weights
    anchor: Weights
    newest: Weights
    update: Weights
    momentum: Weights
    second: Weights
    age: int
    dual: Weights
    seen: tuple[int, ...] = ()


class Document:
    """One document, read token by token: x `[T, D]`; `cuts` are the tokens at which later calls begin."""

    def __init__(self, layer: Any, p: Weights, x: Tensor, cuts: Sequence[int], sequence: int):
        self.layer, self.p, self.x, self.heads, self.width = layer, p, x, layer.num_heads, layer.dim // layer.num_heads
        self.task, self.learner, self.rule = (settings(one) for one in (layer.task, layer.learner, layer.optimizer))
        self.b, self.anchor = layer.optimizer.mini_batch_size, layer.optimizer.anchor
        self.read, self.steps = layer.optimizer.read, layer.optimizer.steps
        self.calls = list(zip([0, *cuts], [*cuts, len(x)], strict=True))
        self.w0, self.slow = (
            {name.removeprefix(kind): w.unsqueeze(1) for name, w in p.items() if name.startswith(kind)}
            for kind in ("learner.init.", "learner.slow.")
        )
        self.mixes = layer.learner.mixes_tokens
        self.by_block = self.rule.kind in ("BlockMomentum", "Bounded", "Sign", "Adam", "MirrorDescent")
        self.factors = self.of_weights(layer.learner.step_scale)
        self.graph = any(w.requires_grad for w in (x, *p.values()))
        self.tokens = parts.Tokens(layer, p, x, sequence)
        self.gates()

    def of_weights(self, given: Any) -> dict[str, float]:
        """The factor of every fast weight's gradient: by name, or ρ^(L−l) in layer l of L."""
        if not isinstance(given, float | int):
            return {name: (given or {}).get(name, 1.0) for name in self.w0}
        found = parts.layers_of(self.learner.kind, list(self.w0))
        order = list(dict.fromkeys(found.values()))
        return {name: float(given) ** (len(order) - 1 - order.index(found[name])) for name in self.w0}

    # -- gates of the tokens -------------------------------------------------------------------------------------------

    def logit(self, name: str) -> Tensor:
        return (self.x @ self.p[f"optimizer.{name}weight"].T + self.p[f"optimizer.{name}bias"]).expand(-1, self.heads)

    def gate(self, name: str, source: str, initial: float = 0.0) -> Tensor | None:
        """A gate `[T, H]`, by where it comes from."""
        if source == "none":
            return None
        if source == "constant":
            return self.x.new_full((len(self.x), self.heads), initial)
        if source == "retnet":
            return (1 - 2.0 ** (-5 - torch.arange(self.heads).double())).expand(len(self.x), -1)
        logit = self.logit(f"{name}.")
        if source in ("softplus", "mamba2"):
            return torch.exp(-self.p[f"optimizer.{name}.log_rate"].exp() * F.softplus(logit))
        return torch.sigmoid(logit)

    def gates(self) -> None:
        """η, α, β `[T, H]`, τ `[H, b]`, rates of weights `[T, H, n]`, decays of channels `[T, H, d]`, gates of data."""
        s, p, x, one = self.rule, self.p, self.x, self.x.new_ones(len(self.x), self.heads)
        self.alpha = self.beta = self.kappa = self.tau = self.rates = self.channels = None
        if s.kind == "WholeSequence":
            count = torch.tensor([stop - start for start, stop in self.calls for _ in range(start, stop)]).unsqueeze(1)
            self.eta = one * s.base_lr / (self.width * count / (self.steps if s.sampling == "sgd" else 1))
            return
        if s.kind != "ChannelDecay" and getattr(s, "decay", "channel") != "channel":
            self.alpha = self.gate("decay_gate", s.decay, s.decay_init)
        if s.kind == "Append":
            write = F.softplus(self.logit("decay_gate.")) if s.write == "step" else self.gate("write_gate", s.write)
            keep, levels = one if self.alpha is None else self.alpha, None
            if s.levels:
                logit = torch.einsum("td,hnd->thn", x, p["optimizer.level_weight"])
                levels = F.softplus(p["optimizer.level_scale"] * logit)
            if s.channels:
                self.channels = torch.sigmoid(torch.einsum("td,hnd->thn", x, p["optimizer.channel_weight"])) ** (1 / s.temperature)
            self.data = one if write is None else write, keep, levels, self.channels, self.gate("blend_gate", s.blend)
            return
        self.scale = s.base_lr / (self.width if s.lr_scale == "head_dim" else 1)
        if getattr(s, "decay", "") == "mamba2":
            self.eta = F.softplus(self.logit("decay_gate."))
        else:
            self.eta = self.scale * (torch.sigmoid(self.logit("lr_")) if s.lr in LEARNED else one)
        if hasattr(s, "momentum") and s.kind != "Preconditioned":
            self.beta = self.gate("momentum_gate", s.momentum, s.momentum_init)
        if hasattr(s, "write"):
            self.kappa = self.gate("write_gate", s.write, s.write_init)
        if s.kind == "GradientDescent" and s.token_steps != "none":
            share = 1 / torch.arange(1, self.b + 1).double()
            offset = p["optimizer.token_step_offset"].expand(self.heads, -1)
            z = 15 / 16 * share + offset
            squareplus = (z + (z**2 + share**2 / 4).sqrt()) / 2
            self.tau = torch.relu(share + offset) if s.token_step_map == "relu" else squareplus
        if s.kind == "BlockMomentum":
            if s.pool == "logits":  # the gate is made of their mean
                self.alpha = self.logit("decay_gate.") if s.decay in LEARNED else self.alpha
                self.beta = self.logit("momentum_gate.") if s.momentum in LEARNED else self.beta
            if s.lr == "per_weight":
                rates = F.softplus(x @ p["optimizer.rate_weight"].T + p["optimizer.rate_bias"])
                self.eta, self.rates = one, rates.unflatten(1, (self.heads, -1))
        change = getattr(self, f"prepare_{s.kind.lower()}", None)
        self.tokens.pairs = self.tokens.pairs if change is None else change(self.tokens.pairs)

    def prepare_deltagradientdescent(self, pairs: list[list[Pair]]) -> list[list[Pair]]:
        self.eta = self.eta / (1 + self.eta)
        return [[one._replace(p=one.k + (one.k if one.p is None else one.p)) for one in some] for some in pairs]

    def prepare_channeldecay(self, pairs: list[list[Pair]], inside: str = "") -> list[list[Pair]]:
        """`inside`: the attribute of a rule that has these decays beside its own gates."""
        s = settings(self.layer.optimizer.channels) if inside else self.rule
        p = {name.replace(inside, "", 1): w for name, w in self.p.items() if inside in name}
        hidden = self.x if s.rank is None else self.x @ p["optimizer.down"].T
        z = (torch.tanh(hidden) if s.tanh else hidden) @ p["optimizer.up"].T + p["optimizer.bias"]
        z = z.unflatten(1, (self.heads, -1))
        if s.decay == "softplus":
            a = torch.exp(-p["optimizer.log_rate"].exp().view(1, -1, 1) * F.softplus(z))
        elif s.decay == "bounded":
            a = torch.exp(-s.strongest * torch.sigmoid(z))
        else:
            a = s.lower_bound + (1 - s.lower_bound) * torch.sigmoid(z) ** (1 / s.temperature)
        self.channels, written = a, 1 - a if s.tied else torch.ones_like(a)
        return [[one._replace(k=one.k * written[t]) for one in some] for t, some in enumerate(pairs)]

    def prepare_preconditioned(self, pairs: list[list[Pair]]) -> list[list[Pair]]:
        """`A_t = γ_t A_{t−1} + ω_t k_t²`, and k is as much longer as A says it has been used little."""
        s, found, curvature = self.rule, [], torch.zeros(self.heads, 1, dtype=self.x.dtype)
        pairs = self.prepare_channeldecay(pairs, "channels.") if s.decay == "channel" else pairs
        gamma, omega = self.gate("curvature_decay", s.curvature_decay), self.gate("curvature_step", "per_head")
        assert gamma is not None and omega is not None
        for t, (one,) in enumerate(pairs):
            curvature = gamma[t].unsqueeze(1) * curvature + omega[t].unsqueeze(1) * one.k.square()
            r = (curvature + 1e-6).log() - self.p["optimizer.centre"].unsqueeze(1)
            erased = one.k if one.p is None else one.p
            found.append([one._replace(k=one.k * s.squash ** (-r / (1 + r.abs())), p=erased)])
        return found

    def prepare_keystep(self, pairs: list[list[Pair]]) -> list[list[Pair]]:
        """A step as long as the key lets it be; a factor of each pair's loss."""

        def factor(t: int, one: Pair) -> Tensor:
            size = one.k.square().sum(-1)
            if self.rule.step == "projection":
                return 1 / (size + self.rule.eps)
            return (1 - torch.exp(-self.eta[t] * size)) / (self.eta[t] * size)

        return [[one._replace(weight=one.weight * factor(t, one)) for one in some] for t, some in enumerate(pairs)]

    # -- f, ℓ and G ----------------------------------------------------------------------------------------------------

    def predict(self, w: Weights, x: Tensor) -> Tensor:
        """`f(x; W)` of tokens `[H, n, d]` that see each other, if f looks at several."""
        w = self.slow | w
        f = parts.LEARNERS.get(self.learner.kind)
        return self.wrapped(w, x, self.nested(w, x) if f is None else f(self.learner, w, x, self.layer.learner))

    def nested(self, w: Weights, x: Tensor) -> Tensor:
        """A layer that reads the tokens of the mini-batch from its own W0: this oracle, once more, for every head."""
        inner, ys = self.layer.learner.module.layer, []
        for h in range(self.heads):
            own = {name.replace("/", ".").removeprefix("layer."): v[h, 0] for name, v in w.items() if "/" in name}
            ys.append(torch.stack(Document(inner, dict(inner.named_parameters()) | own, x[h], [], 0).outputs()))
        return torch.stack(ys)

    def wrapped(self, w: Weights, x: Tensor, y: Tensor) -> Tensor:
        if getattr(self.learner, "norm", False):
            y = parts.standardized(y) * w["norm_scale"] + w["norm_bias"]
        return x + y if getattr(self.learner, "residual", False) else y

    def trained(self, w: Weights, start: int, t: int, pair: Pair) -> Tensor:
        """`f(k_t; W)` `[H, d]`, for a pair of token t of the mini-batch that starts at `start`."""
        before = [self.tokens.pairs[s][0].k for s in range(start, t)] if self.mixes else []
        return self.predict(w, torch.stack([*before, pair.k], 1))[:, -1]

    def loss(self, w: Weights, start: int, t: int, pair: Pair) -> Tensor:
        return parts.losses(self.task, self.p, self.trained(w, start, t, pair), pair)

    def gradient(self, w: Weights, start: int, t: int, pair: Pair) -> Weights:
        """`∇ℓ(W)`, or with an erase view `bᵀ(p W) − kᵀ v`."""
        if pair.p is not None or pair.b is not None:
            (weight,) = w.values()
            p, b = (pair.k if z is None else z for z in (pair.p, pair.b))
            erased = b.unsqueeze(2) * (p.unsqueeze(1) @ weight[:, 0])
            found = [(erased - pair.k.unsqueeze(2) * pair.v.unsqueeze(1)).unsqueeze(1)]
        else:
            w = {name: x if x.requires_grad else x.detach().requires_grad_() for name, x in w.items()}
            total = self.loss(w, start, t, pair).sum()
            found = list(torch.autograd.grad(total, list(w.values()), create_graph=self.graph, materialize_grads=True))
        found = [g.detach() for g in found] if self.layer.outer == "first_order" else found
        return dict(zip(w, found, strict=True))

    def seen_by_commit(self, w: Weights, start: int, t: int) -> Tensor:
        """s_t of `state_gated`: what the last commit makes of the token."""
        (pair,) = self.tokens.pairs[t]
        if self.rule.step_gate == "loss":
            return self.loss(w, start, t, pair)
        if self.rule.step_gate == "alignment":
            return (self.trained(w, start, t, pair) * pair.v).sum(-1) / math.sqrt(pair.v.shape[-1])
        squares = [g.flatten(1).square().sum(1) for g in self.gradient(w, start, t, pair).values()]
        return (torch.stack(squares).sum(0) + 1e-12).sqrt()

    # -- one token, one commit -----------------------------------------------------------------------------------------

    def begin(self) -> Memory:
        w = self.w0
        if self.rule.kind == "MirrorDescent" and self.rule.retention != "elastic_net":
            w = {name: parts.mirror(self.rule, x) for name, x in w.items()}
        return Memory(w, w, w, {}, {}, {}, 0, self.w0)

    def token(self, m: Memory, t: int, start: int) -> Memory:
        """The memory after one more token of the mini-batch that starts at `start`."""
        s, eta, pairs = self.rule, self.eta[t], self.tokens.pairs[t]
        if s.kind == "StateGated":
            signal = self.seen_by_commit(m.commit, start, t)
            if s.step_gate_params == "learned":
                signal = self.p["optimizer.step_gate_scale"] * signal + self.p["optimizer.step_gate_bias"]
            eta = eta * torch.sigmoid(signal)
        rounds = [[pair] for pair in pairs] if self.task.kind == "Pairs" else [pairs]  # one by one, or together
        for i, some in enumerate(rounds):
            alpha = None if self.alpha is None or i else self.alpha[t]  # decays act once a token
            kept = m.newest if self.by_block else times(alpha, m.newest)
            if self.channels is not None and i == 0:
                kept = {name: self.channels[t].view(self.heads, 1, -1, 1) * w for name, w in kept.items()}
            online = kept if getattr(s, "gradient_at", "") == "decayed" else m.newest
            point = {"minibatch": m.commit, "batch": m.anchor, "online": online}[self.anchor]
            step: Weights = {}
            for pair in some:
                found = self.gradient(point, start, t, pair)
                rates = [1.0] * len(found) if self.rates is None else self.rates[t].unbind(1)
                for rate, (name, g) in zip(rates, list(found.items()), strict=True):
                    found[name] = -self.factors[name] * spread(eta * pair.weight * rate, g) * g
                step = plus(step, found)
            m = self.moved(m, t, kept, alpha, step)
        return m._replace(seen=(*m.seen, t))

    def moved(self, m: Memory, t: int, kept: Weights, alpha: Tensor | None, step: Weights) -> Memory:
        """`S_t = β_t S_{t−1} − η_t G_t`, `W_t = α_t W_{t−1} + S_t`, or what other rules have in their place."""
        s = self.rule
        if s.kind == "MirrorDescent":
            return m._replace(dual=plus(times(alpha, m.dual), step))
        update = plus(m.update, step)
        if self.by_block:
            return m._replace(update=update)
        if self.tau is not None or getattr(s, "max_norm", None) is not None:  # W_t = W_a + τ_i min(1, c/‖U_t‖) U_t
            factor = self.x.new_ones(self.heads) if self.tau is None else self.tau[:, t % self.b]
            if s.max_norm is not None:
                size = torch.stack([x.flatten(1).square().sum(1) for x in update.values()]).sum(0)
                factor = factor * s.max_norm / size.clamp(min=s.max_norm**2).sqrt()
            return m._replace(update=update, newest=plus(m.commit, times(factor, update)))
        beta = None if self.beta is None else self.beta[t]
        momentum = step if beta is None else plus(times(beta, m.momentum), step)
        written = plus(times(beta, momentum), step) if getattr(s, "nesterov", False) else momentum
        w = plus(kept, times(None if self.kappa is None else self.kappa[t], written))
        if getattr(s, "decay_to_init", False) and alpha is not None:
            w = plus(times(1 - alpha, self.w0), w)
        return m._replace(newest=w, momentum=momentum)

    def newest(self, m: Memory) -> Weights:
        """W_t; of a rule that acts once per mini-batch, as if it ended here."""
        return m.newest if not self.by_block else self.commit(m).commit if m.seen else m.commit

    def commit(self, m: Memory) -> Memory:
        """The memory when a mini-batch is complete."""
        after = getattr(self, f"commit_{self.rule.kind.lower()}")(m) if self.by_block else m._replace(commit=m.newest)
        return after._replace(update={}, seen=())

    def commit_sign(self, m: Memory) -> Memory:
        return m._replace(commit=plus(m.commit, {name: abs(self.scale) * u.sign() for name, u in m.update.items()}))

    def commit_bounded(self, m: Memory) -> Memory:
        after = {}
        for name, w in m.commit.items():
            mean = m.update[name] / len(m.seen)
            inputs = list(range(2, w.ndim - 1)) or [-1]  # every axis but the outputs'; of a vector all
            after[name] = w + mean / (mean.square().sum(inputs, keepdim=True).sqrt() + 1)
        return m._replace(commit=after)

    def commit_adam(self, m: Memory) -> Memory:
        s, age, step = self.rule, m.age + 1, {}
        square = {name: u**2 for name, u in m.update.items()}
        first = plus(times(s.beta1, m.momentum), times(1 - s.beta1, m.update))
        second = plus(times(s.beta2, m.second), times(1 - s.beta2, square))
        for name, x in first.items():
            root = (second[name] / (1 - s.beta2**age)).clamp(min=torch.finfo(x.dtype).tiny).sqrt()
            step[name] = abs(self.scale) * x / (1 - s.beta1**age) / (root + s.eps)
        return m._replace(commit=plus(m.commit, step), momentum=first, second=second, age=age)

    def commit_blockmomentum(self, m: Memory) -> Memory:
        s, after = self.rule, {}
        alpha, beta = (self.pooled(*gate, m.seen) for gate in ((self.alpha, s.decay), (self.beta, s.momentum)))
        momentum = m.update if beta is None else plus(times(beta, m.momentum), m.update)
        for name, w in times(alpha, m.commit).items():
            matrix, step = w.ndim == 4, momentum[name]
            w = w + (parts.polar(step, s.newton_schulz) if matrix and s.orthogonalize else step)
            if matrix and s.row_norm:
                lengths = [(x.square().sum(-2, keepdim=True) + 1e-12).sqrt() for x in (self.w0[name], w)]
                w = w * lengths[0] / lengths[1]
            after[name] = w
        return m._replace(commit=after, momentum=momentum)

    def pooled(self, gate: Tensor | None, source: str, seen: Sequence[int]) -> Tensor | None:
        """The mean of a gate over a mini-batch, or the gate of its mean logit."""
        if gate is None:
            return None
        mean = gate[list(seen)].mean(0)
        return torch.sigmoid(mean) if self.rule.pool == "logits" and source in LEARNED else mean

    def commit_mirrordescent(self, m: Memory) -> Memory:
        after, dual = {name: parts.mirror(self.rule, x) for name, x in m.dual.items()}, m.dual
        if self.rule.retention == "softmax":
            dual = {name: (x / parts.mass(self.rule, x)).log() for name, x in after.items()}
        return m._replace(commit=after, dual=after if self.rule.retention == "elastic_net" else dual)

    # -- the document --------------------------------------------------------------------------------------------------

    def outputs(self) -> list[Tensor]:
        """`[D]` of every token: answers of the heads, then norm, gate and projection."""
        p, norm = self.p, type(self.layer.norm).__name__
        learns = self.layer.learner.has_weights
        y = torch.stack(self.attended() if not learns else self.final() if self.read == "final" else self.answers())
        y = y if norm.startswith("Head") else y.flatten(1)  # a norm of every head, or of all of them
        if norm.endswith("LayerNorm"):
            y = parts.standardized(y, self.layer.norm.eps).flatten(1) * p["norm.weight"] + p["norm.bias"]
        elif norm.endswith("RMSNorm"):
            y = parts.root_mean_square(y, self.layer.norm.eps) * p["norm.weight"]
        y = y.flatten(1)
        if self.layer.gate is not None:
            gate, name = self.x, self.layer.gate_function
            for one in ("gate.0", "gate.1") if "gate.0.weight" in p else ("gate",):
                gate = parts.affine(p, one, gate)
            y = y * parts.ACTIVATIONS["gelu_tanh" if name == "gelu" else name](gate)
        return list(parts.affine(p, "out", y).unbind(0))

    def attended(self) -> list[Tensor]:
        """The answers of a learner that keeps its data."""
        k, v = (torch.stack([getattr(pair, name) for (pair,) in self.tokens.pairs]) for name in ("k", "v"))
        data, w, ys = parts.Data(k, v, *self.data), self.slow, []
        for t, q in enumerate(self.tokens.q):
            y = parts.LEARNERS[self.learner.kind](self.learner, w, q, t, data)
            ys.append(self.wrapped(w, q.unsqueeze(1), y.unsqueeze(1))[:, 0])
        return ys

    def answer(self, w: Weights | list[Weights], start: int, stop: int) -> Tensor:
        """What the queries from `start` to `stop − 1` are answered, `[H, n, d]`, by one W, or each by its own."""
        if isinstance(w, list):
            w = {name: torch.cat([one[name] for one in w], 1) for name in w[0]}
        return self.predict(w, self.tokens.q[start:stop].transpose(0, 1))

    def after(self, m: Memory, start: int, t: int) -> Memory:
        """The memory after the tokens `start` to t of the open mini-batch, which began with m: so many steps."""
        for step in range(self.steps):
            m = self.commit(m) if step else m
            for s in range(start, t + 1):
                m = self.token(m, s, start)
        return m

    def answers(self) -> list[Tensor]:
        """The answers `[H, d]` of every token, for all reads but `final`."""
        m, ys = self.begin(), []
        for start in range(0, len(self.x), self.b):
            stop, rows, now, told = min(start + self.b, len(self.x)), [], m, start
            for t in range(start, stop):
                first = start if self.mixes else t
                last = t + 1 == stop or any(t + 1 == end for _, end in self.calls)
                before, complete = self.newest(now), t + 1 == start + self.b
                if self.steps == 1:
                    now = self.token(now, t, start)
                elif last:
                    now = self.after(m, start, t)
                if self.read in ("inclusive", "exclusive"):
                    rows.append(before if self.read == "exclusive" else self.newest(now))
                    ys.append(self.answer(rows if self.mixes else rows[-1], first, t + 1)[:, -1])
                elif self.read in ("previous", "committed"):
                    w = self.commit(now).commit if self.read == "committed" and complete else m.commit
                    ys.append(self.answer(w, first, t + 1)[:, -1])
                elif last:  # block: of the mini-batch, as far as the call goes
                    ys += self.answer(self.newest(now), start, t + 1)[:, told - start :].unbind(1)
                    told = t + 1
            m = self.commit(now)
        return ys

    def final(self) -> list[Tensor]:
        """All tokens of a call first, so many times over; then all its queries."""
        m, ys, whole = self.begin(), [], self.rule.kind == "WholeSequence"
        for begin, end in self.calls:
            sampled = whole and self.rule.sampling == "sgd"
            m, anchor = self.sampled(m, begin, end) if sampled else m, m.anchor
            for step in range(0 if sampled else self.steps):
                if step:  # the next pass takes its gradients where this one ended
                    m = self.commit(m) if m.seen else m
                    m = m._replace(anchor=m.commit)
                for t in range(begin, end):
                    m = self.token(m, t, begin if whole else max(begin, t - t % self.b))
                    m = self.commit(m) if (t + 1) % self.b == 0 else m
            m = m._replace(anchor=anchor)
            starts = [t for t in range(begin, end) if t == begin or not (whole or t % self.b)]  # of mini-batches
            for start, stop in zip(starts, [*starts[1:], end], strict=True):
                ys += self.answer(self.newest(m), start, stop).unbind(1)
        return ys

    def sampled(self, m: Memory, begin: int, end: int) -> Memory:
        """A step on each part of a random order of the tokens, which every head has for itself."""
        order = self.layer.optimizer.permutation(end - begin, self.x.device)[0] + begin
        pairs, size, most = self.tokens.pairs, (end - begin) // self.steps, max(map(len, self.tokens.pairs))
        self.tokens.pairs = [*pairs]
        for t in range(begin, end):
            own = [pairs[int(row[t - begin])] for row in order]  # of each head; pairs that are not there weigh nothing
            own = [some + [some[0]._replace(weight=torch.zeros(self.heads))] * (most - len(some)) for some in own]
            self.tokens.pairs[t] = [Pair.of_heads(some) for some in zip(*own, strict=True)]
        for t in range(begin, end):
            m = self.token(m, t, t - (t - begin) % size)
            m = self.commit(m) if (t - begin + 1) % size == 0 else m
        self.tokens.pairs = pairs
        return m
