"""Claims whose rows have one figure each: `table1`, `pixels`, `quality`, `minibatch`."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from common import Row as Record
from report import Report

from comparisons.comparison import (
    Claim,
    bits_per_byte,
    column,
    compare,
    deviation,
    draw_points,
    from_the_best,
    ranked,
    spread,
    steps_against,
    top1,
)  # fmt: skip
from comparisons.jobs import Result, Runner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARED = "speeds are the median of the steps of a run, and only as steady as the machine: other programs slow them"


def rows(claim: Claim, runner: Runner) -> Report:
    """A table of rows. Options: `score` (`bits_per_byte` or `top1`), `best_first`, `baseline` (the row that the others
    are told as multiples of) with `behind` (what is more than so many times is named), and `speed` (of training)."""
    options = claim.options
    lower = options.get("score", "bits_per_byte") == "bits_per_byte"
    score, label = (bits_per_byte, "test bits per byte") if lower else (top1, "test top-1 %")
    compared = compare(claim, runner)
    values = compared.values(claim, score)
    if options.get("best_first"):
        values = {name: values[name] for name in from_the_best(values, lower)}
    by_name = {row.name: row for row in claim.rows}
    reported = {name: by_name[name].reported for name in values}
    baseline = statistics.fmean(values.get(options.get("baseline", ""), []) or [math.nan])
    speeds = {name: [_speed(one.run) for one in compared.of(name)] for name in values} if options.get("speed") else {}
    table: list[Record] = []
    for name, ones in values.items():
        rate = compared.best(name)
        row: Record = {"row": f"`{name}`", label: spread(ones, 3 if lower else 1), "seeds": len(ones)}
        row["learning rate"] = "" if rate is None else f"{rate:g}"
        if any(one is not None for one in reported.values()):
            row["in the paper"] = "" if reported[name] is None else f"{reported[name]:g}"
        if "baseline" in options:
            row[f"times {options['baseline']}"] = f"{statistics.fmean(ones) / baseline:.3f}" if ones else "–"
            tried = compared.tried.get(name, {})
            row["validation at each rate"] = ", ".join(f"{rate:g}: {value:.3f}" for rate, value in tried.items())
        if speeds:
            row["training, tokens/s"] = spread(speeds[name], 0)
        table.append(row)
    records = [
        {"row": name, "seed": one.seed, "learning_rate": one.learning_rate, label.replace(" ", "_"): score(one.test),
         "seconds": one.run.seconds, "reported": one.row.reported}
        | ({"training_tokens_per_second": _speed(one.run)} if speeds else {})
        for name in values for one in compared.of(name)
    ]  # fmt: skip
    seen = steps_against(values, reported, lower) if any(one is not None for one in reported.values()) else []
    seen = seen or [f"From the best ({label}): {ranked(values, lower)}."]
    spreads = {name: deviation(ones) for name, ones in values.items() if not math.isnan(deviation(ones))}
    if spreads:
        widest = max(spreads, key=spreads.__getitem__)
        seen.append(f"The widest spread over seeds is {spreads[widest]:.3f}, of `{widest}`.")
    if "baseline" in options and not math.isnan(baseline):
        times = {name: statistics.fmean(ones) / baseline for name, ones in values.items() if ones}
        late = [f"`{name}` ({ratio:.3f} times)" for name, ratio in times.items() if ratio > options["behind"]]
        title = f"More than {options['behind'] - 1:.0%} behind `{options['baseline']}`"
        seen.append(f"{title}: {', '.join(late) or 'none'}.")
    if never := [f"`{name}`" for name, ones in values.items() if not ones]:
        seen.append(f"Without a figure, at no learning rate: {', '.join(never)}.")
    if any(math.isfinite(one) for ones in speeds.values() for one in ones):
        fastest = from_the_best(speeds, lower_is_better=False)[0]
        seen.append(f"Training is fastest with `{fastest}`: {spread(speeds[fastest], 0)} tokens a second.")

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2 if speeds else 1, squeeze=False)[0]
        draw_points(panels[0], values, label)
        if not math.isnan(baseline):
            panels[0].axvline(baseline, color="gray", linewidth=1)
        if speeds:
            draw_points(panels[1], speeds, "training, tokens per second")
        figure.suptitle(claim.title)

    return claim.report(compared, seen, {"Rows": table}, records, draw, *([SHARED] if speeds else []))


def _speed(run: Result) -> float:
    """Tokens a second while training, the median of the steps that were logged; NaN if none were."""
    values = column(run.folder, "tokens_per_second") or column(run.folder, "train/tokens_per_second")
    return statistics.median(values) if values else math.nan
