"""What a newcomer types: every suggestion that a message makes is itself accepted, a message is one or two lines, and none
waits for torch."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from hydra.core.config_store import ConfigStore
from hydra.utils import get_class
from omegaconf import OmegaConf
from processes_for_tests import fresh
from refusals_for_tests import refusal

from metattt import build
from metattt.cli import main
from metattt.composition import components
from metattt.composition.aliases import KEYS
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model, instantiate_part
from metattt.composition.messages import known_keys
from metattt.composition.signatures import Unreadable, constructor, registered
from metattt.registry import PARAMETERS, REGISTERED, register, version_of

TYPICAL = [  # a mistake, and what it should have been
    ("optimizer=momentum optimizer.token_steps=shared", "optimizer=minibatch optimizer.token_steps"),
    ("optimizer.momentum=per_head", "optimizer=momentum optimizer.momentum"),
    ("learner.bais=true", "learner.bias"),
    ("leaner=mlp", "learner"),
    ("experiment=digits_pixel training.warmup_fraction=1", "training.warmup_steps"),
    ("LR=0.1", "training.lr"),
    ("optimizer.lr=0.1", "optimizer.base_lr=0.1"),
    ("num_layers=3", "model.num_layers"),
    ("model.hidden_size=32", "dim"),
    ("ckpt=runs/x", "resume"),
    ("trainer.num_sanity_val_step=1", "trainer.num_sanity_val_steps"),
    ("layer=mlp", "learner=mlp"),
    ("layer=lin", "layer=linear_attention"),
    ("learner.depth=3", "learner=mlp learner.depth"),
    ("+learner.bais=true", "learner.bias"),
    ("~callbacks.progres", "callbacks.progress"),
    ("+callbacks=inner_warmup", "callbacks"),
]


@pytest.mark.parametrize(("typed", "expected"), TYPICAL)
def test_suggestions_are_accepted(typed: str, expected: str) -> None:
    overrides = typed.split()
    said = refusal(lambda: compose(*overrides))
    suggested = re.search(r"Did you mean `(.*?)`\?", said)
    assert suggested and suggested[1] == expected, said
    *words, last = suggested[1].split()
    wrong = overrides[-1]
    compose(*overrides[:-1], *words, f"~{last}" if wrong.startswith("~") else last if "=" in last else f"{last}={wrong.partition('=')[2]}")


def test_the_table_of_names_points_at_keys_that_exist() -> None:
    composed = [*(compose(job=job) for job in ("train", "eval", "generate", "prepare", "convert")), compose("layer=window_attention")]
    composed.append(compose("model=vision_transformer", "data=images", "training=timm"))
    known = {key for cfg in composed for key in known_keys(cfg).values()}
    assert not set(KEYS) - known


MESSAGES = {  # what is typed, and what the message says
    "learning-rate=0.1": "",  # no word of Hydra's
    "lr=1": "(`optimizer.base_lr` is that of the inner loop",
    "layer.learner.depth=3": "`depth` is not a field of learner. Did you mean `learner=mlp learner.depth`?",
    "layer.optimizer.base_lr=1": "`base_lr` is not a field of layer.optimizer. Did you mean `optimizer.base_lr`?",
    "layer=mamba optimizer.base_lr=1": "this layer has no optimizer: leave out what sets it",
    "model.blocks=ttt_mlp+mamba optimizer.base_lr=1": "for some, model.blocks.<layer>.optimizer.base_lr=1",
    "=3": "`=3` is not an override: write <key>=<value>",
    "optimizer@foo=adam": "Could not override 'optimizer@foo'",
    "dim=": "as from an unset variable: give one, or leave it out",
    "learner.bias": "write <key>=<value>, a value with spaces in quotes",
    "dim=(a": "cannot be read",
    "learner.bias=null": "`learner.bias=null` is not allowed: expected true or false.",
    "model.blocks=[mamba,attention] dim=9": "num_heads=4 does not divide dim=9",
    "learner=null": "`learner=null` is not allowed: choose one of ",
    "optimizer=adamw": "`adamw` is not a choice of optimizer, the inner optimizer. The outer one is `training=adamw`",
    "layer=ttt_mlp optimizer=append": "the chosen optimizer has no `base_lr`",
    "callbacks=mine": "hydra.searchpath=[<folder>], where the folder has callbacks/mine.yaml",
    "dim=1,2": 'add -m (--multirun) to run `metattt train` once for each. A list is written "dim=[1,2]"',
    "logger=csv,wandb": 'for each. A list is written "logger=[csv,wandb]"',
    "trainer.logger=false": "~logger leaves it out",
    "recipe=nobody": "recipe=nobody is not allowed: it must be 125m, 1b, 350m, 760m",
    "preset=tiny model=vision_transformer": "sets `model.num_layers`, but the chosen model has no `num_layers`.\nLeave out preset=tiny",
    "~model.vocab_size": "cannot be removed",
    "~callbacks callbacks.progress.lines=3": "`callbacks` is not a key of `metattt train`. It has: ",
    "callbacks.say._target_=my.Callback": "To add one, write `+callbacks.say._target_=<class>`.",
    "logger=none": "is not a choice of logger: ~logger leaves it out",
    "callbacks.loss_curve.metric=loss": "For another argument of its class, write `+callbacks.loss_curve.metric=<value>`.",
    "logger.say._target_=my.Logger": "To add one, write `+logger.say._target_=<class>`.",
    "data._target_=my.Data data.batch_sise=3": "my.Data has no schema: did you mean `data.batch_size`? For another setting, write `++data",
    "text=a.txt": "`text` is not chosen by name in `metattt train`",
    "~data": "`~data` removes what `metattt train` needs",
}


@pytest.mark.parametrize(("typed", "expected"), MESSAGES.items())
def test_messages_say_the_way(typed: str, expected: str) -> None:
    refusal(lambda: compose(*typed.split()), expected)


def test_a_key_of_a_job_that_makes_nothing() -> None:
    for given, expected in {"stop=.": "expected a list, each element a text", "top_k=a": "expected an integer or null"}.items():
        refusal(lambda given=given: compose("checkpoint=x", given, job="generate"), f"`{given}` is not allowed: {expected}.")
    refusal(lambda: compose("recipe=null", job="eval"), "`recipe` is not chosen by name in `metattt eval`: the checkpoint says")


@pytest.mark.parametrize(("overrides", "expected"), [
    ("layer=ttt_linear optimizer=append", "set optimizer=minibatch"),
    ("layer.direction=both", "`direction=`, without `layer.`"),
    ("learner=custom", "give learner._target_=package.Class"),
    ("learner=custom learner._target_=nowhere.X", "`learner._target_=nowhere.X` cannot be imported: No module"),
    ("learner=custom learner._target_=fractions.Fractoin", "fractions has no Fractoin. Did you mean `learner._target_=fractions.Frac"),
    ("learner._target_=fractions.Fraction", "learner=custom has no settings but yours"),
    ("learner=custom learner._target_=datetime.date", "datetime.date raised TypeError"),
    ("learner=custom learner._target_=metattt.learners.MLP learner.dept=3", "argument 'dept'. Did you mean depth?"),
])  # fmt: skip
def test_what_shows_when_a_layer_is_built(overrides: str, expected: str) -> None:
    """Words of Hydra are parsed here. They change with a release, and then these fail: "raised while composing config",
    "Error locating target", "Error in call to target" with an unexpected or missing argument, "full_key"."""
    refusal(lambda: build(*overrides.split(), "dim=16", "num_heads=2"), expected)


def test_a_class_that_speaks_of_memory_keeps_its_words() -> None:
    given = ("learner=custom", "learner._target_=fractions.Fraction", "learner.numerator='not enough memory slots'")
    refusal(lambda: build(*given, "dim=16", "num_heads=2"), "raised ValueError: ", "not enough memory slots")


def test_a_model_that_takes_no_layers() -> None:
    cfg = compose("dim=16", "num_heads=2")
    cfg.model = {"_target_": "torch.nn.Linear", "in_features": 4, "out_features": 4}
    refusal(lambda: instantiate_model(cfg), "model._target_=torch.nn.Linear: got an unexpected keyword argument 'layer'")


def test_a_layer_that_nothing_makes() -> None:
    cfg = compose("dim=16", "num_heads=2")
    cfg.layer = {"gate": True}  # what `base/ttt_layer@layer` is missing for
    refusal(lambda: instantiate_model(cfg), "nothing says what layer is: give layer._target_, or")
    entries = OmegaConf.create({"callbacks": {"mine": {"every": 3}}})
    said = refusal(lambda: instantiate_part(entries.callbacks, "mine"), "give callbacks.mine._target_")
    assert said.endswith("metattt/configs/callbacks")
    cfg.layer = "???"
    refusal(lambda: instantiate_model(cfg), "`layer` has no value")


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("metattt.composition.compose.compose", Mock(side_effect=KeyboardInterrupt))
    assert main(["train"]) == 130
    assert capsys.readouterr().err == ""


def test_a_value_that_points_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "checkpoint=${x}"]) == 2
    said = "error: checkpoint: Interpolation key 'x' not found: set checkpoint=<value>, or leave out what asks for it\n"
    assert capsys.readouterr().err == said


def test_a_mistake_and_help_do_not_wait_for_torch() -> None:
    typed = ("train learner.bais=1", "train learner=mpl", "train dim=100 num_heads=3", "check lr=3", "train model.layer=x", "eval ckpt=x")
    words = [one.split() for one in typed]
    code = f"import sys; from metattt.cli import main; codes = [main(words) for words in {words}]; assert set(codes) == {{2}}, codes\n"
    code += "main(['train', '--cfg'])\nassert not {'torch', 'lightning', 'timm'} & set(sys.modules)"
    asked = "import sys; from metattt.cli import main\n"
    asked += "assert not main(['--help']) | main(['train', '--hydra-help']) | main(['train', '--help'])\n"
    fresh([], [code, asked + "assert not {'torch', 'hydra'} & set(sys.modules)"])


def test_arguments_of_the_trainer_need_no_plus() -> None:
    assert compose("trainer.detect_anomaly=true", "trainer.max_time=00:01:00:00").trainer.detect_anomaly is True
    assert compose("+trainer.detect_anomaly=true").trainer == compose("trainer.detect_anomaly=true").trainer
    from lightning import Trainer

    read = [one.name for one in constructor("lightning.pytorch.trainer.trainer", "Trainer")]
    assert read == list(PARAMETERS["lightning.Trainer"]) == list(Trainer.__init__.__annotations__)[:-1]


# -- constructors read from their source -------------------------------------------------------------------------------


def _schemas() -> dict[tuple[str, str], dict[str, object]]:
    stored = ConfigStore.instance().repo["schema"]
    found = {}
    for group, name in [(one, name) for one in stored for name in stored[one]]:
        entry = stored[group][name].node
        nodes = {key: entry._get_node(key) for key in entry}
        found[group, name] = {key: (repr(x._metadata.ref_type), x._metadata.optional, str(x)) for key, x in nodes.items()}
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
    assert kind.default is module.default is None and "'a', 'b'" in str(kind.annotation)
    assert sizes.default == (1, 2) and one.kind is one.KEYWORD_ONLY


@pytest.mark.parametrize("text", [
    "@register('learner', 'x')\nclass X(make_base()): ...\n",
    "@register('learner', 'x')\nclass X:\n    def __init__(self, n: int = sum(SIZES)): ...\n",
    "from nowhere_at_all import Base\n@register('learner', 'x')\nclass X(Base): ...\n",
    "class X(",
])  # fmt: skip
def test_what_cannot_be_read_is_left_to_an_import(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"unreadable_{abs(hash(text))}"
    (tmp_path / f"{module}.py").write_text(text)
    with pytest.raises(Unreadable):
        list(registered(module))
