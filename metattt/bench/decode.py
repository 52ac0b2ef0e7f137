"""`metattt bench decode`: one token after the other, against the published code's way and against attention; on a GPU
also what a token costs the host beside what it costs the device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from metattt.bench.base import Benchmark, check_counts, require
from metattt.bench.published_decoding import PublishedDecoding
from metattt.bench.report import Check, Report, Row
from metattt.bench.timing import in_turn, ratios, summary
from metattt.composition.compose import build, compose
from metattt.composition.instantiate import instantiate_model
from metattt.errors import MetaTTTError, check_choice, check_number
from metattt.generation.static_step import CapturedStep, PlainStep
from metattt.layer import TTTLayer
from metattt.models.language_model import LanguageModel, LanguageModelState
from metattt.registry import register
from metattt.state import State
from metattt.testing.specimen import distance, randomize

OURS, PUBLISHED, BASELINE, GRAPH = "ours", "published style", "attention", "ours, CUDA graph"
FILLER = 4096  # rows and columns of the product behind which work is queued


@register(group="benchmark", name="decode")
class DecodeBenchmark(Benchmark):
    """Decoding with TTT language models of the Mamba backbone, and with single layers; fp32, one sequence.

    Args:
        device: `cpu`, or `cuda`: then as generation does it, from a CUDA graph, too, and with the time that the host and
            the device take for a token, each for itself.
        layers: sequence layers of the models, TTT-Linear or TTT-MLP as published.
        dim, num_heads, num_layers, vocab_size: size of the models.
        layer_dim: D of the single layers, which have `num_heads` heads, too.
        contexts: tokens that are read before decoding starts.
        tokens: decoded in one timed call.
        rounds: timed calls, in turn.
        at_most: share of the published style's time that a model may take.
        at_most_attention: how many times as long as an attention layer the first of `layers` may take, after the
            longest context. Both bounds are reported, not enforced.
    """

    def __init__(
        self,
        layers: Sequence[str] = ("ttt_linear", "ttt_mlp"),
        dim: int = 256,
        num_heads: int = 4,
        num_layers: int = 4,
        vocab_size: int = 512,
        layer_dim: int = 64,
        contexts: Sequence[int] = (64, 1024),
        tokens: int = 16,
        rounds: int = 15,
        at_most: float = 0.5,
        at_most_attention: float = 1.3,
        device: str = "cpu",
    ):
        check_choice("benchmark.device", device, ("cpu", "cuda"))
        if device == "cuda" and not torch.cuda.is_available():
            raise MetaTTTError("benchmark.device=cuda needs a CUDA device, and there is none: set benchmark.device=cpu")
        for name in layers:
            check_choice("benchmark.layers", name, ("ttt_linear", "ttt_mlp"))
        check_counts(dim=dim, num_heads=num_heads, num_layers=num_layers, vocab_size=vocab_size, layer_dim=layer_dim)
        check_counts(contexts=contexts, tokens=tokens, rounds=rounds)
        for key, value in (("at_most", at_most), ("at_most_attention", at_most_attention)):
            check_number(f"benchmark.{key}", value, above=0)
        if not layers or min(contexts) < 4:
            wrong = f"benchmark.layers={list(layers)} contexts={list(contexts)}"
            raise MetaTTTError(f"{wrong}: one layer or more, and contexts of 4 tokens or more")
        self.layers, self.dim, self.num_heads, self.num_layers = list(layers), dim, num_heads, num_layers
        self.vocab_size, self.layer_dim, self.contexts = vocab_size, layer_dim, sorted(contexts)
        self.tokens, self.rounds, self.at_most, self.at_most_attention = tokens, rounds, at_most, at_most_attention
        self.device = device

    def run(self, say: Callable[[str], None]) -> Report:
        models = {name: self._model(name) for name in (*self.layers, BASELINE)}
        checks: list[Check] = []
        for name in self.layers:
            say(f"{name}: checking")
            checks += self._check(name, models[name])
        rows: list[Row] = []
        versus: list[Row] = []
        for context in self.contexts:
            say(f"timing models after {context} tokens")
            found, compared = self._models(models, context)
            rows, versus = rows + found, versus + compared
        single: list[Row] = []
        for context in self.contexts:
            say(f"timing layers after {context} tokens")
            single += self._single(context)
        text = (
            f"{self.num_layers} blocks of the Mamba backbone, D = {self.dim}, {self.num_heads} heads, {self.vocab_size} tokens in the "
            f"vocabulary; single layers with D = {self.layer_dim}. One sequence, fp32, {self.tokens} tokens one after the other in every "
            f"timed call, {self.rounds} rounds in turn in one process; ratios are made round by round. Published style: what the papers' "
            "PyTorch code does for a token, with the same parameters (`metattt/bench/published_decoding.py`). Attention: "
            "`F.scaled_dot_product_attention` with a cache of keys and values."
        )
        where = "CPU"
        if on_card(self.device):
            where = f"GPU ({torch.cuda.get_device_name()})"
            text += (
                " Host: until all work of a token is launched. Device: the same work queued behind other work, so that no gap is "
                f"counted in which it waits for the host; medians of {self.rounds} tokens, each."
            )
        tables = {
            "Models": rows,
            f"Time of a model, divided by the published style's (at most {self.at_most:g})": versus,
            f"Single layers (at most {self.at_most_attention:g} times attention, {self.layers[0]})": single,
        }
        file = "gpu/decode" if on_card(self.device) else None
        return Report(f"Decoding on the {where}", text, tables, checks, dict(vars(self)), file=file)

    # -- models --------------------------------------------------------------------------------------------------------

    def _model(self, layer: str) -> LanguageModel:
        sizes = {"dim": self.dim, "num_heads": self.num_heads}
        sizes |= {"model.num_layers": self.num_layers, "model.vocab_size": self.vocab_size}
        steps = () if layer == BASELINE else ("optimizer.token_step_map=relu",)  # τ as in the code that it is compared with
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
        ids = self._ids(71, 1)
        with torch.inference_mode():
            _, state = model.step(ids[:, :23])
            published = PublishedDecoding(model, state)
            expected = torch.cat([published.step(token) for token in ids[:, 23:].split(1, dim=1)], 1)
            ways = {OURS: PlainStep(model, state.map(torch.clone))}
            if on_card(self.device):
                ways[GRAPH] = CapturedStep(model, state)  # type: ignore[assignment]
            checks = []
            for way, step in ways.items():
                found = torch.stack([step(token).clone() for token in ids[:, 23:].unbind(1)], 1)
                checks.append(require(f"{name}, {way} and {PUBLISHED}, logits, fp32", distance(found, expected), 1e-4))
        return checks

    def _models(self, models: Mapping[str, LanguageModel], context: int) -> tuple[list[Row], list[Row]]:
        calls: dict[str, Callable[[], object]] = {}
        single: dict[str, Callable[[], object]] = {}  # one token, where host and device are looked at apart
        token = self._ids(1, 3)
        for name, model in models.items():
            with torch.inference_mode():
                _, state = model.step(self._ids(context, 2), last_only=True)
            calls[f"{name}\n{OURS}"] = partial(self._ours, model, state)
            single[f"{name}\n{OURS}"] = partial(PlainStep(model, state.map(torch.clone)), token[:, 0])
            if name != BASELINE:
                calls[f"{name}\n{PUBLISHED}"] = partial(self._published, model, state)
                single[f"{name}\n{PUBLISHED}"] = partial(PublishedDecoding(model, state).step, token)
            if name != BASELINE and on_card(self.device):
                with torch.inference_mode():
                    graph = CapturedStep(model, state)
                calls[f"{name}\n{GRAPH}"] = partial(self._replayed, graph)
                single[f"{name}\n{GRAPH}"] = partial(graph, token[:, 0])
        seconds = in_turn(calls, self.rounds)
        rows, versus = [], []
        for key, took in seconds.items():
            name, way = key.split("\n")
            row: Row = {"layer": name, "way": way, "after tokens": context} | self._milliseconds(took)
            rows.append(row | self._apart(single[key]))
            if way == OURS and name != BASELINE:
                ratio = ratios(took, seconds[f"{name}\n{PUBLISHED}"])
                within = "yes" if ratio.median <= self.at_most else "no"
                versus.append({"layer": name, "after tokens": context} | ratio._asdict() | {"within": within})
        return rows, versus

    def _ours(self, model: LanguageModel, state: LanguageModelState) -> None:
        with torch.inference_mode():
            for index, token in enumerate(self._ids(self.tokens, 3).split(1, dim=1)):
                _, state = model.step(token, state, donate_state=index > 0)  # the first state is that of all rounds

    def _replayed(self, graph: CapturedStep) -> None:
        with torch.inference_mode():
            for token in self._ids(self.tokens, 3).unbind(1):
                graph(token)

    def _published(self, model: LanguageModel, state: LanguageModelState) -> None:
        with torch.inference_mode():
            published = PublishedDecoding(model, state)
            for token in self._ids(self.tokens, 3).split(1, dim=1):
                published.step(token)

    # -- single layers -------------------------------------------------------------------------------------------------

    def _single(self, context: int) -> list[Row]:
        x = torch.randn(1, context + self.tokens, self.layer_dim, generator=torch.Generator().manual_seed(4))
        x = x.to(self.device)
        calls: dict[str, Callable[[], object]] = {}
        single: dict[str, Callable[[], object]] = {}
        for name in (*self.layers, BASELINE):
            layer = build(f"layer={name}", f"dim={self.layer_dim}", f"num_heads={self.num_heads}", "seed=0")
            layer = layer.to(self.device)
            with torch.inference_mode():
                _, state = layer(x[:, :context])
            calls[name] = partial(self._tokens, layer, state, x[:, context:])
            single[name] = partial(self._tokens, layer, state, x[:, context : context + 1])
        seconds = in_turn(calls, self.rounds)
        rows = []
        for name, took in seconds.items():
            row: Row = {"layer": name, "after tokens": context} | self._milliseconds(took) | self._apart(single[name])
            rows.append(
                row | {f"times {BASELINE}, {k}": v for k, v in ratios(took, seconds[BASELINE])._asdict().items()}
            )
        return rows

    def _tokens(self, layer: TTTLayer, state: State, x: Tensor) -> None:
        with torch.inference_mode():
            for index, token in enumerate(x.split(1, dim=1)):
                _, state = layer(token, state, donate_state=index > 0)

    def _apart(self, token: Callable[[], object]) -> Row:
        """What one token costs the host and the device, where these are two."""
        if not on_card(self.device):
            return {}
        with torch.inference_mode():
            token()
            host, device = zip(*[host_and_device(token) for _ in range(self.rounds)], strict=True)
        return {"host, ms per token": 1000 * summary(host).median, "device, ms per token": 1000 * summary(device).median}

    def _milliseconds(self, took: Sequence[float]) -> dict[str, Any]:
        found = summary([1000 * second / self.tokens for second in took])
        return {f"ms per token, {key}": value for key, value in found._asdict().items()}


def on_card(device: str) -> bool:
    """Whether host and device are two."""
    return device == "cuda"


def host_and_device(function: Callable[[], object]) -> tuple[float, float]:
    """Seconds until the host has launched all of `function`, and seconds that its work takes on the CUDA device.

    For the second, it is queued behind work that takes longer than launching it does. `function` must not wait for the
    device.
    """
    started, ended, filled = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    square = torch.ones(FILLER, FILLER, device="cuda")
    torch.cuda.synchronize()
    before = time.perf_counter()
    function()
    host = time.perf_counter() - before
    torch.cuda.synchronize()
    filled.record()
    torch.mm(square, square)
    started.record()
    torch.cuda.synchronize()
    times = 1 + math.ceil(2 * host / (filled.elapsed_time(started) / 1000))
    for _ in range(times):
        torch.mm(square, square)
    started.record()
    function()
    ended.record()
    torch.cuda.synchronize()
    return host, started.elapsed_time(ended) / 1000
