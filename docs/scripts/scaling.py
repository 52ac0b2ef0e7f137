"""The arithmetic of docs/scaling.md: `python docs/scripts/scaling.py` writes results/scaling.json, where the page's numbers come from.

Bytes of messages are measured (results/cpu/time_parallel.json, by `python benchmarks/speed.py time_parallel`); what is assumed stands in
`ASSUMED`, and in the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = "results/scaling.json"
ASSUMED = {
    "GPUs": 1024,
    "tokens of a context": 2**20,
    "D": 2048,
    "blocks": 24,
    "FLOP a token and block, forward": 0.11e9,
    "FLOP/s of a GPU": 400e12,
    "bytes/s between GPUs": 50e9,
    "seconds until a message arrives": 10e-6,
    "bytes/s inside a node": 450e9,
    "GPUs of a node": 8,
}
Row = dict[str, Any]


def messages(root: Path) -> list[Row]:
    """Bytes that a block hands on for a sequence, as measured, and what that makes for a model."""
    measured = json.loads((root / "results/cpu/time_parallel.json").read_text())["tables"]
    rows = measured["Bytes handed on for one block and one sequence"]
    bytes_of: dict[str, int] = {row["layer"]: row[f"D = {ASSUMED['D']}"] for row in rows}
    return [
        {"layer": layer, "bytes a block": count, "MB a model": count * ASSUMED["blocks"] / 1e6, "ms": 1000 * hop(count)}
        for layer, count in bytes_of.items()
    ]


def hop(count: float) -> float:
    return count / ASSUMED["bytes/s between GPUs"] + ASSUMED["seconds until a message arrives"]


def cell(tokens: float) -> float:
    """Seconds of one block's forward pass over one segment."""
    return tokens * ASSUMED["FLOP a token and block, forward"] / ASSUMED["FLOP/s of a GPU"]


def idle(sequences: int, gpus: float, pieces: int = 1) -> float:
    """(R − 1) / (R − 1 + B R L / G) for large R, with `pieces` segments for each process in turn."""
    return gpus / (gpus + pieces * sequences * ASSUMED["blocks"])


def tables(root: Path = ROOT) -> dict[str, list[Row]]:
    gpus, context, node = ASSUMED["GPUs"], ASSUMED["tokens of a context"], ASSUMED["GPUs of a node"]
    handed = messages(root)
    took = {row["layer"]: row["ms"] for row in handed}
    segments = [
        {"R": ranks, "tokens": context // ranks, "cell (ms)": 1000 * cell(context / ranks)} for ranks in (64, 256, 1024)
    ]
    shares = [
        {"sequences": count, "million tokens": count * context / 1e6, "idle": idle(count, gpus), "idle, heads": idle(count, gpus / node)}
        for count in (16, 32, 64, 256)
    ]
    tokens = 16384  # of a segment whose heads are divided over a node
    summed = 2 * ASSUMED["D"] * tokens * 2 * (node - 1) / node  # bytes of a ring's sum of activations of two bytes
    last = segments[-1]["cell (ms)"] * ASSUMED["blocks"]
    others = {
        "hop over cell, ttt_mlp, R = 64": took["ttt_mlp"] / segments[0]["cell (ms)"],
        "hop over cell, ttt_mlp, R = 1024": took["ttt_mlp"] / segments[-1]["cell (ms)"],
        "sums in a node (ms)": 2 * 1000 * summed / ASSUMED["bytes/s inside a node"],
        "cell of a node's GPU (ms)": 1000 * cell(tokens / node),
        "idle, 8 segments in turn, 32 sequences": idle(32, gpus, pieces=8),
        "tokens kept, 32 sequences": 32 * context / gpus,
        "GB kept, 32 sequences": ASSUMED["blocks"] * (32 * context / gpus) * ASSUMED["D"] * 2 / 1e9,
        "GB of keys and values, half a context": 2 * 4 * ASSUMED["D"] * context / 2 / 1e9,
        "hops of a scan (ms)": (gpus - 1) * took["linear_attention"],
        "forward of a sequence (ms)": last,
        "backward of a sequence (ms)": 2 * last,
    }
    return {
        "Messages": handed, "Segments": segments, "Idle": shares,
        "Others": [{"what": what, "value": value} for what, value in others.items()],
    }  # fmt: skip


def main() -> None:
    written = {"assumed": ASSUMED, "tables": tables()}
    (ROOT / RESULT).write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")
    print(f"written  {RESULT}")


if __name__ == "__main__":
    main()
