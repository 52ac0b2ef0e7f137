"""The families of known layers and their papers, as the files of the layers have them:
`# family: <family>; paper: <title>, arXiv <id>`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.resources.abc import Traversable
from typing import NamedTuple

from metattt.composition.choices import comments, files_of

FAMILIES = (
    "linear attention and state spaces",
    "delta rules",
    "test-time training",
    "memory with momentum and retention",
    "regression on all tokens",
    "two layers in one",
    "for images",
)
"""Those of our own layers, in the order of the table; others follow by name."""

OWN = "your own"
"""The family of layers whose file names none; the last one."""

LINE = re.compile(r"# family: (?P<family>[^;]+); paper: (?P<paper>.+?)(, arXiv (?P<id>\d{4}\.\d{4,5}))?")
"""`# family: <family>; paper: <title>, arXiv <id>`, or `paper: none`."""


class Source(NamedTuple):
    """Where a layer comes from.

    Attributes:
        family: of layers.
        paper: its short title; empty if there is none.
        arxiv: the paper's number; empty where it has none.
    """

    family: str
    paper: str = ""
    arxiv: str = ""

    def __str__(self) -> str:
        return f"{self.paper}, arXiv {self.arxiv}" if self.arxiv else self.paper


def sources(folders: Sequence[Traversable] = ()) -> dict[str, Source]:
    """Family and paper of every known layer, family by family.

    Args:
        folders: of configurations, beside ours and those of installed packages.
    """
    known = {name: source(comments(file)) for name, file in files_of("layer", folders).items() if name != "custom"}
    place = {family: number for number, family in enumerate(ordered({one.family for one in known.values()}))}
    return dict(sorted(known.items(), key=lambda item: (place[item[1].family], item[0])))


def ordered(families: Iterable[str]) -> list[str]:
    """Families in the order of the table."""
    return sorted(
        families, key=lambda one: (one == OWN, FAMILIES.index(one) if one in FAMILIES else len(FAMILIES), one)
    )


def source(lines: Iterable[str]) -> Source:
    """What the comments say at the beginning of a layer's file; without such a line, `OWN`."""
    found = next(filter(None, map(LINE.fullmatch, lines)), None)
    if found is None:
        return Source(OWN)
    return Source(found["family"], "" if found["paper"].startswith("none") else found["paper"], found["id"] or "")
