"""The Triton kernels of `ttt_linear` against the oracle in float64: outputs, states and every gradient.

On a GPU the cases run there, in bf16 too; elsewhere under Triton's interpreter, which `conftest.py` chooses before
Triton is imported.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")


from metattt.errors import MetaTTTError
from metattt.kernels.ttt_linear import backward, backward_chain, forward, naive, op, tuning

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
Inputs = dict[str, Tensor | None]
NAMES = ("q", "k", "v", "eta", "w", "b", "scale", "shift", "tau")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch, quick_interpreter: None) -> None:
    """Segments of two mini-batches, so that a few of them have several; outputs that no kernel may leave unwritten."""
    monkeypatch.setattr(tuning, "SEGMENT", 2)
    monkeypatch.setattr(tuning, "CHAIN_SEGMENT", 2)
    monkeypatch.setattr(tuning, "LEAST_SEGMENTS", 0)
    for module in (forward, backward, backward_chain):
        allocate = module.allocate
        monkeypatch.setattr(
            module,
            "allocate",
            lambda *a, allocate=allocate: type(out := allocate(*a))(*(x.fill_(torch.nan) for x in out)),
        )


@pytest.fixture(params=tuning.FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both passes as walks, or as chains."""
    monkeypatch.setattr(tuning.Call, "form", lambda call, direction, segment: request.param)
    return str(request.param)


def error(ours: Tensor, reference: Tensor) -> float:
    """‖ours − reference‖ / ‖reference‖; NaN is infinitely wrong."""
    difference = (ours.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30)
    return float(difference.detach().nan_to_num(torch.inf))


def make_inputs(
    tokens: int,
    width: int,
    size: int,
    *,
    batch: int,
    heads: int,
    dtype: torch.dtype,
    bias: bool,
    tau: str,
    states: int | None,
) -> Inputs:
    """Random inputs whose inner steps change W by as much as W is; rounded to `dtype` where the operation takes that
    type."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE)

    q, k, v = (
        normal(batch, heads, tokens, width).to(dtype).transpose(1, 2) for _ in range(3)
    )  # as a layer hands them over
    lead = (heads,) if states is None else (states, heads)
    steps = (
        None
        if tau == "none"
        else 1 / torch.arange(1.0, size + 1, device=DEVICE)
        + 0.1 * torch.rand(heads if tau == "per_head" else 1, size, device=DEVICE)
    )
    rate = 4 / width / (size if steps is None else 1)
    return {
        "q": q,
        "k": k,
        "v": v,
        "eta": rate * torch.rand(batch, tokens, heads, device=DEVICE),
        "w": (0.3 * normal(*lead, width, width) + 0.05) / width**0.5,
        "b": 0.3 * normal(*lead, width) + 0.1 if bias else None,
        "scale": 1 + 0.2 * normal(heads, width),
        "shift": 0.2 * normal(heads, width),
        "tau": steps,
    }


def run(function: Callable, given: Inputs, size: int, bounds: list[int] | None, final: bool) -> tuple[Tensor, ...]:
    """o, and the final state if asked for."""
    weights = (given["w"], given["b"])
    stated = given["w"].ndim == 4
    plain = (weights[0][0], None if weights[1] is None else weights[1][0]) if stated else weights
    o, state = function(
        *(given[name] for name in ("q", "k", "v", "eta")),
        *plain,
        given["scale"],
        given["shift"],
        tau=given["tau"],
        mini_batch_size=size,
        initial_state=weights if stated else None,
        output_final_state=final,
        cu_seqlens=None if bounds is None else torch.tensor(bounds, device=DEVICE),
    )
    return (o,) if state is None else (o, *state)


def compare(given: Inputs, size: int, bounds: list[int] | None, final: bool, tolerance: float) -> None:
    """Every output and every gradient, for random cotangents of every output."""
    ours = {name: None if x is None else x.detach().requires_grad_() for name, x in given.items()}
    exact = {name: None if x is None else x.detach().double().requires_grad_() for name, x in given.items()}
    outputs, references = (
        run(op.ttt_linear, ours, size, bounds, final),
        run(naive.ttt_linear_naive, exact, size, bounds, final),
    )
    labels = ("o", "w", "b", "update_w", "update_b")
    errors = {f"output {label}": error(y, r) for label, y, r in zip(labels, outputs, references, strict=False)}
    assert outputs[0].dtype == given["q"].dtype and all(y.dtype == torch.float32 for y in outputs[1:])

    cotangents = [torch.randn(y.shape, device=DEVICE).to(y.dtype) for y in outputs]
    wanted = [name for name in NAMES if given[name] is not None]
    gradients = torch.autograd.grad(outputs, [ours[name] for name in wanted], cotangents)
    used = [(r, c.double()) for r, c in zip(references, cotangents, strict=True) if r.requires_grad]
    expected = torch.autograd.grad([r for r, _ in used], [exact[name] for name in wanted], [c for _, c in used])
    errors |= {f"gradient of {name}": error(g, r) for name, g, r in zip(wanted, gradients, expected, strict=True)}
    wrong = {name: e for name, e in errors.items() if e > tolerance}
    assert not wrong, wrong


def cases() -> Iterator[tuple]:
    """(tokens, width, b, batch, heads, type, bias, tau, states, bounds, final): every value of each, and the pairs that
    could interact."""
    single, half = torch.float32, torch.float16
    for size, tokens in itertools.product((8, 16, 32), (1, 5, 16, 33, 70)):  # T = 1, T < b, whole and ragged
        if tokens < 3 * size:
            yield tokens, 32, size, 1, 2, single, True, "shared", None, None, True
    for tokens in (1, 47, 70):
        yield tokens, 32, 64, 1, 1, single, True, "per_head", None, None, True
    for width, size in itertools.product((64, 96, 128), (8, 16, 32)):
        yield (20 if width == 64 else size + 3), width, size, 1, 1, single, True, "shared", None, None, True
    for bias, tau in itertools.product((True, False), ("none", "shared", "per_head")):
        yield 37, 32, 16, 1, 2, single, bias, tau, None, None, True
        yield 37, 32, 16, 2, 2, half, bias, tau, 2, None, True
    for width, size in ((32, 8), (64, 16), (96, 16), (128, 16), (32, 32), (32, 64)):
        yield 35, width, size, 1, 1, half, True, "shared", None, None, True
    for final, states, tokens in itertools.product((True, False), (None, 2), (7, 16, 70)):
        yield tokens, 32, 16, 2, 1, single, True, "shared", states, None, final
    for bounds in ([0, 35], [0, 16, 48], [0, 1, 2, 50], [0, 17, 17, 49, 70], [0, 5, 64]):
        yield bounds[-1], 32, 16, 1, 1, single, True, "shared", None, bounds, True
        yield bounds[-1], 32, 8, 1, 1, half, len(bounds) != 3, "per_head", len(bounds) - 1, bounds, False


CASES = list(cases())
if not INTERPRETED:  # the interpreter has no bf16
    CASES += [(*case[:5], torch.bfloat16, *case[6:]) for case in CASES if case[5] == torch.float16]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: "-".join(str(x).removeprefix("torch.").replace(" ", "") for x in c)
)
def test_forward_and_every_gradient(case: tuple, form: str) -> None:
    tokens, width, size, batch, heads, dtype, bias, tau, states, bounds, final = case
    given = make_inputs(tokens, width, size, batch=batch, heads=heads, dtype=dtype, bias=bias, tau=tau, states=states)
    compare(given, size, bounds, final, TOLERANCE[dtype])


def test_at_least_sixty_shapes() -> None:
    assert len(set(map(str, CASES))) == len(CASES) >= 60


@pytest.fixture
def given() -> Inputs:
    return make_inputs(37, 32, 16, batch=2, heads=2, dtype=torch.float32, bias=True, tau="shared", states=None)


def test_oracle_takes_gradient_steps_on_the_inner_loss(given: Inputs) -> None:
    """The oracle's first mini-batch, from autograd of the inner loss itself, one gradient per token."""
    exact = {name: x.double() for name, x in given.items()}
    w, b = exact["w"].requires_grad_(), exact["b"].requires_grad_()
    o, _ = naive.ttt_linear_naive(*list(exact.values())[:-1], tau=exact["tau"], output_final_state=True)
    update_w, update_b = torch.zeros_like(w), torch.zeros_like(b)
    for t in range(16):
        k, v, q = (exact[name][0, t] for name in ("k", "v", "q"))  # [H, d]

        def predict(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            z = torch.einsum("hi,hio->ho", x, w) + b
            return x + exact["scale"] * torch.nn.functional.layer_norm(z, z.shape[-1:], eps=naive.EPS) + exact["shift"]

        loss = 0.5 * (predict(k, w, b) - v).square().sum(-1)  # [H]
        grad_w, grad_b = torch.autograd.grad((exact["eta"][0, t] * loss).sum(), (w, b))
        update_w, update_b = update_w - grad_w, update_b - grad_b
        step = exact["tau"][0, t]
        torch.testing.assert_close(o[0, t], predict(q, w + step * update_w, b + step * update_b))
    assert error(w + exact["tau"][0, -1] * update_w, w) > 0.1  # the steps matter


def test_segments_only_bound_rounding(given: Inputs, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for length in (1, 3, 64):
        monkeypatch.setattr(tuning, "SEGMENT", length)
        monkeypatch.setattr(tuning, "CHAIN_SEGMENT", length)
        compare(given | {"tau": None}, 8, None, True, TOLERANCE[torch.float32])


def test_only_the_final_state_is_used(given: Inputs, form: str) -> None:
    """Cotangents that are absent count as zero; those of the output may be expanded."""
    grads = []
    for function, dtype in ((op.ttt_linear, torch.float32), (naive.ttt_linear_naive, torch.float64)):
        leaves = {name: x.to(dtype).detach().requires_grad_() for name, x in given.items()}
        o, w, _, update_w, _ = run(function, leaves, 16, None, True)
        uses = (w.sum() + update_w.square().sum(), o.sum())
        grads.append([torch.autograd.grad(use, [leaves["k"], leaves["w"]], retain_graph=True) for use in uses])
    for ours, expected in zip(itertools.chain(*grads[0]), itertools.chain(*grads[1]), strict=True):
        assert error(ours, expected) < TOLERANCE[torch.float32]


def test_without_gradients_nothing_is_saved(given: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    launch = forward.launch_forward
    monkeypatch.setattr(forward, "launch_forward", lambda out, *a: seen.append(out) or launch(out, *a))
    (o,) = run(op.ttt_linear, given, 16, None, False)
    assert seen[0].weighted.numel() == seen[0].anchors.numel() == seen[0].w.numel() == 0
    assert error(o, run(naive.ttt_linear_naive, given, 16, None, False)[0]) < TOLERANCE[torch.float32]


def test_any_strides(given: Inputs) -> None:
    """Views of one fused projection, read where they lie."""
    fused = torch.randn(2, 37, 3, 2, 32, device=DEVICE)
    views = dict(zip("qkv", fused.unbind(2), strict=True)) | {
        "eta": torch.rand(2, 2, 37, device=DEVICE).mul(0.1).transpose(1, 2)
    }
    assert not views["q"].is_contiguous() and not views["eta"].is_contiguous()
    compare(given | views, 16, None, True, TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("width", "bias", "tau"), [(32, True, "shared"), (64, True, "per_head"), (96, False, "none"), (128, True, "shared")]
)
def test_decode_steps_as_the_oracle_at_mixed_offsets(width: int, bias: bool, tau: str) -> None:
    batch, heads, size = 4, 1, 8
    given = make_inputs(
        12, width, size, batch=batch, heads=heads, dtype=torch.float32, bias=bias, tau=tau, states=batch
    )
    exact = {name: None if x is None else x.double() for name, x in given.items()}
    phase = torch.tensor([0, 3, 6, 7], device=DEVICE)
    state = naive.LinearState(
        given["w"].clone(), given["b"].clone() if bias else None, torch.zeros_like(given["w"]), None
    )
    state = state._replace(update_b=torch.zeros_like(given["b"]) if bias else None)
    b = exact["b"] if bias else torch.zeros_like(exact["w"][..., 0])
    reference = naive.LinearState(exact["w"], b, torch.zeros_like(exact["w"]), torch.zeros_like(b))
    for t in range(12):
        q, k, v, eta = (given[name][:, t] for name in ("q", "k", "v", "eta"))
        o = op.ttt_linear_decode(
            q, k, v, eta, *state, given["scale"], given["shift"], tau=given["tau"], phase=phase, mini_batch_size=size
        )
        expected, reference = naive.ttt_linear_decode_naive(
            *(exact[name][:, t] for name in ("q", "k", "v", "eta")), reference, exact["scale"], exact["shift"],
            tau=exact["tau"], phase=phase, mini_batch_size=size, bias=bias,
        )  # fmt: skip
        assert error(o, expected) < 1e-5
        for ours, theirs in zip(state, reference, strict=True):
            assert ours is None or error(ours, theirs) < 1e-5
        phase = (phase + 1) % size


def test_decode_continues_where_the_sequence_ended(given: Inputs) -> None:
    (whole,) = run(op.ttt_linear, given, 16, None, False)
    start = {name: x[:, :20] if name in ("q", "k", "v", "eta") else x for name, x in given.items()}
    _, *state = run(op.ttt_linear, start, 16, None, True)
    for t in range(20, 37):
        token = (given[name][:, t] for name in ("q", "k", "v", "eta"))
        phase = torch.full((2,), t % 16, device=DEVICE)
        o = op.ttt_linear_decode(*token, *state, given["scale"], given["shift"], tau=given["tau"], phase=phase)
        assert error(o, whole[:, t]) < 1e-5


def test_operators_are_well_formed(given: Inputs) -> None:
    """Schema, fake implementations and autograd registration, as `torch.compile` relies on them."""
    operators = torch.ops.metattt
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    views = [leaves[name].transpose(1, 2) for name in ("k", "v", "q", "eta")]
    steps, norm = (None, None, leaves["tau"]), (leaves["scale"], leaves["shift"])
    arguments = (*views, *steps, *norm, [leaves["w"], leaves["b"]], 16, 2)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.ttt_linear.default, (*arguments, True, True, None, "cuda"), test_utils=tests)
    o, *made = (x.detach() for x in operators.ttt_linear(*arguments, True, True, None, "cuda"))
    saved = [x.detach() if isinstance(x, Tensor) else x for x in arguments[:9]]
    saved = (*saved, [x.detach() for x in arguments[9]], 16, 2, None, "cuda")
    torch.library.opcheck(operators.ttt_linear_backward.default, (o, [None] * 4, made, *saved), test_utils=tests)
    q, k, v, eta, _, _, scale, shift, tau = given.values()
    state = [torch.zeros(2, 2, 32, *last, device=DEVICE) for last in ((32,), (), (32,), ())]
    token = (q[:, 0], k[:, 0], v[:, 0], eta[:, 0])
    phase = torch.tensor([0, 15], device=DEVICE)
    decoded = (*token, state[:2], state[2:], scale, shift, tau, phase, 16)
    torch.library.opcheck(operators.ttt_linear_decode.default, decoded, test_utils=tests)


def test_compiled_whole(given: Inputs) -> None:
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}

    def loss(given: Inputs) -> Tensor:
        return sum(y.square().sum() for y in run(op.ttt_linear, given, 16, None, True))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ours, expected = (torch.autograd.grad(f(leaves), list(leaves.values())) for f in (compiled, loss))
    for x, y in zip(ours, expected, strict=True):
        assert error(x, y) < 1e-6


def test_second_derivatives_are_refused(given: Inputs) -> None:
    w = given["w"].requires_grad_()
    (gradient,) = torch.autograd.grad(
        run(op.ttt_linear, given, 16, None, False)[0].square().sum(), w, create_graph=True
    )
    with pytest.raises(MetaTTTError, match=r"layer\.form=dual"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 37, 2, 48)}, "head width 48"),
        ({"v": torch.zeros(2, 36, 2, 32)}, r"v has shape \(2, 36, 2, 32\)"),
        ({"k": torch.zeros(2, 37, 32, 2).mT}, "last must be 1"),
        ({"k": torch.zeros(2, 37, 2, 32).double()}, "one type"),
        ({"eta": torch.zeros(2, 37, 2).half()}, "eta is torch.float16"),
        ({"w": torch.zeros(1, 32, 32)}, r"w has shape"),
        ({"b": torch.zeros(2, 31)}, r"b has shape"),
        ({"tau": torch.zeros(1, 8)}, r"tau has shape"),
        ({"scale": torch.zeros(32)}, r"norm_scale has shape"),
    ],
)
def test_refused_in_one_line(given: Inputs, change: Inputs, message: str) -> None:
    with pytest.raises(MetaTTTError, match=message) as caught:
        run(op.ttt_linear, given | change, 16, None, False)
    assert "\n" not in str(caught.value)


def test_refused_sizes(given: Inputs) -> None:
    with pytest.raises(MetaTTTError, match="mini-batches of 12 tokens"):
        run(op.ttt_linear, given, 12, None, False)
    wide = make_inputs(5, 128, 64, batch=1, heads=1, dtype=torch.float32, bias=True, tau="none", states=None)
    with pytest.raises(MetaTTTError, match=r"294,912 bytes of shared memory.* has 232,448.*mini_batch_size=32"):
        run(op.ttt_linear, wide, 64, None, False)
    with pytest.raises(MetaTTTError, match="cu_seqlens"):
        run(op.ttt_linear, given, 16, [0, 20, 37], False)


def test_variants_change_and_undo() -> None:
    kernels = [kernel for passes in tuning.KERNELS.values() for names in passes.values() for kernel in names]

    def parameters() -> tuple:
        call = tuning.Call(64, 16, 4, 1, 1000, 232_448)
        forms = [call.form(direction, tuning.SEGMENT) for direction in tuning.KERNELS]
        launches = [call.launch(kernel) for kernel in kernels]
        return forms, launches, tuning.SEGMENT, tuning.CHAIN_SEGMENT, tuning.FP32_PRODUCTS

    before, changed = parameters(), 0
    for _, change in tuning.variants(64, 16, torch.float32, per_sm=1):
        undo = change()
        changed += parameters() != before
        table = json.loads(json.dumps(tuning.TABLE))
        assert table == tuning.TABLE and all(" d64 b16 32-bit 1/SM" in name for name in table)
        undo()
        assert parameters() == before and not tuning.TABLE
    names = [name for name, _ in tuning.variants(64, 16, torch.float32)]
    assert len(set(names)) == len(names) == changed + 2  # the two forms that are taken anyway


def test_the_form_is_chosen_by_programs_per_multiprocessor() -> None:
    """On 132 multiprocessors, as an H100 has."""

    def forms(heads: int, tokens: int, dtype: torch.dtype = torch.bfloat16, width: int = 64, size: int = 16) -> list:
        call = tuning.Call.of(torch.empty(1, tokens, heads, width, dtype=dtype, device="meta"), size, 1)
        return [call.form(direction, tuning.CHAIN_SEGMENT) for direction in ("forward", "backward")]

    assert forms(32, 4096) == forms(263, 4096) == ["chain", "chain"]
    assert forms(264, 4096) == forms(1000, 4096) == ["walk", "walk"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "LEAST_SEGMENTS", 2)
        assert forms(32, 63) == ["walk", "walk"]  # three mini-batches and a part: fewer than two segments
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tuning.TABLE, tuning.key("backward", 64, 16, 2, 0), "walk")
        assert forms(32, 4096) == ["chain", "walk"] and forms(132, 4096) == ["chain", "chain"]


def test_either_pass_in_either_form(given: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one form of the forward pass saves, either form of the backward pass reads."""
    for first, second in (("walk", "chain"), ("chain", "walk")):
        chosen = {"forward": first, "backward": second}
        monkeypatch.setattr(tuning.Call, "form", lambda call, direction, segment, chosen=chosen: chosen[direction])
        compare(given, 16, None, True, TOLERANCE[torch.float32])


def test_chains_give_the_same_sums_every_time(given: Inputs) -> None:
    leaves = [x.detach().requires_grad_() for x in given.values()]
    both = [
        torch.autograd.grad(
            run(op.ttt_linear, dict(zip(given, leaves, strict=True)), 16, None, False)[0].square().sum(), leaves
        )
        for _ in range(2)
    ]
    assert all(torch.equal(x, y) for x, y in zip(*both, strict=True))


@pytest.mark.skipif(not INTERPRETED, reason="memory that is never touched costs nothing on a CPU alone")
def test_heads_further_apart_than_two_to_the_31(form: str) -> None:
    """`[B, H, T, d]` of a long sequence: the third head begins 2³¹ values after the first."""
    q = torch.empty(2**31 + 20 * 32, dtype=torch.float16).as_strided((1, 20, 3, 32), (0, 32, 2**30, 1))
    given = make_inputs(20, 32, 16, batch=1, heads=3, dtype=torch.float16, bias=True, tau="shared", states=None)
    q.copy_(given["q"])
    near, far = (
        torch.autograd.grad(
            run(op.ttt_linear, {**given, "q": x, "k": k}, 16, None, False)[0].float().square().sum(), k
        )[0]
        for x, k in ((given["q"], given["k"].clone().requires_grad_()), (q, given["k"].clone().requires_grad_()))
    )
    assert torch.equal(near, far)
