"""Every known layer, as configured, against a plain loop over tokens written from its published equations; and the laws
it obeys."""

from __future__ import annotations

from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import layer_references
import pytest
import torch
from torch import Tensor

from metattt.composition.compose import compose
from metattt.testing import LAWS, NotApplicable, Specimen
from metattt.testing.report import specimen_of
from metattt.testing.specimen import Run, compare, cotangent, gradients

BOUND = 1e-9  # relative, float64
B = 4  # tokens a mini-batch, for the layers that have them
SMALL = {
    "lact": [f"optimizer.mini_batch_size={B}"],
    "nearest": ["learner.neighbours=3"],
    "nested_transformer": [f"optimizer.mini_batch_size={B}"],
    "nested_ttt": ["optimizer.mini_batch_size=6"],  # more than one of the inner layer's, which has four tokens
    "titans": [f"optimizer.mini_batch_size={B}"],
    "ttt_linear": [f"optimizer.mini_batch_size={B}"],
    "ttt_mlp": [f"optimizer.mini_batch_size={B}"],
    "window_attention": ["learner.window=3"],
}
NO_GRADIENT = {"nearest": {"task.q.weight", "task.k.weight"}}  # which tokens are nearest is a choice
NOT_APPLICABLE = {
    *(
        (row, law) for row in ("mttt_linear", "mttt_mlp") for law in ("splits", "causality", "packing")
    ),  # a call answers at its end
    *((row, "forms") for row in ("attention", "window_attention", "nearest", "kernel_ridge")),  # they have one
}
ONE_CALL = ["self_attention", "linear_attention_image", "linear_attention_elu_image"]  # a call is a set, without state
SEQUENTIAL = [
    *("linear_attention", "linear_attention_elu", "retnet", "mamba2", "delta_net", "gated_delta_net", "ttt_linear", "ttt_mlp"),
    *("titans", "lact", "attention", "window_attention", "nearest", "kernel_ridge", "mttt_linear", "mttt_mlp"),
    *("nested_transformer", "nested_ttt"),
]
FAMILIES = [import_module(file.stem) for file in sorted(Path(__file__).parent.glob("layer_references_*.py"))]
"""Plain loops of more rows, a file a family: `ROWS` names them, `SMALL`, `NO_GRADIENT` and `NOT_APPLICABLE` add to those
above."""
for family in FAMILIES:
    SEQUENTIAL += family.ROWS
    SMALL |= getattr(family, "SMALL", {})
    NO_GRADIENT |= getattr(family, "NO_GRADIENT", {})
    NOT_APPLICABLE |= getattr(family, "NOT_APPLICABLE", set())
ROWS = SEQUENTIAL + ONE_CALL
TWO_IN_ONE = ["lact_block", "titans_mag", "titans_mal", "vittt"]  # of a `Combined`: see test_combined.py, test_vittt.py
MIXERS = ["longhorn", "mamba", "mamba2_mixer"]  # one recurrence without parts: see test_mamba.py


OWN_STYLE = {"ttt_linear", "ttt_mlp", *ONE_CALL, "mttt_linear", "mttt_mlp", "attention", "window_attention", "nearest"}
"""Rows whose loops are those of the layer as it is; the others' are of the bare rule: see test_block_style.py for their blocks."""


def specimen(row: str) -> Specimen:
    style = "published" if row in OWN_STYLE else "plain"
    given = (f"layer={row}", f"block_style={style}", "dim=8", "num_heads=2", *SMALL.get(row, []))
    return specimen_of(compose(*given, job="check"))


def test_every_known_layer_is_a_row() -> None:
    folder = files("metattt.configs") / "layer"
    known = {file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")}
    assert known - {"custom"} == {*ROWS, *TWO_IN_ONE, *MIXERS}  # custom chooses nothing


@pytest.mark.parametrize("row", ROWS)
def test_equals_its_published_equations(row: str) -> None:
    spec = specimen(row)
    spec = Specimen(
        spec.learner, spec.task, spec.optimizer, spec.dim, spec.num_heads, spec.options, longest_mini_batch=16
    )
    layer = spec.make()
    b = layer.optimizer.mini_batch_size
    x = torch.randn(2, min(2 * b + 3, 15), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def through(function: object) -> Run:
        tokens = x.clone().requires_grad_()
        y: Tensor = function(tokens)  # type: ignore[operator]
        return Run(y.detach(), None, gradients(layer, tokens, (y * cotangent(y)).sum()))  # type: ignore[arg-type]

    published: Any = next(getattr(where, row) for where in (layer_references, *FAMILIES) if hasattr(where, row))
    parameters = dict(layer.named_parameters())
    expected = through(lambda tokens: published(parameters, tokens, 2, b))
    assert compare(through(lambda tokens: layer(tokens)[0]), expected) < BOUND
    still = {name for name, g in expected.grads.items() if not g.any()}
    assert still == NO_GRADIENT.get(row, set())  # nothing else is left out of the comparison


@pytest.mark.parametrize("law", ["forms", "splits", "causality", "masks", "packing", "round_trips"])
@pytest.mark.parametrize("row", SEQUENTIAL)
def test_laws(row: str, law: str) -> None:
    if (row, law) in NOT_APPLICABLE:
        with pytest.raises(NotApplicable):
            LAWS[law].worst_error(specimen(row))
        return
    assert LAWS[law].worst_error(specimen(row)) <= LAWS[law].bound
