"""TTT-E2E: against a plain loop of its own, and held to the laws of every language model."""

from __future__ import annotations

import itertools
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models_for_tests import TOLERANCE, documents_are_apart, read_in_pieces
from processes_for_tests import two_processes
from refusals_for_tests import refusal
from runs_for_tests import column
from saved import SavedBytes
from torch import Tensor

import metattt
from metattt.checkpoints.trained import load_model, read_checkpoint
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.evaluation.by_position import score
from metattt.generation.generate import generate
from metattt.generation.sampling import generate as draw
from metattt.learners import MLP, Transformer
from metattt.models.end_to_end import EndToEnd
from metattt.models.end_to_end_loop import Adaptation
from metattt.models.language_model import LanguageModelState
from metattt.training.building import Builder
from metattt.training.train import train

SMALL = ("model=ttt_e2e", "dim=8", "num_heads=2", "model.ffn_dim=12", "model.mini_batch_size=4", "learner.window=6")
VOCAB = 11


def make(*overrides: str, weights: float = 0.3) -> EndToEnd:
    """In float64; with weights large enough that every part of the network counts."""
    sizes = (f"model.vocab_size={VOCAB}", "model.num_layers=3", "model.suffix=2")
    cfg = compose(*SMALL, *sizes, *overrides, job="language_model")
    torch.manual_seed(0)
    model: Any = instantiate_model(cfg).double().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += weights * torch.randn(parameter.shape, generator=generator, dtype=torch.double)
    return model


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def same_gradients(model: EndToEnd, found: Tensor, expected: Tensor) -> dict[str, Tensor]:
    """Those of the expected loss, by name."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    wanted = dict(zip(names, torch.autograd.grad(expected, parameters, retain_graph=True), strict=True))
    for one, (name, other) in zip(torch.autograd.grad(found, parameters), wanted.items(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * float(other.abs().max()), msg=name)
    return wanted


# -- a plain loop ------------------------------------------------------------------------------------------------------


def rms(x: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, x.shape, scale, eps)


def turned(x: Tensor, position: int, theta: float = 500000.0) -> Tensor:
    """Rotary encoding of one vector: each pair is a complex number."""
    angles = position * theta ** (-torch.arange(0, len(x), 2, dtype=x.dtype) / len(x))
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(0, (-1, 2))) * turn).flatten()


class Plain:
    """The model on one document, token by token, from its parameters alone."""

    def __init__(self, model: EndToEnd, heads: int = 2, window: int = 6):
        self.p = dict(model.named_parameters())
        self.model, self.heads, self.window = model, heads, window
        self.cache: list[list[tuple[Tensor, Tensor]]] = [[] for _ in model.blocks]

    def attend(self, b: str, x: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        p, width = self.p, x.shape[0] // self.heads
        q = rms(p[f"{b}.layer.task.q.weight"] @ x, p[f"{b}.layer.task.q_norm.weight"], 1e-5)
        k = rms(p[f"{b}.layer.task.k.weight"] @ x, p[f"{b}.layer.task.k_norm.weight"], 1e-5)
        v, place = p[f"{b}.layer.task.v.weight"] @ x, len(cache)
        cache.append((torch.cat([turned(one, place) for one in k.split(width)]), v))
        q = torch.stack([turned(one, place) for one in q.split(width)])
        k, v = (torch.stack(seen).unflatten(1, q.shape) for seen in zip(*cache[-self.window :], strict=True))
        weight = (torch.einsum("hd,nhd->hn", q, k) / math.sqrt(width)).softmax(-1)
        return p[f"{b}.layer.out.weight"] @ torch.einsum("hn,nhd->hd", weight, v).flatten()

    def logits(self, token: Tensor, cache: list[list[tuple[Tensor, Tensor]]], fast: dict[str, Tensor]) -> Tensor:
        p = self.p
        x = p["embedding.weight"][token]
        for n in range(len(self.model.blocks)):
            b = f"blocks.{n}"

            def post(name: str, y: Tensor, b: str = b) -> Tensor:
                name = f"{b}.{name}_post.weight"
                return rms(y, p[name]) if name in p else y

            x = x + post("layer", self.attend(b, rms(x, p[f"{b}.layer_norm.weight"]), cache[n]))
            if f"{b}.w0" in fast:
                z = rms(x, p[f"{b}.memory_norm.weight"])
                x = x + post("memory", (F.silu(z @ fast[f"{b}.w0"]) * (z @ fast[f"{b}.w2"])) @ fast[f"{b}.w1"])
            z = rms(x, p[f"{b}.ffn_norm.weight"])
            inner = F.silu(p[f"{b}.ffn.gate.weight"] @ z) * (p[f"{b}.ffn.up.weight"] @ z)
            x = x + post("ffn", p[f"{b}.ffn.down.weight"] @ inner)
        return self.p["embedding.weight"] @ rms(x, self.p["final_norm.weight"])

    def read(self, ids: Tensor) -> Tensor:
        """`[T, V]` of one document; `self.steps` are the norms of the inner gradients."""
        model, size = self.model, self.model.mini_batch_size
        fast = {
            f"blocks.{n}.{w}": self.p[f"blocks.{n}.memory.init.{w}"][0]
            for n in range(model.prefix, len(model.blocks))
            for w in ("w0", "w1", "w2")
        }
        out: list[Tensor] = []
        self.steps: list[float] = []
        for begin in range(0, len(ids), size):
            used = {name: value * 1.0 for name, value in fast.items()}
            here = [self.logits(token, self.cache, used) for token in ids[begin : begin + size]]
            out += here
            if begin + size < len(ids):
                labels = ids[begin + 1 : begin + size + 1]
                loss = sum(y.logsumexp(0) - y[t] for y, t in zip(here, labels, strict=True)) / size
                gradients = torch.autograd.grad(loss, list(used.values()), create_graph=True)
                if model.first_order:
                    gradients = tuple(g.detach() for g in gradients)
                norm = torch.cat([g.flatten() for g in gradients]).norm()
                self.steps.append(norm.item())
                factor = model.inner_clip / norm if model.inner_clip is not None and norm > model.inner_clip else 1.0
                steps = zip(fast.items(), gradients, strict=True)
                fast = {name: w - model.inner_lr * factor * g for (name, w), g in steps}
        return torch.stack(out)


@pytest.mark.parametrize(
    ("overrides", "clipped", "checkpoint"),
    [
        ("model.inner_clip=0.2", {True}, True),
        ("model.inner_clip=1.0", {True, False}, True),
        ("model.inner_clip=1.0", {True, False}, False),
        ("model.inner_clip=null model.inner_lr=0.2 model.post_norm=false", {False}, True),
        ("model.first_order=true", {True, False}, False),
        ("model.num_layers=4 model.suffix=1 model.mini_batch_size=3", {True, False}, True),
        ("model.num_layers=2 model.suffix=2 learner.window=3 model.inner_clip=0.3", {True}, True),
    ],
)
def test_outputs_and_every_gradient_of_a_plain_loop(overrides: str, clipped: set[bool], checkpoint: bool) -> None:
    model = make(*overrides.split(), f"model.checkpoint_mini_batches={str(checkpoint).lower()}")
    ids = tokens(2, 15)
    weight = torch.randn(2, 15, VOCAB, dtype=torch.double, generator=torch.Generator().manual_seed(3))
    window = 3 if "window=3" in overrides else 6
    plains = [Plain(model, window=window) for _ in ids]
    expected = torch.stack([one.read(row) for one, row in zip(plains, ids, strict=True)])
    norms = [norm for one in plains for norm in one.steps]
    assert len(norms) >= 6 and {norm > (model.inner_clip or math.inf) for norm in norms} == clipped
    found = model(ids)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    gradients = same_gradients(model, (found * weight).sum(), (expected * weight).sum())
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    with torch.no_grad():
        still = make(*overrides.split(), "model.inner_lr=0")(ids)
    assert (still - expected)[:, model.mini_batch_size :].abs().max() > 1e-3  # the inner loop counts
    torch.testing.assert_close(still[:, : model.mini_batch_size], expected[:, : model.mini_batch_size], **TOLERANCE)


# -- the laws of a language model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_any_split_gives_the_logits_and_gradients_of_one_call(mode: Any) -> None:
    model, ids = make(), tokens(2, 18)
    whole = model(ids)
    with mode():
        for cuts in [*([n] for n in range(1, 18)), list(range(1, 18)), [4, 8, 12], [5, 6, 13]]:
            logits = read_in_pieces(model, ids, cuts)[0]
            torch.testing.assert_close(logits, whole, **TOLERANCE)
            if logits.requires_grad and len(cuts) > 1:
                same_gradients(model, logits.square().sum(), whole.square().sum())


def test_states_are_chosen_cut_saved_and_read(tmp_path: Path) -> None:
    model, ids, more = make(), tokens(3, 14), tokens(3, 9, seed=5)
    _, state = model.step(ids)
    after = model.step(more, state)[0]
    order = torch.tensor([2, 0])
    torch.testing.assert_close(model.step(more[order], state.select(order))[0], after[order], **TOLERANCE)
    cut = state.detach()
    assert not any(tensor.requires_grad for tensor in (cut.layers[-1].inputs, cut.layers[-1].weights[0]["w0"]))
    assert torch.equal(model.step(more, cut)[0], after)
    cut.save(tmp_path / "state", model)
    read = LanguageModelState.load(tmp_path / "state", model=model)
    assert isinstance(read.layers[-1], Adaptation) and torch.equal(model.step(more, read)[0], after)
    assert state.to(torch.float64).nbytes == state.nbytes


def test_the_state_stops_growing() -> None:
    model, state, sizes = make(), None, []
    with torch.inference_mode():
        for _ in range(8):
            _, state = model.step(tokens(2, 4), state)
            sizes.append(state.nbytes)
    assert len(set(sizes[3:])) == 1


@pytest.mark.parametrize("sinks", [0, 2])
def test_padding_changes_nothing(sinks: int) -> None:
    """Sequences of different lengths, padded anywhere, whose mini-batches end at different columns."""
    model = make(f"learner.sinks={sinks}")
    lengths, width = (15, 4, 9, 1), 19
    ids, more = tokens(4, width), tokens(4, 11, seed=7)
    mask = torch.zeros(4, width, dtype=torch.bool)
    generator = torch.Generator().manual_seed(4)
    for row, length in enumerate(lengths):
        mask[row, torch.randperm(width, generator=generator)[:length]] = True
    for cut in (3, 11):
        documents_are_apart(model, ids, more, mask, torch.zeros_like(mask), cut)


@pytest.mark.parametrize(("starts", "checkpoint"), [
    ("0", "true"), ("0 4 8", "true"), ("1 2 3", "false"), ("6,2 7", "true"), ("13,4 5 6", "false"),
])  # fmt: skip
def test_packed_documents_equal_the_documents_apart(starts: str, checkpoint: str) -> None:
    """Outputs, gradients and what comes after; starts of the first sequence, and of the second if it has others."""
    model, ids, more = make(f"model.checkpoint_mini_batches={checkpoint}"), tokens(2, 19), tokens(2, 10, seed=9)
    reset = torch.zeros(2, 19, dtype=torch.bool)
    for row, places in enumerate((starts.split(",") * 2)[:2]):
        reset[row, [int(place) for place in places.split()]] = True
    together, apart = documents_are_apart(model, ids, more, torch.ones_like(reset), reset, 8)
    same_gradients(model, together.square().sum(), apart.square().sum())


def test_any_learner_can_be_the_memory() -> None:
    attention = partial(metattt.build, "layer=window_attention", "dim=8", "num_heads=2", "learner.window=6")
    model = EndToEnd(VOCAB, 8, 2, attention, mini_batch_size=4, learner=MLP(expansion=2.0)).double()
    ids = tokens(2, 14)
    torch.testing.assert_close(read_in_pieces(model, ids, [6, 9])[0], model(ids), **TOLERANCE)
    assert read_in_pieces(model, ids[:0], [6, 9])[0].shape == (0, 14, VOCAB)
    with torch.autocast("cpu", torch.bfloat16):  # which leaves double precision as it is
        torch.testing.assert_close(model(ids), read_in_pieces(model, ids, [6, 9])[0], **TOLERANCE)
    model(ids).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.blocks[1].memory.parameters())  # type: ignore[union-attr]
    for wrong in (3, Transformer()):
        refusal(partial(EndToEnd, VOCAB, 8, 2, attention, learner=wrong), "model.learner is a")
    linear = partial(metattt.build, "dim=8", "num_heads=2")
    refusal(lambda: EndToEnd(VOCAB, 8, 2, linear), "its layer is a Linear: set layer=window_attention, or fewer")


def test_memory_of_the_backward_pass() -> None:
    """What autograd keeps of a window twice as long: little more, beside the copies of the weights and the window."""
    kept = {}
    for checkpoint, length in itertools.product(("true", "false"), (128, 256)):
        model = make(f"model.checkpoint_mini_batches={checkpoint}", "model.mini_batch_size=32", "model.suffix=3")
        with SavedBytes() as saved:
            logits = model(tokens(1, length))
        kept[checkpoint, length] = saved.now if logits.requires_grad else 0
    grown = {checkpoint: kept[checkpoint, 256] - kept[checkpoint, 128] for checkpoint in ("true", "false")}
    assert grown["true"] < grown["false"] / 8


@pytest.mark.parametrize("checkpoint", ["true", "false"])
def test_weights_are_wide_under_autocast(checkpoint: str) -> None:
    """And the backward pass, which is outside of it, runs mini-batches again in the types in which they were run."""
    model = make(f"model.checkpoint_mini_batches={checkpoint}", "model.inner_lr=0.03", weights=0.05).float()
    ids, found, types = tokens(2, 15), [], set()
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, state = model.cross_entropy(ids[:, :-1], ids[:, 1:])
            assert state.layers[-1].weights[0]["w0"].dtype == torch.float32
        if enabled:
            hook = lambda module, given, y: types.add(y.dtype)  # noqa: E731
            model.blocks[2].ffn.gate.register_forward_hook(hook)  # type: ignore[union-attr, operator]
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert types == ({torch.bfloat16} if checkpoint == "true" else set())
    assert 0 < (found[0] - found[1]).norm() < 0.15 * found[0].norm()


REFUSED = {
    "layer=ttt_linear": "model=ttt_e2e sets `learner.window`, but the chosen learner has no `window`",
    "learner.window=null": "KernelEstimator without a window",
    "model.suffix=9": "model.suffix=9 is not allowed",
    "model.inner_clip=0": "model.inner_clip=0",
    "model.blocks=[ttt_linear]": "blocks",
    "model.pre_conv=true": "pre_conv",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_is_refused(override: str) -> None:
    refusal(lambda: make(override), REFUSED[override])


def test_states_and_calls_that_are_refused() -> None:
    model, ids = make(), tokens(2, 6)
    _, state = model.step(ids)
    refusal(lambda: model.step(tokens(3, 2), state), "the state is for 2 sequences, ids hold 3")
    fewer, other = make("model.num_layers=2").step(ids)[1], make("model.suffix=1").step(ids)[1]
    refusal(lambda: model.step(ids, fewer), "the state is of a model with 2 blocks, this one has 3")
    refusal(lambda: model.step(ids, other), "the state is of another model")
    refusal(model.blocks[-1].compile, "set compile=false")
    refusal(lambda: Builder(compose(*SMALL, job="language_model"), None).in_parts(print), "trainer=ddp")


# -- training and files ------------------------------------------------------------------------------------------------

TINY = (
    *SMALL, "dim=16", "model.num_layers=2", "model.mini_batch_size=8", "data.context_length=32", "data.batch_size=4", "training.lr=5e-3",
    "trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "sample=false",
)  # fmt: skip
SIX = ("data.max_bytes=200000", "data.validation_max_bytes=2048", "trainer.max_steps=6")


def test_the_inner_learning_rate_can_rise() -> None:
    model = make()
    model.scale = 0.5
    assert torch.equal(model(tokens(2, 15)), make("model.inner_lr=0.5")(tokens(2, 15)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps on the standard library's sources (`whole`), and one gone on with from its third step."""
    folder = tmp_path_factory.mktemp("runs")
    kept = ("callbacks.checkpoint.every_steps=3", "callbacks.checkpoint.keep=5")
    assert train(compose(*TINY, *SIX, *kept, f"output_dir={folder / 'whole'}")) == 0
    shutil.copytree(folder / "whole", folder / "resumed")
    assert train(compose(f"resume={folder / 'resumed' / 'checkpoints' / 'step-00000003'}", "overwrite=true")) == 0
    return folder


def test_it_trains_and_goes_on_as_it_would_have(runs: Path) -> None:
    losses = [*column(runs / "whole", "train/loss").values()]
    assert len(losses) == 6 and losses[-1] < losses[0]
    found, wanted = (read_checkpoint(runs / name) for name in ("resumed", "whole"))
    assert found["global_step"] == wanted["global_step"] == 6
    torch.testing.assert_close(dict(found["state_dict"]), dict(wanted["state_dict"]), rtol=0, atol=0)


def test_windows_without_an_inner_step_are_refused(tmp_path: Path) -> None:
    for settings in (("model.mini_batch_size=1024",), ("data.context_length=8",)):
        cfg = compose(*TINY, "data.max_bytes=20000", f"output_dir={tmp_path / 'run'}", *settings)
        refusal(partial(train, cfg), "set model.mini_batch_size below")


def test_a_trained_model_generates_and_is_scored(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, config = load_model(runs / "whole")
    assert isinstance(model, EndToEnd) and config.model.mini_batch_size == 8
    generate(compose(f"checkpoint={runs / 'whole'}", "prompt=def", "max_new_tokens=20", "device=cpu", job="generate"))
    assert capsys.readouterr().out.startswith("def")
    ids = torch.randint(257, (3, 30))
    drawn = torch.stack(list(draw(model, ids, 20, temperature=0)), 1)
    with torch.no_grad():
        logits = model(torch.cat([ids, drawn], 1))[:, 29:-1]
    assert torch.equal(drawn, logits.argmax(-1))  # with the weights that 50 tokens have moved
    loader: Any = [torch.randint(257, (2, 41))]
    one, other = (score(model, loader, torch.ones(257, dtype=torch.long), segment=segment) for segment in (40, 7))
    assert abs(one.nats - other.nats).max() < 1e-4


@pytest.mark.slow
def test_two_processes_train_as_one(runs: Path, tmp_path: Path) -> None:
    codes, output = two_processes(
        tmp_path, *TINY, *SIX, f"output_dir={tmp_path / 'run'}", "trainer=ddp", "trainer.devices=2",
    )  # fmt: skip
    assert codes == [0, 0], output
    one, two = (read_checkpoint(run)["state_dict"] for run in (runs / "whole", tmp_path / "run"))
    torch.testing.assert_close(dict(two), dict(one), rtol=0, atol=1e-5)
