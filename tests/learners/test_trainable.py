"""Which weights of a learner are fast, and steps of their own size for each, of modules and learners of one's own. (Those of
the package: `test_drawn_compositions`.)"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from refusals_for_tests import refusal
from torch import Tensor, nn

from metattt.layer import TTTLayer
from metattt.learners import Learner, Linear, ModuleLearner, Weight
from metattt.optimizers import GradientDescent
from metattt.tasks import Reconstruction
from metattt.testing.specimen import Specimen, compare, run

BOUND = 1e-9  # relative, float64
DIM = 8


def make(learner: Learner, form: str = "auto", **rule: Any) -> TTTLayer:
    settings: dict[str, Any] = {"mini_batch_size": 4, "lr_scale": "none", "base_lr": 0.2} | rule
    return Specimen(lambda: learner, Reconstruction, lambda: GradientDescent(**settings), DIM).make(form=form)


def tokens(length: int = 11) -> Tensor:
    return torch.randn(2, length, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


class Apart(nn.Module):
    """A module that does with its matrix what no primitive does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.eye(4) / 2), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.matrix_exp(self.weight) + self.shift


def test_any_module() -> None:
    options: dict[str, Any] = {"trainable": ["2/weight", "2/bias"], "step_scale": {"2/weight": 0.5}}
    layers = [make(ModuleLearner(net(), **options), form) for form in ("primal", "dual")]
    assert set(layers[0].learner.init) == {"2/weight", "2/bias"}
    assert set(layers[0].learner.slow) == {"0/weight", "0/bias"}
    assert compare(*[run(layer, tokens(), grads=True) for layer in layers]) < BOUND
    by_depth = make(ModuleLearner(net(), step_scale=0.1)).learner  # type: ignore[call-arg]
    assert by_depth.step_scales == {"0/weight": 0.1, "0/bias": 0.1}
    for given, read, form in (({"trainable": ["shift"]}, "inclusive", "auto"), ({"step_scale": {"weight": 0.1}}, "previous", "summed")):
        apart = [make(ModuleLearner(Apart(), **given), one, read=read) for one in ("primal", form)]
        assert compare(*[run(layer, tokens(), grads=True) for layer in apart]) < BOUND


class Own(Linear):
    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {"up": Weight((d_in, d_out)), "mean": Weight((d_out,))}


def test_steps_by_layers_need_names_that_show_them() -> None:
    refusal(lambda: make(Own(step_scale=0.5)), "names of Own's weights show none: give factors by name, of up, mean")


def test_kernels_leave_both_alone() -> None:
    for options in ({"trainable": [type("Name", (str,), {})("w1")]}, {"step_scale": {"w1": 0.5}}):
        layer = make(Linear(**options))
        assert layer.form == "dual"
        refusal(partial(make, Linear(**options), "fused"), "layer.form=fused has no kernel")
    assert make(Linear()).form == "fused"
    assert make(Linear(step_scale={"w1": 1.0})).form == "fused"  # type: ignore[call-arg]
