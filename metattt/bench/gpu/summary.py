"""The report of `metattt bench gpu`, from whatever results there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from metattt.bench.gpu.ledger import DONE, FAILED, Line
from metattt.bench.gpu.subjects import CEILINGS, IN_TURN
from metattt.bench.gpu.tuned import entries
from metattt.bench.report import Panel, Report, Row

SHAPE = ("width", "size", "dtype")


def summarise(
    facts: Mapping[str, Any], results: Sequence[Line], remarks: Sequence[str], settings: Mapping[str, Any], file: str
) -> Report:
    """Tables of everything that was measured; of what was not, the reason.

    Args:
        facts: the first line of the file of results.
        results: its others.
        remarks: what else there is to say, for the text.
        settings: of the benchmark, for the JSON file.
        file: path under the output folder, without ending.
    """
    found = [line for line in results if line["state"] == DONE]
    checks = _checks(results)
    make: dict[str, Callable[[], Sequence[Row]]] = {
        "Correctness": lambda: _correctness(found),
        "Tools": lambda: [_tool(line) for line in _of(found, "tool")],
        "Stall reasons (warps that wait, for each instruction that is issued)": lambda: _stalls(found),
        "Ceilings": lambda: [{**line["case"], **_numbers(line["found"])} for line in _of(found, CEILINGS)],
        "Sequences": lambda: _sequences(found, checks),
        "Decoding": lambda: _decoding(found, checks),
        "In turn": lambda: _in_turn(found),
        "Launches": lambda: _launches(found),
        "Best launches": lambda: [_flat(entry) for entry in entries(found)],
        "Kernels": lambda: _kernels(found),
        "Not measured": lambda: _failures(results),
    }
    tables, remarks = {}, list(remarks)
    for title, rows in make.items():
        try:
            if table := rows():
                tables[title] = table
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # results that are not as ours, of an operation of one's own, must not cost the rest of the report
            remarks.append(f"the table {title} could not be made: {type(error).__name__}: {error}")
    card = str(facts.get("card", "an unknown card"))
    known = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "card" and value is not None)
    text = [f"{card}: {known}. {len(found)} results; {len(results) - len(found)} points gave none."]
    text += [f"{line}." for line in remarks]
    text += ["", LEGEND]
    environment = dict(facts)
    return Report(f"Triton kernels on {card}", "\n".join(text), tables, [], settings, _panels(found), file, environment)


LEGEND = (
    "Times are between two events on the device, with nothing in its L2 at the start; `host` is what the host needs to begin the work. "
    "Bytes are the fewest that must move: every input read and every output and gradient written once (of decoding, the update read and "
    "written, the weights read, and written where a mini-batch ends). Operations are those of the products, 2 per multiplication and "
    "addition. `check` says whether the same operation passed its checks at the same d, b and type of operands; times beside a check that "
    "failed are times of something else."
)


def _failures(results: Sequence[Line]) -> list[Row]:
    """What gave no result, once for each reason."""
    alike: dict[tuple[str, str, str], list[Line]] = {}
    for line in results:
        if line["state"] == FAILED:
            alike.setdefault((line["kind"], line["subject"], line["reason"]), []).append(line)
    return [
        {"kind": kind, "subject": subject, "reason": reason, "results": len(lines),
         "case": _words(lines[0]["case"]) + (", and others" if len(lines) > 1 else "")}
        for (kind, subject, reason), lines in alike.items()
    ]  # fmt: skip


def _of(results: Sequence[Line], *kinds: str) -> list[Line]:
    return [line for line in results if line["kind"] in kinds]


# -- correctness -------------------------------------------------------------------------------------------------------


def _correctness(found: Sequence[Line]) -> list[Row]:
    return [
        {
            "operation": line["subject"] + ("_decode" if line["kind"] == "decode check" else ""), "case": _words(line["case"]),
            "part": part["part"], "error": _number(part["error"]), "bound": part["bound"], "passed": "yes" if part["passed"] else "NO",
        }
        for line in _of(found, "check", "decode check")
        for part in line["found"].get("parts", ())
    ]  # fmt: skip


Checks = dict[tuple[Any, ...], str]


def _checks(results: Sequence[Line]) -> Checks:
    """What the checks of an operation say, by whether it decodes, its name and shape; a check that gave no result has not
    passed."""
    verdicts: Checks = {}
    for line in _of(results, "check", "decode check"):
        key = _check_key(line, line["kind"] == "decode check")
        passed = line["state"] == DONE and all(part["passed"] for part in line["found"].get("parts", ()))
        verdicts[key] = "passed" if passed and verdicts.get(key, "passed") == "passed" else "FAILED"
    return verdicts


def _check_key(line: Line, decodes: bool) -> tuple[Any, ...]:
    # decoding is checked in fp32 alone
    names = SHAPE[:2] if decodes else SHAPE
    return (decodes, line["subject"], *(line["case"].get(name) for name in names))


def _verdict(line: Line, checks: Checks, decodes: bool = False) -> str:
    if not line["found"].get("finite", True):
        return "NOT FINITE"
    return checks.get(_check_key(line, decodes), "not checked")


# -- times -------------------------------------------------------------------------------------------------------------


def _sequences(found: Sequence[Line], checks: Checks) -> list[Row]:
    lines = _of(found, "time")
    ours = list(dict.fromkeys(line["subject"] for line in lines if line["found"].get("bytes") is not None))
    medians = {(line["subject"], _words(line["case"])): line["found"].get("ms, median") for line in lines}
    rows = []
    for line in sorted(
        lines, key=lambda line: [-_size(line, "heads"), _size(line, "length"), line["case"].get("pass", "")]
    ):
        case, took = line["case"], line["found"]
        ceiling = _ceiling(found, case.get("dtype"))
        row: Row = {
            "operation": line["subject"],
            "H": case.get("heads"),
            "T": case.get("length"),
            "pass": case.get("pass"),
        }
        row |= {"d": case.get("width"), "b": case.get("size"), "operands": case.get("dtype")}
        row |= {f"ms, {key}": _number(took.get(f"ms, {key}")) for key in ("least", "median", "most")}
        row["host, ms"] = took.get("host, ms")
        for name in ours:
            row[f"times {name}"] = _quotient(took.get("ms, median"), medians.get((name, _words(case))))
        row["share of copy bandwidth"] = _share(took.get("bytes"), took, 1e9, ceiling.get("copy, GB/s"))
        row["share of matrix rate"] = _share(took.get("operations"), took, 1e12, ceiling.get("product, TFLOP/s"))
        row["peak, GB"] = took.get("peak, GB")
        row["check"] = _verdict(line, checks) if line["subject"] in ours else "–"
        rows.append(row)
    return rows


def _decoding(found: Sequence[Line], checks: Checks) -> list[Row]:
    rows = []
    for line in _of(found, "decode"):
        case, took = line["case"], line["found"]
        moved, graph = took.get("bytes"), took.get("graph, ms, median")
        rate = moved / graph / 1e6 if moved and graph else None
        rows.append({
            "operation": line["subject"], "sequences": case.get("batch"), "H": case.get("heads"), "d": case.get("width"),
            "state, MB": _quotient(took.get("state, bytes"), 1e6), "graph, ms": graph, "called, ms": took.get("ms, median"),
            "host, ms": took.get("host, ms"), "GB/s": rate,
            "share of copy bandwidth": _quotient(rate, _ceiling(found, case.get("dtype")).get("copy, GB/s")),
            "check": _verdict(line, checks, decodes=True),
        })  # fmt: skip
    return rows


def _in_turn(found: Sequence[Line]) -> list[Row]:
    lines = _of(found, IN_TURN)
    ours = list(dict.fromkeys(name for line in lines for name in line["case"].get("operations", ())))
    rows = []
    for line in lines:
        case = line["case"]
        for name, took in line["found"].get("ways", {}).items():
            row: Row = {"operation": name, "H": case.get("heads"), "T": case.get("length"), "turn": case.get("turn")}
            row["launch"] = "; ".join(case.get("launches", {}).get(name, ())) or "as used"
            row |= {f"ms, {key}": took.get(f"ms, {key}") for key in ("least", "median", "most")}
            for one in ours:
                row |= {f"times {one}, {key}": took.get(f"times {one}, {key}") for key in ("least", "median", "most")}
            rows.append(row)
    return rows


def _ceiling(found: Sequence[Line], dtype: Any) -> Mapping[str, Any]:
    return next((line["found"] for line in _of(found, CEILINGS) if line["case"].get("dtype") == dtype), {})


# -- kernels and tools -------------------------------------------------------------------------------------------------


def _launches(found: Sequence[Line]) -> list[Row]:
    columns = ("ms, median", "used, ms, median", "times used, least", "times used, median", "times used, most")
    return [
        {"operation": line["subject"], "H": line["case"].get("heads"), "T": line["case"].get("length"),
         "launch": line["case"].get("variant")} | {column: line["found"].get(column) for column in columns}
        for line in _of(found, "variant")
    ]  # fmt: skip


def _kernels(found: Sequence[Line]) -> list[Row]:
    """Every kernel that was launched, once for each way in which it was compiled."""
    rows: dict[str, Row] = {}
    for line in found:
        where = ", ".join(f"{name} {line['case'][name]}" for name in SHAPE if name in line["case"])
        for kernel in line["found"].get("kernels", ()):
            row = {"operation": line["subject"], **kernel, "first seen at": where}
            rows.setdefault(str([line["subject"], *kernel.values()]), row)
    return list(rows.values())


def _tool(line: Line) -> Row:
    found = line["found"]
    verdict = {None: "–", True: "yes", False: "NO"}[found.get("passed") if found.get("ran") else None]
    name = " ".join([line["subject"], line["case"].get("tool", "")]).strip()
    return {
        "tool": name,
        "operation": line["case"].get("operation"),
        "outcome": found.get("outcome"),
        "passed": verdict,
    }


def _stalls(found: Sequence[Line]) -> list[Row]:
    return [
        {"operation": line["case"].get("operation"), "kernel": kernel["kernel"], "waits for": reason, "warps": number}
        for line in _of(found, "tool")
        for kernel in line["found"].get("stalls", ())
        for reason, number in list(kernel["stalls"].items())[:6]
    ]


def _panels(found: Sequence[Line]) -> list[Panel]:
    """One for each number of heads: both passes at growing lengths."""
    panels: dict[Any, dict[str, tuple[list[float], list[float]]]] = {}
    for line in sorted(_of(found, "time"), key=lambda line: _size(line, "length")):
        took = line["found"].get("ms, median")
        if line["case"].get("pass") == "forward + backward" and isinstance(took, int | float):
            x, y = panels.setdefault(line["case"].get("heads"), {}).setdefault(line["subject"], ([], []))
            x.append(_size(line, "length"))
            y.append(took)
    return [Panel(f"forward + backward, H = {heads}", "T", "ms", curves) for heads, curves in panels.items()]


# -- values ------------------------------------------------------------------------------------------------------------


def _words(case: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in case.items())


def _flat(entry: Mapping[str, Any]) -> Row:
    row = {name: value for name, value in entry.items() if name != "sets"}
    return row | {"times used": " to ".join(f"{x:.2f}" for x in entry["times used"])}


def _numbers(found: Mapping[str, Any]) -> Row:
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _number(value: Any) -> float | None:
    """A number, `nan` and the like as JSON had to hold them included; None for anything else."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _size(line: Line, name: str) -> int:
    value = line["case"].get(name)
    return value if isinstance(value, int) else 0


def _quotient(a: Any, b: Any) -> float | None:
    a, b = _number(a), _number(b)
    return a / b if a is not None and b else None


def _share(amount: Any, took: Mapping[str, Any], unit: float, ceiling: Any) -> float | None:
    """Of the ceiling, in `unit` a second, for what is done in the least of the times."""
    seconds = _quotient(took.get("ms, least"), 1000)
    return _quotient(_quotient(amount, seconds), _quotient(ceiling, 1 / unit))
