"""Claim `in_context`: layers that learn a new function from the examples before them, beside estimators that are fitted."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_part
from metattt.registry import register
from metattt.reproduce.base import Size
from metattt.reproduce.baselines import baselines
from metattt.reproduce.cells import Runner
from metattt.reproduce.compare import edges, settings_of
from metattt.reproduce.conditions import Conditions, by_question
from metattt.reproduce.report import Record, Report
from metattt.reproduce.seeds import order, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@register(group="claim", name="in_context")
class InContext(Conditions):
    """Mean squared error of every layer by the number of examples before the question, beside exact estimators with
    settings of their own choice."""

    objective = "validation/loss"

    def run(self, size: Size, runner: Runner) -> Report:
        compared = self.compare(size, runner)
        tables: dict[str, list[Record]] = {}
        records: list[Record] = []
        seen: list[str] = []
        curves: dict[str, dict[str, list[float]]] = {}
        for condition, words in self.conditions(size).items():
            cfg = compose(*size.overrides, *words)
            data = instantiate_part(cfg, "data")
            shown = sorted({0, cfg.data.features // 2, cfg.data.features, cfg.data.examples - 1})
            last: dict[str, list[float]] = {}
            fitted = {one.name: [one.errors] for one in baselines(data, cfg.data.function, cfg.data.hidden)}
            layers = {}
            for row in self.layers(size):
                runs = [(one, by_question(one.test, "loss")) for one in self.found(compared, condition, row)]
                layers[row.name] = [errors for _, errors in runs if errors]
                records += [
                    _record(condition, row.name, one.seed, one.learning_rate, count, value)
                    for one, errors in runs for count, value in enumerate(errors)
                ]  # fmt: skip
            for name, all_errors in (layers | fitted).items():
                rate = next((one.learning_rate for one in self.found(compared, condition, name)), None) if name in layers else None
                last[name] = [errors[-1] for errors in all_errors]
                row_: Record = {"learner": f"`{name}`" if name in layers else name}
                row_ |= {f"{count} examples": spread([errors[count] for errors in all_errors]) for count in shown}
                tables.setdefault(condition, []).append(row_ | {"learning rate": "" if rate is None else f"{rate:g}"})
                curves.setdefault(condition, {})[name] = [fmean(ones) for ones in zip(*all_errors, strict=True)]
            records += [
                _record(condition, name, "", None, count, value) for name, (errors,) in fitted.items() for count, value in enumerate(errors)
            ]
            seen += self._told(condition, cfg.data.examples - 1, last, list(layers), list(fitted))

        def draw(figure: Figure) -> None:
            panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
            for axes, (condition, found) in zip(panels, curves.items(), strict=True):
                names = [row.name for row in self.layers(size)]
                for name, errors in found.items():
                    style = {"color": f"C{names.index(name)}"} if name in names else {"color": "black", "linewidth": 1}
                    dash = "-" if name in names else (":", "--", "-.")[len(found) - 1 - list(found).index(name)]
                    label = name if name in names else name.partition(",")[0].partition(" of")[0]
                    axes.plot(range(len(errors)), [max(one, 1e-3) for one in errors], label=label, linestyle=dash, **style)
                axes.set(title=condition, xlabel="examples before the question", yscale="log")
                axes.grid(alpha=0.3)
                axes.legend(fontsize=7)
            panels[0].set_ylabel("squared error (answering 0: 1); below 0.001 drawn at 0.001")

        return Report(
            seen + edges(compared), tables, records, draw if records else None,
            settings_of(size, self.lower_is_better, self.objective), compared.failures(),
        )  # fmt: skip

    def _told(
        self, condition: str, count: int, last: dict[str, list[float]], layers: list[str], fitted: list[str]
    ) -> list[str]:
        """Sentences about the errors after `count` examples."""
        layers = sorted(layers, key=lambda one: fmean(last[one] or [math.inf]))
        said = "; ".join(", ".join(f"{name} {spread(last[name])}" for name in names) for names in (layers, fitted))
        line = f"{condition}, after {count} examples (always to answer 0 has about 1): {said}."
        told = [
            f"`{first}` against `{second}`: {order(last[first], last[second])}"
            for first, second in self.against if first in last and second in last
        ]  # fmt: skip
        return [line, f"{condition}: {'; '.join(told)}."] if told else [line]


def _record(condition: str, name: str, seed: int | str, rate: float | None, count: int, value: float) -> Record:
    return {
        "condition": condition, "learner": name, "seed": seed, "learning_rate": "" if rate is None else rate, "examples": count,
        "squared_error": value,
    }  # fmt: skip
