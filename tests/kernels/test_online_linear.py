"""Online rules of a linear map in C++ against the loop over tokens in float64, and as layers use them."""

from __future__ import annotations

import itertools

import pytest
import test_drawn_compositions as drawing
import torch
from torch import Tensor

from metattt import MetaTTTError, TTTLayer, build
from metattt.inner.tokens import MiniBatches, Scan, Tokens
from metattt.kernels.online_linear.naive import online_linear
from metattt.kernels.online_linear.native import SOURCE, NativeOnlineDot, NativeOnlineLinear
from metattt.kernels.online_linear.rule import OnlineLinear, pairs_of
from metattt.learners.linear import Linear
from metattt.native.library import load
from metattt.optimizers import Gates, GradientDescent, Momentum
from metattt.state import Tensors
from metattt.tasks import Reconstruction, Views, WindowViews
from metattt.testing.specimen import compare, distance, run

pytestmark = pytest.mark.skipif(load(SOURCE, {}) is None, reason="no compiler")
BOUND = 2e-5
VIEWS = {"": (), "p": ("p",), "b": ("b",), "p and b": ("p", "b")}


def inputs(decay: str, views: str, pairs: int, widths: tuple[int, int], length: int) -> dict[str, Tensor]:
    """Tokens of 2 sequences and 3 heads; the decays hold a 0 and a 1."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = widths
    shape = (2, length, 3, pairs) if pairs > 1 else (2, length, 3)

    def random(*own: int) -> Tensor:
        x = torch.randn(*shape, *own, generator=generator)
        return x.transpose(1, 2)  # the strides that a layer's views have

    found = {name: random(rows) / rows**0.5 for name in ("k", *VIEWS[views])} | {"v": random(columns)}
    found["q"] = torch.randn(2, length, 3, rows, generator=generator).transpose(1, 2)
    found["eta"] = random().sigmoid()
    found["w"] = torch.randn(2, 3, rows, columns, generator=generator)
    if decay != "none":
        a = torch.rand(2, 3, length, *([rows] if decay == "channel" else []), generator=generator)
        a[0, 1, length // 2], a[1, 2, length // 3] = (0.0 if decay == "head" else 1e-30), 1.0
        found["a"] = a
    return found


def given_of(x: dict[str, Tensor], decayed: bool, exclusive: bool) -> MiniBatches:
    channel = "a" in x and x["a"].ndim == 4
    gates = Gates(x["eta"], alpha=None if channel else x.get("a"), decay=x["a"].log() if channel else None)
    tokens = Tokens(Views(x["k"], x["v"], x["q"], x.get("p"), x.get("b")), gates)
    return MiniBatches(tokens, {"w": x["w"]}, {}, None, 1, x["k"].dtype, None, exclusive, decayed)


def results(x: dict[str, Tensor], erases: bool, decayed: bool, exclusive: bool, native: bool) -> dict[str, Tensor]:
    """Outputs, final weights and all gradients, by the kernel or by the oracle."""
    leaves = {name: (value if native else value.double()).detach().requires_grad_() for name, value in x.items()}
    given = given_of(leaves, decayed, exclusive)
    if native:
        kernel = NativeOnlineLinear() if erases else NativeOnlineDot()
        assert kernel.reason_rejected(given) is None
        y, after = kernel.scan(given, lambda _: pytest.fail("the reference was taken"))
        w = after["w"]
    else:
        (k, v, q, p, b, *_), gates = given.tokens.apart()
        a = gates.alpha if gates.decay is None else gates.decay.exp()
        options = {"erases": erases, "decayed": decayed, "exclusive": exclusive}
        y, w = online_linear(k, v, q, gates.eta, leaves["w"], p=p, b=b if erases else None, a=a, **options)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in (y, w)]
    gradients = torch.autograd.grad([y, w], list(leaves.values()), cotangents, allow_unused=True)
    return {"y": y.detach(), "final w": w.detach()} | {
        f"d{name}": torch.zeros_like(leaves[name]) if d is None else d
        for name, d in zip(leaves, gradients, strict=True)
    }


def check(x: dict[str, Tensor], erases: bool, decayed: bool = False, exclusive: bool = False) -> None:
    found = results(x, erases, decayed, exclusive, native=True)
    expected = results(x, erases, decayed, exclusive, native=False)
    for name, value in expected.items():
        assert distance(found[name].double(), value) < BOUND, (name, found[name].shape)


@pytest.mark.parametrize(("erases", "views"), [(True, views) for views in VIEWS] + [(False, "")])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_equals_the_loop_over_tokens(decay: str, erases: bool, views: str) -> None:
    for decayed, exclusive, pairs in itertools.product([False, True], [False, True], [1, 2]):
        if decayed <= (decay != "none" and erases):
            check(inputs(decay, views, pairs, (16, 16), 21), erases, decayed, exclusive)


@pytest.mark.parametrize("widths", [(1, 1), (5, 7), (64, 64), (33, 100), (16, 144), (128, 24)])
def test_any_width(widths: tuple[int, int]) -> None:
    for length in (1, 70):
        check(inputs("head", "", 1, widths, length), True, True)
        check(inputs("channel", "p and b", 1, widths, length), True, True)


def test_threads() -> None:
    torch.set_num_threads(3)
    check(inputs("head", "", 1, (16, 16), 700), True, True)


FORMS = {("delta_gradient", "rwkv7"), ("delta_gradient", "pairs"), ("momentum", None), ("state_gated", None)}  # of none it covers one
ONLINE = [i for i, (learner, *parts) in enumerate(drawing.STRATA) if learner == "linear_map" and tuple(parts) not in FORMS]


@pytest.mark.parametrize("seed", ONLINE)
def test_drawn_compositions(seed: int) -> None:
    """In float32, by the kernel, against themselves in float64, by the forms: the first one of a seed that it covers."""
    for drawn in drawing.drawn(seed):
        if drawn.parts["task"][1].get("corruption", "none") != "none":  # draws other numbers in another type
            continue
        try:
            layer, calls = drawn.build(0.3)
            if not layer.plan.kernels:
                continue
            outputs = drawing.run(layer, calls)
        except MetaTTTError:
            continue
        calls = [call._replace(x=call.x.float()) for call in calls]
        found = drawing.run(layer.float(), calls)
        if any(form == "fused" for form, *_ in layer.plan.said):
            assert all(distance(y.double(), expected) < BOUND for y, expected in zip(found, outputs, strict=True)), drawn
            return
    pytest.fail("the kernel covers none")


LAYERS = ["delta_net", "gated_delta_net", "comba", "kda", "gla", "rwkv7", "gated_delta_product", "hgrn2"]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_split_padded_and_packed(name: str) -> None:
    words = f"layer={name}", "dim=32", "num_heads=2"
    torch.manual_seed(0)
    fused = build(*words, "layer.form=fused")
    dual = build(*words, "layer.form=dual")
    dual.load_state_dict(fused.state_dict())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 40, 32, generator=generator)
    reset, mask = torch.rand(2, 40, generator=generator) < 0.1, torch.rand(2, 40, generator=generator) < 0.9
    for cuts, flags in (([], {}), ([1, 17, 18], {}), ([], {"reset": reset}), ([9], {"mask": mask, "reset": reset})):
        found, expected = (run(layer, x, cuts, grads=True, **flags) for layer in (fused, dual))
        assert compare(found, expected) < 1e-4, (cuts, list(flags))


RULES = {
    "plain": (True, lambda: GradientDescent(anchor="online")),
    "exclusive": (True, lambda: GradientDescent(anchor="online", read="exclusive")),
    "previous": (False, lambda: GradientDescent(anchor="online", read="previous")),
    "token steps": (False, lambda: GradientDescent(anchor="online", token_steps="shared")),
    "clipping": (False, lambda: GradientDescent(anchor="online", max_norm=1.0)),
    "momentum": (False, lambda: Momentum(1, "online")),
    "decay to W0": (False, lambda: Momentum(1, "online", momentum="none", decay="per_head", decay_to_init=True)),
    "pairs at the same weights": (False, lambda: GradientDescent(anchor="online"), lambda: WindowViews(window=3)),
}


@pytest.mark.parametrize("name", RULES)
def test_which_rules_it_computes(name: str) -> None:
    """All others, and all of float64, are left to the forms."""
    covered, rule, *task = RULES[name]
    layer = TTTLayer(16, 1, (*task, Reconstruction)[0](), Linear(bias=False, residual=False, norm=False), rule())
    assert bool(layer.plan.kernels) == covered, layer.plan.reasons
    assert layer(torch.zeros(1, 3, 16))[0].dtype == torch.float32
    assert layer.double()(torch.zeros(1, 3, 16).double())[0].dtype == torch.float64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated_delta_net", "rwkv7"])
def test_compilers_and_transforms_take_the_forms(name: str) -> None:
    layer = build(f"layer={name}", "dim=16", "num_heads=2")
    x = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(0))
    expected = layer(x)[0].detach()
    found = [
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x)[0],
        torch.export.export(layer, (x,)).module()(x)[0],
        torch.func.vmap(lambda row: layer(row[None])[0][0])(x),
    ]
    assert max(distance(y.detach(), expected) for y in found) < 1e-5


class Traceable(OnlineLinear):
    """A kernel of one's own that a compiler looks into, and that knows nothing of documents."""

    name, device, traceable = "online_linear.own", "cpu", True

    def reason_rejected(self, given: MiniBatches) -> str | None:
        return None

    def scan(self, given: MiniBatches, reference: Scan) -> tuple[Tensor, Tensors]:
        k, v, q, p, b, eta, a = pairs_of(given.tokens)
        ((name, w),) = given.weights.items()
        y, after = online_linear(k, v, q, eta, w, p=p, b=b, a=a, erases=self.erases, decayed=given.decayed)
        return y, {name: after}


@pytest.mark.slow
def test_documents_are_apart_with_a_kernel_of_ones_own() -> None:
    """Also under `torch.compile`, which does not know where they begin, and so takes the forms."""
    layer, x = build("layer=delta_net", dim=16, num_heads=2, seed=0), torch.randn(2, 3, 16)
    reset = torch.arange(3) == torch.tensor([[1], [2]])
    expected, layer.plan.kernels = layer(x, reset=reset)[0], [Traceable()]
    for call in (layer, torch.compile(layer, backend="eager")):
        assert distance(call(x, reset=reset)[0], expected) < 1e-5
