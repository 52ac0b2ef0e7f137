"""A model of ours for the language model evaluation harness (EleutherAI's lm_eval), without Transformers.

`metattt eval checkpoint=... tasks=[...]` uses it. lm_eval has no list of other people's models, so its own command knows
ours as `python -m metattt.evaluation.harness --model metattt --model_args checkpoint=runs/... --tasks ...`; in Python
importing this module is enough.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from metattt.checkpoints.trained import load_model, open_trained
from metattt.checkpoints.trust import modules
from metattt.composition.settings import NO_CHECKPOINT, pick_device, settings
from metattt.data.text import ByteTokenizer
from metattt.data.tokenizers import FileTokenizer, tokenizer_of
from metattt.errors import MetaTTTError, NotFinite, check_integer
from metattt.generation.text import ends, generate_text
from metattt.models.language_model import LanguageModel
from metattt.optional import need

need("lm_eval", extra="eval", what="metattt eval tasks=")
from lm_eval.api.model import TemplateLM  # noqa: E402
from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models.utils import normalize_gen_kwargs  # noqa: E402
from lm_eval.utils import simple_parse_args_string  # noqa: E402

IGNORED = -100  # a label that does not count
ROWS = 4096  # tokens whose logits are there at once


@dataclass
class ModelSettings:
    """What `--model_args` may hold; `batch_size` and `device` are lm_eval's own options as well."""

    checkpoint: str
    tokenizer: str | None = None
    device: str = "auto"
    batch_size: int = 16
    segment: int = 2048
    trust: Any = None


@register_model("metattt")
class MetaTTTLM(TemplateLM):
    """Log-likelihoods and continuations of texts.

    Every text is read from a separator on, as documents in training. There is no longest text: it is read in segments,
    with carried state, and nothing is cut or forgotten.

    Args:
        model: in evaluation mode, on its device.
        tokenizer: of the model.
        batch_size: texts that are read together.
        segment: tokens per call: what a call needs of memory does not grow with the texts.

    Raises:
        MetaTTTError: a size that is not allowed, or a model that sees the token that it predicts.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: ByteTokenizer | FileTokenizer, batch_size: int = 16, segment: int = 2048
    ):
        super().__init__()
        check_integer("batch_size", batch_size)
        check_integer("segment", segment)
        model.check_causal()
        self.model, self.batch_size, self.segment = model, batch_size, segment
        self.tokens = tokenizer  # not `tokenizer`, which lm_eval takes for one of Transformers
        self._device = model.embedding.weight.device

    @classmethod
    def create_from_arg_obj(cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None) -> MetaTTTLM:
        """From the words of `--model_args`: see `ModelSettings`.

        Raises:
            MetaTTTError: a word or a checkpoint that cannot be used.
        """
        extra = {key: value for key, value in (additional_config or {}).items() if value is not None}
        extra.pop("max_batch_size", None)  # lm_eval hands it on; it is for batch_size=auto
        given = {**arg_dict, **extra}
        known = ModelSettings.__dataclass_fields__
        for key in given:
            if key not in known:
                raise MetaTTTError(f"{key} is not among the model_args of metattt: {', '.join(known)}")
        return cls.load(settings(ModelSettings, OmegaConf.create({"checkpoint": "???", **given}), checkpoint=NO_CHECKPOINT))

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> MetaTTTLM:
        """As `create_from_arg_obj`, from `checkpoint=runs/...,batch_size=4`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def load(cls, chosen: ModelSettings) -> MetaTTTLM:
        """The model of a checkpoint.

        Raises:
            MetaTTTError: it cannot be used.
        """
        trust = modules(chosen.trust)
        about = open_trained(chosen.checkpoint, trust=trust)
        if "vocab_size" not in about.config.model:
            raise MetaTTTError(f"{chosen.checkpoint} is a model for images: tasks are for language models")
        tokenizer = tokenizer_of(chosen.checkpoint, about.tokenizer, about.config.model.vocab_size, chosen.tokenizer)
        model, _ = load_model(chosen.checkpoint, pick_device(chosen.device), trust)
        return cls(model, tokenizer, chosen.batch_size, chosen.segment)

    # -- tokens --------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return ends(self.tokens)[-1]

    @property
    def prefix_token_id(self) -> int:
        """The token before every text."""
        return self.tokens.separator

    @property
    def tokenizer_name(self) -> str:
        """For lm_eval's cache of requests."""
        return f"metattt-{self.tokens.vocab_size}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Token ids, with the separator before them unless `add_special_tokens` is False."""
        start = [] if add_special_tokens is False else [self.tokens.separator]
        return start + [int(token) for token in self.tokens.encode(string)]

    # -- what lm_eval asks for -----------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **options: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation after its context, and whether it is what greedy decoding gives."""
        texts = [(context + following, len(context)) for _, context, following in requests]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for index, value in self._scores(texts, disable_tqdm):
            found[index] = value
            key = requests[index][0]
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, value)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, each from its separator on."""
        texts = [(self.tok_encode(request.args[0]), 1) for request in requests]
        found = [0.0] * len(requests)
        for index, (value, _) in self._scores(texts, disable_tqdm):
            found[index] = value
            self.cache_hook.add_partial("loglikelihood_rolling", requests[index].args, value)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations, each until one of its stop strings, a token that ends texts, or the number of tokens asked for."""
        found = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        with _progress(disable_tqdm) as bar:
            task = bar.add_task("generate_until", total=len(requests))
            for indices in groups.values():
                asked = _asked(requests[indices[0]].args[1])
                indices.sort(key=lambda index: -len(requests[index].args[0]))
                for start in range(0, len(indices), self.batch_size):
                    batch = indices[start : start + self.batch_size]
                    texts = generate_text(self.model, self.tokens, [requests[index].args[0] for index in batch], **asked)
                    for index, text in zip(batch, texts, strict=True):
                        found[index] = text
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                    bar.advance(task, len(batch))
        return found

    def _scores(self, texts: Sequence[tuple[list[int], int]], disable_tqdm: bool) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Number of a text, and the log-probability of its tokens from a place on, and whether each is the most probable.

        Args:
            texts: token ids, and the place of the first that counts (at least 1).
            disable_tqdm: no progress bar.
        """
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index][0]))
        with _progress(disable_tqdm) as bar:
            task = bar.add_task("loglikelihood", total=len(texts))
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                yield from zip(batch, self._score([texts[index] for index in batch]), strict=True)
                bar.advance(task, len(batch))

    @torch.inference_mode()
    def _score(self, texts: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        longest = max(len(ids) for ids, _ in texts) - 1
        ids = torch.full((len(texts), longest), self.tokens.separator)  # filled up at the end, which no token before it sees
        labels = torch.full((len(texts), longest), IGNORED)
        for row, (tokens, first) in enumerate(texts):
            ids[row, : len(tokens) - 1] = torch.tensor(tokens[:-1], dtype=torch.long)
            labels[row, first - 1 : len(tokens) - 1] = torch.tensor(tokens[first:], dtype=torch.long)
        total = torch.zeros(len(texts), dtype=torch.float64)
        greedy = torch.ones(len(texts), dtype=torch.bool)
        state = None
        for part, wanted in zip(ids.split(self.segment, 1), labels.split(self.segment, 1), strict=True):
            features, state = self.model.features(part.to(self._device), state)
            rows, columns = (wanted != IGNORED).nonzero(as_tuple=True)
            for row, column in zip(rows.split(ROWS), columns.split(ROWS), strict=True):
                self._add(features[row.to(self._device), column.to(self._device)], wanted[row, column], row, total, greedy)
        return [(float(value), bool(same)) for value, same in zip(total, greedy, strict=True)]

    def _add(self, features: Tensor, labels: Tensor, row: Tensor, total: Tensor, greedy: Tensor) -> None:
        """Adds the log-probabilities of `labels` `[N]` to those of their texts."""
        if not len(labels):
            return
        logits = self.model.head(features).float()
        found = -F.cross_entropy(logits, labels.to(logits.device), reduction="none").double().cpu()
        if not bool(found.isfinite().all()):
            raise NotFinite("the model's predictions are not finite: its weights have diverged; take an earlier checkpoint")
        total.index_add_(0, row, found)
        wrong = row[logits.argmax(-1).cpu() != labels]
        greedy[wrong] = False


def _progress(hidden: bool) -> Progress:
    return Progress(console=Console(stderr=True), disable=hidden or not sys.stderr.isatty())


def _asked(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a task asks of a continuation, as `generate_text` takes it.

    Raises:
        MetaTTTError: something that it does not take.
    """
    given: dict[str, Any] = dict(normalize_gen_kwargs(dict(options)))
    temperature = given.pop("temperature", 0.0)
    asked = {
        "stop": [text for text in given.pop("until") if text],
        "max_new_tokens": given.pop("max_gen_toks"),
        "temperature": temperature if given.pop("do_sample") else 0.0,
        "top_k": given.pop("top_k", None),
        "top_p": given.pop("top_p", None),
    }
    if given:
        raise MetaTTTError(f"a task asks for {', '.join(given)} in its generation_kwargs, which metattt does not have")
    return asked


def main() -> int:
    """The command of lm_eval, which then knows `--model metattt`."""
    from lm_eval.__main__ import cli_evaluate

    sys.argv[0] = str(Path(sys.argv[0]).name)
    try:
        cli_evaluate()
    except MetaTTTError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
