"""The conformance suite on our own components. (On broken ones: `testing/test_broken_components`.)"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from metattt.composition.compose import compose
from metattt.layer import TTTLayer
from metattt.learners import (
    MLP,
    ChebyshevRidge,
    Convolution,
    KernelEstimator,
    KernelRidge,
    Learner,
    Linear,
    LogLinear,
    NestedTTT,
    RecurrentRidge,
    SwiGLU,
    Transformer,
)
from metattt.optimizers import Adam, Append, BlockMomentum, GradientDescent, Momentum
from metattt.tasks import DecodedReconstruction, LaCTViews, NextToken, Reconstruction
from metattt.testing import Conformance, LearnerConformance, OptimizerConformance, Specimen, TaskConformance
from metattt.testing.conformance import published_task
from metattt.testing.report import specimen_of

# -- parts of the package ----------------------------------------------------------------------------------------------

LEARNERS: dict[str, Any] = {
    "Linear": Linear,
    "MLP": lambda: MLP(depth=3, expansion=1.5, activation="silu"),
    "SwiGLU": lambda: SwiGLU(1.5),
    "Convolution": lambda: Convolution("tokens", channels=1),
    "Window": lambda: KernelEstimator(window=3, sinks=2, bias=True, learn_init=True),
    "KernelRidge": KernelRidge,
    "RecurrentRidge": lambda: RecurrentRidge(chunk=3),
    "ExactRidge": lambda: RecurrentRidge("exact", chunk=4, residual=True, norm=True),
    "ChebyshevRidge": lambda: ChebyshevRidge(chunk=4, residual=True, norm=True),
    "LogLinear": lambda: LogLinear("delta", chunk=4, residual=True, norm=True),
}
TASKS: dict[str, Any] = {
    "Reconstruction": lambda: Reconstruction(bias=True, feature_map="elu", normalize_qk=True),
    # A delta above most errors: at each kink that rounding crosses a second derivative flips, so bf16 gradients are off
    # by the square root of the share of crossings, whatever the code does.
    "ReconstructionFromNoise": lambda: Reconstruction(
        "shared_qk", rope="full", corruption="noise", loss="huber", huber_delta=3.0, conv_width=3
    ),
    "GroupedHeads": lambda: Reconstruction(kv_heads=1, qk_norm=True, rope="full", corruption="noise", seed=1),
    "LaCTViews": lambda: LaCTViews(rope_heads=1, qk_norm=True),
    "NextToken": lambda: NextToken(views="shared_qk", rope="full", corruption="mask", corruption_rate=0.3),
}
RULES: dict[str, Any] = {
    "GradientDescent": lambda: GradientDescent(4, lr="shared", token_steps="per_head", compute_chunk=3),
    "Momentum": lambda: Momentum(4, base_lr=0.5, nesterov=True, decay="per_head", decay_to_init=True),
    "GatedDelta": lambda: Momentum(4, "online", base_lr=0.5, momentum="none", decay="mamba2", gradient_at="decayed"),
    # Newton-Schulz lifts small singular values of a step up to 480-fold (3.4445^5), and their rounding with them.
    "OrthogonalMomentum": lambda: BlockMomentum(4, base_lr=0.5, orthogonalize=True, row_norm=True, pool="gates"),
    # While it is young, its step is almost the sign of the gradient: where that is near zero, rounding turns it around.
    "Adam": lambda: Adam(4, base_lr=0.02),
    "InnerSteps": lambda: GradientDescent(4, read="previous", steps=2),
    "FinalReads": lambda: GradientDescent(4, read="final", steps=2),
    # What an open mini-batch has added counts, whichever call has added it.
    "Clipped": lambda: GradientDescent(4, base_lr=0.3, max_norm=0.15),
    "ClippedTokenSteps": lambda: GradientDescent(4, base_lr=0.3, max_norm=0.15, token_steps="shared"),
    "Append": lambda: Append(write="shared", decay="retnet", levels=4),
}
for _base, _made in ((LearnerConformance, LEARNERS), (TaskConformance, TASKS), (OptimizerConformance, RULES)):
    for _name, _make in _made.items():
        globals()[f"Test{_name}"] = type(f"Test{_name}", (_base,), {"make": staticmethod(_make)})


class DecodedConformance(TaskConformance):
    make = staticmethod(DecodedReconstruction)


def test_labels_of_another_width_than_a_head() -> None:
    DecodedConformance().examine("threads")


class Gently(LearnerConformance):
    """At a rate of 0.1, as in their layers: at 1 the inner loop diverges, and rounding errors with it."""

    def specimens(self) -> dict[str, Specimen]:
        rule = partial(GradientDescent, 4, read="previous", base_lr=0.1)
        return {"read=previous": self.specimen(self.make, published_task, rule)}


class TestTransformer(Gently):
    make = staticmethod(lambda: Transformer(num_heads=2, expansion=2))


class TestNestedTTT(Gently):
    dim, num_heads = 4, 1

    @staticmethod
    def make() -> Learner:
        parts = {"task": Reconstruction(), "learner": Linear(), "optimizer": GradientDescent(2)}
        return NestedTTT(partial(TTTLayer, num_heads=1, **parts))


class TestRows(Conformance):
    """Rows whose rules erase, decay by channels, precondition, or learn several pairs a token."""

    rows: ClassVar[dict[str, tuple[str, ...]]] = {
        "rwkv7": (),
        "preconditioned_delta_net": (),
        "gated_delta_product": (),
        "atlas": ("task.window=3", "optimizer.mini_batch_size=4"),
    }

    def specimens(self) -> dict[str, Specimen]:
        made = {row: compose(f"layer={row}", "dim=8", "num_heads=2", *more, job="check") for row, more in self.rows.items()}
        return {row: specimen_of(cfg) for row, cfg in made.items()}
