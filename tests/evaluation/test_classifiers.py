"""`metattt eval` and `metattt predict` of classifiers."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from refusals_for_tests import refusal
from runs_for_tests import column, log, rows, steps, tiny, write_corpus
from timm.data import create_transform

import metattt
from metattt.checkpoints.folder import write_checkpoint
from metattt.checkpoints.trained import read_checkpoint
from metattt.cli import main
from metattt.composition.compose import compose
from metattt.data.digits import DigitsData
from metattt.errors import MetaTTTError
from metattt.evaluation import images
from metattt.evaluation.evaluate import evaluate
from metattt.evaluation.predict import predict
from metattt.training.train import train

TINY = (
    "experiment=digits_pixel", "dim=16", "num_heads=2", "model.depth=2", "trainer.accelerator=cpu", "trainer.max_steps=6",
    "trainer.val_check_interval=3", "optimizer.seed=0",
)  # fmt: skip
FOLDERS = (
    "experiment=imagenet_patch/mttt_mlp", "dim=16", "num_heads=2", "model.depth=1", "data.img_size=16", "model.img_size=16",
    "model.patch_size=4", "data.num_workers=0", "training.warmup_steps=1", "model.num_classes=2", "trainer.accelerator=cpu",
    "trainer.precision=32",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        assert train(compose(*TINY, f"seed={ord(name)}", f"output_dir={folder / name}")) == 0
    assert train(tiny(write_corpus(folder / "corpus"), folder / "text", "trainer.max_steps=1")) == 0
    return folder


def digits(count: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """The first images to validate with, and their labels."""
    data = DigitsData(img_size=size)
    data.setup()
    return data._splits["validation"][list(range(count))]


def save(image: torch.Tensor, file: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    Image.fromarray(((image[0] + 1) * 127.5).round().to(torch.uint8).numpy()).save(file)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first validation digits, in folders."""
    folder = tmp_path_factory.mktemp("pictures")
    for number, (image, label) in enumerate(zip(*digits(6), strict=True)):
        save(image, folder / str(label.item()) / f"{number}.png")
    return folder


def write_noise(folder: Path, names: tuple[str, ...], count: int) -> None:
    """Images that differ, in folders: the same ones in each."""
    for name, number in itertools.product(names, range(count)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name / f"{number}.png")


def evaluated(*overrides: str) -> dict[str, Any]:
    return evaluate(compose(*overrides, "device=cpu", job="eval"))


def test_the_figures_are_those_of_all_validation_images(runs: Path, tmp_path: Path) -> None:
    model: Any = metattt.load_model(runs / "a")[0]
    images, labels = digits(359)
    with torch.no_grad():
        logits = model(images)
    found = evaluated(f"checkpoint={runs / 'a'}", f"output_dir={tmp_path}")["a"]
    order = logits.argsort(1, descending=True)
    assert found.images == len(images) == 359
    assert found.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert found.top1 == (order[:, 0] == labels).double().mean().item()
    assert found.top5 == (order[:, :5] == labels[:, None]).double().sum(1).mean().item()
    last = [row for row in rows(runs / "a" / "metrics.csv") if row["validation/loss"]][-1]
    assert found.loss == pytest.approx(float(last["validation/loss"]), rel=1e-5)
    assert found.top1 == pytest.approx(float(last["validation/top1"]), abs=1e-6)


def test_several_runs_in_one_table_with_their_inner_losses(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = f"checkpoint=[{runs / 'a'},{runs / 'b'}]", "inner_loss=true", "inner_loss_windows=300"
    # the second does not write over the first
    first, found = (evaluated(*given, f"data.batch_size={size}", f"output_dir={tmp_path}") for size in (359, 1))  # 1: 256 at a time
    torch.testing.assert_close(first["a"].inner, found["a"].inner, rtol=1e-5, atol=0)
    names = {"images.csv", "images-2.csv", "inner_loss.csv", "inner_loss-2.csv"}
    assert {file.name for file in tmp_path.iterdir()} == names
    output = capsys.readouterr().out
    assert f"a: top-1 {found['a'].top1:.4f}\nb: " in output and "top-1 %" in output and list(found) == ["a", "b"]
    by_model = {row["model"]: row for row in rows(tmp_path / "images-2.csv")}
    assert float(by_model["b"]["loss"]) == found["b"].loss and found["a"].loss != found["b"].loss
    assert list(found["a"].inner) == [1, 2] and all(len(losses) > 2 for losses in found["a"].inner.values())
    count = sum(len(losses) for one in found.values() for losses in one.inner.values())
    assert len(rows(tmp_path / "inner_loss.csv")) == count


def test_permutations_are_drawn_alike_and_nothing_else_notices(runs: Path, tmp_path: Path) -> None:
    drawn, run = (*TINY, "optimizer.seed=null", "optimizer.sampling=sgd"), tmp_path / "run"
    for between, folder in ((3, run), (2, tmp_path / "other")):
        assert train(compose(*drawn, f"trainer.val_check_interval={between}", f"output_dir={folder}")) == 0
    assert log(run)[-1] == log(tmp_path / "other")[-1]  # one validation more changes nothing
    before = torch.get_rng_state()
    first, second = (evaluated(f"checkpoint={run}", f"output_dir={tmp_path}", f"inner_loss={x}")["run"] for x in (True, False))
    assert first._replace(inner={}) == second and torch.equal(torch.get_rng_state(), before)
    assert second.loss == pytest.approx(float(log(run)[-1]["validation/loss"]), rel=1e-6)


def test_images_without_a_label_are_in_no_inner_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "inner_losses_by_layer", lambda _, some: {1: some.mean().reshape(1)})
    model: Any = torch.nn.Linear(1, 2)
    model.num_classes = 2
    batches: Any = [(torch.tensor([[1.0], [9.0]]), torch.tensor([0, -1])), (torch.tensor([[3.0], [9.0]]), torch.tensor([1, 1]))]
    assert images.score(model, batches, inner=2).inner == {1: [2.0]}


def predicted(*overrides: str) -> list[Any]:
    return predict(compose(*overrides, "device=cpu", job="predict"))


def test_pictures_are_seen_as_in_validation(runs: Path, pictures: Path, tmp_path: Path) -> None:
    model: Any = metattt.load_model(runs / "a")[0]
    given = ("top=3", "batch_size=4", "num_workers=1", f"output_dir={tmp_path}")
    found = predicted(f"checkpoint={runs / 'a'}", f"source={pictures}", *given)
    files = sorted(file.relative_to(pictures) for file in pictures.rglob("*.png"))
    assert [one.name for one in found] == [str(file) for file in files]
    for one, file in zip(found, files, strict=True):
        image = torch.from_numpy(np.asarray(Image.open(pictures / file)) / 127.5 - 1).float()[None, None]
        shares = model(image).softmax(1)[0]
        assert shares[[int(name) for name in one.classes]].tolist() == pytest.approx(one.probabilities, abs=1e-5)
        assert one.probabilities == sorted(one.probabilities, reverse=True) and len(one.classes) == 3
    assert [row["class_1"] for row in rows(tmp_path / "predictions.csv")] == [one.classes[0] for one in found]
    assert model.pretrained_cfg.items() >= DigitsData.evaluation.items()


def test_pictures_of_another_size_are_the_images_of_validation(pictures: Path) -> None:
    """A run at 16 repeats each of the 8x8 pixels."""
    size, picture = 16, next(pictures.rglob("0.png"))
    transform = create_transform((1, size, size), mean=(0.5,), std=(0.5,), **DigitsData.evaluation)
    torch.testing.assert_close(transform(Image.open(picture)), digits(1, size)[0][0], rtol=0, atol=0.01)  # it has 256 shades


@pytest.mark.parametrize(("evaluation", "message"), [
    (None, "does not say how its images are resized and cropped"),
    ({"crop_pct": 1e-9, "interpolation": "nearest"}, "does not describe how to resize and crop"),
])  # fmt: skip
def test_a_run_that_does_not_say_how_its_images_were_made(
    runs: Path, pictures: Path, tmp_path: Path, evaluation: Any, message: str
) -> None:
    content = read_checkpoint(runs / "a")
    del content["metattt"]["evaluation"]
    content["metattt"] |= {} if evaluation is None else {"evaluation": evaluation}
    write_checkpoint(tmp_path / "checkpoints" / "step-00000006", content)
    refusal(lambda: predicted(f"checkpoint={tmp_path}", f"source={pictures}"), message)


def test_one_picture_several_kinds_and_one_that_cannot_be_read(
    runs: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = next(pictures.rglob("*.png"))
    (found,) = predicted(f"checkpoint={runs / 'a'}", f"source={one}", f"output_dir={tmp_path}", "top=99")
    assert found.name == one.name and len(found.classes) == 10 and sum(found.probabilities) == pytest.approx(1, abs=1e-5)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "good [bold].png").write_bytes(one.read_bytes())
    grey = np.asarray(Image.open(one))
    Image.fromarray(grey).save(mixed / "8.gif")
    Image.fromarray(grey.astype(np.uint16) * 257).save(mixed / "16.png")  # it is scaled
    (mixed / "bad.png").write_bytes(one.read_bytes()[:40])
    os.mkfifo(mixed / "pipe.png")  # it would be waited for
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "linked.png").write_bytes(one.read_bytes())
    (mixed / "link").symlink_to(tmp_path / "other")
    given = [f"checkpoint={runs / 'a'}", f"source={mixed}", "device=cpu", "num_workers=1"]
    assert main(["predict", *given]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and "bad.png" in error and "corrupt=skip" in error
    others = predicted(*given, "corrupt=skip")
    assert [one.name for one in others] == ["16.png", "8.gif", "good [bold].png", "link/linked.png"]
    assert all(one.probabilities == others[0].probabilities for one in others)
    assert "good [bold].png" in (said := capsys.readouterr().out) and "skipped  1 of 5 files" in said


def test_a_run_on_folders_keeps_the_names_of_its_classes(tmp_path: Path) -> None:
    write_noise(tmp_path / "data", ("train/cat", "train/dog"), 8)
    write_noise(tmp_path / "data", ("val/cat", "val/dog"), 4)
    given = (*FOLDERS, f"data.path={tmp_path / 'data'}", "data.batch_size=4", "trainer.max_steps=2", "trainer.val_check_interval=2")
    assert train(compose(*given, f"output_dir={tmp_path / 'run'}")) == 0
    found = predicted(f"checkpoint={tmp_path / 'run'}", f"source={tmp_path / 'data' / 'val'}")
    assert len(found) == 8 and {name for one in found for name in one.classes} == {"cat", "dog"}
    scores = evaluated(f"checkpoint={tmp_path / 'run'}", f"data.path={tmp_path / 'data'}", "data.batch_size=3")["run"]
    assert scores.images == 8 and scores.top5 == 1
    for split in ("train", "val"):  # labels would be permuted
        (tmp_path / "data" / split / "cat").rename(tmp_path / "data" / split / "eel")
    with pytest.raises(MetaTTTError, match="has the class 'dog' where the run that is resumed has 'cat'"):
        train(compose(f"resume={tmp_path / 'run'}", "trainer.max_steps=3"))
    for split in ("train", "val"):
        (tmp_path / "data" / split / "eel").rename(tmp_path / "data" / split / "cat")
    shutil.rmtree(tmp_path / "data" / "val" / "cat")  # eval has the run's numbers, and needs no training images
    given = (f"checkpoint={tmp_path / 'run'}", f"data.validation_path={tmp_path / 'data' / 'val'}")
    (tmp_path / "data" / "train").rename(tmp_path / "moved")
    of_dog = [one.probabilities[one.classes.index("dog")] for one in found if one.name.startswith("dog")]
    assert evaluated(*given)["run"].loss == pytest.approx(-np.log(of_dog).mean(), rel=1e-3)
    (tmp_path / "data" / "val" / "dog" / "bad.png").write_bytes(b"no image")
    assert evaluated(*given, "data.corrupt=skip")["run"].images == 4
    (tmp_path / "data" / "val" / "dog").rename(tmp_path / "data" / "val" / "fox")
    refusal(lambda: evaluated(*given), "class 'fox', which is not among those trained on (cat, dog)")
    refusal(lambda: evaluated(*given[:1], f"data.path={tmp_path / 'moved'}"), "moved has no folder validation")


def test_a_run_that_is_made_longer_has_the_rates_of_the_longer_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of timm's schedule, too, which keeps the number of steps, and would go on at a rate of 0. And what it says and leaves."""
    given = (*TINY, "training.warmup_steps=2", "trainer.log_every_n_steps=1")
    for name, number in (("whole", 6), ("run", 3)):
        assert train(compose(*given, f"output_dir={tmp_path / name}", f"trainer.max_steps={number}")) == 0
    capsys.readouterr()
    assert train(compose(f"resume={tmp_path / 'run'}", "trainer.max_steps=6")) == 0
    said = capsys.readouterr().out
    assert all(words in said for words in ("scikit-learn's digits", "GFLOPs per image of 64 tokens", "from step 3", "top-1"))
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"checkpoints", "run.yaml", "metrics.csv", "loss_curve.png"}
    assert list(column(tmp_path / "run", "validation/top1")) == [3, 6] and steps(tmp_path / "run")[0] == 6
    whole, run = (list(column(tmp_path / name, "lr").values()) for name in ("whole", "run"))
    assert run[3:] == whole[3:] and run[-1] > 0


@pytest.mark.parametrize(("command", "message"), [
    (("eval", "checkpoint={a}", "split=train"), "split=train is for text"),
    (("eval", "checkpoint={a}", "data.path=/nowhere"), "data.path does not apply"),
    (("eval", "checkpoint=[{a},{text}]"), "a is a model of images, and text one of text: evaluate"),
    (("eval", "checkpoint={text}", "data.validation_split=val"), "data.validation_split does not apply"),
    (("predict", "checkpoint={text}", "source={a}"), "is a language model"),
    (("predict", "checkpoint={a}"), "no pictures are given"),
    (("predict", "checkpoint={a}", "source=/nowhere"), "does not exist"),
    (("predict", "checkpoint={a}", "source=/nowhere", "output_dir={a}/metrics.csv"), "cannot be written"),  # told first
    (("predict", "checkpoint={a}", "source={a}/checkpoints"), "holds no pictures"),
    (("predict", "checkpoint={a}", "source={a}", "top=0"), "top=0 is not allowed"),
    (("generate", "checkpoint={a}"), "model for images"), (("export", "source={a}", "target={a}/x"), "model for images"),
    (("adapt", "checkpoint={a}", "data.path={a}"), "model for images"),
    (("train", "model=vision_transformer", "data=digits", "model.img_size=8", "model.patch_size=1", "model.in_chans=1", "dim=16",
      "output_dir={a}/other"), "AdamW is not for images: set training=timm"),
])  # fmt: skip
def test_refusals_are_a_line_or_two(runs: Path, command: tuple[str, ...], message: str, told: Callable[..., str]) -> None:
    assert message in told(*(word.format(a=runs / "a", text=runs / "text") for word in command))
