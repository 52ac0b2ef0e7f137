"""A checkpoint on the disk: what is written is read, what is damaged is named, what a file may not say is refused, and
a kill leaves the old one or the new one."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from omegaconf import OmegaConf
from refusals_for_tests import refusal
from runs_for_tests import assert_equal
from safetensors import safe_open
from torch import Tensor

from metattt.checkpoints import folder as folders
from metattt.checkpoints import rolling
from metattt.checkpoints.files import check_new, find_checkpoint, home, read_content
from metattt.checkpoints.folder import CONTENT, NEW, WEIGHTS, load_parts, verify, write_checkpoint, write_model
from metattt.checkpoints.record import (
    RECORD,
    VERSION,
    check_amounts,
    checked_record,
    make_record,
    modules,
    record_config,
    to_targets,
)
from metattt.checkpoints.tensors import put_together, read_described, take_apart, write_tensors
from metattt.checkpoints.trained import check_numbers, load_model
from metattt.composition.compose import compose
from metattt.errors import MetaTTTError
from metattt.io import check_own, checksum, seal

SMALL = ("dim=8", "num_heads=2", "model.num_layers=1", "model.ffn_dim=16", "model.vocab_size=16")


def content(seed: int = 0, tokenizer: str | None = None) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(seed)
    weights = {"a": torch.randn(3, 4, generator=drawn), "b": torch.randn(5, generator=drawn).bfloat16()}
    state = {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 4, generator=drawn), "count": 7}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.95)}]
    record = {"version": VERSION, "config": {"dim": 8}}
    return {
        RECORD: record | {"tokenizer": tokenizer}, WEIGHTS: weights, "global_step": 4 + seed,
        "optimizer_states": [{"state": state, "param_groups": groups}],
        "callbacks": {
            "random": {"python": (3, (1, 2), None), "torch": torch.arange(6, dtype=torch.uint8)},
            "own": {"$x": float("inf"), "listed": [True, {}, ((2,), [])], "state": {"mean": torch.arange(2.0)}},
        },
    }  # fmt: skip


def read(folder: Path) -> dict[str, Any]:
    """What is in a checkpoint without its record."""
    return others(read_content(folder))


def others(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != RECORD}


# -- plain data and tensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [object(), {"a": {1, 2}}, [lambda: 0], b"bytes"])
def test_what_is_not_plain_is_refused_by_its_place(node: Any) -> None:
    refusal(lambda: take_apart({"callbacks": node}, {}), "a checkpoint cannot hold")


@pytest.mark.parametrize("node", [{1: torch.zeros(2), "1": torch.ones(3)}, {"a/b": torch.zeros(2), "a": {"b": torch.ones(3)}}])
def test_tensors_whose_places_read_alike_stay_two(node: Any) -> None:
    tensors: dict[str, Tensor] = {}
    assert_equal(put_together(take_apart(node, tensors), tensors), node)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bool, torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_tensors_of_any_type(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.ones(3, 2).to(dtype), "none": torch.ones(0, 2).to(dtype), "number": torch.ones(()).to(dtype)}
    write_tensors(tmp_path / "a", tensors)
    found, _ = read_described(tmp_path / "a")
    assert all(torch.equal(found[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in ("a", "none"))
    assert found["number"].dtype == dtype and found["number"].shape == ()


def test_views_are_written_as_they_are_seen(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    tensors = {"column": base[:, 1], "turned": base.t(), "row": base[1]}
    write_tensors(tmp_path / "a", tensors)
    write_checkpoint(tmp_path / "b", content() | {WEIGHTS: tensors | {"tied": tensors["row"]}})
    wanted = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert_equal(read_described(tmp_path / "a")[0], wanted)
    assert_equal(read(tmp_path / "b")[WEIGHTS], wanted | {"tied": wanted["row"]})
    with safe_open(tmp_path / "b" / "model.safetensors", "pt") as opened:
        assert sorted(opened.keys()) == ["column", "row", "turned"]


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_there_and_back(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", content(tokenizer="a tokenizer"))
    assert_equal(read(tmp_path / "one"), others(content()))
    assert folders.read_tokenizer(tmp_path / "one") == "a tokenizer" and read_content(tmp_path / "one")[RECORD]["config"] == {"dim": 8}
    plain, small = read_content(tmp_path / "one", "none"), read_content(tmp_path / "one", "small")
    assert all(WEIGHTS not in one and one["optimizer_states"][0]["state"] == {0: {"count": 7}} for one in (plain, small))
    assert "torch" not in plain["callbacks"]["random"]
    assert torch.equal(small["callbacks"]["random"]["torch"], torch.arange(6, dtype=torch.uint8))
    assert torch.equal(small["callbacks"]["own"]["state"]["mean"], torch.arange(2.0))
    assert list(read_content(tmp_path / "one", "weights")[WEIGHTS]) == ["a", "b"]
    write_model(tmp_path / "two", content()[RECORD], content()[WEIGHTS], None)
    assert home(tmp_path / "two") == tmp_path / "two" and home(tmp_path / "one") == tmp_path
    verify(tmp_path / "one")


def test_every_byte_of_a_checkpoint_is_covered(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", content(tokenizer="text"))
    for file in sorted((tmp_path / "one").iterdir()):
        whole = file.read_bytes()
        for place in range(0, len(whole), 1 + len(whole) // 150):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            refusal(lambda: read_content(tmp_path / "one"), str(file), lines=1)
        file.write_bytes(whole[:-3])
        refusal(lambda: read_content(tmp_path / "one", "none"), str(file))
        file.write_bytes(whole)
    shutil.copy(tmp_path / "one" / "model.safetensors", tmp_path / "one" / "more.safetensors")
    refusal(lambda: read_content(tmp_path / "one"), "holds more.safetensors, which is not of this checkpoint")
    for name in ("training.safetensors", CONTENT):  # the latter after its path was found
        (tmp_path / "one" / name).unlink()
        refusal(lambda: read_content(tmp_path / "one", "none"), f"{name} is missing")


def killed_at(moment: int, folder: Path) -> bool:
    """Writes a checkpoint in a process that is killed at its n-th call that changes the disk; whether it was."""
    if pid := os.fork():
        return os.waitpid(pid, 0)[1] != 0
    left = [moment]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **kwargs: Any) -> Any:
            if not left[0]:
                os._exit(1)
            left[0] -= 1
            return call(*args, **kwargs)

        return instead

    for module, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (shutil, "rmtree")):
        setattr(module, name, counted(getattr(module, name)))
    try:
        write_checkpoint(folder, content(1))
        os._exit(0)
    finally:
        os._exit(2)


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("before", [False, True])
def test_killed_at_any_moment_there_is_the_old_one_or_the_new_one(tmp_path: Path, before: bool) -> None:
    """Every call that changes the disk is the last one, once; then the same checkpoint is written again."""
    for moment in range(100):
        folder = tmp_path / str(moment) / "step"
        if before:
            write_checkpoint(folder, content(0))
        killed = killed_at(moment, folder)
        for again in (3, 2, None):  # killed twice more while it is mended, then not
            found = folders.standing(folder)
            if before or found.exists():
                step = read(found)["global_step"]
                assert step == 5 or (before and step == 4)
                assert_equal(read(found), others(content(step - 4)))
            write_checkpoint(folder, content(1)) if again is None else killed_at(again, folder)
        assert read(folder)["global_step"] == 5 and os.listdir(folder.parent) == ["step"]
        if not killed:
            assert moment > 5
            return
    raise AssertionError("never written")


def test_a_full_disk_is_one_line_and_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "step", content(0))
    full = Mock(side_effect=OSError(28, "No space left on device"))
    for name in ("save", "write_whole", "take_place"):
        with monkeypatch.context() as patched:
            patched.setattr(folders, name, full)
            refusal(lambda: write_checkpoint(tmp_path / "step", content(1)), "the disk is full", lines=1)
        assert read(tmp_path / "step")["global_step"] == 4 and not (tmp_path / f"step{NEW}").exists()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # this limit fails half way, as a full disk does
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
        refusal(lambda: write_checkpoint(tmp_path / "step", content(1)), f"{tmp_path / 'step'}", lines=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read(tmp_path / "step")["global_step"] == 4 and os.listdir(tmp_path) == ["step"]


def test_a_link_in_the_place_of_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    for name in ("step", f"step{NEW}"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    write_checkpoint(tmp_path / "step", content())
    assert (tmp_path / "mine" / "thesis.tex").is_file() and read(tmp_path / "step")["global_step"] == 4


def test_links_out_of_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "snapshots" / "revision", content(tokenizer="text"))
    folder, blobs = tmp_path / "snapshots" / "revision", tmp_path / "blobs"
    blobs.mkdir()
    for index, file in enumerate(sorted(folder.iterdir())):  # as the cache of the Hub has them
        file.rename(blobs / str(index))
        file.symlink_to(Path("../../blobs") / str(index))
    assert read(folder)["global_step"] == 4 and folders.read_tokenizer(folder) == "text"
    (tmp_path / "secret").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "secret")
    refusal(lambda: read_content(folder), "is a link to a file outside its folder")
    os.mkfifo(tmp_path / "pipe")
    refusal(lambda: check_own(tmp_path / "pipe"), "missing, or not a file")


def test_pieces_are_put_together_and_divided_anew(tmp_path: Path) -> None:
    """As four processes write them, and one reads."""
    whole, alone = torch.arange(40.0).view(10, 4), torch.tensor([1.0, 2.0])
    write_checkpoint(tmp_path / "step", {RECORD: content()[RECORD], WEIGHTS: {"w": torch.ones(1), "alone": alone}})
    stored = json.loads((tmp_path / "step" / CONTENT).read_text())
    del stored["checksum"], stored["files"]["model.safetensors"]
    (tmp_path / "step" / "model.safetensors").unlink()
    for rank, (start, rows) in enumerate(((0, 3), (3, 3), (6, 3), (9, 1))):
        tensors = {"w": whole[start : start + rows]} | ({"alone": alone} if rank == 0 else {})
        places = {"w": {"saved_offsets": [start, 0]}, "alone": {"saved_offsets": [0]}}
        file = tmp_path / "step" / f"model-{rank + 1:05}-of-00004.safetensors"
        folders.save(file, {name: tensor.clone() for name, tensor in tensors.items()}, {folders.PLACES: json.dumps(places)})
        stored["files"][file.name] = {"bytes": file.stat().st_size, "xxh3": checksum(file)}

    def sign() -> None:
        (tmp_path / "step" / CONTENT).write_text(json.dumps({"checksum": seal(stored), **stored}))

    sign()
    assert_equal(read(tmp_path / "step")[WEIGHTS], {"w": whole, "alone": alone})
    assert folders.shapes(tmp_path / "step") == {"alone": (2,), "w": (10, 4)}
    mine = {"w": torch.zeros(10, 4), "alone": torch.zeros(2)}
    load_parts(tmp_path / "step", mine)
    assert_equal(mine, {"w": whole, "alone": alone})
    for name, message in (("other", "Missing key "), ("w", "Size mismatch")):
        refusal(partial(load_parts, tmp_path / "step", {name: torch.zeros(4, 10)}), message, f" {name}", lines=1)
    name = "model-00002-of-00004.safetensors"
    (tmp_path / "step" / name).rename(tmp_path / name)
    del stored["files"][name]
    sign()
    refusal(lambda: read_content(tmp_path / "step"), "does not hold all of w")


# -- what a configuration may say --------------------------------------------------------------------------------------


def test_a_record_has_texts_as_keys() -> None:
    """Numbers would come back as texts."""
    refusal(lambda: make_record(OmegaConf.create({"learner": {"table": {"a": [{0: 0.5}]}}})), "learner.table.a.0 has the key 0")


def config(**changes: Any) -> dict[str, Any]:
    named = make_record(compose(*SMALL, job="language_model"))["config"]
    for key, value in changes.items():
        owner = named
        *path, last = key.split("__")
        for part in path:
            owner = owner[part]
        owner[last] = value
    return {"version": VERSION, "config": named}


@pytest.mark.parametrize(("changes", "message"), [
    ({"learner": {"_target_": "os.system", "_args_": ["true"]}}, r"'os\.system', which is no component.*\n.*trust=os"),
    ({"learner": {"_target_": "torch.nn.Parameter"}}, "no component of an installed package"),
    ({"learner": {"_target_": 3}}, "names a class as '3'"),
    ({"model__ffn_dim": {"_target_": "builtins.eval", "_args_": ["1"]}}, "'builtins.eval', which is no component"),
    ({"learner__more": 1}, "has `more` for learner=linear, which has no such parameter"),
    ({"learner__bias": "maybe"}, "learner=linear: .*maybe"),
    ({"learner___recursive_": False}, "the key `_recursive_` for learner=linear, which a file may not set"),
    ({"model__vocab_size": [1]}, "model=language_model"),
    ({"dim": "${oc.env:HOME}"}, r"only \$\{key\} is filled in"),
    ({"dim": "${num_heads}", "num_heads": "${dim}"}, "cannot be read as a configuration"),
    ({"layer": []}, "the key `layer`"),
])  # fmt: skip
def test_what_a_configuration_may_not_say(changes: dict[str, Any], message: str) -> None:
    said = refusal(lambda: record_config(checked_record(config(**changes), Path("run")), Path("run")), "run")
    assert re.search(message, said), said


def test_a_class_that_is_trusted_on_the_command_line() -> None:
    node = {"_target_": "my_package.my_module.Learner", "x": 1}
    assert to_targets(node, "run", trust=("my_package.my_module",)) == node
    assert to_targets(node, "run", trust=("my_package",)) == node
    refusal(lambda: to_targets(node, "run", trust=("my_pack", "other")), "no component of an installed package")
    named = checked_record(config(task={"_target_": "b.Task"}, learner={"_target_": "a.Learner"}), Path("run"))
    for trust, advice in (((), r"add trust=\[a,b\]$"), ("b", r"add trust=\[b,a\]$")):  # of all, once
        refusal(partial(record_config, named, Path("run"), trust=trust), match=advice)
    assert record_config(named, Path("run"), trust=["a", "b"]).task == {"_target_": "b.Task"}
    assert record_config(named, Path("run"), skip=("task",), trust="a").task == {}  # settings alone
    assert modules(None) == () and modules("a.b") == ("a.b",) and modules(["a", "b"]) == ("a", "b")
    for bad in ("a b", "", "a..b", 3):
        with pytest.raises((MetaTTTError, TypeError)):
            modules(bad)
    assert to_targets({"_target_": "torch.nn.Linear", "_args_": [2, 2]}, "run")["_target_"] == "torch.nn.Linear"


def test_what_is_computed_is_kept_as_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDTH", "16")
    named = make_record(compose(*SMALL, "model.ffn_dim='${oc.decode:${oc.env:WIDTH}}'", job="language_model"))["config"]
    assert named["model"]["ffn_dim"] == 16 and named["model"]["dim"] == "${dim}"


def test_no_size_is_believed(tmp_path: Path) -> None:
    from metattt.composition.instantiate import instantiate_model

    cfg = compose(*SMALL, job="language_model")
    weights = instantiate_model(cfg).state_dict()
    for key, value, message in (
        ("model__vocab_size", 10**12, r"embedding\.weight is \[16, 8\] and not \[1000000000000, 8\]"),
        ("model__num_layers", 10**9, r"num_layers=1,000,000,000, and \d+ at most"),
        ("model__ffn_dim", 2**40, "does not fit"),
        ("optimizer__steps", 10**9, "steps=1,000,000,000"),
        ("model__ffn_dim", 10**30, "ffn_dim=10+ is not allowed"),
        ("task__loss", "none of them", "choose from"),
    ):
        write_model(tmp_path / f"{key}={value}", config(**{key: value}), weights, None)
        said = refusal(partial(load_model, tmp_path / f"{key}={value}"), lines=1)
        assert re.search(message, said), said
    write_model(tmp_path / "whole", config(), weights, None)
    loaded, _ = load_model(tmp_path / "whole")
    assert_equal(dict(loaded.state_dict()), dict(weights))
    check_amounts({"data": {"num_workers": 8}, "trainer": {"devices": 8}}, "run", 1)
    refusal(lambda: check_amounts({"data": {"num_workers": 10**6}}, "run", 1), "num_workers")


@pytest.mark.parametrize(("bad", "message"), [
    (lambda weight: weight.index_fill(0, torch.tensor([1]), float("nan")), "numbers in embedding.weight that are not finite"),
    (lambda weight: weight.long(), "as torch.int64: weights are floats"),
    (lambda weight: weight.to(torch.float8_e4m3fn), "as torch.float8_e4m3fn"),
])  # fmt: skip
def test_weights_that_are_no_finite_numbers(tmp_path: Path, bad: Callable[[Tensor], Tensor], message: str) -> None:
    from metattt.composition.instantiate import instantiate_model

    weights = instantiate_model(compose(*SMALL, job="language_model")).state_dict()
    weights["embedding.weight"] = bad(weights["embedding.weight"])
    weights.pop("head.weight", None)
    write_model(tmp_path / "one", config(), weights, None)
    refusal(lambda: load_model(tmp_path / "one"), message)
    check_numbers([("empty", torch.ones(0))], "run")


def test_the_current_folder_is_a_run_and_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (step := tmp_path / "checkpoints" / "step-00000100").mkdir(parents=True)
    (step / CONTENT).write_text("{}")
    for here, expected in ((tmp_path, "checkpoints/step-00000100"), (step, ".")):
        monkeypatch.chdir(here)
        assert find_checkpoint(".") == Path(expected)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    refusal(partial(check_new, "."), "the folder that you are in: give a new one")


def test_checkpoints_that_may_not_be_listed_are_not_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or resume=auto would start from the first step again."""
    (tmp_path / "checkpoints" / "step-00000100").mkdir(parents=True)
    for listing in ("listdir", "scandir"):
        monkeypatch.setattr(os, listing, Mock(side_effect=PermissionError))
    for function in (rolling.steps, rolling.remove_leftovers):
        with pytest.raises(PermissionError):
            function(tmp_path)
