"""Unmodified modules as learners: the dual form against the primal one, and against a token loop of the module itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.learners import ModuleLearner
from metattt.optimizers import GradientDescent
from metattt.tasks import Reconstruction
from metattt.testing import LearnerConformance, Specimen
from metattt.testing.specimen import compare, run

D = 8  # head width


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, 5)
        self.down = nn.Linear(5, D)
        self.back = nn.Linear(D, 5, bias=False)
        self.back.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) + self.back(x.sin())) + F.gelu(self.up(x)) @ self.up.weight


class Twice(nn.Module):
    """One layer applied twice, and its bias once more by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.sigmoid(self.layer(x))) * self.layer.bias


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 3, 3, padding="same")
        self.second = nn.Conv1d(3, 2, 3, stride=2, padding=1, dilation=1)
        self.norm = nn.GroupNorm(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(F.silu(self.first(x.unsqueeze(1))))).flatten(1)


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, (2, 1), bias=False)
        self.out = nn.Linear(8, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.conv(x.view(-1, 2, 2, 2))).flatten(1))


class Quantised(nn.Module):
    """A table looked up by the signs of the token, one of its rows never trained, and a smooth part, so that the input has a
    gradient too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, padding_idx=1)
        self.mix = nn.Linear(3 * D // 2 + D, D)

    def forward(self, x: Tensor) -> Tensor:
        bits = (x > 0).long().unflatten(-1, (-1, 2))
        return self.mix(torch.cat([self.table(bits[..., 0] + 2 * bits[..., 1]).flatten(1), x], dim=-1))


class Gated(nn.Module):
    """A gated linear unit with a scalar, and functions of vectors."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.project = nn.Linear(width, 2 * width)
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.strength = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.project(x), -1) * F.softplus(self.temperature)
        return (1 - torch.sigmoid(self.strength)) * x + y / (1 + self.strength.exp())


class Attention(nn.Module):
    """A token as four pieces that attend to each other, with position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(1, 4, 2))
        self.qkv = nn.Linear(2, 6)
        self.norm = nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.unflatten(-1, (4, 2)) + self.place
        q, k, v = self.qkv(self.norm(pieces)).chunk(3, dim=-1)
        return (pieces + (q @ k.mT / 2).softmax(-1) @ v).flatten(1)


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.w, self.b = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D))
        self.v = nn.Parameter(torch.randn(D))
        self.act = nn.PReLU(D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(torch.addmm(self.b, self.norm(x), self.w))
        return y * (x @ self.v).unsqueeze(-1) + torch.matmul(x, self.w.t())


class Constants(nn.Module):
    """Buffers and frozen parameters are shared by the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.layer.bias.requires_grad_(False)
        self.register_buffer("shift", torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) + self.shift)


class Unbatched(nn.Module):
    """A module that takes pieces for its batch axis: no translation, but any other form."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.unflatten(-1, (4, 2)).transpose(0, 1)
        return torch.tanh(self.layer(pieces)).transpose(0, 1).flatten(1)


class Unsupported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x @ torch.linalg.matrix_exp(self.inner.weight) + self.inner.bias)


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(nn.Linear(D, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, D, bias=False)),
    "tied": Tied,
    "twice": Twice,
    "conv1d": Convolutions,
    "conv2d": Image,
    "embedding": Quantised,
    "gated": Gated,
    "attention": Attention,
    "rms_norm": RootMeanSquare,
    "constants": Constants,
}
RULES: dict[str, Callable[[], GradientDescent]] = {
    "token_steps": lambda: GradientDescent(4, token_steps="shared"),
    "online": lambda: GradientDescent(4, "online", base_lr=0.3),
    "previous": lambda: GradientDescent(4, read="previous"),
}


def specimen(module: Callable[[], nn.Module], rule: Callable[[], GradientDescent], norm: bool = False) -> Specimen:
    return Specimen(lambda: ModuleLearner(module(), residual=norm, norm=norm), Reconstruction, rule, dim=2 * D)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_dual_is_primal(shape: str, rule: str) -> None:
    spec = specimen(SHAPES[shape], RULES[rule], norm=shape == "gated")
    x = spec.tokens()
    assert spec.make().form == "dual"
    oracle = run(spec.make(form="primal"), x, [6], grads=True)
    assert all(g.any() for name, g in oracle.grads.items() if name.startswith("learner")), "a weight that nothing tests"
    assert compare(run(spec.make(form="dual"), x, [6], grads=True), oracle) < 1e-9
    if rule == "previous":
        assert compare(run(spec.make(form="summed"), x, [6], grads=True), oracle) < 1e-9


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Unsupported, "'inner/weight' is used by .*matrix_exp"),
        (Unbatched, "'layer/weight' is used by linear on something that is not a batch of tokens"),
    ],
)
def test_other_forms_take_what_dual_refuses(module: Callable[[], nn.Module], message: str) -> None:
    """By the weight and the operation that uses it."""
    assert specimen(module, RULES["token_steps"]).make().form == "primal"
    with pytest.raises(MetaTTTError, match=message):
        specimen(module, RULES["token_steps"]).make(form="dual")
    spec = specimen(module, RULES["previous"])
    x = spec.tokens()
    assert spec.make().form == "summed"
    oracle = run(spec.make(form="primal"), x, [6], grads=True)
    assert compare(run(spec.make(form="summed"), x, [6], grads=True), oracle) < 1e-9


class Mixes(nn.Module):
    def __init__(self, causal: bool = True, width: int = D) -> None:
        super().__init__()
        self.layer, self.causal = nn.Linear(width, width), causal

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.cumsum(0) if self.causal else x + x.mean(0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModuleLearner(Mixes()), "mixes_tokens"),
        (lambda: ModuleLearner(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)))), "changes its buffer 0.param"),
        (lambda: ModuleLearner(nn.Embedding(2, D, max_norm=1.0)), "leave them out"),
        (lambda: ModuleLearner(Mixes(causal=False), mixes_tokens=True), "later ones"),
        (lambda: ModuleLearner(nn.Sequential(nn.Linear(D, D), nn.Dropout(0.1))), "set its p to 0"),
        (lambda: ModuleLearner(nn.Linear(D, 3)), "width 3: they must have the head width 8"),
        (lambda: ModuleLearner(nn.Linear(5, D)), "cannot run on tokens"),
    ],
)
def test_modules_that_cannot_be_learners_are_refused(make: Callable[[], ModuleLearner], message: str) -> None:
    with pytest.raises(MetaTTTError, match=message):
        TTTLayer(2 * D, 2, Reconstruction(), make(), GradientDescent(4, read="previous"))


class TestModuleLearner(LearnerConformance):
    dim = 32
    make = staticmethod(lambda: ModuleLearner(Gated(16), residual=True, norm=True))

    def specimens(self) -> dict[str, Specimen]:
        rules = {"token steps": RULES["token_steps"], "batch": lambda: GradientDescent(4, "batch", compute_chunk=3)}
        return {name: self.specimen(self.make, Reconstruction, rule) for name, rule in rules.items()}


class TestModuleThatMixesTokens(LearnerConformance):
    dim = 32
    make = staticmethod(lambda: ModuleLearner(Mixes(width=16), residual=True, norm=True, mixes_tokens=True))
