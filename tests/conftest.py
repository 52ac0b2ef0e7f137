"""Every test starts alike: one thread per worker, float32, and the same random numbers."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiers import about_nothing, is_left_out

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it puts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # kernels run on the CPU; read when they are defined, so before any of them is imported
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays with one worker: what its tests share, a run or four processes, is made once. Files go in the order in
    which they were collected: those with few and long tests would come last by the number of tests."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what the first tier leaves out (`tiers`). Files with long tests come first, so that no worker is left alone
    with them at the end.

    Raises:
        pytest.UsageError: all tests are run, and a line of `tiers` is about none of them, as after a new name.
    """
    every = config.args == config.getini("testpaths") and not config.option.markexpr
    if every and (lost := about_nothing([item.nodeid for item in items])):
        raise pytest.UsageError(f"tests/tiers.py has lines about tests that are not there: {lost}")
    for item in items:
        if is_left_out(item.nodeid):
            item.add_marker(pytest.mark.slow)
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session", autouse=True)
def _composed_once() -> Iterator[None]:
    """Most tests begin with a composition, many with the same: see `compositions_for_tests`."""
    import compositions_for_tests as quick

    from metattt.composition import compose

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_compose", quick.remembering(compose._compose))
        patch.setattr(quick.CachingConfigRepository, "__init__", quick.light)
        yield


@pytest.fixture(scope="module", autouse=True)
def _quick_runs() -> Iterator[None]:
    """Half of the time of a small run is its picture, and a table of all n-grams of its text: the first picture of a file's runs
    is drawn, and written again by the others; and n-grams are listed. (Both are tested in `training/test_training`.)"""
    with pytest.MonkeyPatch.context() as patch:
        if (callbacks := sys.modules.get("metattt.training.callbacks")) is not None:
            patch.setattr(callbacks, "plot", _drawn_once(callbacks.plot))
            patch.setattr("metattt.measures.ngram.MOST", 2**20)
        yield


def _drawn_once(plot: Callable[..., None]) -> Callable[..., None]:
    drawn: list[bytes] = []

    def draw(points: Any, baselines: Any, path: Path, *words: Any) -> None:
        if not drawn:
            plot(points, baselines, path, *words)
            drawn.append(path.read_bytes())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawn[0])

    return draw


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()  # after eight compilations of one method in a process torch compiles it no more
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of a run in this process: the process group, what Lightning writes into the environment, a port among it, and
    modules of a test's own (`my_learner.py`), which the next test would import in place of its own of that name.

    `datasets.Dataset.map(num_proc=2)` puts a copy in the place of `os.environ`: rich, which keeps the first one, then
    no longer sees what a test sets."""
    path, known, environment = list(sys.path), set(sys.modules), os.environ
    yield
    os.environ = environment  # noqa: B003 (the object itself comes back)
    environment.pop("TOKENIZERS_PARALLELISM", None)
    sys.path[:] = path
    own = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(own):
            del sys.modules[name]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "RANK"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from runs_for_tests import write_corpus

    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="session")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps with TTT-Linear, never stopped. It is looked at, and copied to be changed."""
    from runs_for_tests import tiny

    from metattt.training.train import train

    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("finished") / "run"
    size = ("dim=16", "data.context_length=32", "data.batch_size=4", "layer=ttt_linear", "optimizer.mini_batch_size=8")
    settings = ("training.lr=5e-3", "trainer.max_steps=8")
    kept = ("callbacks.checkpoint.every_steps=3", "callbacks.checkpoint.best=null", "trainer.val_check_interval=2")
    assert train(tiny(corpus, run, *size, *settings, *kept)) == 0
    return run


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `metattt` says, called with these words, that it ends with code 2 for: one error, of a line or two."""
    from metattt.cli import main

    def ended(*words: object, code: int = 2) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == code
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") <= 2, error
        return error

    return ended


@pytest.fixture
def quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter, where it is used, with reductions of whole rows at a time."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", _reduce_by_rows)


def _reduce_by_rows(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """As `ReduceOps.generic_reduce`, with the combining function applied to whole rows: the same sums, a hundred times
    faster."""
    rows = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
    total = tuple(self.to_tensor(r[0], x.dtype) for r, x in zip(rows, inputs, strict=True))
    for i in range(1, len(rows[0])):
        total = self.combine_fn.fn(*total, *(self.to_tensor(r[i], x.dtype) for r, x in zip(rows, inputs, strict=True)))
    return list(total)
