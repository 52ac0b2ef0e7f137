"""Whether a product of a compiled kernel may look for an operand where data says, and not an address.

On Hopper the operands of `wgmma` are named by descriptors in uniform registers: shared memory's base, constants, and what
is computed of them. A descriptor that depends on data is a mistake of the assembler: Triton 3.6's (ptxas 12.8) moved a copy
to the end of a loop, behind its use, so that the first pass read what the register held before.

Every register, and every place on the stack, is followed through all paths of a kernel: what was loaded from memory, or is
of floating-point arithmetic, is data, and so is what is computed of data.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DATA = ("LDS", "LDG", "LD.", "FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "MUFU", "F2F", "I2F", "HADD", "HMUL", "HFMA", "HMMA", "HGMMA")
KNOWN = ("LDC", "ULDC", "S2R", "S2UR", "CS2R", "F2I")  # constants, places of threads; F2I: of a division of integers
WRITES_NONE = ("ST", "BAR", "BRA", "EXIT", "WARPGROUP", "FENCE", "MEMBAR", "NOP", "WARPSYNC", "BSYNC", "BSSY", "RED", "DEPBAR")
REGISTER = re.compile(r"U?R\d+")


class Line(NamedTuple):
    """An instruction: what it writes and reads (registers, `S<bytes>` on the stack), and the registers of its descriptors."""

    operation: str
    writes: list[str]
    reads: list[str]
    descriptors: list[str]
    jumps_to: str | None
    conditional: bool


def misled(cubin: bytes) -> tuple[int, int]:
    """The number of products whose operands descriptors name, and of those that may be named by data."""
    import triton

    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        text = subprocess.run([str(nvdisasm), "-c", str(file)], capture_output=True, text=True, check=True).stdout
    lines, labels = read(text)
    before = _data_before(lines, labels)
    products = [(line, held) for line, held in zip(lines, before, strict=True) if line.descriptors and held is not None]
    return len(products), sum(any(register in held for register in line.descriptors) for line, held in products)


def read(text: str) -> tuple[list[Line], dict[str, int]]:
    """The instructions of a kernel, and where its labels stand."""
    lines: list[Line] = []
    labels: dict[str, int] = {}
    for raw in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", raw):
            labels[label[1]] = len(lines)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;", raw):
            lines.append(_line(found[2], found[3].replace(".reuse", ""), found[1] is not None))
    return lines, labels


def _registers(first: str, count: int) -> list[str]:
    kind, number = re.fullmatch(r"(U?R)(\d+)", first).groups()  # type: ignore[union-attr]
    return [f"{kind}{int(number) + at}" for at in range(count)]


def _line(operation: str, rest: str, conditional: bool) -> Line:
    operands = re.split(r",\s*(?![^\[]*\])", rest) if rest else []
    label = re.search(r"`\((\.L_x_\d+)\)", rest)
    base = re.search(r"gdesc\[(UR\d+)\]", rest)
    descriptors = _registers(base[1], 4)[0 if operands[1].startswith("gdesc") else 2 :] if base else []
    stack = [f"S{int(place or '0', 16) + 4 * at}" for place in re.findall(r"\[R1(?:\+(0x[0-9a-f]+))?\]", rest) for at in range(4)]
    width = _width(operation)
    writes, reads = [], [one for operand in operands for one in _read(operation, operand)]
    if operation.startswith("STL"):
        writes, reads = stack[:width], _registers(operands[1], width) if REGISTER.fullmatch(operands[1]) else []
    elif not operation.startswith(WRITES_NONE):
        target = next((one for one in operands if not re.match(r"!?U?P[T\d]", one)), "")
        if REGISTER.fullmatch(target):
            writes = _registers(target, width)
            reads = [one for operand in operands[operands.index(target) + 1 :] for one in _read(operation, operand)]
        if operation.startswith("LDL"):
            reads = stack[:width]
    jumps = label[1] if label and operation.startswith("BRA") else None
    return Line(operation, writes, reads, descriptors, jumps, conditional or bool(re.match(r"!?U?P\d", rest)))


def _width(operation: str) -> int:
    """Registers that an instruction writes (or a store reads)."""
    if product := re.search(r"HGMMA\.64x(\d+)x", operation):
        return int(product[1]) // 2
    if operation.startswith("LDSM"):
        return int(operation[-1]) if operation.endswith((".2", ".4")) else 1
    return 4 if ".128" in operation or operation.startswith("HMMA") else 2 if re.search(r"\.64|^CS2R|\.WIDE", operation) else 1


def _read(operation: str, operand: str) -> list[str]:
    pair = ".64" in operation and not operation.startswith(("MOV", "F"))
    return [one for name in REGISTER.findall(operand) for one in _registers(name, 2 if pair else 1)]


def _data_before(lines: list[Line], labels: dict[str, int]) -> list[set[str] | None]:
    """What may hold data before each instruction, on any path; None where no path leads."""
    before: list[set[str] | None] = [None] * len(lines)
    todo: list[tuple[int, set[str]]] = [(0, set())]
    while todo:
        at, held = todo.pop()
        while at < len(lines):
            known = before[at]
            if known is not None and held <= known:
                break
            held = held | (known or set())
            before[at], line = held, lines[at]
            held = _after(line, held)
            if line.jumps_to is not None:
                todo.append((labels[line.jumps_to], held))
            if line.operation.startswith(("BRA", "EXIT")) and not line.conditional:
                break
            at += 1
    return before


def _after(line: Line, held: set[str]) -> set[str]:
    each: Iterator[bool]
    if line.operation.startswith(("STL", "LDL")) and line.reads:
        each = iter([one in held for one in line.reads])
    else:
        data = line.operation.startswith(DATA) or any(one in held for one in line.reads)
        each = iter([data and not line.operation.startswith((*KNOWN, "STL"))] * len(line.writes))
    gained, lost = set(), set()
    for one, data in zip(line.writes, each, strict=False):
        (gained if data else lost).add(one)
    return (held - (set() if line.conditional else lost)) | gained
