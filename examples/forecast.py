"""A recording forecast ahead of time: TTT-Linear, attention and a GRU with as many parameters, in a plain PyTorch loop.

    python examples/forecast.py [steps=400]

The series comes with matplotlib: the potential of a cell's membrane, 12,000 samples. A model reads 256 of them and says at
each what comes 8 samples later. Every model takes the best of five learning rates on samples 7,000 to 9,000; the last 3,000,
which nothing was chosen by, are what is reported. The last value again, which needs no model, is the line to beat.
"""

from __future__ import annotations

import sys

import matplotlib.cbook
import numpy as np
import torch
from torch import Tensor, nn

import metattt

AHEAD, LENGTH, BATCH = 8, 256, 16  # samples, samples, windows
WIDTHS = {"TTT-Linear": 32, "attention": 36, "GRU": 29}  # with which each has about 5,300 parameters
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
TRAIN, CHOOSE, REPORT = slice(0, 7000), slice(7000, 9000), slice(9000, 12000)


def series() -> Tensor:
    """`[12000]` samples, of mean 0 and variance 1 on those that are trained on."""
    file = matplotlib.cbook.get_sample_data("membrane.dat", asfileobj=False)
    samples = torch.from_numpy(np.fromfile(file, np.float32))
    return (samples - samples[TRAIN].mean()) / samples[TRAIN].std()


class Forecaster(nn.Module):
    """Values `[B, T]` to forecasts `[B, T]`, the change from the value that was just read."""

    def __init__(self, name: str):
        super().__init__()
        dim = WIDTHS[name]
        self.read, self.layer = nn.Linear(1, dim), make_layer(name, dim)
        self.norm, self.say = nn.LayerNorm(dim), nn.Linear(dim, 1)
        nn.init.zeros_(self.say.weight)  # at first it says the last value again

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(x.unsqueeze(-1))
        y, _ = self.layer(h)  # a TTT layer is called as a GRU is: outputs, and the state after them
        return x + self.say(self.norm(h + y)).squeeze(-1)


def make_layer(name: str, dim: int) -> nn.Module:
    """A sequence layer, `y, state = layer(x)` on `[B, T, dim]`."""
    if name == "GRU":
        return nn.GRU(dim, dim, batch_first=True)
    layer = "ttt_linear" if name == "TTT-Linear" else "attention"
    return metattt.build(layer, dim=dim, num_heads=2)


def error(model: nn.Module, x: Tensor, length: int = LENGTH) -> float:
    """Mean squared error of the forecasts of a stretch, read in windows of so many samples."""
    windows = x.unfold(0, length + AHEAD, length)
    with torch.no_grad():
        return (model(windows[:, :length]) - windows[:, AHEAD:]).square().mean().item()


def train(name: str, x: Tensor, rate: float, steps: int) -> nn.Module:
    """A forecaster after so many steps on windows of the training samples."""
    torch.manual_seed(0)
    model = Forecaster(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    windows = x[TRAIN].unfold(0, LENGTH + AHEAD, 1)
    for _ in range(steps):
        window = windows[torch.randint(len(windows), (BATCH,))]
        loss = (model(window[:, :LENGTH]) - window[:, AHEAD:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


class LastValue(nn.Module):
    """What it read is what comes."""

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T]` to `[B, T]`."""
        return x


def main(steps: int = 400) -> dict[str, tuple[float, float]]:
    """Prints the table; the errors of every model: in windows as long as those of training, and on all in one go."""
    x = series()
    once = len(x[REPORT]) - AHEAD
    found = {}
    print(f"{'model':<16}{'parameters':>11}{'rate':>8}{f'error, {LENGTH} at a time':>25}{f'{once} in one go':>18}")
    for name in ("the last value", *WIDTHS):
        models = {rate: train(name, x, rate, steps) for rate in RATES} if name in WIDTHS else {0.0: LastValue()}
        rate, model = min(models.items(), key=lambda item: error(item[1], x[CHOOSE]))
        found[name] = error(model, x[REPORT]), error(model, x[REPORT], once)
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name:<16}{count:>11,}{rate:>8g}{found[name][0]:>25.4f}{found[name][1]:>18.4f}")
    return found


if __name__ == "__main__":
    main(*(int(word.removeprefix("steps=")) for word in sys.argv[1:]))
