"""`metattt bench model`: a language model with different layers: training, prefill, and decoding after short and long
contexts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from metattt.bench.base import Benchmark, check_counts, require
from metattt.bench.ceilings import Ceilings, ceilings
from metattt.bench.report import Check, Panel, Report, Row
from metattt.bench.timing import in_turn, ratios, summary
from metattt.catalog.known_layers import known_layers
from metattt.catalog.layer_measures import Operations
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.composition.settings import pick_device
from metattt.errors import MetaTTTError, check_choice, check_number
from metattt.models.language_model import LanguageModel, LanguageModelState
from metattt.registry import register
from metattt.testing.specimen import distance, randomize


@register(group="benchmark", name="model")
class ModelBenchmark(Benchmark):
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
        bound: decoding after the longest context may take so many times as long as after the shortest (reported, not
            enforced).
        device: `cpu`, `cuda`, or `auto`.
    """

    def __init__(
        self,
        preset: str = "125m",
        layers: Sequence[str] = ("ttt_linear", "ttt_mlp", "attention"),
        overrides: Sequence[str] = (),
        train_length: int = 512,
        contexts: Sequence[int] = (64, 512, 4096),
        decode_tokens: int = 16,
        rounds: int = 2,
        decode_rounds: int = 9,
        bound: float = 1.1,
        device: str = "auto",
    ):
        for name in layers:
            check_choice("benchmark.layers", name, known_layers())
        check_counts(train_length=train_length, contexts=contexts, decode_tokens=decode_tokens)
        check_counts(rounds=rounds, decode_rounds=decode_rounds)
        check_number("benchmark.bound", bound, above=0)
        if not layers or len(contexts) < 2:
            raise MetaTTTError(
                f"benchmark.layers={list(layers)} contexts={list(contexts)}: one layer or more, two lengths or more"
            )
        self.preset, self.layers, self.overrides, self.bound = preset, list(layers), list(overrides), bound
        self.train_length, self.contexts, self.decode_tokens = train_length, sorted(contexts), decode_tokens
        self.rounds, self.decode_rounds, self.device = rounds, decode_rounds, pick_device(device)
        self.matmul_dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.baseline = "attention" if "attention" in layers else self.layers[0]

    def run(self, say: Callable[[str], None]) -> Report:
        checks: list[Check] = []
        for name in self.layers:
            say(f"{name}: checking")
            checks += self._check(name)
        models = {name: self._model(name).to(self.device) for name in self.layers}
        ceiling = ceilings(self.device, self.matmul_dtype)
        say("timing training steps")
        training, ratio = self._training(models, ceiling)
        prefill: list[Row] = []
        states: dict[str, dict[int, LanguageModelState]] = {name: {} for name in models}
        for length in self.contexts:
            say(f"timing prefills of {length} tokens")
            rows, found = self._prefill(models, length, ceiling, states)
            prefill, ratio = prefill + rows, ratio + found
        say("timing decoding")
        decoding, growth, found = self._decoding(models, states, ceiling)
        tables = {"Training": training, "Prefill": prefill, "Decoding": decoding}
        tables |= {
            f"Decoding, times as long as after {self.contexts[0]} tokens": growth,
            f"Times as long as {self.baseline}": ratio + found,
        }
        forms = "; ".join(f"{name}: form={_form(model)}" for name, model in models.items())
        text = (
            f"Preset {self.preset} with the Mamba backbone, one sequence, {str(self.matmul_dtype).removeprefix('torch.')} operands, all in "
            f"turn in one process. {forms}. Training: forward, backward and AdamW on {self.train_length} tokens, {self.rounds} rounds. "
            f"Prefill: one call, with the logits of its last token, {self.rounds} rounds. Decoding: {self.decode_tokens} tokens, one after "
            f"the other, from the state after a prefill, {self.decode_rounds} rounds. Ratios are made round by round. `attention` is "
            "`F.scaled_dot_product_attention` with a cache of keys and values.\n\n"
            "Share of ceiling: of training and prefill, the operations of the products (generic form, three times the forward pass for a "
            f"step, masked ones of attention too) at {ceiling.operations / 1e9:.0f} GFLOP/s, measured with large matrices; of decoding, "
            f"the bytes of parameters and states at {ceiling.bytes / 1e9:.1f} GB/s, measured with a product of a large matrix and a "
            "vector. Both in the same process."
        )
        settings = {key: str(value) if key in ("device", "matmul_dtype") else value for key, value in vars(self).items()}
        return Report("Language models", text, tables, checks, settings, self._panels(prefill, decoding))

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
        return model.to(self.device)

    def _check(self, name: str) -> list[Check]:
        """Two blocks in fp32: against the dual form, and decoding after a prefill against one call."""
        ids = self._ids(96, 1)
        model = self._small(name, "auto")
        checks = []
        if _form(model) not in ("scan", "dual"):
            found = [self._gradients(one, ids) for one in (model, self._small(name, "dual"))]
            error = max(distance(*pair) for pair in zip(*found, strict=True))
            checks.append(require(f"{name}, form={_form(model)} and dual, loss and gradients, fp32", error, 5e-3))
        with torch.inference_mode():
            expected = model(ids)
            logits, state = model.step(ids[:, :71])
            rows = [logits]
            for token in ids[:, 71:].split(1, dim=1):
                logits, state = model.step(token, state)
                rows.append(logits)
            checks.append(
                require(
                    f"{name}, prefill with decoding and one call, logits, fp32",
                    distance(torch.cat(rows, 1), expected),
                    1e-3,
                )
            )
        return checks

    def _gradients(self, model: LanguageModel, ids: Tensor) -> list[Tensor]:
        """The loss, and the gradients of every kind of parameter, all blocks' as one vector (some of one block's are
        nearly zero)."""
        loss = model.cross_entropy(ids[:, :-1], ids[:, 1:])[0]
        names, parameters = zip(*model.named_parameters(), strict=True)
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        kinds: dict[str, list[Tensor]] = {}
        for name, gradient in zip(names, found, strict=True):
            kinds.setdefault("block" if name.startswith("blocks.") else name, []).append(gradient.flatten())
        return [loss.detach(), *(torch.cat(gradients) for gradients in kinds.values())]

    def _ids(self, length: int, seed: int) -> Tensor:
        vocab_size = int(compose(f"preset={self.preset}", *self.overrides, job="language_model").model.vocab_size)
        return torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(seed)).to(self.device)

    # -- what is timed -------------------------------------------------------------------------------------------------

    def _cast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.matmul_dtype is torch.bfloat16)

    def _training(self, models: Mapping[str, LanguageModel], ceiling: Ceilings) -> tuple[list[Row], list[Row]]:
        ids = self._ids(self.train_length + 1, 2)
        calls = {}
        for name, model in models.items():
            calls[name] = partial(self._step, model, torch.optim.AdamW(model.parameters(), lr=1e-5), ids)
        seconds = in_turn(calls, self.rounds)
        for model in models.values():
            model.zero_grad()
        return self._rows("training", seconds, self.train_length, 3, self.train_length, ceiling)

    def _step(self, model: LanguageModel, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
        optimizer.zero_grad()
        with self._cast():
            loss = model.cross_entropy(ids[:, :-1], ids[:, 1:])[0]
        (loss / ids.shape[1]).backward()
        optimizer.step()

    def _prefill(
        self,
        models: Mapping[str, LanguageModel],
        length: int,
        ceiling: Ceilings,
        states: dict[str, dict[int, LanguageModelState]],
    ) -> tuple[list[Row], list[Row]]:
        ids = self._ids(length, 3)

        def read(name: str) -> None:
            with torch.inference_mode(), self._cast():
                states[name][length] = models[name].step(ids, last_only=True)[1]

        warmup = int(length == self.contexts[0])  # the longer ones are slow enough without
        seconds = in_turn({name: partial(read, name) for name in models}, self.rounds, warmup)
        return self._rows("prefill", seconds, length, 1, 1, ceiling)

    def _decoding(
        self,
        models: Mapping[str, LanguageModel],
        states: Mapping[str, Mapping[int, LanguageModelState]],
        ceiling: Ceilings,
    ) -> tuple[list[Row], list[Row], list[Row]]:
        ids = self._ids(self.decode_tokens, 4)
        calls = {
            f"{name} {length}": partial(self._decode, models[name], state, ids)
            for name, found in states.items()
            for length, state in found.items()
        }
        seconds = in_turn(calls, self.decode_rounds)
        rows: list[Row] = []
        growth: list[Row] = []
        versus: list[Row] = []
        for name, found in states.items():
            parameters = sum(parameter.numel() for parameter in models[name].parameters()) * self.matmul_dtype.itemsize
            for length, state in found.items():
                took = seconds[f"{name} {length}"]
                milliseconds = summary([1000 * second / self.decode_tokens for second in took])
                carried = sum(layer.nbytes for layer in state.layers)
                row: Row = {"layer": name, "after tokens": length}
                row |= {f"ms per token, {key}": value for key, value in milliseconds._asdict().items()} | {
                    "state, MB": carried / 1e6
                }
                rows.append(
                    row | {"share of ceiling": ceiling.share(milliseconds.median / 1000, 0, parameters + carried)}
                )
                if length != self.contexts[0]:
                    longer = ratios(took, seconds[f"{name} {self.contexts[0]}"])
                    within = "yes" if longer.median <= self.bound else "no"
                    growth.append(
                        {"layer": name, "after tokens": length} | longer._asdict() | {f"at most {self.bound:g}": within}
                    )
                if name != self.baseline:
                    ratio = ratios(took, seconds[f"{self.baseline} {length}"])
                    versus.append({"layer": name, "what": "decoding", "T": length} | ratio._asdict())
        return rows, growth, versus

    def _decode(self, model: LanguageModel, state: LanguageModelState, ids: Tensor) -> None:
        with torch.inference_mode(), self._cast():
            for token in ids.split(1, dim=1):
                _, state = model.step(token, state)

    # -- what is written -----------------------------------------------------------------------------------------------

    def _rows(
        self, what: str, seconds: Mapping[str, list[float]], length: int, passes: int, logits: int, ceiling: Ceilings
    ) -> tuple[list[Row], list[Row]]:
        """Times of one call per layer, and their ratios to the baseline."""
        rows: list[Row] = []
        versus: list[Row] = []
        for name, took in seconds.items():
            found = summary(took)
            row: Row = {"layer": name, "T": length} | {f"s, {key}": value for key, value in found._asdict().items()}
            share = ceiling.share(found.median, passes * self._operations(name, length, logits))
            rows.append(row | {"tokens/s": length / found.median, "share of ceiling": share})
            if name != self.baseline:
                versus.append(
                    {"layer": name, "what": what, "T": length} | ratios(took, seconds[self.baseline])._asdict()
                )
        return rows, versus

    def _operations(self, name: str, length: int, logits: int) -> int:
        """Of the products of a forward pass, counted on one block in the generic form."""
        model = self._model(name, "model.num_layers=1", "layer.form=dual").to(self.device)
        with torch.no_grad(), Operations() as counter:  # inference mode hides what linear layers are made of
            model.features(self._ids(length, 3))
        given = compose(f"preset={self.preset}", *self.overrides, job="language_model")
        return counter.count * int(given.model.num_layers) + 2 * logits * model.head.weight.numel()

    def _panels(self, prefill: Sequence[Row], decoding: Sequence[Row]) -> list[Panel]:
        panels = []
        for title, rows, x, y in (
            ("Prefill", prefill, "T", "tokens/s"),
            ("Decoding", decoding, "after tokens", "ms per token, median"),
        ):
            curves = {
                name: (
                    [row[x] for row in rows if row["layer"] == name],
                    [row[y] for row in rows if row["layer"] == name],
                )
                for name in self.layers
            }
            panels.append(Panel(title, "tokens read" if x != "T" else "T (tokens)", y.removesuffix(", median"), curves))
        return panels


def _form(model: LanguageModel) -> str:
    layer: Any = model.blocks[0].layer
    return str(layer.form)
