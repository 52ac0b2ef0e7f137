"""What the command line shows: help, configurations, what Hydra tells, completion in a shell."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from metattt.cli import COMMANDS, main
from metattt.composition.aliases import NOT_SET_THERE
from metattt.composition.choices import groups
from metattt.composition.compose import compose


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_configuration_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"configs/{command}.yaml" in out and all(group in out for group in groups(command))
    assert main([command, "--cfg"]) == 0
    assert OmegaConf.create(capsys.readouterr().out) == compose(job=command)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter in the locale C
def test_characters_that_the_terminal_has_not_are_written_out(errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii", errors))
    assert main(["layers"]) == 0
    assert b"\\u2013" in sys.stdout.buffer.getvalue()


@pytest.mark.parametrize(("job", "given"), [
    ("train", []),
    ("train", ["layer=ttt_mlp", "learner=swiglu", "trainer=fsdp", "training=muon"]),
    ("train", ["layer=titans_mag", "callbacks=inner_warmup", "logger=wandb"]),
    ("train", ["layer=gated_delta_net", "block_style=plain", "preset=125m"]),
    ("train", ["experiment=table1/linear_attention"]),
    ("check", ["layer=longhorn"]),
])  # fmt: skip
def test_help_lists_the_keys_of_what_is_chosen(job: str, given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, with the values that the command would take: Hydra is asked. What a part's are is said."""
    assert main([job, *given, "--help"]) == 0
    listed = re.findall(r"^    ([\w.]+)=(.*?)(?:  +(.*))?$", capsys.readouterr().out, re.MULTILINE)
    assert all(said for key, _, said in listed if key.startswith(("task.", "learner.", "optimizer.", "trainer.")))
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
    assert {key: read(value) for key, value, _ in listed} == expected


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


def test_a_folder_of_ones_own(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (mine / "learner").mkdir()
    (mine / "learner" / "wide.yaml").write_text("# A wide one\ndefaults:\n  - mlp\n  - _self_\nexpansion: 8.0\n")
    for flags in (["--config-dir", "my files"], [f"--config-dir={mine}"], ["-cd", str(mine)]):
        assert main(["train", *flags, "experiment=mine", "dim=56", "--cfg", "job"]) == 0
        shown = OmegaConf.create(capsys.readouterr().out)
        assert shown.dim == 56 and shown.learner._target_.endswith("MLP")
    assert main(["train", "--config-dir", "my files", "learner=wide", "--cfg", "job", "--package", "learner.expansion"]) == 0
    assert capsys.readouterr().out == "8.0\n"
    assert main(["eval", "labels=[true,1]", "--cfg", "job", "--package", "labels"]) == 0
    assert capsys.readouterr().out == "# @package labels\n- 'true'\n- '1'\n"  # as they were typed
    assert main(["layers", "--cfg", "job", "--package", "seed"]) == 0
    assert capsys.readouterr().out == "null\n"  # which is a value
    assert main(["train", "--config-dir", "my files", "learner=wide", "--help"]) == 0
    said = capsys.readouterr().out
    assert " A wide one" in said and "learner.expansion=8.0" in said
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


@pytest.mark.parametrize(("line", "expected"), [
    ("metattt tr", ["train"]),
    ("metattt train layer=ttt_mlp learner.exp", ["learner.expansion="]),
    ("metattt train -m seed=0,1 trainer.max_st", ["trainer.max_steps="]),
    ("metattt train --config-dir my_files experiment=mi", ["experiment=mine"]),
    ("metattt train --config-dir", None),
])  # fmt: skip
def test_completion(
    line: str, expected: list[str] | None, mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine.rename(mine.parent / "my_files")
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    assert expected is None or capsys.readouterr().out.split() == expected


@pytest.mark.parametrize("words", [["--help"], ["layers"]])
def test_a_reader_that_goes_away_is_no_fault_and_a_full_disk_is_one_line(words: list[str]) -> None:
    """As `metattt ... | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "metattt", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    with open("/dev/full" if Path("/dev/full").exists() else os.devnull, "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 * (full.name == "/dev/full") and "Traceback" not in done.stderr


def test_a_closed_stderr_is_nobody_elses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As of `metattt ... 2>&-`: Python would print errors to stdout, and the next file that is opened has its number."""
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["bogus"]) == 2 and capsys.readouterr().out == ""
    assert sys.stderr is not None
