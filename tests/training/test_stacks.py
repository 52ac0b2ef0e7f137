"""A stack of different layers: its pattern, from the command line and from Python, and what is made of a run. (State, masks and
reset: `models/test_language_model`.)"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from models_for_tests import small_model
from refusals_for_tests import refusal
from runs_for_tests import TINY

import metattt
from metattt import MetaTTTError
from metattt.checkpoints.convert import convert
from metattt.composition.compose import compose
from metattt.generation.generate import generate
from metattt.models import LanguageModel
from metattt.training.building import differences
from metattt.training.train import train

SMALL = ("dim=16", "num_heads=2", "model.ffn_dim=16")
HYBRID = (
    *SMALL, "model.num_layers=3", "model.blocks=ttt_mlp*2+window_attention", "model.blocks.ttt_mlp.optimizer.mini_batch_size=8",
    "model.blocks.window_attention.learner.window=6", "model.blocks.window_attention.learner.sinks=1",
)  # fmt: skip


def make(*overrides: str) -> LanguageModel:
    return small_model(*overrides, "model.vocab_size=31")


# -- the pattern -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pattern", "learners"), [
    ("model.blocks=[ttt_mlp,ttt_mlp,window_attention]", "MLP MLP KernelEstimator MLP MLP"),
    ("model.blocks=ttt_mlp*3+attention", "MLP MLP MLP KernelEstimator MLP"),
    ("model.blocks='ttt_linear + delta_net'", "Linear LinearMap Linear LinearMap Linear"),
    ("model=ttt_hybrid", "MLP MLP MLP KernelEstimator MLP"),
])  # fmt: skip
def test_a_pattern_is_repeated_to_the_depth(pattern: str, learners: str) -> None:
    model = make(*SMALL, "model.num_layers=5", pattern)
    found = [type(block.layer.learner).__name__ for block in model.blocks]  # type: ignore[union-attr]
    assert [name.replace("LinearMap", "Linear") for name in found] == learners.replace("LinearMap", "Linear").split()


def test_entries_have_settings_of_their_own() -> None:
    model = make(
        *SMALL, "model.num_layers=4", "model.blocks=[ttt_mlp,ttt_mlp,attention]", "model.blocks.attention.num_heads=8",
        "model.blocks.ttt_mlp.learner.activation=silu", "model.blocks.1.optimizer.mini_batch_size=4", "layer.group_size=2",
        "model.blocks.attention.layer.group_size=0",
    )  # fmt: skip
    layers = [block.layer for block in model.blocks]
    assert [layer.num_heads for layer in layers] == [2, 2, 8, 2]
    assert [layer.optimizer.mini_batch_size for layer in layers] == [16, 4, 1, 16]  # type: ignore[union-attr]
    assert [layer.group_size for layer in layers] == [2, 2, 0, 2]
    shown = [layer.learner.extra_repr() for layer in (*layers[:2], metattt.build("layer=ttt_mlp"))]  # type: ignore[operator, union-attr]
    assert shown[0] == shown[1] != shown[2]
    blocks = "model.blocks=[ttt_mlp,{layer: ttt_mlp, learner: {depth: 3, step_scale: {w1: 0.5}}}]"  # a value is a mapping
    assert make(*SMALL, "model.num_layers=2", blocks).blocks[1].layer.learner.step_scale == {"w1": 0.5}  # type: ignore[union-attr]


def test_an_entry_with_settings_does_not_take_the_name_of_another_layer(tmp_path: Path) -> None:
    (tmp_path / "layer").mkdir()
    for name, rate in (("mine", 0.3), ("mine_2", 0.9)):
        lines = "# @package _global_", "defaults: [ttt_linear, _self_]", f"optimizer: {{base_lr: {rate}}}"
        (tmp_path / "layer" / f"{name}.yaml").write_text("\n".join(lines))
    pattern = "model.blocks=[mine_2,mine,{layer: mine, num_heads: 4}]"
    blocks = compose(*SMALL, f"hydra.searchpath=[{tmp_path}]", pattern, job="language_model").model.blocks
    layers = [blocks.layers[name] for name in blocks.pattern]
    assert [(one.num_heads, one.optimizer.base_lr) for one in layers] == [(2, 0.9), (2, 0.3), (4, 0.3)]


def test_an_entry_is_what_its_layer_would_be_alone() -> None:
    """With the same backbone, so its parameters have the same names and sizes."""
    common = (*SMALL, "model.num_layers=1", "model=mamba_backbone")
    for name in ("ttt_mlp", "window_attention"):
        alone, entry = make(*common, f"layer={name}"), make(*common, f"model.blocks=[{name}]")
        assert repr(alone) == repr(entry)
        assert all(torch.equal(x, entry.state_dict()[key]) for key, x in alone.state_dict().items())


def test_from_python() -> None:
    mlp, window = (partial(metattt.build, name, dim=16, num_heads=2) for name in ("ttt_mlp", "window_attention"))
    model = LanguageModel(31, 16, 5, blocks=[mlp, window])
    kinds = [type(block.layer.learner).__name__ for block in model.blocks]  # type: ignore[union-attr]
    assert kinds == ["MLP", "KernelEstimator", "MLP", "KernelEstimator", "MLP"]
    for wrong in ({}, {"layer": mlp, "blocks": [mlp]}, *({"blocks": one} for one in ([], "ttt_mlp", [mlp()], [mlp] * 6))):
        refusal(partial(LanguageModel, 31, 16, 5, **wrong))  # type: ignore[arg-type]
    refusal(lambda: LanguageModel(31, 16, 1, blocks=[lambda: 3]), "the layer of block 0 is a int: it must be a torch")


def test_the_name_of_a_run_and_the_parts_that_it_has_not() -> None:
    cfg = compose(*HYBRID)
    assert cfg.name == "ttt_mlp-window_attention"
    assert all(cfg[part] is None for part in ("layer", "learner", "task", "optimizer"))
    assert list(cfg.model.blocks.pattern) == ["ttt_mlp", "ttt_mlp", "window_attention"]


REFUSED = {
    "model.blocks=[]": "`model.blocks=[]` has no layer",
    "model.blocks=[ttt_mlp,attention,attention,attention]": "is a pattern of 4 blocks, and model.num_layers=3: set model.num_layers=4",
    "model.blocks=[{layer:ttt_mlp,mini_batch_size:4}]": "`model.blocks.0.mini_batch_size=4` does not set anything in a block",
    "model.blocks=[self_attention]": "must not see it",
    "model.blocks=[attention] layer=ttt_mlp": "leave out one of them",
    "model.blocks=[attention] model.blocks.1.num_heads=2": "1 is not in the pattern of attention, whose places are 0 to 0",
    "model.blocks=[attention] model.blocks.attention.learner.windw=2": "Did you mean `learner.window`?",
    "model.blocks=[attention,ttt_mlp] optimizer.mini_batch_size=8": "is for all blocks: for some, model.blocks.<layer>.optimizer",
    "model.blocks=[foo]": "`foo` is not a choice of layer; one of your own: --config-dir",
    "model.blocks.attention.num_heads=2": "there is no pattern: give model.blocks=",
}  # fmt: skip


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_is_refused(overrides: str) -> None:
    refusal(lambda: make(*SMALL, "model.num_layers=3", *overrides.split()), REFUSED[overrides])


# -- training and files ------------------------------------------------------------------------------------------------


def test_a_run_is_read_and_goes_on_generating_and_another_says_what_differs(corpus: Path, tmp_path: Path) -> None:
    """No published configuration makes such a model."""
    run, plain = tmp_path / "run", [one for one in TINY if "layer=" not in one]
    assert train(compose(*plain, *HYBRID, f"data.path={corpus}", f"output_dir={run}", "trainer.max_steps=1")) == 0
    target = f"target={tmp_path / 'published'}"
    with pytest.raises(MetaTTTError, match="cannot be written as a published one"):
        convert(compose(f"source={run}", target, "direction=to_published", job="convert"))
    generate(compose(f"checkpoint={run}", "prompt=alpha", "max_new_tokens=12", "device=cpu", job="generate"))
    line = differences(compose(*(one for one in HYBRID if "mini_batch_size" not in one)), str(run), "bytes")
    assert line is not None and "blocks.layers.ttt_mlp.optimizer.mini_batch_size 16 (there 8)" in line
    assert differences(compose(*HYBRID), str(run), "bytes") is None
