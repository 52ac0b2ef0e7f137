"""Images for classification: folders, tar files, WebDataset and Hugging Face datasets, read and augmented by timm."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from metattt.composition.messages import first_line
from metattt.data.base import Data, ReadError
from metattt.data.windows import ShuffledBatches, batches_in_order
from metattt.errors import MetaTTTError, check_choice
from metattt.io import path_of
from metattt.optional import need
from metattt.registry import register
from metattt.setting import setting

if TYPE_CHECKING:
    from PIL import Image

Batch = tuple[Tensor, Tensor]  # images [B, C, h, w] in [−1, 1], labels [B]
NO_LABEL = -1  # of an image that only fills up a batch, so that every process has as many; it counts nowhere


class Images(Data):
    """What every source of labelled images tells the training job.

    Attributes:
        img_size: height and width (pixels).
        in_chans: channels.
        evaluation: how a picture becomes an image of the validation split, as timm says it: `crop_pct` and
            `interpolation`. It is saved with a run; None: not known, and `metattt predict` refuses the run.
    """

    trained_by = "metattt.training.image_module:ImageJob"
    scored_by = "metattt.evaluation.images"
    img_size: int = setting(init=False)
    in_chans: int = setting(init=False)
    evaluation: Mapping[str, Any] | None = None

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None if the source does not say."""
        return None

    @property
    def class_names(self) -> list[str] | None:
        """The names of the classes by their numbers; None if the source does not say."""
        return None

    def fingerprint(self) -> str | None:
        return self.describe().rpartition(": ")[2] + f", {self.num_classes} classes"  # their number, and the classes

    def test_dataloader(self) -> DataLoader[Batch]:
        """Images that neither training nor validation reads, in order; a source that keeps none raises an error."""
        raise MetaTTTError("these images have no split test: only data=digits keeps some, with data.test_fraction=0.2")


class CorruptImage(ReadError):
    """An image file that cannot be read."""


class CheckedImages(Dataset[tuple[Any, int]]):
    """Images of timm or torchvision by number, where one that cannot be read is named, and refused or skipped.

    Number −1 is some image with `NO_LABEL`.

    Args:
        dataset: timm's dataset with a reader, or torchvision's, of pairs (image, label).
        mode: PIL's name of the colours: `RGB`, `L`.
        corrupt: `error`, or `skip` to take the next image instead, with a warning.
    """

    def __init__(self, dataset: Any, mode: str, corrupt: str):
        self.dataset, self.mode, self.corrupt = dataset, mode, corrupt
        self.reader = getattr(dataset, "reader", None)
        self.transform: Callable[[Image.Image], Any] | None = None  # set by timm's loader

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = self._read(max(0, index))
        return (image if self.transform is None else self.transform(image)), label if index >= 0 else NO_LABEL

    def _read(self, index: int) -> tuple[Image.Image, int]:
        for attempt in range(len(self)):
            place = (index + attempt) % len(self)
            try:
                if self.reader is None:
                    image, label, *_ = self.dataset[place]
                else:
                    file, label, *_ = self.reader[place]
                    image = need("PIL.Image", extra="images", what="reading images").open(file)
                return image.convert(self.mode), int(label)
            except Exception as error:  # each format's decoder has errors of its own
                message = f"the image {self._name(place)} cannot be read ({first_line(error)})"
                if self.corrupt == "error":
                    raise CorruptImage(f"{message}: remove it, or set data.corrupt=skip") from error
                warnings.warn(f"{message}: skipped", stacklevel=2)
        raise CorruptImage("no image of the data set can be read")

    def _name(self, index: int) -> str:
        try:
            return str(self.reader.filename(index, absolute=True))  # type: ignore[union-attr]
        except Exception:  # a reader without file names, or one that has to decode the image to know
            return f"number {index}"


@register(group="data", name="images")
class ImageData(Images, takes=("path", "dataset", "validation_path", "batch_size", "num_workers", "seed")):
    """Images in any form that timm reads, with the augmentation of the MTTT paper (arXiv 2310.13807, Sec. 5).

    Args:
        path: folder (with `train` and `validation` or `val` inside, classes as folders), or a tar file; the root or
            cache of others.
        dataset: timm's name of another kind: `wds/<name>`, `hfds/<user>/<name>`, `hfids/<user>/<name>` (streamed),
            `tfds/<name>`, `torch/<name>`. Empty: a folder or tar.
        validation_path: folder or tar file of the validation images, if it is not inside `path`.
        train_split, validation_split: names of the splits; for WebDataset also files and their number of images,
            `train-{0000..1023}.tar|1281167`.
        img_size: height and width after cropping (pixels).
        in_chans: 3 for colour, 1 for grey.
        batch_size: images per batch, over all processes; in a run, each process takes its share.
        num_workers: processes that read images.
        min_area: smallest share of the area that a random crop takes.
        flip: flip half of the training images.
        augment: timm's name of an augmentation, `rand-m10-n2-p1` for RandAugment(2, 10); None for none.
        corrupt: a file that cannot be read is an `error`, or `skip` takes the next image with a warning. (Streams are
            up to timm.)
        seed: of the order of the images.

    Raises:
        MetaTTTError: a value that is not allowed; from `setup`: no images, or fewer than a batch.
    """

    evaluation = {"crop_pct": 0.875, "interpolation": "bilinear"}  # noqa: RUF012 (nobody changes it)

    path: str | None = setting(default=None)
    dataset: str = setting(default="")
    validation_path: str | None = setting(default=None)
    train_split: str = setting(default="train")
    validation_split: str = setting(default="validation")
    img_size: int = setting(default=224, most=2**13)
    in_chans: int = setting(default=3)
    batch_size = 1024
    num_workers = 8
    min_area: float = setting(default=0.05, above=0, most=1)
    flip: bool = setting(default=True)
    augment: str | None = setting(default=None)
    corrupt: Literal["error", "skip"] = setting(default="error")

    def check_settings(self) -> None:
        self.timm: Any = need("timm.data", extra="images", what="data=images")
        super().check_settings()
        check_choice("data.in_chans", self.in_chans, (1, 3))
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
        """Finds the images, once. Streams are made again when there are several processes: timm then gives each a
        part."""
        now = (self.place.world_size, self.batch_size)
        if now != self._streams_for and any(isinstance(found, IterableDataset) for found in self._datasets.values()):
            self._datasets.clear()
        self._streams_for = now
        for name in self.splits:
            if name not in self._datasets:
                self._datasets[name] = self._dataset(name)
        if len(self._datasets["train"]) < self.batch_size:
            raise MetaTTTError(
                f"data.path={self.path} has {len(self._datasets['train'])} training images, fewer than "
                f"data.batch_size={self.batch_size}"
            )

    def _dataset(self, name: str) -> Dataset[Any]:
        if self.path is None and not self.dataset:
            raise MetaTTTError(
                "no images are given: set data.path=<folder or tar file>, or data.dataset=hfds/<name> or wds/<name>"
            )
        train, mode = name == "train", "RGB" if self.in_chans == 3 else "L"
        root = self.path if train or self.validation_path is None else self.validation_path
        if not self.dataset:
            key = f"data.{'path' if root == self.path else 'validation_path'}"
            if not os.path.exists(path_of(root, key)):
                raise MetaTTTError(f"{key}={root} does not exist")
        try:
            found = self.timm.create_dataset(
                self.dataset, root, split=self.splits[name], is_training=train, batch_size=self.batch_size,
                seed=self.seed, input_img_mode=mode,
            )  # fmt: skip
        except Exception as error:  # whatever the readers of the many formats raise
            raise MetaTTTError(
                f"data.path={root} data.dataset={self.dataset}: no {name} images can be read: {first_line(error)}"
            ) from error
        return found if isinstance(found, IterableDataset) else CheckedImages(found, mode, self.corrupt)

    @property
    def num_classes(self) -> int | None:
        names = self.class_names
        return len(names) if names is not None else None

    @property
    def class_names(self) -> list[str] | None:
        found = self._datasets["train"]
        for source in (getattr(found, "reader", None), getattr(found, "dataset", None)):
            # a folder's name, or a tar's
            classes = getattr(source, "class_to_idx", None) or getattr(source, "class_name_to_idx", None)
            if classes:
                return [str(name) for name in sorted(classes, key=classes.__getitem__)]
        return None

    def describe(self) -> str:
        sizes = [len(self._datasets[name]) for name in ("train", "validation")]
        return f"{self.dataset or self.path}: {sizes[0]:,} images to train, {sizes[1]:,} to validate"

    def train_dataloader(self) -> DataLoader[Batch]:
        """Random crops, shuffled, for the whole run from those at `place.done` on; a stream: for an epoch."""
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Batch]:
        """Centre crops as `evaluation` says, a part of them in each process: the shorter side is 8/7 of the crop."""
        return self._loader("validation")

    def _loader(self, name: str) -> DataLoader[Batch]:
        data, centre = self._datasets[name], (0.5,) * self.in_chans
        loader: DataLoader[Batch] = self.timm.create_loader(
            data, (self.in_chans, self.img_size, self.img_size), self.batch_size, is_training=name == "train",
            use_prefetcher=False, scale=(self.min_area, 1.0), hflip=0.5 if self.flip else 0.0, color_jitter=0.0,
            auto_augment=self.augment, mean=centre, std=centre, num_workers=self.num_workers, pin_memory=False,
            **self.evaluation,
        )  # fmt: skip
        if isinstance(data, IterableDataset):
            return loader
        order = (
            ShuffledBatches(len(data), self.batch_size, self.seed, self.place)
            if name == "train"
            else batches_in_order(len(data), self.batch_size, self.place)
        )
        # timm's, in an order of ours: the same one whatever the processes, and gone on with where a run stopped
        return DataLoader(
            data, batch_sampler=order, num_workers=loader.num_workers, collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn, persistent_workers=loader.persistent_workers,
        )  # fmt: skip
