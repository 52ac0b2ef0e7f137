"""The best launches that the stage `tuning` has found, by shape and by programs at once, for the kernels' tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from metattt.bench.gpu.ledger import DONE, Line

FILE = "tuning.json"
SAME = ("width", "size", "dtype")


def entries(results: Sequence[Line]) -> list[dict[str, Any]]:
    """The best launch for each operation, shape, number of programs and part of the launch.

    Returns:
        Of each: `operation`, `width` d, `size` b, `dtype`, `heads`, `length` T, `programs` B·H, `part` (what stands
        before the colon in the names of `tuning.variants`, such as `forward`), `best` (the name; None: the launch that is
        used), its `ms` and that of the one that is used, both medians, and `times used` (least, median, most,
        round by round). A launch is better if it was in every round.
    """
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in results:
        if line["kind"] == "variant" and line["state"] == DONE:
            case = line["case"]
            at = (*(case[name] for name in SAME), case["heads"], case["length"], case["tokens"])
            groups.setdefault((line["subject"], *at, case["variant"].partition(":")[0]), []).append(line)
    found = []
    for (operation, width, size, dtype, heads, length, tokens, part), lines in groups.items():
        best = min(lines, key=lambda line: float(line["found"]["times used, median"]))
        better = float(best["found"]["times used, most"]) < 1
        ratios = [best["found"][f"times used, {which}"] if better else 1.0 for which in ("least", "median", "most")]
        found.append({
            "operation": operation, "width": width, "size": size, "dtype": dtype, "heads": heads, "length": length,
            "programs": tokens // length * heads, "part": part, "best": best["case"]["variant"] if better else None,
            "ms": best["found"]["ms, median" if better else "used, ms, median"], "used, ms": best["found"]["used, ms, median"],
            "times used": ratios, "tried": len(lines), "sets": best["found"].get("sets", {}) if better else {},
        })  # fmt: skip
    return found


def tables(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """What the best launches set, by operation and by table of its `tuning`: `TABLE.update` takes such a table in.

    Constants are left out: they would hold for every shape.
    """
    merged: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in found:
        for name, values in entry["sets"].items():
            if isinstance(values, dict):
                merged.setdefault(entry["operation"], {}).setdefault(name, {}).update(values)
    return merged


def winners(results: Sequence[Line], operation: str, case: Mapping[str, Any], programs: int) -> list[str]:
    """The best launches for a case, of each part: those of the nearest number of programs that was tuned, without the
    parts whose launch is the one that is used."""
    alike = [
        entry
        for entry in entries(results)
        if entry["operation"] == operation and all(entry[name] == case[name] for name in SAME)
    ]
    if not alike:
        return []
    nearest = min((entry["programs"] for entry in alike), key=lambda tuned: abs(math.log(tuned / programs)))
    return [entry["best"] for entry in alike if entry["programs"] == nearest and entry["best"] is not None]
