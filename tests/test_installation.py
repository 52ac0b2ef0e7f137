"""What is installed by need: the core alone works, an absent library is one line that names its extra, and
pyproject.toml says the same."""

from __future__ import annotations

import ast
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

from metattt.optional import DISTRIBUTIONS, MissingExtra, absence, need

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRA = ("train", "images", "text", "hf", "eval", "sweep", "loggers")
LIBRARIES = (
    "PIL", "accelerate", "datasets", "huggingface_hub", "joblib", "lightning", "lm_eval", "matplotlib", "mlflow", "optuna",
    "pandas", "pyarrow", "pytorch_lightning", "scipy", "sklearn", "submitit", "tensorboard", "timm", "tokenizers",
    "torchmetrics", "torchvision", "transformers", "wandb", "webdataset",
)  # fmt: skip
"""What the extras bring, and what that brings."""

TRIAL = """
import contextlib, io, json, sys
libraries, blocked, commands = json.loads(sys.argv[1])
if blocked:
    sys.modules.update(dict.fromkeys(libraries))
from metattt.cli import main
found = {}
for command in commands:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command)
    found[" ".join(command)] = code, out.getvalue(), err.getvalue()
import metattt
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
layer = metattt.build("layer=ttt_mlp", "dim=16", "num_heads=2")
import metattt.learners, metattt.models, metattt.optimizers, metattt.tasks, metattt.testing
mistakes = {}
def name(title, action):
    try:
        action()
    except metattt.MetaTTTError as error:
        mistakes[title] = str(error)
if blocked:
    instantiate_model(compose("dim=16", "num_heads=2", job="language_model"))
    from metattt.data.digits import DigitsData
    from metattt.data.images import ImageData
    name("vision", lambda: __import__("metattt.models.vision"))
    name("train", lambda: __import__("metattt.training.train"))
    name("data=digits", lambda: DigitsData().setup())
    name("data=images", lambda: ImageData())
    name("timm", lambda: __import__("metattt.models.timm"))
    name("hf", lambda: __import__("metattt.hf"))
    name("eval", lambda: __import__("metattt.evaluation.harness"))
    choice = "model=vision_transformer"
    name("choice", lambda: instantiate_model(compose(choice, job="language_model")))
brought = sorted(set(libraries) & {name.partition(".")[0] for name, module in sys.modules.items() if module is not None})
print(json.dumps([found, mistakes, brought]))
"""


def trial(folder: Path, blocked: bool, *commands: list[str]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Exit code, output and errors of commands in a fresh process; what Python was refused; the libraries of extras
    that it imported."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", TRIAL, json.dumps([LIBRARIES, blocked, commands])],
        cwd=folder, env=environment, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found, mistakes, brought = json.loads(done.stdout.splitlines()[-1])
    return found, mistakes, brought


def test_the_core_brings_no_library_of_an_extra(tmp_path: Path) -> None:
    _, _, brought = trial(tmp_path, False)
    assert brought == []


@pytest.mark.slow
def test_without_extras(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").touch()
    prepare = ["prepare", f"target={tmp_path / 'shards'}"]
    size = ["dim=16", "num_heads=2"]
    work = [["check", "learner=linear", *size], ["layers", *size], ["bench", *size, "length=16", "rounds=1"]]
    refused = {
        "train": ["train"],
        "text": [*prepare, "source=text.parquet"],
        "text (tokenizer)": [*prepare, "source=text.parquet", "tokenizer=gpt2"],
        "text (data set)": [*prepare, "source=someone/texts"],
        "hf": ["export", "source=run", "target=out"],
    }
    found, mistakes, brought = trial(tmp_path, True, *work, *refused.values())
    assert brought == []
    for command in work:
        assert found[" ".join(command)][0] == 0, found[" ".join(command)]
    for title, command in refused.items():
        code, _, message = found[" ".join(command)]
        assert code == 2 and message.count("\n") == 1, (command, message)
        assert f"pip install 'metattt[{title.partition(' ')[0]}]'" in message, (command, message)
    extras = dict.fromkeys(("vision", "data=digits", "data=images", "timm", "choice"), "images")
    extras |= {name: name for name in ("train", "hf", "eval")}
    assert mistakes.keys() == extras.keys()
    for title, message in mistakes.items():
        assert "\n" not in message and f"pip install 'metattt[{extras[title]}]'" in message, (title, message)
    assert "scikit-learn" in mistakes["data=digits"]


def test_what_an_absent_library_looks_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert absence("json", extra="train", what="this") is None
    line = "this needs nothing_of_this_name, which is not installed: pip install 'metattt[train]'"
    assert absence("nothing_of_this_name", extra="train", what="this") == line
    with pytest.raises(MissingExtra, match=re.escape(line)) as refused:
        need("nothing_of_this_name.part", extra="train", what="this")
    assert isinstance(refused.value, ImportError)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_library.py").write_text("import json.nothing_there")  # which is not absent
    with pytest.raises(ImportError, match="nothing_there") as broken:
        need("broken_library", extra="train", what="this")
    assert not isinstance(broken.value, MissingExtra)


@cache
def trees() -> dict[Path, ast.Module]:
    """Every file of the package, parsed."""
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "metattt").rglob("*.py"))}


def calls() -> Iterator[tuple[Path, str, str]]:
    """Every `need` and `absence` of the package: file, library, extra."""
    for file, tree in trees().items():
        assigned = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)]
        tables = {ast.unparse(node.targets[0]): node.value for node in assigned}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("need", "absence"):
                if file.name == "optional.py":
                    continue
                library, extra = node.args[0], next(word.value for word in node.keywords if word.arg == "extra")
                # of a table of the module: each of its values
                table = tables[ast.unparse(library.value)].values if isinstance(library, ast.Subscript) else [library]
                assert isinstance(extra, ast.Constant), file
                for one in table:
                    assert isinstance(one, ast.Constant), file
                    name = str(one.value)
                    yield file, name if name in DISTRIBUTIONS else name.partition(".")[0], str(extra.value)


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", line, maxsplit=1)[0].lower() for line in requirements}


def test_the_extra_that_is_named_brings_the_library() -> None:
    extras = PROJECT["optional-dependencies"]
    named = set()
    for file, library, extra in calls():
        named.add(DISTRIBUTIONS.get(library, library).lower())
        assert DISTRIBUTIONS.get(library, library).lower() in names(extras[extra]), (file, library, extra)
    given = set().union(*(names(extras[extra]) for extra in EXTRA))
    assert given - named == {"webdataset", "accelerate"}  # timm asks for it, for data.dataset=wds/...; Trainer
    assert extras["all"] == [f"metattt[{','.join(EXTRA)}]"]
    assert not given & names(PROJECT["dependencies"])


def test_every_library_that_is_imported_is_declared() -> None:
    ours = {"metattt", "fla"}  # fla: a peer that benchmarks time where it is
    core = names(PROJECT["dependencies"])
    importable = {{"hydra-core": "hydra", "pyyaml": "yaml"}.get(name, name) for name in core}
    extra = {library for _, library, _ in calls()}
    for file, tree in trees().items():
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules.append(str(node.module))
            strangers = {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names) - ours - importable
            assert strangers <= extra, (file, strangers)
