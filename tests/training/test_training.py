"""A run from its beginning to what is made of it: files, more steps, evaluation, generation, the baseline, the picture."""

import math
import os
import signal
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from lightning.fabric.accelerators import MPSAccelerator
from refusals_for_tests import refusal
from runs_for_tests import TINY, after_step, column, log, tiny

from metattt.checkpoints.folder import write_checkpoint
from metattt.checkpoints.trained import load_model, read_checkpoint
from metattt.composition.compose import compose
from metattt.evaluation.evaluate import evaluate
from metattt.measures.ngram import NGram
from metattt.training.picture import plot
from metattt.training.recipes import AdamW
from metattt.training.train import train


def test_a_run_leaves_its_files_learns_and_prints_the_comparison(
    corpus: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = [one for one in TINY if "progress" not in one and one != "sample=false"]
    settings = (f"data.path={corpus}", f"output_dir={tmp_path / '[run]'}", "trainer.max_steps=4", "trainer.val_check_interval=1")
    assert train(compose(*shown, *settings)) == 0
    assert {file.name for file in (tmp_path / "[run]").iterdir()} == {"checkpoints", "metrics.csv", "loss_curve.png", "run.yaml"}
    assert (tmp_path / "[run]" / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    for name in ("train/loss", "validation/bits_per_byte"):
        assert list(column(tmp_path / "[run]", name)) == [1, 2, 3, 4]
    output = capsys.readouterr()
    checkpoint = "[run]/checkpoints/step-00000004"
    for words in ("order-2 byte model", "model / order-2", "parameters", "4 steps of 32 tokens", checkpoint, "sample"):
        assert words in output.out
    assert len(output.err.splitlines()) <= 12  # not a terminal: a line now and then, no bar
    losses = column(finished, "train/loss")
    assert losses[8] < losses[1] - 0.3


def test_a_signal_that_is_ignored_stays_ignored(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        after_step(monkeypatch, 2, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        assert train(tiny(corpus, tmp_path / "run", "trainer.max_steps=3")) == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_cpu_computes_beside_a_gpu_of_apple(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MPSAccelerator, "is_available", lambda: True)
    assert train(tiny(corpus, tmp_path / "run", "trainer.max_steps=1", "trainer.accelerator=auto")) == 0


def test_checkpoints_that_cannot_be_used_are_one_clear_line(finished: Path, tmp_path: Path) -> None:
    for content in (b"PK\3\4" + bytes(100), b"", b"this is no checkpoint"):
        (tmp_path / "a.ckpt").write_bytes(content)
        refusal(lambda: load_model(tmp_path / "a.ckpt"), "cannot be read as a checkpoint")
    torch.save([torch.zeros(2)], tmp_path / "list.ckpt")
    refusal(lambda: train(compose(f"resume={tmp_path / 'list.ckpt'}")), "not a checkpoint of metattt train")
    (tmp_path / "nothing").mkdir()
    for name in ("missing", "nothing"):
        refusal(partial(load_model, tmp_path / name), "no checkpoint")
    content = read_checkpoint(finished)
    content["state_dict"].popitem()
    write_checkpoint(tmp_path / "other", content)
    refusal(lambda: load_model(tmp_path / "other"), "does not fit")


def test_eval_agrees_with_the_validation_of_the_run(corpus: Path, tmp_path: Path) -> None:
    assert train(tiny(corpus, tmp_path / "run", "task.corruption=noise", "task.corruption_rate=1")) == 0
    given = f"checkpoint=[{tmp_path / 'run'},{tmp_path / 'run'}]", "inner_loss=true", f"output_dir={tmp_path}", "device=cpu"
    scores = evaluate(compose(*given, job="eval"))["run-1"]
    assert math.isclose(scores.bits_per_byte, float(log(tmp_path / "run")[-1]["validation/bits_per_byte"]), rel_tol=1e-6)
    inner = [line.partition(",")[2] for line in (tmp_path / "inner_loss.csv").read_text().splitlines()[1:]]
    assert inner and inner[: len(inner) // 2] == inner[len(inner) // 2 :]  # of a model the same, whatever was read before


def test_learning_rate_schedule() -> None:
    recipe = AdamW(lr=1.0, warmup_fraction=0.1, min_lr=0.01)
    rates = [recipe.factor(step, 100) for step in range(101)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10)
    assert max(rates) == rates[10] == 1 and math.isclose(rates[100], 0.01) and math.isclose(rates[55], 0.505)
    late = AdamW(lr=1.0, warmup_fraction=0.1, min_lr=0.01, decay_fraction=0.2)  # warm-up, stable, decay
    assert [late.factor(step, 100) for step in (*range(83), 91, 100)] == pytest.approx([*rates[:10], *[1.0] * 73, 0.505, 0.01])


def test_only_matrices_decay(finished: Path) -> None:
    model, _ = load_model(finished)
    decayed, others = AdamW().optimizer(model).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)].rpartition(".")[2] for p in decayed["params"]} == {"weight"} and decayed["weight_decay"] == 0.1
    assert others["weight_decay"] == 0 and len(decayed["params"]) + len(others["params"]) == len(names)
    assert not any("norm" in names[id(p)] or "conv" in names[id(p)] for p in decayed["params"])


def brute_force(train: list[int], context: list[int], token: int, vocab: int) -> float:
    """P(token | context) by Witten-Bell, counted by looking."""
    shorter = brute_force(train, context[1:], token, vocab) if context else 1 / vocab
    n = len(context)
    followers = [train[i + n] for i in range(len(train) - n) if train[i : i + n] == context]
    if not followers:
        return shorter
    different = len(set(followers))
    return (followers.count(token) + different * shorter) / (len(followers) + different)


@pytest.mark.parametrize("way", [{}, {"PIECE": 17}, {"MOST": 0}], ids=["a table", "in pieces", "listed"])
def test_the_baseline_equals_a_brute_force_count(way: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in way.items():
        monkeypatch.setattr(f"metattt.measures.ngram.{name}", value)
    random, vocab = np.random.default_rng(0), 5
    train, validation = (random.choice(4, p=[0.5, 0.3, 0.1, 0.1], size=size).astype(np.uint16) for size in ((9, 8), (4, 8)))
    validation[0, 2] = 4  # a token that is not in the text
    model, stream = NGram(vocab, 3).fit(train), train.reshape(-1).tolist()
    sizes = np.array([1, 2, 1, 3, 0])  # bytes of the tokens
    for order in range(4):
        nats = model.nats(validation, order)
        for row, window in enumerate(validation.tolist()):
            for t in range(1, len(window)):
                expected = -math.log(brute_force(stream, window[max(0, t - order) : t], window[t], vocab))
                assert math.isclose(nats[row, t - 1], expected, rel_tol=1e-12)
        bits = nats.sum() / math.log(2) / sizes[validation[:, 1:]].sum()
        assert math.isclose(model.bits_per_byte(validation, sizes, order), bits, rel_tol=1e-12)


@pytest.mark.parametrize(("layer", "panels"), [("delta_net", 2), ("attention", 1)])
def test_the_picture_shows_the_inner_losses_where_there_are_any(
    corpus: Path, tmp_path: Path, layer: str, panels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metattt.training.callbacks.plot", noted := Mock(wraps=plot))
    assert train(tiny(corpus, tmp_path / "run", f"layer={layer}", "trainer.max_steps=1")) == 0
    *_, baselines, path, _, _, inner = noted.call_args.args
    assert set(baselines) == {"order-2 byte model", "order-3 byte model"}
    assert (inner is None) == (panels == 1)
    if inner is not None:
        curves = inner[0]
        assert torch.equal(curves["init"][0], curves["step_0"][0])  # nothing is read before the first mini-batch
        assert (curves["step_1"] < curves["step_0"]).all()
    content = Path(path).read_bytes()
    assert content.startswith(b"\x89PNG") and (int.from_bytes(content[16:20], "big") > 1000) == (panels == 2)


def test_curves_with_points_that_are_no_numbers_are_drawn(tmp_path: Path) -> None:
    for points in ([[1, math.nan]], [[1, 2.0], [2, math.nan], [3, math.inf], [4, 1.0]]):
        plot({"train": points, "validation": [[1, math.nan]]}, {"order-2": 3.0}, tmp_path / "a.png", "bits", "a run")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_logger_of_lightning_in_the_place_of_ours(corpus: Path, tmp_path: Path) -> None:
    own = (
        "~logger.csv", "+logger.own._target_=lightning.pytorch.loggers.CSVLogger", f"+logger.own.save_dir={tmp_path}",
        "+logger.own.name=x", "+logger.own.version=y", "trainer.max_steps=3",
    )  # fmt: skip
    assert train(tiny(corpus, tmp_path / "run", *own)) == 0
    assert list(column(tmp_path / "x" / "y", "train/loss")) == [1, 2, 3]
