"""What README.md and the documentation show is so: code runs, commands compose or run, figures and numbers are of today."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from documents_for_tests import PAGES, ROOT, SMALL, Block, blocks, commands, name_of, of_metattt, script

from metattt.cli import COMMANDS, NAMED, main
from metattt.composition.choices import groups
from metattt.composition.compose import compose
from metattt.testing import LearnerConformance, OptimizerConformance, TaskConformance

PROGRAMS = {"pip", "python3", "pytest", "python", "ruff", "mypy", "mkdocs", ".", "eval", "cd", "git"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder for all pages, as a reader's: a file of an earlier page is there for a later one."""
    path = tmp_path_factory.mktemp("reader")
    before, kept = os.getcwd(), list(sys.path)
    os.chdir(path)
    sys.path.insert(0, str(path))
    for page in PAGES:
        for block in blocks(page):
            if block.file:
                (path / block.file).parent.mkdir(parents=True, exist_ok=True)
                (path / block.file).write_text(block.text)
    yield path
    os.chdir(before)
    sys.path[:] = kept


def a_trained_model(folder: Path) -> dict[str, Any]:
    """What the pages of adaptation and of Hugging Face have at hand: a run, its export, a text."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    if not (folder / "runs/demo").exists():
        assert main(["train", *SMALL, "output_dir=runs/demo"]) == 0
        assert main(["export", "source=runs/demo", "target=my-model"]) == 0
        (folder / "notes.txt").write_text("What is to be kept.")
    return {}


def a_tuned_card(folder: Path) -> dict[str, Any]:
    """What the page of GPUs has at hand: the launches that a benchmark has found."""
    from metattt.kernels.ttt_linear import tuning

    place = folder / "results/gpu/<card>"
    place.mkdir(parents=True, exist_ok=True)
    (place / "tuning.json").write_text(json.dumps({"tables": {"ttt_linear": {"TABLE": {}}}}))
    return {"json": json, "tuning": tuning}


AT_HAND = {
    "docs/adaptation.md": a_trained_model, "docs/hugging_face.md": a_trained_model, "docs/gpu.md": a_tuned_card,
}  # fmt: skip


def run_page(page: Path, folder: Path) -> dict[str, Any]:
    """The names that the blocks of Python on a page leave."""
    names: dict[str, Any] = {"__name__": page.stem, **AT_HAND.get(name_of(page), lambda _: {})(folder)}
    for block in blocks(page):
        if block.language == "python":
            if block.file:  # a module in the reader's folder: what a later block needs of it, it imports
                importlib.import_module(block.file.removesuffix(".py"))
            else:
                code = "\n" * block.line + block.text
                exec(compile(code, name_of(page), "exec"), names)
    return names


WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_runs(page: Path, folder: Path) -> None:
    from metattt.kernels import base

    kernels = {kernel.name: kernel for kernel in base.kernels()}  # ours, too, which are registered once
    base.kernels.cache_clear()
    try:
        assert run_page(page, folder)
    finally:
        base.KERNELS.clear()
        base.KERNELS.update(kernels)
        base.kernels.cache_clear()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_its_language(page: Path) -> None:
    """Without one nothing looks at it: a command that does not exist stood in such a block."""
    fences = re.findall(r"^ *```.*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) % 2 == 0 and not [line for line in fences[::2] if line.strip() == "```"]


def command_blocks() -> list[tuple[str, Block]]:
    shell = ("bash", "sh", "console")
    return [(name_of(page), b) for page in PAGES for b in blocks(page) if b.language in shell]


@cache
def composed(words: tuple[str, ...]) -> None:
    """Composes what a command asks for; a sweep, its first run."""
    command, overrides = words[0], [word for word in words[1:] if word not in ("-m", "--multirun")]
    assert command in COMMANDS or command in ("--help", "--version", "--shell-completion"), command
    if command not in COMMANDS or "--help" in overrides:
        return
    if "-m" in words or "--multirun" in words:
        overrides = [first_of(word) for word in overrides if not word.startswith("hydra")]
    if command in NAMED and overrides and re.fullmatch(NAMED[command][1], overrides[0]):
        overrides[0] = f"{NAMED[command][0]}={overrides[0]}"
    if "--config-dir" in overrides:
        place = overrides.index("--config-dir")
        assert main([command, *overrides, "--cfg", "job"]) == 0, words
        del overrides[place : place + 2]
        return
    flags = {"--cfg", "job", "--cfg=job", "--resolve", "--info", "defaults"}
    compose(*[word for word in overrides if word not in flags], job=command)


def first_of(override: str) -> str:
    """The first value of a sweep: `a,b`, `range(...)`, `interval(...)`, `glob(...)`."""
    key, _, value = override.partition("=")
    if inner := re.search(r"(?:range|interval)\(([^,)]+)", value):
        return f"{key}={inner[1]}"
    if value.startswith("glob("):
        return f"{key}={value[5:-1].replace('*', 'linear')}"
    return override if value.startswith(("[", "'")) else f"{key}={value.split(',')[0]}"


@pytest.mark.parametrize("page", sorted({name for name, _ in command_blocks()}))
def test_commands_compose(page: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    seen = 0
    for name, block in command_blocks():
        for words in commands(block.text) if name == page else ():
            given = of_metattt(words)
            seen += 1
            if given is not None:
                composed(tuple(given))
            else:
                program = next(word for word in words if "=" not in word)
                assert program in PROGRAMS, f"{page}: {words}"
                if program == "pip":
                    named = re.findall(r"\[([\w,]+)\]", " ".join(words))
                    assert all(extra in extras for one in named for extra in one.split(",")), words
                if "-m" in words and program == "python" and words[words.index("-m") + 1].startswith("metattt"):
                    assert importlib.util.find_spec(words[words.index("-m") + 1]), words
    assert seen


@pytest.mark.parametrize("page", sorted({name_of(p) for p in PAGES for b in blocks(p) if b.language == "yaml"}))
def test_files_of_configurations_compose(page: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, block in enumerate(one for one in blocks(ROOT / page) if one.language == "yaml" and not one.file):
        schema = re.search(r"- /schema/(\w+)/", block.text)
        group = schema[1] if schema else "layer" if "# family:" in block.text else "experiment"
        command = next(name for name in COMMANDS if group in groups(name))
        file = folder / "shown" / group / f"{Path(page).stem}{number}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)
        chosen = [command, "--config-dir", "shown", f"{group}={file.stem}"]
        assert main([*chosen, "--cfg", "job"]) == 0, capsys.readouterr().err


def marked() -> list[Any]:
    return [
        pytest.param(words[1:], id=" ".join(words)[:70])
        for _, block in command_blocks()
        for words in (commands(block.text) if block.how == "run" else ())
    ]


@pytest.mark.parametrize("words", marked())
def test_marked_commands_run(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [*SMALL, f"output_dir=run-{abs(hash(tuple(words)))}"] if words[0] == "train" else []
    code = main([*words, *small])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert {"train": "order-2", "check": "pass", "layers": "f(x; W)"}[words[0]] in said.out
    assert "FAIL" not in said.out


# -- what the pages tell their readers to write keeps every law --------------------------------------------------------


def shown(page: str, name: str) -> Any:
    """A class that a page defines, as its file."""
    for block in blocks(ROOT / page):
        if block.language == "python" and f"class {name}(" in block.text:
            names: dict[str, Any] = {"__name__": name}
            exec(compile(block.text, page, "exec"), names)
            return names[name]
    raise AssertionError(f"{page} has no {name}")


class TestTanh(LearnerConformance):
    make = staticmethod(lambda: shown("docs/tutorials/learner.md", "Tanh")())


class TestForgetting(OptimizerConformance):
    make = staticmethod(lambda: shown("docs/tutorials/rule.md", "Forgetting")(mini_batch_size=4))


class TestHalfToken(TaskConformance):
    make = staticmethod(lambda: shown("docs/tutorials/task.md", "HalfToken")())


# -- numbers and figures -----------------------------------------------------------------------------------------------


def test_numbers_are_those_of_the_results() -> None:
    numbers = script(ROOT / "docs/scripts/numbers.py")
    marks, problems = 0, []
    for page in numbers.pages():
        text = page.read_text(encoding="utf-8")
        marks += len(numbers.MARK.findall(text))
        problems += [f"{name_of(page)}: {one}" for one in numbers.checked(text)]
        problems += numbers.unmarked(name_of(page), text, numbers.allowances())
    assert not problems, "\n".join(problems) + "\nRun `python docs/scripts/numbers.py`"
    assert marks > 40


def test_the_arithmetic_of_scaling_is_that_of_its_script() -> None:
    scaling = script(ROOT / "docs/scripts/scaling.py")
    written = json.loads((ROOT / scaling.RESULT).read_text(encoding="utf-8"))
    assert written["assumed"] == scaling.ASSUMED
    now = scaling.tables()
    assert set(now) == set(written["tables"])
    for name, rows in now.items():
        for row, old in zip(rows, written["tables"][name], strict=True):
            assert old == pytest.approx(row), f"{name}: run `python docs/scripts/scaling.py`"


def test_figures_are_those_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn anew, they have the same numbers and words; bytes differ between versions of Matplotlib."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "figures"))
    drawn = script(ROOT / "docs/figures/drawing.py").all_of_them(tmp_path)
    assert {file.name for file in drawn} == {file.name for file in (ROOT / "docs/figures").glob("*.svg")}
    for file in drawn:
        committed = (ROOT / "docs/figures" / file.name).read_text(encoding="utf-8")
        for pattern in (r"<dc:description>(.*?)</dc:description>", r"<text[^>]*>([^<]*)"):
            assert re.findall(pattern, file.read_text(encoding="utf-8")) == re.findall(pattern, committed), file.name
    for name in ("drawing", "layer", "coefficients", "online", "measured"):
        sys.modules.pop(name, None)


# -- the site ----------------------------------------------------------------------------------------------------------


def test_every_page_is_in_the_menu() -> None:
    menu = re.findall(r":\s(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.name != "README.md"}
    assert set(menu) == pages | {"reference/configuration.md"} and len(menu) == len(set(menu))


@pytest.mark.slow
def test_the_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    site, words = tmp_path / "site", ["-m", "mkdocs", "build", "--strict", "-f"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1", "no_proxy": "", "https_proxy": "http://127.0.0.1:9"}
    command = [sys.executable, *words, str(ROOT / "mkdocs.yml"), "-d", str(site)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    reference = (site / "reference/configuration.html").read_text(encoding="utf-8")
    for expected in ("mini_batch_size", "tokens per commit of the weights", "optimizer/gradient_descent", "learner=mlp"):
        assert expected in reference
    assert "&amp;lt;" not in reference and "``" not in reference
    mathematics = (site / "mathematics.html").read_text(encoding="utf-8")
    assert mathematics.count("Source code in") >= 9
    assert (site / "figures/layer.svg").is_file() and (site / "results/cpu/model.html").is_file()
    links = {
        (page, link)
        for page in site.rglob("*.html")
        for link in re.findall(r'(?:href|src)="([^"#?:]+)[#"?]', page.read_text(encoding="utf-8"))
        if page.name != "404.html"
    }
    assert not [(str(page), link) for page, link in links if not (page.parent / link).exists()]
