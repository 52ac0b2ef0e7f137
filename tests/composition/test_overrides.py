"""What a newcomer types: every suggestion that a message makes is itself accepted, and a mistake does not wait for
torch."""

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hydra.utils import get_class
from omegaconf import OmegaConf

from metattt.cli import main
from metattt.composition import components
from metattt.composition.aliases import KEYS
from metattt.composition.compose import compose
from metattt.composition.messages import known_keys
from metattt.composition.signatures import Unreadable, constructor, registered
from metattt.errors import MetaTTTError
from metattt.registry import PARAMETERS, REGISTERED, register, version_of

TYPICAL = [  # a mistake, and what it should have been
    ("optimizer=momentum optimizer.token_steps=shared", "optimizer=minibatch optimizer.token_steps"),
    ("optimizer.momentum=per_head", "optimizer=momentum optimizer.momentum"),
    ("optimizer.sampling=sgd", "optimizer=whole optimizer.sampling"),
    ("task.decoder_norm=true", "task=mttt task.decoder_norm"),
    ("learner.neighbours=3", "learner=kernel_estimator learner.neighbours"),
    ("learner.bais=true", "learner.bias"),
    ("layer.learner.bias=false", "learner.bias"),
    ("leaner=mlp", "learner"),
    ("mini_batch_size=8", "optimizer.mini_batch_size"),
    ("lr=0.1", "training.lr"),
    ("LR=0.1", "training.lr"),
    ("learning-rate=0.1", None),  # no word of Hydra's
    ("learning_rate=0.1", "training.lr"),
    ("training.learning_rate=0.1", "training.lr"),
    ("data.lr=0.1", "training.lr"),
    ("optimizer.learning_rate=0.1", "optimizer.base_lr"),
    ("optimizer.lr=0.1", "optimizer.base_lr=0.1"),
    ("inner_lr=0.1", "optimizer.base_lr"),
    ("steps=3", "trainer.max_steps"),
    ("trainer.steps=3", "trainer.max_steps"),
    ("batch_size=3", "data.batch_size"),
    ("num_layers=3", "model.num_layers"),
    ("n_layers=3", "model.num_layers"),
    ("model=vision_transformer n_layers=3", "model.depth"),
    ("d_model=32", "dim"),
    ("model.hidden_size=32", "dim"),
    ("n_heads=2", "num_heads"),
    ("device=cpu", "trainer.accelerator"),
    ("gpus=2", "trainer.devices"),
    ("precision=bf16-mixed", "trainer.precision"),
    ("seq_len=64", "data.context_length"),
    ("ckpt=runs/x", "resume"),
    ("trainer.limit_val_batchs=1", "trainer.limit_val_batches"),
    ("callbacks.progress.line=3", "callbacks.progress.lines"),
    ("layer=mlp", "learner=mlp"),
    ("learner=ttt_mlp", "layer=ttt_mlp"),
    ("model=ttt_linear", "layer=ttt_linear"),
    ("training=adam", "training=adamw"),
    ("preset=125", "preset=125m"),
    ("layer=lin", "layer=linear_attention"),
]


@pytest.mark.parametrize(("typed", "expected"), TYPICAL)
def test_suggestions_are_accepted(typed: str, expected: str | None) -> None:
    overrides = typed.split()
    with pytest.raises(MetaTTTError) as caught:
        compose(*overrides)
    assert str(caught.value).count("\n") <= 1
    suggested = re.search(r"Did you mean `(.*?)`\?", str(caught.value))
    if expected is None:
        return
    assert suggested and suggested[1] == expected, caught.value
    *words, last = suggested[1].split()
    value = overrides[-1].partition("=")[2]
    compose(*overrides[:-1], *words, last if "=" in last else f"{last}={value}")


@pytest.mark.parametrize("typed", ["lr=1", "steps=1", "batch_size=1"])
def test_the_inner_loop_has_such_a_key_too(typed: str) -> None:
    inner = {"lr=1": "optimizer.base_lr", "steps=1": "optimizer.steps", "batch_size=1": "optimizer.mini_batch_size"}[
        typed
    ]
    with pytest.raises(MetaTTTError, match=rf"\(`{inner}` is that of the inner loop"):
        compose(typed)


def test_the_table_of_names_points_at_keys_that_exist() -> None:
    composed = [compose(job=job) for job in ("train", "eval", "generate", "prepare", "convert")]
    composed.append(compose("layer=window_attention"))
    composed.append(compose("model=vision_transformer", "data=images", "training=timm"))
    known = {key for cfg in composed for key in known_keys(cfg).values()}
    assert not set(KEYS) - known


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (
            "optimizer=adamw",
            "`adamw` is not a choice of optimizer, the inner optimizer. The outer one is `training=adamw`",
        ),
        ("optimizer=sgd", "The outer one is `training=<adamw, muon, timm>`"),
        ("layer=ttt_mlp,ttt_linear", "names several values: add -m (--multirun) to run `metattt train` once for each"),
        ("trainer.max_steps=range(0,3)", "names several values: add -m (--multirun)"),
        ("model.layer=attention", "layer=<name> chooses the layer of every block"),
        ("+model.layer=attention", "layer=<name> chooses the layer of every block"),
        ("model.dim=32", "dim=<value> sets it for the model and its layers"),
        ("layer.learner=mlp", "learner=<name> chooses it"),
        ("trainer.logger=false", "~logger leaves it out"),
        ("preset=tiny model=vision_transformer", "Leave out preset=tiny"),
        ("~model.vocab_size", "cannot be taken away"),
        ("~callbacks callbacks.progress.lines=3", "`callbacks` is not a key of `metattt train`. It has: "),
        ("~data", "`~data` takes away what `metattt train` needs"),
        ("~callbacks.progres", "Did you mean `callbacks.progress`?"),
        ("experiment=mine", "hydra.searchpath=[<folder>]"),
        ("hydra.run.dir=x", "output_dir"),
        ("=3", "cannot be read"),
        ("layer=[a,b]", "is not allowed: choose one of atlas"),
    ],
)
def test_messages_say_the_way(typed: str, expected: str) -> None:
    with pytest.raises(MetaTTTError) as caught:
        compose(*typed.split())
    assert expected in str(caught.value) and str(caught.value).count("\n") <= 1


def test_the_checkpoint_says_what_it_is() -> None:
    with pytest.raises(MetaTTTError, match="the checkpoint says what it is"):
        compose("checkpoint=x", "layer=attention", job="eval")


def test_arguments_of_the_trainer_need_no_plus() -> None:
    assert compose("trainer.limit_val_batches=1", "trainer.max_time=00:01:00:00").trainer.limit_val_batches == 1
    assert compose("+trainer.limit_val_batches=1").trainer == compose("trainer.limit_val_batches=1").trainer
    from lightning import Trainer

    with pytest.raises(MetaTTTError, match="limit_val"):
        compose("+trainer.limit_val=1")
    assert [one.name for one in constructor("lightning.pytorch.trainer.trainer", "Trainer")] == list(
        PARAMETERS["lightning.Trainer"]
    )
    assert list(PARAMETERS["lightning.Trainer"]) == list(Trainer.__init__.__annotations__)[:-1]


# -- constructors read from their source -------------------------------------------------------------------------------


def _schemas() -> dict[tuple[str, str], dict[str, object]]:
    stored = ConfigStore.instance().repo["schema"]
    found = {}
    for group in stored:
        for name, entry in stored[group].items():
            nodes = {key: entry.node._get_node(key) for key in entry.node}
            found[group, name] = {
                key: (repr(node._metadata.ref_type), node._metadata.optional, str(node)) for key, node in nodes.items()
            }
    return found


def test_what_is_read_is_what_an_import_would_register() -> None:
    for job in components.JOB_COMPONENTS:
        components.load_components(components.COMPONENTS + components.JOB_COMPONENTS[job])
    ours = {key: target for key, target in REGISTERED.items() if target.startswith("metattt.")}
    read, parameters = _schemas(), dict(PARAMETERS)
    for (group, name), target in ours.items():
        register(group, name, version_of(group, name))(get_class(target))  # a version lasts beyond this test
    imported = _schemas()
    assert len(ours) > 30
    for (group, name), target in ours.items():
        assert read[group, f"{name}.yaml"] == imported[group, f"{name}.yaml"]
        assert parameters[target] == PARAMETERS[target]


MODULE = """
from __future__ import annotations
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal
import torch
from metattt.registry import register
if TYPE_CHECKING:
    from nowhere import Unknown
Kind = Literal["a", "b"]
class Base:
    def __init__(
        self, kind: Kind | None = None, sizes: Sequence[int] = (1, 2), *, one: Unknown = None, module: torch.nn.Module | None = None
    ): ...
@register("learner", name="read_{0}")
class Read(Base): ...
"""


def test_a_module_is_read_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "readable_part.py").write_text(MODULE + "raise RuntimeError('it was run')\n")
    (found,) = registered("readable_part")
    assert found[:3] == ("learner", "read_{0}", "readable_part.Read")
    kind, sizes, one, module = found.parameters
    assert kind.default is None and "'a', 'b'" in str(kind.annotation)
    assert sizes.default == (1, 2)
    assert one.kind is one.KEYWORD_ONLY and module.default is None


@pytest.mark.parametrize(
    "text",
    [
        "@register('learner', 'x')\nclass X(make_base()): ...\n",
        "@register('learner', NAME)\nclass X:\n    def __init__(self): ...\n",
        "@register('learner', 'x')\nclass X:\n    def __init__(self, n: int = sum(SIZES)): ...\n",
        "@register('learner', 'x')\nclass X:\n    def __init__(self, n: int = SOMETHING): ...\n",
        "from nowhere_at_all import Base\n@register('learner', 'x')\nclass X(Base): ...\n",
        "from . import Base\n@register('learner', 'x')\nclass X(Base): ...\n",
        "class X(",
    ],
)
def test_what_cannot_be_read_is_left_to_an_import(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"unreadable_{abs(hash(text))}"
    (tmp_path / f"{module}.py").write_text(text)
    with pytest.raises(Unreadable):
        list(registered(module))


def test_a_mistake_does_not_wait_for_torch() -> None:
    words = [
        ["train", "learner.bais=1"],
        ["train", "learner=mpl"],
        ["train", "dim=100", "num_heads=3"],
        ["check", "lr=3"],
        ["train", "model.layer=x"],
        ["eval", "ckpt=x"],
    ]
    code = f"import sys; from metattt.cli import main; codes = [main(words) for words in {words}]; assert set(codes) == {{2}}, codes\n"
    code += "main(['train', '--cfg'])\nassert not {'torch', 'lightning', 'timm'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- words of Hydra and OmegaConf that are still parsed: they change with a release, and then these fail ---------------


def test_hydra_is_pinned_where_its_words_are_parsed() -> None:
    pinned = [one for one in requires("metattt") or [] if one.startswith("hydra-core")]
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"hydra-core>=1.3,<1.4"' in text and pinned


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # "In 'preset/tiny': ConfigKeyError raised while composing config:"
        (
            ["preset=tiny", "model=vision_transformer"],
            "preset=tiny sets `model.num_layers`, but the chosen model has no `num_layers`.",
        ),
        # "Error locating target '...'"
        (
            ["learner=custom", "learner._target_=nowhere.X"],
            "`learner._target_=nowhere.X` cannot be imported: No module",
        ),
        # "Error in call to target '...'" with "unexpected keyword argument"
        (
            ["learner=custom", "learner._target_=fractions.Fraction", "learner.x=1"],
            "`x` is not a parameter of fractions.Fraction.",
        ),
        (
            ["learner._target_=fractions.Fraction"],
            "is not a parameter of fractions.Fraction. Add learner=custom, which sets",
        ),
        # the same with "missing 1 required positional argument", and "full_key: ..."
        (["learner=custom", "learner._target_=datetime.date"], "datetime.date raised TypeError"),
        (["learner=custom", "learner._target_=string.Formatter.format"], "learner"),
    ],
)
def test_words_of_hydra(overrides: list[str], expected: str) -> None:
    from metattt.composition.instantiate import instantiate_layer

    with pytest.raises(MetaTTTError) as caught:
        instantiate_layer(compose(*overrides, "dim=16", "num_heads=2"))
    assert expected in str(caught.value) and str(caught.value).count("\n") <= 1


# -- showing the configuration, and files of the user's own ------------------------------------------------------------


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


@pytest.mark.parametrize("flags", [["--cfg"], ["--cfg", "job"], ["--cfg=job"], ["-c", "job"]])
def test_cfg_prints_what_would_be_run(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *flags, "layer=ttt_mlp", "dim=32"]) == 0
    shown = OmegaConf.create(capsys.readouterr().out)
    assert shown == compose("layer=ttt_mlp", "dim=32") and shown.data._get_node("seed")._is_interpolation()
    assert main(["train", "dim=32", *flags, "--resolve"]) == 0
    assert "${" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["eval", "generate", "prepare", "convert", "layers", "check"])
def test_cfg_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--cfg"]) == 0
    assert OmegaConf.create(capsys.readouterr().out) == compose(job=command)


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--config-dir=x", "there is no folder x"),
        ("--config-path=x", "--config-dir <folder> adds files of your own"),
        ("--info=x", "argument --info/-i: invalid choice: 'x' (choose from 'all', 'config', 'defaults'"),
        ("--resolve", "add --cfg job"),
        ("--lr", "lr=<value>"),
    ],
)
def test_other_flags(flag: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", flag]) == 2
    assert expected in capsys.readouterr().err


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my files" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - override /learner: mlp\n  - _self_\ndim: 48\n"
    (tmp_path / "my files" / "experiment" / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "my files"


@pytest.mark.parametrize("form", ["[{0}]", "[file://{0}]", "[my files]"])
def test_files_of_ones_own(mine: Path, form: str) -> None:
    cfg = compose("experiment=mine", f"hydra.searchpath={form.format(mine)}")
    assert cfg.dim == 48 and cfg.learner._target_.endswith("MLP") and "hydra" not in cfg
    with pytest.raises(MetaTTTError, match="`bais` is not a field of learner"):
        compose("experiment=mine", f"hydra.searchpath={form.format(mine)}", "learner.bais=1")


def test_a_folder_of_ones_own(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine / "learner").mkdir()
    (mine / "learner" / "wide.yaml").write_text("# A wide one\ndefaults:\n  - mlp\n  - _self_\nexpansion: 8.0\n")
    for folder in ("my files", str(mine)):
        for flags in (["--config-dir", folder], [f"--config-dir={folder}"], ["-cd", folder]):
            assert main(["train", *flags, "experiment=mine", "dim=56", "--cfg", "job"]) == 0
            shown = OmegaConf.create(capsys.readouterr().out)
            assert shown.dim == 56 and shown.learner._target_.endswith("MLP")
    assert main(["train", "--config-dir", "my files", "learner=wide", "--cfg", "job", "--package", "learner.expansion"]) == 0
    assert capsys.readouterr().out == "8.0\n"
    other = mine.parent / "a, 'b'"
    (other / "experiment").mkdir(parents=True)
    (other / "experiment" / "mine.yaml").write_text("# @package _global_\ndim: 40\n")
    assert main(["train", "--config-dir", str(other), "hydra.searchpath=[my files]", "experiment=mine", "learner=wide", "--cfg"]) == 0
    assert OmegaConf.create(capsys.readouterr().out).dim == 40
    assert main(["train", "--config-dir", "my files", "experiment=mien"]) == 2
    assert "Did you mean `experiment=mine`?" in capsys.readouterr().err


def test_a_choice_that_is_stored_and_in_no_file() -> None:
    store = ConfigStore.instance()
    store.store(group="learner", name="stored", node={"defaults": ["mlp", "_self_"], "expansion": 8.0})
    try:
        assert compose("learner=stored").learner.expansion == 8.0
        with pytest.raises(MetaTTTError, match="`storde` is not a choice of learner"):
            compose("learner=storde")
    finally:
        del store.repo["learner"]


def test_what_hydra_tells(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for what, expected in (("defaults", "experiment/mine "), ("defaults-tree", "  experiment: mine"), ("searchpath", "my files")):
        assert main(["train", "--config-dir", "my files", "experiment=mine", "--info", what]) == 0
        assert expected in capsys.readouterr().out
    assert main(["train", "--cfg", "hydra"]) == 0
    assert OmegaConf.create(capsys.readouterr().out).hydra.launcher._target_.endswith("BasicLauncher")
    assert main(["train", "dim=8", "--cfg", "all", "-p", "dim"]) == 0
    assert capsys.readouterr().out.strip() == "8"
    assert main(["train", "--info", "defaults", "learner=mpl"]) == 2
    assert "Did you mean `learner=mlp`?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("metattt tr", ["train"]),
        ("metattt train layer=ttt_", ["layer=ttt_linear", "layer=ttt_mlp"]),
        ("metattt train layer=ttt_mlp learner.exp", ["learner.expansion="]),
        ("metattt train -m seed=0,1 trainer.max_st", ["trainer.max_steps="]),
        ("metattt train --config-dir my_files experiment=mi", ["experiment=mine"]),
        ("metattt nobody x", []),
        ("metattt train --config-dir", None),
    ],
)
def test_completion(
    line: str,
    expected: list[str] | None,
    mine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine.rename(mine.parent / "my_files")
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    assert expected is None or capsys.readouterr().out.split() == expected


def test_the_script_of_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shell-completion", "install=bash"]) == 0
    script = capsys.readouterr().out
    assert script.rstrip().endswith("-F hydra_bash_completion metattt")
    (tmp_path / "metattt").write_text("#!/bin/sh\necho layer=ttt_linear layer=ttt_mlp\n")  # what it asks
    (tmp_path / "metattt").chmod(0o755)
    ask = "COMP_LINE='metattt train layer=' COMP_CWORD=2; hydra_bash_completion; echo ${COMPREPLY[@]}"
    done = subprocess.run(
        ["bash", "-c", f"PATH={tmp_path}:$PATH\n{script}\n{ask}"], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "layer=ttt_linear layer=ttt_mlp", done.stderr
    assert main(["-sc", "install=nobody"]) == 2 and "bash" in capsys.readouterr().err


def test_null_leaves_an_entry_out(tmp_path: Path) -> None:
    default = compose()
    cfg = compose("callbacks.progress=null", "logger.csv=null")
    assert set(cfg.callbacks) == set(default.callbacks) - {"progress"} and not cfg.logger
    assert cfg.given == ["callbacks.progress=null", "logger.csv=null"]
    assert "logger" not in compose("logger=null") and "callbacks" not in compose("callbacks=null")
    with pytest.raises(MetaTTTError, match="`interrupt` is not a field of callbacks"):
        compose("callbacks.interrupt=null")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "quiet.yaml").write_text("# @package _global_\ncallbacks:\n  loss_curve: null\nlogger:\n  csv: null\n")
    cfg = compose("experiment=quiet", f"hydra.searchpath=[{tmp_path}]")
    assert set(cfg.callbacks) == set(default.callbacks) - {"loss_curve"} and not cfg.logger


def test_several_loggers_at_once() -> None:
    assert set(compose("logger=[tensorboard,wandb,mlflow]").logger) == {"csv", "tensorboard", "wandb", "mlflow"}
    with pytest.raises(MetaTTTError, match="choose one of csv, mlflow, tensorboard, wandb"):
        compose("logger=[csv,nobody]")


def test_a_class_beside_the_user(tmp_path: Path) -> None:
    (tmp_path / "beside_me.py").write_text(
        "from metattt.learners import Learner, Weight\n"
        "class X(Learner):\n"
        "    def weights(self, d_in, d_out):\n        return {'w': Weight((d_in, d_out))}\n"
        "    def forward(self, w, x):\n        return w.linear(x, 'w')\n"
    )
    code = (  # as the installed command: its folder comes first on the path, not the working directory
        "import sys; from metattt.cli import main; import metattt.testing\n"
        "sys.path = [entry for entry in sys.path if entry]\n"
        "from metattt.composition.compose import instantiate_layer\n"
        "metattt.testing.check = lambda cfg: print(instantiate_layer(cfg).learner)\n"
        "sys.exit(main(['check', 'learner=custom', 'learner._target_=beside_me.X', 'dim=8', 'num_heads=2']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
