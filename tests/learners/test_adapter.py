"""Unmodified modules as learners: the dual form against the primal one. (Against a token loop of the module itself:
`test_drawn_compositions`.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class Made(nn.Module):
    """A function of a token and of parts by their names: modules, parameters, buffers."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def number(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def tied() -> nn.Module:
    up, back = nn.Linear(D, 5), nn.Linear(D, 5, bias=False)
    back.weight = up.weight

    def function(m: Any, x: Tensor) -> Tensor:
        return m.down(torch.tanh(m.up(x)) + m.back(x.sin())) + F.gelu(m.up(x)) @ m.up.weight

    return Made(function, up=up, down=nn.Linear(5, D), back=back)


def quantised(m: Any, x: Tensor) -> Tensor:
    """A table looked up by the signs of the token, one of its rows never trained, and a smooth part, so that the input
    has a gradient too."""
    bits = (x > 0).long().unflatten(-1, (-1, 2))
    return m.mix(torch.cat([m.table(bits[..., 0] + 2 * bits[..., 1]).flatten(1), x], dim=-1))


def gated(width: int = D) -> nn.Module:
    """A gated linear unit with a scalar, and functions of vectors."""

    def function(m: Any, x: Tensor) -> Tensor:
        y = F.glu(m.project(x), -1) * F.softplus(m.temperature)
        return (1 - torch.sigmoid(m.strength)) * x + y / (1 + m.strength.exp())

    parts = {"temperature": nn.Parameter(torch.tensor(0.3)), "strength": number(width)}
    return Made(function, project=nn.Linear(width, 2 * width), **parts)


def attention(m: Any, x: Tensor) -> Tensor:
    """A token as four pieces that attend to each other, with position embeddings."""
    pieces = x.unflatten(-1, (4, 2)) + m.place
    q, k, v = m.qkv(m.norm(pieces)).chunk(3, dim=-1)
    return (pieces + (q @ k.mT / 2).softmax(-1) @ v).flatten(1)


def root_mean_square(m: Any, x: Tensor) -> Tensor:
    y = m.act(torch.addmm(m.b, m.norm(x), m.w))
    return y * (x @ m.v).unsqueeze(-1) + torch.matmul(x, m.w.t())


def constants() -> nn.Module:
    """Buffers and frozen parameters are shared by the heads."""
    layer = nn.Linear(D, D)
    layer.bias.requires_grad_(False)
    return Made(lambda m, x: torch.tanh(m.layer(x) + m.shift), layer=layer, shift=torch.randn(D))


def unbatched() -> nn.Module:
    """A module that takes pieces for its batch axis: no translation, but any other form."""

    def function(m: Any, x: Tensor) -> Tensor:
        return torch.tanh(m.layer(x.unflatten(-1, (4, 2)).transpose(0, 1))).transpose(0, 1).flatten(1)

    return Made(function, layer=nn.Linear(2, 2))


def unsupported() -> nn.Module:
    def function(m: Any, x: Tensor) -> Tensor:
        return m.norm(x @ torch.linalg.matrix_exp(m.inner.weight) + m.inner.bias)

    return Made(function, inner=nn.Linear(D, D), norm=nn.LayerNorm(D))


def mixes(causal: bool = True, width: int = D) -> nn.Module:
    return Made(lambda m, x: m.layer(x.cumsum(0) if causal else x + x.mean(0)), layer=nn.Linear(width, width))


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(nn.Linear(D, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, D, bias=False)),
    "tied": tied,
    "twice": lambda: Made(lambda m, x: m.layer(torch.sigmoid(m.layer(x))) * m.layer.bias, layer=nn.Linear(D, D)),
    "conv1d": lambda: Made(
        lambda m, x: m.norm(m.second(F.silu(m.first(x.unsqueeze(1))))).flatten(1),
        first=nn.Conv1d(1, 3, 3, padding="same"),
        second=nn.Conv1d(3, 2, 3, stride=2, padding=1), norm=nn.GroupNorm(1, 2),
    ),
    "conv2d": lambda: Made(
        lambda m, x: m.out(torch.tanh(m.conv(x.view(-1, 2, 2, 2))).flatten(1)),
        conv=nn.Conv2d(2, 4, (2, 1), bias=False), out=nn.Linear(8, D),
    ),
    "embedding": lambda: Made(quantised, table=nn.Embedding(4, 3, padding_idx=1), mix=nn.Linear(3 * D // 2 + D, D)),
    "gated": gated,
    "attention": lambda: Made(attention, place=number(1, 4, 2), qkv=nn.Linear(2, 6), norm=nn.LayerNorm(2)),
    "rms_norm": lambda: Made(
        root_mean_square, norm=nn.RMSNorm(D), w=number(D, D), b=number(D), v=number(D), act=nn.PReLU(D)
    ),
    "constants": constants,
}  # fmt: skip
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
        (unsupported, "'inner/weight' is used by .*matrix_exp"),
        (unbatched, "'layer/weight' is used by linear on something that is not a batch of tokens"),
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModuleLearner(mixes()), "mixes_tokens"),
        (lambda: ModuleLearner(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)))), "changes its buffer 0.param"),
        (lambda: ModuleLearner(nn.Embedding(2, D, max_norm=1.0)), "leave them out"),
        (lambda: ModuleLearner(mixes(causal=False), mixes_tokens=True), "later ones"),
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
    make = staticmethod(lambda: ModuleLearner(gated(16), residual=True, norm=True))

    def specimens(self) -> dict[str, Specimen]:
        rules = {"token steps": RULES["token_steps"], "batch": lambda: GradientDescent(4, "batch", compute_chunk=3)}
        return {name: self.specimen(self.make, Reconstruction, rule) for name, rule in rules.items()}


class TestModuleThatMixesTokens(LearnerConformance):
    dim = 32
    make = staticmethod(lambda: ModuleLearner(mixes(width=16), residual=True, norm=True, mixes_tokens=True))
