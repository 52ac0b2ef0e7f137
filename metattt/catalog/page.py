"""The table of known layers as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from metattt.catalog.families import FORM, OWN, Source
from metattt.errors import MetaTTTError
from metattt.io import path_of, write_whole

if TYPE_CHECKING:
    from metattt.catalog.known_layers import KnownLayer

MARK = "<!-- Written by `metattt layers output=<this file>`: change the files of the layers instead. -->"
"""The first line of such a page: only a file that begins with it is written over."""

INTRO = f"""# The known layers

A known layer is one short file, `metattt/configs/layer/<name>.yaml`, that chooses and sets the three parts: the task, the learner and
the inner optimizer. `layer=<name>` takes it; other overrides win.

```bash
metattt layers                                      # this page as a table; dim= and num_heads= for other widths
metattt layers "family=delta rules"                 # one family
metattt layers layer=gated_delta_net                # its equations, put together from its parts and their settings
metattt layers layer=gated_delta_net optimizer.decay=none task.loss=dot
metattt layers output=layers.md                     # this page
```

**How to read it.** Each part is followed by the settings that differ from its defaults. *Causal*: no output depends on a later token.
*State*: what one sequence carries from call to call, all heads of one layer, in fp32, inside a mini-batch (between them it is smaller).
*Cost of a token*: how the matrix products of one more token grow with the tokens read. The last three are measured on a few tokens.

**Your own layer** is such a file in a folder `layer` of your own configurations, `metattt layers --config-dir my_configs`, or of an
installed package (as that in `examples/third_party_learner`). It stands under *{OWN}*, or in a family if its third line says so,
`{FORM}`, with `paper: none` where there is none:

```yaml
# @package _global_
# Gradient descent on an MLP with momentum, and a decay per head
# family: memory with momentum and retention; paper: none
defaults:
  - base/ttt_layer@layer
  - override /learner: mlp
  - override /task: reconstruction
  - override /optimizer: momentum
  - _self_
optimizer:
  decay: per_head
```

The equations of a learner, task or optimizer of your own are what its method `equations` returns, a line each; without one, they are its
name and the first words of its docstring. The recurrence of an optimizer that says nothing of W is found out from its gates.
"""

COLUMNS = ("layer", "what it is", "paper", "task", "learner", "optimizer", "causal", "state", "cost of a token")


def page(
    rows: Mapping[str, Mapping[str, KnownLayer]],
    sources: Mapping[str, Source],
    summaries: Mapping[str, str],
    dim: int,
    num_heads: int,
) -> str:
    """The page.

    Args:
        rows: family -> name -> what is known of the layer.
        sources: of every layer.
        summaries: one line on every layer.
        dim, num_heads: of the layers that were measured.
    """
    parts = [MARK, "", INTRO, f"State of `dim={dim} num_heads={num_heads}`."]
    for family, known in rows.items():
        parts += ["", f"## {family[:1].upper()}{family[1:]}", "", _row(COLUMNS), _row("---" for _ in COLUMNS)]
        for name, one in known.items():
            chosen = (f"{_code(part)} {_code(settings)}".strip() for part, settings in one.parts.values())
            measured = ("yes" if one.causal else "no", one.state, one.cost)
            parts.append(_row((*cells(name, sources[name], summaries[name]), *chosen, *measured)))
    return "\n".join(parts) + "\n"


def cells(name: str, source: Source, summary: str) -> tuple[str, str, str]:
    """The first columns of a row, which need no measurement."""
    link = f"[{_text(source.paper)}](https://arxiv.org/abs/{source.arxiv})" if source.arxiv else _text(source.paper)
    return _code(name), _text(summary), link


def place_of(output: str) -> Path:
    """The file that a page may be written to.

    Raises:
        MetaTTTError: its name is that of another kind, its folder is missing, or it is there and was written by others.
    """
    file = path_of(output, "output")
    if file.suffix != ".md":
        raise MetaTTTError(f"output={output} is written as Markdown: give a file that ends in .md")
    if not file.parent.is_dir():
        raise MetaTTTError(f"output={output}: there is no folder {file.parent}")
    if file.is_dir() or (file.exists() and not file.read_bytes().startswith(MARK.encode())):
        raise MetaTTTError(f"output={output} is there already, and no page of layers: give another name")
    return file


def write(file: Path, text: str) -> None:
    """Writes a page, as a whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(file, text.encode())


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def _text(text: str) -> str:
    """A text for a cell of a table, as it is written."""
    for sign in "\\`*_[]<>|":
        text = text.replace(sign, f"\\{sign}")
    return text
