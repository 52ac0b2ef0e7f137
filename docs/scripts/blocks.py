"""Parts of pages that are generated as a whole from `results/`: what stands between `<!-- generated: name -->` and
`<!-- end -->`. `python docs/scripts/numbers.py` writes them again, and the tests compare them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAYERS = {
    "ttt_linear": "TTT-Linear",
    "ttt_mlp": "TTT-MLP",
    "gated_delta_net": "Gated DeltaNet",
    "torch attention": "softmax attention (PyTorch)",
}


def stdlib() -> str:
    """How good the model of README's training command is, over seeds."""
    with (ROOT / "results/stdlib/runs.csv").open(encoding="utf-8", newline="") as file:
        found = {row["seed"]: float(row["validation/bits_per_byte"]) for row in csv.DictReader(file)}
    first, *others = (f"{found[seed]:.4f}" for seed in sorted(found))
    return (
        f"Training takes minutes on two cores and ends at {first} bits per byte of validation text ({' and '.join(others)} with seeds\n"
        "1 and 2, whose validation files are others; [runs](results/stdlib/runs.md)). A table at the end compares it with byte n-gram\n"
        "baselines from the same text. The folder under `runs/` has a checkpoint, a CSV log and this plot (seed 0):\n"
    )


def measured() -> str:
    """Layers, and training and decoding of models, beside the published style and softmax attention."""
    whole, model = (tables(f"results/cpu/{name}.json") for name in ("layer", "model"))
    rows = []
    for layer, title in LAYERS.items():
        forms = [row for row in whole["Time"] if row["layer"] == layer and row["pass"] == "forward + backward" and row["T"] == 4096]
        cells = [milliseconds(min(row["ms, median"] for row in forms), 0)]
        named = layer.replace("torch ", "")
        own = "a call of the model" if named == "attention" else "recorded"  # which `generate` takes
        for job, ways, decimals in (("Training", ("a call of the model", "published style"), 0), ("Decoding", (own, "published style"), 1)):
            for way in ways:
                wanted = {"layer": named, "way": way, "tokens": 1024}
                cells.append(milliseconds(value(model[job], wanted, "ms, median"), decimals))
        rows.append([title, *cells])
    head = ["", "whole layer, forward + backward", "training step of a model", "the same, published style"]
    head += ["one token, decoding", "the same, published style"]
    return (
        table(head, rows)
        + "\nOne CPU thread, fp32, medians; other machines give other times. *Whole layer*: 4,096 tokens, D = 768, 12 heads"
        " (`python benchmarks/speed.py layer`).\n*Model*: 4 blocks, D = 256, 1,024 tokens; decoding is a token"
        " after these (`speed.py model`),\n[recorded](docs/measured.md#decoding) except for attention and the published"
        " style. *Published style* is our reimplementation of the papers'\nPyTorch code, with the same parameters. Every command"
        " checks its results before it times them ([all measurements](docs/measured.md)).\n"
    )


def layers() -> str:
    """Whole layers by length, as multiples of softmax attention's time."""
    rows = tables("results/cpu/layer.json")["Times as long as torch attention"]
    names = LAYERS | {"mamba2": "Mamba-2", "delta_net": "DeltaNet", "linear_attention": "linear attention"}
    made = []
    for layer in ("ttt_linear", "ttt_mlp", "delta_net", "gated_delta_net", "mamba2", "linear_attention"):
        wanted = {"layer": layer, "form": "fused", "pass": "forward + backward"}
        ratios = [value(rows, wanted | {"T": length}, "median") for length in (512, 1024, 2048, 4096)]
        made.append([names[layer], *(f"{ratio:.2f}" for ratio in ratios)])
    return table(["layer", "T = 512", "T = 1,024", "T = 2,048", "T = 4,096"], made)


def decoding() -> str:
    """One token of a model in every way, beside the published style."""
    rows = tables("results/cpu/model.json")["Decoding"]
    ways, made = ("published style", "a call of the model", "recorded", "compiled"), []
    for layer in ("ttt_linear", "ttt_mlp", "gated_delta_net", "attention"):
        times = [
            value(rows, {"layer": layer, "way": way, "tokens": 1024}, "ms, median") for way in ways
        ]
        made.append([(LAYERS | {"attention": "softmax attention"})[layer], *(milliseconds(time, 1) for time in times)])
    return table(["layer", *ways], made)


def memory() -> str:
    """Peak memory of the inner loop with and without recomputation."""
    rows = tables("results/cpu/memory.json")["Peak memory"]
    made = []
    for layer in ("ttt_linear", "ttt_mlp"):
        wanted = {"layer": layer, "part": "inner loop"}
        ways = ("off", "on", "on, form=auto")
        peaks = [value(rows, wanted | {"time checkpointing": way}, "peak MB") for way in ways]
        made.append([LAYERS[layer], *(f"{peak:.0f} MB" for peak in peaks)])
    return table(["layer", "everything stored", "groups recomputed", "groups and kernel"], made)


def rules() -> str:
    """The bare rules of linear learners in one process, with their kernels and without."""
    found = tables("results/cpu/rules/layer.json")
    times, made = found["Time"], []
    for name in dict.fromkeys(row["layer"] for row in times if row["layer"] != "torch attention"):
        wanted = {"layer": name, "pass": "forward + backward"}
        own, plain = ({**wanted, "form": form} for form in ("fused", "dual"))
        ratio = value(found["Times as long as gated_delta_net"], own, "median")
        gain = value(found["Times as long as another form"], plain, "median")
        least, median = (milliseconds(value(times, own, f"ms, {one}"), 0) for one in ("least", "median"))
        without = milliseconds(value(times, plain, "ms, median"), 0)
        made.append([f"`{name}`", least, median, "1" if ratio is None else f"{ratio:.2f}", without, f"{gain:.2f}"])
    return table(["layer", "min", "median", "times `gated_delta_net`", "plain PyTorch", "times the kernel"], made)


def adaptation() -> str:
    """What models of the standard library gain on other texts."""
    found = tables("results/adapt.json")
    kinds = ("c_headers", "documentation", "logs")
    made = []
    for model, title in (("ttt_linear", "TTT-Linear"), ("attention", "softmax attention")):
        for row in found[model]:
            means = [str(row[kind]).partition(" ")[0] for kind in kinds]
            made.append([f"{title}, {row['condition']}", *means, f"{row['µs per token']:,} µs"])
    return table(["", "C headers", "Debian's documentation", "logs", "time of a token"], made)


def tables(file: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads((ROOT / file).read_text(encoding="utf-8"))["tables"]
    return found


def value(rows: Iterable[dict[str, Any]], wanted: dict[str, Any], column: str) -> float | None:
    """The number of the one row that has the wanted values; None where there is no such row."""
    found = [float(row[column]) for row in rows if all(row.get(key) == one for key, one in wanted.items())]
    assert len(found) < 2, wanted
    return found[0] if found else None


def milliseconds(number: float | None, decimals: int) -> str:
    return "–" if number is None else f"{number:,.{decimals}f} ms"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown; columns after the first are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


MADE = (stdlib, measured, layers, decoding, memory, rules, adaptation)
BLOCKS: dict[str, Callable[[], str]] = {make.__name__: make for make in MADE}
