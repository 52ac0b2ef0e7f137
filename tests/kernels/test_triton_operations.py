"""The Triton operations against their equations in float64: outputs, final states and every gradient.

On a GPU the cases run there, in bf16 too; elsewhere in Triton's interpreter, which `conftest.py` chooses before Triton is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from operation_cases import (
    CASES,
    DEVICE,
    HALF,
    OPERATIONS,
    TOKENS,
    Case,
    Given,
    draw,
    laid_out,
    launches,
    with_gradients,
)
from refusals_for_tests import refusal

pytestmark = pytest.mark.usefixtures("quick_interpreter")


def relative(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; NaN is infinitely wrong."""
    assert found.shape == expected.shape
    difference = (found.double() - expected).norm() / (expected.norm() or 1.0)
    return float(difference.detach().nan_to_num(torch.inf))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_states_and_gradients(case: Case) -> None:
    operation, (given, state) = OPERATIONS[case.op], draw(case)
    expected = with_gradients(operation.naive, given, state, case)
    with launches(case):
        narrow = None if state is None else tuple(None if w is None else w.float() for w in state)
        found = with_gradients(operation.run, laid_out(given, case), narrow, case)
    assert found["o"].dtype == case.dtype and found.keys() == expected.keys()
    errors = {name: relative(found[name], x) for name, x in expected.items()}
    assert {name: error for name, error in errors.items() if error > operation.tolerance[case.dtype]} == {}


def test_hidden_units_of_any_size() -> None:
    """Where a GELU is flat the fifth power of its argument may be infinite in fp32: that is no derivative."""
    case = Case("ttt_mlp", 16)
    given = draw(case)[0]
    given |= {name: 1e9 * given[name] for name in "qk"}
    with launches(case):
        found = with_gradients(OPERATIONS["ttt_mlp"].run, laid_out(given, case), None, case)
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("op", OPERATIONS)
def test_what_is_rounded_does_not_grow(op: str) -> None:
    """Norms, token steps, short keys and small weights as at the beginning of training: the mean of z that rounded updates
    leave behind grew with every mini-batch, and after 500 tokens outputs were wrong by half their size."""
    case = Case(op, length=384, d=64, tau="shared", dtype=HALF, segment=8)
    given = draw(case)[0]
    given |= {"norm_scale": torch.ones_like(given["norm_scale"]), "norm_bias": torch.zeros_like(given["norm_bias"])}
    given |= {name: given[name] / 8 for name in (*"qk", *OPERATIONS[op].weights)} | {"eta": given["eta"] / 32}
    given["tau"] = (1 / torch.arange(1, 17, device=DEVICE)).double().unsqueeze(0)
    expected = OPERATIONS[op].naive(**given)[0]
    with launches(case), torch.no_grad():
        found = OPERATIONS[op].run(**laid_out(given, case))[0].double()
    errors = [relative(one, right) for one, right in zip(found.split(64, 1), expected.split(64, 1), strict=True)]
    assert errors[-1] < 2 * errors[0] < 0.02


@pytest.mark.parametrize(("d", "bias", "tau"), [(32, True, "shared"), (64, True, "heads"), (96, False, "heads"), (128, True, "shared")])
@pytest.mark.parametrize("op", OPERATIONS)
def test_decoding_goes_on_from_places_of_their_own(op: str, d: int, bias: bool, tau: str) -> None:
    """Sequences that were read to different places, token by token over the end of a mini-batch."""
    b, starts, count = 8, (0, 3, 6, 7), 4
    case = Case(op, length=12, b=b, d=d, batch=4, heads=2 if d == 32 else 1, bias=bias, tau=tau)
    operation, (given, _) = OPERATIONS[op], draw(case)

    def read(n: int, first: int, last: int) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        tokens = {name: given[name][n : n + 1, :last] for name in TOKENS}
        o, state = operation.naive(**(given | tokens), mini_batch_size=b, output_final_state=True)
        return o[:, first:], state

    def joined(states: list[tuple[Tensor | None, ...]]) -> list[Tensor | None]:
        """Without the parts of a bias that is not there, which are zero or None."""
        parts = zip(*states, strict=True)
        return [torch.cat(x).float().contiguous() if bias or not at % 2 else None for at, x in enumerate(parts)]

    state, outputs = joined([read(n, 0, start)[1] for n, start in enumerate(starts)]), []
    norm, steps = [given[name].float() for name in ("norm_scale", "norm_bias")], given["tau"].float()
    for j in range(count):
        places = torch.tensor(starts, device=DEVICE) + j
        token = [given[name][torch.arange(4), places].float() for name in TOKENS]
        with launches(case):
            outputs.append(operation.decode(*token, *state, *norm, tau=steps, phase=places % b))
    expected = [read(n, start, start + count) for n, start in enumerate(starts)]
    errors = [relative(torch.stack(outputs, 1), torch.cat([o for o, _ in expected]))]
    errors += [relative(x, y.double()) for x, y in zip(state, joined([s for _, s in expected]), strict=True) if x is not None]
    assert len(errors) == 1 + len(operation.weights) * (1 + bias) and max(errors) < 1e-5


# -- what torch and its users rely on ----------------------------------------------------------------------------------


def small(op: str, **changes: Any) -> Given:
    case = Case(op, **{"length": 35, "heads": 2} | changes)
    return {name: None if x is None else x.requires_grad_() for name, x in laid_out(draw(case)[0], case).items()}


@pytest.mark.parametrize("op", OPERATIONS)
def test_operators_pass_the_checks_of_torch(op: str) -> None:
    """Schema, fake implementations and autograd registration, as `torch.compile` relies on them."""
    operators, names = torch.ops.metattt, OPERATIONS[op].weights
    forward, backward, decode = (getattr(operators, op + part) for part in ("", "_backward", "_decode"))
    given = small(op, length=20)
    views = [given[name].transpose(1, 2) for name in ("k", "v", "q", "eta")]
    rest = (given["tau"], given["norm_scale"], given["norm_bias"])
    weights = [given[name] for name in names]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(forward.default, (*views, *rest, weights, 16, 1, True, True, None, "cuda"), test_utils=tests)
    o, *made = (x.detach().to(DEVICE) for x in forward(*views, *rest, weights, 16, 1, True, True, None, "cuda"))
    saved = [None if x is None else x.detach() for x in (*views, *rest)]
    weights = [x.detach() for x in weights]
    arguments = (o, [None] * 2 * len(names), made, *saved, weights, 16, 1, None, "cuda")
    torch.library.opcheck(backward.default, arguments, test_utils=tests)
    token = [given[name].detach()[:, 0].contiguous() for name in TOKENS]
    states = [torch.zeros_like(x)[None] for x in weights * 2]
    phase = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    arguments = (*token, states[: len(names)], states[len(names) :], *saved[5:], saved[4], phase, 16, "cuda")
    torch.library.opcheck(decode.default, arguments, test_utils=tests)


@pytest.mark.parametrize("op", OPERATIONS)
def test_without_gradients_and_with_two(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inference computes the same and keeps nothing for a backward pass, which gives the same bits every time; derivatives of it are
    refused."""
    given, run = small(op), OPERATIONS[op].run
    kept: list[int] = []
    kernel = type(OPERATIONS[op].kernel)
    forward = kernel.forward

    def counting(self: Any, call: Any) -> Any:
        results = forward(self, call)
        kept.append(sum(x.numel() for x in results[2]))
        return results

    monkeypatch.setattr(kernel, "forward", counting)
    with torch.no_grad():
        inference, nothing = run(**given)
    assert nothing is None and kept == [0]
    training, _ = run(**given)
    assert torch.equal(inference, training)
    first, again = (torch.autograd.grad(training.square().sum(), given["q"], create_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    refusal(first.square().sum().backward, f"{op}_backward", "layer.form=dual")


def half(name: str) -> Callable[[Given], Tensor]:
    """Of an argument, along its last dimension."""
    return lambda given: given[name][..., : given[name].shape[-1] // 2].detach()


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    *((op, {"mini_batch_size": 12, "tau": None}, {}, "mini-batches of 12 tokens") for op in OPERATIONS),
    *((op, {}, {"d": 24}, "head width 24") for op in OPERATIONS),
    *((op, {name: half(name)}, {}, f"{name} has shape") for op, one in OPERATIONS.items() for name in ("k", "eta", "tau", *one.weights)),
    *((op, {"k": lambda given: given["k"].double()}, {}, "one type") for op in OPERATIONS),
    *((op, {"eta": lambda given: given["eta"].half()}, {}, "eta is torch.float16") for op in OPERATIONS),
    *((op, {"cu_seqlens": torch.tensor([0, 35])}, {"batch": 2}, "B = 1") for op in OPERATIONS),
    ("ttt_linear", {"k": lambda given: given["k"].mT.contiguous().mT}, {}, "last must be 1"),
    ("ttt_linear", {"mini_batch_size": 64}, {"d": 128, "b": 64}, "294,912 bytes of shared memory.* has 232,448.*mini_batch_size=32"),
    ("ttt_mlp", {"b1": None}, {}, "b1 and b2"),
    ("ttt_mlp", {"initial_state": (None, None)}, {}, r"expected \(w1, b1, w2, b2\)"),
]  # fmt: skip


def refused(call: Callable[..., Any], given: Given, changes: dict[str, Any], message: str) -> None:
    changed = given | {key: value(given) if callable(value) else value for key, value in changes.items()}
    refusal(partial(call, **changed), match=message, lines=1)


@pytest.mark.parametrize(("op", "changes", "sizes", "message"), REFUSED)
def test_errors_say_what_is_wrong(op: str, changes: dict[str, Any], sizes: dict[str, Any], message: str) -> None:
    refused(OPERATIONS[op].run, small(op, **sizes), changes, message)


@pytest.mark.parametrize("op", OPERATIONS)
def test_errors_of_decoding(op: str) -> None:
    given, names = small(op), OPERATIONS[op].weights
    given |= {name: given[name][:, 0] for name in TOKENS} | {name: given[name][None] for name in names}
    given |= {f"update_{name}": torch.zeros_like(given[name]) for name in names} | {"phase": torch.zeros(1, dtype=torch.int64)}
    update = f"update_{names[0]}"
    for name, wrong in (("phase", torch.zeros(3, dtype=torch.int64)), (update, half(update)), (names[0], half("q"))):
        refused(OPERATIONS[op].decode, given, {name: wrong}, f"{name} has shape")
