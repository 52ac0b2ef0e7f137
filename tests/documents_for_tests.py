"""What README.md and docs/ show, found and run: one mechanism for all pages.

- *Python*: the blocks of a page, one after the other, in one namespace and in a folder of the page's own. A block that begins with
  `# name.py` is also that file there.
- *YAML* that begins with `# folder/name.yaml`, or has it behind `# @package`, is that file.
- *Commands*: `metattt ...` is composed, as `--cfg job` does. Where `<!-- run -->` stands before the block it is run, small.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

BLOCK = re.compile(
    r"(?P<mark><!-- (?P<how>run|shown: [^>]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
FILE = re.compile(r"(?:# @package \S+\n)?# (?P<name>[\w/.-]+\.(?:py|yaml))\b")

SMALL = (
    "dim=16", "num_heads=2", "model.num_layers=1", "data.context_length=32", "data.batch_size=2", "trainer.max_steps=2",
    "trainer.accelerator=cpu", "data.max_bytes=20000", "data.validation_max_bytes=2000", "sample=false",
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, text, what the mark before it says, and where it begins."""

    language: str
    text: str
    how: str
    line: int

    @property
    def file(self) -> str | None:
        found = FILE.match(self.text)
        return found["name"] if found else None


def script(path: Path) -> ModuleType:
    """A file of Python that belongs to no package, as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["language"], found["text"], found["how"] or "", text.count("\n", 0, found.start()) + 1)
        for found in BLOCK.finditer(text)
    ]


def commands(text: str) -> list[list[str]]:
    """The words of every command in a block of the shell: joined over `\\`, without comments, split at `&&`."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(re.sub(r"(?<=\s)\.\.\.(?=\s|$)", "", line), comments=True)
        command: list[str] = []
        for word in (*words, "&&"):
            if word == "&&":
                found += [command] if command else []
                command = []
            else:
                command.append(word)
    return found


def of_metattt(words: list[str]) -> list[str] | None:
    """The arguments of `metattt` in a command, also behind a launcher and variables; None for another program."""
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if words and words[0] == "metattt":
        return words[1:]
    if words and words[0] in ("torchrun", "srun"):
        return words[words.index("metattt") + 1 :]
    return None
