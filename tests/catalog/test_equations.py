"""`metattt layers layer=<name>`: the equations that are printed are those of the parts and their settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metattt import TTTLayer, build
from metattt.catalog.equations import equations, text
from metattt.cli import main
from metattt.learners import MLP, Learner, Linear, Weight
from metattt.mixers import Mamba
from metattt.optimizers import BlockRule, Gates, GradientDescent, InnerOptimizer, Sign
from metattt.tasks import Reconstruction, Views

SIZE = ("dim=16", "num_heads=2")


def lines(layer: nn.Module | str, *overrides: str) -> list[str]:
    """The equations, without their titles."""
    made = build(f"layer={layer}", *SIZE, *overrides) if isinstance(layer, str) else layer
    return [line for section in equations(made) for line in section.lines]


DELTA = "W_t = W_{t−1} − η_t k_tᵀ(k_t W_{t−1} − v_t)"
GATED = "W_t = α_t W_{t−1} − η_t k_tᵀ(α_t k_t W_{t−1} − v_t)"


@pytest.mark.parametrize(("layer", "overrides", "expected"), [
    ("delta_net", [],
     [DELTA, "η_t = σ(θ_η x_t + c_η), θ and c of each head; c = 0 at the start", "z_t = q_t W_t", "f(x; W) = x W",
      "k_t = u/‖u‖, u = silu(conv_K(θK x)_t)", "ℓ_t(W) = ½‖f(k_t; W) − v_t‖²",
      "y_t = θO RMSNorm_h(z_t), z_t of the 2 heads side by side"]),
    ("delta_net", ["block_style=plain"],
     ["k_t = u/‖u‖, u = silu(θK x_t)", "v_t = θV x_t", "y_t = θO LN(z_t), z_t of the 2 heads side by side"]),
    ("kda", [], ["W_t = Diag(a_t) W_{t−1} − η_t k_tᵀ(k_t Diag(a_t) W_{t−1} − v_t)", "a_t = exp(−A softplus(s_t)), A of each head",
      "v_t = silu(conv_V(θV x)_t)", "conv_K, conv_V, conv_Q: causal, 4 tokens, each channel by itself",
      "y_t = θO (RMSNorm_h(z_t) ∘ σ(U V x_t + c_G)), z_t of the 2 heads side by side"]),
    ("delta_net", ["optimizer.lr=constant", "optimizer.base_lr=0.5"], [DELTA, "η_t = 0.5"]),
    ("delta_net", ["task.loss=dot"], ["G_t = ∇ℓ_t(W_{t−1}) = −k_tᵀ v_t", "W_t = W_{t−1} + η_t k_tᵀ v_t"]),
    ("delta_net", ["task.loss=cosine"], ["ℓ_t(W) = 1 − cos(f(k_t; W), v_t)", "W_t = W_{t−1} − η_t G_t"]),
    ("delta_net", ["optimizer.read=exclusive"], ["z_t = q_t W_{t−1}"]),
    ("delta_net", ["learner.bias=true"], ["G_t = ∇ℓ_t(W_{t−1}) = k_tᵀ e_t for W and e_t for b, e_t = k_t W_{t−1} + b − v_t"]),
    ("gated_delta_net", [], [GATED, "α_t = exp(−A softplus(θ_α x_t + c_α)), θ, c and A of each head"]),
    ("gated_delta_net", ["optimizer.gradient_at=previous"], ["W_t = α_t W_{t−1} − η_t k_tᵀ(k_t W_{t−1} − v_t)"]),
    ("gated_delta_net", ["optimizer.momentum=constant"], ["β_t = 0.9", "W_t = α_t W_{t−1} + S_t"]),
    ("hgrn2", [], ["k_t = 1 in every channel", "k_t ← k_t ∘ (1 − a_t)", "W_t = Diag(a_t) W_{t−1} + k_tᵀ v_t"]),
    ("rwkv7", [], ["W_t = Diag(a_t) W_{t−1} − (b_tᵀ(p_t W_{t−1}) − k_tᵀ v_t)", "b_t = r_t ∘ p_t", "a_t = exp(−0.6065306597 σ(s_t))"]),
    ("delta_product", [], ["W_t = W_{t−1} − ω_t k_tᵀ(k_t W_{t−1} − v_t)"]),
    ("retnet", [], ["α_t = 1 − 2^(−5−h) in head h = 0…1", "W_t = α_t W_{t−1} + k_tᵀ v_t"]),
    ("mamba2", [], ["α_t = exp(−η_t a), a of each head", "W_t = α_t W_{t−1} + η_t k_tᵀ v_t"]),
    ("mamba2", ["optimizer.decay_to_init=true"], ["W_t = α_t W_{t−1} + (1 − α_t) W_0 + η_t k_tᵀ v_t"]),
    ("ttt_linear", [], ["f(x; W) = x + LN(x W + b)", "W_t = W_a + τ_i M_t", "k_t = RoPE_t(conv_K(θQ x)_t)",
     "y_t = θO (LN(z_t) ∘ gelu_tanh(θG x_t)), z_t of the 2 heads side by side"]),
    ("ttt_linear", ["optimizer.mini_batch_size=4"],
     ["W_a: the weights after the last mini-batch that was whole before t's own, b = 4 tokens"]),
    ("ttt_linear", [], [
        "τ_i = (z_i + √(z_i² + 1/(4 i²)))/2, z_i = 15/(16 i) + δ_i, i = 1…b the place of t in its mini-batch, δ learned, "
        "shared by the heads",
        "conv_K, conv_Q: causal, 4 tokens, each channel by itself, with a bias",
    ]),
    ("ttt_linear", ["optimizer.token_steps=none"], ["G_t = ∇ℓ_t(W_a)", "W_t = W_{t−1} − η_t G_t"]),
    ("ttt_linear", ["optimizer.max_norm=0.5"], ["W_t = W_a + τ_i min(1, 0.5/‖M_t‖) M_t"]),
    ("ttt_mlp", ["learner.depth=3", "learner.activation=relu"], ["f(x; W) = x + LN(relu(relu(x W1 + b1) W2 + b2) W3 + b3)"]),
    ("titans", [], ["ℓ_t(W) = ‖f(k_t; W) − v_t‖²/d", "G_s = ∇ℓ_s(W_0)", "S_j = β_j S_{j−1} + U_j", "W_j = α_j W_{j−1} + S_j",
      "LN: over the outputs of a head, ε = 1e-06, then norm_scale and norm_bias"]),
    ("moneta", [], ["A_t goes on from the A_t before it; A begins as W_0, and the weights as m(W_0)"]),
    ("pkda", [], ["M_t = 1.5^(−r/(1 + |r|)), r = log(A_t + 1e-06) − c, c of each head"]),
    ("titans", ["optimizer.read=previous"], ["z_t = f(q_t; W_{j−1}), t in mini-batch j"]),
    ("lact", ["optimizer.row_norm=false"], ["a, b, c = 3.4445, -4.775, 2.0315"]),
    ("lact", [], ["W_j = W_{j−1} + NS(S_j), NS: 5 Newton–Schulz iterations on matrices (Muon)", "ℓ_t(W) = −⟨v_t, f(k_t; W)⟩"]),
    ("kernel_ridge", [], ["f(q_t) = κ(q_t, K)(κ(K, K) + λI)⁻¹ V, λ = 1, K and V the k_s and v_s of all s ≤ t", "z_t = f(q_t)"]),
    ("attention", [], ["f(q_t) = Σ_s κ(q_t, k_s) v_s / Σ_s κ(q_t, k_s), s ≤ t", "κ(q, k) = exp(q·k/√d): softmax attention"]),
    ("attention", ["learner.window=8", "learner.sinks=2"], ["f(q_t) = Σ_s κ(q_t, k_s) v_s / Σ_s κ(q_t, k_s), t − 8 < s ≤ t or s ≤ 2"]),
    ("mttt_mlp", ["optimizer.steps=4"],
     ["W_i = W_{i−1} − η Σ_s ∇ℓ_s(W_{i−1}), i = 1…4, s over all N tokens",
      "z_t = f(q_t; W_4), W_4 after all tokens of the call (not causal)"]),
    ("custom", ["learner=mlp", "optimizer=adam", "task=next_token"],
     ["k_t = p_{t−1}, p_0 learned", "p_t = θK x_t", "m_j = 0.9 m_{j−1} + 0.1 U_j"]),
    ("custom", ["optimizer.steps=3", "optimizer.read=previous"],
     ["3 such steps for every mini-batch, each from the weights that the one before it left"]),
    ("custom", ["optimizer=state_gated", "optimizer.decay=mamba2"], ["α_t = exp(−η'_t a), a of each head"]),
    ("custom", ["task=gated", "learner=linear_map", "optimizer=preconditioned"],
     ["p_t = e ∘ k_t, e = σ(θ_e x_t)", "where the task has no p_t it is k_t, and then k_t ← M_t ∘ k_t"]),
    ("delta_net", ["optimizer=key_step", "optimizer.lr=constant"],
     ["η_t = 1", "then η_t = (1 − exp(−η λ_t))/λ_t of this η, λ_t = ‖k_t‖²"]),
    ("ttt_mlp", ["learner.step_scale={w1: 0.5}"],
     ["gradients are multiplied by a factor of their weight, where it is not 1: w1 by 0.5"]),
])  # fmt: skip
def test_what_the_settings_say(layer: str, overrides: list[str], expected: list[str]) -> None:
    found = lines(layer, *overrides)
    assert not set(expected) - set(found), "\n".join(found)


def test_only_the_gates_that_are_there() -> None:
    said = "\n".join(found := lines("delta_net"))
    assert not any(symbol in said for symbol in ("α", "β", "κ", "S_", "M_t", "W_a", "τ"))
    assert "ℓ" not in "\n".join(lines("attention"))  # no loss is taken
    assert "form=dual, solved as one triangular system" in lines("delta_net", "layer.form=dual")
    assert "else an error, as layer.form" in "\n".join(lines("delta_net", "layer.form=fused"))
    assert any(line.endswith("(cuda) where these take the sizes and types, else solved as one triangular system") for line in found)
    assert any(line.startswith("form=dual, token by token: ") for line in lines("delta_net", "task.loss=huber"))


def test_two_layers_in_one() -> None:
    found = equations(build("layer=titans_mag", *SIZE))
    titles = [section.title for section in found]
    assert {"first.task", "first.learner", "second.optimizer"} < set(titles) and titles[-1] == "output"
    assert found[-1].lines == ["y_t = RMSNorm(first(x)_t) ∘ σ(RMSNorm(second(x)_t))"]
    last = lines("lact_block")[-2:]
    assert last[0] == "y_t = θO (first(x)_t + silu(θ_s x_t + c_s) RMSNorm(second(x)_t)), the latter by head"
    assert "those of first, K and Q after its RMSNorm" in last[1]
    assert lines("titans_mal")[-1] == "y = second(first(x))"


def test_a_layer_in_a_layer() -> None:
    found = lines("nested_ttt", "learner.layer.optimizer.mini_batch_size=2")
    assert "f(x; W) = x + LN(layer(x)), W the parameters of this layer:" in found
    assert any(line.startswith("  optimizer  η_t = 0.1 σ") for line in found)
    assert any(line.strip().endswith("b = 2 tokens") for line in found)


class Cubic(Learner):
    """A cube of the token,
    read by a matrix.

    Nothing else.
    """

    def __init__(self, power: int = 3, norm: bool = True):
        super().__init__(norm=norm, residual=True)
        self.power = power

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {"w": Weight((d_in, d_out))}

    def forward(self, w: Any, x: Tensor) -> Tensor:
        y: Tensor = w.linear(x**self.power, "w")
        return y


class Forgetful(InnerOptimizer):
    """Half of the weights is kept."""

    def gates(self, x: Tensor, state: Any, ctx: Any) -> tuple[Gates, Any]:
        ones = x.new_ones(len(x), 1, x.shape[1])
        return Gates(ones, alpha=ones / 2), state


class Doubled(BlockRule):
    """Twice the gradient."""

    mini_batch_size = 4

    def move(self, memory: Any, alpha: Any, beta: Any) -> Any:
        return {"commit": {name: x + 2 * memory["update"][name] for name, x in memory["commit"].items()}}


class Other(Linear):
    def forward(self, w: Any, x: Tensor) -> Tensor:
        return super().forward(w, x.tanh())


class Absolute(Reconstruction):
    """The sum of errors."""

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        return (prediction - v).abs().sum(-1)


class Erasing(Reconstruction):
    """An erase view."""

    def views(self, x: Tensor, state: Any, ctx: Any, projected: Any = None) -> tuple[Views, Any]:
        views, state = super().views(x, state, ctx)
        return views._replace(erase_key=views.q), state


class ByChannel(GradientDescent):
    """A decay for every channel."""

    gradient_at = "decayed"

    def gates(self, x: Tensor, state: Any, ctx: Any) -> tuple[Gates, Any]:
        gates, state = super().gates(x, state, ctx)
        return gates._replace(decay=-x.abs().unflatten(-1, (2, -1)).transpose(1, 2)), state


def plain() -> Linear:
    return Linear(bias=False, residual=False, norm=False)


def test_parts_that_say_nothing() -> None:
    found = lines(TTTLayer(16, 2, Absolute(), Cubic(power=5), Forgetful(4)))
    for line in (
        *("Absolute: The sum of errors.", "f(x; W) = x + LN(Cubic(x; W))"),
        "Cubic(power=5): A cube of the token, read by a matrix.",
        "Forgetful(mini_batch_size=4): Half of the weights is kept.",
        *("G_t = ∇ℓ_t(W_a)", "W_t = α_t W_{t−1} − G_t"),  # found out, not said
    ):
        assert line in found
    block = lines(TTTLayer(16, 2, Absolute(), Cubic(), Doubled()))
    assert "W_j = Doubled.move(W_{j−1}, U_j)" in block and "Doubled: Twice the gradient." in block
    gated = type("Gated", (Doubled,), {"gates": lambda self, *given: Doubled.gates(self, *given)})
    assert "W_t: made of these by Gated.move" in lines(TTTLayer(16, 2, Absolute(), Cubic(), gated()))
    assert "U_j = −Σ_s η_s G_s, s over the 4 tokens of mini-batch j" in block
    reasons = TTTLayer(16, 2, Reconstruction(), MLP(), Doubled()).plan.reasons
    assert reasons["ttt_mlp.native"] == "Doubled acts once per mini-batch"


def test_what_a_class_says_does_not_count_for_a_subclass_that_changes_it() -> None:
    other = Other(bias=False, residual=False, norm=False)
    for task, learner, said in ((Reconstruction(), other, "f(x; W) = Other(x; W)"), (Absolute(), plain(), "f(x; W) = x W")):
        changed = lines(TTTLayer(16, 2, task, learner, GradientDescent(1, "online")))
        assert said in changed and "W_t = W_{t−1} − η_t G_t" in changed
    assert "W_j = W_{j−1} + 0.125 sign(U_j)" in lines(TTTLayer(16, 2, Reconstruction(), MLP(), Sign()))
    task = Reconstruction()
    own = task.loss
    task.loss = lambda *given, **options: 3 * own(*given, **options)  # of this object alone
    changed = lines(TTTLayer(16, 2, task, plain(), GradientDescent(1, "online")))
    assert "G_t = ∇ℓ_t(W_{t−1})" in changed and not any(line.startswith("ℓ_t(W) =") for line in changed)


def test_an_erase_view_and_decays_of_channels() -> None:
    made = lines(TTTLayer(16, 2, Erasing(), plain(), ByChannel(1, "online", lr_scale="none")))
    assert "G_t = k_tᵀ(p_t Diag(a_t) W_{t−1} − v_t), in the place of ∇ℓ_t(Diag(a_t) W_{t−1})" in made
    assert "W_t = Diag(a_t) W_{t−1} − η_t k_tᵀ(p_t Diag(a_t) W_{t−1} − v_t)" in made


class Sum(nn.Module):
    """A running sum."""


def test_other_modules() -> None:
    assert text(equations(Sum())) == "layer  Sum: A running sum."
    said = type("Said", (Sum,), {"equations": lambda self: ["y_t = y_{t−1} + x_t"]})
    assert text(equations(said())) == "layer  y_t = y_{t−1} + x_t"
    assigned = Sum()
    assigned.equations = lambda: ["y_t = y_{t−1} + x_t"]
    assert text(equations(assigned)) == text(equations(said()))
    ours = type("Ours", (Mamba,), {"gates": staticmethod(Mamba.gates)})
    assert text(equations(ours(16))) == "layer  Ours" and len(lines(Mamba(16))) > 3
    both = lines("delta_net", "direction=both")
    assert DELTA in both and both[-1].startswith("y = tanh(a) ∘ layer(x) + tanh(b) ∘ reversed(layer(reversed(x)))")


def test_a_part_with_a_constructor_of_its_own_shows_what_it_passes_on_and_its_parameters() -> None:
    class Warm(Linear):
        def __init__(self, start: float = 1.0, **rest: Any):
            super().__init__(**rest)
            self.heat = nn.Parameter(torch.tensor(start))
            self.still = nn.Parameter(torch.zeros(3), requires_grad=False)
            self.register_parameter("none", None)

    made = Warm(2.0, bias=False)
    assert made.extra_repr() == "start=2.0, bias=False"
    said = lines(TTTLayer(16, 2, Reconstruction(), made, GradientDescent()))
    assert "parameters of its own, learned by the outer loop alone: heat" in said


def test_looking_changes_nothing() -> None:
    layer = build("layer=delta_net", *SIZE, "task.corruption=noise")
    state = torch.random.get_rng_state()
    lines(layer)
    assert torch.equal(state, torch.random.get_rng_state()) and all(x.grad is None for x in layer.parameters())


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layers", "layer=gated_delta_net", "optimizer.decay=none", *SIZE]) == 0
    out = capsys.readouterr().out
    assert "layer=gated_delta_net optimizer.decay=none, dim=16 (D), num_heads=2 (H), 8 features a head (d)" in out
    assert "delta rules: Gated Delta Networks, arXiv 2412.06464" in out and DELTA in out
    assert "state of a sequence: 1.1 KiB" in out and "cost of a token: constant" in out and "\x1b" not in out
    assert main(["layers", "learner=swiglu", "learner.norm=true", *SIZE]) == 0
    assert "f(x; W) = LN((silu(x W0) ∘ (x W2)) W1)" in capsys.readouterr().out
    assert main(["layers", "layer=gla", "layer=delta_net", *SIZE]) == 0  # the last one counts
    out = capsys.readouterr().out
    assert DELTA in out and "the Delta Rule, arXiv 2406.06484" in out and "2312.06635" not in out
    assert main(["layers", "layer=gla", "direction=both", *SIZE]) == 0
    assert "state of a sequence: none: one call" in capsys.readouterr().out
