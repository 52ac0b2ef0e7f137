"""The outer loop for labelled sequences: cross-entropy and accuracy for classes, squared error for numbers, views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from metattt.checkpoints.record import make_record
from metattt.data.novel_views import ASKED, GIVEN
from metattt.data.sequences import Batch
from metattt.errors import MetaTTTError
from metattt.measures.labelled import labelled_predictions, losses_and_hits
from metattt.models.language_model import LanguageModel
from metattt.training.job import Job, OuterLoop
from metattt.training.recipes import AdamW


class LabelledSequences(OuterLoop):
    """Trains a language model or a `Regression` on `data=recall`, `data=in_context` or another `SequenceData`.

    Logged in validation: `loss`, the mean over labelled tokens (nats, or squared error), and `accuracy` for classes.
    """

    def on_fit_start(self) -> None:
        self.model.check_causal()

    def batch_loss(self, batch: Batch) -> Tensor:
        losses, _ = losses_and_hits(*labelled_predictions(self.model, *batch))
        return losses.mean() if len(losses) else losses.sum()  # a batch that asks nothing teaches nothing

    def shortest_loss(self) -> Tensor:
        x = next(self.model.parameters()).new_zeros(1, 2, getattr(self.model, "in_features", 1))
        labels = x[..., 0].long() if hasattr(self.model, "vocab_size") else x[..., 0]
        return self.batch_loss((x if labels.is_floating_point() else labels, labels))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        losses, hits = losses_and_hits(*labelled_predictions(self.model, *batch))
        count = torch.ones_like(losses).sum()
        self.add_to_validation(loss=(losses.sum(), count))
        if hits is not None:
            self.add_to_validation(accuracy=(hits.sum(), count))


class Views(LabelledSequences):
    """Trains a `NovelViews` on `data=novel_views`.

    Logged in validation: `loss`, the mean squared error of a colour, and for each number n of given views `loss_n` and
    `psnr_n`, the mean over scenes of −10 log10 of a scene's error (dB).
    """

    def on_fit_start(self) -> None:
        """Nothing to check: a given view may see every other."""

    def shortest_loss(self) -> Tensor:
        x = next(self.model.parameters()).new_zeros(1, 2, self.model.view_tokens, self.model.in_features)
        x[:, 0, :, -1], x[:, 1, :, -1] = GIVEN, ASKED
        return self.model(x.flatten(1, 2)).sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        losses = losses_and_hits(*labelled_predictions(self.model, *batch))[0].double().view(len(batch[0]), -1).mean(1)
        views = (batch[0][..., -1] == GIVEN).sum(1) // self.model.view_tokens
        self.add_to_validation(loss=(losses.sum(), torch.ones_like(losses).sum()))
        for number in self.trainer.datamodule.data.given:  # type: ignore[attr-defined]
            scenes = (views == number).double()
            for name, values in (("loss", losses), ("psnr", -10 * losses.log10())):
                self.add_to_validation(**{f"{name}_{number}": (values @ scenes, scenes.sum())})


class SequenceJob(Job):
    """Prediction of the labels of synthetic sequences."""

    loop = LabelledSequences  #: the Lightning module

    def check(self) -> None:
        """Refuses a model that does not read these sequences."""
        cfg, data = self.cfg, self.data
        if data.vocab_size is not None:
            if "vocab_size" not in cfg.model:
                raise MetaTTTError(
                    f"ids ({data.describe()}) need model=language_model (for data=recall: experiment=recall)"
                )
            if data.vocab_size > cfg.model.vocab_size:
                raise MetaTTTError(
                    f"the sequences have {data.vocab_size} different ids and the model {cfg.model.vocab_size}: "
                    f"set model.vocab_size={data.vocab_size}"
                )
        elif "in_features" not in cfg.model:
            raise MetaTTTError(
                f"vectors ({data.describe()}) need model=regression (for data=in_context: experiment=in_context)"
            )
        elif data.inputs != cfg.model.in_features:
            raise MetaTTTError(
                f"a token of the sequences has {data.inputs} numbers and the model takes {cfg.model.in_features}: "
                f"set model.in_features={data.inputs}"
            )

    def module(self, model: Any, recipe: AdamW) -> LabelledSequences:
        if not isinstance(recipe, AdamW) or recipe.chunk is not None:
            raise MetaTTTError("synthetic sequences are trained on whole: set training=adamw training.chunk=null")
        if isinstance(model, LanguageModel) and hasattr(model, "mini_batch_size"):
            raise MetaTTTError(
                "model=ttt_e2e learns from the next token at every place, which these sequences do not have: set "
                "model=language_model"
            )
        return self.loop(model, recipe, make_record(self.cfg))

    def columns(self) -> dict[str, tuple[str, float, str]]:
        loss = "cross-entropy (nats)" if self.data.vocab_size else "squared error"
        return {"accuracy": ("accuracy %", 100, ".4g"), "loss": (loss, 1, ".4g")}


class ViewJob(SequenceJob):
    """Pictures of a scene from places that were not shown; see `SequenceJob`."""

    unit, loop = "scenes", Views

    def check(self) -> None:
        if "image_size" not in self.cfg.model:
            raise MetaTTTError("views need a model that learns and reads them: set experiment=novel_views")

    def results(self, known: Mapping[str, float]) -> Sequence[Sequence[str]]:
        """The error by the number of given views."""
        rows = [(str(n), f"{known[f'loss_{n}']:.4g}", f"{known[f'psnr_{n}']:.2f}") for n in self.data.given]
        return [("given views", "validation squared error", "PSNR (dB)"), *rows]
