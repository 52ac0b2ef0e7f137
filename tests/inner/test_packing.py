"""Masks and documents: planned once for all layers, without waiting for the device in every block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.errors import MetaTTTError
from metattt.inner import packing
from metattt.layer import TTTLayer
from metattt.learners import Linear
from metattt.optimizers import GradientDescent
from metattt.tasks import Reconstruction


class Host(torch.Tensor):
    """A tensor that was fetched from the device. What is computed of it is on the host too, until it is sent back."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if getattr(function, "__name__", "") == "to" and isinstance(result, Tensor):
            return result.as_subclass(Tensor)
        return result


class Reads(TorchDispatchMode):
    """Counts the scalars that are read of tensors on the device: each makes the host wait."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.item) and not isinstance(
            args[0], Host
        ):
            self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Reads, list[int]]]:
    """Counts scalar reads and transfers to the host, as they would be on a GPU."""
    fetched: list[int] = []
    cpu = Tensor.cpu

    def fetch(self: Tensor) -> Tensor:
        if isinstance(self, Host):
            return self
        fetched.append(self.numel())
        return cpu(self).clone().as_subclass(Host)

    monkeypatch.setattr(Tensor, "cpu", fetch)
    monkeypatch.setattr("metattt.sequence_layer.check_finite", lambda x: None)  # of tokens on the CPU only
    with Reads() as reads:
        yield reads, fetched
    monkeypatch.undo()


def flags(batch: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(batch, length, generator=generator) > 0.2
    reset = torch.rand(batch, length, generator=generator) > 0.9
    return mask, reset


def layer() -> TTTLayer:
    torch.manual_seed(0)
    return TTTLayer(
        16,
        2,
        Reconstruction("shared_qk", rope="mini_batch"),
        Linear(),
        GradientDescent(4, token_steps="shared"),
        form="dual",
    )


@pytest.mark.parametrize("kind", ["plain", "padded", "packed", "both"])
def test_no_block_waits_for_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = layer(), torch.randn(2, 64, 16)
    mask, reset = flags(2, 64)
    mask, reset = (mask if kind in ("padded", "both") else None), (reset if kind in ("packed", "both") else None)
    with torch.no_grad(), as_on_a_device(monkeypatch) as (reads, fetched):
        _, state = made(x, mask=mask, reset=reset)
        made(x[:, :9], state)
    assert reads.count == 0
    assert len(fetched) <= 4  # the flags, and where sequences stand, of each call


def test_token_by_token_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = layer(), torch.randn(2, 11, 16)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :3] = False
    with torch.no_grad():
        _, state = made(x[:, :7], mask=mask)  # sequences stand at different places of their mini-batches
        with as_on_a_device(monkeypatch) as (reads, fetched):
            for t in range(7, 11):
                _, state = made(x[:, t : t + 1], state)
    assert reads.count == 0
    assert not fetched


def test_a_model_plans_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = compose(
        "preset=tiny", "layer=ttt_linear", "dim=16", "num_heads=2", "model.num_layers=3", job="language_model"
    )
    model = instantiate_model(cfg)
    planned = []
    make_layout = packing.make_layout
    monkeypatch.setattr(packing, "make_layout", lambda *args: planned.append(1) or make_layout(*args))
    ids = torch.randint(256, (2, 40))
    mask, reset = flags(2, 40)
    with torch.no_grad():
        with as_on_a_device(monkeypatch) as (reads, fetched):
            model.step(ids, None, mask, reset)
        assert reads.count == 0
        assert len(fetched) <= 3
    assert len(planned) == 1


def test_token_steps_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    token_steps = GradientDescent.token_steps
    monkeypatch.setattr(GradientDescent, "token_steps", lambda self: calls.append(1) or token_steps(self))
    made, x = layer(), torch.randn(1, 128, 16)
    calls.clear()
    with torch.no_grad():
        made(x)
    assert len(calls) <= 2


def test_a_reset_on_padding_is_never_dropped() -> None:
    """It belongs to the next token of the call; where none follows, the next call would not know of it."""
    made, x = layer().double(), torch.randn(2, 9, 16, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False, False, True, True, True, True]] * 2)
    reset = torch.zeros_like(mask)
    reset[1, 3] = True
    with torch.no_grad():
        whole, _ = made(x, mask=mask, reset=reset)
        with pytest.raises(MetaTTTError, match="reset marks padding of sequence 1 that no token of this call follows"):
            made(x[:, :5], mask=mask[:, :5], reset=reset[:, :5])
        _, state = made(x[:, :4], mask=mask[:, :4])
        reset[1, 3:5] = torch.tensor([False, True])
        parts, _ = made(x[:, 4:], state, mask=mask[:, 4:], reset=reset[:, 4:])
    assert torch.allclose(parts, whole[:, 4:], rtol=1e-9, atol=1e-12)
