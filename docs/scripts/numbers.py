"""Measured numbers in README.md and docs/*.md: each comes from a file under `results/`, named in a mark before it.

    <!-- results/cpu/layer.json :: Time :: layer=ttt_mlp; form=dual; pass=forward; T=512 :: ms, median -->7.55

names the file, the table in it, what picks one row (only as much as is needed), and the column; ` * 100` after the
column scales it. Of a result in Markdown, `<!-- results/cpu/kills.md :: text with {} in it -->12` stands for that text
with the number in the place of the braces. A number has the decimals that the writer gave it.

`python docs/scripts/numbers.py` brings every number up to its file and says which have changed. A number with a unit of
measure that has no mark is refused, unless `docs/scripts/unmarked.txt` says why it is no measurement. Whole tables are
better generated: what stands between `<!-- generated: name -->` and `<!-- end -->` is what `blocks.py` makes from `results/`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # tests load this file by its path
from blocks import BLOCKS

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = Path(__file__).with_name("unmarked.txt")
GENERATED = ("docs/layers.md",)  # written by layers.py, from what was measured

NUMBER = r"\d[\d,]*(?:\.\d+)?"
GENERATED_PART = re.compile(r"(?<=<!-- generated: )(\w+)( -->\n)(.*?)(?=<!-- end -->\n)", re.DOTALL)
MARK = re.compile(r"<!-- (results/\S+) :: ([^>]+?) -->(" + NUMBER + ")?")
UNIT = (
    r"(?:ms|µs|ns|s|seconds?|minutes?|[kMG]i?B|bytes|%|×|times|GFLOPs?|TFLOPs?|GFLOP/s|TFLOP/s|tokens/s|GB/s|nats?"
    r"|bits?(?: per byte| a byte|/byte)?)"
)
WITH_UNIT = re.compile(r"(?<![\w.,=:/-])(" + NUMBER + r")(?:\s|&nbsp;)?(" + UNIT + r")(?![\w/])")
COLUMN = re.compile(r"\b(?:ms|µs|seconds|MB|MiB|GB|tokens/s|times|share|bits|bytes|nats)\b")


class Stale(Exception):
    """A mark that its file does not bear out."""


def pages(root: Path = ROOT) -> list[Path]:
    """README.md and every page of the documentation that is written by hand."""
    found = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [page for page in found if str(page.relative_to(root)) not in GENERATED]


def value_of(file: str, where: str, written: str, root: Path = ROOT) -> str:
    """The number that belongs in the place of `written`, with as many decimals.

    Raises:
        Stale: the file, the table, the row or the column is not there, or several rows are.
    """
    if not (root / file).is_file():
        raise Stale(f"{file}: there is no such file")
    if file.endswith(".md"):
        before, braces, after = where.partition("{}")
        hits = re.findall(re.escape(before) + f"({NUMBER})" + re.escape(after), text_of(root / file))
        if not braces or len(set(hits)) != 1:
            raise Stale(f"{file}: `{where}` is there {len(set(hits))} times")
        return hits[0]
    table, row, column = [part.strip() for part in where.split("::")]
    column, _, factor = column.partition(" * ")
    tables = data_of(root / file)["tables"]
    if table not in tables:
        raise Stale(f"{file}: no table `{table}`: it has {', '.join(tables)}")
    wanted = [tuple(part.strip().split("=", 1)) for part in row.split(";")]
    rows = [one for one in tables[table] if all(str(one.get(key)) == value for key, value in wanted)]
    if len(rows) != 1 or column not in rows[0]:
        raise Stale(f"{file}, {table}: {len(rows)} rows are {row}" + (f", without `{column}`" if rows else ""))
    found = re.match(NUMBER, cell) if isinstance(cell := rows[0][column], str) else None  # `92.6 ± 3.5` gives 92.6
    if isinstance(cell, str) and not found:
        raise Stale(f"{file}, {table}: `{cell}` in `{column}` is no number")
    decimals = len(written.partition(".")[2])
    return f"{float(found[0].replace(',', '') if found else cell) * float(factor or 1):{',' if ',' in written else ''}.{decimals}f}"


def checked(text: str, root: Path = ROOT) -> Iterator[str]:
    """What is wrong with the marks and the generated parts of a page."""
    for part in GENERATED_PART.finditer(text):
        if BLOCKS[part[1]]() != part[3]:
            yield f"the part `{part[1]}` is not what is in results/"
    for mark in MARK.finditer(text):
        if mark[3] is None:
            yield f"{mark[0]} has no number after it"
            continue
        try:
            now = value_of(mark[1], mark[2], mark[3], root)
        except Stale as error:
            yield str(error)
            continue
        if now != mark[3]:
            yield f"{mark[3]} is {now} in {mark[1]} ({mark[2]})"


def unmarked(page: str, text: str, allowed: list[tuple[str, str]]) -> Iterator[str]:
    """Numbers with a unit, in the text or in the head of their column, that no mark stands before."""
    text = GENERATED_PART.sub("", text)
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:    .*\n)+", "", text, flags=re.MULTILINE)  # formulas
    text = re.sub(r"`[^`\n]*`", "``", MARK.sub("", text))
    units: list[bool] = []
    for line in text.splitlines():
        if any(one in (page, "*") and re.search(pattern, line) for one, pattern in allowed):
            continue
        if not line.lstrip().startswith("|"):
            units = []
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.lstrip().startswith("|") else []
        if cells and not units:
            units = [COLUMN.search(cell) is not None for cell in cells]
        elif cells:
            for has_unit, cell in zip(units, cells, strict=False):
                if has_unit and re.fullmatch(r"\*{0,2}" + NUMBER + r"\*{0,2}", cell):
                    yield f"{page}: {cell} in `{line.strip()}`"
        for hit in WITH_UNIT.finditer(line):
            yield f"{page}: {hit[0]} in `{line.strip()}`"


def allowances(file: Path = ALLOWED) -> list[tuple[str, str]]:
    """Page (or `*`) and pattern of each line `page | pattern | why`."""
    lines = [line.split(" | ") for line in file.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return [(page.strip(), pattern.strip()) for page, pattern, _ in lines]


@cache
def data_of(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


@cache
def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def main() -> int:
    wrong = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")

        def renewed(mark: re.Match[str]) -> str:
            return mark[0][: mark.start(3) - mark.start()] + value_of(mark[1], mark[2], mark[3]) if mark[3] else mark[0]

        try:
            new = MARK.sub(renewed, GENERATED_PART.sub(lambda part: part[1] + part[2] + BLOCKS[part[1]](), text))
        except Stale as error:
            print(f"{page.relative_to(ROOT)}: {error}")
            wrong += 1
            continue
        for problem in checked(text):
            print(f"{page.relative_to(ROOT)}: was out of date: {problem}")
        if new != text:
            page.write_text(new, encoding="utf-8")
        for problem in unmarked(str(page.relative_to(ROOT)), new, allowances()):
            print(f"no mark: {problem}")
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
