"""One token after the other: TTT models against the published code's way, gated DeltaNet and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

import torch
from common import Check, Row, Say, in_turn, ratios, require, some, summary
from published_decoding import PublishedDecoding
from report import Report
from torch import Tensor

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.errors import MetaTTTError, check_choice
from metattt.generation.recorder import NotStatic
from metattt.generation.static_step import CapturedStep, PlainStep, RecordedStep
from metattt.models.language_model import LanguageModel, LanguageModelState
from metattt.testing.specimen import distance, randomize

PUBLISHED, CALL, RECORDED, COMPILED = "published style", "a call of the model", "recorded", "compiled"
TTT, OTHERS = ("ttt_linear", "ttt_mlp"), ("gated_delta_net", "attention")


@dataclass
class Decode:
    """Decoding with language models of the Mamba backbone; fp32, one sequence.

    Args:
        layers: sequence layers of the models: TTT-Linear and TTT-MLP as published, gated DeltaNet, attention.
        dim, num_heads, num_layers, vocab_size: size of the models.
        contexts: tokens that are read before decoding starts.
        tokens: decoded in one timed call.
        rounds: timed calls, in turn.
        compile: time compiled steps, too; on a CPU only.
        device: `cpu`, or `cuda`.
    """

    layers: list[str] = some(*TTT, *OTHERS)
    dim: int = 256
    num_heads: int = 4
    num_layers: int = 4
    vocab_size: int = 512
    contexts: list[int] = some(64, 1024)
    tokens: int = 16
    rounds: int = 15
    compile: bool = True
    device: str = "cpu"

    def run(self, say: Say) -> Report:
        check_choice("device", self.device, ("cpu", "cuda"))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise MetaTTTError("device=cuda needs a CUDA device, and there is none: set device=cpu")
        for name in self.layers:
            check_choice("layers", name, (*TTT, *OTHERS))
        if min(self.contexts) < 4:
            raise MetaTTTError(f"contexts={self.contexts} is not allowed: 4 tokens or more")
        models = {name: self._model(name) for name in self.layers}
        checks: list[Check] = []
        for name in filter(TTT.__contains__, self.layers):
            say(f"{name}: checking")
            checks += self._check(name, models[name])
        rows: list[Row] = []
        versus: list[Row] = []
        for context in sorted(self.contexts):
            say(f"timing models after {context} tokens")
            found, compared = self._models(models, context)
            rows, versus = rows + found, versus + compared
        text = (
            f"{self.num_layers} blocks of the Mamba backbone, D = {self.dim}, {self.num_heads} heads, "
            f"{self.vocab_size} tokens in the vocabulary. One sequence, fp32, {self.tokens} tokens a timed call, "
            f"{self.rounds} rounds in turn; ratios are made round by round. Published style: the papers' "
            "code for a token, with the same parameters (`benchmarks/published_decoding.py`). Recorded: what `generate` "
            "does on a CPU, the functions of a step without the Python around them (`metattt/generation/recorder.py`); "
            "compiled: with `compile=true`. Attention: `F.scaled_dot_product_attention` with a cache of keys and "
            "values, which grows, so that its step is not recorded."
        )
        tables = {"Models": rows, "Time of the published style, divided by a model's": versus}
        place = "GPU" if self.device == "cuda" else "CPU"
        return Report(f"Decoding on the {place}", text, tables, checks, asdict(self))

    # -- models --------------------------------------------------------------------------------------------------------

    def _model(self, layer: str) -> LanguageModel:
        sizes = {"dim": self.dim, "num_heads": self.num_heads}
        sizes |= {"model.num_layers": self.num_layers, "model.vocab_size": self.vocab_size}
        steps = ("optimizer.token_step_map=relu",) if layer in TTT else ()  # τ as in the published code
        given = (f"layer={layer}", "model=mamba_backbone", *steps, *(f"{key}={value}" for key, value in sizes.items()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = instantiate_model(compose(*given, job="language_model"))
            for block in model.blocks:  # away from the initial values, which hide mistakes
                randomize(block.layer)  # type: ignore[arg-type]
        return model.eval().to(self.device)

    def _ids(self, length: int, seed: int) -> Tensor:
        ids = torch.randint(self.vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))
        return ids.to(self.device)

    def _check(self, name: str, model: LanguageModel) -> list[Check]:
        """Logits of three mini-batches of tokens, decoded from the middle of one."""
        ids, checks = self._ids(71, 1), []
        with torch.inference_mode():
            _, state = model.step(ids[:, :23])
            published = PublishedDecoding(model, state)
            expected = torch.cat([published.step(token) for token in ids[:, 23:].split(1, dim=1)], 1)
            found = []
            for token in ids[:, 23:].split(1, dim=1):
                logits, state = model.step(token, state)
                found.append(logits)
            off = distance(torch.cat(found, 1), expected)
            checks.append(require(f"{name}, ours and {PUBLISHED}, logits, fp32", off, 1e-4))
        return checks

    def _models(self, models: Mapping[str, LanguageModel], context: int) -> tuple[list[Row], list[Row]]:
        ids = self._ids(self.tokens, 3)

        @torch.inference_mode()
        def read(step: Callable[[Tensor], Tensor]) -> None:
            for token in ids[0].split(1):
                step(token)

        @torch.inference_mode()
        def called(model: LanguageModel, state: LanguageModelState) -> None:  # what grows must not, from round to round
            read(PlainStep(model, state))

        def theirs(model: LanguageModel, state: LanguageModelState) -> Callable[[Tensor], Tensor]:
            published = PublishedDecoding(model, state)
            return lambda token: published.step(token.unsqueeze(1))

        calls: dict[str, Callable[[], object]] = {}
        for name, model in models.items():
            with torch.inference_mode():
                _, state = model.step(self._ids(context, 2), last_only=True)
                if name in TTT:
                    calls[f"{name}\n{PUBLISHED}"] = partial(read, theirs(model, state))
                for way in () if name == "attention" else (RECORDED, COMPILED)[: 1 + self.compile]:
                    on_gpu = self.device == "cuda"
                    with suppress(NotStatic):  # without a C++ compiler, or a kernel for these sizes
                        made = CapturedStep(model, state) if on_gpu else RecordedStep(model, state, compiled=way == COMPILED)
                        calls[f"{name}\n{way}"] = partial(read, made)
                calls[f"{name}\n{CALL}"] = partial(called, model, state.map(torch.clone))  # which is written over
        seconds = in_turn(calls, self.rounds)
        rows, versus = [], []
        for key, took in seconds.items():
            name, way = key.split("\n")
            row: Row = {"layer": name, "way": way, "after tokens": context}
            rows.append(row | summary(took).columns("ms per token", 1000 / self.tokens))
            if name in TTT and way != PUBLISHED:
                versus.append(row | ratios(seconds[f"{name}\n{PUBLISHED}"], took)._asdict())
        return rows, versus
