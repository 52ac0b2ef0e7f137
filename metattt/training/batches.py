"""The tokens or images of one outer-loop step, divided among processes and batches."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning import Trainer

from metattt.errors import MetaTTTError


def plan_batches(
    batch_tokens: int | None,
    context_length: int,
    batch_size: int,
    accumulate: int,
    world_size: int,
    unit: str = "windows",
) -> tuple[int, int]:
    """Divides a step among the processes so that it reads the same windows for any number of processes: the largest
    batches, up to `batch_size`, that divide a process's share.

    Args:
        batch_tokens: tokens per step, over all processes. None: those of `batch_size` and `accumulate` in one process.
        context_length: T, tokens per window; 1 of images.
        batch_size: windows per batch, at most.
        accumulate: batches per step of one process; 1 beside `batch_tokens`, which chooses it.
        world_size: number of processes.
        unit: the unit of a batch (windows, images), for messages.

    Returns:
        Windows or images per batch, and batches per step, in each process.

    Raises:
        MetaTTTError: tokens that are no whole number of windows, windows that the processes cannot share equally, or
            both settings.
    """
    if batch_tokens is None:
        count = batch_size * accumulate
        setting = f"data.batch_size={batch_size} * trainer.accumulate_grad_batches={accumulate}"
    else:
        setting = f"batch_tokens={batch_tokens} of windows of data.context_length={context_length}"
        if accumulate != 1:
            raise MetaTTTError(
                f"batch_tokens={batch_tokens} chooses trainer.accumulate_grad_batches itself: "
                f"leave trainer.accumulate_grad_batches={accumulate} out, or set batch_tokens=null"
            )
        if batch_tokens < 1 or batch_tokens % context_length:
            near = max(1, round(batch_tokens / context_length)) * context_length
            raise MetaTTTError(f"{setting} do not fill whole windows: set batch_tokens={near}")
        count = batch_tokens // context_length
    if count % world_size:
        raise MetaTTTError(
            f"{setting} are {count} {unit} per step, which {world_size} processes cannot share equally: "
            f"set trainer.devices or the batch so that they divide"
        )
    share = count // world_size
    most = min(batch_size, share)
    size = next(size for size in range(most, 0, -1) if share % size == 0)
    return size, share // size


def batch_share(trainer: Trainer) -> tuple[int, int]:
    """This process's place among those that read different windows, and their number."""
    found = {name: getattr(trainer.strategy, name, 1) for name in ("time_ranks", "tensor_ranks")}
    count = shares(trainer.world_size, **found)
    return trainer.global_rank * count // trainer.world_size, count


def shares(world_size: int, time_ranks: int = 1, tensor_ranks: int = 1) -> int:
    """How many groups of processes read different windows.

    Args:
        world_size: number of processes.
        time_ranks: processes that read one window, each a part of its time.
        tensor_ranks: processes that read the same tokens, each with some of the heads.
    """
    together = time_ranks * tensor_ranks
    if world_size % together:
        named = (("trainer.time_ranks", time_ranks), ("trainer.tensor_ranks", tensor_ranks))
        said = " and ".join(f"{name}={value}" for name, value in named if value > 1)
        raise MetaTTTError(
            f"{said} cannot divide the {world_size} processes of the run: set trainer.devices={together}, or a "
            "multiple of it"
        )
    return world_size // together


def validate_between_steps(trainer: Trainer) -> None:
    """Interprets `trainer.val_check_interval` as steps (or a share of them), not batches, so that it does not depend on
    the number of processes; for data whose loader covers the whole run. A time ends with the step under way."""
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        loop: Any = trainer.fit_loop.epoch_loop
        loop._should_check_val_fx = partial(_time_has_come, trainer)
    interval = getattr(trainer, "val_check_interval", None)  # Lightning keeps a time elsewhere
    if getattr(trainer, "fast_dev_run", 0) or trainer.max_steps <= 0:
        return
    if isinstance(interval, float):
        interval = max(1, int(interval * trainer.max_steps))
    if isinstance(interval, int):
        trainer.val_check_interval = min(interval, trainer.max_steps) * trainer.accumulate_grad_batches


def _time_has_come(trainer: Trainer, fetcher: Any) -> bool:
    """Whether to validate now: between two steps, and as the first process says, as clocks differ."""
    loop = trainer.fit_loop.epoch_loop
    due = not loop._should_accumulate() and type(loop)._should_check_val_fx(loop, fetcher)
    return bool(trainer.strategy.broadcast(due))


# -- the counts of batches in Lightning's checkpoints, which are changed in place --------------------------------------


def recount_batches(checkpoint: dict[str, Any], accumulate: int) -> None:
    """Converts the batch counts of a saved run to `accumulate` batches a step; the steps stay the same."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        shift = checkpoint["global_step"] * accumulate - counts["ready"]
        counts.update({name: count + shift for name, count in counts.items()})


def at_end_of_step(checkpoint: dict[str, Any], validate_again: bool) -> None:
    """Sets the counts of a checkpoint that is taken at the beginning of a batch to those after the batch before.

    Args:
        checkpoint: of Lightning.
        validate_again: the validation after that batch was begun and is to be repeated, from its first batch.
    """
    loops = checkpoint["loops"]["fit_loop"]
    progress = loops["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts.update(dict.fromkeys(counts, counts["completed"]))
    progress["is_last_batch"] = False
    if validate_again:  # Lightning's sign of a validation that was interrupted in its first batch
        validation = loops["epoch_loop.val_loop.batch_progress"]
        done = validation["total"]["completed"]
        validation["total"].update(ready=done + 1, started=done + 1, processed=done)
        validation["current"].update(dict.fromkeys(validation["current"], 0))
        validation["is_last_batch"] = False
