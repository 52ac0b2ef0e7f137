"""Where gradients are taken: the error that a plain linear learner makes at each token, for the three anchors."""

from __future__ import annotations

from pathlib import Path

import torch
from drawing import BLUE, GREEN, HERE, ORANGE, new, write

from metattt import TTTLayer
from metattt.learners import Linear
from metattt.optimizers import GradientDescent
from metattt.tasks import Reconstruction, Views

TOKENS, WIDTH, SEQUENCES = 96, 16, 64
ANCHORS = {"online": BLUE, "minibatch": GREEN, "batch": ORANGE}


class Regression(Reconstruction):
    """v = M k with a matrix M that no token tells: what there is to learn while reading."""

    def views(self, x, state, ctx, **given):
        k = torch.nn.functional.normalize(x, dim=-1).unsqueeze(1)
        generator = torch.Generator().manual_seed(1)
        matrix = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
        return Views(k, k @ matrix, k), state


RATES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)


def errors(anchor: str, rate: float, seed: int) -> list[float]:
    """‖k_t W_{t−1} − v_t‖² over ‖v_t‖² at each token, the mean over sequences."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SEQUENCES, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    rule = GradientDescent(
        mini_batch_size=16, anchor=anchor, read="exclusive", base_lr=rate, lr="constant", lr_scale="none"
    )
    learner = Linear(bias=False, residual=False, norm=False, learn_init=False)
    layer = TTTLayer(WIDTH, 1, task=Regression(), learner=learner, optimizer=rule).double()
    layer.norm, layer.out = None, torch.nn.Identity()
    with torch.no_grad():
        y, _ = layer(x)
        v = layer.task.views(x, {}, None)[0].v.squeeze(1)
    wrong = (y - v).square().sum(-1).mean(0) / v.square().sum(-1).mean(0)
    return [round(value, 5) for value in wrong.tolist()]


def curves() -> dict[str, dict[str, object]]:
    """Every anchor at the step size that is best for it on other sequences."""
    found: dict[str, dict[str, object]] = {}
    for anchor in ANCHORS:
        rate = min(RATES, key=lambda rate, anchor=anchor: sum(errors(anchor, rate, seed=1)))
        found[anchor] = {"rate": rate, "errors": errors(anchor, rate, seed=0)}
    return found


def draw(folder: Path = HERE) -> Path:
    found = curves()
    figure, axes = new(7.2, 3.0)
    says = {"online": "the newest weights", "minibatch": "the last commit, b = 16", "batch": "W0"}
    for anchor, colour in ANCHORS.items():
        label = f"{anchor}: {says[anchor]} (η = {found[anchor]['rate']})"
        axes.plot(range(TOKENS), found[anchor]["errors"], color=colour, label=label)
    axes.set(xlabel="tokens read", ylabel="squared error / ‖v‖²", yscale="log")
    axes.legend(frameon=False)
    return write(figure, "online", found, folder)
