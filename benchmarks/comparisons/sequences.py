"""Claims about synthetic sequences, under several conditions: `recall` and `in_context`."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from common import Row as Record
from report import Report

from comparisons.baselines import baselines
from comparisons.comparison import Claim, column, compare, draw_points, from_the_best, last_value, order, spread, table
from comparisons.jobs import Result, Runner
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_part

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENOUGH = 0.99  # of the validation questions: where a run of `recall` stops
NEVER = "not reached"


def by_question(test: Result, name: str) -> list[float]:
    """A column of what `metattt eval` writes of synthetic sequences, by question; empty without it."""
    return [float(row[name]) for row in table(test, "sequences.csv")]


def steps_to_enough(folder: Path) -> int | None:
    """The steps that a run took to 99% of the validation questions; None if it did not get there."""
    accuracy = column(folder, "validation/accuracy")
    return int(last_value(folder, "step")) if accuracy and accuracy[-1] >= ENOUGH else None


def judged(folder: Path) -> float:
    """The accuracy; of a run that got to 99%, more the fewer steps it took."""
    steps = steps_to_enough(folder)
    return 1 + 1 / steps if steps else last_value(folder, "validation/accuracy")


def recall(claim: Claim, runner: Runner) -> Report:
    """Layers that answer for keys they have read (MQAR). A row's learning rate is that which reaches 99% of the
    validation questions in the fewest steps, or the highest accuracy where none does."""
    compared = compare(claim, runner, judged)
    tables: dict[str, list[Record]] = {}
    records: list[Record] = []
    seen: list[str] = []
    found: dict[str, dict[str, list[float]]] = {}
    for condition in claim.conditions:
        accuracy = found.setdefault(condition, {})
        reached: dict[str, str] = {}
        for row in claim.rows:
            runs = compared.of(row.name, condition)
            accuracy[row.name] = [100 * fmean(by_question(one.test, "accuracy") or [math.nan]) for one in runs]
            steps = [steps_to_enough(one.run.folder) for one in runs]
            got = [one for one in steps if one is not None]
            some = f" ({len(got)} of {len(runs)} seeds)" if len(got) < len(runs) else ""
            reached[row.name] = f"{fmean(got):.0f}{some}" if got else NEVER
            rate = compared.best(f"{condition}, {row.name}")
            tables.setdefault(condition, []).append({
                "layer": f"`{row.name}`", "test accuracy %": spread(accuracy[row.name], 1),
                "steps to 99%": reached[row.name], "seeds": len(runs),
                "learning rate": "" if rate is None else f"{rate:g}",
            })  # fmt: skip
            records += [
                {"condition": condition, "layer": row.name, "seed": one.seed, "learning_rate": one.learning_rate,
                 "test_accuracy": value / 100, "steps_to_99": taken or "", "seconds": one.run.seconds}
                for one, value, taken in zip(runs, accuracy[row.name], steps, strict=True)
            ]  # fmt: skip
        done = [f"`{name}` {said}" for name, said in reached.items() if said != NEVER]
        not_done = [f"`{name}` ({spread(accuracy[name], 1)}%)" for name, said in reached.items() if said == NEVER]
        told = [f"reach 99%, after so many steps: {', '.join(done)}"] if done else []
        told += [f"do not within the run: {', '.join(not_done)}"] if not_done else []
        told += [f"in accuracy {one}" for one in _against(claim, accuracy, False)]
        seen.append(f"{condition}: {'; '.join(told)}.")

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(found), squeeze=False)[0]
        for axes, (condition, accuracy) in zip(panels, found.items(), strict=True):
            draw_points(axes, accuracy, "test accuracy %")
            axes.set(title=condition, xlim=(0, 103))

    return claim.report(compared, seen, tables, records, draw)


def in_context(claim: Claim, runner: Runner) -> Report:
    """Mean squared error of every layer by the number of examples before the question, beside exact estimators with
    settings of their own choice."""
    compared = compare(claim, runner)
    tables: dict[str, list[Record]] = {}
    records: list[Record] = []
    seen: list[str] = []
    curves: dict[str, dict[str, list[float]]] = {}
    names = [row.name for row in claim.rows]
    for condition, words in claim.conditions.items():
        cfg = compose(*claim.overrides, *words)
        data = instantiate_part(cfg, "data")
        shown = sorted({0, cfg.data.features // 2, cfg.data.features, cfg.data.examples - 1})
        fitted = {one.name: [one.errors] for one in baselines(data, cfg.data.function, cfg.data.hidden)}
        runs = {name: compared.of(name, condition) for name in names}
        read = {name: [by_question(one.test, "loss") for one in ones] for name, ones in runs.items()}
        errors = {name: [one for one in ones if one] for name, ones in read.items()} | fitted
        seeds = {name: [one.seed for one in ones if one.test.finished] for name, ones in runs.items()}
        records += [
            {"condition": condition, "learner": name, "seed": seed, "examples": count, "squared_error": value}
            for name, found in errors.items() for seed, one in zip(seeds.get(name, [""]), found, strict=True)
            for count, value in enumerate(one)
        ]  # fmt: skip
        for name, found in errors.items():
            rate = compared.best(f"{condition}, {name}")
            row: Record = {"learner": f"`{name}`" if name in names else name}
            row |= {f"{count} examples": spread([one[count] for one in found]) for count in shown}
            tables.setdefault(condition, []).append(row | {"learning rate": "" if rate is None else f"{rate:g}"})
            curves.setdefault(condition, {})[name] = [fmean(ones) for ones in zip(*found, strict=True)]
        last = {name: [one[-1] for one in found] for name, found in errors.items()}
        ordered = [*from_the_best({name: last[name] for name in names}), *fitted]
        said = ", ".join(f"{name} {spread(last[name])}" for name in ordered)
        seen.append(f"{condition}, after {cfg.data.examples - 1} examples (always to answer 0 has about 1): {said}.")
        seen += [f"{condition}: {one}." for one in _against(claim, last, True)]

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
        for axes, (condition, found) in zip(panels, curves.items(), strict=True):
            for place, (name, errors) in enumerate(found.items()):
                own = name in names
                dash = "-" if own else (":", "--", "-.")[place - len(names)]
                style = {"color": f"C{place}" if own else "black", "linestyle": dash}
                axes.plot(range(len(errors)), [max(one, 1e-3) for one in errors], label=name.partition(",")[0], **style)
            axes.set(title=condition, xlabel="examples before the question", yscale="log")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
        panels[0].set_ylabel("squared error (answering 0: 1); below 0.001 drawn at 0.001")

    return claim.report(compared, seen, tables, records, draw)


def _against(claim: Claim, values: dict[str, list[float]], lower_is_better: bool) -> list[str]:
    """How the pairs of rows stand to each other that the claim names."""
    pairs = [pair for pair in claim.options.get("against", ()) if {*pair} <= {*values}]
    return [f"`{a}` against `{b}`: {order(values[a], values[b], lower_is_better)}" for a, b in pairs]
