"""Every law must be able to fail: on learners, tasks and rules that break it; and `metattt check` says so."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from metattt.composition.compose import compose
from metattt.learners import MLP, Convolution, FastWeights, Learner, Weight
from metattt.optimizers import BlockMomentum, Coefficients, Gates, GradientDescent, InnerOptimizer
from metattt.state import Context, Tensors
from metattt.tasks import Reconstruction, Task, Views
from metattt.testing import LAWS, LearnerConformance, NotApplicable, OptimizerConformance, Specimen, check
from metattt.testing.report import specimen_of


class RawTable(Learner):
    """Goes round the accessor: the dual form does not see this use of the weight."""

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {"w": Weight((d_in, d_out))}

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        return w.linear(x, "w") + torch.tanh(x) @ w._fast["w"].expand(x.shape[0], -1, -1, -1)


class Explodes(RawTable):
    """Finite for the first tokens only."""

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        return w.linear(x, "w").square().exp()


class WrongAlgebra(GradientDescent):
    """Coefficients that are not those of the recurrence: carried weights move twice as far."""

    def coefficients(self, gates: Gates, phase: Any, carried: Any, read: Any) -> Coefficients:
        right = super().coefficients(gates, phase, carried, read)
        return right._replace(advance={base: (factors, 2 * weight) for base, (factors, weight) in right.advance.items()})


class Changed(Reconstruction):
    """Views of which `change` makes something else."""

    def __init__(self, change: Callable[[Any, Views, Tensor], dict[str, Tensor]]):
        super().__init__()
        self.change = change

    def views(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Views, Tensors]:
        views, state = super().views(x, state, ctx)
        return views._replace(**self.change(self, views, x)), state


Detached = partial(Changed, lambda task, views, x: {"v": views.v.detach()})  # the outer loop cannot see it
# counts positions from the start of the call instead of the document
CallPositions = partial(Changed, lambda task, views, x: {"q": views.q + torch.arange(x.shape[1]).view(-1, 1).sin()})
OnlyTrained = partial(Changed, lambda task, views, x: {"k": views.k * (1 if task.training else 0.9)})
PerSequence = partial(Changed, lambda task, views, x: {"v": views.v / len(x)})  # a mean over the batch
# adds and subtracts a large number: nothing in fp64, all digits in bf16
LosesDigits = partial(Changed, lambda task, views, x: {"q": views.q + 300 - 300, "v": views.v + 300 - 300})


class Foresight(GradientDescent):
    """Step sizes from the mean over all tokens of the call, with no gradient: only changed outputs give it away."""

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        return gates._replace(eta=gates.eta + 0.1 * x.detach().mean((1, 2), keepdim=True).sigmoid()), state


class AnchorDependent(GradientDescent):
    """Another step size for another anchor."""

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        return gates._replace(eta=gates.eta * (1 if self.anchor == "minibatch" else 0.9)), state


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


class LendsParameters(Reconstruction):
    """Hands out a view of a parameter as state."""

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.shift = torch.nn.Parameter(torch.ones(dim))

    def views(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Views, Tensors]:
        views, _ = super().views(x + self.shift, {}, ctx)
        return views, {"shift": self.shift.expand(x.shape[0], -1)}


class WritesToTheGivenState(Reconstruction):
    """Counts tokens in the tensor that it was given."""

    def views(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Views, Tensors]:
        views, _ = super().views(x, {}, ctx)
        count = state.get("count", torch.zeros(x.shape[0]))
        return views, {"count": count.add_(ctx.lengths)}


class KeepsItsCall(Reconstruction):
    """Lays the label view down on itself, where another thread's call finds it."""

    def views(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Views, Tensors]:
        self.kept, state = super().views(x, state, ctx)
        time.sleep(0.002)
        return self.kept, state


def specimen(part: Callable[[], Any]) -> Specimen:
    """A layer of sound parts, with `part` in its place."""
    made = part()
    learner: Callable[[], Learner] = part if isinstance(made, Learner) else MLP
    task: Callable[[], Task] = part if isinstance(made, Task) else Reconstruction
    optimizer: Callable[[], InnerOptimizer] = part if isinstance(made, InnerOptimizer) else lambda: GradientDescent(4)
    return Specimen(learner, task, optimizer)


CALLS: list[int] = []


class CountsItsCalls(Reconstruction):
    """A loss that grows with every call once the layer stands, so that no check at build sees it: what is run again is not
    what was run."""

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        CALLS.clear()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:  # `layer.to(dtype)`
        CALLS.append(0)
        return super()._apply(fn, recurse)

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        if CALLS:
            CALLS.append(0)
        return super().loss(prediction, v) * (1 + 0.01 * len(CALLS))


BROKEN = [
    ("forms", RawTable),
    ("forms_float32", RawTable),
    ("forms", lambda: WrongAlgebra(4)),
    ("groups", CountsItsCalls),
    ("derivatives", Detached),
    ("splits", CallPositions),
    ("causality", lambda: Foresight(4)),
    ("limits", lambda: AnchorDependent(4)),
    ("alone", PerSequence),
    ("masks", lambda: TokenShift(minds_padding=False, minds_documents=True)),
    ("packing", lambda: TokenShift(minds_padding=True, minds_documents=False)),
    ("round_trips", Unsaved),
    ("round_trips", OnlyTrained),
    ("aliasing", LendsParameters),
    ("aliasing", WritesToTheGivenState),
    ("threads", KeepsItsCall),
    ("precision_outputs", LosesDigits),
    ("precision_gradients", LosesDigits),
]


@pytest.mark.parametrize(("law", "part"), BROKEN, ids=[f"{law}-{part().__class__.__name__}" for law, part in BROKEN])
def test_law_can_fail(law: str, part: Callable[[], Any]) -> None:
    verdict = LAWS[law].judge(specimen(part))
    assert verdict.failed
    assert verdict.error > 0


@pytest.mark.parametrize(("law", "learner", "task"), [("forms_float32", RawTable, Reconstruction), ("precision_outputs", MLP, LosesDigits)])
def test_a_sensitive_rule_does_not_excuse_a_fault(law: str, learner: Any, task: Any) -> None:
    orthogonal = partial(BlockMomentum, 4, base_lr=0.5, orthogonalize=True, row_norm=True, pool="gates")
    assert LAWS[law].judge(Specimen(learner, task, orthogonal)).failed


@pytest.mark.parametrize(("law", "choice", "reason"), [
    ("forms_float32", "layer=lact", r"form=primal itself loses .*e-0. in float32, 4 times that is allowed"),
    ("precision_outputs", "layer=lact", "to bf16 alone moves outputs by .*, 4 times"),
    ("precision_outputs", "layer=ttt_linear", "^$"),
])  # fmt: skip
def test_a_wider_bound_has_a_reason(law: str, choice: str, reason: str) -> None:
    cfg = compose(choice, "dim=16", "num_heads=2", job="check")
    verdict = LAWS[law].judge(specimen_of(cfg))
    assert not verdict.failed and re.search(reason, verdict.note)
    assert (verdict.bound > LAWS[law].bound) == bool(verdict.note)


def test_a_rule_that_rounding_turns_around_is_not_judged() -> None:
    spec = specimen_of(compose("layer=ttt_mlp", "optimizer=adam", "dim=16", "num_heads=2", job="check"))
    with pytest.raises(NotApplicable, match=r"moves gradients by .*e-01: a wrong result would not be noticed"):
        LAWS["precision_gradients"].judge(spec)


@pytest.mark.parametrize("law", ["forms", "alone"])
def test_a_layer_that_diverges_is_not_said_to_draw_random_numbers(law: str) -> None:
    verdict = LAWS[law].judge(specimen(Explodes))
    assert verdict.failed and verdict.note == "outputs are not finite: the inner loop diverges"
    with pytest.raises(NotApplicable, match="not finite"):  # on tokens of its own, which grow
        LAWS["threads"].judge(specimen(Explodes))


def test_every_law_has_a_broken_component() -> None:
    assert {law for law, _ in BROKEN} == set(LAWS)


def test_every_law_is_a_test() -> None:
    case = LearnerConformance()
    case.examine = lambda name: name
    assert {name: getattr(case, name)() for name in dir(case) if name.startswith("test_")} == {f"test_{n}": n for n in LAWS}


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


@pytest.mark.parametrize(("law", "part", "reason"), [
    ("splits", lambda: GradientDescent(4, read="block"), "read=block shows a query tokens"),
    ("causality", lambda: GradientDescent(4, read="final"), "read=final is not causal"),
    ("limits", lambda: GradientDescent(4, read="previous", steps=2), "steps=2"),
    ("limits", lambda: Convolution(over="tokens"), "tokens that mix"),
])  # fmt: skip
def test_laws_that_do_not_apply_say_why(law: str, part: Callable[[], Any], reason: str) -> None:
    with pytest.raises(NotApplicable, match=reason):
        LAWS[law].judge(specimen(part))


SMALL = ("dim=8", "num_heads=2", "optimizer.mini_batch_size=3")


def test_check_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    check(compose("learner=linear", *SMALL, job="check"))
    out = capsys.readouterr().out
    assert "form=fused, by the kernels ttt_linear.native (cpu)" in " ".join(out.split())
    assert out.count("pass") == len(LAWS) and "FAIL" not in out


class Single(RawTable):
    """Raises in most laws."""

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        return w.linear(x.float(), "w")


@pytest.mark.parametrize(("part", "of"), [(Foresight, "optimizer"), (Single, "learner")])
def test_check_ends_with_code_1_on_a_broken_law(part: type, of: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        check(compose(f"{of}=custom", f"{of}._target_={part.__module__}.{part.__qualname__}", *SMALL[:2], job="check"))
    assert end.value.code == 1
    assert "FAIL" in capsys.readouterr().out
