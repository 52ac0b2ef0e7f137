"""A layer inside whatever its caller has switched on gives the eager result, and bad input costs one clear line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from refusals_for_tests import refusal
from torch import Tensor
from torch._dynamo import lookup_backend
from torch._inductor import config as inductor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import metattt
from metattt.catalog.known_layers import known_layers
from metattt.inner.compiled import allow
from metattt.inner.loop import InnerLoop
from metattt.inner.tokens import Tokens
from metattt.layer import TTTLayer
from metattt.learners import MLP, FastWeights, KernelEstimator, Learner, Linear, Weight
from metattt.optimizers import Adam, Append, GradientDescent, InnerOptimizer
from metattt.tasks import Reconstruction
from metattt.testing.specimen import Specimen, compare, cotangent, distance, gradients, run

BOUND = 1e-9  # relative, float64
shared_qk = partial(Reconstruction, "shared_qk", rope="mini_batch")

SPECIMENS: dict[str, Specimen] = {
    "dual": Specimen(Linear, shared_qk, lambda: GradientDescent(4, token_steps="shared"), options={"gate": True}),
    "mlp": Specimen(lambda: MLP(expansion=2.0), shared_qk, lambda: GradientDescent(4)),
    "primal": Specimen(Linear, shared_qk, lambda: GradientDescent(4), options={"form": "primal"}),
    "summed": Specimen(Linear, shared_qk, lambda: GradientDescent(4, read="previous", steps=2), options={"form": "summed"}),
    "online": Specimen(Linear, shared_qk, lambda: GradientDescent(4, "online")),
    "batch": Specimen(Linear, shared_qk, lambda: GradientDescent(4, "batch", compute_chunk=2)),
    "scan": Specimen(KernelEstimator, shared_qk, Append),
}
WHOLE_CALLS = ("self_attention", "linear_attention_image", "linear_attention_elu_image", "vittt")  # they take no state
EVERY_LAYER = known_layers()
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
@pytest.mark.parametrize(("group_size", "reentrant"), [(None, False), (0, True)])
def test_inside_a_checkpoint(name: str, group_size: int | None, reentrant: bool) -> None:
    """What is kept for the backward pass is moved to the CPU, too."""
    layer = SPECIMENS[name].make(group_size=group_size)
    x = tokens().requires_grad_()
    eager = run(layer, x, grads=True)
    with torch.autograd.graph.save_on_cpu():
        y = checkpoint(lambda x: layer(x)[0], x, use_reentrant=reentrant)
    (y * cotangent(y)).sum().backward()
    found = {"x": x.grad} | {
        key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in layer.named_parameters() if p.requires_grad
    }
    assert compare(eager._replace(y=y.detach(), grads=found), eager) <= BOUND


def test_a_ridge_inside_a_checkpoint() -> None:
    """Its solver has a derivative of its own."""
    layer = metattt.build("gka", dim=8, num_heads=2, seed=0).double()
    assert error(layer, lambda x: checkpoint(lambda x: layer(x)[0], x, use_reentrant=False), tokens()) <= BOUND


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


class Widening(TorchDispatchMode):
    """On the CPU: autocast of a GPU, which computes these operations in fp32 and leaves their results so."""

    WIDE = frozenset(
        f"aten::{name}" for name in (
            "linalg_vector_norm", "sum", "exp", "log", "pow", "rsqrt", "reciprocal", "softplus", "cumsum", "prod", "_softmax",
            "native_layer_norm", "_fused_rms_norm",
        )
    )  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in self.WIDE:
            args = tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x, args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", EVERY_LAYER)
def test_autocast_of_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products stay in 16 bits: kernels take no others, and fp32 would be slow."""
    types, run = set(), InnerLoop.run

    def seen(loop: InnerLoop, given: Tokens, *rest: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):  # as for the layer itself, but not for one that it learns
            types.update(x.dtype for x in (given.views.k, given.views.v, given.views.q))
        return run(loop, given, *rest)

    monkeypatch.setattr(InnerLoop, "run", seen)
    layer = metattt.build(f"layer={name}", dim=32, num_heads=2, seed=0)
    x = torch.randn(2, 36, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), Widening():
        y, state = layer(x)
        if name not in WHOLE_CALLS:
            y = layer(x[:, :3], state)[0]
    y.float().square().mean().backward()
    assert types <= {torch.bfloat16} and bool(y.isfinite().all())
    assert x.grad is not None and bool(x.grad.isfinite().all())


@pytest.mark.parametrize("name", EVERY_LAYER)
def test_tensors_without_numbers(name: str) -> None:
    """Shapes, costs and memory are found out on the meta device or with fake tensors: nothing may read a number. And
    tokens of a CPU stay there where torch makes tensors on another device by default."""
    layer = metattt.build(f"layer={name}", dim=32, num_heads=2, seed=0)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    for device, around in (("cpu", torch.device("meta")), ("cpu", fake), ("meta", nullcontext())):
        layer.to(device)
        with around:
            x = torch.randn(2, 36, 32, device=device)
            y, state = layer(x)
            y.sum().backward()
            assert y.shape == x.shape and y.device == x.device
            if name not in WHOLE_CALLS:
                assert layer(x[:, :1], state)[0].shape == (2, 1, 32)
                with torch.no_grad():
                    assert layer(x[:, :1], state)[0].shape == (2, 1, 32)


def test_a_setting_that_is_assigned_after_compiling() -> None:
    layer = metattt.build("ttt_linear", "layer.form=dual", "optimizer.token_steps=none", dim=16, num_heads=2, seed=0)
    compiled, x = torch.compile(layer, backend="aot_eager"), torch.randn(1, 20, 16)
    with torch.no_grad():
        before = compiled(x)[0]
        layer.optimizer.mini_batch_size = 8
        found = compiled(x)[0]
        torch.testing.assert_close(found, layer(x)[0])
    assert not torch.allclose(found, before)


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
    each = torch.func.vmap(torch.func.grad(lambda values, row: one(values, row).square().sum()), (None, 0))(values, x)
    for row in range(2):
        expected = torch.autograd.grad(layer(x[row : row + 1])[0].square().sum(), layer.out.weight)[0]
        assert distance(each["out.weight"][row], expected) <= BOUND


@pytest.mark.parametrize("name", ["ttt_mlp", "gated_delta_net", "mamba", "retnet"])
def test_many_cotangents_at_once(name: str) -> None:
    """As `torch.autograd.functional.jacobian(vectorize=True)` has them: kernels leave them to torch."""
    layer = metattt.build(name, dim=32, num_heads=2, seed=0)
    x, many = torch.randn(1, 16, 32, requires_grad=True), torch.randn(2, 1, 16, 32)
    y, inputs = layer(x)[0], [x, layer.out.weight if hasattr(layer, "out") else layer.out_proj.weight]
    found = torch.autograd.grad(y, inputs, many, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(y, inputs, one, retain_graph=True) for one in many]
    torch.testing.assert_close(list(found), [torch.stack(one) for one in zip(*each, strict=True)], rtol=1e-3, atol=1e-4)


# -- torch.compile -----------------------------------------------------------------------------------------------------


def compiled_error(spec: Specimen, backend: str, length: int) -> float:
    torch._dynamo.reset()
    layer = spec.make()
    graph = torch.compile(layer, fullgraph=True, backend=backend)
    return error(layer, lambda x: graph(x)[0], tokens(length))


@pytest.mark.parametrize("name", ["summed", "primal", "online"])  # dual: test_compiled_with_a_carried_state
def test_compiled_in_one_graph(name: str) -> None:
    assert compiled_error(SPECIMENS[name], "aot_eager", length=6) <= BOUND


@pytest.mark.parametrize(("given", "dynamic"), [
    *((f"{name} learner.chunk=2", None) for name in ("mesa_net learner.iterations=2", "gka learner.iterations=2", "gated_oja")),
    ("nested_ttt optimizer.mini_batch_size=2", None), ("custom learner=linear optimizer.mini_batch_size=1", True),
    ("kernel_ridge", True), ("mesa_net learner.solver=exact", True),  # settings are numbers that the compiler leaves open
])  # fmt: skip
@inductor.patch(allow_buffer_reuse=True, inplace_buffers=True)
@torch._dynamo.config.patch(capture_scalar_outputs=False, specialize_float=False)
def test_learners_that_keep_data_or_a_layer_are_one_graph(given: str, dynamic: bool | None) -> None:
    if "custom" in given:  # it runs in a loop, for which settings are numbers
        allow()
    layer = metattt.build(*f"layer={given}".split(), dim=8, num_heads=2, seed=0)
    x, graph = torch.randn(1, 5, 8), torch.compile(layer, fullgraph=True, backend="eager", dynamic=dynamic)
    torch.testing.assert_close(graph(x)[0], layer(x)[0])


@pytest.mark.parametrize("length", [3, 5])
def test_compiled_for_any_length_sequences_go_on_at_places_of_their_own(length: int) -> None:
    """Mini-batches that end in the call are committed, at whatever token of it."""
    layer = SPECIMENS["mlp"].make()
    _, state = layer(tokens(7), mask=torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0]]).bool())
    x, graph = tokens(length), torch.compile(layer, backend="eager", dynamic=True)
    assert state.phase is None and distance(graph(x, state)[0], layer(x, state)[0]) <= BOUND


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.14", reason="this torch cannot")
@pytest.mark.parametrize("spec", [
    Specimen(lambda: MLP(expansion=2.0), shared_qk, lambda: GradientDescent(4), options={"form": "dual"}),
    SPECIMENS["summed"],
    Specimen(Linear, shared_qk, lambda: Adam(2)),
], ids=["dual", "summed", "adam"])  # fmt: skip
@inductor.patch(allow_buffer_reuse=False, inplace_buffers=False)
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_mini_batch_is_compiled_once(spec: Specimen) -> None:
    """Whatever the length, the graph has the first mini-batch, what is left at the end, and a loop for all others."""
    nodes: list[tuple[int, int]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        loops = sum("scan" in str(node.target) for node in graph.graph.nodes)
        nodes.append((loops, len(graph.graph.nodes)))
        return lookup_backend("aot_eager")(graph, inputs)

    layer = spec.make()
    for count in (5, 9):
        torch._dynamo.reset()
        graph = torch.compile(layer, fullgraph=True, backend=backend)
        assert error(layer, lambda x, graph=graph: graph(x)[0], tokens(count * layer.mini_batch_size + 1)) <= BOUND  # type: ignore[misc]
    assert nodes[0] == nodes[1] and nodes[0][0] >= 1, nodes


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
    layer = metattt.build("layer=ttt_linear", "dim=64", "num_heads=4", "layer.form=dual", seed=0)
    graph = torch.compile(layer, fullgraph=True)
    for length in (80, 64):
        x = torch.randn(2, length, 64)
        pair = (torch.autograd.grad(f(x)[0].square().sum(), list(layer.parameters())) for f in (graph, layer))
        torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-5)


def test_compiled_with_inductor() -> None:
    small = Specimen(Linear, Reconstruction, lambda: GradientDescent(2, token_steps="shared"), options={"output_norm": False})
    assert compiled_error(small, "inductor", length=3) <= BOUND


def test_compiled_with_a_carried_state() -> None:
    layer = SPECIMENS["dual"].make()
    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def in_two(x: Tensor) -> Tensor:
        first, state = graph(x[:, :3])
        return torch.cat([first, graph(x[:, 3:], state)[0]], dim=1)

    assert error(layer, in_two, tokens(6)) <= BOUND


# -- learners that do not fit -------------------------------------------------------------------------------------------


def layer_of(learner: Learner, optimizer: InnerOptimizer | None = None, **options: Any) -> TTTLayer:
    return TTTLayer(8, 2, Reconstruction(), learner, optimizer or GradientDescent(4), **options)


def with_a_weight(name: str, forward: Callable[[FastWeights, Tensor], Tensor], std: float = 0.02, **attributes: Any) -> Any:
    """A class of learners with one fast weight."""
    weights = lambda self, d_in, d_out: {"kernel": Weight((d_in, d_out), std=std)}  # noqa: E731
    return type(name, (Learner,), {"weights": weights, "forward": lambda self, w, x: forward(w, x), **attributes})


def centred(w: FastWeights, x: Tensor) -> Tensor:
    return w.linear(x - x.mean(2, keepdim=True), "kernel")


def centred_so_far(w: FastWeights, x: Tensor) -> Tensor:
    return w.linear(x - x.cumsum(2) / torch.arange(1, x.shape[2] + 1, dtype=x.dtype).unsqueeze(-1), "kernel")


Mixes = with_a_weight("Mixes", centred)  # an average over tokens that is not declared
# the same after the weights, where a zero W0 would hide it
MixesAfterwards = with_a_weight("MixesAfterwards", lambda w, x: w.linear(x, "kernel").cumsum(2), std=0.0)
LooksAhead = with_a_weight("LooksAhead", centred, mixes_tokens=True)
Declared = with_a_weight("Declared", centred_so_far, mixes_tokens=True)


@pytest.mark.parametrize(("learner", "form"), [(Mixes, "auto"), (MixesAfterwards, "dual"), (Mixes, "primal"), (MixesAfterwards, "summed")])
def test_undeclared_mixing_of_tokens(learner: type[Learner], form: str) -> None:
    rule = GradientDescent(4, read="previous" if form == "summed" else "inclusive")
    refusal(lambda: layer_of(learner(), rule, form=form), learner.__name__, "mixes_tokens = True")


@pytest.mark.parametrize(("read", "form"), [("inclusive", "dual"), ("exclusive", "dual"), ("previous", "summed"), ("committed", "summed")])
def test_mixing_must_be_causal(read: Any, form: str) -> None:
    refusal(lambda: layer_of(LooksAhead(), GradientDescent(4, read=read)), "LooksAhead", "later")
    assert layer_of(Declared(), GradientDescent(4, read=read)).form == form


def test_forms_that_take_mixing_apart_are_refused() -> None:
    for form in ("primal", "dual"):
        refusal(lambda form=form: layer_of(Declared(), GradientDescent(4, read="previous"), form=form), f"form={form}", "auto")
    refusal(lambda: layer_of(Declared(), GradientDescent(4, anchor="batch")), "Declared", "anchor=minibatch")


USES: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "function": (lambda kernel, x: x @ torch.tanh(kernel), "tanh"),
    "matmul": (lambda kernel, x: torch.matmul(x, kernel), "matmul"),
    "index": (lambda kernel, x: x @ kernel[..., :], "indexing"),
    "einsum": (lambda kernel, x: torch.einsum("bhti,bhio->bhto", x, kernel.expand(x.shape[0], -1, -1, -1)), "expand"),
}


@pytest.mark.parametrize("use", list(USES))
def test_raw_weights_fall_back_or_are_refused_by_name(use: str) -> None:
    function, operation = USES[use]
    raw = with_a_weight("Raw", lambda w, x: function(w["kernel"], x), std=0.3)
    refusal(lambda: layer_of(raw(), form="dual"), "'kernel'", operation, "layer.form=auto")
    assert layer_of(raw()).form == "primal"
    assert layer_of(raw(), GradientDescent(4, read="previous")).form == "summed"
    refusal(lambda: layer_of(raw(), form="summed"), "layer.form=summed", "read=inclusive", "layer.form=auto")
