"""Mini-batches that are not the plain case: of one token with several steps, ragged, open at the end of a call,
learned from in several passes. The reference is a plain loop over one sequence's mini-batches, from the equations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metattt import TTTLayer
from metattt.errors import MetaTTTError
from metattt.learners import MLP, Learner, Linear
from metattt.learners.base import Weight
from metattt.learners.fast_weights import FastWeights
from metattt.learners.global_estimator import GlobalEstimator
from metattt.learners.kernel_estimator import KernelEstimator
from metattt.learners.kernel_ridge import KernelRidge
from metattt.learners.log_linear import LogLinear
from metattt.learners.recurrent_ridge import RecurrentRidge
from metattt.optimizers import Adam, Append, BlockMomentum, GradientDescent, InnerOptimizer, Momentum, WholeSequence
from metattt.optimizers.channel_decay import ChannelDecay
from metattt.optimizers.mirror import MirrorDescent
from metattt.state import State
from metattt.tasks import Reconstruction

DIM, HEADS, T = 6, 2, 11
LENGTHS = (11, 6, 3, 8)
Rule = Callable[[Tensor, Tensor, slice], Tensor]  # W, G = Σ η ∇ℓ and the tokens that it is of: new W


class Mean(Learner):
    """Every token sees the mean of those up to it in its mini-batch."""

    mixes_tokens = True

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {"W": Weight((d_in, d_out), std=0.5)}

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        return torch.tanh(w.linear(mean(x), "W"))


def mean(x: Tensor) -> Tensor:
    return x.cumsum(-2) / torch.arange(1, x.shape[-2] + 1, dtype=x.dtype).unsqueeze(-1)


def linear(w: Tensor, x: Tensor) -> Tensor:
    return x @ w


def mixing(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(mean(x) @ w)


def made(learner: Learner, optimizer: InnerOptimizer, **settings: Any) -> TTTLayer:
    torch.manual_seed(0)
    layer = TTTLayer(DIM, HEADS, Reconstruction(), learner, optimizer, output_norm=False, **settings).double()
    layer.out = nn.Identity()  # type: ignore[assignment]
    with torch.no_grad():
        for x in layer.parameters():
            x.copy_(0.5 * torch.randn_like(x))
    return layer


def plain() -> Linear:
    return Linear(bias=False, norm=False, residual=False)


def tokens(batch: int = len(LENGTHS)) -> Tensor:
    return torch.randn(batch, T, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Sequential:
    """The layer's answers for one sequence `[1, T, D]`, from k, v, q, η, α and β of its tokens."""

    def __init__(self, layer: TTTLayer, x: Tensor, f: Callable[[Tensor, Tensor], Tensor]):
        state = State(torch.zeros(1, dtype=torch.long), 0, {}, {}, {}, {})
        views, gates, *_ = layer.tokens(x, state, layer.call(x, state).ctx)
        self.k, self.v, self.q = views.k, views.v, views.q
        self.eta, self.alpha, self.beta = gates.eta, gates.alpha, gates.beta
        self.f, self.start = f, next(iter(layer.learner.init.values())).unsqueeze(0)

    def gradient(self, w: Tensor, at: slice) -> Tensor:
        """`Σ_s η_s ∇ℓ_s(w)` over the tokens `at`."""
        w = w.detach().requires_grad_()
        losses = 0.5 * (self.f(w, self.k[:, :, at]) - self.v[:, :, at]).square().sum(-1)
        return torch.autograd.grad((self.eta[:, :, at] * losses).sum(), w)[0]

    def blocks(self, b: int) -> list[slice]:
        count = self.k.shape[2]
        return [slice(i, min(i + b, count)) for i in range(0, count, b)]

    def block(self, rule: Rule, b: int, steps: int = 1, batch: bool = False) -> Tensor:
        """Every query is answered by the weights at the end of its mini-batch."""
        w, ys = self.start, []
        for at in self.blocks(b):
            for _ in range(steps):
                w = rule(w, self.gradient(self.start if batch else w, at), at)
            ys.append(self.f(w, self.q[:, :, at]))
        return torch.cat(ys, 2).transpose(1, 2).flatten(2)

    def final(self, rule: Rule, b: int, steps: int, batch: bool = False) -> Tensor:
        """Every query is answered by the weights after all passes."""
        w = self.start
        for _ in range(steps):
            anchor = w
            for at in self.blocks(b):
                w = rule(w, self.gradient(anchor if batch else w, at), at)
        ys = [self.f(w, self.q[:, :, at]) for at in self.blocks(b)]
        return torch.cat(ys, 2).transpose(1, 2).flatten(2)


def descent(_: Sequential) -> Rule:
    return lambda w, g, at: w - g


def adam(_: Sequential) -> Rule:
    m = n = torch.zeros(())
    age = 0

    def rule(w: Tensor, g: Tensor, at: slice) -> Tensor:
        nonlocal m, n, age
        m, n, age = 0.9 * m - 0.1 * g, 0.99 * n + 0.01 * g.square(), age + 1
        return w + 0.05 * (m / (1 - 0.9**age)) / ((n / (1 - 0.99**age)).sqrt() + 1e-8)

    return rule


def token_by_token(of: Sequential) -> Rule:
    """`S_t = β_t S_{t−1} − η_t G_t`, `W_t = α_t W_{t−1} + (1 − α_t) W_0 + S_t`, absent gates α = 1, β = 0."""
    s = torch.zeros(())

    def rule(w: Tensor, g: Tensor, at: slice) -> Tensor:
        nonlocal s
        alpha, beta = (0 if x is None else x[:, :, at.start, None, None] for x in (of.alpha, of.beta))
        s = beta * s - g
        return w + s if of.alpha is None else alpha * w + (1 - alpha) * of.start + s

    return rule


def block_momentum(of: Sequential) -> Rule:
    s = torch.zeros(())

    def rule(w: Tensor, g: Tensor, at: slice) -> Tensor:
        nonlocal s
        assert of.alpha is not None and of.beta is not None
        s = torch.sigmoid(of.beta[:, :, at].mean(-1))[..., None, None] * s - g
        return torch.sigmoid(of.alpha[:, :, at].mean(-1))[..., None, None] * w + s

    return rule


def lq(of: Sequential) -> Rule:
    dual = of.start

    def rule(w: Tensor, g: Tensor, at: slice) -> Tensor:
        nonlocal dual
        dual = dual - g
        return dual / (dual.square() + 1e-6).flatten(2).pow(2).sum(-1).sqrt()[..., None, None]

    of.start = dual / (dual.square() + 1e-6).flatten(2).pow(2).sum(-1).sqrt()[..., None, None]
    return rule


RULES: dict[str, tuple[Callable[..., InnerOptimizer], Callable[[Sequential], Rule]]] = {
    "descent": (GradientDescent, descent),
    "adam": (partial(Adam, base_lr=0.05), adam),
    "block momentum": (partial(BlockMomentum, decay="per_head"), block_momentum),
    "mirror": (partial(MirrorDescent, decay="none"), lq),
}


def assert_equal(layer: TTTLayer, expected: Callable[[Tensor], Tensor], lengths: tuple[int, ...] = LENGTHS) -> None:
    x = tokens(len(lengths))
    mask = torch.arange(T) < torch.tensor(lengths).unsqueeze(1)
    y = layer(x, mask=mask)[0]
    for row, count in enumerate(lengths):
        torch.testing.assert_close(y[row, :count], expected(x[row : row + 1, :count])[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("read", ["block", "committed"])
def test_steps_on_mini_batches_of_one_token_with_padding(name: str, read: str) -> None:
    make, rule = RULES[name]
    layer = made(plain(), make(1, read=read, steps=3))

    def expected(x: Tensor) -> Tensor:
        of = Sequential(layer, x, linear)
        return of.block(rule(of), 1, 3)

    assert_equal(layer, expected)
    # the state goes on, too: padded tokens between two calls change nothing
    x, mask = tokens(), torch.arange(T) < torch.tensor(LENGTHS).unsqueeze(1)
    state = layer(x, mask=mask)[1]
    y = layer(x, state)[0]
    for row, count in enumerate(LENGTHS):
        one = x[row : row + 1]
        whole = expected(torch.cat([one[:, :count], one], 1))[0, count:]
        torch.testing.assert_close(y[row], whole, rtol=1e-9, atol=1e-11)


@pytest.mark.filterwarnings("ignore:optimizer.read=block")  # 11 tokens do not divide
@pytest.mark.parametrize("anchor", ["minibatch", "batch"])
@pytest.mark.parametrize("b", [3, 4])
def test_a_learner_that_mixes_tokens_keeps_what_ragged_rows_learned(anchor: Any, b: int) -> None:
    layer = made(Mean(), GradientDescent(b, anchor=anchor, read="block"))

    def expected(x: Tensor) -> Tensor:
        of = Sequential(layer, x, mixing)
        return of.block(descent(of), b, batch=anchor == "batch")

    assert_equal(layer, expected)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("anchor", ["minibatch", "batch"])
@pytest.mark.parametrize("lengths", [(11, 11), LENGTHS, (8, 4)])
def test_several_passes_go_on_with_all_that_a_rule_carries(name: str, anchor: Any, lengths: tuple[int, ...]) -> None:
    make, rule = RULES[name]
    layer = made(plain(), make(4, anchor=anchor, read="final", steps=3))

    def expected(x: Tensor) -> Tensor:
        of = Sequential(layer, x, linear)
        return of.final(rule(of), 4, 3, anchor == "batch")

    assert_equal(layer, expected, lengths)


@pytest.mark.parametrize("compute_chunk", [None, 1, 3])
@pytest.mark.parametrize(("anchor", "b"), [("minibatch", 4), ("batch", 4), ("online", 1)])
def test_a_compute_chunk_changes_no_result_of_a_learner_that_mixes_tokens(
    anchor: Any, b: int, compute_chunk: int | None
) -> None:
    layer = made(Mean(), GradientDescent(b, anchor=anchor, read="final", steps=2, compute_chunk=compute_chunk))

    def expected(x: Tensor) -> Tensor:
        of = Sequential(layer, x, mixing)
        return of.final(descent(of), b, 2, anchor == "batch")

    assert_equal(layer, expected)


@pytest.mark.parametrize("compute_chunk", [1, 3, 2048])
def test_all_tokens_of_a_call_are_one_mini_batch_of_whole(compute_chunk: int) -> None:
    layer = made(Mean(), WholeSequence(2, base_lr=9.0, compute_chunk=compute_chunk))

    def expected(x: Tensor) -> Tensor:
        of = Sequential(layer, x, mixing)
        return of.final(descent(of), T, 2, batch=True)

    assert_equal(layer, expected)


@pytest.mark.parametrize("decay_to_init", [False, True])
def test_several_passes_of_an_online_rule_go_on_with_its_momentum(decay_to_init: bool) -> None:
    settings: dict[str, Any] = {"momentum": "none", "decay": "per_head", "decay_to_init": True} if decay_to_init else {}
    layer = made(plain(), Momentum(4, anchor="online", read="final", steps=2, **settings))

    def expected(x: Tensor) -> Tensor:
        of = Sequential(layer, x, linear)
        return of.final(token_by_token(of), 1, 2)

    assert_equal(layer, expected)


class WideKeys(Reconstruction):
    """Keys and queries with two channels more, which are 0."""

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.input_dim = head_dim + 2

    def views(self, x: Tensor, state: Any, ctx: Any) -> Any:  # type: ignore[override]
        views, state = super().views(x, state, ctx)
        return views._replace(k=nn.functional.pad(views.k, (0, 2)), q=nn.functional.pad(views.q, (0, 2))), state


KEEPERS: dict[str, Callable[[], Learner]] = {
    "attention": lambda: KernelEstimator(bandwidth=1.0),
    "all tokens": lambda: GlobalEstimator(bandwidth=1.0),
    "kernel ridge": lambda: KernelRidge(bandwidth=1.0),
    "recurrent ridge": RecurrentRidge,
    "recurrent ridge, exact": lambda: RecurrentRidge(solver="exact"),
    "log-linear": LogLinear,
    "log-linear, delta": lambda: LogLinear("delta"),
}


@pytest.mark.parametrize("name", KEEPERS)
def test_labels_of_learners_that_keep_data_need_not_be_as_wide_as_keys(name: str) -> None:
    def layer(task: Reconstruction) -> TTTLayer:
        torch.manual_seed(0)
        return TTTLayer(DIM, HEADS, task, KEEPERS[name](), Append()).double()

    (narrow, wide), x = (layer(task) for task in (Reconstruction(), WideKeys())), tokens(2)
    first, state = wide(x[:, :6])
    y = torch.cat([first, wide(x[:, 6:], state)[0]], 1) if wide.learner.streams else wide(x)[0]
    torch.testing.assert_close(y, narrow(x)[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("learner", "steps"), [(plain, 1), (plain, 2), (Mean, 1)], ids=["plain", "steps", "mixing"]
)
def test_a_call_that_cuts_mini_batches_of_a_block_read_is_said_once(
    learner: Callable[[], Learner], steps: int, recwarn: pytest.WarningsRecorder
) -> None:
    layer, x = made(learner(), GradientDescent(4, read="block", steps=steps)), tokens()
    layer(x[:, :8], mask=torch.arange(8) < torch.tensor([[8], [4], [8], [4]]))
    assert not recwarn.list
    for _ in range(2):
        layer(x)
    layer(x[:, :8], mask=torch.arange(8) < torch.tensor([[8], [4], [5], [4]]))
    (said,) = recwarn.list
    assert "optimizer.mini_batch_size=4" in str(said.message) and "T=11" in str(said.message)
    made(learner(), GradientDescent(4, read="previous", steps=steps))(x)
    assert len(recwarn.list) == 1
    reset = torch.zeros(len(x), 8, dtype=torch.bool)
    reset[:, 4] = True
    other = made(learner(), GradientDescent(4, read="block", steps=steps))
    other(x[:, :8], reset=reset)  # documents of 4 tokens
    assert len(recwarn.list) == 1
    other(x[:, :8], reset=reset.roll(1, 1))
    assert "T=8" in str(recwarn.list[-1].message) and len(recwarn.list) == 2
    made(learner(), GradientDescent(4, read="block", steps=steps))(x[:, 3:7], layer(x[:, :3])[1])
    assert "T=4" in str(recwarn.list[-1].message) and len(recwarn.list) == 3


def test_what_gates_say_is_refused_when_the_layer_is_built() -> None:
    with pytest.raises(MetaTTTError, match=r"decays for every channel needs a linear learner.*set learner=linear_map"):
        TTTLayer(DIM, HEADS, Reconstruction(), MLP(), ChannelDecay())
    with pytest.raises(MetaTTTError, match=r"decays for every channel has no meaning for a bias: set learner.bias"):
        TTTLayer(DIM, HEADS, Reconstruction(), Linear(norm=False, residual=False), ChannelDecay())
    torch.manual_seed(0)
    TTTLayer(DIM, HEADS, Reconstruction(), plain(), ChannelDecay(rank="head_dim"))
    drawn = torch.rand(1)
    torch.manual_seed(0)
    TTTLayer(DIM, HEADS, Reconstruction(), plain(), ChannelDecay(rank="head_dim"))
    assert torch.equal(drawn, torch.rand(1))  # and nothing is drawn for it


@pytest.mark.parametrize("read", ["block", "final", "whole"])
def test_padding_is_refused_where_tokens_look_at_later_ones(read: Any) -> None:
    class Both(Mean):
        def forward(self, w: FastWeights, x: Tensor) -> Tensor:
            return w.linear(x.mean(-2, keepdim=True).expand_as(x), "W")

    rule = WholeSequence() if read == "whole" else GradientDescent(4, read=read)
    layer, x = made(Both(), rule), tokens()
    layer(x[:, :8])
    with pytest.raises(MetaTTTError, match="would let them look at padding: make it causal"):
        layer(x, mask=torch.arange(T) < torch.tensor(LENGTHS).unsqueeze(1))


def test_a_mini_batch_may_be_longer_than_memory_holds() -> None:
    longest = 2**31 - 1
    cases: list[dict[str, Any]] = [{"max_norm": 0.5}, {"max_norm": 0.5, "read": "exclusive"}, {}]
    for settings in cases:
        layers = []
        for b in (T, longest):
            torch.manual_seed(0)
            task = Reconstruction("shared_qk", rope="mini_batch")
            layers.append(TTTLayer(4, 1, task, plain(), GradientDescent(b, **settings)).double())
        x = tokens(2)[..., :4]
        with torch.no_grad():
            y, state = layers[1](x[:, :10])
            y = torch.cat([y, layers[1](x[:, 10:], state)[0]], 1)  # one token alone is decoded
            torch.testing.assert_close(y, layers[0](x)[0], rtol=1e-9, atol=1e-11)
