"""A layer inside whatever its caller has switched on gives the eager result, and bad input costs one clear line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch.utils.checkpoint import checkpoint

import metattt
from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.learners import MLP, FastWeights, KernelEstimator, Learner, Linear, Weight
from metattt.optimizers import Adam, Append, GradientDescent, InnerOptimizer
from metattt.tasks import Reconstruction, Task
from metattt.testing.specimen import Specimen, compare, cotangent, distance, gradients, run

BOUND = 1e-9  # relative, float64


def shared_qk() -> Task:
    return Reconstruction("shared_qk", rope="mini_batch")


SPECIMENS: dict[str, Specimen] = {
    "dual": Specimen(Linear, shared_qk, lambda: GradientDescent(4, token_steps="shared"), options={"gate": True}),
    "mlp": Specimen(lambda: MLP(expansion=2.0), shared_qk, lambda: GradientDescent(4)),
    "primal": Specimen(Linear, shared_qk, lambda: GradientDescent(4), options={"form": "primal"}),
    "summed": Specimen(
        Linear, shared_qk, lambda: GradientDescent(4, read="previous", steps=2), options={"form": "summed"}
    ),
    "online": Specimen(Linear, shared_qk, lambda: GradientDescent(4, "online")),
    "batch": Specimen(Linear, shared_qk, lambda: GradientDescent(4, "batch", compute_chunk=2)),
    "scan": Specimen(KernelEstimator, shared_qk, Append),
}
every_form = pytest.mark.parametrize("name", list(SPECIMENS))


def tokens(length: int = 11, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def error(layer: TTTLayer, call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Worst relative error of `call(x)`, outputs and gradients, against the eager layer."""
    eager = run(layer, x, grads=True)
    x = x.clone().requires_grad_()
    y = call(x)
    found = gradients(layer, x, (y * cotangent(y)).sum())
    return compare(eager._replace(y=y.detach(), grads=found), eager)


# -- recomputation, precision, modes -----------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("group_size", [None, 0])
def test_inside_a_checkpoint(name: str, group_size: int | None) -> None:
    """What is kept for the backward pass is moved to the CPU, too."""

    def call(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)

    layer = SPECIMENS[name].make(group_size=group_size)
    assert error(layer, call, tokens()) <= BOUND


@every_form
def test_autocast(name: str) -> None:
    layer = SPECIMENS[name].make(dtype=torch.float32)
    x = tokens().float()
    full = run(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        half = run(layer, x, [5])
    assert half.y.dtype == torch.bfloat16
    assert ((half.y.float() - full.y).norm() / full.y.norm()).item() <= 3e-2  # heads of width 4
    assert all(value.dtype == torch.float32 for weights in half.state.weights.values() for value in weights.values())


@every_form
def test_without_gradients(name: str) -> None:
    layer, x = SPECIMENS[name].make(), tokens()
    eager = run(layer, x, grads=True)
    with torch.inference_mode():
        first, state = layer(x[:, :6])
        second, _ = layer(x[:, 6:], state)
    assert distance(torch.cat([first, second], dim=1), eager.y) <= BOUND
    layer.requires_grad_(False)
    assert not layer(x)[0].requires_grad
    assert distance(run(layer, x, grads=True).grads["x"], eager.grads["x"]) <= BOUND


# -- torch.func --------------------------------------------------------------------------------------------------------


@every_form
def test_vmap_and_grad(name: str) -> None:
    layer = SPECIMENS[name].make()
    x = tokens()
    eager = run(layer, x, grads=True)
    values = {key: p.detach() for key, p in layer.named_parameters()}

    def one(values: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(layer, values, (row.unsqueeze(0),))[0].squeeze(0)

    assert distance(torch.func.vmap(one, (None, 0))(values, x), eager.y) <= BOUND

    def loss(values: dict[str, Tensor]) -> Tensor:
        y = torch.func.functional_call(layer, values, (x,))[0]
        return (y * cotangent(y)).sum()

    found = torch.func.grad(loss)(values)
    for key, gradient in eager.grads.items():
        if key != "x":
            assert distance(found[key], gradient, floor=1e-6) <= BOUND, key


@pytest.mark.parametrize(("name", "group_size"), [("dual", None), ("mlp", 0), ("summed", None), ("online", 0)])
def test_double_backward(name: str, group_size: int | None) -> None:
    """The gradient of a gradient, through the recomputed groups too, against a finite difference."""
    layer = SPECIMENS[name].make(group_size=group_size)
    direction = torch.randn(2, 7, 8, dtype=torch.float64)

    def slope(x: Tensor) -> Tensor:
        y = layer(x)[0]
        return torch.autograd.grad((y * cotangent(y)).sum(), x, create_graph=True)[0]

    x, step = tokens(length=7).requires_grad_(), 1e-5
    (found,) = torch.autograd.grad((slope(x) * direction).sum(), x)
    expected = (slope(x + step * direction) - slope(x - step * direction)) / (2 * step)
    assert distance(found, expected.detach()) <= 1e-6


# -- torch.compile -----------------------------------------------------------------------------------------------------


def compiled_error(spec: Specimen, backend: str, length: int) -> float:
    torch._dynamo.reset()
    layer = spec.make()
    graph = torch.compile(layer, fullgraph=True, backend=backend)
    return error(layer, lambda x: graph(x)[0], tokens(length))


@pytest.mark.parametrize("name", ["dual", "summed", "primal", "online"])
def test_compiled_in_one_graph(name: str) -> None:
    assert compiled_error(SPECIMENS[name], "aot_eager", length=6) <= BOUND
    if name == "dual":  # and with a carried state
        layer, x = SPECIMENS[name].make(), tokens(8)
        graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            first, state = graph(x[:, :4])
            y = torch.cat([first, graph(x[:, 4:], state)[0]], dim=1)
        assert distance(y, layer(x)[0].detach()) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("writes", [(), ("allow_buffer_reuse",), ("inplace_buffers",)])
def test_a_compiled_layer_has_the_gradients_of_the_eager_one(writes: tuple[str, ...]) -> None:
    """Also of slow weights, whose gradient is a sum over mini-batches: where Inductor may write into the memory that a
    loop reads, it is wrong by factors, and no loop may be taken."""
    settings = {name: name in writes for name in ("allow_buffer_reuse", "inplace_buffers")}
    with inductor.patch(settings), torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert compiled_error(Specimen(Linear, Reconstruction, lambda: Adam(2)), "inductor", length=9) <= BOUND


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.14", reason="this torch cannot")
@inductor.patch(allow_buffer_reuse=False, inplace_buffers=False)
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_loop_has_the_gradients_of_the_eager_layer_at_every_length() -> None:
    """At 80 tokens operations in place spoiled gradients, at the second length a number of steps that was left open."""
    torch._dynamo.reset()
    layer = metattt.build("layer=ttt_linear", "dim=64", "num_heads=4", "layer.form=dual", seed=0)
    graph = torch.compile(layer, fullgraph=True)
    for length in (80, 64):
        x = torch.randn(2, length, 64)
        found, expected = (torch.autograd.grad(f(x)[0].square().sum(), list(layer.parameters())) for f in (graph, layer))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


# -- states and parts that do not fit ----------------------------------------------------------------------------------


def refused(call: Callable[[], object], *words: str) -> None:
    """The call raises a `MetaTTTError` of one or two lines that contains every word."""
    with pytest.raises(MetaTTTError) as caught:
        call()
    message = str(caught.value)
    assert message.count("\n") <= 1 and len(message) < 400, message
    for word in words:
        assert word in message, message


def layer_of(learner: Learner, optimizer: InnerOptimizer | None = None, **options: Any) -> TTTLayer:
    return TTTLayer(8, 2, Reconstruction(), learner, optimizer or GradientDescent(4), **options)


@pytest.mark.parametrize(
    "other",
    [
        lambda: layer_of(MLP()),
        lambda: layer_of(Linear(bias=False)),
        lambda: layer_of(KernelEstimator(), Append()),
        lambda: TTTLayer(16, 2, Reconstruction(), Linear(), GradientDescent(4)),
        lambda: layer_of(Linear(), GradientDescent(4, "batch")),
        lambda: TTTLayer(8, 2, Reconstruction("shared_qk"), Linear(), GradientDescent(4)),
    ],
    ids=["learner", "weights", "data", "width", "anchor", "task"],
)
def test_state_of_another_layer(other: Callable[[], TTTLayer]) -> None:
    layer, stranger = layer_of(Linear()), other()
    _, state = stranger(torch.randn(2, 5, stranger.dim))
    refused(lambda: layer(torch.randn(2, 5, 8), state), "state", "another layer")
    if stranger.dim == layer.dim:
        _, state = layer(torch.randn(2, 5, 8))
        refused(lambda: stranger(torch.randn(2, 5, 8), state), "state", "another layer")


def learner_of(use: Callable[[Any, Tensor], Tensor], name: str, declared: bool = False, **weight: Any) -> Learner:
    """A learner with one weight, that uses it in this way."""
    methods: dict[str, Any] = {
        "mixes_tokens": declared,
        "weights": lambda self, d_in, d_out: {name: Weight((d_in, d_out), **weight)},
        "forward": lambda self, w, x: use(w, x),
    }
    return type("Mine", (Learner,), methods)()


def average(w: FastWeights, x: Tensor) -> Tensor:
    return w.linear(x - x.mean(2, keepdim=True), "w")


def average_so_far(w: FastWeights, x: Tensor) -> Tensor:
    return w.linear(x - x.cumsum(2) / torch.arange(1, x.shape[2] + 1, dtype=x.dtype).unsqueeze(-1), "w")


def sum_afterwards(w: FastWeights, x: Tensor) -> Tensor:
    """Where a zero W0 would hide it."""
    return w.linear(x, "w").cumsum(2)


@pytest.mark.parametrize(
    ("use", "form"), [(average, "auto"), (sum_afterwards, "dual"), (average, "primal"), (sum_afterwards, "summed")]
)
def test_undeclared_mixing_of_tokens(use: Any, form: str) -> None:
    rule = GradientDescent(4, read="previous" if form == "summed" else "inclusive")
    std = {} if use is average else {"std": 0.0}
    refused(lambda: layer_of(learner_of(use, "w", **std), rule, form=form), "Mine", "mixes_tokens = True")


@pytest.mark.parametrize(
    ("read", "form"), [("inclusive", "dual"), ("exclusive", "dual"), ("previous", "summed"), ("committed", "summed")]
)
def test_mixing_must_be_causal(read: Any, form: str) -> None:
    refused(lambda: layer_of(learner_of(average, "w", True), GradientDescent(4, read=read)), "Mine", "later")
    assert layer_of(learner_of(average_so_far, "w", True), GradientDescent(4, read=read)).form == form


def test_forms_that_take_mixing_apart_are_refused() -> None:
    for given, words in (
        ({"read": "previous", "form": "primal"}, ("form=primal", "auto")),
        ({"read": "previous", "form": "dual"}, ("form=dual", "auto")),
        ({"anchor": "batch"}, ("Mine", "anchor=minibatch")),
    ):
        options = {"form": given.pop("form")} if "form" in given else {}
        rule = GradientDescent(4, **given)  # type: ignore[arg-type]
        refused(lambda rule=rule, o=options: layer_of(learner_of(average_so_far, "w", True), rule, **o), *words)


@pytest.mark.parametrize(
    ("use", "operation"),
    [
        (lambda w, x: x @ torch.tanh(w["kernel"]), "tanh"),
        (lambda w, x: torch.matmul(x, w["kernel"]), "matmul"),
        (lambda w, x: x @ w["kernel"][..., :], "indexing"),
        (lambda w, x: torch.einsum("bhti,bhio->bhto", x, w["kernel"].expand(x.shape[0], -1, -1, -1)), "expand"),
    ],
)
def test_raw_weights_fall_back_or_are_refused_by_name(use: Any, operation: str) -> None:
    def raw(rule: InnerOptimizer | None = None, **options: Any) -> TTTLayer:
        return layer_of(learner_of(use, "kernel", std=0.3), rule, **options)

    refused(lambda: raw(form="dual"), "'kernel'", operation, "layer.form=auto")
    assert raw().form == "primal" and raw(GradientDescent(4, read="previous")).form == "summed"
    refused(lambda: raw(form="summed"), "layer.form=summed", "read=inclusive", "layer.form=auto")
