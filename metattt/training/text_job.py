"""What is special about training on text: the vocabulary, the n-gram baselines, bits per byte, and a sample at the
end."""

from __future__ import annotations

import lightning
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from metattt.checkpoints.record import make_record
from metattt.data.text import TextData
from metattt.data.tokenizers import FileTokenizer
from metattt.data.windows import Split, WindowData
from metattt.errors import MetaTTTError
from metattt.generation.sampling import generate
from metattt.generation.text import ends
from metattt.measures.ngram import NGram
from metattt.models.language_model import LanguageModel
from metattt.training.batches import batch_share, plan_batches, validate_between_steps
from metattt.training.callbacks import LossCurve
from metattt.training.job import Job
from metattt.training.resume import fingerprint
from metattt.training.text_module import AdamW, LanguageModeling
from metattt.training.time_parallel import OverTime

SAMPLE_PROMPT_BYTES = 64
SAMPLE_BYTES = 200
ORDERS = (2, 3)  # of the byte models that are counted for comparison
MOST_SORTED = 2**26  # tokens of training text that order 3 is counted on: it sorts them, which takes seconds
SPLITS: tuple[Split, ...] = ("train", "validation")


class TextJob(Job[LanguageModel, LanguageModeling]):
    """Next-token prediction on windows of text.

    Args:
        cfg: the configuration of the run.
        data: its data module; read and checked against the model's vocabulary here.

    Raises:
        MetaTTTError: text that cannot be used, or that has more tokens than the model.
    """

    def __init__(self, cfg: DictConfig, data: WindowData):
        self.cfg, self.data = cfg, data
        self.baselines: dict[int, float] = {}  # bits per byte of byte models by their order
        if "vocab_size" not in cfg.model:
            raise MetaTTTError(
                "text needs a language model: set model=language_model; for images, data=images or data=digits; for vectors, "
                "data=in_context"
            )
        data.setup("fit")
        for name in SPLITS:
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
        if not hasattr(recipe, "forward_only"):
            raise MetaTTTError(f"training: {type(recipe).__name__} is for images: set training=adamw")
        inner, length = getattr(model, "mini_batch_size", 0), self.data.context_length  # of an inner loop over the model
        if inner >= length:
            raise MetaTTTError(
                f"model.mini_batch_size={inner}: windows of data.context_length={length} tokens end before the first inner "
                f"step is read; set model.mini_batch_size below {length}, or longer windows"
            )
        tokenizer = self.data.tokenizer
        content = tokenizer.content if isinstance(tokenizer, FileTokenizer) else None
        record = make_record(self.cfg, tokenizer=content, data=fingerprint(self.data))
        return LanguageModeling(model, recipe, tokenizer.token_bytes, record, self.data.document_start)

    def prepare(self, trainer: lightning.Trainer) -> None:
        """Sizes of batches that the trainer's processes take, and the baselines."""
        data = self.data
        plan = plan_batches(
            self.cfg.batch_tokens,
            data.context_length,
            data.batch_size,
            trainer.accumulate_grad_batches,
            batch_share(trainer)[1],
        )
        if isinstance(trainer.strategy, OverTime):
            trainer.strategy.check(data.context_length, plan.batch_size)
        data.batch_size, trainer.accumulate_grad_batches = plan
        validate_between_steps(trainer)
        if trainer.is_global_zero and isinstance(data, TextData):  # other tokens are not bytes
            windows, sizes = data.windows("train"), data.tokenizer.token_bytes.numpy()
            orders = [order for order in ORDERS if order < 3 or windows.size <= MOST_SORTED]
            counted = NGram(data.tokenizer.vocab_size, max(orders)).fit(windows)
            self.baselines = {n: counted.bits_per_byte(data.windows("validation"), sizes, n) for n in orders}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LossCurve):
                callback.baselines = {f"order-{n} byte model": bits for n, bits in self.baselines.items()}

    def header(self, console: Console, trainer: lightning.Trainer, model: LanguageModel, done: int) -> None:
        """What is about to run, in three lines."""
        data = self.data
        tokens = data.batch_size * data.context_length * trainer.accumulate_grad_batches * batch_share(trainer)[1]
        processes = f", {trainer.world_size} processes" if trainer.world_size > 1 else ""
        console.print(f"text    {data.describe()}")
        console.print(f"model   {model.num_parameters():,} parameters on {trainer.strategy.root_device}{processes}")
        start = f", from step {done:,}" if done else ""
        console.print(f"run     {trainer.max_steps:,} steps of {tokens:,} tokens{start} -> {self.cfg.output_dir}")

    def report(self, console: Console, trainer: lightning.Trainer, seconds: float) -> None:
        """The final table: the model against the baselines."""
        bits = trainer.callback_metrics["validation/bits_per_byte"].item()
        table = Table(title=f"after {trainer.global_step:,} steps ({seconds:.0f} s)", title_justify="left")
        table.add_column("validation")
        table.add_column("bits per byte", justify="right")
        table.add_row("model", f"{bits:.4f}")
        for order, baseline in self.baselines.items():
            table.add_row(f"order-{order} byte model, same training text", f"{baseline:.4f}")
            table.add_row(f"model / order-{order}", f"{bits / baseline:.4f} ({100 * (bits / baseline - 1):+.1f}%)")
        console.print(table)

    def sample(self, console: Console, module: LanguageModeling) -> None:
        """A continuation of the beginning of a held-out document, unless `sample=false`.

        Every process takes part: the model may be divided among them. A compiled one draws without compiling: prompt,
        single tokens and carried states have other shapes than training, and each would compile anew.
        """
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
        console.print(printable(prompt), style="dim", end="", markup=False)
        console.print(printable(text), markup=False)


def printable(text: bytes) -> str:
    """UTF-8 for a terminal: control characters, which could steer it, are written out as `\\x1b`."""
    shown = (
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
        for c in text.decode(errors="replace")
    )
    return "".join(shown)
