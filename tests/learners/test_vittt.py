"""Maps of ViT³'s block, and heads of another width than D/H. (What the block computes: `test_layer_table`.)"""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

import metattt
import metattt.models.timm
from metattt.errors import MetaTTTError
from metattt.testing.specimen import randomize


def test_what_is_no_map() -> None:
    for words, message in (
        (["dim=24", "task.rope=map"], r"12 tokens are no square map: set task\.rope_columns"),
        (["dim=18", "task.rope=map"], "multiple of 4"),
        (["dim=24", "task.rope=map", "task.rope_columns=0"], r"task\.rope_columns=0"),
        (["dim=24"], r"12 tokens are no square map: set learner\.columns"),
        (["dim=24", "layer.second.learner.size=4"], r"learner\.size=4 has no place in the middle"),
    ):
        with pytest.raises(MetaTTTError, match=message):
            metattt.build("layer=vittt", "num_heads=3", *words)(torch.randn(1, 12, 24))


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
    with pytest.raises(MetaTTTError, match="16"):
        metattt.build(*words, "num_heads=1", "layer.of_heads=3")
