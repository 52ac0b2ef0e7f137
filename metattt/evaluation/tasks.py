"""`metattt eval tasks=[...]`: tasks of the language model evaluation harness, as a table and as files."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from metattt.errors import MetaTTTError, NotFinite, check_integer
from metattt.evaluation.evaluate import Evaluation
from metattt.evaluation.harness import MetaTTTLM
from metattt.evaluation.output import Report, table
from metattt.optional import need

need("lm_eval", extra="eval", what="metattt eval tasks=")
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

Results = dict[str, dict[str, Any]]
"""Task -> name of a metric with its filter (`acc,none`) -> value; and with `_stderr` after the name, its standard
error."""


def evaluate(job: Evaluation) -> dict[str, Results]:
    """Scores language models on tasks; see `Evaluation`.

    Raises:
        MetaTTTError: models for images among them, tasks or settings that cannot be used, predictions that are not
            finite.
    """
    chosen = job.chosen
    wanted = [chosen.tasks] if isinstance(chosen.tasks, str) else chosen.tasks
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise MetaTTTError(
            f"tasks={chosen.tasks} is not allowed: give names of tasks, tasks=[lambada_openai,hellaswag]"
        )
    for key, value in job.changes.items():
        raise MetaTTTError(
            f"data.{key}={value} does not apply to tasks=[...], which bring their own texts: leave it out"
        )
    manager = find_tasks(wanted, chosen.task_path)
    results: dict[str, Results] = {}
    for name, one in job.known.items():
        try:
            model = MetaTTTLM.load(one.path, job.device, chosen.tokenizer, chosen.batch_size, chosen.segment, job.trust)
            results[name] = run_tasks(model, wanted, manager, chosen.num_fewshot, chosen.limit)
        except NotFinite as error:
            raise MetaTTTError(f"{one.path}: {error}") from error
    job.console.print(table_of(results))
    with job.report("tasks") as made:
        write_results(made, results)
    return results


def find_tasks(names: Sequence[str], path: str | None = None) -> TaskManager:
    """The tasks of the harness, and those in a folder of the user's.

    Args:
        names: of tasks, groups or tags; all must be there.
        path: a folder with task files; their Python functions are run.

    Raises:
        MetaTTTError: a folder or a name that is not there.
    """
    if path is not None and not Path(path).expanduser().is_dir():
        raise MetaTTTError(f"task_path={path} does not exist: give a folder with YAML files of lm_eval")
    folder = None if path is None else str(Path(path).expanduser())
    if folder is not None:  # thousands of files less to look at, if all names are in it
        own = TaskManager(include_path=folder, include_defaults=False)
        if all(own.match_tasks([name]) for name in names):
            return own
    found = TaskManager(include_path=folder)
    for name in names:
        if not found.match_tasks([name]):
            near = difflib.get_close_matches(name, found.all_tasks, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise MetaTTTError(
                f"tasks=[{','.join(names)[:100]}]: lm_eval has no task {name!r:.60}.{hint}\n"
                "`lm_eval ls tasks` lists them; task_path=<folder> adds yours"
            )
    return found


def run_tasks(
    model: MetaTTTLM,
    names: Sequence[str],
    manager: TaskManager,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> Results:
    """The figures of one model.

    Args:
        model: as the harness knows it.
        names: of tasks, groups or tags.
        manager: of `find_tasks`.
        num_fewshot: examples before every question; None: as the task says.
        limit: use this many questions of each task, from the first on; None: all.

    Raises:
        MetaTTTError: a number that is not allowed. What a task's data or code raises is lm_eval's.
    """
    for key, value in (("num_fewshot", num_fewshot), ("limit", limit)):
        if value is not None:
            check_integer(key, value, least=0 if key == "num_fewshot" else 1, advice=", or null")
    found: Any = simple_evaluate(
        model, tasks=list(names), num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False
    )
    return {task: dict(values) for task, values in found["results"].items()}


def table_of(results: Mapping[str, Results]) -> Table:
    """A row for every task and metric, a column for every model."""
    rows = (
        (task, metric, *(_shown(*values.get(name, (None, None))) for name in results))
        for (task, metric), values in _rows(results).items()
    )
    return table("tasks", ("task", "metric", *results), rows, left=2)


def write_results(made: Report, results: Mapping[str, Results]) -> None:
    """Writes `tasks.csv` and `tasks.json`."""
    rows = (
        (name, task, metric, *values[name])
        for (task, metric), values in _rows(results).items()
        for name in results
        if name in values
    )
    made.csv("tasks", ("model", "task", "metric", "value", "stderr"), rows)
    made.path("tasks", ".json").write_text(json.dumps(results, indent=1, default=str) + "\n", encoding="utf-8")


def _rows(results: Mapping[str, Results]) -> dict[tuple[str, str], dict[str, tuple[Any, Any]]]:
    """(task, metric) -> model -> value and standard error."""
    rows: dict[tuple[str, str], dict[str, tuple[Any, Any]]] = {}
    for name, tasks in results.items():
        for task, values in tasks.items():
            for key, value in values.items():
                metric, comma, kept = key.partition(",")  # the filter of answers; what has none is no metric
                if comma and isinstance(value, int | float) and not metric.endswith("_stderr"):
                    label = metric if kept == "none" else f"{metric} ({kept})"
                    rows.setdefault((task, label), {})[name] = value, values.get(f"{metric}_stderr,{kept}")
    return rows


def _shown(value: Any, error: Any) -> str:
    if value is None:
        return ""
    return f"{value:.5g}" + (f" ± {error:.2g}" if isinstance(error, int | float) else "")
