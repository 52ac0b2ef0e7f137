"""Images for classification: folders, tar files, WebDataset and Hugging Face datasets, read and augmented by timm."""

from __future__ import annotations

import hashlib
import json
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from metattt.composition.messages import first_line
from metattt.data.base import Data, ReadError
from metattt.data.sources import check_pictures, in_order, names_of_classes
from metattt.data.windows import PlacedBatches, batches_in_order
from metattt.errors import MetaTTTError
from metattt.io import path_of
from metattt.optional import need
from metattt.registry import register
from metattt.setting import setting

if TYPE_CHECKING:
    from PIL import Image

Batch = tuple[Tensor, Tensor]  # images [B, C, h, w] in [−1, 1], labels [B]
NO_LABEL = -1  # of an image that fills up a batch, or stands for one that cannot be read; it counts nowhere


class Images(Data):
    """What every source of labelled images tells the training job.

    Attributes:
        img_size: height and width (pixels).
        in_chans: channels.
        evaluation: how a picture becomes an image of the validation split, as timm says it: `crop_pct` and
            `interpolation`. It is saved with a run; None: not known, and `metattt predict` refuses the run.
        known_classes: names of classes by the numbers that labels shall have, those of a trained model; set before
            `setup`. None: the source numbers its training images itself.
    """

    trained_by = "metattt.training.image_module:ImageJob"
    scored_by = "metattt.evaluation.images"
    img_size: int = setting(init=False)
    in_chans: int = setting(init=False)
    evaluation: Mapping[str, Any] | None = None
    known_classes: Sequence[str] | None = None

    @property
    def streamed(self) -> bool:
        """The training images come as a stream: a resumed run begins its pass again."""
        return False

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None if the source does not say."""
        return None if self.class_names is None else len(self.class_names)

    @property
    def class_names(self) -> list[str] | None:
        """The names of the classes by their numbers; None if the source does not say."""
        return None

    def fingerprint(self) -> str | None:
        names = self.class_names
        named = "" if names is None else f" {hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]}"
        return self.describe().rpartition(": ")[2] + f", {self.num_classes} classes{named}"  # numbers, and the names

    def test_dataloader(self) -> DataLoader[Batch]:
        """Images that neither training nor validation reads, in order; a source that keeps none raises an error."""
        raise MetaTTTError("these images have no split test: only data=digits keeps some, with data.test_fraction=0.2")


class CorruptImage(ReadError):
    """An image file that cannot be read."""


def image_suffixes() -> list[str]:
    """Has timm read every kind of image file that PIL reads, and returns their suffixes: `.bmp`, `.gif`, ..."""
    timm: Any = need("timm.data", extra="images", what="reading images")
    pillow: Any = need("PIL.Image", extra="images", what="reading images")
    kinds = pillow.registered_extensions().items()
    images = {kind for kind in pillow.OPEN if pillow.MIME.get(kind, "").startswith("image/")}  # not HDF5, PostScript
    timm.add_img_extensions(sorted(suffix for suffix, kind in kinds if kind in images))
    return sorted(timm.get_img_extensions())


def in_colours(image: Image.Image, mode: str) -> Image.Image:
    """A picture in other colours. Grey values of 16 bits are scaled to 8: PIL would clip them at 255.

    Args:
        image: the picture `[h, w]`.
        mode: PIL's name of the colours: `RGB`, `L`.

    Raises:
        MetaTTTError: grey values of 32 bits or floating point, of which nothing says which is white.
    """
    of_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if of_16_bits:
        pillow: Any = need("PIL.Image", extra="images", what="reading images")
        image = pillow.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    elif image.mode in ("I", "F"):
        kind = "32-bit" if image.mode == "I" else "floating-point"
        raise MetaTTTError(f"{kind} grey has no known white: save it with 8 or 16 bits")
    return image.convert(mode)


class CheckedImages(Dataset[tuple[Any, int]]):
    """Images of timm or torchvision by number, where one that cannot be read is named, and refused or skipped.

    Number −1 is some image with `NO_LABEL`. For a pair `(number, place)`, the random numbers of its augmentation follow
    from the seed and its place in the run alone, whatever reads it and whenever.

    Args:
        dataset: timm's dataset with a reader, or torchvision's, of pairs (image, label).
        mode: PIL's name of the colours: `RGB`, `L`.
        corrupt: `error`, or `skip` to take the next image instead, with a warning, and without a label in evaluation.
        labels: label of the data set -> number of the class, where they differ.
        seed: of the augmentation.
    """

    def __init__(self, dataset: Any, mode: str, corrupt: str, labels: Mapping[int, int], seed: int):
        self.dataset, self.mode, self.corrupt, self.labels, self.seed = dataset, mode, corrupt, labels, seed
        self.reader = getattr(dataset, "reader", None)
        self.transform: Callable[[Image.Image], Any] | None = None  # set by timm's loader

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int | tuple[int, int]) -> tuple[Any, int]:
        number, place = index if isinstance(index, tuple) else (index, None)
        found, image, label = self._read(max(0, number))
        if self.transform is not None:
            with nullcontext() if place is None else _random_numbers(self.seed, place):
                image = self.transform(image)
        return image, label if place is not None or found == number else NO_LABEL  # each is evaluated once

    def _read(self, index: int) -> tuple[int, Image.Image, int]:
        for attempt in range(len(self)):
            place = (index + attempt) % len(self)
            try:
                if self.reader is None:
                    image, label, *_ = self.dataset[place]
                else:
                    file, label, *_ = self.reader[place]
                    image = need("PIL.Image", extra="images", what="reading images").open(file)
                return place, in_colours(image, self.mode), self.labels.get(int(label), int(label))
            except Exception as error:  # each format's decoder has errors of its own
                message = f"the image {self._name(place)} cannot be read ({first_line(error)})"
                if self.corrupt == "error":
                    raise CorruptImage(f"{message}: remove it, or set data.corrupt=skip") from error
                warnings.warn(f"{message}: skipped", stacklevel=2)
        raise CorruptImage("no image of the data set can be read")

    def _name(self, index: int) -> str:
        try:
            name = self.dataset.samples[index][0] if self.reader is None else self.reader.filename(index, absolute=True)
            return str(name or f"number {index}")
        except Exception:  # a reader without file names, or one that has to decode the image to know
            return f"number {index}"


@contextmanager
def _random_numbers(*key: int) -> Iterator[None]:
    """A context in which the random numbers of Python, numpy and torch follow from a key; those of the run go on
    afterwards."""
    before, of_numpy = random.getstate(), np.random.get_state()
    seed = int(np.random.SeedSequence(key).generate_state(1)[0])
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        random.setstate(before)
        np.random.set_state(of_numpy)


@register(group="data", name="images")
class ImageData(Images, takes=("path", "dataset", "validation_path", "batch_size", "num_workers", "seed")):
    """Images in any form that timm reads, with the augmentation of the MTTT paper (arXiv 2310.13807, Sec. 5).

    Args:
        path: folder with `train` and `validation` or `val` inside, and in these a folder for each class; the root or
            cache of other kinds. With `validation_path` also the folder of the classes itself, or a tar file.
        dataset: timm's name of another kind: `wds/<name>`, `hfds/<user>/<name>`, `hfids/<user>/<name>` (streamed),
            `tfds/<name>`, `torch/<name>`. Empty: a folder or tar.
        validation_path: folder or tar file of the validation images, if they are not inside `path`. Their classes are
            numbered as those of the training images, by their names; some may be missing.
        image_key, label_key: columns of a dataset of the Hub with the pictures and the numbers of their classes (`img`
            and `label` of CIFAR-10); None: `image` and `label`. Of WebDataset and TFDS: timm's `input_key`,
            `target_key`.
        train_split, validation_split: names of the splits; for WebDataset also files and their number of images,
            `train-{0000..1023}.tar|1281167`.
        img_size: height and width after cropping (pixels).
        in_chans: 3 for colour, 1 for grey.
        batch_size: images per batch, over all processes; in a run, each process takes its share.
        num_workers: processes that read images.
        min_area: smallest share of the area that a random crop takes.
        flip: flip half of the training images.
        augment: timm's name of an augmentation, `rand-m10-n2-p1` for RandAugment(2, 10); None for none.
        corrupt: a file that cannot be read is an `error`, or `skip` warns: training takes the next image, validation
            leaves it out. Grey of 32 bits or floating point is such a file; 16 bits are scaled to 8. (Streams are up
            to timm.)
        seed: of the order of the images.

    Raises:
        MetaTTTError: a value that is not allowed; from `setup`: no images, or fewer than a batch; no folder of a
            split; a validation class that is not among those of training; folders of classes that are not side by
            side (`dataset=torch/image_folder` takes the topmost).
    """

    evaluation = {"crop_pct": 0.875, "interpolation": "bilinear"}  # noqa: RUF012 (nobody changes it)

    path: str | None = setting(default=None)
    dataset: str = setting(default="")
    validation_path: str | None = setting(default=None)
    image_key: str | None = setting(default=None)
    label_key: str | None = setting(default=None)
    train_split: str = setting(default="train")
    validation_split: str = setting(default="validation")
    img_size: int = setting(default=224, most=2**13)
    in_chans: Literal[1, 3] = setting(default=3)
    batch_size = 1024
    num_workers = 8
    min_area: float = setting(default=0.05, above=0, most=1)
    flip: bool = setting(default=True)
    augment: str | None = setting(default=None)
    corrupt: Literal["error", "skip"] = setting(default="error")

    def check_settings(self) -> None:
        self.timm: Any = need("timm.data", extra="images", what="data=images")
        super().check_settings()
        if self.augment is not None:
            try:
                self.timm.create_transform(self.img_size, is_training=True, auto_augment=self.augment)
            except Exception as error:  # timm has assertions and lookups, no error of its own
                raise MetaTTTError(
                    f"data.augment={self.augment} is not known to timm: rand-m10-n2-p1, augmix-m3-w3, original, or null"
                ) from error
        self.splits = {"train": self.train_split, "validation": self.validation_split}
        self._datasets: dict[str, Any] = {}
        self._streams_for = (1, self.batch_size)  # processes and batch size that the streams were made for

    def setup(self, stage: str | None = None) -> None:
        """Finds the images, once: of `stage="validate"` only those of validation, if `known_classes` says how to number
        them. Streams are made again when there are several processes: timm then gives each a part of the training
        images."""
        now = (self.place.world_size, self.batch_size)
        if now != self._streams_for and any(isinstance(found, IterableDataset) for found in self._datasets.values()):
            self._datasets.clear()
        self._streams_for = now
        alone = stage == "validate" and self.known_classes is not None
        for name in ("validation",) if alone else self.splits:
            if name not in self._datasets:
                self._datasets[name] = self._dataset(name)
        if not alone and len(self._datasets["train"]) < self.batch_size:
            raise MetaTTTError(
                f"data.path={self.path} has {len(self._datasets['train'])} training images, fewer than "
                f"data.batch_size={self.batch_size}"
            )

    def _dataset(self, name: str) -> Dataset[Any]:
        train, mode = name == "train", "RGB" if self.in_chans == 3 else "L"
        root = self.path if train or self.validation_path is None else self.validation_path
        if root == "" or str(root).startswith("pipe:"):  # WebDataset runs it; below "" a split could be such a command
            raise MetaTTTError(f"data.path={root} is not allowed: give a folder, a tar file or an address, no command")
        if self.path is None and not self.dataset:
            raise MetaTTTError(
                "no images are given: set data.path=<folder or tar file>, or data.dataset=hfds/<name> or wds/<name>"
            )
        folders = self.dataset.lower() in ("", "torch/image_folder", "torch/folder")
        if folders:
            if self.image_key or self.label_key:
                raise MetaTTTError("folders have no columns: leave data.image_key and data.label_key out")
            key = f"data.{'path' if root == self.path else 'validation_path'}"
            root = str(path_of(root, key))
            if not os.path.exists(root):
                raise MetaTTTError(f"{key}={root} does not exist")
        suffixes, options = image_suffixes(), dict[str, Any]()
        if folders and self.dataset:  # torchvision's own would clip 16 bits
            options["loader"] = need("PIL.Image", extra="images", what="data=images").open
            options["is_valid_file"] = lambda file: os.path.splitext(file)[1].lower() in suffixes
        keys = {"input_key": self.image_key, "target_key": self.label_key}
        options |= {key: value for key, value in keys.items() if value is not None}
        try:
            found = self.timm.create_dataset(
                self.dataset, root, split=self.splits[name], is_training=train, batch_size=self.batch_size,
                seed=self.seed, input_img_mode=mode, **options,
            )  # fmt: skip
        except Exception as error:  # whatever the readers of the many formats raise
            raise MetaTTTError(
                f"data.path={root} data.dataset={self.dataset}: no {name} images can be read: {first_line(error)}"
            ) from error
        if self.dataset.lower().startswith(("hfds/", "hfids/")):
            check_pictures(self.dataset, found.reader, self.image_key or "image", self.label_key or "label")
        self._check_folders(name, root, found)
        labels = self._labels(name, root, found)
        streamed = isinstance(found, IterableDataset)
        if streamed and labels:
            found.target_transform = labels.__getitem__
        if streamed and not train:  # every process reads all: timm's shares leave images out and repeat others
            found.reader.dist_rank, found.reader.dist_num_replicas = 0, 1
        return found if streamed else CheckedImages(found, mode, self.corrupt, labels, self.seed)

    def _check_folders(self, name: str, root: Any, found: Any) -> None:
        """Refuses a folder or tar file without the split, of which timm takes the whole, and classes that are not side
        by side, which timm would name after the innermost folders."""
        listing = getattr(found, "reader", found)
        if not hasattr(listing, "samples"):
            return
        if listing.root == root and self.validation_path in (None, self.path):
            inside = sorted(entry.name for entry in os.scandir(root) if entry.is_dir()) if os.path.isdir(root) else []
            raise MetaTTTError(
                f"data.path={root} has no folder {self.splits[name]} (it has {', '.join(inside[:5]) or 'none'}): set "
                f"data.{name}_split=<a folder in it>, or data.validation_path=<folder or tar of the validation images>"
            )
        if names_of_classes(found) == [""]:
            raise MetaTTTError(f"the {name} images are in {listing.root} itself: give each class a folder in it")
        files = [] if listing is found else listing.filenames(absolute=True)
        parents = {os.path.dirname(os.path.normpath(folder)) for folder in set(map(os.path.dirname, files))}
        if len(parents) > 1:
            first, second, *_ = sorted(parents)
            raise MetaTTTError(
                f"the {name} images are in folders of {first or '.'} and of {second}: put the folders of the classes "
                "side by side, or set data.dataset=torch/image_folder, which takes the topmost ones as classes"
            )

    def _labels(self, name: str, root: Any, found: Any) -> dict[int, int]:
        """Label of a data set -> number of the class of that name; empty where they are the same."""
        own = names_of_classes(found)
        known = self.class_names if name != "train" else self.known_classes or in_order(own)
        if own is None or known is None or own == list(known):
            return {}
        numbers = {one: number for number, one in enumerate(known)}
        if unknown := [one for one in own if one not in numbers]:
            listed = ", ".join(known[:5]) + (", ..." if len(known) > 5 else "")
            raise MetaTTTError(
                f"the {name} images of {root} have the class {unknown[0]!r}, which is not among those "
                f"trained on ({listed}): remove or rename it, or set data.validation_path=<images of these classes>"
            )
        return {label: numbers[one] for label, one in enumerate(own)}

    @property
    def streamed(self) -> bool:
        return isinstance(self._datasets["train"], IterableDataset)

    @property
    def class_names(self) -> list[str] | None:
        return list(self.known_classes) if self.known_classes else in_order(names_of_classes(self._datasets["train"]))

    def describe(self) -> str:
        sizes = [len(self._datasets[name]) for name in ("train", "validation")]
        return f"{self.dataset or self.path}: {sizes[0]:,} images to train, {sizes[1]:,} to validate"

    def train_dataloader(self) -> DataLoader[Batch]:
        """Random crops, shuffled, for the whole run from those at `place.done` on; a stream: for an epoch."""
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Batch]:
        """Centre crops as `evaluation` says, a part in each process, of a stream all: the shorter side is 8/7 of the
        crop."""
        return self._loader("validation")

    def _loader(self, name: str) -> DataLoader[Batch]:
        data, centre = self._datasets[name], (0.5,) * self.in_chans
        loader: DataLoader[Batch] = self.timm.create_loader(
            data, (self.in_chans, self.img_size, self.img_size), self.batch_size, is_training=name == "train",
            use_prefetcher=False, scale=(self.min_area, 1.0), hflip=0.5 if self.flip else 0.0, color_jitter=0.0,
            auto_augment=self.augment, mean=centre, std=centre, num_workers=self.num_workers, pin_memory=False,
            persistent_workers=self.num_workers > 0, **self.evaluation,
        )  # fmt: skip
        if isinstance(data, IterableDataset):
            return loader
        order = (
            PlacedBatches(len(data), self.batch_size, self.seed, self.place)
            if name == "train"
            else batches_in_order(len(data), self.batch_size, self.place)
        )
        # timm's, in an order of ours: the same one whatever the processes, and gone on with where a run stopped
        return DataLoader(
            data, batch_sampler=order, num_workers=loader.num_workers, collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn, persistent_workers=loader.persistent_workers,
            generator=torch.Generator(),
        )  # fmt: skip
