"""Prompts from files and standard input."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import metattt
from metattt.cli import main
from metattt.data.text import ByteTokenizer
from metattt.generation.text import generate_text


def standard_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


GREEDY = ("max_new_tokens=7", "temperature=0", "device=cpu")


@pytest.mark.parametrize("kind", ["lines", "jsonl", "standard input"])
def test_many_prompts_are_answered_as_each_alone(
    finished: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["abc 1", "a longer prompt – with “quotes”", "x"]
    file = tmp_path / ("p.jsonl" if kind == "jsonl" else "p.txt")
    shown = [json.dumps({"prompt": prompt, "more": 1}) for prompt in prompts] if kind == "jsonl" else prompts
    file.write_text("\n\n".join(shown) + "\n", encoding="utf-8")
    if kind == "standard input":
        standard_input(monkeypatch, file.read_bytes().replace(b"\n", b"\r\n"))
    given = "-" if kind == "standard input" else str(file)
    assert main(["generate", f"checkpoint={finished}", f"prompts={given}", "batch_size=2", *GREEDY]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    model, _ = metattt.load_model(finished)
    alone = [generate_text(model, ByteTokenizer(), [prompt], 7, temperature=0)[0] for prompt in prompts]
    assert answers == [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, alone, strict=True)]


def test_answers_go_to_a_new_file_and_batches_are_drawn_apart(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("same\n" * 4)
    given = [f"checkpoint={finished}", f"prompts={tmp_path / 'p.txt'}", f"output={tmp_path / 'o.jsonl'}", "batch_size=2", "seed=3"]
    assert main(["generate", *given, "max_new_tokens=20", "device=cpu"]) in (0, None)
    answers = [json.loads(line)["text"] for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert len(answers) == 4 and len(set(answers)) == 4
    assert main(["generate", *given]) == 2


def test_a_prompt_from_standard_input(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for prompt in ("prompt=abc 1", "prompt=-"):
        standard_input(monkeypatch, b"abc 1\n")
        assert main(["generate", f"checkpoint={finished}", prompt, *GREEDY]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] and found[0].startswith("abc 1")
    standard_input(monkeypatch, b"abc\x1b[31m")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)  # which what is written must not steer
    assert main(["generate", f"checkpoint={finished}", "prompt=-", *GREEDY]) == 0
    assert capsys.readouterr().out.startswith("abc\\x1b[31m")


@pytest.mark.parametrize(("words", "content", "message"), [
    (("prompts=-",), b"\n \n", "holds no prompts"),
    (("prompt=-",), b"\xff", "not UTF-8"),
    (("prompts=-", "prompt=x"), b"y", "give one of them"), (("prompt=x", "output=x"), b"", "prompts=<a file>"),
    (("prompts={file}",), b'{"prompt": 3}', "has no text under `prompt`"),
    (("prompts={file}",), b"{", "is damaged"),
    (("prompts={file}",), b'{"prompt": "\\ud800"}', "has an invalid character"),
    (("prompts=-", "output=/nowhere/x.jsonl"), b"x", "/nowhere/x.jsonl"),
])  # fmt: skip
def test_refusals_are_a_line(
    finished: Path, tmp_path: Path, words: tuple[str, ...], content: bytes, message: str, monkeypatch: pytest.MonkeyPatch,
    told: Callable[..., str],
) -> None:  # fmt: skip
    (tmp_path / "p.jsonl").write_bytes(content)
    standard_input(monkeypatch, content)
    given = [word.format(file=tmp_path / "p.jsonl") for word in words]
    error = told("generate", f"checkpoint={finished}", *given, "device=cpu")
    assert message in error and error.count("\n") == 1
