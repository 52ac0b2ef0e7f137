"""Figures of several seeds, and what two sets of them say about an order."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

Order = Literal["better", "worse", "within the spread", "not known"]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation; of one value itself, of none a dash."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def order(values: Sequence[float], than: Sequence[float], lower_is_better: bool = True) -> Order:
    """How figures stand to others: `better` or `worse` if every seed of the one is so against every seed of the other.

    No distribution is assumed: of two sets of three that differ in nothing, one in ten pairs is apart like this by
    chance.
    """
    if not values or not than:
        return "not known"
    sign = 1 if lower_is_better else -1
    ours, theirs = [sign * one for one in values], [sign * one for one in than]
    return "better" if max(ours) < min(theirs) else "worse" if min(ours) > max(theirs) else "within the spread"


def steps_against(
    values: Mapping[str, Sequence[float]], reported: Mapping[str, float | None], lower_is_better: bool = True
) -> list[str]:
    """Sentences about the order of rows that follow each other: where it is the paper's, where it is the opposite, and
    where seeds differ as much.

    Args:
        values: row -> figures by seed, in the order of the paper's table.
        reported: row -> the paper's figure; lower (or higher) is better for both.
        lower_is_better: of the figures and of the paper's.
    """
    sign = 1 if lower_is_better else -1
    same: list[str] = []
    opposite: list[str] = []
    apart: list[str] = []
    equal: list[str] = []
    unknown: list[str] = []
    for first, second in pairwise(values):
        before, after = reported.get(first), reported.get(second)
        found = order(values[second], values[first], lower_is_better)
        name = f"`{first}` → `{second}`"
        if before is None or after is None or found == "not known":
            unknown.append(name)
        elif before == after:
            (equal if found == "within the spread" else opposite).append(f"{name} ({found}; equal in the paper)")
        elif found == "within the spread":
            apart.append(name)
        else:
            papers = "better" if sign * after < sign * before else "worse"
            (same if papers == found else opposite).append(f"{name} ({found})")
    told = [
        ("As in the paper", same + equal),
        ("Against the paper", opposite),
        ("Within the spread of the seeds, so neither", apart),
        ("Not known, for want of figures", unknown),
    ]
    count = len(values) - 1
    return [f"{what}, {len(ones)} of {count} steps: {'; '.join(ones)}." for what, ones in told if ones]
