"""Online rules by flash-linear-attention: which of its operations computes which rule, with loops of their equations in
the place of its kernels, which need a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from metattt.composition.compose import build
from metattt.kernels.online_linear import by_fla
from metattt.kernels.online_linear.by_fla import FlaOnlineDot, FlaOnlineLinear, Rule
from metattt.kernels.online_linear.native import NativeOnlineDot, NativeOnlineLinear
from metattt.testing.specimen import compare, distance, run

CPU = torch.device("cpu")
RULES = [
    Rule(*flags)
    for flags in itertools.product([True, False], ["none", "head", "channel"], *[[False, True]] * 3)
    if (flags[0] or not any(flags[2:])) and (flags[1] != "none" or not flags[4])
]


def loop(kind: str, wrong: float = 0.0) -> Any:
    """Their operation by its equation, `S ← e^g S + …` on `[B, T, H, d]`; `wrong`: an error in its output."""

    def call(q: Tensor, k: Tensor, v: Tensor, *, scale: float, initial_state: Tensor, output_final_state: bool, **x: Any) -> Any:
        assert scale == 1.0 and output_final_state and initial_state.dtype == torch.float32
        if (bounds := x.pop("cu_seqlens", None)) is not None:
            assert len(q) == 1 and len(initial_state) == len(bounds) - 1
            lengths, views = bounds.diff().tolist(), {"q": q, "k": k, "v": v, **x}
            parts = zip(*(value.split(lengths, 1) for value in views.values()), initial_state.split(1), strict=True)
            of = [dict(zip([*views, "initial_state"], part, strict=True)) for part in parts]
            found = [call(**one, scale=scale, output_final_state=True) for one in of]
            return torch.cat([y for y, _ in found], 1), torch.cat([s for _, s in found])
        s, outputs = initial_state, []
        given = {name: value.float() for name, value in {"q": q, "k": k, "v": v, **x}.items()}
        for t in range(q.shape[1]):
            at = {name: value[:, t] for name, value in given.items()}
            log_decay = at.get("gk", at.get("g"))
            kept = s if log_decay is None else s * log_decay.reshape(*s.shape[:2], -1, 1).exp()
            new = at["v"].unsqueeze(2)
            if kind == "dplr":
                kept = kept + at["b"].unsqueeze(3) * (at["a"].unsqueeze(2) @ s)
            elif kind == "delta":
                new = at["beta"][..., None, None] * (new - at["k"].unsqueeze(2) @ kept)
            s = kept + at["k"].unsqueeze(3) * new
            outputs.append((at["q"].unsqueeze(2) @ s).squeeze(2))
        return torch.stack(outputs, 1).to(q.dtype) * (1 + wrong), s

    return call


def stand_in(monkeypatch: pytest.MonkeyPatch, wrong: float = 0.0) -> list[str]:
    """Loops in the place of all operations; the names that are asked for."""
    asked: list[str] = []

    def operation(name: str) -> Any:
        asked.append(name)
        return loop("dplr" if "dplr" in name else "dot" if "gla" in name else "delta", wrong)

    monkeypatch.setattr(by_fla, "operation", operation)
    by_fla._disagreement.cache_clear()
    return asked


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_has_an_operation_that_computes_it(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(monkeypatch)
    for packed in (False, True):
        assert by_fla._disagreement(rule, CPU, torch.float32, 6, 5, packed) is None
    general = rule.erase_key or rule.erase_direction or (rule.decay != "none" and not rule.decayed)
    assert ("dplr" in asked[0]) == (rule.erases and general)  # the most general one only where it is needed


def test_one_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, wrong=0.1)
    assert "off from ours on cpu: output 10%" in by_fla._disagreement(RULES[0], CPU, torch.float32, 6, 5)
    stand_in(monkeypatch, wrong=float("nan"))
    assert "output nan%" in by_fla._disagreement(RULES[0], CPU, torch.float32, 6, 5)
    by_fla._disagreement.cache_clear()


def test_a_decay_without_a_logarithm_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    q, eta = torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4)
    views = by_fla.Pairs(k=q, v=q, q=q, p=None, b=None, eta=eta, a=torch.tensor([0.5, 0.0, 1.0, -0.5]).expand(1, 1, 4))
    y = by_fla.run_rule(Rule(False, "head", False, False, False), torch.float32, views, torch.ones(1, 1, 2, 2))[0]
    assert y[0, 0, :, 0].nan_to_num(-1).tolist() == pytest.approx([3, 2, 4, -1])  # not read as 1e-30: it is negative


@pytest.mark.parametrize("name", ["delta_net", "gated_delta_net", "kda", "gla", "rwkv7", "gated_delta_product"])
def test_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole layers in 16 bits, split, with gradients, and differentiated twice."""
    asked = stand_in(monkeypatch)
    for kernel, native in ((FlaOnlineLinear, NativeOnlineLinear), (FlaOnlineDot, NativeOnlineDot)):
        monkeypatch.setattr(kernel, "device", "cpu")
        monkeypatch.setattr(native, "device", "none")  # it takes views of 16 bits, too
    words = f"layer={name}", "dim=32", "num_heads=2"
    torch.manual_seed(0)
    layer = build(*words).bfloat16()
    x = torch.randn(2, 50, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = torch.rand(2, 50, generator=torch.Generator().manual_seed(1)) < 0.1
    found = [run(layer, x, [20], grads=True, reset=reset) for reset in (None, packed)]
    assert asked and not any(said[0] == "dual" for said in layer.plan.said), layer.plan.said
    layer.plan.kernels = []
    for one, reset in zip(found, (None, packed), strict=True):
        assert compare(one, run(layer, x, [20], grads=True, reset=reset)) < 0.05
    layer = build(*words).bfloat16()
    x = x.requires_grad_()
    loss = layer(x, reset=packed)[0].sum()
    first, once = (torch.autograd.grad(loss, x, retain_graph=True, create_graph=again)[0] for again in (True, False))
    assert distance(first, once) < 0.05  # erase views and gates may come from each other
    assert torch.autograd.grad(first.float().square().sum(), x)[0].isfinite().all()
    by_fla._disagreement.cache_clear()
