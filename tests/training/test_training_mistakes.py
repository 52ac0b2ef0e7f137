"""Mistakes that show only when a run begins cost a line and exit code 2; and what a run's folder is called and says."""

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from metattt.cli import main
from metattt.composition.compose import compose
from metattt.data.documents import find_files
from metattt.data.sources import is_local
from metattt.errors import MetaTTTError

TINY = [
    "train", "dim=8", "num_heads=2", "model.num_layers=1", "model.ffn_dim=8", "data.context_length=16", "data.batch_size=2",
    "data.validation_max_bytes=200", "trainer.max_steps=1", "trainer.accelerator=cpu",
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with some text in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for name in "abcdefgh":
        (tmp_path / "text" / f"{name}.txt").write_text(f"{name} is a letter of the alphabet. " * 20)
    (tmp_path / "file").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("training=timm", "TimmRecipe is for images: set training=adamw"),
        ("trainer.max_steps=0", "trainer.max_steps=0 trains nothing"),
        ("trainer.overfit_batches=1", "data.max_bytes=<few>"),
        ("output_dir=file", "output_dir=file cannot be used: it is a file"),
        ("output_dir=file/below", "output_dir=file/below cannot be used: Not a directory"),
        ("output_dir=/proc/nobody/may", "output_dir=/proc/nobody/may cannot be used: "),
        ("data.path=nowhere", "data.path="),
    ],
)
def test_one_line(given: str, expected: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "data.path=text", "output_dir=run", given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and expected in error and error.count("\n") == 1


def test_a_model_for_images_and_text(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "model=vision_transformer", "preset=none", "data.path=text", "output_dir=run"]) == 2
    assert "text needs a language model: set model=language_model" in capsys.readouterr().err


def test_a_key_that_was_taken_away(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "data.path=text", "~compile"]) == 2
    error = capsys.readouterr().err
    assert "`~compile` takes away what `metattt train` needs: choose or set another with compile=<value>" in error


def test_a_full_disk(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def half_way(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 267264 vs 267152")

    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "run/metrics.csv")

    for fault, expected in (
        (half_way, "the disk is full"),
        (no_space, "run/metrics.csv: No space left on device: free some"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("lightning.Trainer.save_checkpoint", fault)
            assert main([*TINY, "data.path=text", "output_dir=run", "overwrite=true"]) == 2
        error = capsys.readouterr().err
        assert f"error: {error.rpartition('error: ')[2]}" in error and expected in error and "Traceback" not in error


def test_a_bug_keeps_its_traceback(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bug(*_: Any, **__: Any) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr("metattt.training.train.train", bug)
    assert main(["train"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: RuntimeError: shapes do not fit") and len(error.splitlines()) == 1
    written = Path(error.rpartition("the traceback is in ")[2].strip())
    assert "in bug" in written.read_text() and "RuntimeError: shapes do not fit" in written.read_text()
    written.unlink()


@pytest.mark.parametrize(
    ("given", "name"),
    [(["layer=delta_net"], "delta_net"), (["layer=custom", "learner=mlp"], "mlp"), (["name=my run"], "my run")],
)
def test_the_folder_of_a_run(given: list[str], name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY[:-1], "data.path=text", *given, "~callbacks", "~logger"]) == 0
    (folder,) = (here / "runs").iterdir()
    assert folder.name.endswith(f"-{name}")
    saved = OmegaConf.load(folder / "run.yaml")
    assert saved.name == name and saved.output_dir == f"runs/{folder.name}" and saved.dim == 8
    assert "${" not in (folder / "run.yaml").read_text()
    capsys.readouterr()
    assert main(["eval", f"checkpoint={folder}"]) == 0  # it is a run's folder, whatever else lies in it
    shutil.rmtree(folder / "checkpoints" / "step-00000001")
    assert main(["eval", f"checkpoint={folder}"]) == 2
    assert "holds no checkpoints" in capsys.readouterr().err


def test_names_do_not_depend_on_how_a_layer_was_chosen() -> None:
    assert compose().name == "ttt_linear"
    assert compose("experiment=digits_pixel").name == "mttt_mlp"
    assert "name" not in compose(job="build")


def test_shards_without_data_shards(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(MetaTTTError, match="holds shards of metattt prepare, not text: add data=shards"):
        find_files(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.jsonl.gz", "json"), ("a.txt.zst", "text"), ("a.gz", "text"), ("a.csv", "csv"), ("a.png", None)],
)
def test_a_format_that_is_read_another_way(name: str, kind: str | None, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(MetaTTTError) as caught:
        find_files(str(tmp_path / name), "source")
    way = f"metattt prepare source={kind} dataset_files={tmp_path / name} "
    assert (way in str(caught.value)) == (kind is not None) and str(caught.value).count("\n") <= 1


def test_a_path_is_not_asked_for_at_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for path in ("data/typo", "./typo", "/typo", "~/typo", "typo.txt", "typo.jsonl.gz", "a/b/c", "data", "typo/"):
        assert is_local(path), path
    for name in ("allenai/c4", "imdb", "teknium/OpenHermes-2.5"):
        assert not is_local(name), name
