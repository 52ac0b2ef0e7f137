"""Claim `recall`: accuracy and steps to 99% in associative recall, with and without overwriting."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from metattt.metrics_file import read_rows
from metattt.registry import register
from metattt.reproduce.base import Size
from metattt.reproduce.cells import Runner
from metattt.reproduce.compare import Scored, edges, settings_of
from metattt.reproduce.conditions import Conditions, by_question
from metattt.reproduce.report import Record, Report
from metattt.reproduce.seeds import order, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENOUGH = 0.99  # of the validation questions: where a run stops
NEVER = "not reached"


@register(group="claim", name="recall")
class Recall(Conditions):
    """Layers that answer for keys they have read (MQAR). A row's learning rate is that which reaches 99% of the validation
    questions in the fewest steps, or the highest accuracy where none does."""

    objective = "validation/accuracy"
    lower_is_better = False

    def value(self, folder: Path) -> float:
        """The accuracy; of a run that got to 99%, more the fewer steps it took."""
        accuracy, steps = _last(folder)
        return 1 + 1 / steps if accuracy >= ENOUGH else accuracy

    def run(self, size: Size, runner: Runner) -> Report:
        compared = self.compare(size, runner)
        tables: dict[str, list[Record]] = {}
        records: list[Record] = []
        seen: list[str] = []
        for condition in self.conditions(size):
            accuracy: dict[str, list[float]] = {}
            reached: dict[str, str] = {}
            for row in self.layers(size):
                runs = self.found(compared, condition, row)
                accuracy[row.name] = [100 * fmean(by_question(one.test, "accuracy") or [math.nan]) for one in runs]
                steps = [_steps(one) for one in runs]
                got = [one for one in steps if one is not None]
                some = f" ({len(got)} of {len(runs)} seeds)" if len(got) < len(runs) else ""
                reached[row.name] = f"{fmean(got):.0f}{some}" if got else NEVER
                rate = next((one.learning_rate for one in runs), None)
                tables.setdefault(condition, []).append({
                    "layer": f"`{row.name}`", "test accuracy %": spread(accuracy[row.name], 1), "steps to 99%": reached[row.name],
                    "seeds": len(runs), "learning rate": "" if rate is None else f"{rate:g}",
                })  # fmt: skip
                records += [
                    {"condition": condition, "layer": row.name, "seed": one.seed, "learning_rate": one.learning_rate,
                     "test_accuracy": value / 100, "steps_to_99": "" if taken is None else taken, "seconds": one.run.seconds}
                    for one, value, taken in zip(runs, accuracy[row.name], steps, strict=True)
                ]  # fmt: skip
            done = [f"`{name}` {said}" for name, said in reached.items() if said != NEVER]
            not_done = [f"`{name}` ({spread(accuracy[name], 1)}%)" for name, said in reached.items() if said == NEVER]
            told = [f"reach 99%, after so many steps: {', '.join(done)}"] if done else []
            told += [f"do not within the run: {', '.join(not_done)}"] if not_done else []
            for first, second in self.against:
                if first in accuracy and second in accuracy:
                    told.append(f"in accuracy `{first}` against `{second}`: {order(accuracy[first], accuracy[second], False)}")
            seen.append(f"{condition}: {'; '.join(told)}.")

        def draw(figure: Figure) -> None:
            layers = [row.name for row in self.layers(size)]
            panels = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
            for axes, condition in zip(panels, tables, strict=True):
                for place, name in enumerate(layers):
                    values = [100 * one["test_accuracy"] for one in records if (one["condition"], one["layer"]) == (condition, name)]
                    axes.scatter(values, [place] * len(values), color=f"C{place % 10}", s=28, zorder=3)
                axes.set_title(condition, fontsize=9)
                axes.set(xlim=(0, 103), xlabel="test accuracy %")
                axes.grid(alpha=0.3)
            panels[0].set_yticks(range(len(layers)), layers)
            panels[0].invert_yaxis()

        best = f"{self.objective} (or, where several reach 99%, the fewest steps)"
        return Report(
            seen + edges(compared), tables, records, draw if records else None,
            settings_of(size, self.lower_is_better, best), compared.failures(),
        )  # fmt: skip


def _last(folder: Path) -> tuple[float, int]:
    """The accuracy of the last validation, and its step."""
    rows = [row for row in read_rows(folder / "metrics.csv")[0] if row.get("validation/accuracy")]
    return (float(rows[-1]["validation/accuracy"]), int(rows[-1]["step"])) if rows else (math.nan, 0)


def _steps(one: Scored) -> int | None:
    """The steps that a run took to 99%; None if it did not get there."""
    accuracy, steps = _last(one.run.folder)
    return steps if accuracy >= ENOUGH else None
