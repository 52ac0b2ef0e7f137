"""`metattt predict`: what a classifier sees in pictures that have no labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from metattt.checkpoints.files import find_checkpoint, home
from metattt.checkpoints.record import OF_TRAINING, modules
from metattt.checkpoints.trained import load_model, open_trained
from metattt.composition.messages import first_line
from metattt.composition.settings import NO_CHECKPOINT, pick_device, settings
from metattt.data.documents import walk
from metattt.data.images import CorruptImage, image_suffixes, in_colours
from metattt.errors import MetaTTTError
from metattt.evaluation.output import drawn_alike, finite, report, table, tracked, writable
from metattt.io import path_of
from metattt.optional import need

ROWS = 40  # pictures that the table shows
LONGEST_NAME = 200  # characters of a class


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
    """Files of pictures as a model takes them, with their numbers; −1 for one that cannot be read.

    Args:
        files: of the pictures.
        transform: of a picture of PIL.
        mode: PIL's name of the colours: `RGB`, `L`.
        corrupt: a file that cannot be read is an `error`, or `skip`.
    """

    def __init__(self, files: Sequence[Path], transform: Callable[[Any], Tensor], mode: str, corrupt: str):
        self.files, self.transform, self.mode, self.corrupt = files, transform, mode, corrupt

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pillow: Any = need("PIL.Image", extra="images", what="reading pictures")
        try:
            image = in_colours(pillow.open(self.files[index]), self.mode)
        except Exception as error:  # each format's decoder has errors of its own
            if self.corrupt == "error":
                reason = f"cannot be read ({first_line(error)}): remove it, or set corrupt=skip"
                raise CorruptImage(f"{self.files[index]} {reason}") from error
            index, image = -1, pillow.new(self.mode, (8, 8))
        return self.transform(image), index


def predict(cfg: DictConfig) -> list[Prediction]:
    """Prints the likeliest classes of pictures as a table, writes those of all as CSV, and returns them.

    Raises:
        MetaTTTError: a checkpoint, pictures or a setting that cannot be used.
    """
    no_pictures = "no pictures are given: add source=<a picture or a folder>"
    chosen = settings(cfg, checkpoint=NO_CHECKPOINT, source=no_pictures)
    trust = modules(chosen.trust)
    file = find_checkpoint(chosen.checkpoint)
    found = open_trained(file, (*OF_TRAINING, "data"), trust)
    if "num_classes" not in found.config.model:
        raise MetaTTTError(f"{chosen.checkpoint} is a language model: metattt predict takes classifiers of images")
    folder = writable(chosen.output_dir, home(file) / "predict")
    device = pick_device(chosen.device)
    model: Any = load_model(file, device, trust)[0]
    names = class_names(found.classes or [], model.num_classes)
    if found.evaluation is None:
        raise MetaTTTError(
            f"{file} does not say how its images are resized and cropped: its data has no `evaluation`, which "
            "data=images and data=digits have"
        )
    root, files = find_pictures(path_of(chosen.source, "source"))
    timm: Any = need("timm.data", extra="images", what="metattt predict")
    size, centre = (model.in_chans, *model.patch_embed.img_size), (0.5,) * model.in_chans
    transform = timm.create_transform(size, mean=centre, std=centre, **found.evaluation)  # as in validation
    data = Pictures(files, transform, "RGB" if model.in_chans == 3 else "L", chosen.corrupt)
    loader = DataLoader(data, chosen.batch_size, num_workers=chosen.num_workers)
    predictions: list[Prediction] = []
    top, skipped = min(chosen.top, model.num_classes), 0
    with torch.no_grad(), drawn_alike(model):
        for images, numbers in tracked(loader, "pictures"):
            likeliest = finite(model(images.to(device)).float()).softmax(1).topk(top, dim=1)
            rows = zip(numbers.tolist(), likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
            for number, classes, shares in rows:
                if number < 0:
                    skipped += 1
                    continue
                picture = str(files[number].relative_to(root))
                predictions.append(Prediction(picture, [names[k] for k in classes], shares))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    _print(console, predictions)
    if skipped:
        console.print(f"skipped  {skipped} of {len(files)} files: not readable")
    with report(folder, "predictions", console) as made:
        columns = ["picture", *(f"{what}_{rank}" for rank in range(1, top + 1) for what in ("class", "probability"))]
        written = ([one.name, *chain(*zip(one.classes, one.probabilities, strict=True))] for one in predictions)
        made.csv("predictions", columns, written)
    return predictions


def class_names(recorded: Sequence[str], count: int) -> list[str]:
    """The names of a model's classes by their numbers: those that its run has recorded, else the numbers."""
    shown = ["".join(c if c.isprintable() else "?" for c in name)[:LONGEST_NAME] for name in recorded[:count]]
    return shown + [str(number) for number in range(len(shown), count)]


def find_pictures(source: Path) -> tuple[Path, list[Path]]:
    """A folder and the pictures in it and the folders below; or those of one picture.

    Raises:
        MetaTTTError: there are none.
        OSError: a folder that cannot be read.
    """
    if source.is_file():
        return source.parent, [source]
    if not source.is_dir():
        raise MetaTTTError(f"source={source} does not exist: give a picture or a folder of pictures")
    suffixes = image_suffixes()
    files = sorted(file for file in walk(source) if file.suffix.lower() in suffixes and not file.is_fifo())
    if not files:
        raise MetaTTTError(f"source={source} holds no pictures: use {', '.join(suffixes)}")
    return source, files


def _print(console: Console, predictions: list[Prediction]) -> None:
    rows = []
    for one in predictions[:ROWS]:
        said = [f"{name} {100 * share:.1f}" for name, share in zip(one.classes, one.probabilities, strict=True)]
        rows.append([text.encode(errors="backslashreplace").decode() for text in (one.name, ", ".join(said))])
    console.print(table(f"{len(predictions):,} pictures", ("picture", "classes, %"), rows, left=2))
    if len(predictions) > ROWS:
        console.print(f"and {len(predictions) - ROWS:,} more in the file")
