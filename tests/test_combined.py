"""Two layers in the place of one: each known combination against a plain loop. (The laws that every layer obeys:
`test_whole_layers`.)"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import layer_references
import pytest
import torch
from torch import Tensor, nn

import metattt
from metattt.checkpoints.folder import write_model
from metattt.checkpoints.record import make_record
from metattt.checkpoints.trained import load_model
from metattt.combined import Combined, CombinedState
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.learners import KernelEstimator, Linear
from metattt.measures.inner_health import inner_health
from metattt.mixers.mamba2 import Mamba2
from metattt.models import LanguageModel
from metattt.models.published_config import PublishedConfig
from metattt.optimizers import Append, GradientDescent
from metattt.tasks import DecodedReconstruction, Reconstruction
from metattt.testing.specimen import randomize

B = 4  # tokens a mini-batch
SMALL = {
    "lact_block": (f"optimizer.mini_batch_size={B}", "layer.first.learner.window=3"),
    "titans_mag": (f"optimizer.mini_batch_size={B}", "layer.first.learner.window=3"),
    "titans_mal": (f"optimizer.mini_batch_size={B}", "layer.second.learner.window=3"),
}
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def make(name: str, *overrides: str) -> Combined:
    layer = metattt.build(f"layer={name}", "dim=8", "num_heads=2", *SMALL[name], *overrides).double()
    randomize(layer)
    assert isinstance(layer, Combined)
    return layer


def gradients(layer: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    leaves = {"x": x} | dict(layer.named_parameters())
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).cos().view_as(y)
    found = torch.autograd.grad((y * weight).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize(("name", "few"), [*((name, False) for name in SMALL), ("lact_block", True)])
def test_equals_its_plain_loop(name: str, few: bool) -> None:
    """Outputs, and the gradients of every parameter. `few`: one head in the memory of LaCT, two in its attention."""
    plain = ["block_style=plain"] if name.startswith("titans") else []  # the loops have no convolutions
    layer = make(name, *plain, *(["layer.second.num_heads=1"] if few else []))
    x = torch.randn(2, 2 * B + 3, 8, dtype=torch.float64, requires_grad=True)
    y = layer(x)[0]
    options = {"memory_heads": 1} if few else {}
    expected = getattr(layer_references, name)(dict(layer.named_parameters()), x, 2, B, **options)
    torch.testing.assert_close(y, expected, **EXACT)
    found, wanted = gradients(layer, x, y), gradients(layer, x, expected)
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-7, atol=1e-9, msg=key)
    assert not [key for key, gradient in wanted.items() if not gradient.any()]


@pytest.mark.parametrize(("name", "looked_at"), [("lact_block", []), ("titans_mag", [0, 1])])
def test_its_inner_loop_is_looked_at_where_its_views_are_its_own(name: str, looked_at: list[int]) -> None:
    sizes = ("dim=16", "num_heads=2", "model.num_layers=2", "model.ffn_dim=16", "model.vocab_size=31")
    model = instantiate_model(compose(*sizes, f"layer={name}", *SMALL[name], job="language_model"))
    assert list(inner_health(model, lambda: model(torch.randint(31, (2, 22))))) == looked_at


def test_shared_projections_are_there_once() -> None:
    layer = make("lact_block")
    names = {name for name, _ in layer.named_parameters()}
    assert {"first.task.q.weight", "first.task.k.weight", "first.task.v.weight", "out.weight"} < names
    assert not {
        name
        for name in names
        if name.startswith(("second.task.q.", "second.task.k.", "second.task.v.", "first.out", "second.out"))
    }


@pytest.mark.parametrize("how", ["sum", "gate", "serial"])
def test_from_python(how: str) -> None:
    """A combination of combinations, too."""
    one = TTTLayer(8, 2, Reconstruction(), Linear(), GradientDescent(4))
    two = TTTLayer(8, 4, Reconstruction(rope="full", kv_heads=2), KernelEstimator(window=3), Append())
    three = TTTLayer(8, 1, Reconstruction(), Linear(), GradientDescent(8))
    layer = Combined(8, Combined(8, one, two, how), three, "serial", group_size=3)  # type: ignore[arg-type]
    assert [part.group_size for part in (one, two, three)] == [3, 3, 3]
    x = torch.randn(2, 13, 8)
    y, state = layer(x[:, :5])
    torch.testing.assert_close(torch.cat([y, layer(x[:, 5:], state)[0]], 1), layer(x)[0])
    model = LanguageModel(11, 8, 2, partial(copy.deepcopy, layer))
    assert model(torch.randint(11, (2, 5))).shape == (2, 5, 11)


def layer_of(task: Reconstruction | DecodedReconstruction | None = None, dim: int = 8) -> TTTLayer:
    return TTTLayer(dim, 2, task or Reconstruction(), Linear(), GradientDescent(4))


def test_calls_that_are_refused() -> None:
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    layer = make("titans_mag")
    for arguments, options in (
        ((x[..., :4],), {}), ((x[:, :0],), {}), ((x[0],), {}), ((x, layer.first(x)[1]), {}), ((x, layer(x[:1])[1]), {}),
        ((x, make("titans_mal")(x)[1]), {}), ((x,), {"mask": torch.ones(2, 5)}), ((x,), {"reset": torch.ones(2, 4, dtype=torch.bool)}),
        ((x.masked_fill(x > 0, torch.nan),), {}),
    ):  # fmt: skip
        with pytest.raises(MetaTTTError):
            layer(*arguments, **options)


def test_a_group_size_reaches_all_layers_inside() -> None:
    mixer = Mamba2(8, 2, head_dim=4)
    inner = Combined(8, layer_of(), mixer)
    both = Combined(8, layer_of(), inner, group_size=3)
    parts = (both, both.first, inner, inner.first, mixer)
    assert [part.group_size for part in parts] == [3] * 5
    both.group_size = 0
    assert [part.group_size for part in parts] == [0] * 5
    both.group_size = None  # leaves those of the layers
    assert [part.group_size for part in parts] == [None, 0, 0, 0, 0]
    for part in parts:
        with pytest.raises(MetaTTTError, match=r"layer.group_size=-3 is not allowed: it must be at least 0"):
            part.group_size = -3
    assert mixer.group_size == 0


def test_as_an_entry_of_a_pattern() -> None:
    cfg = compose(
        "dim=16", "num_heads=2", "model.num_layers=2", "model.blocks=[lact_block,attention]", "layer.group_size=null",
        "model.blocks.lact_block.layer.first.learner.window=5", "model.blocks.lact_block.optimizer.mini_batch_size=4",
    )  # fmt: skip
    model = instantiate_model(cfg)
    block = model.blocks[0].layer
    assert (
        isinstance(block, Combined) and block.first.learner.window == 5 and block.second.optimizer.mini_batch_size == 4
    )  # type: ignore[union-attr]


def test_kept_on_disk(tmp_path: Path) -> None:
    cfg = compose(
        "dim=8", "num_heads=2", "model.num_layers=3", "model.ffn_dim=8", "model.vocab_size=11",
        "model.blocks=[lact_block,titans_mag,titans_mal]",
        job="language_model",
    )  # fmt: skip
    model = instantiate_model(cfg)
    write_model(tmp_path / "model", make_record(cfg), model.state_dict(), None)
    again, _ = load_model(tmp_path / "model")
    ids = torch.randint(11, (2, 9))
    assert torch.equal(again(ids), model(ids))
    with pytest.raises(MetaTTTError, match="cannot be written as a published one: its layers are Combined"):
        PublishedConfig.of(model)


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    layer, x = make("titans_mag"), torch.randn(2, 9, 8, dtype=torch.float64)
    with torch.no_grad():
        _, state = layer(x)
        state.save(tmp_path / "state", model=layer)
        again = CombinedState.load(tmp_path / "state", model=layer)
        assert torch.equal(layer(x, again)[0], layer(x, state)[0])
