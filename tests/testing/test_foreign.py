"""The laws of any layer: planted faults break the law that they are about and no other, and sound layers break none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import metattt
from metattt.cli import main
from metattt.testing.foreign import LAWS, Subject, examine

DIM = 8


class Decay(nn.Module):
    """`S_t = a S_{t−1} + W x_t`, `y_t = V S_t`: with mask and reset. `fault` names what is wrong."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.w, self.v = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.a = nn.Parameter(torch.tensor(0.7))
        self.calls = 0
        if fault == "zero":
            nn.init.zeros_(self.v.weight)
        if fault == "factor":
            self.w.weight.register_hook(lambda gradient: 1.00005 * gradient)

    def forward(
        self, x: Tensor, state: Tensor | None = None, mask: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        s = x.new_zeros(len(x), DIM) if state is None else state
        if self.fault == "state" and state is not None:
            state.mul_(0.5)
        if self.fault == "tokens" and mask is not None:
            x.masked_fill_(~mask.unsqueeze(-1), 0)
        if self.fault == "split" and x.shape[1] > 1:
            s = torch.zeros_like(s)
        if self.fault == "odd" and x.shape[1] % 2:
            mask = None
        if self.fault == "even" and x.shape[1] % 2 == 0:
            reset = None
        if self.fault == "stopped" and mask is not None:
            x = x.detach()
        read = self.w(x)
        if self.fault == "future":
            read = read + 1e-3 * x.mean(1, keepdim=True)
        if self.fault == "zero":
            read = read + x.roll(-1, 1)
        if self.fault == "counts" and mask is not None:
            mask = mask & (mask.cumsum(1) <= mask.sum(1).min())
        if self.fault == "normed":
            read, mask = nn.functional.layer_norm(x, (DIM,)), None
        if self.fault == "whole" and x.shape[1] % 16 == 0:
            read = read + 1e-3 * x.roll(-1, 1)
        if self.fault == "batch":
            read = read + 1e-3 * x.mean(0)
        if self.fault == "training" and self.training:
            read = 1.001 * read
        if self.fault == "rows" and mask is not None:
            mask = mask[:1].expand_as(mask)
        if (self.fault == "pieces" and state is not None) or (self.fault == "both" and mask is not None):
            reset = None
        a = self.a.detach() if self.fault == "gradient" else 1 if self.fault == "normed" else self.a
        outputs = []
        for t in range(x.shape[1]):
            keep = x.new_ones(len(x), 1) if mask is None else mask[:, t, None].to(x.dtype)
            if reset is not None and self.fault != "reset":
                s = torch.where(reset[:, t, None], 0, s)
            after = a * (s.detach() if self.fault == "chunk" and t == 16 else s) + read[:, t]
            if self.fault == "narrow":
                after = after.bfloat16().to(after.dtype)
            decayed = a * s if self.fault == "pad decays" else s
            s = torch.where(keep > 0, after, decayed)
            outputs.append(self.v(s))
        self.kept = s.sum()  # as a loss of the layer's own would be
        y, self.calls = torch.stack(outputs, dim=1), self.calls + 1
        if self.fault == "dropout":  # is none
            y = nn.functional.dropout(y, 0.1, self.training)
        if self.fault == "first" and self.calls == 1:
            y = 2 * y
        if self.fault == "kept" and reset is not None and x.shape[1] >= 16:
            s = self(x, state, mask)[1]
        return (y.double() if self.fault == "type" else y), None if self.fault == "silent" else s  # type: ignore[return-value]


class Stateless(Decay):
    def forward(self, x: Tensor, mask: Tensor | None = None, reset: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, None, mask, reset)[0]


class Rounding(Decay):
    """Computes in float32 inside, in another order where all tokens are there at once."""

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y, state = super().forward(x, state)
        y = nn.functional.layer_norm(y.float(), (DIM,)).to(x.dtype)
        return (y if x.shape[1] < 9 else (3 * y.float() / 3).to(x.dtype)), state


FUTURE, SPLITS, PACKED = "no later token is seen", "splits agree", "packed = separate"
PADDING, DERIVATIVES = "padding changes nothing", "gradients = finite differences"
FAULTS = {  # the law that each is about, and those that may break with it
    "state": ("later calls do not change a state", SPLITS, PACKED, PADDING),
    "tokens": ("what a call is given stays as it is",),
    **dict.fromkeys(("split", "silent"), (SPLITS, PACKED, PADDING)),
    "future": (FUTURE, SPLITS, PACKED, PADDING),
    "whole": (FUTURE, SPLITS, PACKED, PADDING),
    "batch": ("alone = in a batch", PACKED, PADDING),
    "training": ("the same call gives the same",),
    "gradient": (DERIVATIVES, SPLITS),
    "factor": (DERIVATIVES,),
    "chunk": (DERIVATIVES, SPLITS, PACKED, PADDING),
    "first": ("the same call gives the same",),
    "zero": (FUTURE, SPLITS, PACKED, PADDING),
    **dict.fromkeys(("reset", "pieces", "both", "even", "kept"), (PACKED,)),
    **dict.fromkeys(("rows", "pad decays", "odd", "normed", "counts"), (PADDING, PACKED)),
    "stopped": (PADDING,),
    **dict.fromkeys(("type", "narrow"), ("float32 = float64", DERIVATIVES)),
}

KINDS = {"split": "two calls; gradients, two calls; several", "silent": "no state came back", "stopped": "gradients; expected",
         "pad decays": "after (later outputs); two calls; gradients; between; "}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_breaks_its_law(fault: str) -> None:
    # (pieces of several lengths would show these)
    kind = Stateless if fault in ("odd", "even", "zero", "counts") else Decay
    broken = {title: found.note for title, found in examine(Subject(partial(kind, fault), DIM, 16)) if found.failed}
    assert FAULTS[fault][0] in broken and broken.keys() <= set(FAULTS[fault]) and all(broken.values())
    assert broken[FAULTS[fault][0]].startswith(KINDS.get(fault, ""))


@pytest.mark.parametrize(
    "make", [Decay, partial(metattt.build, "ttt_mlp", dim=DIM, num_heads=2)], ids=["plain", "ttt_mlp"]
)
def test_sound_layers_break_no_law(make: type[nn.Module]) -> None:
    results = dict(examine(Subject(make, DIM, period=16)))
    assert results.keys() == LAWS.keys()
    assert not [title for title, found in results.items() if found.failed or found.error is None]


def test_dropout_is_no_fault() -> None:
    assert not [title for title, found in examine(Subject(partial(Decay, "dropout"), DIM)) if found.failed]


@pytest.mark.parametrize("lost", [lambda x: x[:, 1:], lambda x: x.mean(1)])
def test_a_layer_without_an_output_for_every_token_passes_nothing(lost: Callable[[Tensor], Tensor]) -> None:
    class Lossy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return lost(super().forward(x))

    ((title, found),) = examine(Subject(partial(Lossy, DIM, DIM), DIM))
    assert title == "it reads tokens" and found.failed and "one for each token" in found.note


def test_rounding_inside_is_no_fault_and_hides_none() -> None:
    results = dict(examine(Subject(Rounding, DIM)))
    assert not [title for title, found in results.items() if found.failed] and "rounding" in results[DERIVATIVES].note
    assert [title for title, found in examine(Subject(partial(Rounding, "split"), DIM)) if found.failed] == [SPLITS]


@pytest.mark.parametrize("share", [1, 1e-3])  # the rounding of a small share is not seen in the outputs
def test_a_parameter_that_is_read_in_float32_is_no_fault(share: float) -> None:
    class Scaled(Decay):
        def __init__(self, fault: str = "") -> None:
            super().__init__(fault)
            self.scale = nn.Parameter(torch.full((DIM,), 2.3456))

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0] + share * x * self.scale.float()

    found = dict(examine(Subject(Scaled, DIM)))[DERIVATIVES]
    assert not found.failed and "rounding" in found.note
    assert dict(examine(Subject(partial(Scaled, "gradient"), DIM)))[DERIVATIVES].failed  # of another parameter


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cells.py").write_text(
        "import torch\nclass Plain(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.cell = torch.nn.GRU(8, 8, batch_first=True)\n"
        "    def forward(self, x, state=None):\n        return self.cell(x, state)\n"
        "class Both(Plain):\n    def forward(self, x):\n        return self.cell(x)[0] + x.flip(1)\n"
        "class Breaks(Plain):\n    def forward(self, x):\n        raise KeyError\n"
        "class NaN(Plain):\n    def forward(self, x):\n        w = self.cell.bias_hh_l0\n"
        "        return x + (w - w.detach()).sum().sqrt()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["check", "module=cells:Plain", "dim=8"]) == 0
    assert "no parameter" in capsys.readouterr().out
    for name in ("Both", "Breaks", "NaN"):  # the last one in its gradients
        with pytest.raises(SystemExit, match="1"):
            main(["check", f"module=cells:{name}", "dim=8"])
        told = capsys.readouterr().out
        assert "FAIL" in told and "set dim=" not in told and ("cells.py, line 13)" in told) == (name == "Breaks")
    with pytest.raises(SystemExit, match="1"):
        main(["check", "module=cells:Plain", "dim=16"])
    told = capsys.readouterr().out
    assert told.startswith("cells:Plain,") and told.count("FAIL") == 1 and "dim=" in told.rpartition("FAIL")[2]  # not a row for each law
    assert main(["check", "module=cells:Plain", "dim=8", "period=1"]) == 0  # no piece of its sequences is empty
    assert main(["check", "module=cells:Plain", "dim=8", "period=0"]) == 2
    assert "period=0" in capsys.readouterr().err
    assert main(["check", "module=cells:Absent", "dim=8"]) == 2
    assert "module=package.file:name" in capsys.readouterr().err
