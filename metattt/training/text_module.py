"""The outer loop for text: next-token prediction, in one process or in several."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from rich.console import Console
from torch import Tensor

from metattt.checkpoints.record import make_record
from metattt.data.windows import NO_TOKEN
from metattt.errors import MetaTTTError, printable
from metattt.generation.sampling import generate
from metattt.generation.text import ends
from metattt.measures.ngram import NGram
from metattt.models.language_model import LanguageModel
from metattt.parallel.cuts import check_cut
from metattt.parallel.gradients import clip_norm, several_meshes
from metattt.parallel.line import Line
from metattt.parallel.relay import handed_on
from metattt.parallel.scan import may_scan
from metattt.training.callbacks import LossCurve
from metattt.training.compiling import CompileWherePays
from metattt.training.job import Job, OuterLoop, callback_of
from metattt.training.recipes import AdamW
from metattt.training.sharding import FullyShardedData, divided
from metattt.training.truncated import truncated_loss

SAMPLE_PROMPT_BYTES = 64
SAMPLE_BYTES = 200
ORDERS = (2, 3)  # of the byte models that are counted for comparison
MOST_SORTED = 2**26  # tokens of training text for the order-3 counts, which are sorted for some seconds


class LanguageModeling(OuterLoop):
    """Trains a language model on windows of tokens `[B, T + 1]`: the first T are read, the last T predicted.

    Args:
        model: the language model.
        recipe: the outer optimizer and its schedule.
        token_bytes: `[V]` bytes of text that each token stands for.
        record: of the run (`metattt.checkpoints.record`), kept in every checkpoint.
        document_start: the token at which the inner loop starts again from W0; None: it never does.
    """

    def __init__(
        self,
        model: LanguageModel,
        recipe: AdamW,
        token_bytes: Tensor,
        record: dict[str, Any],
        document_start: int | None = None,
    ):
        super().__init__(model, recipe, record)
        self.document_start = document_start
        self.line: Line | None = None  # the processes that read parts of the same windows (trainer=time_parallel)
        self.scanned: Collection[int] = ()  # blocks with time-parallel scans there
        self._batch: tuple[Tensor, Tensor] | None = None  # the latest one, on the device and on the host
        self.token_bytes = token_bytes  # no buffer: callbacks that average weights would average it, and round it down
        self.knows_bytes = bool(token_bytes.any())

    def configure_model(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, FullyShardedData) and not divided(self.model):
            assert self.build is not None
            self.model = strategy.build_divided(self.build)

    def on_fit_start(self) -> None:
        if not divided(self.model):  # else it was checked while it was made; a part of a model cannot run
            self.model.check_causal()

    def sums(self, ids: Tensor) -> Tensor:
        """Cross-entropy summed over the predicted tokens of `ids` `[B, T + 1]` (nats), their number, and their bytes:
        `[3]`. Labels that are `NO_TOKEN` do not count."""
        (read, reset, labels), parts, scanned = self._windows(ids), 1, self.scanned
        if self.line is not None:
            scanned = scanned if may_scan(self.model, read.shape[1] // self.line.size) else ()
            read, labels, parts = self.line.own(read), self.line.own(labels), self.line.count_parts(len(ids))
            reset = None if reset is None else self.line.own(reset)
        resets = [None] * parts if reset is None else reset.tensor_split(parts)
        losses = []
        for own, following, starts in zip(read.tensor_split(parts), labels.tensor_split(parts), resets, strict=True):
            with nullcontext() if self.line is None else handed_on(self.model, self.line, scanned):
                nats, _ = self.model.cross_entropy(own, following, reset=starts, ignore_index=NO_TOKEN)
            losses.append(nats)
        return self._with_counts(torch.stack(losses).sum(), labels)

    def _with_counts(self, nats: Tensor, labels: Tensor) -> Tensor:
        real = labels != NO_TOKEN
        self.token_bytes = self.token_bytes.to(labels.device)
        counts = torch.stack((real.sum(), (self.token_bytes[labels.clamp(min=0)] * real).sum()))
        return torch.cat((nats.unsqueeze(0), counts.to(nats.dtype)))

    def in_chunks(self, ids: Tensor, chunk: int) -> Tensor:
        """As `sums`, one chunk of every window at a time; gradients reach back over `training.truncate` chunks."""
        read, reset, labels = self._windows(ids)
        parts = [x.split(chunk, dim=1) for x in (read, labels)]
        starts = [None] * len(parts[0]) if reset is None else reset.split(chunk, dim=1)
        pieces = list(zip(*parts, starts, strict=True))
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

        def nats(piece: tuple[Tensor, Tensor, Tensor | None], state: Any) -> tuple[Tensor, Any]:
            own, following, fresh = piece
            return self.model.cross_entropy(own, following, state, fresh, ignore_index=NO_TOKEN)

        return self._with_counts(truncated_loss(nats, pieces, parameters, self.recipe.truncate), labels)

    def _windows(self, ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """The input `[B, T]`, the starts of documents, found in the host's copy of the batch, so that their layout is
        computed there without waiting for the device, and the labels."""
        read, reset = ids[:, :-1].clamp(min=0), None
        if self.document_start is not None:
            here = self._batch[1] if self._batch is not None and self._batch[0] is ids else ids
            reset = here[:, :-1] == self.document_start
        return read, reset, ids[:, 1:]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        self._batch = (moved, batch) if isinstance(batch, Tensor) else None
        return moved

    def batch_loss(self, ids: Tensor) -> Tensor:
        """The mean over the predicted tokens of a batch (nats)."""
        sums = self._sums(ids)
        return sums[0] / sums[1]

    def _sums(self, ids: Tensor) -> Tensor:
        return self.sums(ids) if self.recipe.chunk is None else self.in_chunks(ids, self.recipe.chunk)

    def read(self, ids: Tensor) -> None:
        read, reset, labels = self._windows(ids)
        self.model.cross_entropy(read, labels, reset=reset, ignore_index=NO_TOKEN)

    def shortest_loss(self) -> Tensor:
        """The loss of one token. Parameters that do not affect it may get no gradient in a step."""
        return self.sums(torch.zeros(1, 2, dtype=torch.long, device=self.device))[0]

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        sums = self._sums(ids)
        self.add_to_step(batch_idx, **self._figures(sums))
        # divided by what the processes read on average: of one window, some may have a token more than others
        whole = 1 if self.line is None else self.line.size
        return sums[0] / (sums[1] if whole == 1 else (ids[:, 1:] != NO_TOKEN).sum() / whole)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if gradient_clip_val and gradient_clip_algorithm in (None, "norm") and several_meshes(parameters):
            clip_norm(parameters, gradient_clip_val)
        else:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self.add_to_validation(**self._figures(self.sums(ids)))

    def _figures(self, sums: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Nats per token and, where the bytes of tokens are known, bits per byte, from what `sums` returns."""
        nats, num_tokens, num_bytes = sums.double()
        bits = {"bits_per_byte": (nats / math.log(2), num_bytes)} if self.knows_bytes else {}
        return {"loss": (nats, num_tokens)} | bits

    def on_validation_epoch_end(self) -> None:
        if self.line is not None:
            self.line.finish()
        super().on_validation_epoch_end()

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Raises an error for settings, and layers, that exclude reading in chunks."""
        if self.recipe.chunk is None:
            return super().configure_optimizers()
        compiled = any(getattr(block, "_compiled_call_impl", None) is not None for block in self.model.blocks)
        may_be = callback_of(self.trainer, CompileWherePays) is not None
        once = (compiled or may_be) and self.recipe.truncate not in (None, 1)
        divides, scaled = isinstance(self.trainer.strategy, FullyShardedData), self.trainer.precision == "16-mixed"
        for wrong, reason, instead in (
            (self.line is not None, "trainer=time_parallel, which divides windows itself", "trainer=default"),
            (divides, "trainer=fsdp, which divides gradients", "trainer=ddp"),
            (scaled, "trainer.precision=16-mixed, which scales losses", "trainer.precision=bf16-mixed"),
            (once, f"compile={'auto' if may_be else 'true'}, whose graphs run backwards once", "training.truncate=1"),
        ):
            if wrong:
                raise MetaTTTError(
                    f"training.chunk={self.recipe.chunk} does not go with {reason}: set {instead}, or "
                    "training.chunk=null"
                )
        for block in self.model.blocks:
            check_cut(block.layer, self.model.dim, "training.chunk=null")
        return super().configure_optimizers()


class TextJob(Job):
    """Next-token prediction on windows of text."""

    kind, unit, in_parts = "text", "tokens", True

    def check(self) -> None:
        """Refuses text that cannot be used, or that has more tokens than the model."""
        cfg, data = self.cfg, self.data
        self.baselines: dict[int, float] = {}  # bits per byte of byte models by their order
        if "vocab_size" not in cfg.model:
            raise MetaTTTError(
                "text needs a language model: set model=language_model; for images, data=images or data=digits; for "
                "vectors, data=in_context"
            )
        data.setup("fit")
        for name in ("train", "validation"):
            data.windows(name)
        if data.tokenizer.vocab_size > cfg.model.vocab_size:
            raise MetaTTTError(
                f"the text has {data.tokenizer.vocab_size} different tokens and the model {cfg.model.vocab_size}: "
                f"set model.vocab_size={data.tokenizer.vocab_size}"
            )

    def module(self, model: LanguageModel, recipe: AdamW) -> LanguageModeling:
        """The Lightning module.

        Raises:
            MetaTTTError: a recipe for images, or windows that hold no inner step of a model that has them.
        """
        if not isinstance(recipe, AdamW):
            raise MetaTTTError(f"training: {type(recipe).__name__} is for images: set training=adamw")
        inner = getattr(model, "mini_batch_size", 0)  # of an inner loop over the model
        length = self.data.context_length
        if inner >= length:
            raise MetaTTTError(
                f"model.mini_batch_size={inner}: windows of data.context_length={length} tokens end before the first "
                f"inner step is read; set model.mini_batch_size below {length}, or longer windows"
            )
        tokenizer = self.data.tokenizer
        record = make_record(self.cfg, tokenizer=tokenizer.content, data=self.data.fingerprint())
        return LanguageModeling(model, recipe, tokenizer.token_bytes, record, self.data.document_start)

    def prepare(self, trainer: Trainer) -> None:
        """Sizes of batches that the trainer's processes take, and the baselines."""
        data = self.data
        self.divide(trainer, self.cfg.batch_tokens, data.context_length, "windows")
        if (fits := getattr(trainer.strategy, "check", None)) is not None:  # trainer=time_parallel
            fits(data.context_length, data.batch_size)
        if trainer.is_global_zero and data.baselines:
            windows, sizes = data.windows("train"), data.tokenizer.token_bytes.numpy()
            orders = [order for order in ORDERS if order < 3 or windows.size <= MOST_SORTED]
            counted = NGram(data.tokenizer.vocab_size, max(orders)).fit(windows)
            self.baselines = {n: counted.bits_per_byte(data.windows("validation"), sizes, n) for n in orders}
        if (curve := callback_of(trainer, LossCurve)) is not None:
            curve.baselines = {f"order-{n} byte model": bits for n, bits in self.baselines.items()}
            if not data.tokenizer.token_bytes.any():
                curve.metric, curve.label = "loss", "nats per token"

    def items(self) -> int:
        return int(self.data.context_length)

    def results(self, known: Mapping[str, float]) -> Sequence[Sequence[str]]:
        """The model against the baselines."""
        if "bits_per_byte" not in known:
            return [("validation", "nats per token"), ("model", f"{known['loss']:.4f}")]
        bits = known["bits_per_byte"]
        rows = [("validation", "bits per byte"), ("model", f"{bits:.4f}")]
        for order, baseline in self.baselines.items():
            rows.append((f"order-{order} byte model, same training text", f"{baseline:.4f}"))
            rows.append((f"model / order-{order}", f"{bits / baseline:.4f} ({100 * (bits / baseline - 1):+.1f}%)"))
        return rows

    def sample(self, console: Console, module: LanguageModeling) -> None:
        """A continuation of the beginning of a held-out document, unless `sample=false`. Every process takes part: the
        model may be divided among them. A compiled one draws without compiling: each shape would compile anew."""
        if not self.cfg.get("sample", True):
            return
        data = self.data
        prompt = data.sample_document()[:SAMPLE_PROMPT_BYTES]
        ids = torch.tensor([[data.tokenizer.separator, *data.tokenizer.encode(prompt).tolist()]], device=module.device)
        tokens = generate(
            module.model.eval(), ids, SAMPLE_BYTES, temperature=0.7, stop=ends(data.tokenizer), seed=self.cfg.seed
        )
        with torch.compiler.set_stance("force_eager"):
            text = data.tokenizer.decode([int(token) for token in tokens])
        console.print(f"\nsample, temperature 0.7, after a prompt of {len(prompt)} bytes:")
        console.print(printable(prompt.decode(errors="replace")), style="dim", end="")
        console.print(printable(text.decode(errors="replace")))
