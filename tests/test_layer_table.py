"""Every known layer, as configured: against what its published equations gave, against the oracle, and the laws it obeys.

`golden/known_layers.json` has, by overrides, random projections and norms of outputs and of every gradient, as plain loops
over tokens gave them, each written from the layer's publication; the layer agreed with its loop to 2e-12. Of MTTT and
ViT³ it was the published code that the layer agreed with, in float64, at other sizes. A new layer
gets its line by `python tests/test_layer_table.py layer=<name> <overrides>`, once it equals its publication.
"""

from __future__ import annotations

import json
import sys
import zlib
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor, nn

import metattt
from metattt.composition.compose import compose
from metattt.testing import LAWS, NotApplicable, Specimen
from metattt.testing.report import specimen_of
from metattt.testing.specimen import Run, compare, cotangent, gradients

GOLDEN: dict[str, dict[str, list[float]]] = json.loads((Path(__file__).parent / "golden/known_layers.json").read_text())
BOUND = 1e-9  # relative, float64
BLOCKS = ("atlas", "lact", "moneta", "yaad", "memora", "ttt3r", "nested_transformer", "titans", "ttt_linear", "ttt_mlp")
SMALL = {
    **{row: ["optimizer.mini_batch_size=4"] for row in BLOCKS},
    "gla": ["optimizer.rank=3"],
    "nearest": ["learner.neighbours=3"],
    "nested_ttt": ["optimizer.mini_batch_size=6"],  # more than one of the inner layer's, which has four tokens
    "window_attention": ["learner.window=3"],
    **{row: ["learner.chunk=3"] for row in ("mesa_net", "log_linear_mamba2", "log_linear_gated_delta_net")},
    **{row: ["learner.chunk=3"] for row in ("gated_oja", "gka")},
    "gsa": ["learner.chunk=3", "optimizer.channels=5"],
}
ONE_CALL = ["self_attention", "linear_attention_image", "linear_attention_elu_image"]  # a call is a set, without state
NOT_APPLICABLE = {
    *((row, law) for row in ("mttt_linear", "mttt_mlp") for law in ("splits", "causality", "packing")),  # answer at its end
    *((row, "forms") for row in ("attention", "window_attention", "nearest", "kernel_ridge", "mesa_net")),  # they have one
    *((row, "forms") for row in ("log_linear_mamba2", "log_linear_gated_delta_net", "gsa", "gated_oja", "gka")),
}
OTHERS = {"lact_block", "titans_mag", "titans_mal", "vittt", "longhorn", "mamba", "mamba2_mixer"}
"""Of a `Combined`, and mixers: no `TTTLayer`, so not the oracle's; their laws are in `test_whole_layers`."""
NAMES = {one.name.removesuffix(".yaml") for one in (files("metattt.configs") / "layer").iterdir() if one.name.endswith(".yaml")}
ROWS = sorted(NAMES - {"custom"} - OTHERS)  # custom chooses nothing


def draw(name: str, *shape: int) -> Tensor:
    """The same numbers for the same name, in every version of every library."""
    return torch.from_numpy(np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape))


def made(overrides: str) -> nn.Module:
    """A layer whose parameters are drawn by their names."""
    layer: nn.Module = metattt.build(*overrides.split(), "dim=8", "num_heads=2").double()
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if p.requires_grad:
                wide = name.split(".")[0] in ("in_proj", "x_proj", "conv1d", "out_proj")  # of mixers: many in a row
                near_one = name.endswith(("norm.weight", "norm_scale", "qk_scale", "norms.0.weight", "norms.1.weight"))
                p.copy_((2 if wide else 0.5) / max(p.shape[-2:], default=1) ** 0.5 * draw(name, *p.shape) + near_one)
    return layer


def projected(overrides: str) -> dict[str, list[float]]:
    """Of outputs and of every gradient their product with random numbers, and their norm."""
    layer, x = made(overrides), draw("x", 2, 15, 8).requires_grad_()
    y = layer(x)[0]
    found = {"outputs": y.detach()} | gradients(layer, x, (y * draw("y", *y.shape)).sum())  # type: ignore[arg-type]
    return {name: [(g * draw(f"of {name}", *g.shape)).sum().item(), g.norm().item()] for name, g in found.items()}


def test_every_known_layer_has_golden_numbers() -> None:
    assert {row.split()[0].removeprefix("layer=") for row in GOLDEN} == {*ROWS, *OTHERS}


MIXERS = [row for row in GOLDEN if row.split()[0].removeprefix("layer=") in ("longhorn", "mamba", "mamba2_mixer")]
IN_CHUNKS = ("layer.chunk_size=4", "layer.chunk_size=5 layer.group_size=2", "layer.chunk_size=3 layer.group_size=0")


@pytest.mark.parametrize(("row", "more"), [*((row, "") for row in GOLDEN), *((row, more) for row in MIXERS for more in IN_CHUNKS)])
def test_equals_its_published_equations(row: str, more: str) -> None:
    """Mixers, whatever is computed together or again."""
    found, wanted = projected(f"{row} {more}"), GOLDEN[row]
    assert found.keys() == wanted.keys()
    largest = max(norm for _, norm in wanted.values())
    for name, (value, norm) in wanted.items():
        assert found[name][0] == pytest.approx(value, rel=0, abs=BOUND * max(norm, 1e-5 * largest)), name
        assert norm or "nearest" in row, f"no gradient of {name}: nothing is compared"  # which are nearest is a choice


def specimen(row: str, style: str) -> Specimen:
    given = (f"layer={row}", f"block_style={style}", "dim=8", "num_heads=2", *SMALL.get(row, []))
    return specimen_of(compose(*given, job="check"))


ALONE_AND_MANY = [(row, length) for row in ("pkda", "gated_oja", "gsa", "gka") for length in (1, 70)]


@pytest.mark.parametrize(("row", "length"), [*((row, None) for row in ROWS), *ALONE_AND_MANY])
def test_equals_the_oracle(row: str, length: int | None) -> None:
    """With everything that is published around the rule: convolutions, norms, gates."""
    layer = specimen(row, "published").make()
    x = draw("x", 2, length or min(2 * layer.optimizer.mini_batch_size + 3, 15), 8)

    def through(function: Any) -> Run:
        tokens = x.clone().requires_grad_()
        y: Tensor = function(tokens)
        return Run(y.detach(), None, gradients(layer, tokens, (y * cotangent(y)).sum()))  # type: ignore[arg-type]

    expected = through(lambda tokens: oracle.outputs(layer, [oracle.Call(tokens)])[0])
    assert compare(through(lambda tokens: layer(tokens)[0]), expected) < BOUND


@pytest.mark.parametrize("law", ["forms", "splits", "causality", "masks", "packing", "round_trips"])
@pytest.mark.parametrize("row", [row for row in ROWS if row not in ONE_CALL])
def test_laws(row: str, law: str) -> None:
    spec = specimen(row, "plain" if row not in ("ttt_linear", "ttt_mlp") else "published")
    if (row, law) in NOT_APPLICABLE:
        with pytest.raises(NotApplicable):
            LAWS[law].worst_error(spec)
        return
    assert LAWS[law].worst_error(spec) <= LAWS[law].bound


if __name__ == "__main__":
    numbers = {name: [float(f"{a:.14g}"), float(f"{b:.3g}")] for name, (a, b) in projected(" ".join(sys.argv[1:])).items()}
    print(f"  {json.dumps(' '.join(sys.argv[1:]))}: {json.dumps(numbers, separators=(',', ':'))}")
