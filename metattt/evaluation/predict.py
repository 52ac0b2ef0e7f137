"""`metattt predict`: what a classifier sees in pictures that have no labels."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from torch import Tensor
from torch.utils.data import Dataset

from metattt.checkpoints.files import find_checkpoint, home
from metattt.checkpoints.record import OF_TRAINING, RECORD, modules
from metattt.checkpoints.trained import load_model, open_trained, read_checkpoint
from metattt.composition.settings import NO_CHECKPOINT, pick_device, settings
from metattt.data.base import MOST_ROWS
from metattt.data.images import CorruptImage, ImageData
from metattt.errors import MetaTTTError, check_choice, check_integer
from metattt.evaluation.images import drawn_alike, probabilities
from metattt.evaluation.output import report, table
from metattt.io import path_of
from metattt.optional import need

ROWS = 40  # pictures that the table shows
LONGEST_NAME = 200  # characters of a class


@dataclass
class PredictSettings:
    """The keys of `configs/predict.yaml`."""

    checkpoint: str
    source: str
    top: int = 5
    batch_size: int = 64
    num_workers: int = 0
    corrupt: str = "error"
    device: str = "auto"
    output_dir: str | None = None
    trust: Any = None


class Prediction(NamedTuple):
    """The classes that a picture most likely shows.

    Attributes:
        name: of the picture: its path below the source, or its number.
        classes: their names, the most likely first.
        probabilities: of these.
    """

    name: str
    classes: list[str]
    probabilities: list[float]


class Pictures(Dataset[tuple[Any, int]]):
    """Files of pictures with their numbers; −1 for one that cannot be read.

    Args:
        source: a picture, or a folder of pictures and folders.
        suffixes: of pictures.
        mode: PIL's name of the colours: `RGB`, `L`.
        corrupt: a file that cannot be read is an `error`, or `skip`.

    Raises:
        MetaTTTError: no pictures.
    """

    def __init__(self, source: Path, suffixes: tuple[str, ...], mode: str, corrupt: str):
        if source.is_file():
            self.root, self.files = source.parent, [source]
        elif source.is_dir():
            found = (Path(folder, name) for folder, _, names in os.walk(source) for name in names)
            self.root, self.files = source, sorted(file for file in found if file.suffix.lower() in suffixes)
        else:
            raise MetaTTTError(f"source={source} does not exist: give a picture or a folder of pictures")
        if not self.files:
            raise MetaTTTError(f"source={source} holds no pictures: use {', '.join(suffixes)}")
        self.mode, self.corrupt = mode, corrupt
        self.transform: Callable[[Any], Any] | None = None  # set by timm's loader

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        pillow: Any = need("PIL.Image", extra="images", what="reading pictures")
        try:
            with self.files[index].open("rb") as file:
                image = pillow.open(file).convert(self.mode)
        except Exception as error:  # each format's decoder has errors of its own
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if self.corrupt == "error":
                message = f"{self.files[index]} cannot be read ({reason}): remove it, or set corrupt=skip"
                raise CorruptImage(message) from error
            index, image = -1, pillow.new(self.mode, (8, 8))
        return (image if self.transform is None else self.transform(image)), index

    def name(self, index: int) -> str:
        """The path of a picture below the source."""
        return str(self.files[index].relative_to(self.root))


def predict(cfg: DictConfig) -> list[Prediction]:
    """Prints the likeliest classes of pictures as a table, writes those of all as CSV, and returns them.

    Args:
        cfg: the configuration of the job `predict`.

    Raises:
        MetaTTTError: a checkpoint, pictures or a setting that cannot be used.
    """
    no_pictures = "no pictures are given: add source=<a picture or a folder>"
    chosen = settings(PredictSettings, cfg, checkpoint=NO_CHECKPOINT, source=no_pictures)
    check_choice("corrupt", chosen.corrupt, ("error", "skip"))
    for key, least in (("top", 1), ("batch_size", 1), ("num_workers", 0)):
        check_integer(key, getattr(chosen, key), least, MOST_ROWS)
    trust = modules(chosen.trust)
    file = find_checkpoint(chosen.checkpoint)
    found = open_trained(file, (*OF_TRAINING, "data"), trust)
    if "num_classes" not in found.config.model:
        raise MetaTTTError(f"{chosen.checkpoint} is a language model: metattt predict takes classifiers of images")
    device = pick_device(chosen.device)
    model: Any = load_model(file, device, trust)[0]
    names = class_names(file, model.num_classes)
    if found.evaluation is None:
        raise MetaTTTError(
            f"{file} does not say how its images are resized and cropped: its data has no `evaluation`, which "
            "data=images and data=digits have"
        )
    data, pictures = _data(chosen, model, found.evaluation)
    predictions: list[Prediction] = []
    top, seen = min(chosen.top, model.num_classes), 0
    with drawn_alike(model):
        for images, numbers in track(data.val_dataloader(), "pictures", console=Console(stderr=True), transient=True):
            likeliest = _likeliest(probabilities(model, images), top)
            for number, pairs in zip(numbers.tolist(), likeliest, strict=True):
                if number >= 0:
                    shown, shares = [names[k] for k, _ in pairs], [share for _, share in pairs]
                    predictions.append(Prediction(pictures.name(number), shown, shares))
            seen += len(numbers)
    console = Console(highlight=False, soft_wrap=True)
    _print(console, predictions)
    if seen > len(predictions):
        console.print(f"skipped  {seen - len(predictions)} files that cannot be read")
    with report(chosen.output_dir, home(file) / "predict", "predictions", console) as files:
        columns = ["picture", *(f"{what}_{rank}" for rank in range(1, top + 1) for what in ("class", "probability"))]
        rows = ([one.name, *chain(*zip(one.classes, one.probabilities, strict=True))] for one in predictions)
        files.csv("predictions", columns, rows)
    return predictions


def class_names(file: Path, count: int) -> list[str]:
    """The names of a model's classes by their numbers: those that its run has recorded, else the numbers.

    Args:
        file: the checkpoint.
        count: of the model's classes.
    """
    recorded = read_checkpoint(file, "none")[RECORD].get("classes")
    named = recorded if isinstance(recorded, list) and all(isinstance(name, str) for name in recorded) else []
    shown = ["".join(c if c.isprintable() else "?" for c in name)[:LONGEST_NAME] for name in named[:count]]
    return shown + [str(number) for number in range(len(shown), count)]


def _data(chosen: PredictSettings, model: Any, evaluation: Mapping[str, Any]) -> tuple[ImageData, Pictures]:
    """The pictures as the model takes them: resized and cropped as in validation."""
    data = ImageData(
        chosen.source, img_size=model.patch_embed.img_size[0], in_chans=model.in_chans, batch_size=chosen.batch_size,
        num_workers=chosen.num_workers, corrupt=chosen.corrupt,  # type: ignore[arg-type]
    )  # fmt: skip
    data.evaluation = evaluation
    suffixes = tuple(sorted(data.timm.get_img_extensions()))
    mode = "RGB" if model.in_chans == 3 else "L"
    pictures = Pictures(path_of(chosen.source, "source"), suffixes, mode, chosen.corrupt)
    data.open("validation", pictures)
    return data, pictures


def _likeliest(shares: Tensor, top: int) -> list[list[tuple[int, float]]]:
    found = torch.topk(shares, top, dim=1)
    return [
        list(zip(indices, values, strict=True))
        for indices, values in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    ]


def _print(console: Console, predictions: list[Prediction]) -> None:
    rows = []
    for one in predictions[:ROWS]:
        first, *others = zip(one.classes, one.probabilities, strict=True)
        rest = ", ".join(f"{name} {100 * share:.1f}" for name, share in others)
        rows.append((_plain(one.name), _plain(first[0]), f"{100 * first[1]:.1f}", _plain(rest)))
    shown = table(f"{len(predictions):,} pictures", ("picture", "class", "%", "then"), rows, left=2)
    shown.columns[-1].justify = "left"
    console.print(shown)
    if len(predictions) > ROWS:
        console.print(f"and {len(predictions) - ROWS:,} more in the file")


def _plain(text: str) -> str:
    return escape(text.encode(errors="backslashreplace").decode())
