"""Images from folders, tar files, WebDataset and Hugging Face datasets: what is read, in which order, augmented how,
and refused."""

import io
import itertools
import shutil
import tarfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import numpy as np
import pytest
import timm.data
import torch
import torch.nn.functional as F
from PIL import Image
from processes_for_tests import two_processes
from refusals_for_tests import refusal
from runs_for_tests import Killed, after_step, column, log, steps
from torch import Tensor

from metattt.checkpoints.trained import read_checkpoint
from metattt.cli import main
from metattt.composition.compose import compose
from metattt.data.base import Place
from metattt.data.images import NO_LABEL, CheckedImages, CorruptImage, ImageData
from metattt.data.sources import check_pictures
from metattt.models.timm import create
from metattt.models.vision import ImageTransformer
from metattt.training.image_module import ImageClassification, ImageJob
from metattt.training.recipes import TimmRecipe
from metattt.training.train import train

SMALL = ("dim=16", "num_heads=2", "model.depth=1", "trainer.accelerator=cpu", "trainer.log_every_n_steps=1")
COUNT = 5  # images of a class and split


def png(value: int) -> bytes:
    """A grey image of one shade, which survives cropping and flipping."""
    file = io.BytesIO()
    Image.fromarray(np.full((20, 30, 3), value, np.uint8)).save(file, "png")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Train and validation images; the n-th training image has the shade 10 n."""
    for split, kind, index in itertools.product(("train", "validation"), (0, 1), range(COUNT)):
        place = tmp_path / "images" / split / ("cat", "dog")[kind]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{index}.png").write_bytes(png(10 * (kind * COUNT + index)))
    return tmp_path / "images"


def small(folder: Path, **options: object) -> ImageData:
    return ImageData(**{"path": str(folder), "img_size": 16, "batch_size": 4, "num_workers": 0} | options)  # type: ignore[arg-type]


def ready(data: ImageData) -> ImageData:
    data.setup()
    return data


def shades(images: Tensor) -> list[int]:
    """Which images of `folder` a batch holds."""
    return [round(((value + 1) * 127.5 / 10).item()) for value in images.mean((1, 2, 3))]


def on(data: Any, rank: int, world_size: int, step: int = 0, max_steps: int = 6) -> Any:
    """The data module in one process of a run."""
    data.place = Place(rank, world_size, step, max_steps)
    return data


# -- sources -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "grey", "tar", "hugging_face", "torchvision"])
def test_every_kind_of_source_is_read(kind: str, folder: Path, tmp_path: Path) -> None:
    data, channels = small(folder), 3
    if kind == "grey":
        data, channels = small(folder, in_chans=1), 1
    elif kind == "tar":
        with tarfile.open(tmp_path / "train.tar", "w") as archive:
            for file in sorted((folder / "train").rglob("*.png")):
                archive.add(file, file.relative_to(folder / "train"))
        data = small(tmp_path / "train.tar", validation_path=str(folder))
    elif kind == "hugging_face":
        pytest.importorskip("datasets")
        data = small(tmp_path / "cache", dataset=f"hfds/{folder}")
    elif kind == "torchvision":
        data = small(folder, dataset="torch/image_folder")
    data.setup()
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (4, channels, 16, 16) and images.abs().max() <= 1
    assert labels.tolist() == [shade // COUNT for shade in shades(images)]
    assert sum(len(labels) for _, labels in data.val_dataloader()) == 2 * COUNT
    assert data.num_classes == 2 and "10 images to train, 10 to validate" in data.describe()
    other = small(folder, dataset=data.dataset, path=data.path, validation_path=data.validation_path, in_chans=channels)
    other.known_classes = ["dog", "mouse", "cat"]  # of a trained model
    other.setup("validate")
    labels = torch.cat([labels for _, labels in other.val_dataloader()])
    assert labels[labels != NO_LABEL].tolist() == [2] * COUNT + [0] * COUNT and other.class_names == other.known_classes


class Stream(list[tuple[int, int]]):
    class_to_idx = {"cat": 0, "dog": 1}  # noqa: RUF012


def test_validation_images_have_the_class_numbers_of_training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(folder / "validation" / "cat")
    data = ready(small(folder))
    assert {label for _, labels in data.val_dataloader() for label in labels.tolist()} == {1}
    for split in ("validation", "train"):  # a class renamed in one split, then in both
        (folder / split / "dog").rename(folder / split / "fox")
        if split == "validation":
            refusal(lambda: ready(small(folder)), "class 'fox', which is not among those trained on (cat, dog)")
    assert data.fingerprint() != ready(small(folder)).fingerprint()  # which resume compares
    stream = timm.data.IterableImageDataset("", reader=Stream([(0, 0), (0, 1)]))
    monkeypatch.setattr("timm.data.create_dataset", lambda *_, **__: stream)
    data = small(folder)
    data.known_classes = ["dog", "mouse", "cat"]
    data.setup("validate")
    assert [label for _, label in stream] == [2, 0]  # type: ignore[attr-defined]
    monkeypatch.setattr(Stream, "class_to_idx", {"a": 0, "A": 1})  # timm's numbers of such names differ between processes
    data = ready(small(folder, batch_size=1))
    assert data.class_names == ["A", "a"] and [label for _, label in stream] == [1, 0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("dataset", ["", "torch/image_folder"])
def test_every_kind_of_image_file_is_read(dataset: str, folder: Path) -> None:
    """Grey of 16 bits is scaled; of that with more, nothing says which value is white."""
    place = folder / "validation" / "cat"
    shutil.rmtree(place.parent / "dog")
    for number, suffix in enumerate(("webp", "BMP", "tif", "gif", "jp2")):
        (place / f"{number}.png").unlink()
        Image.fromarray(np.full((20, 30, 3), 10 * number, np.uint8)).save(place / f"{number}.{suffix}")
    for number, (kind, suffix) in enumerate((("<u2", "png"), (">u2", "tif"), ("<u2", "ppm")), 5):
        Image.fromarray(np.full((20, 30), 10 * number * 257, kind)).save(place / f"{number}.{suffix}")
    data = ready(small(folder, dataset=dataset, in_chans=1, batch_size=8))
    assert shades(next(iter(data.val_dataloader()))[0]) == list(range(8))
    for kind, message in (("int32", "32-bit grey"), ("float32", "floating-point grey")):
        Image.fromarray(np.zeros((20, 30), kind)).save(place / "0.tif")
        data = small(folder, dataset=dataset)
        refusal(lambda data=data: list(ready(data).val_dataloader()), f"cat/0.tif cannot be read ({message} has no known white")


def test_webdataset_is_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    webdataset = pytest.importorskip("webdataset")
    from timm.data.readers.reader_wds import ReaderWds

    for split in ("train", "validation"):
        with webdataset.TarWriter(str(tmp_path / f"{split}-0.tar")) as archive:
            for number in range(2 * COUNT):
                archive.write({"__key__": f"{number}", "png": png(10 * number), "cls": number // COUNT})
    splits = {f"{split}_split": f"{split}-0.tar|{2 * COUNT}" for split in ("train", "validation")}
    data = ready(small(tmp_path, dataset="wds/own", batch_size=5, **splits))
    for _ in range(2):  # the first pass, and the next
        batches = list(data.train_dataloader())
        assert sorted(shade for images, _ in batches for shade in shades(images)) == list(range(2 * COUNT))
    assert [len(labels) for _, labels in data.val_dataloader()] == [5, 5]
    with monkeypatch.context() as patch:  # one of two processes, which has no file to itself
        for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 1)):
            patch.setattr(f"torch.distributed.{name}", lambda value=value: value)
        found = ready(small(tmp_path, dataset="wds/own", batch_size=5, **splits)).val_dataloader()
    assert [len(labels) for _, labels in found] == [5, 5] and data.streamed

    def noted(self: Any, begin: Any = ReaderWds.__iter__) -> Any:
        with (tmp_path / "passes").open("a") as file:
            file.write(f"{self.epoch_count.value} " if self.is_training else "")
        return begin(self)

    monkeypatch.setattr(ReaderWds, "__iter__", noted)
    given = ("data.dataset=wds/own", *(f"data.{key}={value}" for key, value in splits.items()), "data.num_workers=1")
    given += ("data.batch_size=2", "trainer.accumulate_grad_batches=2")
    assert main(["train", *settings(tmp_path, tmp_path / "run", *given, "trainer.max_steps=3")]) == 0  # two passes
    assert main(["train", f"resume={tmp_path / 'run'}", "trainer.max_steps=6"]) == 0
    assert sorted(column(tmp_path / "run", "train/loss")) == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "passes").read_text() == "0 1 2 3 "  # also where a worker begins before the pass does


# -- order -------------------------------------------------------------------------------------------------------------


def test_the_order_depends_on_the_seed_and_the_step_alone(folder: Path) -> None:
    def run(step: int = 0, rank: int = 0, world_size: int = 1, **options: object) -> list[list[int]]:
        data = on(ready(small(folder, batch_size=4 // world_size, **options)), rank, world_size, step)
        return [shades(images) for images, _ in data.train_dataloader()]

    whole = run()
    assert len(whole) == 6 and run() == whole != run(seed=1)
    seen = list(itertools.chain(*whole))
    assert sorted(seen[:10]) == sorted(seen[10:20]) == list(range(10)) and seen[:10] != seen[10:20]  # no image is dropped
    assert run(step=2) == whole[2:]
    assert [a + b for a, b in zip(run(rank=0, world_size=2), run(rank=1, world_size=2), strict=True)] == whole


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:the image .*/dog/1.png cannot be read")
def test_every_image_is_validated_once(folder: Path, world_size: int) -> None:
    (folder / "validation" / "dog" / "1.png").write_bytes(b"no image")  # number 6
    found, batches = [], set()
    for rank in range(world_size):
        loader = list(on(ready(small(folder, batch_size=3, corrupt="skip")), rank, world_size).val_dataloader())
        batches.add(len(loader))
        pairs = [pair for images, labels in loader for pair in zip(shades(images), labels, strict=True)]
        found += [shade for shade, label in pairs if label != NO_LABEL]
    assert sorted(found) == [0, 1, 2, 3, 4, 5, 7, 8, 9] and len(batches) == 1


# -- augmentation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", ["imagenet_patch", "imagenet_pixel"])
def test_augmentation_of_the_paper(experiment: str, folder: Path) -> None:
    """Random crops for both; flips and RandAugment(2, 10) for patches alone; the shorter side to 256, then a centre
    crop of 224."""
    cfg = compose(f"experiment={experiment}", f"data.path={folder}", "data.batch_size=2", "data.num_workers=0")
    data = ready(hydra.utils.instantiate(cfg.data))
    training, validation = (str(one.dataset.transform) for one in (data.train_dataloader(), data.val_dataloader()))
    assert "RandomResizedCropAndInterpolation(size=(224, 224), scale=(0.05, 1.0)" in training and "bilinear" in training
    patches = experiment == "imagenet_patch"
    assert ("RandomHorizontalFlip(p=0.5)" in training) == ("RandAugment(n=2" in training) == patches
    assert training.count("p=1.0, m=10") == (15 if patches else 0)
    assert "Resize(size=256, interpolation=bilinear" in validation and "CenterCrop(size=(224, 224))" in validation
    for transform in (training, validation):
        assert "mean=tensor([0.5000, 0.5000, 0.5000]), std=tensor([0.5000, 0.5000, 0.5000])" in transform


def test_mixup_mixes_images_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = create("vit_digits_pixel", "linear_attention_image", depth=1)
    module, seen = ImageClassification(model, TimmRecipe(mixup=0.2), {}), {}
    module.trainer = SimpleNamespace(accumulate_grad_batches=2)  # type: ignore[assignment]
    model.register_forward_pre_hook(lambda _, args: seen.update(images=args[0]))
    plain = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda y, labels, **how: seen.update(labels=labels) or plain(y, labels, **how))
    np.random.seed(2)
    images, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3])
    module.training_step((images.clone(), labels), 0)
    share = seen["labels"][0, 0]
    assert 0 < share < 1
    torch.testing.assert_close(seen["images"], share * images + (1 - share) * images.flip(0))
    one_hot = F.one_hot(labels, 10)
    torch.testing.assert_close(seen["labels"], share * one_hot + (1 - share) * one_hot.flip(0))
    job: Any = object.__new__(ImageJob)  # with a recipe of one's own, whose configuration has no key mixup
    job.cfg = compose("experiment=digits_pixel", *SMALL)
    del job.cfg.training
    job.data = SimpleNamespace(class_names=None, evaluation=None, fingerprint=str, batch_size=5)
    job.module(model, TimmRecipe(mixup=0.2))
    monkeypatch.setattr(ImageJob.__base__, "prepare", lambda *_: None)
    refusal(lambda: job.prepare(None), "training.mixup=0.2 mixes pairs of images, and a batch has 5")
    module.read((images[:1], torch.tensor([NO_LABEL])))  # for the inner loops alone: not mixed, and without a label
    assert torch.equal(seen["images"], images[:1])


# -- training ----------------------------------------------------------------------------------------------------------


def settings(folder: Path, run: Path, *overrides: str) -> tuple[str, ...]:
    return (
        "experiment=imagenet_patch/mttt_mlp", *SMALL, f"data.path={folder}", "data.img_size=32", "model.img_size=32", "data.batch_size=4",
        "data.num_workers=0", "trainer.max_steps=4", "training.warmup_steps=1", f"output_dir={run}", "model.num_classes=2", *overrides,
    )  # fmt: skip


def test_a_folder_trains_and_settings_of_imagenet_that_it_keeps_are_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(compose(*settings(folder, tmp_path / "run", "trainer.precision=bf16-mixed"))) == 0
    assert (tmp_path / "run" / "loss_curve.png").is_file()
    assert not any(word in capsys.readouterr().out for word in ("warm-up", "classes"))
    given = ("training.warmup_steps=10000", "model.num_classes=1000", "trainer.max_steps=1")
    assert train(compose(*settings(folder, tmp_path / "other", *given))) == 0
    said = capsys.readouterr().out
    assert "training.warmup_steps=10000" in said and "model.num_classes=2 leaves none over" in said


def test_weights_go_on_with_other_classes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The classifier begins anew, which is said; of the rest every tensor is taken, or nothing is."""
    assert train(compose(*settings(folder, tmp_path / "run", "model.num_classes=3"))) == 0
    start = (f"init_from={tmp_path / 'run'}", "training.lr=1e-12", "trainer.max_steps=1")
    capsys.readouterr()
    assert train(compose(*settings(folder, tmp_path / "other", *start))) == 0
    assert "num_classes 2 (there 3), a new classifier" in " ".join(capsys.readouterr().out.split())
    before, after = (read_checkpoint(tmp_path / name)["state_dict"] for name in ("run", "other"))
    torch.testing.assert_close({x: after[x] for x in after if "logits" not in x}, {x: before[x] for x in after if "logits" not in x})
    refusal(lambda: train(compose(*settings(folder, tmp_path / "wide", *start, "dim=32"))), "does not fit this model")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_ended_early_goes_on_with_augmentation(
    workers: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crops, flips, RandAugment and mixup of a step, and a layer that draws, do not depend on when the run was begun. A kill
    costs what was done since the last checkpoint, an image that cannot be read no step."""
    for file in folder.glob("train/*/*.png"):
        Image.fromarray(np.random.default_rng(ord(file.stem)).integers(0, 256, (40, 40, 3), np.uint8)).save(file)
    read, count = CheckedImages.__getitem__, itertools.count(1)

    def damaged(self: CheckedImages, index: int) -> Any:
        if next(count) == 3 * 4 + 2:
            raise CorruptImage("CorruptImage: 4.png cannot be read")
        return read(self, index)

    often = ("callbacks.checkpoint.every_steps=1", "trainer.val_check_interval=1") if workers else ()
    given = (*often, "resume=auto")
    assert train(compose(*settings(folder, tmp_path / "a", *given, f"data.num_workers={workers}"))) == 0
    with monkeypatch.context() as patch:
        after_step(patch, 2) if workers else patch.setattr(CheckedImages, "__getitem__", damaged)
        with pytest.raises(Killed if workers else CorruptImage):
            train(compose(*settings(folder, tmp_path / "b", *given, f"data.num_workers={workers}")))
    assert steps(tmp_path / "b") == ([1] if workers else [3])
    assert train(compose(*settings(folder, tmp_path / "b", *given, f"data.num_workers={2 - workers}"))) == 0
    assert log(tmp_path / "a") == log(tmp_path / "b")
    data = [on(ready(small(folder, augment="rand-m10-n2-p1", num_workers=count)), 0, 1) for count in (0, workers)]
    torch.testing.assert_close(*(list(each.train_dataloader()) for each in data), rtol=0, atol=0)


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    given = ("experiment=digits_pixel/mttt_mlp", *SMALL, "trainer.max_steps=4", "training.warmup_steps=1", "trainer.val_check_interval=2")
    assert train(compose(*given, f"output_dir={tmp_path / 'one'}")) == 0
    codes, output = two_processes(tmp_path, *given, f"output_dir={tmp_path / 'two'}", "trainer=ddp")
    assert codes == [0, 0] and "Warning" not in output and output.count("4 steps of") == 1 and "2 processes" in output, output
    rows = [log(tmp_path / name) for name in ("one", "two")]
    logs = [[{name: float(value or 0) for name, value in row.items() if "inner_loss" not in name} for row in each] for each in rows]
    assert len(logs[1]) == 6 and logs[0] == [pytest.approx(row, rel=1e-4) for row in logs[1]]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_file_is_named(folder: Path, workers: int) -> None:
    broken = folder / "train" / "dog" / "1.png"
    broken.write_bytes(broken.read_bytes()[:50])
    data = ready(small(folder, batch_size=10, num_workers=workers))
    refusal(lambda: list(data.train_dataloader()), "dog/1.png cannot be read ", "data.corrupt=skip", lines=1)
    with pytest.warns(UserWarning, match=r"dog/1\.png cannot be read"):
        found = shades(next(iter(ready(small(folder, batch_size=10, corrupt="skip")).train_dataloader()))[0])
    assert sorted(found) == [0, 1, 2, 3, 4, 5, 7, 7, 8, 9]


def test_images_that_cannot_be_found(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cases = {
        "set data.path=": ImageData(),
        "data.path=pipe:touch ran;# is not allowed": small(folder, path="pipe:touch ran;#", dataset="wds/own"),
        "missing does not exist": small(tmp_path / "missing"),
        "no train images can be read": small(tmp_path / "empty"),
        "fewer than data.batch_size=11": small(folder, batch_size=11),
    }
    for message, data in cases.items():
        refusal(data.setup, message)
    for options in ({"in_chans": 2}, {"min_area": 0.0}, {"img_size": 0}, {"corrupt": "ignore"}):
        refusal(partial(small, folder, **options))


@pytest.mark.parametrize("dataset", ["", "torch/image_folder"])
def test_a_split_is_never_the_whole_folder(dataset: str, folder: Path, tmp_path: Path) -> None:
    misspelt = small(folder, dataset=dataset, validation_split="vall")
    refusal(misspelt.setup, "has no folder vall (it has train, validation): ", "validation_split=")
    train, held_out = folder / "train", folder / "validation"
    for given in ({}, {"validation_path": str(train)}):
        data = small(train, dataset=dataset, **given)
        refusal(data.setup, "has no folder train (it has cat, dog): ", " data.validation_path=")
    data = ready(small(train, dataset=dataset, validation_path=str(held_out)))  # the folders of the classes themselves
    assert "10 images to train, 10 to validate" in data.describe()
    held_out.rename(folder / "held_out")
    refusal(lambda: ready(small(folder, dataset=dataset)), "has no folder validation (it has held_out, train)")
    assert ready(small(folder, dataset=dataset, validation_split="held_out")).num_classes == 2


def test_folders_in_the_folder_of_a_class(folder: Path, tmp_path: Path) -> None:
    for place in sorted(folder.glob("*/*")):
        place.rename(folder / "2020")
        place.mkdir()
        (folder / "2020").rename(place / "2020")
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(folder, "")
    for data in (small(folder), small(tmp_path / "all.tar", validation_path=str(folder))):
        refusal(data.setup, "in folders of ", "train/cat and of ", "/dog: ", "torch/image_folder")
    assert ready(small(folder, dataset="torch/image_folder")).class_names == ["cat", "dog"]
    shutil.rmtree(folder / "validation")
    shutil.copytree(folder / "train" / "cat" / "2020", folder / "validation")
    for data in (small(folder), small(folder / "train", validation_path=str(folder / "validation"))):
        data.known_classes = ["cat", "dog"]
        refusal(partial(data.setup, "validate"), "images are in ", "validation itself: give each class a folder in it")


@pytest.mark.parametrize(("image", "label", "value"), [("img", "label", 0), ("image", "fine_label", 1), ("image", "label", "cat")])
def test_columns_of_other_names(image: str, label: str, value: Any, folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({image: [str(folder / "train" / "cat" / "0.png")] * 4, label: [value] * 4})
    (tmp_path / "hub").mkdir()
    for split in ("train", "validation"):
        rows.cast_column(image, datasets.Image()).to_parquet(tmp_path / "hub" / f"{split}.parquet")
    here = partial(small, tmp_path / "cache", dataset=f"hfds/{tmp_path / 'hub'}")
    said = refusal(here().setup, f"has the columns {image}, {label}, and needs pictures and ", "set data.image_key=", lines=2)
    streamed = SimpleNamespace(builder=SimpleNamespace(info=rows.info))
    assert refusal(lambda: check_pictures(here().dataset, streamed, "image", "label")) == said
    if value != "cat":
        assert ready(here(image_key=image, label_key=label))._datasets["train"][0][1] == value


@pytest.mark.parametrize(("overrides", "message"), [
    (("data.num_workers=1",), "dog/1.png cannot be read"),
    (("data.image_key=img",), "folders have no columns: leave data.image_key and data.label_key out"),
    (("model.img_size=64",), "the images have img_size=32, and the model takes 64: set model.img_size=32"),
    (("model.img_size=64", "model.in_chans=1"), "the model takes 64 and 1: set model.img_size=32 model.in_chans=3"),
    (("model.patch_size=5",), "model.patch_size=5 does not divide model.img_size=32: choose from 1, 2, 4, 8, 16, 32"),
    (("model.num_classes=1",), "the images have 2 classes and the model 1: set model.num_classes=2"),
    (("data.batch_size=5",), "training.mixup=0.2 mixes pairs of images, and a batch has 5 of them"),
    (("data.augment=none",), "data.augment=none is not known to timm"),
    (("trainer=fsdp", "trainer.devices=1"), "trainer=fsdp is for text"),
    (("trainer=ddp", "trainer.devices=3"), "4 images per step, which 3 processes cannot share equally"),
    (("batch_tokens=64",), "batch_tokens is for text"),
])  # fmt: skip
def test_refusals_are_a_line_or_two(
    overrides: tuple[str, ...], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train" / "dog" / "1.png").write_bytes(b"no image")
    assert main(["train", *settings(folder, tmp_path / "run", *overrides)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("step ")]
    assert 1 <= len(lines) <= 2 and lines[0].startswith("error: ") and message in lines[0]


def test_labels_that_the_model_does_not_know() -> None:
    module = ImageClassification(create("vit_digits_pixel", "linear_attention_image", depth=1), TimmRecipe(), {})
    assert isinstance(module.model, ImageTransformer)
    batch = torch.randn(2, 1, 8, 8), torch.tensor([0, 10])
    for step in (module.training_step, module.validation_step):
        refusal(partial(step, batch, 0), "an image has the label 10, and the model has 10 classes")
