"""The tables of `docs/layers.md`, from the files of the layers: `python -P docs/scripts/layers.py` writes them.

(-P: this folder has modules with names of the standard library.)
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from metattt.catalog.families import sources
from metattt.catalog.known_layers import written_down
from metattt.composition.choices import choices

PAGE = Path(__file__).resolve().parents[1] / "layers.md"
DIM, HEADS = 64, 4
BEGIN = f"State of `dim={DIM} num_heads={HEADS}`.\n"
COLUMNS = ("layer", "what it is", "task", "learner", "optimizer", "state", "cost of a token")


def page(before: str) -> str:
    """The page with new tables, behind the words that it has before them."""
    known, layers, summaries = sources(), written_down(DIM, HEADS), choices("layer")
    lines = [before.partition(BEGIN)[0] + BEGIN.rstrip()]
    for family in dict.fromkeys(one.family for one in known.values()):
        lines += ["", f"## {family[:1].upper()}{family[1:]}", "", row(COLUMNS), row("---" for _ in COLUMNS)]
        for name in (name for name, one in known.items() if one.family == family):
            source, one = known[name], layers[name]
            paper = f"[{text(source.paper)}](https://arxiv.org/abs/{source.arxiv})" if source.arxiv else source.paper
            parts = (f"{code(part)} {code(settings)}".strip() for part, settings in one.parts.values())
            summary = summaries[name]
            assert one.causal != summary.endswith("Not causal"), f"{name}: {summary}"
            lines.append(row((code(name), f"{text(summary)}. {paper}", *parts, one.state, one.cost)))
    return "\n".join(lines) + "\n"


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def code(words: str) -> str:
    escaped = words.replace("|", "\\|")
    return f"`{escaped}`" if words else ""


def text(words: str) -> str:
    """Words for a cell of a table, as they are written."""
    for sign in "\\`*_[]<>|":
        words = words.replace(sign, f"\\{sign}")
    return words


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
