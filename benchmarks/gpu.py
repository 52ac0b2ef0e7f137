"""The Triton kernels on one GPU, in stages: `python benchmarks/gpu.py correctness` (then times, peers, tuning).

Every result is a line of `<output_dir>/gpu/<card>/results.jsonl`; what is there is not measured again, so the same
command resumes where the last one stopped. Delete the file to measure anew. `python benchmarks/gpu.py report` makes the
page from what is there. A process measures a few results in turn; one that crashes or hangs costs one line, and another
goes on.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Row, exit_code, settings, some
from gpu_problems import DTYPES, ONLINE, OURS, measure, variants
from peers import ON_A_GPU, PEERS
from report import Report, environment

from metattt.errors import MetaTTTError, check_choice

STAGES = ("correctness", "times", "peers", "tuning", "report")
Line = dict[str, Any]  # kind, subject, case, and found (on what) or failed
Point = tuple[str, str, dict[str, Any]]  # kind, subject and case of one result

CASES: list[dict[str, Any]] = [  # of the checks, beside what differs from `DEFAULTS`
    {}, {"length": 1104},  # longer than a segment of stored weights
    {"length": 48, "tokens": 48 * 88},  # 264 programs: two for every multiprocessor of an H100
    {"dtype": "float32"}, {"dtype": "float16"}, {"size": 8}, {"size": 32, "length": 192}, {"size": 64, "length": 192},
    {"width": 32}, {"width": 96}, {"width": 128}, {"length": 16},
]  # fmt: skip
INTERPRETED: list[dict[str, Any]] = [{"length": 16, "width": 32, "heads": 1, "dtype": "float32"}]
DEFAULTS: dict[str, Any] = {"length": 208, "heads": 3, "width": 64, "size": 16, "dtype": "bfloat16"}


@dataclass
class Settings:
    """What is measured, and where results are written.

    Args:
        operations: of ours.
        peers: names of `peers.PEERS`.
        tokens, lengths, num_heads: B·T, T and H of the timed calls; the 1b and 125m models have 32 and 12 heads.
        head_dim, mini_batch_size, dtype: d, b and operands of the timed calls.
        decode_batch: sequences that decode one token at a time.
        programs: B·H of the calls whose launches are tuned, at the first of `num_heads`.
        limit: seconds of a process.
        budget: seconds after which nothing is begun; the same command resumes from there.
        parallel: processes that check at once; what is timed is timed alone.
        retry: whether to measure again what gave no result before.
        device: `cuda`; `cpu` under TRITON_INTERPRET=1, to try the script itself.
        card: for `report` on another machine: the folder under `gpu`.
    """

    operations: list[str] = some(*OURS)
    peers: list[str] = some(*ON_A_GPU)
    tokens: int = 32768
    lengths: list[int] = some(1024, 4096, 8192, 32768)
    num_heads: list[int] = some(32, 12)
    head_dim: int = 64
    mini_batch_size: int = 16
    dtype: str = "bfloat16"
    decode_batch: int = 512
    programs: list[int] = some(1024, 256, 32)
    limit: float = 150.0
    budget: float = 540.0
    parallel: int = 8
    retry: bool = False
    device: str = "cuda"
    card: str | None = None
    output_dir: str = "results"

    def case(self, heads: int, length: int) -> dict[str, Any]:
        sizes = {"tokens": self.tokens, "width": self.head_dim, "size": self.mini_batch_size, "dtype": self.dtype}
        return {"heads": heads, "length": length} | sizes


def main(words: Sequence[str]) -> int:
    """Runs one stage; returns the exit code: 1 if a check failed.

    Raises:
        MetaTTTError: a setting that cannot be used.
    """
    if not words or {"-h", "--help"} & {*words}:
        print(__doc__, Settings.__doc__)
        return 0
    stage, given = words[0], settings(Settings, words[1:])
    check_choice("stage", stage, STAGES)
    check_choice("device", given.device, ("cuda", "cpu"))
    check_choice("dtype", given.dtype, DTYPES)
    for key, known in (("operations", OURS), ("peers", PEERS)):
        for name in getattr(given, key):
            check_choice(key, name, known)
    if given.device == "cuda" and stage != "report" and not torch.cuda.is_available():
        raise MetaTTTError("benchmarks/gpu.py needs a CUDA device, and torch sees none here")
    if given.device == "cpu" and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        raise MetaTTTError("device=cpu tries the script in Triton's interpreter: set TRITON_INTERPRET=1")
    if any(given.tokens % one for one in given.lengths):
        raise MetaTTTError(f"tokens={given.tokens} is no multiple of lengths={given.lengths}")
    own = "interpreter" if given.device == "cpu" else torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    card = given.card or re.sub(r"[^a-z0-9.]+", "-", own.lower()).strip("-.")
    results = Results(Path(given.output_dir) / "gpu" / card / "results.jsonl")
    if stage == "report" and not results.lines:
        raise MetaTTTError(f"{results.file} has no results: set card=<folder under {given.output_dir}/gpu>")
    deadline = time.monotonic() + given.budget
    if stage == "correctness":
        with ThreadPoolExecutor(given.parallel) as pool:
            list(pool.map(lambda points: results.take(points, given, deadline), jobs(stage, given, results)))
    elif stage != "report":
        for points in jobs(stage, given, results):
            results.take(points, given, deadline)
    if found := tuned(results.lines):
        tables: dict[str, dict[str, dict[str, Any]]] = {}  # of the operations: `TABLE.update` takes such a table in
        for one in found:
            for name, values in one["sets"].items():
                tables.setdefault(one["operation"], {}).setdefault(name, {}).update(values)
        content = json.dumps({"launches": found, "tables": tables}, indent=1)
        results.file.with_name("tuning.json").write_text(content + "\n", encoding="utf-8")
    there = next((line["on"] for line in reversed(results.lines) if "on" in line), {"device": card})
    for path in page(results.lines).write(results.file.parent, "report", **there, card=card):
        print(f"written  {path}")
    failing = sorted({line["subject"] for line in results.lines if not line.get("found", {}).get("passed", True)})
    print(f"FAILED their checks: {', '.join(failing)}" if failing else f"{len(results.lines)} results")
    return int(bool(failing))


# -- results -----------------------------------------------------------------------------------------------------------


def key(kind: str, subject: str, case: Any) -> str:
    return json.dumps([kind, subject, case], sort_keys=True)


class Results:
    """The file of results: lines are added, and none is changed."""

    def __init__(self, file: Path):
        self.file, self.lock = file, threading.Lock()
        text, known = file.read_text(encoding="utf-8") if file.is_file() else "", dict[str, Line]()
        for one in text.splitlines():
            try:
                line = json.loads(one)
                known[key(*_point(line))] = line  # the last one counts: others were tried again
            except ValueError:  # a line that was cut off when the machine went away
                print(f"{file}: a damaged line is passed over", file=sys.stderr)
        self.lines, self.cut_off = list(known.values()), text[-1:] not in ("", "\n")

    def append(self, line: Line) -> None:
        with self.lock:
            self.lines = [one for one in self.lines if key(*_point(one)) != key(*_point(line))] + [line]
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write("\n" * self.cut_off + json.dumps(line, ensure_ascii=False) + "\n")
                self.cut_off = False
        found = line.get("found", {})
        errors = " ".join(f"{name} {found[name]:.1e}" for name in ("outputs", "worst gradient") if name in found)
        told = line.get("failed") or (f"{found['ms, median']:.3f} ms" if "ms, median" in found else errors or "done")
        told += f" ({found['of']}; dual form {found['dual form']:.1e})" if "of" in found else ""
        told += "" if found.get("passed", True) else ", FAILED"
        print(f"{line['kind']} of {line['subject']} {_words(line['case'])}: {told}", flush=True)

    def take(self, points: list[Point], given: Settings, deadline: float) -> None:
        """Has processes measure what is not there: after one that died without a result, the next point is begun."""
        tried: set[str] = set()
        while time.monotonic() < deadline:
            there = {key(*_point(one)) for one in self.lines if "found" in one or not given.retry} | tried
            todo = [point for point in points if key(*point) not in there]
            if not todo:
                return
            words = [sys.executable, __file__, "--measure", given.device, json.dumps(todo)]
            reason = f"still at work after {given.limit:g} s"
            try:
                done = subprocess.run(words, capture_output=True, text=True, timeout=given.limit, check=False)
                last = (done.stderr.strip().splitlines() or [""])[-1]
                reason, said = f"exit code {done.returncode}: {last}", done.stdout
            except subprocess.TimeoutExpired as late:
                said = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
            texts = [text for text in said.splitlines() if text.startswith('{"kind"') and text.endswith("}")]
            lines = [json.loads(text) for text in texts]
            for line in lines or [_line(todo[0]) | {"failed": reason}]:
                self.append(line)
                tried.add(key(*_point(line)))


def _point(line: Line) -> Point:
    return line["kind"], line["subject"], line["case"]


def _line(point: Point) -> Line:
    return dict(zip(("kind", "subject", "case"), point, strict=True))


def _words(case: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in case.items() if not isinstance(value, list | dict))


def measuring(device: str, points: list[Point]) -> None:
    """In a process of its own: prints a line for each result."""
    on = environment() | ({} if device == "cuda" else {"device": device})  # the interpreter uses no GPU that is there
    for point in points:
        try:
            line = _line(point) | {"found": measure(*point, device), "on": on}
        except Exception as error:  # its reason is the result; a device that gave an error may give no other result
            reason = (str(error).strip().splitlines() or [""])[0]
            print(json.dumps(_line(point) | {"failed": f"{type(error).__name__}: {reason}"}), flush=True)
            return
        print(json.dumps(line), flush=True)


# -- stages ------------------------------------------------------------------------------------------------------------


def jobs(stage: str, given: Settings, results: Results) -> Iterator[list[Point]]:
    """The results of a stage, in lists that are measured in one process."""
    shapes = [given.case(heads, length) for heads in given.num_heads for length in given.lengths]
    passes = [{"pass": title} | case for case in shapes for title in ("forward + backward", "forward")]
    token = {"batch": given.decode_batch, "width": given.head_dim, "size": given.mini_batch_size, "dtype": given.dtype}
    if stage == "correctness":
        for name in given.operations:
            for case in CASES if given.device == "cuda" else INTERPRETED:
                sizes = DEFAULTS | case
                yield [("check", name, {"tokens": 2 * sizes["length"]} | sizes)]
            yield [("decode check", name, token | {"batch": 5, "heads": 2})]
        if given.device == "cuda":
            sizes = {"heads": 4, "width": given.head_dim, "length": 512, "tokens": 2048, "dtype": given.dtype}
            yield from ([("online", name, sizes)] for name in ONLINE)
    elif stage == "times":
        yield [("ceilings", "ceilings", {"dtype": given.dtype})]
        for name in given.operations:
            yield [("time", name, case) for case in passes]
            yield [("decode", name, token | {"heads": heads}) for heads in given.num_heads]
    elif stage == "peers":
        yield from ([("time", name, case) for case in passes] for name in given.peers)
    else:
        heads = given.num_heads[0]
        for name in given.operations:
            for programs in given.programs:
                case = given.case(heads, given.tokens * heads // programs)
                yield [("variant", name, case | {"variant": one}) for one in variants(name, case)]


def tuned(lines: Sequence[Line]) -> list[Row]:
    """The best launch for each operation, shape and part of the launch (what stands before the colon of its name); one
    is better only if it was in every round."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        if line["kind"] == "variant" and "found" in line:
            shape = {name: value for name, value in line["case"].items() if name != "variant"}
            groups.setdefault(key(line["subject"], line["case"]["variant"].partition(":")[0], shape), []).append(line)
    found = []
    for group in groups.values():
        best = min(group, key=lambda line: float(line["found"]["times used, median"]))
        better, case = best["found"]["times used, most"] < 1, best["case"]
        found.append({
            "operation": best["subject"],
            **{name: case[name] for name in ("width", "size", "dtype", "heads", "length")},
            "programs": case["tokens"] // case["length"] * case["heads"], "part": case["variant"].partition(":")[0],
            "best": case["variant"] if better else None, "times used, median": best["found"]["times used, median"],
            "tried": len(group), "sets": best["found"]["sets"] if better else {},
        })  # fmt: skip
    return found


# -- the page ----------------------------------------------------------------------------------------------------------


def page(lines: Sequence[Line]) -> Report:
    """A table for every kind of result, from whatever there is; times beside a failed check are marked."""
    wrong = {line["subject"] for line in lines if line.get("found", {}).get("passed") is False}
    found: dict[str, list[Row]] = {}
    for line in (one for one in lines if "found" in one):
        case = {name: value for name, value in line["case"].items() if not isinstance(value, list | dict)}
        numbers = {name: value for name, value in line["found"].items() if not isinstance(value, list | dict)}
        checked = {} if "passed" in numbers else {"check": "FAILED" if line["subject"] in wrong else ""}
        found.setdefault(line["kind"], []).append({"subject": line["subject"]} | case | numbers | checked)
    failed = [{"what": line["kind"], "subject": line["subject"], "case": _words(line["case"]), "reason": line["failed"]}
              for line in lines if "failed" in line]  # fmt: skip
    text = (
        "Times by `triton.testing.do_bench`: events on the device, nothing in the L2 cache. "
        "Checked against the dual form in float64, in memory that holds NaN until it is written."
    )
    return Report("The Triton kernels on a GPU", text, found | ({"No result": failed} if failed else {}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measuring(sys.argv[2], json.loads(sys.argv[3]))
    else:
        sys.exit(exit_code(main, "the same command resumes from what is written"))
