"""What is written beside weights: components by name, versions that are refused, runs that go on, weights that start
other runs."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from omegaconf import OmegaConf
from processes_for_tests import fresh
from refusals_for_tests import refusal
from runs_for_tests import TINY, tiny, write_corpus

import metattt.configs
from metattt.checkpoints.files import find_checkpoint
from metattt.checkpoints.folder import CONTENT
from metattt.checkpoints.record import VERSION, make_record, to_names, to_targets
from metattt.checkpoints.trained import load_model, read_checkpoint
from metattt.composition.compose import compose, load_components
from metattt.errors import MetaTTTError
from metattt.evaluation.evaluate import evaluate
from metattt.io import seal
from metattt.registry import REGISTERED, VERSIONS
from metattt.training.building import differences
from metattt.training.resume import resumed
from metattt.training.train import train

TTT = ("layer=ttt_linear", "optimizer.mini_batch_size=8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, on a text that is then moved."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    assert train(tiny(write_corpus(folder / "before"), folder / "run", *TTT, "trainer.max_steps=2")) == 0
    (folder / "before").rename(folder / "after")
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run / "run", tmp_path / "run")
    return tmp_path / "run"


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The checkpoint with another record."""
    file = find_checkpoint(path) / CONTENT
    content = json.loads(file.read_text())
    del content["checksum"]
    change(content)
    file.write_text(json.dumps({"checksum": seal(content), **content}))
    return path


# -- names -------------------------------------------------------------------------------------------------------------


def test_no_configuration_of_ours_is_stored_with_a_path_of_ours() -> None:
    load_components(("metattt.training",))
    texts = (file.read_text(encoding="utf-8") for file in Path(metattt.configs.__file__).parent.rglob("*.yaml"))
    found = {target for text in texts for target in re.findall(r"_target_: (metattt\S+)", text)}
    assert len(found) > 5 and found <= set(REGISTERED.values())
    for case in ("layer=nested_ttt callbacks=inner_warmup", "experiment=digits_pixel trainer=fsdp"):
        stored = json.dumps(make_record(compose(*case.split()))["config"])
        assert '"_target_": "metattt' not in stored and '"_component_": "callback=checkpoints"' in stored


def test_names_and_targets_are_there_and_back() -> None:
    config: Any = OmegaConf.to_container(compose("layer=nested_ttt", "trainer=fsdp", "callbacks=inner_warmup"))
    named = to_names(config)
    assert named["learner"]["layer"]["optimizer"]["_component_"] == "optimizer=gradient_descent"
    settings = {"tensor_ranks": 1, "timeout_minutes": 30.0}
    assert named["trainer"]["strategy"] == {"_component_": "strategy=fully_sharded", "_version_": 1} | settings
    assert named["trainer"]["_target_"] == "lightning.Trainer"  # not ours to move
    assert to_targets(named, "here") == config


def test_a_class_of_a_user_keeps_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"_target_": "my_package.Mine", "x": 2}
    monkeypatch.setitem(REGISTERED, ("learner", "mine_alone"), "my_package.Mine")  # which another process would not know
    assert to_names(node) == node


def test_versions_of_a_component(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"_component_": "learner=mlp", "_version_": 1, "old": 3}
    monkeypatch.setitem(VERSIONS, ("learner", "mlp"), 2)
    refusal(lambda: to_targets(node, "here"), "here has version 1 of learner=mlp, and here is version 2: use the release")
    for version in (3, "x", None, True):
        refusal(partial(to_targets, node | {"_version_": version}, "here"), "of learner=mlp, and here is version 2")


@pytest.mark.parametrize(("change", "message"), [
    (lambda record: record.update(version=VERSION + 1), f"version {VERSION + 1}; this release reads version 4: use"),
    (lambda record: record.update(version="2"), "version 2; "),
    (lambda record: record.pop("version"), "version None"),
    (lambda record: record.update(config=None), "holds no configuration"),
    (lambda record: record["config"]["learner"].update(_component_="model=ghost"), "with model=ghost, which no installed"),
    (lambda record: record["config"]["learner"].update(_component_=7), "names a component as 7"),
    (lambda record: record["config"]["learner"].update(_target_="os.system"), "must be group=name, and alone"),
    (lambda record: record["config"]["learner"].update(_version_=9), "version 9 of learner=linear"),
    (lambda record: record["config"].pop("layer"), "layer"),
    (lambda record: record["config"].update(seed="abc"), "has seed='abc', which is not an integer: it is damaged"),
    (lambda record: record["config"].update(dim="${nowhere}"), "nowhere"),
    (lambda record: record["config"].update(dim="${"), "only ${key} is filled in"),
])  # fmt: skip
def test_records_that_cannot_be_used_are_one_line(
    run: Path, copy: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    changed(copy, change)
    cfg = compose(f"checkpoint={copy}", f"data.path={run / 'after'}", "device=cpu", job="eval")
    refusal(lambda: load_model(copy), message)
    refusal(lambda: evaluate(cfg), message)


def test_what_only_training_needs_may_be_unknown_elsewhere(copy: Path) -> None:
    changed(copy, lambda record: record["config"]["training"].update(_component_="training=ghost"))
    assert load_model(copy)[1].training._component_ == "training=ghost"
    refusal(lambda: train(compose(f"resume={copy}", "trainer.max_steps=4")), "made with training=ghost")


def test_eval_and_generate_import_no_training(copy: Path) -> None:
    code = (
        "import sys; from metattt.evaluation.evaluate import evaluate; from metattt.generation import generate; "
        f"import metattt; metattt.load_model({str(copy)!r}); "
        "assert not [name for name in sys.modules if name.startswith(('metattt.training', 'timm'))]"
    )
    fresh([], [code])


def test_a_buffer_that_the_model_computes_may_be_absent(copy: Path) -> None:
    before = torch.get_rng_state()
    model, config = load_model(copy)
    assert config.dim == 8 and not model.training and torch.equal(torch.get_rng_state(), before)  # the global generator is as it was
    from metattt.checkpoints.trained import fill, read_weights

    model.register_buffer("computed", torch.ones(2))
    fill(model, read_weights(copy), "does not fit")
    model.register_parameter("learned", torch.nn.Parameter(torch.ones(2)))
    refusal(lambda: fill(model, read_weights(copy), "does not fit"), "does not fit: missing: learned")
    refusal(lambda: fill(model, read_weights(copy)._replace(tensors={}), "does not fit"), " more", longest=500)


# -- going on with a run -----------------------------------------------------------------------------------------------


def test_the_data_of_a_run_may_have_moved(
    run: Path, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (f"resume={copy}", "trainer.max_steps=3")
    refusal(lambda: train(compose(*more)), "data.path=", "before does not exist")
    shutil.copytree(run / "after", tmp_path / "other")
    (tmp_path / "other" / "00.txt").write_text("something else, about as long as it was before " * 8)
    with pytest.raises(MetaTTTError, match=r"other does not hold the data that the run was trained on.*init_from="):
        train(compose(*more, f"data.path={tmp_path / 'other'}"))
    with pytest.raises(MetaTTTError, match=r"data\.context_length=12 would change the run.*init_from="):
        train(compose(*more, f"data.path={run / 'after'}", "data.context_length=12"))
    capsys.readouterr()
    assert train(compose(*more, f"data.path={run / 'after'}")) == 0
    assert "data    " not in capsys.readouterr().out
    config = read_checkpoint(copy)["metattt"]["config"]
    assert config["data"]["path"] == str(run / "after") and f"data.path={run / 'after'}" in config["given"]
    assert train(compose(f"resume={copy}", "trainer.max_steps=4", "data.num_workers=1", "compile=auto")) == 0  # from where it is now


@pytest.mark.parametrize(
    "override",
    ["dim=128", "data.context_length=256", "seed=1", "training.lr=0.008", "layer=ttt_mlp", "trainer.accumulate_grad_batches=2"],
)
def test_what_is_given_counts_even_at_its_default(run: Path, copy: Path, override: str) -> None:
    changed(copy, lambda record: record["config"]["training"].update(lr=0.001))
    with pytest.raises(MetaTTTError, match=f"^{override} would change .*the run"):  # in the words of the command
        train(compose(f"resume={copy}", f"data.path={run / 'after'}", "trainer.max_steps=4", override))


@pytest.mark.parametrize("given", ["trainer.devices=1", "trainer.max_steps=320"])
def test_an_explicit_value_counts_though_it_is_the_default(given: str, run: Path) -> None:
    saved = OmegaConf.create(OmegaConf.to_container(compose("trainer.devices=2", "trainer.max_steps=8")))
    cfg, _ = resumed(compose(f"resume={run / 'run'}", "~recipe", given), saved)  # type: ignore[arg-type]
    assert [cfg.trainer.devices, cfg.trainer.max_steps] == ([1, 8] if "devices" in given else [2, 320])


def test_defaults_given_for_what_may_change_are_applied(run: Path, copy: Path) -> None:
    given = ("trainer.log_every_n_steps=5", "trainer.max_steps=3", "trainer=default", "~callbacks.loss_curve", "dim=8")
    assert train(compose(f"resume={copy}", f"data.path={run / 'after'}", *given)) == 0
    config = read_checkpoint(copy)["metattt"]["config"]
    assert [config["trainer"][key] for key in ("log_every_n_steps", "max_steps", "strategy")] == [5, 3, "auto"]
    assert "loss_curve" not in config["callbacks"] and "checkpoint" in config["callbacks"]
    words = [one.partition("=")[0] for one in config["given"]]  # they repeat the run: the last of every key, no resume=
    assert words.count("trainer.max_steps") == 1 and "trainer.max_steps=3" in config["given"] and "resume" not in words


# -- weights that start another run ------------------------------------------------------------------------------------


def test_init_from_says_what_the_weights_do_not_show(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = (*TINY, *TTT, f"data.path={run / 'after'}", f"init_from={run / 'run'}", f"output_dir={tmp_path}", "overwrite=true")
    start = (*start, "trainer.max_steps=1")
    assert train(compose(*start)) == 0
    assert "but here with" not in capsys.readouterr().out
    other = ("optimizer.base_lr=0.5", "task.feature_map=silu", "layer.form=primal", "data.context_length=20")
    assert train(compose(*start, *other)) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "but here with" in line]
    assert line.endswith("but here with task.feature_map silu (there identity), optimizer.base_lr 0.5 (there 1.0)")
    assert differences(compose(*start), str(run / "run"), "{}") == (
        f"weights of {run / 'run'}, but here with another tokenizer (its tokens stand for other text)"
    )
    refusal(lambda: train(compose(*start, "layer.gate=false")), "init_from=", " does not fit this model: ", "unknown")


# -- what we rest on ---------------------------------------------------------------------------------------------------


def test_private_names_of_libraries_are_still_there() -> None:
    """Each is used in one file; an upgrade that takes it away is noticed here."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    assert ModelParallelStrategy()._data_parallel_size == "auto"  # metattt/training/sharding.py sets it
    trainer = lightning.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    loop = trainer.fit_loop.epoch_loop  # metattt/training/signals.py replaces two methods, saving.py sets a count
    assert callable(trainer._signal_connector.register_signal_handlers) and callable(loop._broadcast_sigterm_tensor)
    assert loop._batches_that_stepped == 0
