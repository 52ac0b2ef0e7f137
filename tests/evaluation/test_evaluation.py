"""Evaluation: loss by position, several checkpoints on one plot, and the losses of the inner loops, in files and in the
log."""

import math
import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import Document
from refusals_for_tests import refusal
from runs_for_tests import rows, write_corpus
from torch import Tensor

from metattt.checkpoints.files import find_checkpoint
from metattt.cli import main
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.evaluation.by_position import Scores, bin_edges, score
from metattt.evaluation.evaluate import evaluate, labels
from metattt.evaluation.output import Report
from metattt.measures.inner_loss import average, inner_loss_curves, unmeasured
from metattt.models.language_model import LanguageModel
from metattt.training.train import train

TINY = ("dim=16", "num_heads=2", "model.num_layers=2", "model.vocab_size=31", "data.context_length=32", "optimizer.mini_batch_size=8")
RUN = ("dim=16", "num_heads=2", "model.num_layers=1", "data.context_length=24", "data.batch_size=4", "trainer.accelerator=cpu",
       "optimizer.mini_batch_size=8", "trainer.max_steps=4", "trainer.val_check_interval=1", "trainer.log_every_n_steps=1")  # fmt: skip


def tiny(*overrides: str) -> LanguageModel:
    """A model in float64 whose inner loops do enough to be seen."""
    torch.manual_seed(1)
    basis = [override for override in TINY if "layer=attention" not in overrides or "optimizer" not in override]
    model = instantiate_model(compose(*basis, *overrides)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "token_step" not in name:  # a negative step is no step
                parameter += (0.5 if "init" in name or "norm" in name else 0.2) * torch.randn_like(parameter)
    return model


# -- loss by position --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment", [1, 8, 100])
@pytest.mark.parametrize("document_start", [None, 3])
def test_loss_by_position_is_that_of_one_call(segment: int, document_start: int | None) -> None:
    model = tiny()
    batches = [torch.randint(31, (3, 21)), torch.randint(31, (2, 21))]
    sizes = torch.arange(31)
    found = score(model, batches, sizes, segment, document_start)  # type: ignore[arg-type]
    ids = torch.cat(batches)
    with torch.no_grad():
        reset = None if document_start is None else ids[:, :-1] == document_start
        chance = model(ids[:, :-1], reset=reset).log_softmax(-1)
    expected = -chance.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1).sum(0)
    np.testing.assert_allclose(found.nats, expected.numpy(), rtol=1e-6)  # logits are scored in float32
    np.testing.assert_array_equal(found.bytes, ids[:, 1:].sum(0).numpy())
    assert found.count.tolist() == [5] * 20 and found.tokens == 100
    assert math.isclose(found.loss, expected.sum().item() / 100, rel_tol=1e-6)
    assert math.isclose(found.bits_per_byte, expected.sum().item() / math.log(2) / int(ids[:, 1:].sum()), rel_tol=1e-6)


def test_no_call_reads_more_than_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    monkeypatch.setattr(model, "features", seen := Mock(wraps=model.features))
    score(model, [torch.randint(31, (1, 513))], torch.ones(31, dtype=torch.long), 64)  # type: ignore[arg-type]
    assert [call.args[0].shape[1] for call in seen.call_args_list] == [64] * 8


def test_a_mini_batch_that_is_a_call_is_not_cut_into_segments() -> None:
    model = tiny("optimizer.mini_batch_size=null", "optimizer.token_steps=none")
    ids, sizes = torch.randint(31, (2, 21)), torch.ones(31, dtype=torch.long)
    whole, cut = (score(model, [ids], sizes, segment).nats for segment in (20, 8))  # type: ignore[arg-type]
    np.testing.assert_array_equal(cut, whole)


@pytest.mark.parametrize("kind", ["log", "fixed", "none"])
@pytest.mark.parametrize(("length", "count"), [(1, 1), (7, 5), (256, 16), (7, 400), (32768, 16)])
def test_bins_divide_the_positions(kind: str, length: int, count: int) -> None:
    edges = bin_edges(length, kind, count)
    widths = np.diff(edges)
    assert edges[0] == 0 and edges[-1] == length and (widths > 0).all()
    assert len(widths) == length if kind == "none" else len(widths) <= count
    if kind == "fixed":
        assert widths.max() - widths.min() <= 1
    if kind == "log" and count < length:
        assert widths[-1] == widths.max()


def test_bins_average_over_tokens() -> None:
    scores = Scores(np.array([8.0, 4.0, 2.0, 1.0, 1.0]), np.array([2, 2, 0, 2, 2]), np.full(5, 2))
    edges = bin_edges(5, "fixed", 2)
    losses = [scores.between(start, stop).loss for start, stop in pairwise(edges)]
    assert edges == [0, 2, 5] and losses == [12 / 4, 4 / 6]
    assert sum(scores.between(start, stop).tokens for start, stop in pairwise(edges)) == scores.tokens
    assert math.isnan(scores.between(2, 3).bits_per_byte)
    refusal(lambda: bin_edges(5, "lin", 2), "bins=lin", "log, fixed, none")
    refusal(lambda: bin_edges(5, "log", 0), "num_bins=0")


# -- inner loss --------------------------------------------------------------------------------------------------------


def plain_curves(layer: Any, x: Tensor, size: int) -> dict[str, Tensor]:
    """The statistics of a layer by the oracle, token after token: means over sequences and heads, by mini-batch."""
    found = []
    for sequence, row in enumerate(x):
        document = Document(layer, dict(layer.named_parameters()), row, [], sequence)
        pairs, memory = [one for (one,) in document.tokens.pairs], document.begin()
        mean = torch.stack([one.v - one.k for one in pairs]).mean(0)
        for start in range(0, len(row), size):
            before, last = memory.commit, pairs[start + size - 1]
            for t in range(start, start + size):
                memory = document.token(memory, t, start)
            memory = document.commit(memory)
            predicted = [document.predict(w, last.k.unsqueeze(1))[:, 0] for w in (document.w0, before, memory.commit)]
            errors = torch.stack([*(y - last.v for y in predicted), last.v - last.k - mean])
            found.append(errors.square().mean((1, 2)).detach())
    by_mini_batch = torch.stack(found).unflatten(0, (len(x), -1)).mean(0)
    return dict(zip(("init", "step_0", "step_1", "target_variance"), by_mini_batch.T, strict=True))


@pytest.mark.parametrize("layer", ["ttt_linear", "ttt_mlp"])
def test_curves_equal_a_plain_loop(layer: str) -> None:
    model = tiny(f"layer={layer}", "model=transformer_backbone")
    with torch.no_grad():
        for block in model.blocks:
            block.layer.optimizer.token_step_offset.add_(0.5)  # type: ignore[union-attr]
    ids = torch.randint(31, (3, 24))
    curves, x = inner_loss_curves(model, ids), F.embedding(ids, model.embedding.weight)
    assert list(curves) == [0, 1]
    for found, block in zip(curves.values(), model.blocks, strict=True):
        read = block.layer_norm(x)  # type: ignore[operator]
        assert found["position"].tolist() == [8, 16, 24]
        for name, wanted in plain_curves(block.layer, read, 8).items():
            torch.testing.assert_close(found[name], wanted, rtol=1e-9, atol=1e-12)
        assert found["init"][0] == found["step_0"][0] and not torch.isclose(found["step_0"], found["step_1"]).any()
        x = x + block.layer(read)[0]
        x = x + block.ffn(block.ffn_norm(x))  # type: ignore[operator]


@pytest.mark.parametrize("layer", ["ttt_mlp", "gated_delta_net", "titans", "nested_transformer"])
def test_curves_of_every_layer_in_one_call_or_in_segments(layer: str) -> None:
    model = tiny(f"layer={layer}", *["optimizer.mini_batch_size=1"] * ("delta" in layer))
    ids = torch.randint(31, (2, 27))
    size: int = model.blocks[0].layer.optimizer.mini_batch_size  # type: ignore[union-attr, assignment]
    whole, cut = inner_loss_curves(model, ids), inner_loss_curves(model, ids, 10)
    for index, curves in whole.items():
        assert curves["position"].tolist() == list(range(size, 28, size))
        for name, values in curves.items():
            assert values.isfinite().all()
            torch.testing.assert_close(cut[index][name], values, rtol=1e-9, atol=1e-12)
        assert curves["init"][0] == curves["step_0"][0]
        assert not torch.isclose(curves["init"][1:], curves["step_0"][1:]).all()
        assert not torch.isclose(curves["step_0"], curves["step_1"]).all()
    assert list(whole) == [0, 1]


def test_curves_of_a_model_whose_blocks_are_compiled() -> None:
    """As after a run with compile=true: the compiled code was traced without the hooks that look."""
    model, ids = tiny(), torch.randint(31, (2, 24))
    expected = inner_loss_curves(model, ids)
    for block in model.blocks:
        block.compile(backend="eager")
    with torch.no_grad():
        model(ids)
    torch.testing.assert_close(inner_loss_curves(model, ids), expected)


def test_layers_without_curves_say_why() -> None:
    model = tiny("layer=attention")
    assert unmeasured(model) == dict.fromkeys((0, 1), "KernelEstimator keeps its data and has no weights to train")
    ids = torch.zeros(1, 5, dtype=torch.long)
    refusal(lambda: inner_loss_curves(model, ids), "no layer has inner-loss curves: KernelEstimator")
    refusal(lambda: inner_loss_curves(tiny(), ids), "5 tokens are less than one mini-batch of 8", "data.context_length")


def test_average_is_over_windows() -> None:
    model = tiny()
    ids = torch.randint(31, (5, 25))
    found = average(model, [ids[:3], ids[3:]], 4, 2048)  # type: ignore[arg-type]
    expected = inner_loss_curves(model, ids[:4, :-1])
    for index, curves in expected.items():
        for name, values in curves.items():
            torch.testing.assert_close(found[index][name], values.double(), rtol=1e-9, atol=0)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small runs on the same text, and one with another split."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("evaluation")
    write_corpus(folder / "text")
    for name, *rest in (("linear",), ("attention", "layer=attention"), ("other", "seed=1")):
        wanted = [override for override in RUN if name != "attention" or "optimizer" not in override]
        assert train(compose(*wanted, *rest, f"data.path={folder / 'text'}", f"output_dir={folder / name}")) == 0
    return folder


def test_no_file_of_another_evaluation_is_written_over(tmp_path: Path) -> None:
    for name, number in (("by_position", ""), ("images", "-2"), ("images", "-3"), ("by_position", "-4")):
        made = Report(tmp_path, name, "inner_loss")
        made.csv("inner_loss", ("model",), [[name]])
        assert made.number == number
    (tmp_path / "tasks.png").symlink_to(tmp_path / "images-2.csv")
    (made := Report(tmp_path, "tasks")).plot("tasks", [1], {"a": [1.0]}, "", ("", ""))
    (tmp_path / "more.csv").symlink_to(tmp_path / "elsewhere")
    made.csv("more", ("model",), [["\udcff"]])
    assert made.number == "" and not any(file.is_symlink() or file.name == "elsewhere" for file in tmp_path.iterdir())


@pytest.mark.parametrize(("folders", "expected"), [
    ("runs/a runs/b", "a b"), ("x/a y/a", "a-1 a-2"), ("x/a y/a x/a-2", "a-1 a-3 a-2"), ("x/a y/a x/a-1 y/a-1", "a-1 a-2 a-1-1 a-1-2"),
])  # fmt: skip
def test_every_checkpoint_has_a_name_of_its_own(folders: str, expected: str) -> None:
    assert labels([Path(one, "model.safetensors") for one in folders.split()], None) == expected.split()


def test_several_checkpoints_on_one_plot(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([
        "eval", f"checkpoint=[{runs / 'linear'},{runs / 'attention'}]", "labels=[TTT,softmax]", f"output_dir={tmp_path}", "inner_loss=true",
        "data.context_length=50", "segment=20", "num_bins=4", "device=cpu",
    ])  # fmt: skip
    output = capsys.readouterr().out
    assert code == 0 and "KernelEstimator" in output and "TTT" in output and "softmax" in output
    assert output.index("TTT: ") < output.index("no inner-loss curves of softmax")  # said before the next one is read
    assert {file.name for file in tmp_path.iterdir()} == {"by_position.csv", "by_position.png", "inner_loss.csv"}
    assert (tmp_path / "by_position.png").read_bytes().startswith(b"\x89PNG")
    written = rows(tmp_path / "by_position.csv")
    assert [row["model"] for row in written] == ["TTT"] * 4 + ["softmax"] * 4 and written[-1]["last"] == "50"
    inner = rows(tmp_path / "inner_loss.csv")
    assert {row["model"] for row in inner} == {"TTT"}
    assert [float(row["position"]) for row in inner] == [8, 16, 24, 32, 40, 48]


def test_one_checkpoint_writes_beside_itself(runs: Path) -> None:
    found = evaluate(compose(f"checkpoint={find_checkpoint(runs / 'linear')}", "bins=none", "device=cpu", job="eval"))
    assert list(found) == ["linear"] and len(rows(runs / "linear" / "eval" / "by_position.csv")) == 24
    again = evaluate(compose(f"checkpoint=[{runs / 'linear'},{runs / 'linear'}]", "device=cpu", job="eval"))
    assert list(again) == ["linear-1", "linear-2"] and {one.loss for one in again.values()} == {found["linear"].loss}


def test_text_that_a_run_may_have_trained_on_is_said(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (f"checkpoint={runs / 'linear'}", f"output_dir={tmp_path / 'out'}", "device=cpu")
    evaluate(compose(*given, job="eval"))
    assert "trained on" not in capsys.readouterr().out
    copied = shutil.copytree(runs / "text", tmp_path / "text")
    evaluate(compose(*given, f"data.path={copied}", job="eval"))
    evaluate(compose(*given, f"data.path={copied}", "data.context_length=8", "data.validation_max_bytes=300", job="eval"))
    assert "trained on" not in capsys.readouterr().out  # the same text at another place, however it is read
    for file in copied.glob("*.txt"):
        file.write_bytes(file.read_bytes()[::-1])
    evaluate(compose(*given, f"data.path={copied}", job="eval"))
    assert "linear: this is not the text of its run, which may have trained on" in capsys.readouterr().out
    file = next((runs / "text").glob("*.txt"))
    content = file.read_bytes()
    try:
        file.write_bytes(content[::-1])
        evaluate(compose(*given, job="eval"))
    finally:
        file.write_bytes(content)
    assert "linear: the text has changed since" in capsys.readouterr().out


def test_comparisons_that_would_mislead_are_refused(runs: Path, tmp_path: Path) -> None:
    pair = f"checkpoint=[{runs / 'linear'},{runs / 'other'}]"
    refusal(lambda: evaluate(compose(pair, job="eval")), "data.seed is 0 and 1: compare them with split=all")
    assert len(evaluate(compose(pair, "split=all", f"output_dir={tmp_path}", "device=cpu", job="eval"))) == 2
    for given in (["x"], ["x", "x"]):
        refusal(partial(labels, [tmp_path / "a", tmp_path / "b"], given), "2 different names")
    for override, message in (
        ("inner_loss_windows=0", "inner_loss_windows=0"), ("bins=linear", "bins=linear"), ("segment=0", "segment=0"),
        ("segment=many", "segment"), (f"output_dir={runs / 'text' / '00.txt'}", "cannot be written"),
    ):  # fmt: skip
        given = (f"checkpoint={runs / 'linear'}", override, "device=cpu")
        refusal(lambda given=given: evaluate(compose(*given, job="eval")), message)
    refusal(lambda: evaluate(compose("checkpoint=[1,2]", job="eval")), "give a run's folder")


def test_processes_of_torchrun_do_not_all_do_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for count, said in (("2", "torchrun has started 2 processes"), ("1", "no checkpoint is given")):
        monkeypatch.setenv("WORLD_SIZE", count)
        assert main(["eval"]) == 2 and said in capsys.readouterr().err
