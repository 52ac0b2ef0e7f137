"""Two layers in the place of one: each known combination against a plain loop, and every law that a layer obeys."""

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path

import layer_references
import pytest
import torch
from torch import Tensor, nn

import metattt
from metattt.catalog.layer_measures import examine
from metattt.checkpoints.folder import write_model
from metattt.checkpoints.record import make_record
from metattt.checkpoints.trained import load_model
from metattt.combined import Combined, CombinedState
from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model
from metattt.errors import MetaTTTError
from metattt.inner.causality import found_out
from metattt.layer import TTTLayer
from metattt.learners import KernelEstimator, Linear
from metattt.measures.inner_health import inner_health
from metattt.mixers.mamba2 import Mamba2
from metattt.models import LanguageModel
from metattt.models.published_config import PublishedConfig
from metattt.optimizers import Append, GradientDescent
from metattt.parallel.cuts import check_cut
from metattt.tasks import DecodedReconstruction, Reconstruction
from metattt.testing.specimen import randomize

B = 4  # tokens a mini-batch
SMALL = {
    "lact_block": (f"optimizer.mini_batch_size={B}", "layer.first.learner.window=3"),
    "titans_mag": (f"optimizer.mini_batch_size={B}", "layer.first.learner.window=3"),
    "titans_mal": (f"optimizer.mini_batch_size={B}", "layer.second.learner.window=3"),
}
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def make(name: str, *overrides: str) -> Combined:
    layer = metattt.build(f"layer={name}", "dim=8", "num_heads=2", *SMALL[name], *overrides).double()
    randomize(layer)
    assert isinstance(layer, Combined)
    return layer


def gradients(layer: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    leaves = {"x": x} | dict(layer.named_parameters())
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).cos().view_as(y)
    found = torch.autograd.grad((y * weight).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize(("name", "few"), [*((name, False) for name in SMALL), ("lact_block", True)])
def test_equals_its_plain_loop(name: str, few: bool) -> None:
    """Outputs, and the gradients of every parameter. `few`: one head in the memory of LaCT, two in its attention."""
    plain = ["block_style=plain"] if name.startswith("titans") else []  # the loops have no convolutions
    layer = make(name, *plain, *(["layer.second.num_heads=1"] if few else []))
    x = torch.randn(2, 2 * B + 3, 8, dtype=torch.float64, requires_grad=True)
    y = layer(x)[0]
    options = {"memory_heads": 1} if few else {}
    expected = getattr(layer_references, name)(dict(layer.named_parameters()), x, 2, B, **options)
    torch.testing.assert_close(y, expected, **EXACT)
    found, wanted = gradients(layer, x, y), gradients(layer, x, expected)
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-7, atol=1e-9, msg=key)
    assert not [key for key, gradient in wanted.items() if not gradient.any()]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("cuts", [[5, 6, 7, 19], list(range(1, 21)), [1, 20]])
def test_any_split_is_one_call(name: str, cuts: list[int]) -> None:
    layer, x = make(name), torch.randn(2, 21, 8, dtype=torch.float64, requires_grad=True)
    state, pieces = None, []
    for start, end in zip([0, *cuts], [*cuts, 21], strict=True):
        y, state = layer(x[:, start:end], state)
        pieces.append(y)
    cut, whole = torch.cat(pieces, 1), layer(x)[0]
    torch.testing.assert_close(cut, whole, **EXACT)
    found, wanted = gradients(layer, x, cut), gradients(layer, x, whole)
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", SMALL)
def test_padding_and_documents(name: str) -> None:
    layer, x = make(name), torch.randn(2, 24, 8, dtype=torch.float64)
    mask, reset = torch.rand(2, 24) < 0.7, torch.zeros(2, 24, dtype=torch.bool)
    mask[:, 11] = reset[:, 11] = True
    junk = torch.where(mask.unsqueeze(-1), x, torch.nan)
    first, state = layer(junk[:, :9], mask=mask[:, :9], reset=reset[:, :9])
    second, _ = layer(junk[:, 9:], state, mask=mask[:, 9:], reset=reset[:, 9:])
    y = torch.cat([first, second], 1)
    assert not y[~mask].any()
    for row in range(2):
        before, after = mask[row].clone(), mask[row].clone()
        before[11:], after[:11] = False, False
        for columns in (before, after):
            torch.testing.assert_close(y[row, columns], layer(x[row : row + 1, columns])[0][0], **EXACT)


@pytest.mark.parametrize("name", SMALL)
def test_a_state_is_like_that_of_a_layer(name: str) -> None:
    layer, x = make(name), torch.randn(2, 10, 8, dtype=torch.float64)
    state = layer(x)[1]
    file = io.BytesIO()
    torch.save(state.detach(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, CombinedState) and state.nbytes > 0
    expected = layer(x[:, :3], state)[0]
    for other in (loaded, copy.deepcopy(state.detach()), state.to("cpu"), state.select(torch.arange(2))):
        assert torch.equal(layer(x[:, :3], other)[0], expected)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x)[0], layer(x)[0]) and not torch.equal(
        state.select(torch.tensor([1, 0])).second.pos * 0 + 1, state.second.pos
    )
    fresh = make(name)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x)[0], layer(x)[0])


@pytest.mark.parametrize("name", SMALL)
def test_causal_and_divisible_over_time(name: str) -> None:
    layer = make(name)
    assert layer.causal and found_out(layer, 8) is False
    check_cut(layer, 8)


@pytest.mark.parametrize("name", SMALL)
def test_the_table_of_layers(name: str) -> None:
    known = examine(name, 16, 2)
    assert known.causal and known.cost_growth == 0
    assert known.state_bytes is not None and known.state_bytes[1:] == (0, 0)
    assert "kernel_estimator" in known.parts["learner"][0] and " + " in known.parts["learner"][0]


@pytest.mark.parametrize("name", SMALL)
def test_in_a_language_model(name: str) -> None:
    """Prefill, one token, several at any offset; trains, and its inner loop is looked at where its views are its own."""
    overrides = (
        "dim=16",
        "num_heads=2",
        "model.num_layers=2",
        "model.ffn_dim=16",
        "model.vocab_size=31",
        f"layer={name}",
    )
    model = instantiate_model(compose(*overrides, *SMALL[name], job="language_model"))
    ids = torch.randint(31, (2, 22))
    whole, state, pieces = model(ids), None, []
    for piece in ids.split([9, 1, 1, 7, 4], 1):
        logits, state = model.step(piece, state)
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)
    loss, _ = model.cross_entropy(ids[:, :-1], ids[:, 1:])
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert list(inner_health(model, lambda: model(ids))) == ([] if name == "lact_block" else [0, 1])


def test_shared_projections_are_there_once() -> None:
    layer = make("lact_block")
    names = {name for name, _ in layer.named_parameters()}
    assert {"first.task.q.weight", "first.task.k.weight", "first.task.v.weight", "out.weight"} < names
    assert not {
        name
        for name in names
        if name.startswith(("second.task.q.", "second.task.k.", "second.task.v.", "first.out", "second.out"))
    }


@pytest.mark.parametrize("how", ["sum", "gate", "serial"])
def test_from_python(how: str) -> None:
    """A combination of combinations, too."""
    one = TTTLayer(8, 2, Reconstruction(), Linear(), GradientDescent(4))
    two = TTTLayer(8, 4, Reconstruction(rope="full", kv_heads=2), KernelEstimator(window=3), Append())
    three = TTTLayer(8, 1, Reconstruction(), Linear(), GradientDescent(8))
    layer = Combined(8, Combined(8, one, two, how), three, "serial", group_size=3)  # type: ignore[arg-type]
    assert [part.group_size for part in (one, two, three)] == [3, 3, 3]
    x = torch.randn(2, 13, 8)
    y, state = layer(x[:, :5])
    torch.testing.assert_close(torch.cat([y, layer(x[:, 5:], state)[0]], 1), layer(x)[0])
    model = LanguageModel(11, 8, 2, partial(copy.deepcopy, layer))
    assert model(torch.randint(11, (2, 5))).shape == (2, 5, 11)


def layer_of(task: Reconstruction | DecodedReconstruction | None = None, dim: int = 8) -> TTTLayer:
    return TTTLayer(dim, 2, task or Reconstruction(), Linear(), GradientDescent(4))


def test_what_is_refused() -> None:
    one = layer_of()
    wrong = [
        (lambda: Combined(8, one, one), "are one layer: make two"),
        (lambda: Combined(8, one, nn.Linear(8, 8)), "layer.second is a Linear: it must be a TTTLayer"),
        (lambda: Combined(8, layer_of(dim=16), one), "layer.first has dim=16"),
        (lambda: Combined(8, one, layer_of(), "product"), "layer.how=product is not allowed"),  # type: ignore[arg-type]
        (lambda: Combined(8, one, layer_of(), "gate", shared=True), "with layer.how=sum, not gate"),
        (lambda: Combined(8, one, layer_of(), head_norm=True), "go with layer.shared=true"),
        (lambda: Combined(8, one, layer_of(), group_size=-1), "layer.group_size=-1 is not allowed"),
        (lambda: Combined(8, one, layer_of(), shared=1), "layer.shared"),  # type: ignore[arg-type]
        (
            lambda: Combined(8, one, layer_of(DecodedReconstruction()), shared=True),
            "has no projections that two layers can share",
        ),
        (lambda: Combined(8, one, layer_of(Reconstruction("shared_qk")), shared=True), "task.views=separate"),
        (
            lambda: Combined(8, one, layer_of(Reconstruction(kv_heads=1)), shared=True),
            "as many features of k, not 4 and 8",
        ),
        (lambda: Combined(8, one, layer_of(Reconstruction(qk_norm=True)), shared=True), "set layer.first.task.qk_norm"),
    ]
    for call, message in wrong:
        with pytest.raises(MetaTTTError) as error:
            call()
        assert message in str(error.value) and str(error.value).count("\n") <= 1
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    layer = make("titans_mag")
    for arguments, options in (
        ((x[..., :4],), {}), ((x[:, :0],), {}), ((x[0],), {}), ((x, layer.first(x)[1]), {}), ((x, layer(x[:1])[1]), {}),
        ((x, make("titans_mal")(x)[1]), {}), ((x,), {"mask": torch.ones(2, 5)}), ((x,), {"reset": torch.ones(2, 4, dtype=torch.bool)}),
        ((x.masked_fill(x > 0, torch.nan),), {}),
    ):  # fmt: skip
        with pytest.raises(MetaTTTError):
            layer(*arguments, **options)


def test_a_group_size_reaches_all_layers_inside() -> None:
    mixer = Mamba2(8, 2, head_dim=4)
    inner = Combined(8, layer_of(), mixer)
    both = Combined(8, layer_of(), inner, group_size=3)
    parts = (both, both.first, inner, inner.first, mixer)
    assert [part.group_size for part in parts] == [3] * 5
    both.group_size = 0
    assert [part.group_size for part in parts] == [0] * 5
    both.group_size = None  # leaves those of the layers
    assert [part.group_size for part in parts] == [None, 0, 0, 0, 0]
    for part in parts:
        with pytest.raises(MetaTTTError, match=r"layer.group_size=-3 is not allowed: it must be at least 0"):
            part.group_size = -3
    assert mixer.group_size == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("layer=titans_mag layer.how=product", "choose one of sum, gate, serial"),
        ("layer=titans_mag layer.first.learner.windw=3", "Did you mean `layer.first.learner.window`?"),
        ("layer=titans_mag layer.shared=true", "with layer.how=sum, not gate"),
        ("layer=lact_block layer.shared=false", "go with layer.shared=true"),
        ("layer=lact_block layer.second.num_heads=3", "num_heads=3 does not divide dim=8"),
        ("layer=lact_block task.rope_heads=8", "task.rope_heads=8 does not divide dim=8 into heads of an even width"),
        ("layer=lact optimizer.newton_schulz=three", "choose one of constant, scheduled"),
    ],
)
def test_what_is_refused_on_the_command_line(overrides: str, message: str) -> None:
    with pytest.raises(MetaTTTError) as error:
        metattt.build("dim=8", "num_heads=2", *overrides.split())
    assert message in str(error.value) and str(error.value).count("\n") <= 1


def test_as_an_entry_of_a_pattern() -> None:
    cfg = compose(
        "dim=16", "num_heads=2", "model.num_layers=2", "model.blocks=[lact_block,attention]", "layer.group_size=null",
        "model.blocks.lact_block.layer.first.learner.window=5", "model.blocks.lact_block.optimizer.mini_batch_size=4",
    )  # fmt: skip
    model = instantiate_model(cfg)
    block = model.blocks[0].layer
    assert (
        isinstance(block, Combined) and block.first.learner.window == 5 and block.second.optimizer.mini_batch_size == 4
    )  # type: ignore[union-attr]


def test_kept_on_disk(tmp_path: Path) -> None:
    cfg = compose(
        "dim=8", "num_heads=2", "model.num_layers=3", "model.ffn_dim=8", "model.vocab_size=11",
        "model.blocks=[lact_block,titans_mag,titans_mal]",
        job="language_model",
    )  # fmt: skip
    model = instantiate_model(cfg)
    write_model(tmp_path / "model", make_record(cfg), model.state_dict(), None)
    again, _ = load_model(tmp_path / "model")
    ids = torch.randint(11, (2, 9))
    assert torch.equal(again(ids), model(ids))
    with pytest.raises(MetaTTTError, match="no published form: its layers are Combined"):
        PublishedConfig.of(model)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SMALL)
def test_autocast(name: str) -> None:
    """Weights stay in fp32. (Muon lifts what bf16 rounds away in small singular values, so LaCT's outputs are its own.)"""
    layer, x = make(name).float(), torch.randn(2, 13, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
    memory = state.first if name == "titans_mal" else state.second
    assert y.isfinite().all() and {w.dtype for w in memory.weights["commit"].values()} == {torch.float32}
    if name != "lact_block":
        error = (y.float() - layer(x)[0]).norm() / layer(x)[0].norm()
        assert error < 0.02
