"""Unmodified modules as learners: the dual form against the primal one, and against a token loop of the module itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import Call, outputs
from refusals_for_tests import refusal
from torch import Tensor, nn

from metattt.inner.forms.dual import PerTokenGradients
from metattt.layer import TTTLayer
from metattt.learners import ModuleLearner
from metattt.optimizers import GradientDescent
from metattt.tasks import Reconstruction
from metattt.testing import LAWS, LearnerConformance, Specimen
from metattt.testing.specimen import compare, cotangent, gradient_distance, gradients, run

D = 8  # head width


class Made(nn.Module):
    """Of these parts, by a function of the module and its tokens."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def linear(frozen: str) -> nn.Linear:
    made = nn.Linear(D, D)
    made.get_parameter(frozen).requires_grad_(False)
    return made


def tied() -> nn.Module:
    up, back = nn.Linear(D, 5), nn.Linear(D, 5, bias=False)
    back.weight = up.weight
    function = lambda m, x: m.down(torch.tanh(m.up(x)) + m.back(x.sin())) + F.gelu(m.up(x)) @ m.up.weight  # noqa: E731
    return Made(function, up=up, down=nn.Linear(5, D), back=back)


def quantised(m: Any, x: Tensor) -> Tensor:
    """A table looked up by the signs of the token, one of its rows never trained, and a smooth part, so that the input has a
    gradient too."""
    bits = (x > 0).long().unflatten(-1, (-1, 2))
    return m.mix(torch.cat([m.table(bits[..., 0] + 2 * bits[..., 1]).flatten(1), x], dim=-1))


def gated(m: Any, x: Tensor) -> Tensor:
    """A gated linear unit with a scalar, and functions of vectors."""
    y = F.glu(m.project(x), -1) * F.softplus(m.temperature)
    return (1 - torch.sigmoid(m.strength)) * x + y / (1 + m.strength.exp())


def attention(m: Any, x: Tensor) -> Tensor:
    """A token as four pieces that attend to each other, with position embeddings."""
    pieces = x.unflatten(-1, (4, 2)) + m.place
    q, k, v = m.qkv(m.norm(pieces)).chunk(3, dim=-1)
    return (pieces + (q @ k.mT / 2).softmax(-1) @ v).flatten(1)


def root_mean_square(m: Any, x: Tensor) -> Tensor:
    y = m.act(torch.addmm(m.b, m.norm(x), m.w))
    return y * (x @ m.v).unsqueeze(-1) + torch.matmul(x, m.w.t())


def random(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(nn.Linear(D, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, D, bias=False)),
    "tied": tied,
    # one layer applied twice, and its bias once more by itself
    "twice": lambda: Made(lambda m, x: m.layer(torch.sigmoid(m.layer(x))) * m.layer.bias, layer=nn.Linear(D, D)),
    "conv1d": lambda: Made(
        lambda m, x: m.norm(m.second(F.silu(m.first(x.unsqueeze(1))))).flatten(1),
        first=nn.Conv1d(1, 3, 3, padding="same"), second=nn.Conv1d(3, 2, 3, stride=2, padding=1), norm=nn.GroupNorm(1, 2),
    ),
    "conv2d": lambda: Made(
        lambda m, x: m.out(torch.tanh(m.conv(x.view(-1, 2, 2, 2))).flatten(1)),
        conv=nn.Conv2d(2, 4, (2, 1), bias=False), out=nn.Linear(8, D),
    ),
    "embedding": lambda: Made(quantised, table=nn.Embedding(4, 3, padding_idx=1), mix=nn.Linear(3 * D // 2 + D, D)),
    "gated": lambda: Made(gated, project=nn.Linear(D, 2 * D), temperature=nn.Parameter(torch.tensor(0.3)), strength=random(D)),
    "attention": lambda: Made(attention, place=random(1, 4, 2), qkv=nn.Linear(2, 6), norm=nn.LayerNorm(2)),
    "rms_norm": lambda: Made(
        root_mean_square, norm=nn.RMSNorm(D), w=random(D, D), b=random(D), v=random(D), act=nn.PReLU(D),
    ),
    # buffers and frozen parameters are shared by the heads
    "constants": lambda: Made(
        lambda m, x: torch.tanh(m.layer(x) + m.shift), layer=linear(frozen="bias"), shift=nn.Buffer(torch.randn(D)),
    ),
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "unsupported": (
        lambda: Made(
            lambda m, x: m.norm(x @ torch.linalg.matrix_exp(m.inner.weight) + m.inner.bias), inner=nn.Linear(D, D), norm=nn.LayerNorm(D)
        ),
        "'inner/weight' is used by .*matrix_exp",
    ),
    # a token as four pieces, by attention without weights: what torch takes for it on a CPU has no second derivative
    "encoder": (
        lambda: Made(
            lambda m, x: m.layer(x.unflatten(-1, (4, 2))).flatten(1),
            layer=nn.TransformerEncoderLayer(2, 1, 3, dropout=0.0, batch_first=True),
        ),
        "'layer/self_attn/in_proj_weight' is used by multi_head_attention_forward",
    ),
    # it takes pieces for its batch axis: no translation, but any other form
    "unbatched": (
        lambda: Made(
            lambda m, x: torch.tanh(m.layer(x.unflatten(-1, (4, 2)).transpose(0, 1))).transpose(0, 1).flatten(1), layer=nn.Linear(2, 2)
        ),
        "'layer/weight' is used by linear on something that is not a batch of tokens",
    ),
    "in place, 1": (lambda: in_place(1), "a tensor that a weight has been applied to, or has made, is changed in place"),
    "in place, 2": (lambda: in_place(2), "a tensor that a weight has been applied to, or has made, is changed in place"),
    "in place, 0": (lambda: in_place(0), "recording it fails: .*leaf Variable.* operation. Use"),
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


@pytest.mark.parametrize("name", REFUSED)
def test_other_forms_take_what_dual_refuses(name: str) -> None:
    """By the weight and the operation that uses it."""
    module, message = REFUSED[name]
    assert specimen(module, RULES["token_steps"]).make().form == "primal"
    refusal(lambda: specimen(module, RULES["token_steps"]).make(form="dual"), match=message)
    spec = specimen(module, RULES["previous"])
    x = spec.tokens()
    assert spec.make().form == "summed"
    oracle = run(spec.make(form="primal"), x, [6], grads=True)
    assert compare(run(spec.make(form="summed"), x, [6], grads=True), oracle) < 1e-9


@pytest.mark.parametrize("shape", ["sequential", "twice", "attention", "embedding", "unsupported"])
def test_equals_a_token_loop_of_the_module(shape: str) -> None:
    """With the module's own operations, by the oracle; outputs and every gradient."""
    spec = specimen({**SHAPES, "unsupported": REFUSED["unsupported"][0]}[shape], lambda: GradientDescent(3, base_lr=0.5))
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
        (lambda: ModuleLearner(nn.Sequential(nn.Linear(D, D), nn.RReLU()).eval()), "depends on chance in training"),
        (lambda: ModuleLearner(Mixes(causal=False), mixes_tokens=True), "later ones"),
        (lambda: ModuleLearner(nn.Sequential(nn.Linear(D, D), nn.Dropout(0.1))), "set its p to 0"),
        (lambda: ModuleLearner(Made(lambda m, x: m.rnn(x.unsqueeze(0))[0].squeeze(0), rnn=nn.GRU(D, D))), "cannot be replaced"),
        (lambda: ModuleLearner(nn.Linear(D, 3)), "width 3: they must have the head width 8"),
        (lambda: ModuleLearner(nn.Tanh()), "returns {}: it must return a Weight by name"),
    ],
)
def test_modules_that_cannot_be_learners_are_refused(make: Callable[[], ModuleLearner], message: str) -> None:
    refusal(lambda: TTTLayer(2 * D, 2, Reconstruction(), make(), GradientDescent(4, read="previous")), match=message)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(5, D), r"^(addmm: )?mat1 and mat2 shapes cannot be multiplied \(3x8 and 5x8\)"),
        (Made(lambda m, x: m.map(x).exp_().mul_(2), map=nn.Linear(D, D)), "modified by an inplace operation"),
    ],
)
def test_what_torch_says_of_a_module_is_said(module: nn.Module, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        TTTLayer(2 * D, 2, Reconstruction(), ModuleLearner(module), GradientDescent(4, read="previous"))


class TestModuleThatMixesTokens(LearnerConformance):
    dim = 32
    make = staticmethod(lambda: ModuleLearner(Mixes(width=16), residual=True, norm=True, mixes_tokens=True))

    def test_round_trips(self) -> None:
        """Copies of a state may lie in memory in another way, and then differ in the last bit."""
        for spec in self.specimens().values():
            assert LAWS["round_trips"].worst_error(spec) < 1e-12


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
