"""The best launches that the stage `tuning` has found, by shape and by programs at once, for the kernels' tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from metattt.bench.gpu.ledger import DONE, Line

FILE = "tuning.json"
SAME = ("width", "size", "dtype")


def entries(results: Sequence[Line]) -> list[dict[str, Any]]:
    """The best launch for each operation, shape and number of programs.

    Returns:
        Of each: `operation`, `width` d, `size` b, `dtype`, `heads`, `length` T, `programs` B·H, `best` (the name under
        which `tuning.variants` offers it; None: the one that is used), its `ms` and that of the one that is used, both
        medians, and `times used` (least, median, most, round by round). A launch is better if it was in every round.
    """
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in results:
        if line["kind"] == "variant" and line["state"] == DONE:
            case = line["case"]
            at = (*(case[name] for name in SAME), case["heads"], case["length"], case["tokens"])
            groups.setdefault((line["subject"], *at), []).append(line)
    found = []
    for (operation, width, size, dtype, heads, length, tokens), lines in groups.items():
        best = min(lines, key=lambda line: float(line["found"]["times used, median"]))
        better = float(best["found"]["times used, most"]) < 1
        ratios = [best["found"][f"times used, {which}"] if better else 1.0 for which in ("least", "median", "most")]
        found.append({
            "operation": operation, "width": width, "size": size, "dtype": dtype, "heads": heads, "length": length,
            "programs": tokens // length * heads, "best": best["case"]["variant"] if better else None,
            "ms": best["found"]["ms, median" if better else "used, ms, median"], "used, ms": best["found"]["used, ms, median"],
            "times used": ratios, "tried": len(lines),
        })  # fmt: skip
    return found


def winner(results: Sequence[Line], operation: str, case: Mapping[str, Any], programs: int) -> str | None:
    """The best launch for a case: that of the nearest number of programs that was tuned; None: the one that is used."""
    near = [
        entry
        for entry in entries(results)
        if entry["operation"] == operation and all(entry[name] == case[name] for name in SAME)
    ]
    if not near:
        return None
    best: str | None = min(near, key=lambda entry: abs(math.log(entry["programs"] / programs)))["best"]
    return best
