"""A language model with different layers: training, prefill, and decoding after short and long contexts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import Check, Row, Say, in_turn, ratios, require, some, summary
from report import Report
from torch import Tensor

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.composition.settings import pick_device
from metattt.errors import MetaTTTError
from metattt.models.language_model import LanguageModel, LanguageModelState
from metattt.testing.specimen import distance, randomize

States = dict[str, dict[int, LanguageModelState]]  # by layer and tokens read


@dataclass
class Models:
    """The Mamba backbone of one preset on one sequence: fp32 on the CPU, bf16 autocast on a GPU.

    Args:
        preset: size of the model.
        layers: its sequence layers, each a model; all are held at the same time. Ratios are to `attention`, else to the
            first.
        overrides: of the model's configuration, e.g. `model.num_layers=2`.
        train_length: T of a training step with AdamW, tokens.
        contexts: tokens of the prefills, after which tokens are decoded.
        decode_tokens: decoded in one timed call.
        rounds: timed training steps and prefills, in turn.
        decode_rounds: timed decoding calls, in turn.
        device: `cpu`, `cuda`, or `auto`.
    """

    MAY_BE_EMPTY = ("overrides",)
    preset: str = "125m"
    layers: list[str] = some("ttt_linear", "ttt_mlp", "attention")
    overrides: list[str] = some()
    train_length: int = 512
    contexts: list[int] = some(64, 512, 4096)
    decode_tokens: int = 16
    rounds: int = 2
    decode_rounds: int = 9
    device: str = "auto"

    def run(self, say: Say) -> Report:
        if len(self.contexts) < 2:
            raise MetaTTTError(f"contexts={self.contexts} is not allowed: give two lengths or more")
        self.contexts.sort()
        self.at, self.versus = pick_device(self.device), []  # type: tuple[torch.device, list[Row]]
        self.dtype = torch.float32 if self.at.type == "cpu" else torch.bfloat16
        self.baseline = "attention" if "attention" in self.layers else self.layers[0]
        checks: list[Check] = []
        for name in self.layers:
            say(f"{name}: checking")
            checks += self._check(name)
        models = {name: self._model(name).to(self.at) for name in self.layers}
        say("timing training steps")
        tables = {"Training": self._training(models), "Prefill": []}
        states: States = {name: {} for name in models}
        for length in self.contexts:
            say(f"timing prefills of {length} tokens")
            tables["Prefill"] += self._prefill(models, length, states)
        say("timing decoding")
        tables["Decoding"] = self._decoding(models, states)
        tables[f"Times as long as {self.baseline}"] = self.versus
        forms = "; ".join(f"{name}: form={_form(model)}" for name, model in models.items())
        text = (
            f"Preset {self.preset} with the Mamba backbone, one sequence, {str(self.dtype)[6:]} operands, all in turn. "
            f"{forms}. Training: forward, backward, AdamW, {self.train_length} tokens; prefill: one call, with the "
            f"logits of its last token; {self.rounds} rounds. Decoding: {self.decode_tokens} tokens after a prefill, "
            f"{self.decode_rounds} rounds. Ratios are made round by round. `attention` is "
            "`F.scaled_dot_product_attention` with a cache of keys and values."
        )
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Report("Language models", text, tables, checks, shown)

    # -- models and their check ----------------------------------------------------------------------------------------

    def _model(self, layer: str, *overrides: str) -> LanguageModel:
        given = (f"preset={self.preset}", f"layer={layer}", "model=mamba_backbone", *self.overrides, *overrides)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return instantiate_model(compose(*given, job="language_model"))

    def _small(self, layer: str, form: str) -> LanguageModel:
        """Two blocks of the model, away from their initial values, which hide mistakes."""
        model = self._model(layer, "model.num_layers=2", f"layer.form={form}")
        for block in model.blocks:
            randomize(block.layer)  # type: ignore[arg-type]
        return model.to(self.at)

    def _check(self, name: str) -> list[Check]:
        """Two blocks in fp32: against the dual form, and decoding after a prefill against one call."""
        ids, checks = self._ids(96, 1), []
        model = self._small(name, "auto")
        if _form(model) not in ("scan", "dual"):
            found = [_gradients(one, ids) for one in (model, self._small(name, "dual"))]
            error = max(distance(*pair) for pair in zip(*found, strict=True))
            checks.append(require(f"{name}, form={_form(model)} and dual, loss and gradients, fp32", error, 5e-3))
        with torch.inference_mode():
            logits, state = model.step(ids[:, :71])
            rows = [logits]
            for token in ids[:, 71:].split(1, dim=1):
                logits, state = model.step(token, state)
                rows.append(logits)
            error = distance(torch.cat(rows, 1), model(ids))
        return [*checks, require(f"{name}, prefill with decoding and one call, logits, fp32", error, 1e-3)]

    def _ids(self, length: int, seed: int) -> Tensor:
        vocab_size = int(compose(f"preset={self.preset}", *self.overrides, job="language_model").model.vocab_size)
        return torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(seed)).to(self.at)

    # -- what is timed -------------------------------------------------------------------------------------------------

    def _cast(self) -> torch.autocast:
        return torch.autocast(self.at.type, torch.bfloat16, enabled=self.dtype is torch.bfloat16)

    def _training(self, models: Mapping[str, LanguageModel]) -> list[Row]:
        ids = self._ids(self.train_length + 1, 2)

        def step(model: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad()
            with self._cast():
                loss = model.cross_entropy(ids[:, :-1], ids[:, 1:])[0]
            (loss / ids.shape[1]).backward()
            optimizer.step()

        optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-5) for name, model in models.items()}
        seconds = in_turn({name: partial(step, models[name], one) for name, one in optimizers.items()}, self.rounds)
        return self._rows("training", seconds, self.train_length)

    def _prefill(self, models: Mapping[str, LanguageModel], length: int, states: States) -> list[Row]:
        ids = self._ids(length, 3)

        def read(name: str) -> None:
            with torch.inference_mode(), self._cast():
                states[name][length] = models[name].step(ids, last_only=True)[1]

        warmup = int(length == self.contexts[0])  # the longer ones are slow enough without
        seconds = in_turn({name: partial(read, name) for name in models}, self.rounds, warmup)
        return self._rows("prefill", seconds, length)

    def _decoding(self, models: Mapping[str, LanguageModel], states: States) -> list[Row]:
        ids = self._ids(self.decode_tokens, 4)

        def decode(model: LanguageModel, state: LanguageModelState) -> None:
            with torch.inference_mode(), self._cast():
                for token in ids.split(1, dim=1):
                    _, state = model.step(token, state)

        held = {(name, length): state for name, found in states.items() for length, state in found.items()}
        calls = {f"{name} {length}": partial(decode, models[name], state) for (name, length), state in held.items()}
        seconds = in_turn(calls, self.decode_rounds)
        rows: list[Row] = []
        for (name, length), state in held.items():
            took = seconds[f"{name} {length}"]
            each = summary([second / self.decode_tokens for second in took])
            row: Row = {"layer": name, "after tokens": length} | each.columns("ms per token", 1000)
            rows.append(row | {"state, MB": sum(layer.nbytes for layer in state.layers) / 1e6})
            self._against(name, "decoding", length, took, seconds[f"{self.baseline} {length}"])
        return rows

    # -- what is written -----------------------------------------------------------------------------------------------

    def _rows(self, what: str, seconds: Mapping[str, list[float]], length: int) -> list[Row]:
        """Times of one call per layer."""
        for name, took in seconds.items():
            self._against(name, what, length, took, seconds[self.baseline])
        return [
            {"layer": name, "T": length} | summary(took).columns("s") | {"tokens/s": length / summary(took).median}
            for name, took in seconds.items()
        ]

    def _against(self, name: str, what: str, length: int, took: list[float], baseline: list[float]) -> None:
        if name != self.baseline:
            self.versus.append({"layer": name, "what": what, "T": length} | ratios(took, baseline)._asdict())


def _gradients(model: LanguageModel, ids: Tensor) -> list[Tensor]:
    """The loss, and the gradients of every kind of parameter, all blocks' as one vector (some of one block's are nearly
    zero)."""
    loss = model.cross_entropy(ids[:, :-1], ids[:, 1:])[0]
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    kinds: dict[str, list[Tensor]] = {}
    for name, gradient in zip(names, found, strict=True):
        kinds.setdefault("block" if name.startswith("blocks.") else name, []).append(gradient.flatten())
    return [loss.detach(), *(torch.cat(gradients) for gradients in kinds.values())]


def _form(model: LanguageModel) -> str:
    layer: Any = model.blocks[0].layer
    return str(layer.form)
