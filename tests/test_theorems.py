"""Known layers and equations against references written token by token, in float64: outputs and gradients.

Numbers of theorems, equations and sections are those of arXiv 2407.04620.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from metattt.layer import TTTLayer
from metattt.learners import MLP, KernelEstimator, Learner, Linear
from metattt.optimizers import Append, GradientDescent, InnerOptimizer
from metattt.tasks import Reconstruction
from metattt.testing.specimen import Specimen, compare, cotangent, distance, gradient_distance, gradients, run

BOUND = 1e-9  # relative
Params = dict[str, Tensor]
Sequence = Callable[[Params, Tensor, int], Tensor]
"""A reference for one sequence and one head: parameters, tokens `[T, D]` and the head's number, to predictions
`[T, d]`."""


def build(
    learner: Callable[[], Learner],
    optimizer: Callable[[], InnerOptimizer],
    views: Any = "separate",
    rope: Any = "none",
    **options: Any,
) -> TTTLayer:
    options = {"output_norm": False, **options}
    return Specimen(learner, lambda: Reconstruction(views, rope=rope), optimizer, options=options).make()


def assert_equals(
    layer: TTTLayer,
    reference: Sequence,
    length: int = 11,
    finish: Callable[[Params, Tensor, Tensor], Tensor] | None = None,
) -> None:
    """The layer against `reference` for every sequence and head, heads side by side, then `finish` or the output
    projection."""
    x = torch.randn(2, length, layer.dim, dtype=torch.float64, requires_grad=True)
    params = dict(layer.named_parameters())
    merged = torch.stack(
        [torch.cat([reference(params, row, head) for head in range(layer.num_heads)], dim=-1) for row in x]
    )
    expected = finish(params, x, merged) if finish else merged @ params["out.weight"].T
    found, _ = layer(x)
    assert distance(found.detach(), expected.detach()) <= BOUND
    got = gradients(layer, x, (found * cotangent(found)).sum())
    want = gradients(layer, x, (expected * cotangent(expected)).sum())
    assert gradient_distance(got, want) <= BOUND
    assert want["x"].abs().max() > 0


def view(params: Params, name: str, x: Tensor, head: int) -> Tensor:
    """`[T, D]` to one head of one view, `[T, d]`."""
    weight = params[f"task.{name}.weight"]
    width = weight.shape[0] // 2
    return x @ weight[head * width : (head + 1) * width].T


def step_size(params: Params, x: Tensor, head: int, base: float) -> Tensor:
    """η of every token, `[T]`: Sec. 2.7, divided by the head width as the published models do."""
    logit = x @ params["optimizer.lr_weight"][head] + params["optimizer.lr_bias"][head]
    return base * torch.sigmoid(logit) / (x.shape[1] // 2)


# -- Theorems 1 and 2 --------------------------------------------------------------------------------------------------


def plain_linear(learn_init: bool = False) -> Callable[[], Learner]:
    return lambda: Linear(bias=False, residual=False, norm=False, learn_init=learn_init)


@pytest.mark.parametrize("compute_chunk", [None, 4])
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_theorem_1_linear_attention(form: str, compute_chunk: int | None) -> None:
    """Batch gradient descent with η = ½ on ‖·‖², which is η = 1 on our ½‖·‖², from W0 = 0."""

    def linear_attention(params: Params, x: Tensor, head: int) -> Tensor:
        q, k, v = (view(params, name, x, head) for name in "qkv")
        return torch.stack(
            [sum(((q[t] @ k[s]) * v[s] for s in range(t + 1)), torch.zeros_like(v[0])) for t in range(len(x))]
        )

    rule = {"anchor": "batch", "lr": "constant", "lr_scale": "none", "compute_chunk": compute_chunk}
    assert_equals(build(plain_linear(), lambda: GradientDescent(3, **rule), form=form), linear_attention)


def weighted_mean(kernel: Callable[[Tensor, Tensor], Tensor]) -> Sequence:
    """Eq. of the Nadaraya-Watson estimator: Σ κ(q_t, k_s) v_s / Σ κ(q_t, k_s) over s ≤ t."""

    def estimate(params: Params, x: Tensor, head: int) -> Tensor:
        q, k, v = (view(params, name, x, head) for name in "qkv")
        rows = []
        for t in range(len(x)):
            weights = torch.stack([kernel(q[t], k[s]) for s in range(t + 1)])
            rows.append((weights / weights.sum()) @ v[: t + 1])
        return torch.stack(rows)

    return estimate


def test_theorem_2_softmax_attention() -> None:
    reference = weighted_mean(lambda q, k: torch.exp(q @ k / math.sqrt(len(q))))
    assert_equals(build(KernelEstimator, Append), reference)


def test_exponential_kernel_with_a_bandwidth() -> None:
    assert_equals(
        build(lambda: KernelEstimator(bandwidth=0.7), Append), weighted_mean(lambda q, k: torch.exp(q @ k / 0.7))
    )


def test_gaussian_kernel() -> None:
    reference = weighted_mean(lambda q, k: torch.exp(-((q - k) ** 2).sum() / (2 * 1.3)))
    assert_equals(build(lambda: KernelEstimator("gaussian", bandwidth=1.3), Append), reference)


@pytest.mark.parametrize("neighbours", [1, 3, 20])
def test_nearest_neighbours(neighbours: int) -> None:
    def nearest(params: Params, x: Tensor, head: int) -> Tensor:
        q, k, v = (view(params, name, x, head) for name in "qkv")
        rows = []
        for t in range(len(x)):
            order = sorted(range(t + 1), key=lambda s: (q[t] - k[s]).norm().item())[:neighbours]
            rows.append(torch.stack([v[s] for s in order]).mean(0))
        return torch.stack(rows)

    assert_equals(build(lambda: KernelEstimator("nearest", neighbours=neighbours), Append), nearest)


# -- limits of the mini-batch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [{"mini_batch_size": 1}, {"mini_batch_size": 4, "anchor": "online"}], ids=["b=1", "online"]
)
@pytest.mark.parametrize("form", ["primal", "dual"])
def test_single_tokens_without_norm_are_the_delta_rule(form: str, rule: dict[str, Any]) -> None:
    """W_t = W_{t-1} - η_t k_t (k_t W_{t-1} - v_t), y_t = q_t W_t."""

    def delta_rule(params: Params, x: Tensor, head: int) -> Tensor:
        q, k, v = (view(params, name, x, head) for name in "qkv")
        eta = step_size(params, x, head, base=1.0)
        w, rows = params["learner.init.w1"][head], []
        for t in range(len(x)):
            w = w - eta[t] * torch.outer(k[t], k[t] @ w - v[t])
            rows.append(q[t] @ w)
        return torch.stack(rows)

    assert_equals(build(plain_linear(learn_init=True), lambda: GradientDescent(**rule), form=form), delta_rule)


@pytest.mark.parametrize("learner", [Linear, MLP])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"mini_batch_size": 1}, {"mini_batch_size": 5, "anchor": "online"}),
        ({"mini_batch_size": 11}, {"mini_batch_size": 3, "anchor": "batch"}),
        ({"mini_batch_size": 40}, {"mini_batch_size": 3, "anchor": "batch", "compute_chunk": 2}),
        ({"mini_batch_size": 1, "read": "previous"}, {"mini_batch_size": 1, "read": "exclusive"}),
    ],
    ids=["online-minibatch(1)", "batch-minibatch(T)", "batch-minibatch(>T)", "previous-exclusive"],
)
def test_limits_of_the_mini_batch(learner: Callable[[], Learner], one: dict[str, Any], other: dict[str, Any]) -> None:
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    made = [
        Specimen(learner, Reconstruction, lambda rule=rule: GradientDescent(**rule), longest_mini_batch=40).make()
        for rule in (one, other)
    ]
    assert compare(*(run(layer, x, grads=True) for layer in made)) <= BOUND


# -- Appendix A --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_appendix_a_dual_form_of_k_layers(depth: int, form: str) -> None:
    """X_{k+1} = σ(X_k W_k): the weights of each token, and the same in matrix products."""
    size = 4

    def forward_and_deltas(weights: list[Tensor], k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        inputs, z = [k], []
        for i, w in enumerate(weights):
            z.append(inputs[i] @ w)
            inputs.append(torch.tanh(z[i]))
        deltas = [z[-1] - v]  # ∂ ½‖z_K − v‖²
        for i in reversed(range(depth - 1)):
            deltas.insert(0, (deltas[0] @ weights[i + 1].T) * (1 - torch.tanh(z[i]) ** 2))
        return inputs[:depth], deltas

    def by_token(params: Params, x: Tensor, head: int) -> Tensor:
        q, k, v = (view(params, name, x, head) for name in "qkv")
        eta = step_size(params, x, head, base=1.0)
        weights = [params[f"learner.init.w{i + 1}"][head] for i in range(depth)]
        rows = []
        for start in range(0, len(x), size):
            end = min(start + size, len(x))
            inputs, deltas = forward_and_deltas(weights, k[start:end], v[start:end])
            current = list(weights)
            for t in range(end - start):
                current = [
                    w - eta[start + t] * torch.outer(a[t], d[t])
                    for w, a, d in zip(current, inputs, deltas, strict=True)
                ]
                y = q[start + t]
                for i, w in enumerate(current):
                    y = y @ w if i == depth - 1 else torch.tanh(y @ w)
                rows.append(y)
            weights = current
        return torch.stack(rows)

    def by_matrix(params: Params, x: Tensor, head: int) -> Tensor:
        q, k, v = (view(params, name, x, head) for name in "qkv")
        eta = step_size(params, x, head, base=1.0)
        weights = [params[f"learner.init.w{i + 1}"][head] for i in range(depth)]
        parts = []
        for start in range(0, len(x), size):
            now = slice(start, start + size)
            inputs, deltas = forward_and_deltas(weights, k[now], v[now])
            read = q[now]
            for i, w in enumerate(weights):
                z = read @ w - torch.tril(read @ inputs[i].T) @ (eta[now, None] * deltas[i])
                read = z if i == depth - 1 else torch.tanh(z)
            parts.append(read)
            weights = [w - a.T @ (eta[now, None] * d) for w, a, d in zip(weights, inputs, deltas, strict=True)]
        return torch.cat(parts)

    def learner() -> Learner:
        return MLP(depth, expansion=1.5, activation="tanh", bias=False, residual=False, norm=False)

    layer = build(learner, lambda: GradientDescent(size), form=form)
    assert_equals(layer, by_token)
    assert_equals(layer, by_matrix)


# -- the published layers: Sec. 2.7 ------------------------------------------------------------------------------------

SIZE, WIDTH, EPS = 4, 4, 1e-6  # mini-batch, head width, ε of both norms


def standardized(z: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.sqrt(((z - z.mean()) ** 2).mean() + EPS)
    return (z - z.mean()) / scale, scale


def norm(z: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return gamma * standardized(z)[0] + beta


def norm_gradient(z: Tensor, target: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """∂/∂z of ½‖LN(z) − target‖², in closed form."""
    unit, scale = standardized(z)
    g = gamma * (gamma * unit + beta - target)
    return (g - g.mean() - unit * (g * unit).mean()) / scale


def gelu(z: Tensor) -> Tensor:
    return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def gelu_slope(z: Tensor) -> Tensor:
    inner = torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))
    return 0.5 * (1 + inner) + 0.5 * z * (1 - inner**2) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z**2)


def rotate(z: Tensor, position: int) -> Tensor:
    """RoPE on interleaved pairs, θ = 10⁴."""
    out = []
    for i in range(0, len(z), 2):
        angle = position * 10000.0 ** (-i / len(z))
        cos, sin = math.cos(angle), math.sin(angle)
        out += [z[i] * cos - z[i + 1] * sin, z[i] * sin + z[i + 1] * cos]
    return torch.stack(out)


def published_views(params: Params, x: Tensor, head: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Shared-QK views with causal convolutions of width 4, then RoPE by position in the mini-batch."""
    shared = view(params, "q", x, head)  # one projection for both
    channels = slice(head * WIDTH, (head + 1) * WIDTH)
    result = []
    for name in ("conv_q", "conv_k"):
        taps, bias = params[f"task.{name}.weight"][channels, 0], params[f"task.{name}.bias"][channels]
        rows = []
        for t in range(len(x)):
            z = bias
            for j in range(4):
                if t - 3 + j >= 0:
                    z = z + taps[:, j] * shared[t - 3 + j]
            rows.append(rotate(z, t % SIZE))
        result.append(rows)
    return result[0], result[1], view(params, "v", x, head)


def finish(params: Params, x: Tensor, merged: Tensor) -> Tensor:
    """Norm over D, gate, output projection."""
    normed = torch.stack(
        [torch.stack([norm(row, params["norm.weight"], params["norm.bias"]) for row in rows]) for rows in merged]
    )
    return (normed * gelu(x @ params["gate.weight"].T)) @ params["out.weight"].T


def token_step(params: Params, i: int) -> Tensor:
    """τ_i = max(0, 1/(i+1) + δ_i)."""
    return torch.clamp(1 / (i + 1) + params["optimizer.token_step_offset"][0, i], min=0)


def published(learner: Callable[[], Learner], base: float, form: str) -> TTTLayer:
    rule: dict[str, Any] = {"base_lr": base, "token_steps": "shared", "token_step_map": "relu"}
    return build(
        learner,
        lambda: GradientDescent(SIZE, **rule),
        "shared_qk",
        "mini_batch",
        output_norm=True,
        gate=True,
        form=form,
    )


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_ttt_linear_as_published(form: str) -> None:
    def ttt_linear(params: Params, x: Tensor, head: int) -> Tensor:
        q, k, v = published_views(params, x, head)
        lr = step_size(params, x, head, base=1.0)
        gamma, beta = params["learner.slow.norm_scale"][head], params["learner.slow.norm_bias"][head]
        w, b = params["learner.init.w1"][head], params["learner.init.b1"][head]
        rows = []
        for start in range(0, len(x), SIZE):
            step_w, step_b = torch.zeros_like(w), torch.zeros_like(b)
            for i in range(min(SIZE, len(x) - start)):
                t = start + i
                g = norm_gradient(k[t] @ w + b, v[t] - k[t], gamma, beta)
                step_w, step_b = step_w + lr[t] * torch.outer(k[t], g), step_b + lr[t] * g
                w_t, b_t = w - token_step(params, i) * step_w, b - token_step(params, i) * step_b
                rows.append(q[t] + norm(q[t] @ w_t + b_t, gamma, beta))
            w, b = w_t, b_t
        return torch.stack(rows)

    assert_equals(published(Linear, 1.0, form), ttt_linear, finish=finish)


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_ttt_mlp_as_published(form: str) -> None:
    def ttt_mlp(params: Params, x: Tensor, head: int) -> Tensor:
        q, k, v = published_views(params, x, head)
        lr = step_size(params, x, head, base=0.1)
        gamma, beta = params["learner.slow.norm_scale"][head], params["learner.slow.norm_bias"][head]
        start_weights = [params[f"learner.init.{name}"][head] for name in ("w1", "b1", "w2", "b2")]
        rows = []
        for start in range(0, len(x), SIZE):
            w1, b1, w2, b2 = start_weights
            sums = [torch.zeros_like(weight) for weight in start_weights]
            for i in range(min(SIZE, len(x) - start)):
                t = start + i
                z1 = k[t] @ w1 + b1
                x2 = gelu(z1)
                g2 = norm_gradient(x2 @ w2 + b2, v[t] - k[t], gamma, beta)
                g1 = (w2 @ g2) * gelu_slope(z1)
                found = (torch.outer(k[t], g1), g1, torch.outer(x2, g2), g2)
                sums = [total + lr[t] * g for total, g in zip(sums, found, strict=True)]
                now = [
                    weight - token_step(params, i) * total for weight, total in zip(start_weights, sums, strict=True)
                ]
                rows.append(q[t] + norm(gelu(q[t] @ now[0] + now[1]) @ now[2] + now[3], gamma, beta))
            start_weights = now
        return torch.stack(rows)

    assert_equals(published(MLP, 0.1, form), ttt_mlp, finish=finish)
