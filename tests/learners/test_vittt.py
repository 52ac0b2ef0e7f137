"""ViT³'s block, its two learners and its rule, and heads of another width than D/H."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import metattt
import metattt.models.timm
from metattt.errors import MetaTTTError
from metattt.learners import Depthwise, FastWeights
from metattt.testing.specimen import randomize

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "vittt_block.npz")
D, HEADS, WIDTH = 24, 3, 8


def golden(name: str) -> Tensor:
    return torch.from_numpy(GOLDEN[name])


def ours(prefix: str) -> dict[str, Tensor]:
    """The weights of the released block, or their derivatives, by our names."""
    maps, vectors = (golden(f"{prefix}|qkv.{kind}").split([D] * 3 + [WIDTH] * 3) for kind in ("weight", "bias"))
    out = golden(f"{prefix}|proj.weight")
    names = [f"{layer}.task.{view}" for layer in ("first", "second") for view in "qkv"]
    found = {f"{name}.weight": x for name, x in zip(names, maps, strict=True)}
    found |= {f"{name}.bias": x for name, x in zip(names, vectors, strict=True)}
    return found | {
        "first.out.weight": out[:, :D], "second.out.weight": out[:, D:], "first.out.bias": golden(f"{prefix}|proj.bias"),
        "first.learner.init.w1": golden(f"{prefix}|w1")[0], "first.learner.init.w2": golden(f"{prefix}|w2")[0],
        "second.learner.init.w": golden(f"{prefix}|w3").reshape(1, WIDTH, 9).mT,
    }  # fmt: skip


@pytest.mark.parametrize("sides", [(6, 4), (3, 3)])
def test_the_released_block(sides: tuple[int, int]) -> None:
    layer: Any = metattt.build("layer=vittt", f"dim={D}", f"num_heads={HEADS}").double()
    layer.load_state_dict(ours("p"))
    layer.second.learner.columns = sides[1]
    case = f"{sides[0]}x{sides[1]}"
    x = golden(f"{case}|x").requires_grad_()
    y, _ = layer(x)
    torch.testing.assert_close(y, golden(f"{case}|y"), rtol=1e-9, atol=1e-12)
    wanted = ours(f"{case}|g") | {"x": golden(f"{case}|gx")}
    parameters = dict(layer.named_parameters()) | {"x": x}
    assert parameters.keys() == wanted.keys()
    found = torch.autograd.grad((y * golden(f"{case}|c")).sum(), list(parameters.values()))
    torch.testing.assert_close(dict(zip(parameters, found, strict=True)), wanted, rtol=1e-9, atol=1e-11)


def test_a_square_map_needs_no_width() -> None:
    """(RoPE in the map, of another shape: `test_layer_table`.)"""
    words = ("layer=vittt", f"dim={D}", f"num_heads={HEADS}", "seed=0", "task.rope=map")
    given, known = (metattt.build(*words, f"task.rope_columns={width}").double()(golden("3x3|x"))[0] for width in ("null", 3))
    torch.testing.assert_close(given, known)


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


def test_options_of_timms_own_scripts() -> None:
    given: dict[str, Any] = {"img_size": 32, "depth": 2, "drop_rate": 0.0, "global_pool": "avg", "drop_path_rate": 0.2}
    model = timm.create_model("vit_tiny_patch16_vittt", **given)
    assert [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.blocks] == [0.0, pytest.approx(0.2)]
    with pytest.raises(MetaTTTError, match="dynamic_img_size=True is not taken: it knows embed_dim"):
        timm.create_model("vit_tiny_patch16_vittt", dynamic_img_size=True)


@pytest.mark.parametrize(("heads", "of"), [(1, 2), (3, 2)])
def test_heads_of_another_width(heads: int, of: int) -> None:
    """Each head is as one of a layer with D/d heads; the outputs before the projection are the same. (Forms and splits:
    `optimizers/test_rules_by_request`.)"""
    words = ("layer=ttt_linear", "dim=16", "layer.output_norm=head_rms", "layer.gate=true")
    layer: Any = metattt.build(*words, f"num_heads={heads}", f"layer.of_heads={of}").double()
    assert layer.head_dim == 8 and layer.out.in_features == 8 * heads
    randomize(layer)
    x = torch.randn(2, 21, 16).double()
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
