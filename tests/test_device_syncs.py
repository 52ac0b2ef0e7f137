"""A training step and a decode step read nothing back from the device: nothing on the way of a token waits for it.

Where there is no card, tensors of the device `meta` stand for those of one: they have no values that anything could read,
and no read goes unseen. On a card, torch itself raises where the host waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.generation.sampling import draw
from metattt.generation.static_step import static_state, step_in_place
from metattt.kernels.ttt_linear.on_gpu import TTTLinearOnGPU
from metattt.kernels.ttt_mlp.on_gpu import TTTMLPOnGPU
from metattt.layer import TTTLayer
from metattt.models.language_model import LanguageModel
from metattt.training.recipes import AdamW
from metattt.training.step_statistics import StepStatistics
from metattt.training.text_module import LanguageModeling

SIZES = ("dim=64", "num_heads=2", "model.num_layers=2", "model.vocab_size=40")
LAYERS = ("ttt_linear", "gated_delta_net", "mamba2", "titans")
KERNELS: dict[str, type[Any]] = {"ttt_linear": TTTLinearOnGPU, "ttt_mlp": TTTMLPOnGPU}
READS = {
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::nonzero_numpy",
    "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
    "aten::multinomial", "aten::allclose",
}  # fmt: skip
START = 7  # the token that begins a document

cuda = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no card"))
devices = pytest.mark.parametrize("device", ["meta", cuda])


class ReadBack(AssertionError):
    """An operation for which the host would wait. (No `RuntimeError`: layers look for the cause of those.)"""


class NothingReadBack(TorchDispatchMode):
    """Raises at an operation that brings a value of the device `meta` to the host, or whose result has a shape that
    depends on values there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_meta]
        name = func._schema.name
        if there and name in READS:
            raise ReadBack(name)
        masks = args[1] if there and name in ("aten::index", "aten::index_put", "aten::index_put_") else ()
        if any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in masks):
            raise ReadBack(f"{name} by a mask")
        if there and name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            raise ReadBack(name)
        to = kwargs.get("device")
        if there and name == "aten::_to_copy" and to is not None and to.type == "cpu" and not kwargs.get("non_blocking"):
            raise ReadBack("a copy to the host")
        if name == "aten::copy_" and not args[0].is_meta and args[1].is_meta:
            raise ReadBack("a copy to the host")
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def _no_autocast_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device `meta` has none that could be asked for."""
    for name, otherwise in (("autocast", contextlib.nullcontext()), ("is_autocast_enabled", False)):
        real = getattr(torch, name)

        def asked(device: str, *args: Any, real: Any = real, otherwise: Any = otherwise, **kwargs: Any) -> Any:
            return otherwise if device == "meta" else real(device, *args, **kwargs)

        monkeypatch.setattr(torch, name, asked)


@contextlib.contextmanager
def nothing_read_back(device: str) -> Iterator[None]:
    if device == "meta":
        with NothingReadBack():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def model_on(device: str, layer: str, form: str = "auto") -> LanguageModel:
    given = [f"layer={layer}", "model=mamba_backbone", *SIZES]
    if form == "fused":
        given.append("optimizer.mini_batch_size=16")
    model: LanguageModel = instantiate_model(compose(*given, job="language_model")).to(device)
    for module in model.modules():
        if form == "fused" and device == "meta" and isinstance(module, TTTLayer):
            kernel = KERNELS[layer]()
            kernel.device = "meta"
            module.plan.kernels, module.plan.strict = [kernel], False
    return model


CASES = [*((layer, "auto") for layer in LAYERS), ("ttt_linear", "fused"), ("ttt_mlp", "fused")]


TRAINED = [(*case, number % 2 == 0 or case[1] == "fused") for number, case in enumerate(CASES)]


@pytest.mark.parametrize(("layer", "form", "documents"), [*TRAINED, ("ttt_linear", "auto", False)])
@devices
def test_a_training_step(device: str, layer: str, form: str, documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches with padding, and with several documents in a window: loss, statistics, clipping and the optimizer's step."""
    model = model_on(device, layer, form)
    module = LanguageModeling(model, AdamW(), torch.ones(40), {}, START if documents else None).to(device)
    strategy = SimpleNamespace(reduce=lambda x, reduce_op: x)
    trainer: Any = SimpleNamespace(accumulate_grad_batches=1, strategy=strategy, global_step=3)
    logged: dict[str, Tensor] = {}
    monkeypatch.setattr(LanguageModeling, "trainer", trainer)
    monkeypatch.setattr(LanguageModeling, "log", lambda self, name, value, **_: logged.update({name: value}))
    optimizer = AdamW().optimizer(model)
    ids = torch.randint(8, 40, (2, 50), generator=torch.Generator().manual_seed(0))
    ids[0, 0] = ids[0, 19] = ids[1, 33] = START
    ids[1, 41:] = -1  # nothing is predicted from here on
    for _ in range(1 if device == "meta" else 3):  # on a card the first ones compile
        batch = module.transfer_batch_to_device(ids, torch.device(device), 0)
        with nothing_read_back(device):
            loss = module.training_step(batch, 0)
            loss.backward()
            module.on_before_optimizer_step(optimizer)
            StepStatistics().on_before_optimizer_step(trainer, module, optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if documents and device == "meta":  # of a batch that only the device has, where documents start must be read there
        with pytest.raises(ReadBack), nothing_read_back(device):
            module.training_step(batch.clone(), 0)
    assert {"train/loss", "lr", "step", "gradient_norm"} <= logged.keys()
    assert all(isinstance(value, Tensor) for value in logged.values())  # Lightning would send numbers to the device, and wait
    assert logged["lr"].device.type == logged["step"].device.type == "cpu"
    assert loss.device.type == logged["train/loss"].device.type == device


@pytest.mark.parametrize("layer", ["ttt_linear", "titans"])
@devices
def test_padding_that_the_host_knows(device: str, layer: str) -> None:
    """A mask and documents whose flags stay on the host: one layout for all layers, made there."""
    model = model_on(device, layer)
    ids = torch.randint(8, 40, (2, 37), device=device)
    mask, reset = torch.ones(2, 37, dtype=torch.bool), torch.zeros(2, 37, dtype=torch.bool)
    mask[0, :5] = False
    reset[1, 20] = True
    with nothing_read_back(device):
        logits = model(ids, mask, reset)
    assert logits.shape == (2, 37, 40)


@pytest.mark.parametrize(("layer", "form"), CASES)
@devices
def test_a_decode_step(device: str, layer: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a static state, as a CUDA graph holds it, and the draw of the next token."""
    launched: list[Any] = []
    if device == "meta":  # there is nothing to run on, and what is around the kernel is what is looked at
        for kernel in KERNELS.values():
            monkeypatch.setattr(kernel, "launch", lambda self, *given: launched.append(given[8]))
    model = model_on(device, layer, form).eval()
    ids = torch.randint(8, 40, (3, 21), device=device)
    with torch.inference_mode():
        _, state = model.step(ids, last_only=True)
        launched.clear()
        with nothing_read_back(device):
            static, token = static_state(model, state)
            for settings in ({}, {"temperature": 0}, {"top_k": 5, "top_p": 0.9}):
                logits = step_in_place(model, token, static)
                token, finite = draw(logits, **settings)
    assert logits.shape == (3, 40) and token.shape == (3,) and finite.shape == ()
    if form == "fused" and device == "meta":
        assert len(launched) == 4 * 2 and all(isinstance(phase, Tensor) for phase in launched)
