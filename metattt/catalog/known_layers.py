"""`metattt layers`: the known layers, each with its three parts, the size of its state, and how its cost grows; and the
equations of one."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from metattt.catalog.families import Source, ordered, sources
from metattt.composition.choices import choices, files_of
from metattt.composition.overrides import SEARCH_PATH, searched
from metattt.errors import MetaTTTError, check_choice

if TYPE_CHECKING:
    from omegaconf import DictConfig

MEASURED = files("metattt.catalog") / "known_layers.json"
"""What `metattt.catalog.layer_measures` has found out about our layers at one width: the table then needs no torch."""

GROUPS = ("task", "learner", "optimizer")
GROWTH = ("constant", "tokens", "tokens²")
OF_THE_TABLE = ("dim", "num_heads", "seed", "family", SEARCH_PATH)
"""Keys that set nothing of a layer's parts."""

LEGEND = (
    "Under each part: what differs from its defaults. State in fp32, inside a mini-batch (between them it is smaller)."
)


def layers(cfg: DictConfig) -> None:
    """Prints the table; where the overrides choose or set a layer, prints its equations.

    Args:
        cfg: `configs/layers.yaml`.

    Raises:
        MetaTTTError: a width that a layer cannot have, an unknown family, or a file that cannot be read.
    """
    chosen = [one for one in cfg.given if one.partition("=")[0].lstrip("+~") not in OF_THE_TABLE]
    if not chosen:
        _tabulate(cfg)
        return
    if cfg.family is not None:
        raise MetaTTTError(
            f"family={cfg.family} is about the table, and {chosen[0]} asks for equations: leave out one of them"
        )
    _show(cfg, chosen)


def _tabulate(cfg: DictConfig) -> None:
    folders = searched(cfg.given)
    known = {name: source for name, source in sources(folders).items() if name in known_layers(folders)}
    families = ordered({source.family for source in known.values()})
    if cfg.family is not None:
        check_choice("family", cfg.family, families)
        families = [cfg.family]
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(f"[bold]layer=<name>[/], dim={cfg.dim}, num_heads={cfg.num_heads}", highlight=False)
    searching = [one for one in cfg.given if one.partition("=")[0].lstrip("+") == SEARCH_PATH]
    written = written_down(cfg.dim, cfg.num_heads)
    for family in families:
        names = [name for name, source in known.items() if source.family == family]
        rows = {name: written[name] for name in names if name in written}
        if others := [name for name in names if name not in written]:
            from metattt.catalog.layer_measures import examine  # which needs torch

            rows |= {name: examine(name, cfg.dim, cfg.num_heads, *searching) for name in others}
        console.print(_table(family, {name: rows[name] for name in names}, known))
    console.print(LEGEND, highlight=False)


def _table(family: str, rows: dict[str, KnownLayer], known: dict[str, Source]) -> Table:
    table = Table(title=family, title_justify="left", show_lines=True, expand=True)
    for column in ("layer", *GROUPS, "causal", "state of a sequence", "cost of a token"):
        narrow = column in ("causal", "state of a sequence", "cost of a token")
        table.add_column(column, overflow="fold", ratio=1 if narrow else 2)
    for name, one in rows.items():
        parts = (
            f"{escape(part)}\n[dim]{escape(settings)}[/]" if settings else escape(part)
            for part, settings in (one.parts[group] for group in GROUPS)
        )
        paper = f"\n[dim]{escape(str(known[name]))}[/]" if known[name].paper else ""
        table.add_row(f"[bold]{name}[/]{paper}", *parts, "yes" if one.causal else "no", one.state, one.cost)
    return table


def _show(cfg: DictConfig, chosen: list[str]) -> None:
    """Prints the equations of the composed layer."""
    from metattt.catalog.equations import Section, equations, text
    from metattt.catalog.layer_measures import examined
    from metattt.composition.instantiate import instantiate_layer

    layer = instantiate_layer(cfg)
    name = next((one.removeprefix("layer=") for one in reversed(chosen) if one.startswith("layer=")), "")
    known = sources(searched(cfg.given)).get(name)
    size = f"dim={cfg.dim} (D), num_heads={cfg.num_heads} (H), {cfg.dim // cfg.num_heads} features a head (d)"
    written = written_down(cfg.dim, cfg.num_heads) if len(chosen) == 1 else {}
    found = written.get(name) or examined(layer, cfg)
    causal = "yes" if found.causal else "no"
    facts = [f"state of a sequence: {found.state}", f"cost of a token: {found.cost}", f"causal: {causal}"]
    sections = [*equations(layer), Section("measured", facts)]
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{' '.join(chosen)}, {size}")
    if known is not None:
        console.print(f"{known.family}{f': {known}' if known.paper else ''}")
    console.print()
    console.print(text(sections))


@dataclass(frozen=True)
class KnownLayer:
    """What `examine` finds out about one layer.

    Attributes:
        parts: for each of `GROUPS`, the part's name and its settings that differ from the defaults.
        causal: no output depends on a later token.
        state_bytes: of one sequence, as polynomial in the tokens read: constant, per token, per token squared; None if
            every call is a set of tokens of its own.
        cost_growth: of the time for one token with the tokens before it: 0 constant, 1 linear, 2 quadratic.
    """

    parts: dict[str, list[str]]
    causal: bool
    state_bytes: list[float] | None
    cost_growth: int

    @property
    def state(self) -> str:
        """The leading term of the size, for people."""
        if self.state_bytes is None:
            return "none: one call"
        power = max((i for i, bytes_ in enumerate(self.state_bytes) if bytes_), default=0)
        return readable(self.state_bytes[power]) + ("" if power == 0 else f" x {GROWTH[power]}")

    @property
    def cost(self) -> str:
        """How it grows, for people."""
        return "constant" if self.cost_growth == 0 else f"grows with {GROWTH[self.cost_growth]}"


def written_down(dim: int, num_heads: int) -> dict[str, KnownLayer]:
    """What is known of our layers without measuring; nothing at another width than that of the file, nor of a layer
    whose configuration has changed since."""
    content = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.is_file() else {}
    if (content.get("dim"), content.get("num_heads")) != (dim, num_heads):
        return {}
    now = files_of("layer")
    return {
        name: KnownLayer(one["parts"], one["causal"], one["state_bytes"], one["cost_growth"])
        for name, one in content["layers"].items()
        if name in now and one["configuration"] == checksum(now[name])
    }


def checksum(configuration: Traversable) -> str:
    """Of the text of a file."""
    return f"{zlib.crc32(configuration.read_text(encoding='utf-8').encode()):08x}"


def known_layers(folders: Sequence[Traversable] = ()) -> list[str]:
    """Names for `layer=`, without `custom`, which chooses nothing; those in `folders` of configurations, too."""
    return sorted(set(choices("layer", folders)) - {"custom"})


def readable(size: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if size == round(size) else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
