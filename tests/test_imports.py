"""The house: no circle of imports, and arrows only where the table of `metattt/README.md` has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

INNER = "metattt.inner"  # there, imports for types count, too
PACKAGE = Path(__file__).resolve().parent.parent / "metattt"


def modules(package: Path) -> dict[str, Path]:
    """Dotted name -> file."""
    found = {".".join(file.relative_to(package.parent).with_suffix("").parts): file for file in package.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for name, file in found.items()}


def statements(nodes: Sequence[ast.stmt], types: bool = False) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported: functions are left out, and unless `types`, `if TYPE_CHECKING`."""
    for node in nodes:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements([*(node.body if types else []), *node.orelse], types)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, part, []), types)
            for branch in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                yield from statements(branch.body, types)


def imports(package: Path, types: str = "/") -> dict[str, set[str]]:
    """Module of `package` -> modules of `package` that it imports when it is imported itself; modules whose names begin
    with `types` also those that they import for their types alone."""
    files = modules(package)
    graph: dict[str, set[str]] = {}
    for name, file in files.items():
        found: set[str] = set()
        for node in statements(ast.parse(file.read_text(encoding="utf-8")).body, name.startswith(types)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file}:{node.lineno}: imports are absolute"
                inside = (f"{node.module}.{alias.name}" for alias in node.names)
                found |= {one if one in files else str(node.module) for one in inside}
        graph[name] = {one for one in found if one in files} - {name}
    return graph


@cache
def of_the_package() -> dict[str, set[str]]:
    return imports(PACKAGE, INNER)


def part(module: str) -> str:
    """`metattt.inner.loop` -> `inner`; the package itself -> `metattt`."""
    return module.split(".")[1] if "." in module else module


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """A circle, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def table() -> dict[str, list[str]]:
    """Part -> what it may import, from top to bottom; small parts may share a row."""
    rows = re.findall(
        r"^\| ((?:`\w+` )+)\| .* \|([^|]*)\|$", (PACKAGE / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    names = re.compile(r"`([\w.]+)`")
    return {name: names.findall(allowed) for parts, allowed in rows for name in names.findall(parts)}


def test_no_circle_of_modules() -> None:
    assert circle(of_the_package()) == []


def test_no_circle_of_folders() -> None:
    folders: dict[str, set[str]] = {}
    for module, used in of_the_package().items():
        folders.setdefault(part(module), set()).update({part(one) for one in used} - {part(module)})
    assert circle(folders) == []


def test_every_part_has_a_row() -> None:
    listed = table()
    assert sorted(listed) == sorted({part(module) for module in modules(PACKAGE)})
    above: set[str] = set()
    for name, allowed in listed.items():
        assert {one.partition(".")[0] for one in allowed} <= above, f"{name}: an arrow of the table points down"
        above.add(name)


def test_arrows_are_those_of_the_table() -> None:
    listed = table()
    strangers = []
    for module, used in sorted(of_the_package().items()):
        allowed = {f"metattt.{one}" for one in (part(module), *listed.get(part(module), ())) if one != "metattt"}
        strangers += [
            f"{module} imports {one}"
            for one in sorted(used)
            if not any(f"{one}.".startswith(f"{name}.") for name in allowed)
        ]
    assert strangers == []


def test_lines_and_files_are_short() -> None:
    """Lines have 120 characters at most; files 400 lines, except kernels, which are one function each."""
    for file in sorted(PACKAGE.rglob("*.py")):
        lines = file.read_text().splitlines()
        assert max(map(len, lines), default=0) <= 120, file
        assert len(lines) <= 400 or "kernels" in file.parts, file
