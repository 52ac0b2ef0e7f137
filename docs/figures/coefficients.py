"""What a query reads of every token's gradient under four rules: the matrices that the optimizers themselves return."""

from __future__ import annotations

from pathlib import Path

import torch
from drawing import BLUE, HERE, new, write
from matplotlib.patches import Rectangle

from metattt.optimizers import Gates, GradientDescent, InnerOptimizer, Momentum

TOKENS = 12


def matrices() -> dict[str, torch.Tensor]:
    """`[T, T]` for each rule: row t is what query t reads, column s the gradient of token s."""
    ones = torch.ones(1, 1, TOKENS, dtype=torch.float64)
    half = torch.full_like(ones, 0.8)
    rules: dict[str, tuple[InnerOptimizer, Gates]] = {
        "gradient descent": (GradientDescent(mini_batch_size=TOKENS), Gates(ones)),
        "token steps τ": (GradientDescent(mini_batch_size=TOKENS, token_steps="shared"), Gates(ones)),
        "decay α = 0.8": (GradientDescent(mini_batch_size=TOKENS), Gates(ones, alpha=half)),
        "momentum β = 0.8": (Momentum(mini_batch_size=TOKENS), Gates(ones, beta=half)),
    }
    found = {}
    for name, (rule, gates) in rules.items():
        rule.setup(8, 1, 8)
        mix = rule.double().coefficients(gates, 0, ("commit",), "inclusive").mix
        assert mix is not None
        found[name] = mix.detach()[0, 0]
    return found


def draw(folder: Path = HERE) -> Path:
    found = matrices()
    figure, axes = new(9.2, 2.7, ncols=len(found))
    for place, (name, matrix) in zip(axes, found.items(), strict=True):
        shown = matrix / matrix.max()
        for t in range(TOKENS):
            for s in range(TOKENS):
                if shown[t, s] > 0:
                    strength = 0.12 + 0.88 * float(shown[t, s])
                    place.add_patch(Rectangle((s + 0.06, t + 0.06), 0.88, 0.88, fc=BLUE, alpha=strength, lw=0))
        place.set(xlim=(0, TOKENS), ylim=(TOKENS, 0), aspect="equal", title=name, xticks=[], yticks=[])
        place.set_xlabel("gradient of token s")
        place.title.set_size(10)
    axes[0].set_ylabel("read by query t")
    data = {name: [[round(x, 6) for x in row] for row in matrix.tolist()] for name, matrix in found.items()}
    return write(figure, "coefficients", data, folder)
