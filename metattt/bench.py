"""`metattt bench`: checks a composed layer against the reference implementation, then times it in every form.

The repository's own benchmarks are scripts: `python benchmarks/speed.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from torch import Tensor

from metattt.composition.instantiate import instantiate_layer
from metattt.composition.settings import pick_device
from metattt.errors import MetaTTTError
from metattt.inner.planning import ASKED
from metattt.layer import TTTLayer
from metattt.sequence_layer import SequenceLayer
from metattt.state import WHOLE_CALL
from metattt.testing.specimen import compare, distance, randomize, run

ORACLE = "primal"
LONGEST = 203  # tokens of the calls that are checked: the oracle keeps the weights of each
FLOAT64, FLOAT32 = 1e-8, 1e-3
"""Bounds of relative errors: of forms in float64, and of kernels, which compute in fp32."""


def bench(cfg: DictConfig) -> None:
    """Checks every form of the composed layer, outputs and gradients, and one call against two; then times a forward
    pass, a forward and backward pass and one decoded token. Prints both.

    Args:
        cfg: as `configs/bench.yaml` has it.

    Raises:
        SystemExit: code 1, if forms differ: nothing is timed.
        MetaTTTError: the configuration does not make a layer, or a setting is not allowed.
    """
    device, console = pick_device(cfg.device), Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(cfg.threads)
    forms, missing = forms_of(cfg, device)
    table = Table("check", "worst error", "bound", "result")
    passed = True
    for name, (error, bound) in checks(forms, device, cfg.length).items():
        passed = passed and error <= bound
        table.add_row(name, f"{error:.1e}", f"{bound:.0e}", "[green]pass[/]" if error <= bound else "[bold red]FAIL[/]")
    if table.rows:
        console.print(table)
    for form, reason in missing.items():
        console.print(f"form={form}: {reason}", markup=False)
    if (size := mini_batch_of(next(iter(forms.values())))) != WHOLE_CALL and size >= LONGEST:
        console.print(f"no mini-batch of {size:,} tokens ends within the {LONGEST} checked: metattt check cuts them")
    if not passed:
        console.print("nothing is timed: a form does not compute what the layer is")
        raise SystemExit(1)
    timed = {form: layer for form, layer in forms.items() if form != ORACLE or len(forms) == 1}
    for layer in timed.values():
        layer.to(device, torch.float32)
    columns = times(timed, cfg.length, cfg.batch, cfg.rounds, device)
    kind = "bf16 autocast" if device.type == "cuda" else "fp32"
    title = f"B={cfg.batch}, T={cfg.length}, D={cfg.dim}, {kind} on {device}: ms, median (min to max)"
    table = Table("form", *columns, title=title)
    for form in timed:
        table.add_row(form, *(_told(took.get(form)) for took in columns.values()))
    console.print(table)


def forms_of(cfg: DictConfig, device: torch.device) -> tuple[dict[str, SequenceLayer], dict[str, str]]:
    """The layer in each of its forms, with the same parameters, the reference first; and for other forms the reason why
    they do not exist."""
    found: dict[str, SequenceLayer] = {}
    missing: dict[str, str] = {}
    layer: SequenceLayer = instantiate_layer(cfg)
    asked = ASKED[1:] if isinstance(layer, TTTLayer) and layer.learner.has_weights else ()
    for form in asked:
        one = OmegaConf.merge(cfg, {"layer": {"form": form}})
        try:
            assert isinstance(one, DictConfig)
            made = instantiate_layer(one)
            if form == "fused":  # a kernel sees sizes and types in a call
                with torch.no_grad():
                    made.to(device)(torch.zeros(1, cfg.length, cfg.dim, device=device))
            found.setdefault(made.form, made)
        except MetaTTTError as error:
            missing[form] = str(error).splitlines()[0]
    found = found or {getattr(layer, "form", "scan"): layer}
    first = next(iter(found.values()))
    randomize(first)  # type: ignore[arg-type]  # random parameters: initial values (zeros) hide errors
    for other in found.values():
        other.load_state_dict(first.state_dict())
    return found, missing


def mini_batch_of(layer: SequenceLayer) -> int:
    """Tokens of the longest mini-batch in a layer, at least 16."""
    return max([16, *(getattr(rule, "mini_batch_size", 1) for rule in layer.modules())])


def checks(forms: Mapping[str, SequenceLayer], device: torch.device, length: int) -> dict[str, tuple[float, float]]:
    """Name -> relative error and its bound: forms against the oracle, one call against two. `length` (tokens): of the
    calls of a layer to which a call is more than its tokens."""
    found: dict[str, tuple[float, float]] = {}
    first = next(iter(forms))
    size = mini_batch_of(forms[first])
    whole_call = size == WHOLE_CALL or not forms[first].causal
    generator, count = torch.Generator().manual_seed(1), length if whole_call else min(2 * size + 3, LONGEST)
    x = torch.randn(2, count, forms[first].dim, generator=generator, dtype=torch.float64)
    for form, layer in forms.items():
        kernel = form == "fused"
        here = x.to(device, torch.float32 if kernel else torch.float64)
        against, bound = "dual" if kernel and "dual" in forms else first, FLOAT32 if kernel else FLOAT64
        for one in (layer, forms[against]):
            one.to(here)
        whole = run(layer, here, grads=True)  # type: ignore[arg-type]
        if form != against:
            expected = run(forms[against], here, grads=True)  # type: ignore[arg-type]
            found[f"{form} and {against}, outputs and gradients"] = compare(whole, expected), bound
        if whole_call:
            continue
        with suppress(MetaTTTError):  # the layer carries no state between calls
            two = run(layer, here, [len(x[0]) - 5])  # type: ignore[arg-type]
            found[f"{form}, one call and two, outputs"] = distance(two.y, whole.y), bound
    return found


def times(
    forms: Mapping[str, SequenceLayer], length: int, batch: int, rounds: int, device: torch.device
) -> dict[str, dict[str, list[float]]]:
    """What is timed -> form -> seconds of every call, all forms in turn."""
    dim, generator = next(iter(forms.values())).dim, torch.Generator().manual_seed(2)
    x = torch.randn(batch, length + 1, dim, generator=generator).to(device)
    cast = partial(torch.autocast, device.type, torch.bfloat16, enabled=device.type == "cuda")

    def forward(layer: SequenceLayer) -> None:
        with torch.inference_mode(), cast():
            layer(x[:, :-1])

    def training(layer: SequenceLayer) -> None:
        layer.zero_grad()
        with cast():
            y: Tensor = layer(x[:, :-1].requires_grad_())[0]  # in a model its tokens need a gradient, too
        y.float().square().mean().backward()

    def decode(layer: SequenceLayer, state: object) -> None:
        with torch.inference_mode(), cast():
            layer(x[:, -1:], state)

    calls: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "forward + backward": {}, "one token": {}}
    for form, layer in forms.items():
        calls["forward"][form] = partial(forward, layer)
        calls["forward + backward"][form] = partial(training, layer)
        with suppress(MetaTTTError), torch.inference_mode(), cast():  # there may be no state
            _, state = layer(x[:, :-1])
            if state is None:
                continue
            decode(layer, state)
            calls["one token"][form] = partial(decode, layer, state)
    return {title: _in_turn(by_form, rounds) for title, by_form in calls.items()}


def _in_turn(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds by name; each round calls every function once, so that a busy machine slows all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number:  # the first has warmed up
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _told(seconds: list[float] | None) -> str:
    if not seconds:
        return "–"
    times = (1000 * one for one in (statistics.median(seconds), min(seconds), max(seconds)))
    return "{} ({} to {})".format(*(f"{ms:.3g}" if ms < 999.5 else f"{ms:,.0f}" for ms in times))
