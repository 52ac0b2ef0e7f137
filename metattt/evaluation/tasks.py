"""`metattt eval tasks=[...]`: tasks of the language model evaluation harness, as a table and as files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from metattt.errors import MetaTTTError, NotFinite, did_you_mean
from metattt.evaluation.evaluate import Evaluation
from metattt.evaluation.harness import MetaTTTLM
from metattt.evaluation.output import table
from metattt.io import write_whole
from metattt.optional import need

need("lm_eval", extra="eval", what="metattt eval tasks=")
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

Results = dict[str, dict[str, Any]]
"""Task -> name of a metric with its filter (`acc,none`) -> value; and with `_stderr` after the name, its standard
error."""

COLUMNS = ("model", "task", "metric", "value", "stderr")


def evaluate(job: Evaluation) -> dict[str, Results]:
    """Scores language models on tasks; see `Evaluation`.

    Raises:
        MetaTTTError: models for images among them, tasks or settings that cannot be used, predictions that are not
            finite. What a task's data or code raises is lm_eval's.
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
    rows: list[tuple[Any, ...]] = []
    for name, one in job.known.items():
        try:
            model = MetaTTTLM.load(one.path, job.device, chosen.tokenizer, chosen.batch_size, chosen.segment, job.trust)
            found: Any = simple_evaluate(
                model, tasks=wanted, num_fewshot=chosen.num_fewshot, limit=chosen.limit, task_manager=manager,
                log_samples=False,
            )  # fmt: skip
        except NotFinite as error:
            raise MetaTTTError(f"{one.path}: {error}") from error
        results[name] = {task: dict(values) for task, values in found["results"].items()}
        mine = [(name, task, *figures) for task, values in results[name].items() for figures in _figures(values)]
        rows += mine
        if len(job.known) > 1:  # now: the next one may be damaged
            figures = ", ".join(f"{task} {metric} {value:.4f}" for _, task, metric, value, _ in mine)
            job.console.print(f"{name}: {figures}")
    job.console.print(table("tasks", COLUMNS, rows, left=3))
    with job.report("tasks") as made:
        made.csv("tasks", COLUMNS, rows)
        write_whole(made.path("tasks", ".json"), (json.dumps(results, indent=1, default=str) + "\n").encode())
    return results


def find_tasks(names: Sequence[str], path: str | None = None) -> TaskManager:
    """The tasks of the harness, and those in a folder of the user's.

    Args:
        names: of tasks, groups or tags; all must be there.
        path: a folder with task files; their Python functions are run.
    """
    folder = None if path is None else str(Path(path).expanduser())
    if folder is not None:
        if not Path(folder).is_dir():
            raise MetaTTTError(f"task_path={path} does not exist: give a folder with YAML files of lm_eval")
        own = TaskManager(include_path=folder, include_defaults=False)
        if all(own.match_tasks([name]) for name in names):  # thousands of files less to look at
            return own
    found = TaskManager(include_path=folder)
    for name in names:
        if not found.match_tasks([name]):
            raise MetaTTTError(
                f"tasks=[{','.join(names)[:100]}]: lm_eval has no task {name!r:.60}."
                f"{did_you_mean(name, found.all_tasks)}\n`lm_eval ls tasks` lists them; task_path=<folder> adds yours"
            )
    return found


def _figures(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Metric, value and standard error; the filter of answers stands behind the metric's name, if there is one."""
    for key, value in values.items():
        metric, comma, kept = key.partition(",")  # what has no filter is no metric
        if comma and isinstance(value, int | float) and not metric.endswith("_stderr"):
            error = values.get(f"{metric}_stderr,{kept}")
            yield metric if kept == "none" else f"{metric} ({kept})", value, "" if error is None else error
