"""Views of drawn scenes: their pictures and tokens, the model that learns and reads them, and a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals_for_tests import refusal
from runs_for_tests import column, log

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.data.novel_views import NovelViewsData, cameras, render
from metattt.evaluation.evaluate import evaluate
from metattt.training.recipes import AdamW
from metattt.training.sequence_module import Views
from metattt.training.train import train

SMALL = ("experiment=novel_views", "dim=16", "num_heads=1", "model.num_layers=2", "trainer.accelerator=cpu")


def test_a_picture_shows_the_nearest_sphere() -> None:
    """A ray meets a sphere where it leaves the direction of the centre by less than asin(r / distance)."""
    centres, radii = np.array([[0.6, 0, 0], [-0.5, 0.2, 0.1]]), np.array([0.3, 0.5])
    (origin,), (rays,) = cameras(np.array([[2.0, 0, 0]]), 33)
    colours = render(origin, rays, (centres, radii, np.eye(3)[:2]))
    away = np.linalg.norm(centres - origin, axis=-1)
    met = rays @ ((centres - origin[0]) / away.T).T > np.sqrt(1 - (radii / away[0]) ** 2)
    assert ((colours[..., 0] > 0) == met[..., 0]).all() and ((colours[..., 1] > 0) == met[..., 1] & ~met[..., 0]).all()
    assert colours[16, 16] == pytest.approx([0.7, 0, 0])  # the middle of the picture; the normal there is level


def test_the_tokens_of_a_scene() -> None:
    data = NovelViewsData(given=(0, 1, 3), asked=2, image_size=6, patch_size=3)
    scenes = [data.sequence("validation", index) for index in range(3, 6)]
    for number, (tokens, labels) in zip((0, 4, 12), scenes, strict=True):
        assert tokens[:, -1].tolist() == [1] * number + [0] * (12 - number) + [-1] * 8
        assert (tokens[12:] == scenes[0][0][12:]).all() and (labels[12:] == scenes[0][1][12:]).all()  # the same scene
        assert not tokens[number:12].any() and not tokens[12:, 54:-1].any() and np.isnan(labels[:12]).all()
    rays, moments = np.split(tokens[-4:, :54].reshape(-1, 6).astype(np.float64), 2, axis=1)  # of the pixels of the last view
    place = -3 * rays.sum(0) / np.linalg.norm(rays.sum(0))  # of its camera, which looks at the middle
    np.testing.assert_allclose(moments, np.cross(place, rays), atol=1e-5)
    assert data._patches(np.arange(36).reshape(1, 6, 6, 1))[1].tolist() == [3, 4, 5, 9, 10, 11, 15, 16, 17]  # rows of a patch


@pytest.mark.parametrize("size", ["null", "16"])
def test_an_answer_depends_on_the_given_views_alone(size: str) -> None:
    """Not on what else is asked for, nor on the batch; not on their order, if they are one mini-batch."""
    model: Any = instantiate_model(compose(*SMALL, f"optimizer.mini_batch_size={size}")).double()
    data = NovelViewsData(given=(0, 1, 3), asked=2)
    x = torch.stack([torch.from_numpy(data.sequence("train", index)[0]).double() for index in range(3)])
    for row, number in enumerate((0, 1, 3)):
        alone = model(torch.cat([x[row, : 16 * number], x[row, 64:]])[None])[0, -16:]
        torch.testing.assert_close(alone, model(x)[row, 64:], rtol=1e-9, atol=1e-11)
    turned = model(x[2:, [*range(32, 48), *range(32), *range(48, 80)]])[0, 48:]
    assert torch.allclose(turned, model(x)[2, 48:], rtol=1e-9, atol=1e-11) == (size == "null")
    assert Views(model, None, {}).shortest_loss().dtype == torch.float64  # what trainer=ddp asks for first


def test_all_projections_decay() -> None:
    """Those of q, k and v in torch's attention, too, which are one parameter and no `nn.Linear`."""
    model: Any = instantiate_model(compose(*SMALL))
    decayed = {id(parameter) for parameter in AdamW().groups(model)[0]["params"]}
    assert all(id(weight) in decayed for block in model.blocks for weight in block.attention.parameters())


def test_a_run_goes_on(tmp_path: Path) -> None:
    short = ("data.given=[0,2]", "data.batch_size=3", "data.validation_size=5", "trainer.max_steps=4", "trainer.log_every_n_steps=1")
    saved = ("callbacks.checkpoint.every_steps=2", "callbacks.checkpoint.keep=9", f"output_dir={tmp_path}")
    assert train(compose(*SMALL, *short, *saved)) == 0
    whole = log(tmp_path)
    assert list(column(tmp_path, "tokens_per_second")) == [2, 3, 4]
    assert train(compose(f"resume={tmp_path / 'checkpoints' / 'step-00000002'}", "overwrite=true")) == 0
    assert log(tmp_path) == whole and {"validation/loss_0", "validation/psnr_2"} <= whole[-1].keys()
    found = evaluate(compose(f"checkpoint={tmp_path}", "device=cpu", job="eval"))[tmp_path.name].loss
    assert found.mean().item() == pytest.approx(float(whole[-1]["validation/loss"]), rel=1e-5)


@pytest.mark.parametrize(("words", "message"), [
    ("data.given=[2,1]", "data.given=[2,1]"), ("data.given=[-1]", "at least 0"), ("data.patch_size=3", "image_size=16"),
    ("model.patch_size=8", "image_size and"), ("model=regression", "=novel_views"), ("layer=mamba", "without learning"),
])  # fmt: skip
def test_mistakes_are_named(words: str, message: str, tmp_path: Path) -> None:
    refusal(lambda: train(compose(*SMALL, words, f"output_dir={tmp_path / 'run'}")), message)
