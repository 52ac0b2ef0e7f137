"""Two layers in the place of one. (What they compute: `test_layer_table`; the laws that every layer obeys:
`test_whole_layers`.)"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals_for_tests import refusal
from torch import nn

from metattt import TTTLayer, load_model
from metattt.checkpoints.folder import write_model
from metattt.checkpoints.record import make_record
from metattt.combined import Combined
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.learners import KernelEstimator, Linear
from metattt.models import LanguageModel
from metattt.models.published_config import PublishedConfig
from metattt.optimizers import Append, GradientDescent
from metattt.tasks import Reconstruction


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


def test_projections_that_do_not_tell_their_width_are_shared() -> None:
    one, two = (TTTLayer(8, 2, Reconstruction(), Linear(), GradientDescent(4)) for _ in range(2))
    one.task.q = nn.Sequential(one.task.q, nn.Identity())  # as an adapter of one's own around it
    assert Combined(8, one, two, shared=True)(torch.randn(1, 5, 8))[0].isfinite().all()


def test_settings_that_come_too_late() -> None:
    """What the modules were made for stays, and is not merely said to be otherwise."""
    one, two = (TTTLayer(8, 2, Reconstruction(), Linear(), GradientDescent(4)) for _ in range(2))
    layer = Combined(8, one, two)
    for name, value in (("how", "gate"), ("shared", True), ("with_head_norm", True)):
        refusal(partial(setattr, layer, name, value), match=rf"Combined\.{name} = .* comes too late")
    layer.how, layer.group_size = "sum", 2
    assert one.group_size == 2


def test_an_attribute_before_the_constructor_of_the_base_class() -> None:
    class Mine(Combined):
        def __init__(self, **settings: Any):
            self.mine = 3
            super().__init__(**settings)

    one, two = (TTTLayer(8, 2, Reconstruction(), Linear(), GradientDescent(4)) for _ in range(2))
    assert Mine(dim=8, first=one, second=two).mine == 3


def test_kept_on_disk(tmp_path: Path) -> None:
    """A pattern of them and of mixers, with a setting of a layer inside one."""
    cfg = compose(
        "dim=8", "num_heads=2", "model.num_layers=6", "model.ffn_dim=8", "model.vocab_size=11",
        "model.blocks=[lact_block,titans_mag,titans_mal,mamba,mamba2_mixer,longhorn]",
        "model.blocks.lact_block.layer.first.learner.window=5", job="language_model",
    )  # fmt: skip
    model = instantiate_model(cfg)
    assert model.blocks[0].layer.first.learner.window == 5
    write_model(tmp_path / "model", make_record(cfg), model.state_dict(), None)
    again, _ = load_model(tmp_path / "model")
    ids = torch.randint(11, (2, 9))
    assert torch.equal(again(ids), model(ids))
    refusal(lambda: PublishedConfig.of(model), "cannot be written as a published one: its layers are Combined")
