"""`metattt layers`: the known layers, each with its three parts, the size of its state, and how its cost grows; and the
equations of one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Any

import torch
from hydra.utils import get_class
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from metattt.combined import Combined
from metattt.composition.choices import choices
from metattt.composition.compose import compose
from metattt.composition.flags import SEARCH_PATH
from metattt.composition.instantiate import instantiate_layer
from metattt.composition.overrides import searched
from metattt.equations import Section, equations, text
from metattt.errors import MetaTTTError, check_choice
from metattt.families import Source, ordered, sources
from metattt.inner.causality import found_out
from metattt.layer import TTTLayer
from metattt.layer_page import page, place_of, write
from metattt.mixers.base import Mixer
from metattt.registry import REGISTERED

GROUPS = ("task", "learner", "optimizer")
GROWTH = ("constant", "tokens", "tokens²")
OF_THE_TABLE = ("dim", "num_heads", "seed", "family", "output", SEARCH_PATH)
"""Keys that set nothing of a layer's parts."""

LEGEND = (
    "Under each part: what differs from its defaults. State in fp32, inside a mini-batch (between them it is smaller)."
)


def layers(cfg: DictConfig) -> None:
    """Prints the table, and writes it to `output`; where the overrides choose or set a layer, prints its equations.

    Args:
        cfg: `configs/layers.yaml`.

    Raises:
        MetaTTTError: a width that a layer cannot have, an unknown family, or a file that cannot be read or written.
    """
    chosen = [one for one in cfg.given if one.partition("=")[0].lstrip("+~") not in OF_THE_TABLE]
    if not chosen:
        _tabulate(cfg)
        return
    for key in ("family", "output"):
        if cfg[key] is not None:
            raise MetaTTTError(
                f"{key}={cfg[key]} is about the table, and {chosen[0]} asks for equations: leave out one of them"
            )
    _show(cfg, chosen)


def _tabulate(cfg: DictConfig) -> None:
    folders = searched(cfg.given)
    place = None if cfg.output is None else place_of(cfg.output)
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
    measured: dict[str, dict[str, KnownLayer]] = {}
    for family in families:
        names = [name for name, source in known.items() if source.family == family]
        measured[family] = {name: examine(name, cfg.dim, cfg.num_heads, *searching) for name in names}
        console.print(_table(family, measured[family], known))
    console.print(LEGEND, highlight=False)
    if place is not None:
        write(place, page(measured, known, choices("layer", folders), cfg.dim, cfg.num_heads))
        console.print(f"written to {place}", highlight=False, markup=False)


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
    layer = instantiate_layer(cfg)
    known = sources(searched(cfg.given)).get(
        next((one.removeprefix("layer=") for one in chosen if one.startswith("layer=")), "")
    )
    size = f"dim={cfg.dim} (D), num_heads={cfg.num_heads} (H), {cfg.dim // cfg.num_heads} features a head (d)"
    found = examined(layer, cfg)
    measured = Section(
        "measured",
        [
            f"state of a sequence: {found.state}",
            f"cost of a token: {found.cost}",
            f"causal: {'yes' if found.causal else 'no'}",
        ],
    )
    sections = [*equations(layer), measured]
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{' '.join(chosen)}, {size}")
    if known is not None:
        console.print(f"{known.family}{f': {known}' if known.paper else ''}")
    console.print()
    if not console.is_terminal:
        console.print(text(sections))
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    for one in sections:
        for i, line in enumerate(one.lines):
            grid.add_row(escape(one.title) if i == 0 else "", escape(line))
    console.print(grid, soft_wrap=False)


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

    parts: dict[str, tuple[str, str]]
    causal: bool
    state_bytes: tuple[float, float, float] | None
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


def known_layers(folders: Sequence[Traversable] = ()) -> list[str]:
    """Names for `layer=`, without `custom`, which chooses nothing; those in `folders` of configurations, too."""
    return sorted(set(choices("layer", folders)) - {"custom"})


def examine(name: str, dim: int, num_heads: int, *overrides: str) -> KnownLayer:
    """A known layer's parts, and what a few tokens tell about its state and cost.

    Raises:
        MetaTTTError: an unknown name, or widths that the layer refuses.
    """
    cfg = compose(f"layer={name}", f"dim={dim}", f"num_heads={num_heads}", *overrides, job="build")
    return examined(instantiate_layer(cfg), cfg)


def examined(layer: Any, cfg: DictConfig) -> KnownLayer:
    """The same for a layer that was made of a configuration."""
    nodes = list(_layers(cfg.layer))
    parts = {group: _joined([_of_layer(node, group) for node in nodes]) for group in GROUPS}
    inner = [one for one in layer.modules() if isinstance(one, TTTLayer)]
    at_once = [getattr(one.learner, key, None) or 0 for one in inner for key in ("window", "chunk")]
    chunks = [one.chunk_size for one in layer.modules() if isinstance(one, Mixer)]
    block = max([16, *chunks, *(one.optimizer.block for one in inner), *at_once])
    counts = [n * block + 1 for n in (2, 3, 4)]  # the same place in a mini-batch; the first one may be cheaper
    sizes, costs = zip(*(_measure(layer, count) for count in counts), strict=True)
    state = _polynomial(sizes, counts)
    growth = max(_degree(state), _degree(_polynomial(costs, counts)) - 1)
    return KnownLayer(parts, _is_causal(layer), state if _goes_on(layer) else None, growth)


def readable(size: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if size == round(size) else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _layers(node: DictConfig) -> Iterator[DictConfig]:
    """The layers that one is made of."""
    both = [node.get(name) for name in ("first", "second")]
    if all(isinstance(one, DictConfig) for one in both):
        for one in both:
            yield from _layers(one)
    else:
        yield node


def _of_layer(node: DictConfig, group: str) -> tuple[str, str]:
    """A part of a layer. A mixer has none, and is named in the first column; a module of one's own may have none
    either."""
    if node.get(group) is not None:
        return _part(node[group], group)
    name, settings = _part(node.get("layer", node), "layer")
    if name not in {known for where, known in REGISTERED if where == "layer"}:
        return "–", ""
    return (f"{name.removesuffix('_mixer')} mixer", settings) if group == GROUPS[0] else ("–", "")


def _part(node: DictConfig, group: str) -> tuple[str, str]:
    """A part's name in the registry, and the settings that differ from its constructor's defaults."""
    target = str(node._target_)
    name = next((known for (where, known), path in REGISTERED.items() if (where, path) == (group, target)), target)
    defaults = {key: parameter.default for key, parameter in inspect.signature(get_class(target)).parameters.items()}
    changed = [
        (key, node[key]) for key, default in defaults.items() if key in node and default is not inspect.Parameter.empty
    ]
    return name, ", ".join(f"{key}={_yaml(value)}" for key, value in changed if value != defaults[key])


def _joined(parts: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The parts of two layers in the place of one."""
    if len(parts) == 1:
        return parts[0]
    return " + ".join(name for name, _ in parts), " + ".join(settings or "defaults" for _, settings in parts)


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


class Operations(TorchDispatchMode):
    """Counts multiplications and additions of matrix products and attention while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        cost = flop_registry.get(func._overloadpacket)
        if cost is not None:
            self.count += cost(*args, **(kwargs or {}), out_val=result)
        return result


def _measure(layer: TTTLayer | Combined | Mixer, count: int) -> tuple[int, int]:
    """Bytes of the state after `count` tokens of one sequence, and multiplications and additions of matrix products for
    them."""
    x = torch.randn(1, count, layer.dim, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer(x)  # the first call of a length finds out shapes
        with Operations() as operations:
            _, state = layer(x)
    return state.nbytes, operations.count


def _polynomial(values: Sequence[int], counts: Sequence[int]) -> tuple[float, float, float]:
    """Coefficients of the parabola through three `values` at evenly spaced `counts`."""
    (first, second, third), (start, following, _) = values, counts
    step = following - start
    square = (third - 2 * second + first) / (2 * step**2)
    slope = (second - first) / step - square * (start + following)
    return first - slope * start - square * start**2, slope, square


def _degree(polynomial: tuple[float, ...]) -> int:
    return max((i for i, factor in enumerate(polynomial) if abs(factor) > 1e-6), default=0)


def _goes_on(layer: TTTLayer | Combined | Mixer) -> bool:
    """Whether a call can go on from the state of another."""
    x = torch.zeros(1, 1, layer.dim)
    with torch.no_grad():
        try:
            layer(x, layer(x)[1])
        except MetaTTTError:
            return False
    return True


def _is_causal(layer: TTTLayer | Combined | Mixer) -> bool:
    """Whether later tokens change earlier outputs."""
    changes = found_out(layer, layer.dim)
    if changes is None:
        raise MetaTTTError("a known layer gives values that are not finite on random tokens")
    return layer.causal and not changes
