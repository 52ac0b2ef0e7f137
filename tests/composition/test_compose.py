"""Composition: what layers, overrides, files of one's own and seeds make; the working directory does not matter."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from compositions_for_tests import remembering
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from refusals_for_tests import refusal

from metattt import build
from metattt.composition import compose as composition
from metattt.composition.compose import compose
from metattt.composition.overrides import quote_free_text

SMALL = ("dim=16", "num_heads=2")


def test_layers_choose_the_parts_and_overrides_win() -> None:
    cfg = compose("layer=ttt_mlp", job="build")
    assert cfg.learner._target_.endswith("MLP") and cfg.optimizer.base_lr == 0.1 and cfg.layer.gate
    cfg = compose("layer=ttt_mlp", "learner=linear", "optimizer.base_lr=0.5", "layer.gate=false", job="build")
    assert cfg.learner._target_.endswith("Linear") and cfg.optimizer.base_lr == 0.5 and not cfg.layer.gate
    assert cfg.layer.learner == cfg.learner
    assert compose("experiment=null") == compose("experiment=stdlib", "experiment=null") == compose()
    assert compose(*(again := compose("preset=125m", "preset=null")).given) == again and again.training == compose().training
    assert compose("preset=125m", "recipe=null").training == compose("preset=125m", "~recipe").training == compose("~preset").training
    assert instantiate((cfg := compose("learner.trainable=[w1]")).layer) and instantiate(cfg.training)  # with Hydra's own lists
    assert compose("layer=mamba", "dim=9").dim == compose("model.blocks=[mamba]", "dim=9").dim == 9  # it has no heads
    assert compose().name == "ttt_linear" and compose("experiment=digits_pixel").name == "mttt_mlp"
    assert "name" not in compose(job="build")


def test_a_layer_is_drawn_from_the_global_generator_or_by_a_seed() -> None:
    def drawn(*overrides: str, **named: Any) -> torch.Tensor:
        return torch.cat([p.flatten() for p in build(*SMALL, *overrides, **named).parameters()])

    torch.manual_seed(3)
    one, two = drawn(), drawn()
    assert not torch.equal(one, two)
    torch.manual_seed(3)
    assert torch.equal(drawn(), one) and torch.equal(drawn("seed=null"), two)
    generator = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(one, drawn("seed=0")) for one in pool.map(lambda _: drawn(seed=0), range(16)))
    assert not torch.equal(drawn("seed=0"), drawn("seed=1"))
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_layer_by_keywords() -> None:
    named: dict[str, Any] = {"learner.trainable": ["w2", "b2"], "learner.step_scale": {"w2": 0.5}}
    named |= {"optimizer.base_lr": 1e-5, "optimizer.max_norm": None}
    one = build("ttt_mlp", dim=16, num_heads=2, seed=0, **{"layer.gate": False} | named)
    texts = ("layer=ttt_mlp", "dim=16", "num_heads=2", "seed=0", "layer.gate=false", "optimizer.max_norm=null")
    other = build(*texts, "learner.trainable=[w2,b2]", "learner.step_scale={w2: 0.5}", "optimizer.base_lr=1e-5")
    a, b = one.state_dict(), other.state_dict()
    assert repr(one) == repr(other) and a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    assert repr(build(layer="ttt_mlp", learner="linear")) == repr(build("layer=ttt_mlp", "learner=linear"))
    refusal(lambda: build("ttt_mlp", "dim=8", dim=16), "dim=16 and dim=8 set the same key: give one of them")
    refusal(lambda: build("ttt_mlp", "layer=ttt_linear"), "ttt_mlp, layer=ttt_linear are 2 names: give one")


def hydra_composes(job: str) -> Any:
    """Hydra itself, and not what tests remember (`compositions_for_tests`)."""
    return composition._compose.plain([], job)  # type: ignore[attr-defined]


def test_working_directory_does_not_matter(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = hydra_composes("build")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "build.yaml").write_text("dim: 7\n")
    monkeypatch.chdir(tmp_path)
    assert hydra_composes("build") == before


def test_composes_inside_another_hydra_application() -> None:
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_module("metattt.configs", version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        hydra_composes("build")
        assert GlobalHydra.instance().hydra is outer


@pytest.mark.parametrize("text", [
    "def f(x):", "", "a=b", "it's", '"', "a\\'b", "two\nlines\t", "[1]", "true", "\\${x} '", "a, b", "  x ", "é",
])  # fmt: skip
def test_free_text_is_taken_as_written(text: str) -> None:
    value = OverridesParser.create().parse_overrides([quote_free_text(f"prompt={text}")])[0].value()
    cfg = OmegaConf.create({"prompt": "???"})
    OmegaConf.update(cfg, "prompt", value)
    assert cfg.prompt == text


def test_overrides_that_are_not_text_are_left_alone() -> None:
    for override in ("checkpoint=null", "prompt='quoted'", "data.path=['a','b']", "data.path=[]", "learner.depth=3", "~prompt", "prompt"):
        assert quote_free_text(override) == override
    assert quote_free_text("checkpoint=/a=b/x.ckpt") == "checkpoint='/a=b/x.ckpt'"
    assert quote_free_text("checkpoint=[/a=b/x, c d]") == "checkpoint=['/a=b/x','c d']"
    assert quote_free_text("data.path=['c d',a=b]") == "data.path=['c d','a=b']"
    assert quote_free_text("checkpoint=/a=b/x,'c, d'", sweep=True) == "checkpoint='/a=b/x','c, d'"
    assert quote_free_text("init_from=null,run", sweep=True) == "init_from=null,'run'"
    for override in ("checkpoint=glob(*)", "data.path=[/a,/b],/c", "data.path=/c,[/a,/b]", "data.path=[/a],[/b]"):
        assert quote_free_text(override, sweep=True) == override


def test_what_tests_remember_is_what_hydra_composes() -> None:
    """See `compositions_for_tests`: the same text, types and refusals, and nobody sees what another has changed."""
    compose("layer=ttt_mlp")  # what can be composed is known
    hydra = composition._compose.plain  # type: ignore[attr-defined]
    remembered = remembering(counted := Mock(side_effect=hydra))
    for folder, betas, rate in (("/a", "[0.9,0.5]", "${training.lr}"), ("runs/b c", "[0,0]", "2")):
        overrides = ["layer=ttt_mlp", f"output_dir='{folder}'", "data.path='/d/e.txt'", f"training.betas={betas}"]
        overrides += ["+trainer.max_time=3", f"optimizer.base_lr={rate}", "trainer.max_steps=3", "task.loss=dot"]
        found, expected = remembered(overrides, "train"), hydra(overrides, "train")
        assert found == expected and OmegaConf.to_yaml(found[0]) == OmegaConf.to_yaml(expected[0])
        assert OmegaConf.is_struct(found[0]) == OmegaConf.is_struct(expected[0])
        assert OmegaConf.get_type(found[0], "layer") == OmegaConf.get_type(expected[0], "layer")
        found[0].dim = 3
    assert counted.call_count == 1
    for wrong in ("task.los=dot", "optimizer.base_lr=x", "trainer.max_steps=1,2", "hydra.verbose=[", "layer=nothing"):
        with pytest.raises((HydraException, OmegaConfBaseException)) as error:
            hydra([wrong], "train")
        with pytest.raises(type(error.value), match=re.escape(str(error.value))):
            remembered([wrong], "train")


@pytest.mark.parametrize("given", [[], ["learner=linear"], ["optimizer.decay=softplus"], ["layer.gate=false"]])
def test_a_custom_part_has_no_keys_of_the_layers_own(given: list[str]) -> None:
    """`layer=kda` sets lr, decay and rank of its rule; `optimizer=custom` sets nothing but what is given."""
    rule = ["optimizer=custom", "optimizer._target_=metattt.optimizers.Momentum"]
    cfg = compose("layer=kda", *rule, *given, job="build")
    named = {one.partition("=")[0].removeprefix("optimizer.") for one in given if one.startswith("optimizer.")}
    assert set(cfg.optimizer) == {"_target_"} | named
    assert cfg.task.short_conv == 4 and cfg.layer.output_norm == "head_rms"  # the layer's other settings stay


def test_a_layer_may_choose_a_custom_part_and_set_it(tmp_path: Path) -> None:
    (tmp_path / "layer").mkdir()
    text = "# @package _global_\ndefaults:\n  - base/ttt_layer@layer\n  - override /optimizer: custom\n  - _self_\n"
    (tmp_path / "layer" / "mine.yaml").write_text(text + "optimizer:\n  _target_: a.B\n  rank: 3\n")
    cfg = compose(f"hydra.searchpath=[file://{tmp_path}]", "layer=mine", job="build")
    assert dict(cfg.optimizer) == {"_target_": "a.B", "rank": 3}
    where = f"hydra.searchpath=[file://{tmp_path}]"
    cfg = compose(where, "layer=mine", "optimizer.rank=5", "++optimizer.mean=true", job="build")
    assert dict(cfg.optimizer) == {"_target_": "a.B", "rank": 5, "mean": True}
    refusal(lambda: compose(where, "layer=mine", "optimizer.mean=true"), "`++optimizer.mean=<value>`")
    refusal(lambda: compose(where, "layer=mine", "optimizer.rnak=5"), "did you mean `optimizer.rank`?")
    stack = compose(where, "model.blocks=[mine,ttt_linear]", "model.blocks.mine.optimizer.rank=7")
    assert stack.model.blocks.layers.mine.optimizer.rank == 7


def test_an_entry_of_a_pattern_may_have_a_class_of_ones_own() -> None:
    written = compose("model.blocks=[{layer: kda, optimizer: {_target_: a.B, rank: 5}},ttt_linear]")
    keys = ("model.blocks.kda.optimizer=custom", "model.blocks.kda.optimizer._target_=a.B", "model.blocks.kda.optimizer.rank=5")
    for cfg in (written, compose("model.blocks=[kda,ttt_linear]", *keys)):
        assert dict(cfg.model.blocks.layers.kda.optimizer) == {"_target_": "a.B", "rank": 5}
        assert cfg.model.blocks.layers.kda.task.short_conv == 4


def test_null_leaves_an_entry_out(tmp_path: Path) -> None:
    default = compose()
    cfg = compose("callbacks.progress=null", "logger.csv=null")
    assert set(cfg.callbacks) == set(default.callbacks) - {"progress"} and not cfg.logger
    assert cfg.given == ["callbacks.progress=null", "logger.csv=null"]
    assert "logger" not in compose("logger=null") and "callbacks" not in compose("callbacks=null")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "quiet.yaml").write_text("# @package _global_\ncallbacks:\n  loss_curve: null\nlogger:\n  csv: null\n")
    cfg = compose("experiment=quiet", f"hydra.searchpath=[{tmp_path}]")
    assert set(cfg.callbacks) == set(default.callbacks) - {"loss_curve"} and not cfg.logger
