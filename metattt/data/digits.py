"""The 1,797 handwritten digits that come with scikit-learn: 8×8 pixels, no download."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from metattt.data.images import NO_LABEL, Batch, Images
from metattt.data.windows import ShuffledBatches, batches_in_order
from metattt.errors import MetaTTTError, check_number
from metattt.optional import need
from metattt.registry import register
from metattt.setting import setting

SIDE = 8  # pixels


class _Digits(Dataset[Batch]):
    """Images `[N, 1, h, w]` and labels `[N]`, indexed by a batch of positions at once; position −1 has no label."""

    def __init__(self, images: Tensor, labels: Tensor):
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: list[int]) -> Batch:
        place = torch.tensor(index)
        return self.images[place], torch.where(place < 0, NO_LABEL, self.labels[place])


@register(group="data", name="digits")
class DigitsData(Images, takes=("img_size", "batch_size", "validation_fraction", "seed")):
    """scikit-learn's digits (UCI's optical recognition test set), always split in the same way. An image that occurs
    twice counts once, so that the splits share none.

    Args:
        img_size: height and width (pixels); a multiple of 8, every pixel repeated.
        batch_size: images per batch, over all processes; in a run, each process takes its share.
        validation_fraction: share of the images held out.
        seed: of the order of the training images.
        test_fraction: share of the images kept for the split `test`, which neither training nor validation reads:
            settings are chosen on the validation images and reported on these. The validation images are the same
            without it. 0: no such split.
    """

    in_chans = 1
    evaluation = {"crop_pct": 1.0, "interpolation": "nearest"}  # noqa: RUF012 (nobody changes it)

    class_names = [str(digit) for digit in range(10)]  # noqa: RUF012 (nobody changes it)

    img_size: int = setting(default=SIDE, least=SIDE, most=512)
    validation_fraction: float = setting(default=0.2, above=0, below=1)
    test_fraction: float = setting(default=0.0)

    def check_settings(self) -> None:
        super().check_settings()
        if self.img_size % SIDE:
            raise MetaTTTError(f"data.img_size={self.img_size} is not allowed: choose a multiple of {SIDE} pixels")
        beside = f" beside data.validation_fraction={self.validation_fraction}: images are left to train on"
        below = 1 - self.validation_fraction
        check_number("data.test_fraction", self.test_fraction, least=0, below=below, advice=beside)
        self._splits: dict[str, _Digits] = {}

    def setup(self, stage: str | None = None) -> None:
        """Reads the digits, once."""
        if self._splits:
            return
        sklearn = need("sklearn.datasets", extra="images", what="data=digits")
        pixels, labels = sklearn.load_digits(return_X_y=True)
        images = torch.from_numpy(pixels.astype(np.float32) / 8 - 1).view(-1, 1, SIDE, SIDE)  # 0…16 to −1…1
        factor = self.img_size // SIDE
        images = images.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
        different = np.sort(np.unique(pixels, axis=0, return_index=True)[1])  # where each image occurs first
        order = torch.from_numpy(np.random.default_rng(0).permutation(different))
        held_out, kept = (round(share * len(order)) for share in (self.validation_fraction, self.test_fraction))
        sizes = (held_out, kept, len(order) - held_out - kept)
        for name, index in zip(("validation", "test", "train"), order.split(sizes), strict=True):
            if not len(index) and (name != "test" or self.test_fraction):
                raise MetaTTTError(
                    f"data.validation_fraction={self.validation_fraction} data.test_fraction={self.test_fraction}: no "
                    f"image of {len(order):,} is left for the split {name}"
                )
            self._splits[name] = _Digits(images[index], torch.from_numpy(labels)[index])

    def fingerprint(self) -> None:
        """They are always the same."""

    def describe(self) -> str:
        sizes = [len(self._splits[name]) for name in ("train", "validation")]
        return f"scikit-learn's digits: {sizes[0]:,} images to train, {sizes[1]:,} to validate"

    def train_dataloader(self) -> DataLoader[Batch]:
        """Shuffled batches for the whole run, from those at `place.done` on."""
        data = self._splits["train"]
        batches = ShuffledBatches(len(data), self.batch_size, self.seed, self.place)
        return DataLoader(data, batch_size=None, sampler=batches)  # the sampler hands out whole batches

    def val_dataloader(self) -> DataLoader[Batch]:
        """The held-out digits in order, a part of them in each process."""
        return self._in_order("validation")

    def test_dataloader(self) -> DataLoader[Batch]:
        """The digits that are kept from training and validation, in order."""
        if not self.test_fraction:
            raise MetaTTTError("there are no test images: set data.test_fraction=0.2, before training, to keep some")
        return self._in_order("test")

    def _in_order(self, name: str) -> DataLoader[Batch]:
        data = self._splits[name]
        batches = batches_in_order(len(data), max(256, self.batch_size), self.place)
        return DataLoader(data, batch_size=None, sampler=batches, generator=torch.Generator())
