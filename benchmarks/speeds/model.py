"""Language models with different layers, beside the published code's way: training, prefill, one token after the
other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from common import Check, Row, Say, in_turn, product, ratios, reading, require, some, summary
from published_models import PublishedDecoding, PublishedModel
from report import Report
from torch import Tensor

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.composition.settings import pick_device
from metattt.errors import MetaTTTError
from metattt.generation.recorder import NotStatic
from metattt.generation.static_step import CapturedStep, PlainStep, RecordedStep
from metattt.measures.flops import flops_per_window
from metattt.models.language_model import LanguageModel, LanguageModelState
from metattt.testing.specimen import distance, randomize

OURS, PUBLISHED, RECORDED, COMPILED = "a call of the model", "published style", "recorded", "compiled"
TTT = ("ttt_linear", "ttt_mlp")
BASELINE = "attention"
Way = tuple[str, str]  # layer, and how the model is run
CEILING: Way = "", "ceiling"


class Work(NamedTuple):
    """What is timed in turn: models, and a call that does nothing but what the machine is best at.

    Attributes:
        least: by layer, how many times that call a model could take at best.
        tokens: that a call of a model decodes, or 1.
    """

    calls: dict[Way, Callable[[], object]]
    ceiling: Callable[[], object]
    least: dict[str, float]
    tokens: int = 1


@dataclass
class Models:
    """Language models of the Mamba backbone on one sequence: fp32 on the CPU, bf16 autocast on a GPU.

    Args:
        layers: its sequence layers, each a model; all are held at the same time.
        overrides: of the models' configuration, such as `preset=125m`.
        lengths: T of training steps and of the prefills, after which tokens are decoded; multiples of 16.
        tokens: decoded in one timed call.
        rounds: timed calls, in turn.
        compile: time compiled decoding, too; on a CPU only.
        device: `cpu`, `cuda`, or `auto`.
    """

    MAY_BE_EMPTY = ("overrides",)
    layers: list[str] = some(*TTT, "gated_delta_net", BASELINE)
    overrides: list[str] = some("dim=256", "num_heads=4", "model.num_layers=4", "model.vocab_size=512")
    lengths: list[int] = some(64, 1024)
    tokens: int = 16
    rounds: int = 7
    compile: bool = True
    device: str = "auto"

    def run(self, say: Say) -> Report:
        if wrong := [length for length in self.lengths if length % 16]:
            raise MetaTTTError(f"lengths={wrong} is not allowed: multiples of 16, whole mini-batches")
        self.at = pick_device(self.device)
        self.dtype = torch.float32 if self.at.type == "cpu" else torch.bfloat16
        models, checks = {name: self._model(name) for name in self.layers}, list[Check]()
        for name, model in models.items():
            say(f"{name}: checking")
            checks += self._check(name, model)
        jobs = {"Training": self._training, "Prefill": self._prefill, "Decoding": self._decoding}
        published, attention = (f"Time of {one}, divided by the model's" for one in ("the published style", BASELINE))
        tables: dict[str, list[Row]] = {title: [] for title in (*jobs, published, attention)}
        for length in sorted(self.lengths):
            for title, job in jobs.items():
                say(f"{title}: timing models, {length} tokens")
                work = job(models, length)
                seconds = in_turn({CEILING: work.ceiling, **work.calls}, self.rounds)
                ceiling = seconds.pop(CEILING)
                for (name, way), took in seconds.items():
                    row: Row = {"layer": name, "way": way, "tokens": length}
                    share = summary([work.least[name] * one / all_ for one, all_ in zip(ceiling, took, strict=True)])
                    row |= summary(took).columns("ms", 1000 / work.tokens) | {"share": share.median}
                    tables[title].append(row)
                    of = {"what": title.lower(), "layer": name, "way": way, "tokens": length}
                    if way != PUBLISHED and (name, PUBLISHED) in seconds:
                        tables[published].append(of | ratios(seconds[name, PUBLISHED], took)._asdict())
                    if way != PUBLISHED and name != BASELINE and (BASELINE, OURS) in seconds:
                        tables[attention].append(of | ratios(seconds[BASELINE, OURS], took)._asdict())
        text = (
            f"`{' '.join(self.overrides)}`, one sequence, {str(self.dtype)[6:]} operands, {self.rounds} rounds in turn; "
            "ratios are made round by round. Training: forward and backward. Prefill: one call, with the logits of its "
            f"last token. Decoding: a token after so many, {self.tokens} in a timed call. Published style: the papers' "
            "code with the same parameters (`benchmarks/published_models.py`). Recorded: what `generate` does on a CPU, "
            "the functions of a step without the Python around them (`metattt/generation/recorder.py`); compiled: with "
            "`compile=true`. `attention` is `F.scaled_dot_product_attention` with a cache of keys and values.\n\n"
            "Share: of training and prefill, the time that the matrix products take (generic form, three times the "
            "forward pass for training, masked parts included) at the rate of a large product; of decoding, that of "
            "reading all parameters once at the rate of a large matrix with a vector. Both are timed in every round."
        )
        found = {title: rows for title, rows in tables.items() if rows}
        return Report("Language models", text, found, checks, asdict(self))

    # -- models and their check ----------------------------------------------------------------------------------------

    def _model(self, layer: str) -> LanguageModel:
        steps = ("optimizer.token_step_map=relu",) if layer in TTT else ()  # τ as in the published code
        given = (f"layer={layer}", "model=mamba_backbone", *steps, *self.overrides)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = instantiate_model(compose(*given, job="language_model"))
            for block in model.blocks:  # away from the initial values, which hide mistakes
                randomize(block.layer)  # type: ignore[arg-type]
        return model.to(self.at)

    def _check(self, name: str, model: LanguageModel) -> list[Check]:
        """Against the published style, and decoding after a prefill against one call; in fp32."""
        ids, checks = self._ids(80, 1), []
        if name in TTT:
            expected, found = (_gradients(call, model, ids) for call in (model, PublishedModel(model)))
            error = max(distance(*pair) for pair in zip(found, expected, strict=True))
            checks.append(require(f"{name} and {PUBLISHED}, logits and gradients, fp32", error, 5e-3))
        with torch.inference_mode():
            logits, state = model.step(ids[:, :39])
            ways = {OURS: PlainStep(model, state.map(torch.clone))} | self._published_steps(name, model, state)
            for way, step in ways.items():
                rows = [logits, *(step(token).unsqueeze(1) for token in ids[0, 39:].split(1))]
                error = distance(torch.cat(rows, 1), model(ids))
                checks.append(require(f"{name}, {way}, token by token and one call, logits, fp32", error, 1e-3))
        return checks

    def _ids(self, length: int, seed: int) -> Tensor:
        vocab_size = int(compose(*self.overrides, job="language_model").model.vocab_size)
        return torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(seed)).to(self.at)

    def _published_steps(
        self, name: str, model: LanguageModel, state: LanguageModelState
    ) -> dict[str, Callable[[Tensor], Tensor]]:
        """Token `[1]` to logits `[1, V]`, from a copy of a state."""
        if name not in TTT:
            return {}
        published = PublishedDecoding(model, state)
        return {PUBLISHED: lambda token: published.step(token.unsqueeze(1))[:, -1]}

    # -- what is timed -------------------------------------------------------------------------------------------------

    def _cast(self) -> torch.autocast:
        return torch.autocast(self.at.type, torch.bfloat16, enabled=self.dtype is torch.bfloat16)

    def _ways(self, models: Mapping[str, LanguageModel]) -> dict[Way, LanguageModel | PublishedModel]:
        published = {(name, PUBLISHED): PublishedModel(models[name]) for name in TTT if name in models}
        return {(name, OURS): model for name, model in models.items()} | published

    def _work(self, calls: dict[Way, Callable[[], object]], length: int, times: int, logits: int) -> Work:
        """With the products of so many forward passes, with so many logits, as the least."""
        ceiling, operations = product(self.at, self.dtype)
        least = {}
        for name in self.layers:
            model = self._model(name).to("meta")
            head = 2 * (length - logits) * model.dim * model.vocab_size
            least[name] = times * (flops_per_window(model, length) - head) / operations
        return Work(calls, ceiling, least)

    def _training(self, models: Mapping[str, LanguageModel], length: int) -> Work:
        ids = self._ids(length + 1, 2)

        def step(name: str, model: LanguageModel | PublishedModel) -> None:
            models[name].zero_grad()
            with self._cast():
                if isinstance(model, PublishedModel):
                    loss = F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])
                else:
                    loss = model.cross_entropy(ids[:, :-1], ids[:, 1:])[0] / length
            loss.backward()

        calls = {way: partial(step, way[0], model) for way, model in self._ways(models).items()}
        return self._work(calls, length, 3, length)  # type: ignore[arg-type]

    def _prefill(self, models: Mapping[str, LanguageModel], length: int) -> Work:
        ids = self._ids(length, 3)

        @torch.inference_mode()
        def read(model: LanguageModel | PublishedModel) -> None:
            with self._cast():
                model(ids, last_only=True) if isinstance(model, PublishedModel) else model.step(ids, last_only=True)

        calls = {way: partial(read, model) for way, model in self._ways(models).items()}
        return self._work(calls, length, 1, 1)  # type: ignore[arg-type]

    def _decoding(self, models: Mapping[str, LanguageModel], length: int) -> Work:
        ids = self._ids(self.tokens, 4)[0].split(1)

        @torch.inference_mode()
        def read(step: Callable[[Tensor], Tensor]) -> None:
            with self._cast():
                for token in ids:
                    step(token)

        @torch.inference_mode()
        def called(model: LanguageModel, state: LanguageModelState) -> None:  # what grows must not, from round to round
            read(PlainStep(model, state))

        calls: dict[Way, Callable[[], object]] = {}
        for name, model in models.items():
            with torch.inference_mode(), self._cast():
                _, state = model.step(self._ids(length, 5), last_only=True)
                for way, step in self._published_steps(name, model, state).items():
                    calls[name, way] = partial(read, step)
                for way in () if name == BASELINE else (RECORDED, COMPILED)[: 1 + self.compile]:
                    with suppress(NotStatic):  # without a C++ compiler, or a kernel for these sizes
                        on_gpu = self.at.type == "cuda"
                        made = CapturedStep(model, state) if on_gpu else RecordedStep(model, state, 1, way == COMPILED)
                        calls[name, way] = partial(read, made)
                calls[name, OURS] = partial(called, model, state.map(torch.clone))  # which is written over
        ceiling, size = reading(self.at, self.dtype)
        parameters = {name: [*model.blocks.parameters(), *model.head.parameters()] for name, model in models.items()}
        least = {name: self.tokens * sum(x.nbytes for x in held) / size for name, held in parameters.items()}
        return Work(calls, ceiling, least, self.tokens)


def _gradients(function: Callable[[Tensor], Tensor], model: LanguageModel, ids: Tensor) -> list[Tensor]:
    """The logits, and the gradients of every kind of parameter, all blocks' as one vector (some of one block's are
    nearly zero)."""
    logits = function(ids)
    loss = F.cross_entropy(logits[0, :-1], ids[0, 1:])
    names, parameters = zip(*((name, p) for name, p in model.named_parameters() if p.requires_grad), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    kinds: dict[str, list[Tensor]] = {}
    for name, gradient in zip(names, found, strict=True):
        kinds.setdefault("block" if name.startswith("blocks.") else name, []).append(gradient.flatten())
    return [logits.detach(), *(torch.cat(gradients) for gradients in kinds.values())]
