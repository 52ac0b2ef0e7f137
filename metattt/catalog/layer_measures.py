"""What is found out about a known layer by building it: its parts, and on a few tokens its state, cost and causality.

`python -m metattt.catalog.layer_measures` writes it down for every layer of ours, at the width of
`configs/layers.yaml`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_class
from omegaconf import DictConfig

from metattt.catalog.known_layers import GROUPS, MEASURED, KnownLayer, checksum, known_layers
from metattt.combined import Combined
from metattt.composition.choices import files_of
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_layer
from metattt.errors import MetaTTTError
from metattt.inner.causality import found_out
from metattt.layer import TTTLayer
from metattt.measures.flops import count_flops
from metattt.mixers.base import Mixer
from metattt.nested import count_bytes
from metattt.registry import REGISTERED
from metattt.state import WHOLE_CALL


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
    parts = {group: list(_joined([_of_layer(node, group) for node in nodes])) for group in GROUPS}
    inner = [one for one in layer.modules() if isinstance(one, TTTLayer)]
    at_once = [getattr(one.learner, key, None) or 0 for one in inner for key in ("window", "chunk")]
    chunks = [one.chunk_size for one in layer.modules() if isinstance(one, Mixer)]
    block = max([16, *chunks, *(one.optimizer.block for one in inner), *at_once])
    counts = [n * block + 1 for n in (2, 3, 4)]  # the same place in a mini-batch; the first one may be cheaper
    if block >= WHOLE_CALL:
        counts = [25, 625, 1225]  # squares at equal distances: maps of an image
    sizes, costs = [], []
    for count in counts:
        x = torch.randn(1, count, cfg.dim, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            sizes.append(count_bytes(layer(x)[1]))
        costs.append(count_flops(layer, x))
    state = _polynomial(sizes, counts)
    growth = max(_degree(state), _degree(_polynomial(costs, counts)) - 1)
    changes = found_out(layer, cfg.dim)
    if changes is None:
        raise MetaTTTError("a known layer gives values that are not finite on random tokens")
    causal = getattr(layer, "causal", True) and not changes
    return KnownLayer(parts, causal, list(state) if _goes_on(layer, cfg.dim) else None, growth)


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
    words = [(key, str(value)) for key, value in changed if value != defaults[key]]
    plain = {"True": "true", "False": "false", "None": "none"}
    return name, ", ".join(f"{key}={plain.get(word, word)}" for key, word in words)


def _joined(parts: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The parts of two layers in the place of one."""
    if len(parts) == 1:
        return parts[0]
    return " + ".join(name for name, _ in parts), " + ".join(settings or "defaults" for _, settings in parts)


def _polynomial(values: Sequence[int], counts: Sequence[int]) -> tuple[float, float, float]:
    """Coefficients of the parabola through three `values` at evenly spaced `counts`."""
    (first, second, third), (start, following, _) = values, counts
    step = following - start
    square = (third - 2 * second + first) / (2 * step**2)
    slope = (second - first) / step - square * (start + following)
    return first - slope * start - square * start**2, slope, square


def _degree(polynomial: tuple[float, ...]) -> int:
    return max((i for i, factor in enumerate(polynomial) if abs(factor) > 1e-6), default=0)


def _goes_on(layer: TTTLayer | Combined | Mixer, dim: int) -> bool:
    """Whether a call can go on from the state of another."""
    x = torch.zeros(1, 1, dim)
    with torch.no_grad():
        try:
            state = layer(x)[1]
            layer(x, state)
        except MetaTTTError:
            return False
    return state is not None


def write_down(dim: int, num_heads: int) -> str:
    """What `metattt.catalog.known_layers.written_down` reads, a line a layer."""
    configurations = files_of("layer")
    rows = []
    for name in known_layers():
        found = asdict(examine(name, dim, num_heads))
        rows.append(f"{json.dumps(name)}: {json.dumps({'configuration': checksum(configurations[name]), **found})}")
    return f'{{"dim": {dim}, "num_heads": {num_heads}, "layers": {{\n' + ",\n".join(rows) + "\n}}\n"


if __name__ == "__main__":
    width = compose(job="layers")
    Path(str(MEASURED)).write_text(write_down(width.dim, width.num_heads), encoding="utf-8")
