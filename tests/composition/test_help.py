"""What the command line shows: help, configurations, what Hydra tells."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from metattt.cli import COMMANDS, main
from metattt.composition.choices import groups
from metattt.composition.compose import compose
from metattt.errors import MetaTTTError


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_configuration_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"configs/{command}.yaml" in out and all(group in out for group in groups(command))
    assert main([command, "--cfg"]) == 0
    assert OmegaConf.create(capsys.readouterr().out) == compose(job=command)


def test_the_list_of_commands_waits_for_no_library() -> None:
    code = "import sys; from metattt.cli import main; main(['--help'])\n"
    code += "assert 'torch' not in sys.modules and 'hydra' not in sys.modules; main(['train', '--help'])\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_help_lists_the_keys_of_what_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "layer=gated_delta_net", "block_style=plain", "preset=125m", "dim=36", "--help"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for expected in (
        "layer=gated_delta_net",  # the title of its keys
        "layer.output_norm=true before the output projection: true (LayerNorm",  # said in another file of the group
        "training.lr=0.003 peak learning rate",
        "callbacks.divergence.on_divergence=${on_divergence} stop, skip",
        "task.short_conv=null taps of convolutions",  # block_style's
        "model.num_layers=12",  # preset's
    ):
        assert any(line.startswith(expected) for line in lines), expected
    assert not any(line.startswith(("model.layer=", "layer.learner")) for line in lines)  # which are not set there
    assert main(["train", "-m", "seed=0,1", "--help"]) == 0  # of a sweep as of a run


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
        "assert main(['train', '--config-dir', 'mine', 'layer=bent', '--help']) == 0"
    )
    paths = os.pathsep.join((str(tmp_path), str(Path(__file__).resolve().parents[2])))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for expected in (" Of mine", " Waves", "learner.bends=5", "optimizer.lr_scale=none", "layer.output_norm=head_rms"):
        assert expected in done.stdout


def test_cfg_prints_what_would_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-c", "job", "layer=ttt_mlp", "dim=32"]) == 0
    shown = OmegaConf.create(capsys.readouterr().out)
    assert shown == compose("layer=ttt_mlp", "dim=32") and shown.data._get_node("seed")._is_interpolation()
    assert main(["train", "dim=32", "--cfg", "--resolve"]) == 0
    assert "${" not in capsys.readouterr().out


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my files" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - override /learner: mlp\n  - _self_\ndim: 48\n"
    (tmp_path / "my files" / "experiment" / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "my files"


@pytest.mark.parametrize("form", ["[file://{0}]", "[my files]"])
def test_files_of_ones_own(mine: Path, form: str) -> None:
    cfg = compose("experiment=mine", f"hydra.searchpath={form.format(mine)}")
    assert cfg.dim == 48 and cfg.learner._target_.endswith("MLP") and "hydra" not in cfg
    with pytest.raises(MetaTTTError, match="`bais` is not a field of learner"):
        compose("experiment=mine", f"hydra.searchpath={form.format(mine)}", "learner.bais=1")


def test_a_folder_of_ones_own(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine / "learner").mkdir()
    (mine / "learner" / "wide.yaml").write_text("# A wide one\ndefaults:\n  - mlp\n  - _self_\nexpansion: 8.0\n")
    for flags in (["--config-dir", "my files"], [f"--config-dir={mine}"], ["-cd", str(mine)]):
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


def test_what_hydra_tells(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for what, expected in (("defaults", "experiment/mine "), ("defaults-tree", "  experiment: mine"), ("searchpath", "my files")):
        assert main(["train", "--config-dir", "my files", "experiment=mine", "--info", what]) == 0
        assert expected in capsys.readouterr().out
    assert main(["train", "--cfg", "hydra"]) == 0
    assert OmegaConf.create(capsys.readouterr().out).hydra.launcher._target_.endswith("BasicLauncher")
    assert main(["train", "dim=8", "--cfg", "all", "-p", "dim"]) == 0
    assert capsys.readouterr().out.strip() == "8"


@pytest.mark.parametrize("words", [["--help"], ["layers"]])
def test_a_reader_that_goes_away_is_no_fault(words: list[str]) -> None:
    """As `metattt ... | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "metattt.cli", *words], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
