"""One sequence over two and four processes, against one process: losses and the gradient of every parameter."""

import copy
import os
import pickle
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from local_processes import together
from processes_for_tests import Program
from refusals_for_tests import refusal
from runs_for_tests import log
from speeds.time_parallel import TimeParallel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from metattt.cli import main
from metattt.composition.compose import build, compose
from metattt.layer import TTTLayer
from metattt.models.language_model import LanguageModel
from metattt.parallel.cuts import check_cut
from metattt.parallel.gradients import average_gradients
from metattt.parallel.heads import HeadParallel, divide_heads
from metattt.parallel.line import MANY, Line, dump, fill, frame_of
from metattt.parallel.relay import handed_on, instead
from metattt.parallel.scan import may_scan, scannable
from metattt.tasks.reconstruction import Reconstruction
from metattt.training.train import train

WORLD = 4
TINY = (
    "dim=16", "num_heads=2", "model.num_layers=2", "data.context_length=33", "data.batch_size=4", "trainer.accelerator=cpu",
    "trainer.accumulate_grad_batches=2", "trainer.log_every_n_steps=1", "optimizer.mini_batch_size=8", "training.lr=5e-3",
    "trainer.max_steps=4", "trainer.val_check_interval=2", "sample=false",
)  # fmt: skip
EMA = "+callbacks.ema._target_=lightning.pytorch.callbacks.EMAWeightAveraging"
NOT_DIVIDED = (
    ("ttt_linear", (), "num_heads=2 cannot be divided among trainer.tensor_ranks=4"),
    ("retnet", ("num_heads=4",), "cannot be divided among processes: some heads give other outputs"),
)
RUNS = {
    "time": ("trainer=time_parallel", "trainer.time_ranks=4"),
    "both": ("trainer=time_parallel_fsdp", "trainer.time_ranks=2"),
    "heads": ("trainer=fsdp", "trainer.tensor_ranks=2"),
    "time_and_heads": ("trainer=time_parallel_fsdp", "trainer.time_ranks=2", "trainer.tensor_ranks=2"),
}
TOKENS, WINDOWS = 48, 4
HYBRID = ("ttt_linear", "attention", "delta_net", "linear_attention")
LAYERS = ("ttt_linear", "ttt_mlp", "delta_net", "linear_attention", "hybrid")
SCANNED = ("linear_attention", "mamba2", "retnet")
PLAIN = ("block_style=plain",)  # without convolutions, whose tails go ahead of the state
BLOCKS = ("kda", "hgrn2", "rwkv7")  # their norms and gates
OTHERS = ("mamba2", "titans", "nested_transformer")


class Case(NamedTuple):
    """A model, and how its processes share the windows."""

    layer: str  # of all blocks, or `hybrid`
    data: int  # of the mesh
    time: int
    tokens: int = TOKENS  # of a window
    in_flight: int | None = None  # parts of a batch
    reset: bool = False  # documents start inside the windows
    sharded: bool = False  # parameters are divided among the processes of the data axis
    settings: tuple[tuple[str, Any], ...] = ()  # of the model
    dtype: torch.dtype = torch.float64  # of parameters
    scan: bool = False  # states that can be scanned are
    tensor: int = 1  # processes that divide the heads
    options: tuple[str, ...] = ()  # of the layer


CASES = (
    *(Case(layer, 1, 4) for layer in LAYERS),
    *(Case(layer, 2, 2) for layer in (*LAYERS, *OTHERS)),
    Case("ttt_linear", 1, 4, dtype=torch.float32),
    Case("hybrid", 2, 2, in_flight=1),
    Case("hybrid", 1, 4, tokens=50, in_flight=3),
    Case("hybrid", 2, 2, tokens=49, reset=True),
    Case("ttt_mlp", 1, 4, reset=True),
    Case("hybrid", 2, 2, settings=(("checkpoint_blocks", True),)),
    Case("ttt_linear", 2, 2, settings=(("pre_conv", False), ("tie_embeddings", False))),
    *(Case(layer, 1, 4, scan=True, options=PLAIN) for layer in SCANNED),
    *(Case(layer, 2, 2, scan=True, reset=True, options=PLAIN) for layer in SCANNED),
    *(Case("mamba2", *mesh, scan=True, reset=reset) for mesh in ((1, 4), (2, 2)) for reset in (False, True)),
    Case("mamba2", 1, 4, tokens=51, in_flight=3, scan=True, settings=(("pre_conv", False),)),
    Case("hybrid", 1, 4, scan=True, tokens=50, reset=True),
    Case("hybrid", 2, 2, scan=True, sharded=True),
    *(Case(layer, 2, 1, tensor=2) for layer in (*LAYERS, "mamba2", *BLOCKS)),
    *(Case(layer, 2, 1, tensor=2, options=("num_heads=4",)) for layer in ("kda", "rwkv7", "comba")),  # heads 4 wide: H
    Case("nested_transformer", 2, 1, tensor=2, options=("learner.num_heads=2",)),
    Case("ttt_linear", 2, 1, tensor=2, options=("optimizer.lr=shared", "layer.output_bias=true")),
    Case("ttt_mlp", 1, 1, tensor=4, options=("num_heads=4",)),
    Case("hybrid", 1, 2, tensor=2, tokens=49, reset=True),
    Case("mamba2", 1, 2, tensor=2, scan=True, reset=True),
    Case("ttt_mlp", 4, 1, sharded=True),
)  # fmt: skip


def make_model(case: Case) -> LanguageModel:
    names = iter(HYBRID * 2 if case.layer == "hybrid" else (case.layer,) * 8)
    blocks = len(HYBRID) if case.layer == "hybrid" else 2
    torch.manual_seed(0)
    model = LanguageModel(30, 16, blocks, lambda: copy.deepcopy(layer(next(names), *case.options)), **dict(case.settings))
    with torch.no_grad():
        for parameter in model.parameters():  # nothing is zero, and no two blocks are alike
            parameter += 0.1 * torch.randn_like(parameter)
    return model.to(case.dtype)


@cache
def layer(name: str, *options: str) -> TTTLayer:
    return build(f"layer={name}", "dim=16", "num_heads=2", "seed=0", *options)


def make_windows(case: Case) -> Tensor:
    return torch.randint(30, (WINDOWS, case.tokens + 1), generator=torch.Generator().manual_seed(1))


def one_process(case: Case) -> tuple[float, dict[str, Tensor | None]]:
    """The mean loss, and the gradient of every parameter by name."""
    model, ids = make_model(case), make_windows(case)
    reset = ids[:, :-1] == 3 if case.reset else None
    loss, _ = model.cross_entropy(ids[:, :-1], ids[:, 1:], reset=reset)
    loss = loss / (WINDOWS * case.tokens)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def part_of(case: Case) -> tuple[float, dict[str, Tensor | None]]:
    """In one of the processes: what `one_process` finds."""
    mesh = init_device_mesh("cpu", (case.data, case.time, case.tensor), mesh_dim_names=("data", "time", "tensor"))
    line = Line(mesh["time"], in_flight=case.in_flight)
    model = make_model(case)
    scanned = [number for number, block in enumerate(model.blocks) if case.scan and scannable(block.layer, 16)]
    assert may_scan(model, case.tokens // case.time) or not case.scan
    for block in model.blocks if case.tensor > 1 else ():
        divide_heads(block, mesh["tensor"])
    if case.sharded:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        register_fsdp_forward_method(model, "cross_entropy")
    ids = make_windows(case).tensor_split(case.data)[mesh["data"].get_local_rank()]
    read, labels = line.own(ids[:, :-1]), line.own(ids[:, 1:])
    count, losses = line.count_parts(len(ids)), []
    for own, following in zip(read.tensor_split(count), labels.tensor_split(count), strict=True):
        reset = own == 3 if case.reset else None
        with handed_on(model, line, scanned):
            losses.append(model.cross_entropy(own, following, reset=reset)[0])
    loss = torch.stack(losses).sum() / (WINDOWS * case.tokens * case.tensor / WORLD)  # of what a process reads on average
    loss.backward()
    line.finish()
    if not case.sharded:
        average_gradients(model.parameters(), mesh["data"].get_group())
    average_gradients(model.parameters(), line.group)
    total = loss.detach() / WORLD
    dist.all_reduce(total)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected = {"linear_attention": 2, "mamba2": 2, "retnet": 2, "hybrid": 1}
    assert len(scanned) == (expected[case.layer] if case.scan else 0)
    return total.item(), {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def refused(layer: str, *options: str) -> str:
    """In one of the processes: what is said of a layer whose heads cannot be divided among four."""
    model = make_model(Case(layer, 1, 1, options=options))
    return refusal(lambda: divide_heads(model.blocks[0], init_device_mesh("cpu", (WORLD,))), lines=1)


def run(corpus: str, folder: str, *options: str) -> int:
    """In one of the processes: `metattt train`."""
    names = dict.fromkeys(("RANK", "LOCAL_RANK"), str(dist.get_rank())) | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(WORLD))
    os.environ |= names | {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    with open(f"{folder}_{dist.get_rank()}.txt", "w") as output:
        kept = [os.dup(stream) for stream in (1, 2)]
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        code = main(["train", *TINY, f"data.path={corpus}", f"output_dir={folder}", *options])
        for stream, before in zip((1, 2), kept, strict=True):
            os.dup2(before, stream)
    return code


def attempt(name: str, job: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    """The result of a job by its name, or its traceback."""
    try:
        return name, job(*arguments)
    except Exception:
        return name, traceback.format_exc()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def results(folder: Path, corpus: str) -> dict[str, list[Any]]:
    """What every one of four processes, started once, found of every job."""
    jobs: list[Any] = [(f"case_{number}", part_of, case) for number, case in enumerate(CASES)]
    jobs += [(f"refused_{name}", refused, name, *options) for name, options, _ in NOT_DIVIDED]
    jobs += [(f"run_{name}", run, corpus, str(folder / name), *options) for name, options in RUNS.items()]
    found = together(WORLD, [(attempt, job) for job in jobs], seconds=900)
    return {of_processes[0][0]: [result for _, result in of_processes] for of_processes in found}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:3])))
def test_several_processes_compute_what_one_does(results: dict[str, list[Any]], case: Case) -> None:
    loss, gradients = one_process(case)
    bound = 1e-6 if case.dtype == torch.float32 else 1e-11
    for found in results[f"case_{CASES.index(case)}"]:
        assert isinstance(found, tuple), found
        assert found[0] == pytest.approx(loss, abs=bound) and found[1].keys() == gradients.keys()
        for name, wanted in gradients.items():
            got = found[1][name]
            assert (got is None) == (wanted is None), name
            if wanted is not None:
                assert wanted.abs().max() > 0 or not got.any(), name
                torch.testing.assert_close(got, wanted, rtol=0, atol=bound, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "_", "message"), NOT_DIVIDED)
def test_heads_that_need_each_other_are_not_divided(results: dict[str, list[Any]], name: str, _: Any, message: str) -> None:
    assert all(message in said for said in results[f"refused_{name}"])


# -- metattt train -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"document {index}\n" + "alpha beta gamma delta " * 30)
    return str(folder)


@pytest.fixture(scope="module")
def alone(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert train(compose(*TINY, f"data.path={corpus}", f"output_dir={folder}")) == 0
    return folder


def assert_same_log(folder: Path, expected: Path) -> None:
    found, wanted = log(folder), log(expected)
    assert len(found) == len(wanted) == 6
    for row, reference in zip(found, wanted, strict=True):
        for name in ("train/loss", "train/bits_per_byte", "validation/loss", "gradient_norm"):
            assert bool(row[name]) == bool(reference[name])
            if row[name]:
                bound = 4e-6 if name == "gradient_norm" else 1e-6
                assert float(row[name]) == pytest.approx(float(reference[name]), rel=bound), name


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_runs_of_four_processes_log_the_losses_of_one(results: dict[str, list[Any]], folder: Path, alone: Path, name: str) -> None:
    codes = results[f"run_{name}"]
    said = (folder / f"{name}_0.txt").read_text()
    assert codes == [0] * WORLD and "4 steps of 264 tokens" in said and "Warning" not in said, said
    assert_same_log(folder / name, alone)


@pytest.mark.slow
def test_a_run_of_two_processes_as_a_user_starts_it(corpus: str, alone: Path, tmp_path: Path) -> None:
    settings = (*TINY, f"data.path={corpus}", f"output_dir={tmp_path / 'run'}", "trainer.devices=2", "trainer.time_ranks=2")
    result = Program("-m", "metattt", "train", "trainer=time_parallel", *settings, folder=tmp_path).done()
    assert result.returncode == 0 and "2 processes" in result.stdout, result.stderr[-2000:]
    assert_same_log(tmp_path / "run", alone)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("trainer.devices=3",), r"trainer.time_ranks=2 cannot divide the 3 processes .* trainer.devices=2,"),
        (("trainer=fsdp", "trainer.devices=3", "trainer.tensor_ranks=2"), "trainer.tensor_ranks=2 cannot divide the 3"),
        (("trainer=ddp", "trainer.tensor_ranks=2"), "trainer.tensor_ranks. belongs to trainer=fsdp or"),
        (("trainer.devices=4", "trainer.time_ranks=4", "data.context_length=3"), "=3 tokens cannot be divided among trainer.time_ranks=4"),
        (("trainer.devices=2", "trainer.in_flight=5"), "trainer.in_flight=5 parts .* a batch has 4"),
        (("trainer=ddp", "trainer.time_ranks=2"), "trainer.time_ranks. belongs to trainer=time_parallel.*devices=2"),
        (("trainer=fsdp", "trainer.devices=1", EMA), "set trainer=ddp"),
        (("trainer.devices=2", "data=digits", "experiment=digits_pixel"), "is for text"),
    ],
)
def test_refusals_are_one_line(corpus: str, tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    text = () if "data=digits" in overrides else (*TINY, f"data.path={corpus}")
    chosen = () if overrides[0] in ("trainer=ddp", "trainer=fsdp") else ("trainer=time_parallel",)
    refusal(lambda: train(compose(*text, *chosen, f"output_dir={tmp_path}", *overrides)), match=message)


# -- what is handed on -------------------------------------------------------------------------------------------------


class Forgetful(nn.Module):
    """A causal convolution over time that takes no state."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 3)

    def forward(self, x: Tensor, state: Any = None, mask: Any = None, reset: Any = None) -> tuple[Tensor, Any]:
        return self.conv(nn.functional.pad(x.mT, (2, 0))).mT, None


def test_layers_that_need_whole_sequences_are_refused() -> None:
    refusal(lambda: check_cut(Forgetful(), 16), match=r"Forgetful needs all tokens .* trainer.time_ranks=1")
    for name in LAYERS[:-1]:
        check_cut(layer(name), 16)
    check_cut(layer("attention"), 16)


class Hidden:
    """A state of others that is no tuple, list or dictionary."""

    def __init__(self) -> None:
        self.h = torch.zeros(2)


class Remembers(Reconstruction):
    """Carries more than the last tokens."""

    def convolved(self, projected: Any, state: Any, ctx: Any) -> Any:
        found, tails = super().convolved(projected, state, ctx)
        return found, tails | {"sum": state.get("sum", 0) + projected[0].sum(1)}


class IgnoresProjections(Reconstruction):
    def views(self, x: Tensor, state: Any, ctx: Any, projected: Any = None) -> Any:
        return super().views(x, state, ctx)


@pytest.mark.parametrize("task", [Remembers, IgnoresProjections])
def test_tails_go_ahead_only_where_they_are_tails(task: type[Reconstruction]) -> None:
    with_tails = copy.deepcopy(layer("mamba2"))
    assert scannable(with_tails, 16)
    with_tails.task.__class__ = task
    assert not scannable(with_tails, 16)
    assert not scannable(layer("linear_attention", "task.views=shared_qk"), 16)  # q and k of one projection
    assert not scannable(layer("delta_product"), 16)  # a step size for each of the pairs of a token


def test_frames_hold_no_tensors() -> None:
    shared = torch.randn(2, 3, requires_grad=True)
    state = {"a": (shared, None), "b": [shared, torch.arange(3)], "phase": 5}
    frame, slots, tensors = frame_of(state)
    assert [slot.differentiable for slot in slots] == [True, False] and len(tensors) == 2
    again = fill(frame, lambda slot: tensors[slot.place])
    assert again["a"][0] is again["b"][0] is shared and again["phase"] == 5
    assert fill(pickle.loads(dump(frame)), lambda slot: slot.place) == {"a": (0, None), "b": [0, 1], "phase": 5}
    refusal(lambda: dump(frame_of({"a": Hidden()})[0]), "keeps a tensor in an object of its own")


def test_a_method_of_a_users_own_is_there_again_afterwards() -> None:
    module: Any = nn.Linear(2, 2)
    for before in ({}, {"forward": lambda x: 2 * x}):
        vars(module).update(before)
        with instead(module, "forward", lambda x: x):
            assert module.forward(1) == 1
        assert vars(module).get("forward") is before.get("forward")


def test_divided_heads_follow_what_a_run_changes() -> None:
    """The base rate of callbacks=inner_warmup, which moved the whole layer alone, and the mode."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole = layer("ttt_mlp").eval()
        divided = parallelize_module(copy.deepcopy(whole).train(), init_device_mesh("cpu", (1,)), HeadParallel()).eval()
        whole.optimizer.scale = divided.optimizer.scale = torch.tensor(0.01, dtype=torch.float64)
        x = torch.randn(2, 24, whole.dim).to(whole.out.weight)
        torch.testing.assert_close(divided(x)[0], whole(x)[0], rtol=0, atol=1e-6)
        assert not divided.local(x)[0].task.training
    finally:
        dist.destroy_process_group()


# -- the benchmark, and a process that ends ----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmark_checks_and_measures() -> None:
    small = TimeParallel([2], [2], [2], 5.0, 8, 1, ["linear_attention", "delta_net"], [64])
    report = small.run(lambda line: None)
    ((idle,), messages) = report.tables.values()
    assert 0 < idle["idle"] < 1 and idle["formula, per block"] == pytest.approx(1 / 5)
    weights, tail, tails = 64 * 64, 3 * 64, 3 * 3 * 64  # the block's convolution, and the layer's of q, k and v; the position
    assert [row["D = 64"] for row in messages] == [4 * (weights + tail) + 8, 4 * (weights + tail + tails) + 8]


def many_messages() -> int:
    """In one of the processes: a line is given up as soon as its messages have left; the next process reads late."""
    line = Line(init_device_mesh("cpu", (2,)))
    if line.first:
        for number in range(MANY + 20):
            line.send_state("key", {"a": torch.full((3,), number), "b": torch.zeros(0)})
        line.finish()
        return 0
    time.sleep(1)
    right = 0
    for number in range(MANY + 20):
        frame, slots = line.receive_frame("key")
        tensors = line.receive_state(slots)
        right += fill(frame, lambda slot, tensors=tensors: tensors[slot.place])["a"].tolist() == [number] * 3
    return right


@pytest.mark.slow
def test_no_message_is_lost_when_the_reader_is_late() -> None:
    ((_, read),) = together(2, [(many_messages, ())], seconds=100)
    assert read == MANY + 20
