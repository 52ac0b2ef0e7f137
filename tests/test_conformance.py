"""The conformance suite on our own components, and on broken ones: every law must be able to fail."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.composition.compose import compose
from metattt.errors import MetaTTTError
from metattt.learners import MLP, FastWeights, KernelEstimator, Learner, Linear, Weight
from metattt.optimizers import Adam, Append, BlockMomentum, Gates, GradientDescent, InnerOptimizer, Momentum
from metattt.optimizers.base import Coefficients
from metattt.state import Context, Tensors
from metattt.tasks import Reconstruction, Task, Views
from metattt.testing import (
    LAWS,
    LearnerConformance,
    NotApplicable,
    OptimizerConformance,
    Specimen,
    TaskConformance,
    check,
)


class TestLinear(LearnerConformance):
    make = staticmethod(lambda: Linear())


class TestMLP(LearnerConformance):
    make = staticmethod(lambda: MLP(depth=3, expansion=1.5, activation="silu"))


class TestExponentialKernel(LearnerConformance):
    make = staticmethod(lambda: KernelEstimator(bias=True, learn_init=True))


class TestGaussianKernel(LearnerConformance):
    make = staticmethod(lambda: KernelEstimator("gaussian", residual=True, norm=True))


class TestReconstruction(TaskConformance):
    make = staticmethod(lambda: Reconstruction(bias=True, feature_map="elu", normalize_qk=True))


class TestReconstructionFromNoise(TaskConformance):
    # A delta above most errors: at each kink that rounding crosses a second derivative flips, so bf16 gradients are off by the
    # square root of the share of crossings, whatever the code does.
    make = staticmethod(lambda: Reconstruction("shared_qk", rope="full", corruption="noise", loss="huber", huber_delta=3.0, conv_width=3))


class TestReconstructionFromHoles(TaskConformance):
    make = staticmethod(lambda: Reconstruction(feature_map="silu", corruption="mask", corruption_rate=0.3, seed=1, loss="dot"))


class TestGradientDescent(OptimizerConformance):
    make = staticmethod(lambda: GradientDescent(4, lr="shared", token_steps="per_head", compute_chunk=3))


class TestOnlineGradientDescent(OptimizerConformance):
    make = staticmethod(lambda: GradientDescent(1, "online", steps=1, lr="constant"))


class TestMomentum(OptimizerConformance):
    make = staticmethod(lambda: Momentum(4, base_lr=0.5, nesterov=True, decay="per_head", pull=True))


class TestGatedDelta(OptimizerConformance):
    make = staticmethod(lambda: Momentum(4, "online", base_lr=0.5, momentum="none", decay="mamba2", gradient_at="decayed"))


class TestBlockMomentum(OptimizerConformance):
    make = staticmethod(lambda: BlockMomentum(4, read="committed", base_lr=0.5, decay="per_head"))


class TestOrthogonalMomentum(OptimizerConformance):
    make = staticmethod(lambda: BlockMomentum(4, base_lr=0.5, orthogonalize=True, row_norm=True, pool="gates"))
    # Newton-Schulz lifts small singular values of a step up to 480-fold (3.4445^5), and their rounding with them.
    test_precision_of_outputs = None  # type: ignore[assignment]
    test_precision_of_gradients = None  # type: ignore[assignment]


class TestAdam(OptimizerConformance):
    make = staticmethod(lambda: Adam(4, base_lr=0.02))
    # While it is young, its step is almost the sign of the gradient: where that is near zero, rounding turns it around.
    test_precision_of_outputs = None  # type: ignore[assignment]
    test_precision_of_gradients = None  # type: ignore[assignment]


class TestInnerSteps(OptimizerConformance):
    make = staticmethod(lambda: GradientDescent(4, read="previous", steps=2))


class TestBlockReads(OptimizerConformance):
    make = staticmethod(lambda: GradientDescent(4, read="block"))


class TestFinalReads(OptimizerConformance):
    make = staticmethod(lambda: GradientDescent(4, read="final", steps=2))


class TestAppend(OptimizerConformance):
    make = staticmethod(Append)


# -- learners, tasks and rules that break one law each ---------------------------------------------------------------------------


class RawTable(Learner):
    """Goes round the accessor: the dual form does not see this use of the weight."""

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {"w": Weight((d_in, d_out))}

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        return w.linear(x, "w") + torch.tanh(x) @ w._fast["w"].expand(x.shape[0], -1, -1, -1)


class WrongAlgebra(GradientDescent):
    """Coefficients that are not those of the recurrence: carried weights move twice as far."""

    def coefficients(self, gates: Gates, phase: Any, carried: Any, read: Any) -> Coefficients:
        right = super().coefficients(gates, phase, carried, read)
        return right._replace(carry={base: (factors, 2 * weight) for base, (factors, weight) in right.carry.items()})


class Detached(Reconstruction):
    """A label view that the outer loop cannot see."""

    def views(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Views, Tensors]:
        views, state = super().views(x, state, ctx)
        return views._replace(v=views.v.detach()), state


class CallPositions(Reconstruction):
    """Counts positions from the start of the call instead of the document."""

    def views(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Views, Tensors]:
        views, state = super().views(x, state, ctx)
        place = torch.arange(x.shape[1], dtype=x.dtype).view(1, 1, -1, 1)
        return views._replace(q=views.q + place.sin()), state


class Foresight(GradientDescent):
    """Step sizes from the mean over all tokens of the call."""

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        return gates._replace(eta=gates.eta + 0.1 * x.mean((1, 2), keepdim=True).sigmoid()), state


class HiddenForesight(GradientDescent):
    """The same with no gradient: only changed outputs give it away."""

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        return gates._replace(eta=gates.eta + 0.1 * x.detach().mean((1, 2), keepdim=True).sigmoid()), state


class AnchorDependent(GradientDescent):
    """Another step size for another anchor."""

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        return gates._replace(eta=gates.eta * (1 if self.anchor == "minibatch" else 0.9)), state


class CountsPadding(GradientDescent):
    """A step size that decays with the number of tokens, padding included."""

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        before = state.get("count", x.new_zeros(x.shape[0]))
        count = before.unsqueeze(1) + torch.arange(x.shape[1])
        return gates._replace(eta=gates.eta / (1 + count).unsqueeze(1)), {"count": before + x.shape[1]}


class TokenShift(Reconstruction):
    """The training view is that of the token before, with switches for what it forgets."""

    def __init__(self, minds_padding: bool, minds_documents: bool):
        super().__init__()
        self.minds_padding, self.minds_documents = minds_padding, minds_documents

    def views(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Views, Tensors]:
        before = state.get("before", torch.zeros_like(x[:, :1]))
        shifted = torch.cat([before, x[:, :-1]], dim=1)
        if self.minds_documents and ctx.first is not None:
            shifted = shifted * ~ctx.first.unsqueeze(-1)
        views, _ = super().views(x, {}, ctx)
        k = super().views(shifted, {}, ctx)[0].k
        joined = torch.cat([before, x], dim=1)
        last = ctx.lengths if self.minds_padding else torch.full_like(ctx.lengths, x.shape[1])
        return views._replace(k=k), {"before": joined.gather(1, last.view(-1, 1, 1).expand(-1, 1, x.shape[2]))}


class Unsaved(Reconstruction):
    """A random projection that is neither parameter nor buffer: a saved layer comes back as another one."""

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.__dict__["rotation"] = torch.randn(head_dim)

    def views(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Views, Tensors]:
        views, state = super().views(x, state, ctx)
        return views._replace(q=views.q * self.__dict__["rotation"]), state


class LosesDigits(Reconstruction):
    """Adds and subtracts a large number: nothing in fp64, all digits in bf16."""

    def views(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Views, Tensors]:
        views, state = super().views(x, state, ctx)
        return views._replace(q=views.q + 300 - 300, v=views.v + 300 - 300), state


def specimen(part: Callable[[], Any]) -> Specimen:
    """A layer of sound parts, with `part` in its place."""
    made = part()
    learner: Callable[[], Learner] = part if isinstance(made, Learner) else MLP
    task: Callable[[], Task] = part if isinstance(made, Task) else Reconstruction
    optimizer: Callable[[], InnerOptimizer] = part if isinstance(made, InnerOptimizer) else lambda: GradientDescent(4)
    return Specimen(learner, task, optimizer)


BROKEN = [
    ("forms", RawTable),
    ("forms_float32", RawTable),
    ("forms", lambda: WrongAlgebra(4)),
    ("forms_float32", lambda: WrongAlgebra(4)),
    ("derivatives", Detached),
    ("splits", CallPositions),
    ("splits", lambda: Foresight(4)),
    ("causality", lambda: Foresight(4)),
    ("causality", lambda: HiddenForesight(4)),
    ("limits", lambda: AnchorDependent(4)),
    ("masks", lambda: CountsPadding(4)),
    ("masks", lambda: TokenShift(minds_padding=False, minds_documents=True)),
    ("packing", lambda: TokenShift(minds_padding=True, minds_documents=False)),
    ("packing", lambda: CountsPadding(4)),
    ("round_trips", Unsaved),
    ("precision_outputs", LosesDigits),
    ("precision_gradients", LosesDigits),
]


@pytest.mark.parametrize(("law", "part"), BROKEN, ids=[f"{law}-{part().__class__.__name__}" for law, part in BROKEN])
def test_law_can_fail(law: str, part: Callable[[], Any]) -> None:
    error = LAWS[law].worst_error(specimen(part))
    assert not error <= LAWS[law].bound
    assert error > 0


def test_every_law_has_a_broken_component() -> None:
    assert {law for law, _ in BROKEN} == set(LAWS)


def test_every_law_is_a_test() -> None:
    examined: list[str] = []

    class Recorder(LearnerConformance):
        make = staticmethod(Linear)

        def examine(self, name: str) -> None:
            examined.append(name)

    recorder = Recorder()
    for name in dir(recorder):
        if name.startswith("test_"):
            getattr(recorder, name)()
    assert sorted(examined) == sorted(LAWS)


def test_sound_token_shift_passes() -> None:
    """The broken tasks above differ from a sound one in the broken part alone."""
    spec = specimen(lambda: TokenShift(minds_padding=True, minds_documents=True))
    for name in ("masks", "packing", "splits", "forms"):
        assert LAWS[name].worst_error(spec) <= LAWS[name].bound


def test_a_broken_component_fails_its_class() -> None:
    class Broken(OptimizerConformance):
        make = staticmethod(lambda: Foresight(4))

    with pytest.raises(AssertionError, match=r"no later token is seen: error .* is above 0e\+00 \(Linear\)"):
        Broken().test_causality()


class MixesButSays(Learner):
    """A causal average over the tokens of a mini-batch, declared."""

    mixes_tokens = True

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {"w": Weight((d_in, d_out)), "b": Weight((d_out,))}

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        z = w.linear(x, "w", "b")
        return z + 0.1 * torch.ones(x.shape[2], x.shape[2], dtype=x.dtype).tril() @ torch.tanh(z)


class TestLearnerThatMixesTokens(LearnerConformance):
    make = staticmethod(MixesButSays)


class RawWeight(Learner):
    """A raw fast weight: no dual form, `auto` must fall back."""

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {"w": Weight((d_in, d_out), std=0.3), "s": Weight((d_out,), value=1.0)}

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        return x @ torch.tanh(w["w"]) * F.softplus(w["s"]).unsqueeze(-2)


class TestLearnerWithRawWeights(LearnerConformance):
    make = staticmethod(RawWeight)


@pytest.mark.parametrize(
    ("law", "optimizer", "reason"),
    [
        ("splits", lambda: GradientDescent(4, read="block"), "read=block shows a query tokens"),
        ("causality", lambda: GradientDescent(4, read="final"), "read=final is not causal"),
        ("packing", lambda: GradientDescent(4, read="final"), "read=final answers every query"),
        ("limits", lambda: GradientDescent(4, read="previous", steps=2), "steps=2"),
    ],
)
def test_laws_that_do_not_apply_say_why(law: str, optimizer: Callable[[], InnerOptimizer], reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason):
        LAWS[law].worst_error(specimen(optimizer))


SMALL = ("dim=8", "num_heads=2", "optimizer.mini_batch_size=3")


def test_check_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    check(compose("learner=linear", *SMALL, job="check"))
    out = capsys.readouterr().out
    assert "form=fused: kernels ttt_linear.native (cpu), ttt_linear.closed_form (cpu), ttt_linear.triton (cuda)" in " ".join(out.split())
    assert out.count("pass") == len(LAWS) and "FAIL" not in out


def test_check_tells_what_does_not_apply(capsys: pytest.CaptureFixture[str]) -> None:
    check(compose("layer=attention", "dim=8", "num_heads=2", job="check"))
    out = capsys.readouterr().out
    assert out.count("does not apply") == 3 and out.count("pass") == len(LAWS) - 3


def test_check_ends_with_code_1_on_a_broken_law(capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{Foresight.__module__}.{Foresight.__qualname__}"
    with pytest.raises(SystemExit) as end:
        check(
            compose("optimizer=custom", f"optimizer._target_={target}", "optimizer.mini_batch_size=3", "dim=8", "num_heads=2", job="check")
        )
    assert end.value.code == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_layer_that_cannot_be_built_is_an_error() -> None:
    with pytest.raises(MetaTTTError, match="does not divide"):
        check(compose("dim=10", "num_heads=4", job="check"))
