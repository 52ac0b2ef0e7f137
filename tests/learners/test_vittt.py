"""ViT³'s block: maps and their convolutions; and heads of another width than D/H. (What it computes: `test_layer_table`.)"""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F

import metattt
import metattt.models.timm
from metattt.catalog.equations import equations
from metattt.learners.depthwise import Depthwise
from metattt.learners.fast_weights import FastWeights
from metattt.testing.specimen import randomize


@pytest.mark.parametrize("rope", [[], ["task.rope=map"]])
def test_a_square_map_needs_no_columns(rope: list[str]) -> None:
    words = ("layer=vittt", "dim=24", "num_heads=3", "seed=0", *rope)
    told = ("layer.second.learner.columns=4", *(["task.rope_columns=4"] if rope else []))
    layer, other = (metattt.build(*words, *more).double() for more in ((), told))
    x = torch.randn(2, 16, 24, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], other(x)[0], rtol=1e-9, atol=1e-12)
    assert not layer.causal and (not rope or "RoPE_t: by row and column" in str(list(equations(layer))))


@pytest.mark.parametrize(("size", "columns", "count"), [(3, None, 16), (5, 6, 24), (1, 3, 6)])
def test_a_depthwise_convolution(size: int, columns: int | None, count: int) -> None:
    learner = Depthwise(size, columns)
    learner.setup(2, 4, 4)
    x, weight = torch.randn(2, 2, count, 4).double(), torch.randn(2, 2, size**2, 4).double()
    found = learner.predict(FastWeights({"w": weight}, {}, x.dtype), x)
    maps = x.mT.reshape(1, -1, count // (columns or 4), columns or 4)
    kernels = weight.mT.reshape(-1, 1, size, size)
    wanted = F.conv2d(maps, kernels, padding=size // 2, groups=len(kernels)).view(2, 2, 4, count).mT
    torch.testing.assert_close(found, wanted)


def test_timm_gives_the_maps_of_blocks() -> None:
    options: dict[str, Any] = {"img_size": 32, "depth": 3, "features_only": True, "out_indices": (0, 2)}
    model = timm.create_model("vit_tiny_patch16_vittt", **options)
    assert [list(y.shape) for y in model(torch.randn(2, 3, 32, 32))] == [[2, 192, 2, 2]] * 2


@pytest.mark.parametrize(("heads", "of"), [(1, 2), (3, 2)])
def test_heads_of_another_width(heads: int, of: int) -> None:
    """Each head is as one of a layer with D/d heads; the outputs before the projection are the same."""
    words = ("layer=ttt_linear", "dim=16", "layer.output_norm=head_rms", "layer.gate=true")
    layer: Any = metattt.build(*words, f"num_heads={heads}", f"layer.of_heads={of}").double()
    assert layer.head_dim == 8 and layer.out.in_features == 8 * heads
    randomize(layer)
    x = torch.randn(2, 21, 16).double()
    y, _ = layer(x)
    slow: Any = metattt.build(*words, f"num_heads={heads}", f"layer.of_heads={of}", "layer.form=primal").double()
    slow.load_state_dict(layer.state_dict())
    torch.testing.assert_close(slow(x)[0], y)
    torch.testing.assert_close(layer(x[:, 9:], layer(x[:, :9])[1])[0], y[:, 9:])
    alone: Any = metattt.build(*words, "num_heads=1", "layer.of_heads=2").double()
    values = {}
    for name, value in alone.state_dict().items():  # the last head
        given = layer.state_dict()[name]
        values[name] = given[:, -8:] if name == "out.weight" else given[-len(value) :]
    alone.load_state_dict(values)
    first = {name: value.clone() for name, value in layer.state_dict().items()}
    first["out.weight"][:, :-8] = 0
    layer.load_state_dict(first)
    torch.testing.assert_close(alone(x)[0], layer(x)[0])
