"""Jobs of a claim: commands with overrides, each in a process and a folder of its own, run once and never again,
unless what their overrides are composed to has changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from common import Say
from omegaconf import OmegaConf

from metattt.composition.compose import compose
from metattt.composition.overrides import quoted
from metattt.errors import MetaTTTError
from metattt.io import digest, read_object, write_whole

RECORD, LOG = "job.json", "output.txt"


class Job(NamedTuple):
    """One command.

    Attributes:
        name: what it is, in words: for people, and the beginning of its folder's name.
        command: `train` or `eval` of metattt.
        overrides: all that it is given but `output_dir`.
        of: the job whose run it is about: it gets `checkpoint=` that run, and a folder inside of that one's.
    """

    name: str
    command: str
    overrides: tuple[str, ...]
    of: Job | None = None

    @property
    def place(self) -> Path:
        """Its folder, relative to that of the claim; with other overrides it is another job."""
        own = digest(json.dumps([self.command, *self.overrides]).encode())[:8]
        if self.of is not None:
            return self.of.place / f"{self.command}-{own}"
        return Path(f"{re.sub(r'[^A-Za-z0-9.=_-]+', '-', self.name)[:80]}-{own}")

    @property
    def composed(self) -> str:
        """A checksum of what the overrides are composed to: the same words are another run where a configuration file
        has changed."""
        return digest(OmegaConf.to_yaml(compose(*self.overrides, job=self.command)).encode())


class Result(NamedTuple):
    """What became of a job: its files, whether it has all of them, why not, and the seconds that all its tries took."""

    job: Job
    folder: Path
    finished: bool
    message: str
    seconds: float


class Runner:
    """Runs jobs, several at a time if asked; those that are finished are not run again.

    Args:
        folder: of the claim's jobs.
        jobs: processes at a time.
        total: number of jobs, for people.
        say: shows a line.
    """

    def __init__(self, folder: Path, jobs: int, total: int, say: Say):
        self.folder, self.jobs, self.total, self.say = folder.absolute(), jobs, total, say
        self.results: dict[Job, Result] = {}
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    def run(self, jobs: Sequence[Job]) -> list[Result]:
        """The results of jobs, in order. A job that fails stops no other but those that are about its run.

        Raises:
            KeyboardInterrupt: Ctrl-C; the jobs have stopped, with a checkpoint where their command writes one.
        """
        pool = ThreadPoolExecutor(self.jobs)
        try:
            list(pool.map(self._take, [job for job in dict.fromkeys(jobs) if job not in self.results]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(self._running):
                process.terminate()  # of training: it finishes the step and writes a checkpoint
            raise
        finally:
            pool.shutdown()
        return [self.results[job] for job in jobs]

    def _take(self, job: Job) -> None:
        folder, words = self.folder / job.place, list(job.overrides)
        record = folder / RECORD
        try:
            composed = job.composed
        except MetaTTTError as error:  # what the same words have made before stays
            return self._set(Result(job, folder, False, str(error), 0.0), "failed")
        known = read_object(record) if record.is_file() else {}
        if known.get("composed") != composed:
            shutil.rmtree(folder, ignore_errors=True)
            known = {}
        if "seconds" in known:
            return self._set(Result(job, folder, True, "", known["seconds"]), "finished before")
        if job.of is not None:
            if not self.results[job.of].finished:
                return self._set(Result(job, folder, False, f"{job.of.name} has not finished", 0.0), "left out")
            words.append(f"checkpoint={quoted(str(self.folder / job.of.place))}")
        if job.command == "train":
            words.append("resume=auto")
        elif folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        spent, known = known.get("spent", 0.0), {"overrides": job.overrides, "composed": composed}
        write_whole(record, json.dumps(known | {"spent": spent}).encode())
        began = time.monotonic()
        words.append(f"output_dir={quoted(str(folder))}")
        log = folder / LOG  # `metattt.sweeps` stops when this process is gone
        words = [sys.executable, "-P", "-m", "metattt.sweeps", job.command, *words]
        seen = os.environ | {"PYTHONPATH": os.pathsep.join(one or os.getcwd() for one in sys.path)}
        with log.open("a", encoding="utf-8") as stream:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=seen)
        self._running.add(process)
        code = process.wait()
        self._running.discard(process)
        seconds = round(spent + time.monotonic() - began, 1)
        if code:
            write_whole(record, json.dumps(known | {"spent": seconds}).encode())
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines() or ["no output"]
            told = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])
            return self._set(Result(job, folder, False, f"exit code {code}: {told}", seconds), "failed")
        write_whole(record, json.dumps(known | {"seconds": seconds}).encode())
        return self._set(Result(job, folder, True, "", seconds), f"finished in {seconds:.0f} s")

    def _set(self, result: Result, how: str) -> None:
        with self._lock:
            self.results[result.job] = result
            place = f"job {len(self.results)}/{self.total} {result.job.name}"
            self.say(f"{place}: {how} {result.message}".rstrip())
