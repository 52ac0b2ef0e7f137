"""Two processes on the CPU, started by the command line as a user starts them, against one process with the same
batch."""

import shutil
import subprocess
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from processes_for_tests import Program, two_processes
from refusals_for_tests import refusal
from runs_for_tests import log, write_corpus
from torch import Tensor

from metattt.checkpoints.convert import convert
from metattt.checkpoints.files import find_checkpoint
from metattt.checkpoints.trained import load_model, read_checkpoint
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.errors import MetaTTTError
from metattt.evaluation.evaluate import evaluate
from metattt.generation.generate import generate
from metattt.models.language_model import LanguageModel
from metattt.training import saving
from metattt.training.batches import plan_batches
from metattt.training.building import Builder
from metattt.training.launchers import processes
from metattt.training.text_module import LanguageModeling
from metattt.training.train import train

TINY = (
    "dim=16", "num_heads=2", "model.num_layers=2", "data.context_length=32", "data.batch_size=4", "trainer.accelerator=cpu",
    "trainer.accumulate_grad_batches=2", "trainer.log_every_n_steps=1", "optimizer.mini_batch_size=8", "training.lr=5e-3",
)  # fmt: skip
TOLERANCE = {"rtol": 0, "atol": 1e-6}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus; one process: `five` steps, the same run gone on with to `resumed` ten, and `ten` steps without a
    stop."""
    folder = tmp_path_factory.mktemp("runs")
    write_corpus(folder / "corpus")
    for name, steps in (("five", 5), ("ten", 10)):
        settings = (f"data.path={folder / 'corpus'}", f"output_dir={folder / name}", f"trainer.max_steps={steps}")
        assert train(compose(*TINY, *settings)) == 0
    shutil.copytree(folder / "five", folder / "resumed")
    assert train(compose(f"resume={folder / 'resumed'}", "trainer.max_steps=10")) == 0
    return folder


@pytest.fixture(scope="module")
def together(runs: Path) -> dict[str, tuple[Path, subprocess.CompletedProcess[str]]]:
    """Ten steps in two processes, by strategy, of which the command starts the second."""
    found = {}
    for strategy in ("ddp", "fsdp"):
        settings = (*TINY, f"data.path={runs / 'corpus'}", f"output_dir={runs / strategy}", "trainer.max_steps=10")
        command = ("-m", "metattt", "train", *settings, f"trainer={strategy}", "trainer.devices=2")
        (runs / f"{strategy}_said").mkdir()
        found[strategy] = runs / strategy, Program(*command, folder=runs / f"{strategy}_said").done()
    return found


def assert_same(run: Path, expected: Path) -> None:
    """Parameters, Adam's moments and the log of two runs."""
    found, wanted = read_checkpoint(run), read_checkpoint(expected)
    assert found["global_step"] == wanted["global_step"] == 10
    torch.testing.assert_close(dict(found["state_dict"]), dict(wanted["state_dict"]), **TOLERANCE)
    torch.testing.assert_close(
        found["optimizer_states"][0]["state"], wanted["optimizer_states"][0]["state"], **TOLERANCE
    )
    logs = [[{name: float(value or 0) for name, value in row.items()} for row in log(folder)] for folder in (run, expected)]
    assert len(logs[0]) == len(logs[1]) > 10
    for row, reference in zip(*logs, strict=True):
        assert row == pytest.approx(reference, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_as_one(
    runs: Path, together: dict[str, tuple[Path, subprocess.CompletedProcess[str]]], strategy: str
) -> None:
    run, result = together[strategy]
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("10 steps of 256 tokens") == 1 and "2 processes" in result.stdout
    assert "Warning" not in result.stderr and "inner_health: not looked at" not in result.stderr
    assert_same(run, runs / "ten")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_go_on_with_the_run_of_one(runs: Path, tmp_path: Path, strategy: str) -> None:
    shutil.copytree(runs / "five", tmp_path / "run")
    codes, output = two_processes(
        tmp_path, f"resume={tmp_path / 'run'}", "trainer.max_steps=10", f"trainer={strategy}", "trainer.devices=2"
    )
    assert codes == [0, 0] and "2 processes" in output, output
    assert_same(tmp_path / "run", runs / "resumed")


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["nearest", "lact", "titans"])
def test_parameters_without_a_gradient_do_not_stop_two_processes(runs: Path, tmp_path: Path, layer: str) -> None:
    """q and k of nearest neighbours; what a mini-batch of 64 tokens commits, in windows of 32. As in one process
    they stay as they are."""
    rule = "optimizer=append" if layer == "nearest" else "optimizer.mini_batch_size=64"
    settings = (*(one for one in TINY if one != "optimizer.mini_batch_size=8"), f"layer={layer}", rule, "sample=false")
    settings = (*settings, f"data.path={runs / 'corpus'}", "trainer.max_steps=3")
    assert train(compose(*settings, f"output_dir={tmp_path / 'one'}")) == 0
    codes, output = two_processes(tmp_path, *settings, f"output_dir={tmp_path / 'two'}", "trainer=ddp")
    assert codes == [0, 0] and "Warning" not in output, output
    one, two = (read_checkpoint(tmp_path / name) for name in ("one", "two"))
    torch.testing.assert_close(dict(two["state_dict"]), dict(one["state_dict"]), **TOLERANCE)
    moments = [found["optimizer_states"][0]["state"].keys() for found in (one, two)]
    assert moments[0] == moments[1] and len(moments[0]) < len(list(instantiate_model(compose(*settings)).parameters()))
    codes, output = two_processes(tmp_path, f"resume={tmp_path / 'one'}", "trainer=fsdp", "trainer.max_steps=4")
    assert codes == [0, 0] and read_checkpoint(tmp_path / "one")["optimizer_states"][0]["state"].keys() == moments[1], output


@pytest.mark.slow
def test_a_sharded_checkpoint_is_read_by_everything(
    runs: Path, together: dict[str, tuple[Path, subprocess.CompletedProcess[str]]], tmp_path: Path
) -> None:
    fsdp, ddp = together["fsdp"][0], together["ddp"][0]
    assert [len(list(find_checkpoint(one).glob("model*.safetensors"))) for one in (fsdp, ddp)] == [2, 1]
    shutil.copytree(fsdp, tmp_path / "run")
    given = ("labels=[one]", f"output_dir={tmp_path / 'eval'}", "device=cpu")
    folders = (tmp_path / "run", find_checkpoint(tmp_path / "run"), ddp)
    scores = [evaluate(compose(f"checkpoint={one}", *given, job="eval"))["one"].loss for one in folders]
    assert scores[0] == scores[1] == pytest.approx(scores[2], abs=1e-5)
    generate(compose(f"checkpoint={fsdp}", "prompt=alpha", "max_new_tokens=3", "device=cpu", job="generate"))
    convert(compose(f"source={fsdp}", f"target={tmp_path / 'published'}", "direction=to_published", job="convert"))
    ids = torch.arange(40).unsqueeze(0)
    torch.testing.assert_close(load_model(tmp_path / "published")[0](ids), load_model(fsdp)[0](ids), rtol=0, atol=0)

    codes, output = two_processes(tmp_path, f"resume={tmp_path / 'run'}", "trainer=ddp", "trainer.max_steps=11")
    assert codes == [0, 0] and "from step 10" in output, output
    assert find_checkpoint(tmp_path / "run").is_dir() and read_checkpoint(tmp_path / "run")["global_step"] == 11
    settings = (*TINY, f"data.path={runs / 'corpus'}", f"output_dir={tmp_path / 'longer'}", "trainer.max_steps=1")
    assert train(compose(*settings, f"init_from={fsdp}", "training.lr=1e-12", "training.min_lr=1e-12")) == 0
    longer, whole = (read_checkpoint(folder)["state_dict"] for folder in (tmp_path / "longer", fsdp))
    torch.testing.assert_close(dict(longer), dict(whole), rtol=1e-5, atol=1e-8)


def test_no_process_holds_the_whole_model() -> None:
    """Parts come one after the other, with the parameters of the whole."""
    cfg = compose(*TINY, "model.num_layers=3")
    torch.manual_seed(3)
    build = Builder(cfg, None)
    whole, empty, parts = build.whole(), build.empty(), []
    model = build.in_parts(lambda block: parts.append((block, sum(1 for _ in block.parameters()))))
    assert [block for block, _ in parts] == list(model.blocks) and all(
        parameter.is_meta for parameter in empty.parameters()
    )
    assert empty.num_parameters() == whole.num_parameters()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in whole.state_dict().items())


class Shared(LanguageModel):
    def create_modules(self) -> None:
        super().create_modules()
        self.blocks[1] = self.blocks[0]


def test_blocks_that_share_a_weight_are_not_divided() -> None:
    shared = Builder(compose(*TINY, f"model._target_={__name__}.Shared"), None)
    refusal(shared.to_divide, "blocks.1.conv_norm.weight is a weight of several blocks")


def test_the_launcher_says_how_many_processes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, ddp = compose().trainer, compose("trainer=ddp").trainer
    assert processes(ddp) == {"devices": "auto", "num_nodes": 1} and processes(alone) == {"devices": 1, "num_nodes": 1}
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "0", "GROUP_RANK": "0"}
    slurm = {"SLURM_NTASKS": "6", "SLURM_NNODES": "3", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train"}
    with monkeypatch.context() as patch:
        for name, value in torchrun.items():
            patch.setenv(name, value)
        assert processes(ddp) == {"devices": 4, "num_nodes": 2}
        refusal(lambda: processes(alone), "torchrun has started 4 devices, and trainer.devices=1: choose trainer=ddp")
        with pytest.raises(MetaTTTError, match=r"trainer.num_nodes=1: set trainer.num_nodes=auto"):
            processes(compose("trainer=fsdp", "trainer.num_nodes=1").trainer)
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert processes(ddp) == {"devices": 2, "num_nodes": 3}


def test_processes_that_read_other_windows_draw_other_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "corpus")
    drawn: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}
    for share in range(2):

        def look(module: LanguageModeling, share: int = share) -> None:
            drawn[share], weights[share] = torch.rand(4), module.model.head.weight.detach().clone()

        monkeypatch.setattr("metattt.training.train.batch_share", lambda _, share=share: (share, 2))
        monkeypatch.setattr(LanguageModeling, "on_train_start", look)
        settings = (f"data.path={tmp_path / 'corpus'}", f"output_dir={tmp_path / str(share)}", "trainer.max_steps=1")
        assert train(compose(*TINY, *settings, "sample=false", "~callbacks.loss_curve")) == 0
    assert torch.equal(weights[0], weights[1]) and not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize(("tensor_ranks", "states"), [(1, [0, 1]), (2, [0, 0])])
def test_processes_that_divide_heads_draw_alike_after_a_run_of_ddp(
    tensor_ranks: int, states: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "set_random_state", lambda state, _: found.append(state["cpu"]))
    found: list[int] = []
    for rank in range(2):
        trainer = MagicMock(global_rank=rank, strategy=MagicMock(tensor_ranks=tensor_ranks))
        trainer.fit_loop.epoch_loop.batch_progress.current.ready = trainer.accumulate_grad_batches = 1
        checkpoints = saving.Checkpoints("run", best=None)
        checkpoints._found_random = [{"cpu": 0}, {"cpu": 1}]
        checkpoints.on_train_start(trainer, MagicMock())
    assert found == states


def test_a_step_has_the_same_tokens_whatever_the_processes() -> None:
    for world_size in (1, 2, 4):
        for batch_size in (1, 3, 8):
            size, count = plan_batches(2**19, 2048, batch_size, 1, world_size)
            assert size <= batch_size and size * count * world_size == 256
    assert plan_batches(None, 32, 4, 2, 1) == (4, 2)
    assert plan_batches(None, 32, 4, 2, 2) == (4, 1)
    assert plan_batches(None, 32, 4, 1, 4) == (1, 1)
    refusal(lambda: plan_batches(500, 32, 4, 1, 1), "set batch_tokens=512")
    refusal(lambda: plan_batches(512, 32, 4, 2, 1), "leave trainer.accumulate_grad_batches=2 out, or set batch_tokens=null")
    refusal(lambda: plan_batches(None, 32, 4, 2, 3), "8 windows per step, which 3 processes cannot share")
