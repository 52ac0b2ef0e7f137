"""SwiGLU, convolutions, kernel ridge regression, nested learners and further tasks: the laws, and plain references in
float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.composition.compose import build
from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.learners import Convolution, KernelRidge, Learner, Linear, NestedTTT, SwiGLU, Transformer
from metattt.optimizers import Append, GradientDescent
from metattt.tasks import NextToken, Reconstruction
from metattt.testing import LAWS, LearnerConformance, Specimen, TaskConformance
from metattt.testing.conformance import published_task
from metattt.testing.specimen import cotangent, gradient_distance, gradients, randomize

Weights = dict[str, Tensor]
Model = Callable[[Weights, Tensor], Tensor]  # one sequence, one head: [n, d] to [n, d]


def inner_layer(**options: object) -> Callable[..., TTTLayer]:
    return partial(
        TTTLayer, num_heads=1, task=Reconstruction(), learner=Linear(), optimizer=GradientDescent(2), **options
    )


class TestSwiGLU(LearnerConformance):
    make = staticmethod(lambda: SwiGLU(1.5))

    def specimens(self) -> dict[str, Specimen]:
        rules = {
            "token steps": lambda: GradientDescent(4, token_steps="shared"),
            "previous": lambda: GradientDescent(4, read="previous"),
        }
        return {name: self.specimen(self.make, published_task, rule) for name, rule in rules.items()}


class TestConvolutionOverFeatures(LearnerConformance):
    make = staticmethod(lambda: Convolution(channels=2))

    def specimens(self) -> dict[str, Specimen]:
        # At half the rate: at 1 the norm over few features amplifies fp32's rounding to the law's bound.
        rule = lambda: GradientDescent(4, token_steps="shared", base_lr=0.5)  # noqa: E731
        return {"token steps": self.specimen(self.make, published_task, rule)}


class TestConvolutionOverTokens(LearnerConformance):
    make = staticmethod(lambda: Convolution("tokens", channels=1))


class Gently(LearnerConformance):
    """At a rate of 0.1, as in their layers: at 1 the inner loop diverges, and rounding errors with it."""

    def specimens(self) -> dict[str, Specimen]:
        return {
            "read=previous": self.specimen(
                self.make, published_task, lambda: GradientDescent(4, read="previous", base_lr=0.1)
            )
        }


class TestTransformer(Gently):
    make = staticmethod(lambda: Transformer(num_heads=2, expansion=2))


class TestNestedTTT(Gently):
    dim, num_heads = 4, 1
    make = staticmethod(lambda: NestedTTT(inner_layer()))


class TestKernelRidge(LearnerConformance):
    make = staticmethod(KernelRidge)


class TestLinearRidge(LearnerConformance):
    make = staticmethod(lambda: KernelRidge("linear", 0.5, residual=True, norm=True))


class TestNextToken(TaskConformance):
    make = staticmethod(lambda: NextToken(views="shared_qk", rope="full", corruption="mask", corruption_rate=0.3))


class TestCosine(TaskConformance):
    make = staticmethod(lambda: Reconstruction(loss="cosine"))


# -- the same learners written out, and the loop over mini-batches around them -----------------------------------------


def swiglu(w: Weights, x: Tensor) -> Tensor:
    return (F.silu(x @ w["w0"]) * (x @ w["w2"])) @ w["w1"]


def over_features(w: Weights, x: Tensor) -> Tensor:
    hidden = F.gelu(F.conv1d(x.unsqueeze(1), w["w1"].permute(2, 1, 0), w["b1"], padding="same"), approximate="tanh")
    return F.conv1d(hidden, w["w2"].permute(2, 1, 0), w["b2"], padding="same").squeeze(1)


def over_tokens(w: Weights, x: Tensor) -> Tensor:
    rows = []
    for t in range(len(x)):
        hidden = w["b1"]
        for j in range(3):
            if t - 2 + j >= 0:
                hidden = hidden + x[t - 2 + j] @ w["w1"][j]
        rows.append(F.gelu(hidden, approximate="tanh") @ w["w2"] + w["b2"])
    return torch.stack(rows)


def layer_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt() * scale + shift


def transformer(w: Weights, x: Tensor) -> Tensor:
    return transformer_stream([w] * len(x), x)


def transformer_stream(each: list[Weights], x: Tensor) -> Tensor:
    """Token by token, head by head; what a token leaves for later ones, its keys and values, is made by its own
    weights."""
    rows, keys, values, d = [], [], [], x.shape[1] // 2
    for w, token in zip(each, x, strict=True):
        y = layer_norm(token, w["scale1"], w["shift1"])
        keys.append(y @ w["wk"])
        values.append(y @ w["wv"])
        heads = []
        for h in (slice(0, d), slice(d, 2 * d)):
            scores = torch.stack(keys)[:, h] @ (y @ w["wq"])[h] / d**0.5
            heads.append(scores.softmax(0) @ torch.stack(values)[:, h])
        z = token + torch.cat(heads) @ w["wo"]
        hidden = F.gelu(layer_norm(z, w["scale2"], w["shift2"]) @ w["w1"] + w["b1"], approximate="tanh")
        rows.append(z + hidden @ w["w2"] + w["b2"])
    return torch.stack(rows)


def over_tokens_stream(each: list[Weights], x: Tensor) -> Tensor:
    return torch.stack([over_tokens(w, x[: t + 1])[t] for t, w in enumerate(each)])


def nested(w: Weights, x: Tensor) -> Tensor:
    """Linear attention with the delta rule's gradient at the start of each pair of tokens, then a projection."""
    k, v, q = (x @ w[f"layer/task/{name}/weight"].mT for name in "kvq")
    commit = current = w["layer/learner/init/w1"][0]
    rows = []
    for t in range(len(x)):
        current = current - torch.outer(k[t], k[t] @ commit - v[t]) / x.shape[1]
        rows.append(q[t] @ current)
        commit = current if t % 2 else commit
    return torch.stack(rows) @ w["layer/out/weight"].mT


def plain_inner() -> Callable[..., TTTLayer]:
    learner = Linear(bias=False, residual=False, norm=False)
    return partial(
        TTTLayer,
        num_heads=1,
        task=Reconstruction(),
        learner=learner,
        optimizer=GradientDescent(2, lr="constant"),
        output_norm=False,
    )


STREAMS: dict[Model, Callable[[list[Weights], Tensor], Tensor]] = {
    transformer: transformer_stream,
    over_tokens: over_tokens_stream,
}
CASES: dict[str, tuple[Callable[[], Learner], Model, str]] = {
    "swiglu": (lambda: SwiGLU(1.5), swiglu, "inclusive"),
    "over_features": (lambda: Convolution(channels=2, residual=False, norm=False), over_features, "inclusive"),
    "over_tokens": (lambda: Convolution("tokens", channels=1, residual=False, norm=False), over_tokens, "previous"),
    "transformer": (lambda: Transformer(num_heads=2, expansion=2, norm=False), transformer, "previous"),
    "over_tokens, inclusive": (
        lambda: Convolution("tokens", channels=1, residual=False, norm=False),
        over_tokens,
        "inclusive",
    ),
    "transformer, inclusive": (lambda: Transformer(num_heads=2, expansion=2, norm=False), transformer, "inclusive"),
    "nested": (lambda: NestedTTT(plain_inner(), residual=False, norm=False), nested, "previous"),
}


def loop(layer: TTTLayer, model: Model, x: Tensor, read: str) -> Tensor:
    """`W ← W − η ∇Σℓ` over mini-batches of 3, every sequence and head by itself."""
    rate = 1.0 / 4
    sequences = []
    for row in x:
        k, v, q = (projection(row).unflatten(1, (2, 4)) for projection in (layer.task.k, layer.task.v, layer.task.q))
        heads = []
        for h in range(2):
            weights = {name: value[h] for name, value in layer.learner.init.items()}
            ys: list[Tensor] = []
            for start in range(0, len(row), 3):
                piece = slice(start, min(start + 3, len(row)))

                labels, predictions = v[piece, h], model(weights, k[piece, h])
                after = []
                for last in range(piece.stop - start):
                    found = torch.autograd.grad(
                        0.5 * (predictions - labels)[: last + 1].square().sum(),
                        list(weights.values()),
                        create_graph=True,
                        materialize_grads=True,
                        allow_unused=True,
                    )
                    after.append(
                        {name: value - rate * g for (name, value), g in zip(weights.items(), found, strict=True)}
                    )
                if read == "previous":
                    ys += model(weights, q[piece, h])
                elif model in STREAMS:
                    ys += STREAMS[model](after, q[piece, h])
                else:
                    ys += [model(w, q[start + i : start + i + 1, h])[0] for i, w in enumerate(after)]
                weights = after[-1]
            heads.append(torch.stack(ys))
        sequences.append(layer.out(torch.cat(heads, dim=1)))
    return torch.stack(sequences)


@pytest.mark.parametrize("case", CASES)
def test_equals_a_plain_loop(case: str) -> None:
    make, model, read = CASES[case]
    torch.manual_seed(0)
    layer = TTTLayer(
        8, 2, Reconstruction(), make(), GradientDescent(3, lr="constant", read=read), output_norm=False
    ).double()
    randomize(layer)
    x = torch.randn(2, 8, 8, dtype=torch.float64, requires_grad=True)
    y, expected = layer(x)[0], loop(layer, model, x, read)
    assert (y - expected).abs().max() < 1e-9 * expected.abs().max()
    found, wanted = (gradients(layer, x, (z * cotangent(z)).sum()) for z in (y, expected))
    assert gradient_distance(found, wanted) < 1e-9


def test_three_levels_of_learning() -> None:
    """Splits, causality and all gradients of a layer in a layer in a layer; all sequences at once or one after the
    other."""

    def middle() -> Callable[..., TTTLayer]:
        return partial(
            TTTLayer,
            num_heads=1,
            task=Reconstruction(),
            learner=NestedTTT(inner_layer()),
            optimizer=GradientDescent(3, read="previous"),
        )

    def layer(group_size: int | None) -> TTTLayer:
        torch.manual_seed(0)
        made = TTTLayer(
            4, 1, Reconstruction(), NestedTTT(middle()), GradientDescent(4, read="previous"), group_size=group_size
        ).double()
        randomize(made)
        return made

    x = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True)
    results = []
    for made in (layer(None), layer(0)):
        y = made(x)[0]
        found = gradients(made, x, (y * cotangent(y)).sum())
        assert all(found[name].any() for name in found if name.endswith(("w1", "out/weight")))
        results.append(found)
        first, state = made(x[:, :6])
        assert torch.allclose(torch.cat([first, made(x[:, 6:], state)[0]], dim=1), y, rtol=1e-9, atol=1e-12)
        (leak,) = torch.autograd.grad(made(x)[0][:, 5].sum(), x)
        assert leak[:, :6].any() and not leak[:, 6:].any()
    assert gradient_distance(results[1], results[0]) < 1e-9


@pytest.mark.parametrize("law", ["derivatives", "splits", "causality", "masks", "packing", "round_trips"])
def test_laws_of_a_transformer_with_inclusive_reads(law: str) -> None:
    spec = Specimen(
        lambda: Transformer(num_heads=2, expansion=2), published_task, lambda: GradientDescent(4, base_lr=0.1)
    )
    assert LAWS[law].worst_error(spec) <= max(LAWS[law].bound, 1e-12 if law == "round_trips" else 0)


@pytest.mark.parametrize("kernel", ["linear", "gaussian", "exponential"])
def test_kernel_ridge_equals_solving_at_every_token(kernel: str) -> None:
    torch.manual_seed(0)
    layer = TTTLayer(
        8, 2, Reconstruction(), KernelRidge(kernel, ridge=0.3, bandwidth=1.5), Append(), output_norm=False
    ).double()
    randomize(layer)
    x = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    reset = torch.zeros(2, 9, dtype=torch.bool)
    reset[0, 4] = reset[1, 0] = reset[1, 7] = True
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 2] = mask[1, 8] = False

    def kappa(a: Tensor, b: Tensor) -> Tensor:
        if kernel == "linear":
            return a @ b.mT
        if kernel == "exponential":
            return (a @ b.mT / 1.5).exp()
        return torch.stack([torch.stack([(-(p - r).square().sum() / 3).exp() for r in b]) for p in a])

    rows = []
    for i, row in enumerate(x):
        k, v, q = (projection(row).unflatten(1, (2, 4)) for projection in (layer.task.k, layer.task.v, layer.task.q))
        for t in range(9):
            start = max([s for s in range(t + 1) if reset[i, s]], default=0)
            seen = [s for s in range(start, t + 1) if mask[i, s]]
            heads = []
            for h in range(2):
                gram = kappa(k[seen, h], k[seen, h]) + 0.3 * torch.eye(len(seen), dtype=torch.float64)
                heads.append((kappa(q[t : t + 1, h], k[seen, h]) @ torch.linalg.solve(gram, v[seen, h])).squeeze(0))
            rows.append(layer.out(torch.cat(heads)) * mask[i, t])
    expected = torch.stack(rows).view(2, 9, 8)
    wanted = gradients(layer, x, (expected * cotangent(expected)).sum())
    for cuts in ([9], [4, 5], [1] * 9):
        pieces, state, at = [], None, 0
        for size in cuts:
            piece = slice(at, at + size)
            y, state = layer(x[:, piece], state, mask=mask[:, piece], reset=reset[:, piece])
            pieces, at = [*pieces, y], at + size
        y = torch.cat(pieces, dim=1)
        assert (y - expected).abs().max() < 1e-9 * expected.abs().max()
        assert gradient_distance(gradients(layer, x, (y * cotangent(y)).sum()), wanted) < 1e-9


def test_next_token_trains_on_the_token_before() -> None:
    """Linear attention whose keys are one token late, with the start vector before the first token of a document."""
    torch.manual_seed(0)
    learner = Linear(bias=False, residual=False, norm=False)
    rule = GradientDescent(4, "batch", lr="constant", lr_scale="none")
    layer = TTTLayer(8, 2, NextToken(loss="dot"), learner, rule, output_norm=False).double()
    randomize(layer)
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    reset = torch.zeros(1, 7, dtype=torch.bool)
    reset[0, 3] = True
    k, v, q = (
        projection(x[0]).unflatten(1, (2, 4)).transpose(0, 1)
        for projection in (layer.task.k, layer.task.v, layer.task.q)
    )
    rows = []
    for t in range(7):
        start = 3 if t >= 3 else 0
        weights = layer.learner.init["w1"]
        for s in range(start, t + 1):
            before = layer.task.start[:, 0] if s == start else k[:, s - 1]
            weights = weights + before.unsqueeze(2) * v[:, s].unsqueeze(1)
        rows.append(layer.out((q[:, t].unsqueeze(1) @ weights).flatten()))
    expected = torch.stack(rows).unsqueeze(0)
    y, _ = layer(x, reset=reset)
    assert (y - expected).abs().max() < 1e-9 * expected.abs().max()
    first, state = layer(x[:, :2])
    rest, _ = layer(x[:, 2:], state, reset=reset[:, 2:])
    assert (torch.cat([first, rest], 1) - expected).abs().max() < 1e-9 * expected.abs().max()


def test_cosine_loss() -> None:
    f, v = torch.randn(2, 2, 3, 4, dtype=torch.float64) * 100, torch.randn(2, 2, 3, 4, dtype=torch.float64) * 100
    assert torch.allclose(Reconstruction(loss="cosine").loss(f, v), 1 - F.cosine_similarity(f, v, dim=-1), atol=1e-8)
    zero = torch.zeros(1, 1, 1, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(Reconstruction(loss="cosine").loss(zero, torch.ones(1, 1, 1, 4)).sum(), zero)
    assert grad.isfinite().all()


@pytest.mark.parametrize("layer", ["nearest", "kernel_ridge", "nested_transformer", "nested_ttt"])
def test_layers_by_name(layer: str) -> None:
    made = build(f"layer={layer}", "dim=8", "num_heads=2")
    y, _ = made(torch.randn(2, 20, 8))
    y.square().sum().backward()
    assert y.isfinite().all() and all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


def test_a_module_and_deeper_nesting_from_the_command_line() -> None:
    module = build(
        "learner=module",
        "learner.module._target_=torch.nn.Linear",
        "learner.module._args_=[4,4]",
        "dim=8",
        "num_heads=2",
    )
    assert module.form == "dual"
    deeper = ("learner@learner.layer.learner=nested_ttt", "learner.layer.optimizer.read=previous")
    assert build("layer=nested_ttt", *deeper, "dim=8", "num_heads=2").form == "summed"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SwiGLU(0), "expansion=0"),
        (lambda: Convolution("rows"), "learner.over=rows"),
        (lambda: Convolution(width=0), "width=0"),
        (lambda: KernelRidge(ridge=0.0), "ridge=0.0"),
        (lambda: KernelRidge("cubic"), "kernel=cubic"),
        (lambda: KernelRidge(bandwidth=-1.0), "bandwidth=-1.0"),
        (lambda: Transformer(num_heads=3).setup(1, 8, 8), "does not divide the head width 8"),
        (lambda: NestedTTT(3), "partial"),
        (lambda: TTTLayer(8, 2, Reconstruction(), NestedTTT(inner_layer()), GradientDescent(4)), "read=previous"),
        (lambda: NestedTTT(inner_layer(), residual=False).setup(2, 4, 8), "width 4"),
    ],
)
def test_refusals(make: Callable[[], object], message: str) -> None:
    with pytest.raises(MetaTTTError, match=message):
        make()
