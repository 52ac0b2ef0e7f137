"""Composition: every layer config builds, a mistake costs one or two lines, the working directory does not matter."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from compositions_for_tests import remembering
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from metattt import build
from metattt.cli import COMMANDS, main
from metattt.composition import compose as composition
from metattt.composition.aliases import NOT_SET_THERE
from metattt.composition.announced import announced
from metattt.composition.choices import groups
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_layer
from metattt.composition.overrides import quote_free_text
from metattt.errors import MetaTTTError
from metattt.registry import REGISTERED, register

SMALL = ("dim=16", "num_heads=2")


def choices(group: str) -> list[str]:
    names = [file.name for file in (files("metattt.configs") / group).iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


@pytest.mark.parametrize("layer", choices("layer"))
def test_every_layer_config_runs(layer: str) -> None:
    module = build(f"layer={layer}", *SMALL)
    x = torch.randn(2, 21, 16)
    y, _ = module(x)
    assert y.shape == x.shape and y.isfinite().all()


@pytest.mark.parametrize("learner", ["linear", "linear_map", "mlp", "swiglu"])
@pytest.mark.parametrize("optimizer", ["minibatch", "online", "batch"])
def test_parts_are_chosen_freely(learner: str, optimizer: str) -> None:
    y, _ = build(f"learner={learner}", f"optimizer={optimizer}", *SMALL)(torch.randn(1, 5, 16))
    assert y.isfinite().all()


def test_layers_choose_the_parts_and_overrides_win() -> None:
    cfg = compose("layer=ttt_mlp", job="build")
    assert cfg.learner._target_.endswith("MLP") and cfg.optimizer.base_lr == 0.1 and cfg.layer.gate
    cfg = compose("layer=ttt_mlp", "learner=linear", "optimizer.base_lr=0.5", "layer.gate=false", job="build")
    assert cfg.learner._target_.endswith("Linear") and cfg.optimizer.base_lr == 0.5 and not cfg.layer.gate
    assert cfg.layer.learner == cfg.learner


def test_a_layer_is_drawn_from_the_global_generator() -> None:
    def first(*overrides: str) -> torch.Tensor:
        return next(build(*SMALL, *overrides).parameters())

    torch.manual_seed(3)
    one, two = first(), first()
    assert not torch.equal(one, two)
    torch.manual_seed(3)
    assert torch.equal(first(), one) and torch.equal(first("seed=null"), two)


def test_a_layer_by_keywords() -> None:
    named: dict[str, Any] = {"learner.trainable": ["w2", "b2"], "learner.step_scale": {"w2": 0.5}}
    named |= {"optimizer.base_lr": 1e-5, "optimizer.max_norm": None}
    one = build("ttt_mlp", dim=16, num_heads=2, seed=0, **{"layer.gate": False} | named)
    texts = ("layer=ttt_mlp", "dim=16", "num_heads=2", "seed=0", "layer.gate=false", "optimizer.max_norm=null")
    other = build(*texts, "learner.trainable=[w2,b2]", "learner.step_scale={w2: 0.5}", "optimizer.base_lr=1e-5")
    a, b = one.state_dict(), other.state_dict()
    assert repr(one) == repr(other) and a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    assert repr(build(layer="ttt_mlp", learner="linear")) == repr(build("layer=ttt_mlp", "learner=linear"))


def test_the_same_seed_gives_the_same_layer() -> None:
    generator = torch.get_rng_state()
    first, second, other = build(*SMALL, seed=0), build(*SMALL, "seed=0"), build(*SMALL, "seed=1")
    assert torch.equal(torch.get_rng_state(), generator)
    a, b = first.state_dict(), second.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    assert any(not torch.equal(a[key], value) for key, value in other.state_dict().items())
    x = torch.randn(1, 9, 16)
    assert torch.equal(first(x)[0], second(x)[0])


def test_every_block_gets_a_layer_of_its_own() -> None:
    cfg = compose(*SMALL, job="build")
    first, second = instantiate_layer(cfg), instantiate_layer(cfg)
    assert not {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}


def test_a_row_of_the_paper_is_an_experiment() -> None:
    """In a process of its own: here, other tests import the rows."""
    words = ["train", "experiment=books_4k/ttt_mlp_350m", "--cfg", "job"]
    done = subprocess.run([sys.executable, "-P", "-m", "metattt.cli", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    cfg = OmegaConf.create(done.stdout)
    assert (cfg.data.context_length, cfg.trainer.max_steps) == (4096, 13500)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["optimizer.mini_batch_size=0"], "optimizer.mini_batch_size=0 is not allowed: it must be at least 1"),
        (["learner=mlp", "learner.expansion=-1"], "learner.expansion=-1.0 is not allowed: it must be positive"),
        (["num_heads=0"], "num_heads=0 is not allowed: it must be at least 1"),
        (["dim=100", "num_heads=3"], "num_heads=3 does not divide dim=100: choose num_heads from 1, 2, 4"),
        ([f"dim={10**15}", "num_heads=3"], f"num_heads=3 does not divide dim={10**15}: choose num_heads from 1, 2, 4, 5"),
        (["layer=titans_mag", "dim=10", "num_heads=4"], "num_heads=4 does not divide dim=10: choose num_heads from 1, 2, 5, 10"),
        (["model.blocks=[mamba,attention]", "dim=9"], "num_heads=4 does not divide dim=9"),
    ],
)
def test_a_declared_range_is_checked_before_anything_is_made(overrides: list[str], expected: str) -> None:
    with pytest.raises(MetaTTTError, match=re.escape(expected)):
        compose(*overrides, job="train")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["learner.bais=1"], "`bais` is not a field of learner. Did you mean `learner.bias`?"),
        (["+learner.bais=1"], "Did you mean `learner.bias`?"),
        (["learner=mpl"], "`mpl` is not a choice of learner. Did you mean `learner=mlp`?\nChoices: "),
        (["learner.depth=3"], "Did you mean `learner=mlp learner.depth`?"),
        (["learner=mlp", "learner.depth=many"], "`learner.depth=many` is not allowed: expected an integer."),
        (["learner.bias=null"], "`learner.bias=null` is not allowed: expected true or false."),
        (["optimizer.read=inclusiv"], "previous, committed, block, final. Did you mean `optimizer.read=inclusive`?"),
        (["layer=lin"], "`lin` is not a choice of layer. Did you mean `layer=linear_attention`?"),
        (["leaner=mlp"], "Did you mean `learner`?"),
        (["mini_batch_size=8"], "Did you mean `optimizer.mini_batch_size`?"),
        (["layer.learner.bias=false"], "Did you mean `learner.bias`?"),
        (["dim=wide"], "`dim=wide` is not allowed: expected an integer."),
        (["seed=x"], "`seed=x` is not allowed"),
        (["learner.bias"], "write <key>=<value>"),
        (["dim=(a"], "cannot be read"),
        (["dim=1,2"], 'add -m (--multirun) to run `metattt build` once for each. A list is written "dim=[1,2]"'),
        (["learner=custom"], "give learner._target_=package.Class"),
        (
            ["learner=custom", "learner._target_=nowhere.Class"],
            "`learner._target_=nowhere.Class` cannot be imported: No module",
        ),
        (
            ["learner=custom", "learner._target_=fractions.Fraction", "learner.x=1"],
            "`x` is not a parameter of fractions.Fraction",
        ),
        (["layer=ttt_mlp", "optimizer=append"], "the chosen optimizer has no `base_lr`"),
        (["layer=ttt_linear", "optimizer=append"], "set optimizer=minibatch"),
    ],
)
def test_mistakes_cost_one_or_two_lines(overrides: list[str], expected: str) -> None:
    with pytest.raises(MetaTTTError) as caught:
        build(*overrides)
    message = str(caught.value)
    assert expected in message
    assert message.count("\n") <= 1


def test_choices_of_nothing() -> None:
    assert compose("preset=null") == compose("experiment=null") == compose()
    for override in ("learner=null", "preset=125", "trainer=true"):
        with pytest.raises(MetaTTTError, match=f"`{override}` is not allowed: choose one of "):
            compose(override)


def test_errors_of_the_parts_pass_through() -> None:
    with pytest.raises(MetaTTTError, match="num_heads"):
        build("dim=16", "num_heads=3")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["check", "learner.bais=1"], "Did you mean `learner.bias`?"),
        (["check", "learner=mpl"], "Did you mean `learner=mlp`?"),
        (["check", "optimizer.mini_batch_size=big"], "expected an integer"),
        (["chekc"], "Did you mean `metattt check`?"),
        (["check", "--learner=mlp"], "settings are given as learner=mlp, without dashes"),
    ],
)
def test_exit_code_2_without_a_traceback(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and expected in captured.err and "Traceback" not in captured.err
    assert captured.err.count("\n") <= 2


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_groups_and_choices(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"configs/{command}.yaml" in out
    if command in ("train", "check"):
        for choice in ("ttt_mlp", "kernel_estimator", "minibatch", "reconstruction"):
            assert choice in out


def test_help_is_fast() -> None:
    code = "import sys; from metattt.cli import main; main(['--help']); main(['train', '--help'])\n"
    code += "assert 'torch' not in sys.modules and 'hydra' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("job", "given"),
    [
        ("train", []),
        ("train", ["layer=delta_product"]),
        ("train", ["layer=ttt_mlp", "learner=swiglu", "trainer=fsdp", "training=muon"]),
        ("train", ["layer=titans_mag", "callbacks=inner_warmup", "logger=wandb"]),
        ("train", ["model=ttt_e2e", "data=shards"]),
        ("train", ["layer=gated_delta_net", "block_style=plain", "preset=125m"]),
        ("train", ["experiment=digits_pixel"]),
        ("train", ["experiment=table1/linear_attention"]),
        ("check", ["layer=longhorn"]),
        ("bench", ["layer=ttt_mlp"]),
    ],
)
def test_help_lists_the_keys_of_what_is_chosen(job: str, given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, with the values that the command would take: Hydra is asked."""
    assert main([job, *given, "--help"]) == 0
    listed = re.findall(r"^    ([\w.]+)=(.*?)(?:  .*)?$", capsys.readouterr().out, re.MULTILINE)
    expected: dict[str, Any] = {}

    def read(text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            return yaml.safe_load(text)

    def flatten(node: Any, prefix: str) -> None:
        for key, value in node.items() if isinstance(node, dict) else ():
            name = f"{prefix}.{key}"
            if isinstance(value, dict) and value:
                flatten(value, name)
            elif name not in NOT_SET_THERE and not key.startswith("_"):
                expected[name] = value

    cfg = OmegaConf.to_container(compose(*given, job=job))
    assert isinstance(cfg, dict)
    for group in groups(job):
        flatten(cfg.get(group), group)
    assert {key: read(value) for key, value in listed} == expected


def test_help_of_a_plug_in_and_of_a_folder(tmp_path: Path) -> None:
    learner = tmp_path / "waves" / "configs" / "learner"
    learner.mkdir(parents=True)
    (tmp_path / "waves" / "__init__.py").write_text(
        "from metattt.learners import Linear\nfrom metattt.registry import register\n\n\n"
        "@register('learner', 'wave')\nclass Wave(Linear):\n    def __init__(self, bends: int = 3):\n        pass\n"
    )
    (learner / "wave.yaml").write_text("# Waves\ndefaults:\n  - /schema/learner/wave@_here_\n")
    (tmp_path / "mine" / "layer").mkdir(parents=True)
    text = "# @package _global_\n# Of mine\ndefaults:\n  - delta_net\n  - override /learner: wave\n  - _self_\nlearner:\n  bends: 5\n"
    (tmp_path / "mine" / "layer" / "bent.yaml").write_text(text)
    info = tmp_path / "waves-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: waves\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[metattt.components]\nw = waves\n[metattt.configs]\nw = waves.configs\n")
    code = (
        "import sys; from metattt.cli import main\n"
        "assert main(['train', '--config-dir', 'mine', '--help']) == 0\n"
        "assert not {'torch', 'hydra', 'waves'} & set(sys.modules)\n"
        "assert main(['train', '--config-dir', 'mine', 'layer=bent', '--help']) == 0"
    )
    paths = os.pathsep.join((str(tmp_path), str(Path(__file__).resolve().parents[2])))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for expected in (" Of mine", " Waves", "learner.bends=5", "optimizer.lr_scale=none", "layer.output_norm=head_rms"):
        assert expected in done.stdout


def test_help_of_what_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "learner=mpl", "--help"]) == 2
    assert "Did you mean `learner=mlp`?" in capsys.readouterr().err


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: str, job: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("metattt.composition.compose.compose", interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == ""


def test_working_directory_does_not_matter(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = compose(job="build")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "build.yaml").write_text("dim: 7\n")
    monkeypatch.chdir(tmp_path)
    assert compose(job="build") == before


def test_composes_inside_another_hydra_application() -> None:
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_module("metattt.configs", version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        compose(job="build")
        assert GlobalHydra.instance().hydra is outer


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):",
        "",
        "a=b",
        "it's",
        '"',
        "'",
        "\\",
        "a\\'b",
        "two\nlines\t",
        "[1]",
        "1",
        "true",
        "${x}",
        "\\${x} '",
        "${",
        "a, b",
        "  x ",
        "é",
    ],
)
def test_free_text_is_taken_as_written(text: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    value = OverridesParser.create().parse_overrides([quote_free_text(f"prompt={text}")])[0].value()
    cfg = OmegaConf.create({"prompt": "???"})
    OmegaConf.update(cfg, "prompt", value)
    assert cfg.prompt == text


def test_overrides_that_are_not_text_are_left_alone() -> None:
    for override in ("checkpoint=null", "prompt='quoted'", "data.path=['a',b]", "data.path=[]", "learner.depth=3", "~prompt", "prompt"):
        assert quote_free_text(override) == override
    assert quote_free_text("checkpoint=/a=b/x.ckpt") == "checkpoint='/a=b/x.ckpt'"
    assert quote_free_text("checkpoint=[/a=b/x, c d]") == "checkpoint=['/a=b/x','c d']"
    assert quote_free_text("checkpoint=/a=b/x,'c, d'", sweep=True) == "checkpoint='/a=b/x','c, d'"
    assert quote_free_text("checkpoint=glob(*)", sweep=True) == "checkpoint=glob(*)"


def test_a_registered_constructor_names_its_parameters() -> None:
    class Greedy:
        def __init__(self, **options: int):
            self.options = options

    with pytest.raises(MetaTTTError, match="options"):
        register("learner", "greedy")(Greedy)
    assert ("learner", "greedy") not in REGISTERED
    with pytest.raises(MetaTTTError, match="already registered"):
        register("learner", "linear")(Greedy)


@pytest.mark.parametrize("name", ["linear_attention", "linear_attention_elu", "attention", "delta_net"])
def test_known_layers_are_what_their_names_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build(f"layer={name}", *SMALL).double()
    seen: list[Any] = []
    for part, method in ((layer.task, "views"), (layer.optimizer, "gates")):
        original = getattr(part, method)

        def record(*arguments: Any, original: Callable[..., Any] = original) -> Any:
            seen.append((result := original(*arguments))[0])
            return result

        monkeypatch.setattr(part, method, record)
    layer.norm, layer.out = None, torch.nn.Identity()
    y, _ = layer(torch.randn(2, 37, 16, dtype=torch.float64))
    (k, v, q), gates = seen[0][:3], seen[1]  # [B, H, T, d]

    if name == "attention":
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    elif name == "delta_net":
        W, outputs = torch.zeros(2, 2, 8, 8, dtype=torch.float64), []
        for t in range(37):
            error = k[:, :, t, None] @ W - v[:, :, t, None]
            W = W - gates.eta[:, :, t, None, None] * k[:, :, t, :, None] @ error
            outputs.append(q[:, :, t, None] @ W)
        expected = torch.cat(outputs, dim=2)
    else:
        expected = (q @ k.mT).tril() @ v
    y = y.unflatten(2, (2, 8)).transpose(1, 2)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-12)


def test_what_packages_announce_is_read_again_when_one_comes_or_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a notebook installs one: the folders of `sys.path` say that something is new."""
    monkeypatch.syspath_prepend(tmp_path)
    before = announced("metattt.configs")
    assert announced("metattt.configs") is before
    info = tmp_path / "another-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[metattt.configs]\nanother = another.configs\n")
    assert {entry.value for entry in announced("metattt.configs")} == {entry.value for entry in before} | {"another.configs"}
    shutil.rmtree(info)
    assert announced("metattt.configs") == before
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "nowhere")])
    assert announced("metattt.configs") == before


def test_only_layers_with_heads_are_asked_for_them() -> None:
    assert compose("layer=mamba", "dim=9").dim == compose("model.blocks=[mamba]", "dim=9").dim == 9


def test_what_tests_remember_is_what_hydra_composes() -> None:
    """See `compositions_for_tests`: the same text, types and refusals, and nobody sees what another has changed."""
    compose("layer=ttt_mlp")  # what can be composed is known
    hydra, asked = composition._compose.plain, []  # type: ignore[attr-defined]

    def counted(overrides: list[str], job: str) -> tuple[DictConfig, DictConfig]:
        asked.append(overrides)
        return hydra(overrides, job)

    remembered = remembering(counted)
    for folder in ("/a", "runs/b c"):
        overrides = ["layer=ttt_mlp", f"output_dir='{folder}'", "data.path='/d/e.txt'", "trainer.max_steps=3"]
        found, expected = remembered(overrides, "train"), hydra(overrides, "train")
        assert found == expected and OmegaConf.to_yaml(found[0]) == OmegaConf.to_yaml(expected[0])
        assert OmegaConf.is_struct(found[0]) == OmegaConf.is_struct(expected[0])
        assert OmegaConf.get_type(found[0], "layer") == OmegaConf.get_type(expected[0], "layer")
        found[0].dim = 3
    assert len(asked) == 1
    twice = ["data.path='/a'", "data.path=['/a','/b']"]
    assert remembered(twice, "train") == hydra(twice, "train")
    for overrides in (["data=digits", "data.path='/a'"], ["output_dir='a'", "trainer.nothing=3"]):
        said = []
        for compose_ in (remembered, hydra):
            with pytest.raises(HydraException) as error:
                compose_(overrides, "train")
            said.append(str(error.value))
        assert said[0] == said[1]


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["layers"], ["train", "--cfg"]])
def test_a_reader_that_goes_away_is_no_fault(words: list[str]) -> None:
    """As `metattt ... | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "metattt.cli", *words], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
