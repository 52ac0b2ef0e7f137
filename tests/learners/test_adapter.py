"""Unmodified modules as learners: the dual form against the primal one, and against a token loop of the module itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracle import Call, outputs
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.inner.forms.dual import PerTokenGradients
from metattt.layer import TTTLayer
from metattt.learners import ModuleLearner
from metattt.optimizers import GradientDescent
from metattt.tasks import Reconstruction
from metattt.testing import LAWS, LearnerConformance, Specimen
from metattt.testing.specimen import compare, cotangent, gradient_distance, gradients, run

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


class Encoder(nn.Module):
    """A token as four pieces, by attention without weights: what torch takes for it on a CPU has no second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(2, 1, 3, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unflatten(-1, (4, 2))).flatten(1)


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


def in_place(after: int) -> nn.Sequential:
    """Changes what layer number `after` of three has made, or what it has been given."""
    layers: list[nn.Module] = [nn.Linear(D, 6), nn.Linear(6, 6), nn.Linear(6, D)]
    for place in range(2, 0, -1):
        layers.insert(place, nn.Tanh())
    layers.insert(2 * after + 1, nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


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
        (Encoder, "'layer/self_attn/in_proj_weight' is used by multi_head_attention_forward"),
        (Unbatched, "'layer/weight' is used by linear on something that is not a batch of tokens"),
        (lambda: in_place(1), "a tensor that a weight has been applied to, or has made, is changed in place"),
        (lambda: in_place(2), "a tensor that a weight has been applied to, or has made, is changed in place"),
        (lambda: in_place(0), "recording it fails: .*leaf Variable.* operation. Use"),
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


@pytest.mark.parametrize("shape", ["sequential", "twice", "attention", "embedding", "unsupported"])
def test_equals_a_token_loop_of_the_module(shape: str) -> None:
    """With the module's own operations, by the oracle; outputs and every gradient."""
    spec = specimen({**SHAPES, "unsupported": Unsupported}[shape], lambda: GradientDescent(3, base_lr=0.5))
    layer, x = spec.make(), spec.tokens().requires_grad_()
    y, expected = layer(x)[0], outputs(layer, [Call(x)])[0]
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11)
    found, wanted = (gradients(layer, x, (one * cotangent(one)).sum()) for one in (y, expected))
    assert gradient_distance(found, wanted) < 1e-9


class Mixes(nn.Module):
    def __init__(self, causal: bool = True, width: int = D) -> None:
        super().__init__()
        self.layer, self.causal = nn.Linear(width, width), causal

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.cumsum(0) if self.causal else x + x.mean(0))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.unsqueeze(0))[0].squeeze(0)


class Counting(nn.Linear):
    """Keeps count of its calls."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.register_buffer("calls", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModuleLearner(Mixes()), "mixes_tokens"),
        (lambda: ModuleLearner(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)))), "changes its buffer 0.param"),
        (lambda: ModuleLearner(Counting().eval()), "changes its buffer calls"),
        (lambda: ModuleLearner(nn.Embedding(2, D, max_norm=1.0)), "leave them out"),
        (lambda: ModuleLearner(nn.Sequential(nn.Linear(D, D), nn.RReLU())), "depends on chance"),
        (lambda: ModuleLearner(Mixes(causal=False), mixes_tokens=True), "later ones"),
        (lambda: ModuleLearner(nn.Sequential(nn.Linear(D, D), nn.Dropout(0.1))), "set its p to 0"),
        (lambda: ModuleLearner(Recurrent()), "cannot be replaced"),
        (lambda: ModuleLearner(nn.Linear(D, 3)), "width 3: they must have the head width 8"),
        (lambda: ModuleLearner(nn.Linear(5, D)), "cannot run on tokens"),
        (lambda: ModuleLearner(nn.Tanh()), "no trainable parameter"),
    ],
)
def test_modules_that_cannot_be_learners_are_refused(make: Callable[[], ModuleLearner], message: str) -> None:
    with pytest.raises(MetaTTTError, match=message):
        TTTLayer(2 * D, 2, Reconstruction(), make(), GradientDescent(4, read="previous"))


class RoundTrips(LearnerConformance):
    """Copies of a state may lie in memory in another way, and then differ in the last bit."""

    def test_round_trips(self) -> None:
        for spec in self.specimens().values():
            assert LAWS["round_trips"].worst_error(spec) < 1e-12


class TestModuleLearner(RoundTrips):
    dim = 32
    make = staticmethod(lambda: ModuleLearner(Gated(16), residual=True, norm=True))

    def specimens(self) -> dict[str, Specimen]:
        rules = {"token steps": RULES["token_steps"], "batch": lambda: GradientDescent(4, "batch", compute_chunk=3)}
        return {name: self.specimen(self.make, Reconstruction, rule) for name, rule in rules.items()}


class TestModuleThatMixesTokens(RoundTrips):
    dim = 32
    make = staticmethod(lambda: ModuleLearner(Mixes(width=16), residual=True, norm=True, mixes_tokens=True))


def test_the_bias_of_a_linear_map_shares_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """`q·a + 1` in place of a product of its own for the bias, as for the same learner written with the accessor."""

    def make(form: str) -> TTTLayer:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(D, 12), nn.GELU(), nn.Linear(12, D))
        learner = ModuleLearner(module, residual=True, norm=True)
        return TTTLayer(2 * D, 2, Reconstruction(), learner, GradientDescent(4), form=form).double()

    x = torch.randn(2, 11, 2 * D, dtype=torch.float64)
    expected = run(make("primal"), x, grads=True)
    monkeypatch.setattr(PerTokenGradients, "mixed", lambda self, name, mix: pytest.fail(f"{name} by itself"))
    assert compare(run(make("dual"), x, grads=True), expected) < 1e-9
