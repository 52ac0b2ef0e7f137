"""Gates that look at the weights of the last commit: every form agrees, and every law of the other rules holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_references import (
    Parameters,
    gate,
    gradient,
    heads_of,
    mlp_predict,
    output,
    residual_norm,
    spread,
    weights_of,
)
from torch import Tensor, nn

import metattt
from metattt.errors import MetaTTTError
from metattt.inner.committed import Committed
from metattt.layer import TTTLayer
from metattt.learners import MLP, Learner, Linear, ModuleLearner, Transformer
from metattt.optimizers import BlockMomentum, Gates, GradientDescent, InnerOptimizer, Momentum, StateGated
from metattt.state import Context, Tensors
from metattt.tasks import Reconstruction
from metattt.testing.laws import causality, derivatives, forms, round_trips, splits
from metattt.testing.padding import masks, packing
from metattt.testing.specimen import Run, Specimen, compare, cotangent, gradients, randomize, run

BOUND = 1e-9
task = partial(Reconstruction, normalize_qk=True)
GATES = ("alignment", "loss", "gradient")


def hold(spec: Specimen, *more: Callable[[Specimen], float]) -> None:
    for law in (forms, splits, causality, masks, packing, round_trips, *more):
        assert law(spec) <= (0.0 if law is causality else 1e-6 if law is derivatives else BOUND), law.__name__


# -- the rules that come with the package ------------------------------------------------------------------------------

RULES: dict[str, dict[str, Any]] = {
    "per token": {"mini_batch_size": 1},
    "exclusive": {"read": "exclusive"},
    "previous": {"read": "previous", "compute_chunk": 3},
    "committed, two steps": {"read": "committed", "steps": 2},
    "online": {"anchor": "online"},
    "online, per token": {"anchor": "online", "mini_batch_size": 1},
    "batch anchor": {"anchor": "batch"},
    "momentum and decay": {"momentum": "per_head", "decay": "per_head", "compute_chunk": 3},
    "constant": {"step_gate_params": "constant"},
}


@pytest.mark.parametrize("step_gate", GATES)
def test_laws(step_gate: Any) -> None:
    hold(Specimen(MLP, task, lambda: StateGated(4, base_lr=0.3, step_gate=step_gate)), derivatives)


@pytest.mark.parametrize("name", RULES)
def test_laws_of_every_kind_of_rule(name: str) -> None:
    settings = {"mini_batch_size": 4, "base_lr": 0.3} | RULES[name]
    hold(Specimen(partial(Linear, bias=False), task, lambda: StateGated(**settings)))


class TwoMaps(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


LEARNERS: dict[str, Callable[[], Learner]] = {
    "any module": lambda: ModuleLearner(TwoMaps(4)),
    "one that mixes tokens": lambda: Transformer(),
}


@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("step_gate", ["loss", "gradient"])
def test_laws_of_other_learners(learner: str, step_gate: Any) -> None:
    spec = Specimen(LEARNERS[learner], task, lambda: StateGated(4, base_lr=0.1, read="previous", step_gate=step_gate))
    for law in (forms, splits, masks, packing):
        assert law(spec) <= BOUND, law.__name__


def looped(p: Parameters, x: Tensor, num_heads: int, b: int, step_gate: str) -> Tensor:
    """`W_t = W_{t−1} − η_t σ(a s_t + c) ∇ℓ_t(W_a)`, s_t from the same W_a, token by token."""
    q, k, v = (heads_of(x @ p[f"task.{name}.weight"].T, num_heads) for name in ("q", "k", "v"))
    lr = torch.sigmoid(gate(p, "lr_", x)) / q.shape[-1]
    start = now = weights_of(p, x.shape[0])
    rows = []
    for t in range(x.shape[1]):
        if t % b == 0:
            start = now
        error = residual_norm(p, k[:, :, t], mlp_predict(start, k[:, :, t])) - v[:, :, t]
        loss = 0.5 * error.square().sum(-1)
        found = gradient(loss.sum(), start)
        norm = torch.sqrt(1e-12 + torch.stack([g.flatten(2).square().sum(-1) for g in found.values()]).sum(0))
        surprise = loss if step_gate == "loss" else norm
        scale, bias = p["optimizer.step_gate_scale"], p["optimizer.step_gate_bias"]
        eta = lr[:, :, t] * torch.sigmoid(scale * surprise + bias)
        now = {name: w - spread(eta, w) * found[name] for name, w in now.items()}
        rows.append(residual_norm(p, q[:, :, t], mlp_predict(now, q[:, :, t])))
    return output(p, x, rows)


@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("step_gate", ["loss", "gradient"])
def test_surprise_is_what_a_plain_loop_makes_of_it(step_gate: Any, b: int) -> None:
    torch.manual_seed(0)
    layer = TTTLayer(8, 2, Reconstruction(), MLP(), StateGated(b, step_gate=step_gate)).double()
    randomize(layer)
    x = torch.randn(2, 11, 8, dtype=torch.float64, requires_grad=True)

    def through(y: Tensor) -> Run:
        return Run(y.detach(), None, gradients(layer, x, (y * cotangent(y)).sum()))  # type: ignore[arg-type]

    expected = through(looped(dict(layer.named_parameters()), x, 2, b, step_gate))
    assert compare(through(layer(x)[0]), expected) < BOUND
    assert all(g.any() for g in expected.grads.values())


def test_long_sequences_are_recomputed_in_groups() -> None:
    rule = partial(StateGated, 8, base_lr=0.3, momentum="per_head", decay="per_head")
    torch.manual_seed(1)
    x = torch.randn(1, 203, 8, dtype=torch.float64)
    runs = [
        run(Specimen(MLP, task, rule, longest_mini_batch=8).make(group_size=size), x, grads=True)
        for size in (0, 3, None)
    ]
    assert compare(runs[1], runs[0]) < BOUND and compare(runs[2], runs[0]) < BOUND


# -- one's own -----------------------------------------------------------------------------------------------------------


class Careful(GradientDescent):
    """Smaller steps where the prediction is near the label already."""

    def gates_at(self, gates: Gates, committed: Committed) -> Gates:
        far = (committed.predict(committed.k) - committed.v).square().mean(-1)
        return gates._replace(eta=gates.eta * far / (1 + far))


class Forgetful(Momentum):
    """Forgets where the weights are large; its momentum, too, hangs on the state."""

    def gates_at(self, gates: Gates, committed: Committed) -> Gates:
        assert gates.alpha is not None and gates.beta is not None
        size = sum(w.square().flatten(2).mean(-1) for w in committed.weights.values()).unsqueeze(-1)  # type: ignore[union-attr]
        return gates._replace(alpha=gates.alpha / (1 + size), beta=gates.beta * torch.tanh(committed.losses()))


class Pooled(BlockMomentum):
    def gates_at(self, gates: Gates, committed: Committed) -> Gates:
        assert gates.alpha is not None and gates.weight_lr is not None
        norms = committed.gradient_norms()
        return gates._replace(alpha=gates.alpha * torch.exp(-norms), weight_lr=gates.weight_lr / (1 + norms.unsqueeze(-1)))


OWN: dict[str, Callable[[], InnerOptimizer]] = {
    "token steps": lambda: Careful(4, base_lr=0.5, token_steps="shared"),
    "clipping": lambda: Careful(4, base_lr=0.5, max_norm=0.15),
    "online": lambda: Careful(4, "online", base_lr=0.5),
    "decay and momentum": lambda: Forgetful(4, base_lr=0.3, decay="per_head"),
    "per mini-batch": lambda: Pooled(4, base_lr=0.3, lr="per_weight", decay="per_head", pool="gates"),
}


@pytest.mark.parametrize("name", OWN)
def test_laws_of_ones_own(name: str) -> None:
    hold(Specimen(Linear, task, OWN[name]))


def test_the_gate_is_not_ignored() -> None:
    x = torch.randn(2, 11, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for rule, plain in (
        (Careful, GradientDescent),
        (partial(Careful, anchor="online"), partial(GradientDescent, anchor="online")),
    ):
        for learner in (Linear, partial(Linear, residual=False, norm=False, bias=False)):
            gated, free = (run(Specimen(learner, task, partial(r, 4)).make(), x).y for r in (rule, plain))
            assert (gated - free).abs().max() > 1e-6


def test_fast_paths_refuse() -> None:
    assert Specimen(Linear, task, lambda: GradientDescent(4)).make().form == "fused"
    layer = Specimen(Linear, task, lambda: Careful(4)).make()
    assert layer.form == "dual" and "Careful depend on the weights" in layer.plan.reasons["ttt_linear.closed_form"]
    with pytest.raises(MetaTTTError, match=r"layer\.form=fused .*the gates of Careful depend on the weights"):
        Specimen(Linear, task, lambda: Careful(4)).make(form="fused")
    linear = partial(Linear, residual=False, norm=False, bias=False)
    assert Specimen(linear, task, lambda: GradientDescent(4, "online")).make().plan.form == "solved"
    online = Specimen(linear, task, lambda: Careful(4, "online")).make()
    assert online.plan.form == "dual" and "depend on the weights" in online.plan.reasons["solved"]
    assert online.optimizer.slots == ("commit", "weights") and online.optimizer.period == 4


def test_a_gate_that_is_put_on_a_rule_later() -> None:
    layer = Specimen(Linear, task, lambda: GradientDescent(4)).make()
    x = torch.randn(2, 11, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before = run(layer, x).y
    layer.optimizer.gates_at = lambda gates, committed: gates._replace(eta=0 * gates.eta)  # type: ignore[method-assign]
    assert layer.form == "dual"
    assert (run(layer, x).y - before).abs().max() > 1e-6


def test_gates_that_come_from_nowhere() -> None:
    class Surprising(GradientDescent):
        def gates_at(self, gates: Gates, committed: Committed) -> Gates:
            return gates._replace(alpha=torch.full_like(gates.eta, 0.5))

    layer = Specimen(Linear, task, lambda: Surprising(4)).make()
    with pytest.raises(
        MetaTTTError, match=r"Surprising\.gates_at must return the gates that it was given, and alpha was not"
    ):
        layer(torch.zeros(1, 5, 8, dtype=torch.float64))


def test_tokens_without_a_step_keep_their_gates() -> None:
    class Frozen(Momentum):
        def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
            gates, state = super().gates(x, state, ctx)
            return gates._replace(eta=0 * gates.eta), state

        def gates_at(self, gates: Gates, committed: Committed) -> Gates:
            return gates._replace(eta=gates.eta + 1, alpha=0 * gates.eta)

    layer = Specimen(Linear, task, lambda: Frozen(4, decay="constant", decay_init=1.0)).make()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    after = run(layer, x).state.weights
    for slot in ("commit", "weights"):
        for name, w in after.get(slot, {}).items():
            torch.testing.assert_close(w, layer.learner.init[name].expand_as(w))


def test_half_precision_and_no_gradients() -> None:
    layer = metattt.build("layer=ttt3r", "dim=16", "num_heads=2")
    x = torch.randn(2, 40, 16)
    with torch.no_grad():
        plain = layer(x)[0]
        with torch.autocast("cpu", torch.bfloat16):
            rough = layer(x)[0]
    assert F.cosine_similarity(plain.flatten(), rough.float().flatten(), dim=0) > 0.99


def test_alignment_needs_labels_like_predictions() -> None:
    layer = metattt.build(
        "layer=custom", "task=mttt", "optimizer=state_gated", "optimizer.step_gate=alignment", "dim=16", "num_heads=2"
    )
    with pytest.raises(MetaTTTError, match=r"optimizer\.step_gate=alignment compares predictions of width 8"):
        layer(torch.randn(1, 5, 16))


@pytest.mark.parametrize(("setting", "value"), [("step_gate", "surprise"), ("step_gate_params", "none")])
def test_refused(setting: str, value: str) -> None:
    with pytest.raises(MetaTTTError, match=rf"optimizer\.{setting}"):
        StateGated(**{setting: value})  # type: ignore[arg-type]
