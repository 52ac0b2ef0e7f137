"""Backpropagation that reaches back over the last k chunks: against a plain loop, in memory, and in training runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_for_tests import small_model
from processes_for_tests import two_processes
from runs_for_tests import TINY, column
from saved import SavedBytes
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from metattt.cli import main
from metattt.data.windows import NO_TOKEN
from metattt.models.language_model import LanguageModel
from metattt.training.recipes import AdamW
from metattt.training.text_module import LanguageModeling
from metattt.training.truncated import truncated_loss

BOUND = 1e-9  # relative, float64
VOCABULARY, LENGTH, CHUNK = 11, 22, 5  # five chunks, the last one shorter

LAYERS = {
    "ttt_linear": ["layer=ttt_linear", "optimizer.mini_batch_size=4"],  # chunks and mini-batches end at different tokens
    "ttt_mlp by groups": ["layer=ttt_mlp", "optimizer.mini_batch_size=4", "layer.group_size=1"],
    "titans": ["layer=titans", "optimizer.mini_batch_size=4"],
    "delta": ["layer=gated_delta_net"],
    "attention": ["layer=attention"],
    "mixed blocks": ["layer=ttt_linear", "model.checkpoint_blocks=true"],
}


def tiny(*overrides: str) -> LanguageModel:
    sizes = (f"model.vocab_size={VOCABULARY}", "dim=8", "num_heads=2", "model.num_layers=2", "layer.group_size=0")
    return small_model(*sizes, *overrides, noise=0.2).train()


def windows(length: int = LENGTH) -> Tensor:
    ids = torch.randint(VOCABULARY, (2, length + 1), generator=torch.Generator().manual_seed(1))
    ids[1, -3:] = NO_TOKEN
    return ids


def module(model: LanguageModel, truncate: int | None = None, start: int | None = None, chunk: int | None = CHUNK) -> LanguageModeling:
    return LanguageModeling(model, AdamW(chunk=chunk, truncate=truncate), torch.ones(VOCABULARY), {}, start)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    largest = max(g.abs().max().item() for g in expected.values())
    gaps = ((found[n] - g).abs().max().item() / max(g.abs().max().item(), 1e-6 * largest) for n, g in expected.items())
    return max(gaps)


def plain(model: LanguageModel, ids: Tensor, last: int, start: int | None = None) -> dict[str, Tensor]:
    """For every chunk: its last k chunks once more from a constant state, and the gradient of its own loss."""
    read, labels = ids[:, :-1].clamp(min=0), ids[:, 1:]
    reset = None if start is None else read == start
    cuts = [slice(i, min(i + CHUNK, read.shape[1])) for i in range(0, read.shape[1], CHUNK)]
    total: dict[str, Tensor] = {}
    for j in range(len(cuts)):
        state = None
        for i in range(j + 1):
            if i == j - last + 1 and state is not None:
                state = state.detach()
            fresh = None if reset is None else reset[:, cuts[i]]
            nats, state = model.cross_entropy(read[:, cuts[i]], labels[:, cuts[i]], state, fresh, ignore_index=NO_TOKEN)
        found = gradients(model, nats / (labels != NO_TOKEN).sum())
        total = {n: g + total.get(n, 0) for n, g in found.items()}
    return total


@pytest.mark.parametrize(("layer", "last", "start"), [
    *((layer, last, None) for layer in LAYERS for last in (1, 3)), ("ttt_linear", 2, None), ("ttt_linear", 9, None),
    *(("ttt_linear", last, 3) for last in (1, 2)),  # documents that begin inside a window
])  # fmt: skip
def test_the_gradient_is_that_of_a_plain_loop(layer: str, last: int, start: int | None) -> None:
    model, ids = tiny(*LAYERS[layer]), windows()
    loss = module(model, last, start).batch_loss(ids)
    torch.testing.assert_close(loss, module(model, None, start, LENGTH).batch_loss(ids))
    assert worst(gradients(model, loss), plain(model, ids, last, start)) < BOUND


@pytest.mark.parametrize("truncate", [None, 5, 7])
@pytest.mark.parametrize("layer", LAYERS)
def test_all_chunks_are_full_backpropagation(layer: str, truncate: int | None) -> None:
    model, ids = tiny(*LAYERS[layer]), windows()
    whole = module(model, chunk=None)
    found = gradients(model, module(model, truncate).batch_loss(ids))
    assert worst(found, gradients(model, whole.batch_loss(ids))) < BOUND


def test_parameters_without_a_gradient_get_none() -> None:
    weight, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def read(piece: Tensor, state: Any) -> tuple[Tensor, Any]:
        after = weight * piece if state is None else state["s"] + weight * piece
        return after.sum() ** 2, {"s": after, "n": torch.ones((), dtype=torch.long)}

    truncated_loss(read, list(torch.arange(3.0)), [weight, idle], 2).backward()
    assert weight.grad is not None and idle.grad is None
    with torch.no_grad():
        assert not truncated_loss(read, list(torch.arange(3.0)), [weight, idle], 2).requires_grad


def peak(length: int, truncate: int | None, chunk: int | None = 16) -> int:
    model = tiny("layer=ttt_linear").float()
    with SavedBytes() as saved:
        module(model, truncate, chunk=chunk).batch_loss(windows(length)).backward()
    return saved.peak


def test_memory_does_not_grow_with_the_window() -> None:
    for truncate in (1, 2):
        ids = 8 * windows(512)[:, 128:-1].numel()  # what is read is itself kept: 8 bytes a token
        assert peak(512, truncate) <= peak(128, truncate) + ids
    all_chunks = peak(512, None)
    assert all_chunks > 3.8 * peak(128, None)
    assert peak(512, None, None) > 1.9 * peak(256, None, None)
    assert peak(512, 1) < 0.1 * all_chunks


# -- training ----------------------------------------------------------------------------------------------------------

SHORT = (*TINY, "layer=ttt_linear", "trainer.max_steps=4")


def trained(corpus: Path, run: Path, *overrides: str) -> dict[int, float]:
    assert main(["train", *SHORT, f"data.path={corpus}", f"output_dir={run}", *overrides]) == 0
    return column(run, "train/loss")


def test_runs(corpus: Path, tmp_path: Path) -> None:
    whole = trained(corpus, tmp_path / "whole")
    chunks = trained(corpus, tmp_path / "chunks", "training.chunk=5")
    assert chunks == pytest.approx(whole, rel=1e-5)  # the exact gradient, clipped and logged as ever
    truncated = trained(corpus, tmp_path / "truncated", "training.chunk=4", "training.truncate=2")
    assert truncated[1] == pytest.approx(whole[1], rel=1e-6)
    assert truncated != pytest.approx(whole, rel=1e-7)
    half = ("data.batch_size=1", "trainer.accumulate_grad_batches=2")
    accumulated = trained(corpus, tmp_path / "half", "training.chunk=4", "training.truncate=2", *half)
    assert accumulated == pytest.approx(truncated, rel=1e-5)
    again = ("training.chunk=4", "training.truncate=2", "trainer.precision=bf16-mixed")
    assert trained(corpus, tmp_path / "bf16", *again) == pytest.approx(truncated, rel=1e-3)  # without any step 2e-2


def test_two_processes(corpus: Path, tmp_path: Path) -> None:
    options = ("training.chunk=4", "training.truncate=2")
    one = trained(corpus, tmp_path / "one", *options)
    given = (*SHORT, f"data.path={corpus}", f"output_dir={tmp_path / 'two'}", *options)
    codes, output = two_processes(tmp_path, *given, "trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu")
    assert codes == [0, 0], output
    assert column(tmp_path / "two", "train/loss") == pytest.approx(one, rel=1e-4)


def test_a_compiled_model_takes_one_chunk(corpus: Path, tmp_path: Path, told: Callable[..., str]) -> None:
    options = ("training.chunk=4", "compile=true", "training.truncate=2")
    said = "compile=true, whose graphs run backwards once: set training.truncate=1"
    assert said in told("train", *SHORT, f"data.path={corpus}", f"output_dir={tmp_path / 'run'}", *options).replace("\n", " ")


@pytest.mark.parametrize("layer", ["layer=lact", "layer=ttt_linear optimizer.token_steps=none"])
def test_a_mini_batch_of_a_whole_call_has_no_chunks(layer: str, corpus: Path, tmp_path: Path, told: Callable[..., str]) -> None:
    """Chunks would train another model than validation reads."""
    given = (*layer.split(), "optimizer.mini_batch_size=null", "training.chunk=4", f"data.path={corpus}")
    assert "so it needs training.chunk=null" in told("train", *SHORT, *given, f"output_dir={tmp_path / 'run'}").replace("\n", " ")


def test_an_average_of_weights_leaves_the_bytes_of_tokens() -> None:
    """torch's average of a whole number is rounded down, and Lightning's callbacks average buffers, too."""
    own = module(tiny("layer=attention"))
    own.token_bytes = torch.arange(VOCABULARY)
    average = AveragedModel(own, use_buffers=True, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        average.update_parameters(own)
    assert average.module.sums(windows())[2] == own.sums(windows())[2]
