"""Synthetic sequences with labels: associative recall and regression in context, models that read them, and their claims."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import claims
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from comparisons import baselines
from comparisons.jobs import Job
from comparisons.sequences import in_context, recall
from refusals_for_tests import refusal
from runs_for_tests import column
from test_benchmarks import Canned

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.data.base import Place
from metattt.data.digits import DigitsData
from metattt.data.in_context import InContextData
from metattt.data.recall import RecallData
from metattt.data.sequences import NO_LABEL, PARTS, SequenceData, home_of
from metattt.evaluation import sequences
from metattt.evaluation.evaluate import evaluate
from metattt.measures.labelled import labelled_predictions, losses_and_hits
from metattt.training.sequence_module import LabelledSequences
from metattt.training.train import train

RECALL = (
    "experiment=recall", "layer=delta_net", "dim=16", "num_heads=1", "model.num_layers=1", "data.pairs=1", "data.length=4",
    "data.vocab_size=8", "data.batch_size=8", "data.validation_size=24", "trainer.accelerator=cpu", "callbacks.progress.lines=1",
)  # fmt: skip


class Constant(RecallData):
    """One sequence, which is in one split alone."""

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return super().draw(np.random.default_rng(0))


class Bits(SequenceData):
    """What the documentation asks of data of one's own: `draw`, and nothing else."""

    vocab_size, length = 2, 16

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return (bits := random.integers(0, 2, self.length)), bits


def test_data_of_ones_own_need_not_describe_itself() -> None:
    assert Bits().describe() == "Bits"


class Numbers(SequenceData):
    """Vectors and labels as NumPy makes them: float64."""

    inputs, length = 1, 8

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return random.random((self.length, 1)), random.random(self.length)


class Steps(Numbers):
    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return random.integers(-9, 9, (self.length, 1)), random.random(self.length)


class SmallIds(Bits):
    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        ids, labels = super().draw(random)
        return ids.astype(np.uint8), labels.astype(np.int16)


def test_models_read_what_numpy_draws() -> None:
    numbers, ids = Numbers().train_dataloader(), SmallIds().train_dataloader()
    assert all(part.dtype == torch.float32 for batch in numbers for part in batch)
    assert all(part.dtype == torch.int64 for batch in ids for part in batch)
    assert all(batch[0].dtype == torch.float32 for batch in Steps().train_dataloader())


def evaluated(run: Path, *overrides: str) -> Any:
    return evaluate(compose(f"checkpoint={run}", *overrides, "device=cpu", job="eval"))[run.name]


@pytest.mark.parametrize(("overwrite", "power"), [(False, 0.01), (True, 0.01), (True, 1000)])
def test_every_key_is_asked_once_and_its_last_value_is_the_label(overwrite: bool, power: float) -> None:
    data = RecallData(pairs=5, length=36, vocab_size=25, overwrite=overwrite, gap_power=power)
    gaps = np.arange(1, len(data._gaps) + 1) / len(data._gaps)
    np.testing.assert_allclose(data._gaps / data._gaps[-1], gaps ** (power - 1), atol=1e-300)
    first_ones = 0
    for index in range(40):
        ids, labels = data.sequence("train", index)
        asked = np.flatnonzero(labels != NO_LABEL)
        keys, values = ids[: data.list_length : 2], ids[1 : data.list_length : 2]
        assert sorted(ids[asked]) == sorted(set(keys)) and len(asked) == 5 and (asked % 2 == 0).all()
        assert keys.min() >= 1 and keys.max() < 12 <= values.min() and asked.min() >= data.list_length
        for place in asked:  # the label is what was last written under the key
            assert labels[place] == values[keys == ids[place]][-1]
            first_ones += int(labels[place] == values[keys == ids[place]][0])
    assert first_ones == (0 if overwrite else 200)  # the first value of a key is never its last one there


@pytest.mark.parametrize("data", [RecallData(pairs=1, length=4, vocab_size=8), InContextData(features=1, examples=2)])
def test_splits_share_no_sequence_whatever_the_seed(data: SequenceData) -> None:
    """Of recall there are 3 · 4 · 8 different ones, so that all of them occur."""
    found: dict[str, set[bytes]] = {part: set() for part in PARTS}
    for data.seed, part in itertools.product((0, 1), PARTS):
        found[part] |= {data.sequence(part, index)[0].tobytes() for index in range(150)}
    assert all(home_of(content) == part for part in PARTS for content in found[part]) and all(map(len, found.values()))
    assert not any(one & other for one, other in itertools.combinations(found.values(), 2))


def test_a_sequence_is_a_function_of_split_seed_and_number() -> None:
    one, two, other = RecallData(), RecallData(batch_size=3), RecallData(seed=1)
    assert all((a == b).all() for a, b in zip(one.sequence("train", 5), two.sequence("train", 5), strict=True))
    assert (one.sequence("train", 5)[0] != other.sequence("train", 5)[0]).any()
    assert (one.sequence("test", 5)[0] == other.sequence("test", 5)[0]).all()  # as many runs, one test


def test_training_goes_on_with_the_batch_it_would_have_seen_and_processes_share_it() -> None:
    def batches(start: int = 0, rank: int = 0, world: int = 1, size: int = 4) -> list[torch.Tensor]:
        data = RecallData(batch_size=size)
        data.place = Place(rank, world, start, 6)
        return [ids for ids, _ in data.train_dataloader()]

    whole = batches()
    assert len(whole) == 6 and len(torch.cat(whole).unique(dim=0)) == 24
    assert torch.equal(torch.stack(batches(4)), torch.stack(whole[4:]))
    parts = [batches(rank=rank, world=2, size=2) for rank in (0, 1)]
    assert torch.equal(torch.cat([torch.cat(pair) for pair in zip(*parts, strict=True)]), torch.cat(whole))


@pytest.mark.parametrize("size", [2, 11, 513])  # two times 256 and one more
def test_validation_is_read_once_by_processes_together(size: int) -> None:
    found, batches, data = [], set(), RecallData(validation_size=size)
    for data.place in (Place(0, 2), Place(1, 2)):
        loader = data.val_dataloader()
        batches.add(len(loader))
        found += [ids for ids, _ in loader]
    assert len(torch.cat(found)) == len(torch.cat(found).unique(dim=0)) == size and len(batches) == 1
    data.place = Place(1, size + 1)
    refusal(data.val_dataloader, f"data.validation_size={size + 1} or more")


def test_held_out_sequences_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = RecallData(pairs=2, length=8, vocab_size=16, batch_size=4, validation_size=6)
    loader, drawn = data.val_dataloader(), []
    first = [(inputs.clone(), labels.clone()) for inputs, labels in loader]
    draw = RecallData.draw
    monkeypatch.setattr(RecallData, "draw", lambda self, random: drawn.append(1) or draw(self, random))
    for inputs, labels in loader:
        inputs.zero_(), labels.zero_()  # by a careless model
    assert all(torch.equal(a, b) for now, then in zip(loader, first, strict=True) for a, b in zip(now, then, strict=True))
    assert not drawn
    monkeypatch.setattr("metattt.data.sequences.MOST_KEPT", 0)
    assert len(list(data.val_dataloader())) == len(first) and drawn


@pytest.mark.parametrize("function", ["linear", "sparse", "network"])
def test_functions_in_context(function: Any) -> None:
    data = InContextData(function, features=4, examples=400, nonzero=2, hidden=3)
    x, y = baselines.examples(InContextData(function, features=4, examples=8, hidden=16), "train", 500)
    assert y.var() == pytest.approx(1, abs=0.25)
    x, y = baselines.examples(data, "train", 30)
    inputs, labels = data.sequence("train", 3)
    assert (inputs[1::2, -1] == labels[::2]).all() and np.isnan(labels[1::2]).all() and (inputs[1::2, :-1] == 0).all()
    weights = [np.linalg.lstsq(one, two, rcond=None) for one, two in zip(x, y, strict=True)]
    if function == "network":
        assert min(float(residual[0]) for _, residual, *_ in weights) > 1e-3  # not linear
    else:
        assert max(float(residual[0]) for _, residual, *_ in weights) < 1e-8
        assert {int((np.abs(w) > 1e-4).sum()) for w, *_ in weights} == ({2} if function == "sparse" else {4})


@pytest.mark.parametrize(("make", "words"), [
    (lambda: RecallData(pairs=8, vocab_size=16), "data.vocab_size=18"),
    (lambda: RecallData(pairs=8, length=31), "data.length=32"),
    (lambda: InContextData("sparse", features=2, nonzero=3), "data.nonzero=3"),
    (lambda: [Constant().sequence(part, 0) for part in PARTS], "too few different"),
    (lambda: compose("experiment=recall", "data.pars=3"), "data.pairs"),
    (lambda: train(compose("data=recall", "model=regression")), "ids (associative recall: 8 pairs"),
    (lambda: train(compose("data=recall", "model.vocab_size=100")), "model.vocab_size=256"),
    (lambda: train(compose("data=in_context")), "need model=regression"),
    (lambda: train(compose("experiment=in_context", "data.features=3")), "model.in_features=4"),
    (lambda: train(compose(*RECALL, "training.chunk=8")), "training.chunk=null"),
    (lambda: train(compose(*RECALL, "callbacks.stop_at.mode=most")), "callbacks.stop_at"),
])  # fmt: skip
def test_mistakes_are_named(make: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refusal(make, words)


def test_losses_are_those_of_all_logits() -> None:
    cfg = compose(*RECALL)
    model, data = instantiate_model(cfg).double(), RecallData(2, 12, 8)
    inputs, labels = (torch.from_numpy(one) for one in data.sequence("train", 0))
    losses, hits = losses_and_hits(*labelled_predictions(model, inputs[None], labels[None]))
    logits = model(inputs[None])[0]
    expected = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="none")[labels != NO_LABEL]
    assert torch.allclose(losses, expected, rtol=1e-12, atol=0)
    assert hits is not None and torch.equal(hits.bool(), (logits.argmax(-1) == labels)[labels != NO_LABEL])


def test_inputs_that_are_not_finite_are_said_to_be_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(self: Any, part: Any, index: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, labels = plain(self, part, index)
        if part == "train" and index < 8:  # in the first batch of a step, of two
            inputs[-1, -1] = np.inf
        return inputs, labels

    plain = InContextData.sequence
    monkeypatch.setattr(InContextData, "sequence", spoilt)
    small = ("layer=attention", "dim=8", "num_heads=1", "model.num_layers=1", "data.validation_size=8", "data.batch_size=8")
    cpu = ("trainer.accelerator=cpu", "trainer.accumulate_grad_batches=2")
    given = compose("experiment=in_context", *small, f"output_dir={tmp_path / 'run'}", *cpu)
    refusal(lambda: train(given), "mend the data")


@pytest.mark.parametrize("kind", ["recall", "in_context"])
def test_a_batch_that_asks_nothing_teaches_nothing(kind: str) -> None:
    model: Any = instantiate_model(compose(f"experiment={kind}", "layer=attention", "dim=8", "num_heads=1"))
    inputs, labels = (torch.zeros(1, 4, dtype=torch.long), NO_LABEL) if kind == "recall" else (torch.zeros(1, 4, 9), torch.nan)
    loop = LabelledSequences(model, None, {})
    loss = loop.batch_loss((inputs, torch.full((1, 4), labels)))
    loss.backward()
    assert loss == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert loop.double().shortest_loss().dtype == torch.float64  # what trainer=ddp asks for first


@pytest.mark.parametrize("layer", ["ttt_linear", "attention"])
def test_regression_in_pieces_is_one_pass_and_sees_no_later_token(layer: str) -> None:
    cfg = compose("experiment=in_context", f"layer={layer}", "dim=16", "num_heads=2", "model.in_features=3")
    model: Any = instantiate_model(cfg).double()
    x = torch.randn(2, 21, 3, dtype=torch.float64, requires_grad=True)
    whole, state, pieces = model(x), None, []
    for piece in x.split([1, 5, 8, 7], dim=1):
        y, state = model.step(piece, state)
        pieces.append(y)
    assert torch.allclose(torch.cat(pieces, 1), whole, rtol=1e-9, atol=1e-11)
    (gradient,) = torch.autograd.grad(whole[:, 9].sum(), x)
    assert gradient[:, 10:].abs().max() == 0 and gradient[:, :10].abs().amin() > 0


def test_a_run_stops_at_its_threshold_and_is_evaluated_on_sequences_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = "callbacks.stop_at.stopping_threshold=0.6"
    run = (*RECALL, "training.lr=2e-2", "trainer.max_steps=200", "trainer.val_check_interval=10", ends)
    assert train(compose(*run, f"output_dir={tmp_path / 'run'}")) == 0
    seen = column(tmp_path / "run", "validation/accuracy")
    reached = [accuracy >= 0.6 for accuracy in seen.values()]
    assert reached[-1] and not any(reached[:-1]) and max(seen) < 200
    validation, test = (evaluated(tmp_path / "run", f"split={split}") for split in ("validation", "test"))
    assert validation.accuracy.mean().item() == pytest.approx(seen[max(seen)], abs=1e-6)
    assert validation.loss.tolist() != test.loss.tolist() and test.sequences == 24
    evaluate(compose(f"checkpoint=[{tmp_path / 'run'},{tmp_path / 'run'}]", "labels=[a,b]", "device=cpu", job="eval"))
    assert f"a: loss {validation.mean(validation.loss):.4f}\nb: " in capsys.readouterr().out  # said before the next one is read
    refusal(lambda: evaluated(tmp_path / "run", "split=train"), "split=validation or split=test")
    refusal(lambda: evaluated(tmp_path / "run", "data.path=x"), "data.path=x does not apply")
    with pytest.raises(RuntimeError, match=r"validation/top1. which is not available"):  # in Lightning's words
        train(compose(*run, "callbacks.stop_at.monitor=validation/top1", f"output_dir={tmp_path / 'other'}"))


def test_a_run_of_vectors_learns(tmp_path: Path) -> None:
    run = (
        "experiment=in_context", "layer=linear_attention", "dim=16", "num_heads=1", "model.num_layers=1", "data.features=1",
        "model.in_features=2", "data.examples=6", "data.batch_size=32", "data.validation_size=64", "trainer.accelerator=cpu",
        "training.lr=1e-2", "trainer.max_steps=120", f"output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert train(compose(*run)) == 0
    scores: sequences.SequenceScores = evaluated(tmp_path / "run")
    assert scores.accuracy is None and scores.loss[-1] < 0.5 < scores.loss[0]  # the examples before it help


class Sometimes(RecallData):
    """Some questions are left out."""

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        ids, labels = super().draw(random)
        asked = np.flatnonzero(labels != NO_LABEL)
        labels[[place for place in asked[1:] if random.random() < 0.5]] = NO_LABEL
        return ids, labels


def test_sequences_may_ask_different_numbers_of_questions() -> None:
    data = Sometimes(pairs=4, length=24, vocab_size=16, validation_size=20)
    sizes = ("dim=16", "num_heads=1", "model.num_layers=1", "model.vocab_size=16")
    model = instantiate_model(compose("layer=delta_net", *sizes, job="language_model")).eval()
    losses = np.full((20, 4), np.nan)  # of sequences and their questions
    for index in range(20):
        ids, labels = (torch.from_numpy(one)[None] for one in data.sequence("test", index))
        with torch.no_grad():
            found = losses_and_hits(*labelled_predictions(model, ids, labels))[0]
        losses[index, : len(found)] = found
    scores = sequences.score(model, data, "test")
    assert scores.counts.tolist() == (~np.isnan(losses)).sum(0).tolist() and scores.counts[0] == 20 > scores.counts[3] > 0
    assert scores.loss.tolist() == pytest.approx(np.nanmean(losses, 0), rel=1e-5)
    assert scores.mean(scores.loss) == pytest.approx(np.nanmean(losses), rel=1e-5)


def test_estimators_against_their_definitions() -> None:
    x, y = baselines.examples(InContextData(features=3, examples=8, noise=0.4), "test", 200)
    question = x[:, 7]
    expected = [q @ np.linalg.lstsq(a[:7], b[:7], rcond=None)[0] for a, b, q in zip(x, y, question, strict=True)]
    assert np.allclose(baselines.least_squares(x[:, :7], y[:, :7], question), expected)
    assert np.allclose(baselines.ridge(1e-9)(x[:, :7], y[:, :7], question), expected, atol=1e-6)
    # the posterior mean: weights have the variance 1/3, noise 0.16, so λ = 0.48 is best on average
    ridge = {strength: np.mean(baselines.errors(baselines.ridge(strength), x, y)[1:]) for strength in (1e-3, 0.48, 10.0)}
    assert ridge[0.48] < min(ridge[1e-3], ridge[10.0])
    exact = baselines.errors(baselines.least_squares, *baselines.examples(InContextData(features=3, examples=6), "test", 50))
    assert exact[3] < 1e-9 < 0.05 < exact[2] and exact[0] == pytest.approx(1, abs=0.5)


def test_the_report_on_recall_takes_the_rate_with_the_fewest_steps(tmp_path: Path) -> None:
    _, claim = claims.read("recall", "cpu")
    fast = claim.learning_rates[1]

    def files(job: Job) -> dict[str, str]:
        good = "delta_net" in job.name or "overwritten" not in job.name
        accuracy, steps = ("0.995", 100 if f"lr={fast:g} " in job.name else 300) if good else ("0.5", 600)
        log = f"step,train/loss,validation/accuracy\n50,,0.1\n{steps},,{accuracy}\n"
        return {"metrics.csv": log, "sequences.csv": f"model,question,loss,accuracy\nrun,0,0.1,{accuracy}\nrun,1,0.1,{accuracy}\n"}

    canned = Canned(tmp_path, files)
    report = recall(claim, canned)
    assert len(dict.fromkeys(canned.asked)) == claim.jobs()
    assert {one["learning_rate"] for one in report.records if one["layer"] == "delta_net"} == {fast}
    assert {one["steps_to_99"] for one in report.records if one["layer"] == "delta_net"} == {100}
    seen = [line for line in report.text.splitlines() if "pairs" in line and line.startswith("- ")]
    hard = next(line for line in seen if "overwritten" in line)
    assert "reach 99%, after so many steps: `delta_net` 100, `gated_delta_net` 100" in hard
    assert "`delta_net` against `linear_attention`: better" in hard
    assert "`attention` (50.0 ± 0.0%)" in hard
    easy = next(line for line in seen if "overwritten" not in line)
    assert "do not" not in easy and "`delta_net` against `linear_attention`: within the spread" in easy


def test_the_report_on_regression_has_the_estimators_on_the_same_sequences(tmp_path: Path) -> None:
    _, claim = claims.read("in_context", "smoke")
    errors = "\n".join(f"run,{count},{1 / (count + 1)}," for count in range(5))
    log = "step,train/loss,validation/loss\n2,,0.3\n"
    canned = Canned(tmp_path, lambda job: {"metrics.csv": log, "sequences.csv": f"model,question,loss,accuracy\n{errors}\n"})
    report = in_context(claim, canned)
    data = InContextData("sparse", features=3, examples=5, nonzero=1, validation_size=16)
    expected = baselines.errors(baselines.least_squares, *baselines.examples(data, "test", 16))
    found = [one["squared_error"] for one in report.records if one["learner"] == "least squares"]
    assert found == pytest.approx(expected) and {"lasso", "ridge"} <= {str(one["learner"]).partition(",")[0] for one in report.records}
    assert "linear_attention 0.200 ± 0.000" in report.text


def test_test_digits_are_in_no_other_split() -> None:
    plain, kept = DigitsData(), DigitsData(test_fraction=0.2)
    for data in (plain, kept):
        data.setup()
    content = {name: {image.numpy().tobytes() for image in split.images} for name, split in kept._splits.items()}
    assert [len(content[name]) for name in ("validation", "test", "train")] == [359, 359, 1079]
    assert not any(one & other for one, other in itertools.combinations(content.values(), 2))
    assert torch.equal(plain._splits["validation"].images, kept._splits["validation"].images)
    assert sum(len(labels) for _, labels in kept.test_dataloader()) == 359
    refusal(lambda: plain.test_dataloader(), "data.test_fraction=0.2")
