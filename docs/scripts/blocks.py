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
    """How good the model of the first command is, over seeds."""
    with (ROOT / "results/stdlib/runs.csv").open(encoding="utf-8", newline="") as file:
        found = {row["seed"]: float(row["validation/bits_per_byte"]) for row in csv.DictReader(file)}
    first, *others = (f"{found[seed]:.4f}" for seed in sorted(found))
    return (
        f"Training takes minutes on two cores and ends at {first} bits per byte of validation text ({' and '.join(others)} with seeds\n"
        "1 and 2, whose validation files are others; [runs](results/stdlib/runs.md)). The last line compares this with byte n-gram\n"
        "baselines from the same text. The folder under `runs/` has a checkpoint, a CSV log and this plot (seed 0):\n"
    )


def measured() -> str:
    """Layers, their inner operation and decoding, beside the published style and softmax attention."""
    whole, inner, decode = (tables(f"results/cpu/{name}.json") for name in ("layer", "inner", "decode"))
    rows = []
    for layer, title in LAYERS.items():
        short = {"ttt_linear": "linear", "ttt_mlp": "mlp"}.get(layer)
        named = layer.replace("torch ", "")
        forms = [row for row in whole["Time"] if row["layer"] == layer and row["pass"] == "forward + backward" and row["T"] == 4096]
        cells = [milliseconds(min(row["ms, median"] for row in forms), 0)]
        for way in ("fused", "published style"):
            wanted = {"learner": short, "pass": "training", "threads": 1, "way": way}
            cells.append(milliseconds(value(inner["Time"], wanted, "ms, median"), 0))
        for way in ("ours", "published style"):
            wanted = {"layer": named, "way": way, "after tokens": 1024}
            cells.append(milliseconds(value(decode["Models"], wanted, "ms per token, median"), 1))
        rows.append([title, *cells])
    head = ["", "whole layer, forward + backward", "inner operation, forward + backward", "the same, published style"]
    head += ["one token, decoding", "the same, published style"]
    return (
        table(head, rows)
        + "\nOne CPU thread, fp32, medians; other machines give other times. *Whole layer*: 4,096 tokens, D = 768, 12 heads"
        " (`python benchmarks/speed.py layer`).\n*Inner operation*: 2,048 tokens, 12 heads (`speed.py inner`). *Decoding*: a token of a"
        " 4-block model after 1,024 (`speed.py decode`). *Published\nstyle* is our reimplementation of the papers' PyTorch code, with the"
        " same parameters. Every command checks its results before it times them\n([all measurements](docs/measured.md)).\n"
    )


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


BLOCKS: dict[str, Callable[[], str]] = {"stdlib": stdlib, "measured": measured}
