"""The settings of `metattt bench gpu`, and the walk through its stages: jobs in processes of their own, results on the
disk as they come."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from metattt.bench.base import Benchmark, check_counts
from metattt.bench.gpu.ledger import DONE, FILE, Ledger, Line, failed
from metattt.bench.gpu.origin import card_name, facts, slug
from metattt.bench.gpu.plan import STAGES, Job, Point, Settings, jobs
from metattt.bench.gpu.problems import DTYPES
from metattt.bench.gpu.processes import in_words, run
from metattt.bench.gpu.subjects import OPERATIONS, load
from metattt.bench.gpu.summary import summarise
from metattt.bench.gpu.tuned import FILE as TUNED
from metattt.bench.gpu.tuned import entries, tables
from metattt.bench.peers import ON_A_GPU, PEERS
from metattt.bench.report import Report
from metattt.errors import MetaTTTError, check_choice, check_flag, check_integer, check_number
from metattt.io import write_whole
from metattt.locking import FolderLock
from metattt.registry import register


@register(group="benchmark", name="gpu")
class GPU(Benchmark):
    """`ttt_linear`, `ttt_mlp` and their decoding steps on the device at hand: correctness, times, other libraries' times,
    other launches, and the winners in turn.

    Every operation and every peer runs in a process of its own. Results are written to `gpu/<card>/results.jsonl` as
    they come; what is there is not measured again, and the report is made from whatever is there.

    Args:
        stage: `correctness`, `times`, `peers`, `tuning`, `final`; `all`: one after the other; `report`: measures
            nothing, and makes the report anew.
        operations: of ours, or `module:object` of a `metattt.bench.gpu.subjects.Subject` with `variants`.
        peers: names among `metattt.bench.peers.PEERS`; None: all that a GPU has.
        tokens: B·T of the timed calls.
        lengths: T of the timed calls.
        num_heads: H of the timed calls; 32 and 12 are those of the 1b and 125m models.
        head_dim, mini_batch_size: d and b of the timed calls.
        dtype: of the operands of the timed calls.
        decode_batch: sequences that decode one token at a time.
        programs: B·H of the calls whose launches are tuned, at the first of `num_heads`.
        rounds: timed calls of each way.
        limit: seconds for one result, after which its process is killed.
        budget: seconds of a call; what is left then is left to the next. None: without end.
        parallel: processes that check at once; what is timed is timed alone.
        retry: whether to measure again what gave no result in an earlier call.
        cases: shapes of the correctness suite to take, of its first so many; None: all.
        card: for `stage=report` on another machine: the folder under `gpu`.
        device: `cuda`; `cpu` under TRITON_INTERPRET=1, to try the benchmark itself.
    """

    def __init__(
        self,
        stage: str = "all",
        operations: Sequence[str] = OPERATIONS,
        peers: Sequence[str] | None = None,
        tokens: int = 32768,
        lengths: Sequence[int] = (1024, 4096, 8192, 32768),
        num_heads: Sequence[int] = (32, 12),
        head_dim: int = 64,
        mini_batch_size: int = 16,
        dtype: str = "bfloat16",
        decode_batch: int = 512,
        programs: Sequence[int] = (1024, 256, 32),
        rounds: int = 20,
        limit: float = 150.0,
        budget: float | None = 540.0,
        parallel: int = 8,
        retry: bool = False,
        cases: int | None = None,
        card: str | None = None,
        device: str = "cuda",
    ):
        check_choice("benchmark.stage", stage, (*STAGES, "all", "report"))
        check_choice("benchmark.device", device, ("cuda", "cpu"))
        check_choice("benchmark.dtype", dtype, DTYPES)
        if device == "cuda" and stage != "report" and not torch.cuda.is_available():
            raise MetaTTTError("metattt bench gpu needs a CUDA device, and torch sees none here")
        if device == "cpu" and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
            raise MetaTTTError(
                "benchmark.device=cpu tries the benchmark in Triton's interpreter: set TRITON_INTERPRET=1"
            )
        check_counts(tokens=tokens, lengths=lengths, num_heads=num_heads, head_dim=head_dim, rounds=rounds)
        check_counts(mini_batch_size=mini_batch_size, decode_batch=decode_batch, programs=programs)
        check_counts(**({} if cases is None else {"cases": cases}))
        check_number("benchmark.limit", limit, above=0)
        if budget is not None:
            check_number("benchmark.budget", budget, above=0)
        check_integer("benchmark.parallel", parallel, most=256)
        check_flag("benchmark.retry", retry)
        for name in peers or ():
            if ":" not in name:
                check_choice("benchmark.peers", name, PEERS)
        for name in operations:
            if ":" in name:
                load(name)
            else:
                check_choice("benchmark.operations", name, OPERATIONS)
        if any(tokens % length for length in lengths):
            raise MetaTTTError(
                f"benchmark.tokens={tokens} is no multiple of every length of benchmark.lengths={list(lengths)}"
            )
        wrong = [n for n in programs if tokens * num_heads[0] % n or n % num_heads[0] or n > tokens * num_heads[0]]
        if wrong and stage in ("tuning", "all"):
            raise MetaTTTError(
                f"benchmark.programs={list(programs)}: {wrong[0]} is not B·{num_heads[0]} heads with B·T = {tokens}"
            )
        self.stages = STAGES if stage == "all" else () if stage == "report" else (stage,)
        self.limit, self.budget, self.parallel, self.retry, self.card = limit, budget, parallel, retry, card
        self.settings = Settings(
            list(operations), list(ON_A_GPU if peers is None else peers), tokens, list(lengths), list(num_heads), head_dim,
            mini_batch_size, dtype, decode_batch, list(programs), rounds, cases, device,
        )  # fmt: skip
        self.output_dir = Path("results")
        self._remarks: list[str] = []
        self._stopped = threading.Event()

    def keep_in(self, folder: Path) -> None:
        self.output_dir = folder

    def run(self, say: Callable[[str], None]) -> Report:
        """As `Benchmark.run`. A signal that ends the process has it write the report first."""
        card = self._card()
        folder = self.output_dir / "gpu" / card
        folder.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(folder / FILE)
        if not self.stages:
            return self._report(ledger, card)
        with FolderLock(folder, "the benchmark of the GPU"):
            for line in ledger.begin(facts(self.settings.device)):
                self._remark(line, say)
            try:
                with _terminated_as_interrupted():
                    self._measure(ledger, say)
            except (KeyboardInterrupt, SystemExit):
                self._remark("stopped before the end: the same command goes on from here", say)
                self._report(ledger, card).write(self.output_dir, "gpu")
                raise
            return self._report(ledger, card)

    def _measure(self, ledger: Ledger, say: Callable[[str], None]) -> None:
        deadline = time.monotonic() + (float("inf") if self.budget is None else self.budget)
        again = {line["key"] for line in ledger.read()[1] if line["state"] != DONE} if self.retry else set()
        for stage in self.stages:
            left = 0
            for alone, group in groupby(jobs(stage, self.settings, ledger.read()[1], say), lambda job: job.alone):
                takes = [partial(self._take, job, ledger, deadline, again, say) for job in group]
                left += sum(take() for take in takes) if alone else sum(self._at_once(takes))
            if left:
                self._remark(
                    f"{left} results of stage={stage} are left out for time: the same command goes on from here", say
                )
            if stage == "tuning":
                self._write_tuned(ledger)

    def _at_once(self, takes: Sequence[Callable[[], int]]) -> list[int]:
        """All of them, `parallel` at a time, each process waited for by a thread."""
        if self.parallel == 1:
            return [take() for take in takes]
        with ThreadPoolExecutor(self.parallel) as pool:
            try:
                return [future.result() for future in [pool.submit(take) for take in takes]]
            finally:  # after a signal the processes end, and what has not begun does not begin
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
                self._stopped.clear()

    def _write_tuned(self, ledger: Ledger) -> None:
        """The best launches, and the tables of the kernels with them."""
        known, results, _ = ledger.read()
        best = entries(results)
        content = {"facts": known, "launches": best, "tables": tables(best)}
        write_whole(ledger.file.with_name(TUNED), (json.dumps(content, indent=1) + "\n").encode())

    def _take(self, job: Job, ledger: Ledger, deadline: float, again: set[str], say: Callable[[str], None]) -> int:
        """Takes the points of a job that have no result, in as many processes as it needs: after one that died, the rest
        are taken by another. Returns how many are left for want of time."""
        deaths, last = 0, ""  # in a row, without a result between them
        while True:
            there = {line["key"]: line for line in ledger.read()[1]}
            todo = [point for point in job.points if point.key not in there or point.key in again]
            if not todo:
                return 0
            if time.monotonic() >= deadline:
                return len(todo)
            hopeless = _absent(job) or (f"not tried: {DEATHS} before it: {last}" if deaths == DEATHS else None)
            if hopeless is not None:
                for point in todo:
                    ledger.append(failed(point._asdict(), hopeless, 0.0))
                again -= {point.key for point in todo}
                say(f"{job.name}: NO RESULT: {hopeless}")
                return 0
            say(f"{job.name}: {len(todo)} of {len(job.points)} results to go")
            new = _New(ledger, todo)
            given = {
                "file": str(ledger.file),
                "device": self.settings.device,
                "points": [one._asdict() for one in todo],
            }
            ended = run(
                CHILD, given, limit=self.limit, deadline=deadline, progress=new.count, stopped=self._stopped.is_set
            )
            new.count()
            again -= set(new.lines)
            missing = [point for point in todo if point.key not in new.lines]
            for line in new.lines.values():
                _tell(line, say)
            if not missing:
                return 0
            if ended.late == "deadline":
                return len(missing)
            deaths, last = 1 if new.lines else deaths + 1, in_words(ended, self.limit)
            line = failed(missing[0]._asdict(), last, 0.0)
            ledger.append(line)
            again.discard(missing[0].key)
            _tell(line, say)

    def _card(self) -> str:
        """The folder of the results: the name of the card, as a file may be called."""
        here = self.settings.device == "cpu" or torch.cuda.is_available()
        own = slug(card_name(self.settings.device)) if here else None
        if self.stages:
            return str(own)
        known = sorted(file.parent.name for file in (self.output_dir / "gpu").glob(f"*/{FILE}"))
        chosen = self.card or (own if own in known else known[0] if len(known) == 1 else None)
        if chosen in known:
            return str(chosen)
        raise MetaTTTError(
            f"benchmark.card={self.card or 'null'}: {self.output_dir / 'gpu'} has results of {', '.join(known) or 'no card'}"
        )

    def _report(self, ledger: Ledger, card: str) -> Report:
        known, results, junk = ledger.read()
        remarks = list(
            dict.fromkeys(self._remarks + ([f"{junk} lines of {FILE} are damaged or no results"] if junk else []))
        )
        if failing := sorted({line["subject"] for line in results if line["kind"] == "check" and not _passed(line)}):
            remarks.append(f"FAILED their checks: {', '.join(failing)}")
        return summarise(known, results, remarks, asdict(self.settings), f"gpu/{card}/report")

    def _remark(self, line: str, say: Callable[[str], None]) -> None:
        self._remarks.append(line)
        say(line)


DEATHS = 3
"""Processes of a job that may die one after the other, without a result, before the rest of it is given up."""
CHILD = [sys.executable, "-m", "metattt.bench.gpu.child"]


def _absent(job: Job) -> str | None:
    """Why no process need be started for a job; None: it must."""
    installed = importlib.util.find_spec("fla") is not None if job.points[0].subject.startswith("fla ") else True
    return None if installed else "flash-linear-attention is not installed"


class _New:
    """The results of some points that are added to the file from now on."""

    def __init__(self, ledger: Ledger, points: Sequence[Point]):
        self.ledger, self.keys, self.at = ledger, {point.key for point in points}, ledger.size()
        self.lines: dict[str, Line] = {}
        self._seen = self.at

    def count(self) -> int:
        """How many there are."""
        size = self.ledger.size()
        if size != self._seen:
            self._seen = size
            self.lines = {line["key"]: line for line in self.ledger.read(self.at)[1] if line["key"] in self.keys}
        return len(self.lines)


def _tell(line: Line, say: Callable[[str], None]) -> None:
    words = Point(line["kind"], line["subject"], line["case"]).words
    if line["state"] != DONE:
        say(f"  {words}: NO RESULT: {line['reason']}")
    elif not _passed(line):
        say(f"  {words}: FAILED")
    else:
        say(f"  {words}: {line['seconds']:.1f} s")


def _passed(line: Line) -> bool:
    return line["state"] == DONE and all(part["passed"] for part in line["found"].get("parts", ()))


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM raises `SystemExit` where it would end the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
