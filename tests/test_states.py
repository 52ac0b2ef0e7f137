"""States on disk: bit for bit, for every layer; what is damaged or of another model is refused; and answers from them.
States in memory: moved, and reordered."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hf_for_tests import made
from refusals_for_tests import refusal
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves

import metattt
from metattt import MetaTTTError, State
from metattt.checkpoints.tensors import read_described, write_tensors
from metattt.data.text import ByteTokenizer
from metattt.generation.sampling import generate
from metattt.generation.text import generate_text
from metattt.learners import KernelEstimator
from metattt.models import LanguageModel
from metattt.models.language_model import LanguageModelState
from metattt.nested import count_sequences, tensors_of

CAUSAL = ("ttt_linear", "gated_delta_net", "attention", "titans", "lact", "nested_ttt", "longhorn", "mamba", "mamba2_mixer")
CAUSAL += ("lact_block", "titans_mag", "titans_mal")
SMALL = {name: ["optimizer.mini_batch_size=8"] for name in ("lact", "titans", "lact_block", "titans_mag", "titans_mal")}


def same(a: Any, b: Any) -> bool:
    first, second = tree_leaves(a), tree_leaves(b)
    return len(first) == len(second) and all(
        torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, Tensor) else x == y for x, y in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("name", CAUSAL)
def test_a_state_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    layer = metattt.build(f"layer={name}", "dim=16", "num_heads=2", *SMALL.get(name, [])).double()
    x = torch.randn(2, 21, 16, dtype=torch.float64)
    with torch.no_grad():
        _, state = layer(x[:, :13])
        state.save(tmp_path / "state.safetensors", model=layer)
        expected = layer(x[:, 13:], state)[0]
        assert not torch.equal(expected, layer(x[:, 13:])[0]) and state.to("meta").nbytes == state.nbytes > 0
        for found in (type(state).load(tmp_path / "state.safetensors", model=layer), copy.deepcopy(state), state.to("cpu")):
            assert type(found) is type(state) and same(found, state)
            assert torch.equal(layer(x[:, 13:], found)[0], expected)
        swapped = layer(x[[1, 0], 13:], state.select(torch.tensor([1, 0])))[0]
    torch.testing.assert_close(swapped, expected[[1, 0]], rtol=1e-9, atol=1e-9)


def test_a_state_of_tokens_that_are_read_together(tmp_path: Path) -> None:
    """Its positions are one number for all tokens."""
    for name in ("self_attention", "linear_attention_image"):
        _, state = metattt.build(name, dim=16, num_heads=2)(torch.randn(1, 9, 16))
        state.save(tmp_path / "state")
        assert same(State.load(tmp_path / "state"), state)


def test_answers_from_a_memory(tmp_path: Path) -> None:
    model, tokenizer = made("layer=ttt_linear")[0], ByteTokenizer()
    document, questions = "the inner loop learns from every token. ", ["what", "which of them?"]
    ids = torch.tensor([[256, *document.encode()]])
    with torch.no_grad():
        model.step(ids)[1].save(tmp_path / "memory", model)
    state = LanguageModelState.load(tmp_path / "memory", model=model)
    before = state.map(torch.clone)
    wanted = generate_text(model, tokenizer, [document + one for one in questions], 12, temperature=0)
    for _ in range(2):
        assert generate_text(model, tokenizer, questions, 12, temperature=0, state=state) == wanted
        assert same(state, before)
    two = state.select(torch.tensor([0, 0]))
    assert generate_text(model, tokenizer, questions, 12, temperature=0, state=two) == wanted
    assert generate_text(model, tokenizer, questions, 12, temperature=0) != wanted
    for prompts, given, told in (
        (["a", ""], state, "'' is not allowed after a state"),
        (["a", "b", "c"], two, "of 2 sequences, and there are 3 prompts"),
    ):
        refusal(partial(generate_text, model, tokenizer, prompts, 12, state=given), told)
    refusal(lambda: generate(model, torch.zeros(2, 3).long(), 4, state=state), "of 1 sequences, and there are 2 prompts")


def test_another_model(tmp_path: Path) -> None:
    model, other = made("layer=ttt_linear")[0], made("layer=ttt_linear", seed=1)[0]
    with torch.no_grad():
        state = model.step(torch.randint(257, (1, 9)))[1]
        state.save(tmp_path / "with", model)
        state.save(tmp_path / "without")
        state.layers[0].save(tmp_path / "layer")
    load = LanguageModelState.load
    refusal(lambda: load(tmp_path / "with", model=other), "learned by another model")
    load(tmp_path / "with")
    refusal(lambda: load(tmp_path / "without", model=model), "does not name its model")
    refusal(lambda: load(tmp_path / "layer"), "holds a State: load it with metattt.state.State.load")
    told = "holds a LanguageModelState: load it with ", ".LanguageModelState.load"
    refusal(lambda: State.load(tmp_path / "without"), *told)


def test_files_that_are_none(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "tensors")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").touch()
    for name, message in {
        "nowhere": "does not exist", "": "not a file", "tensors": "not a state", "text": "cannot be read", "empty": "cannot be read",
    }.items():  # fmt: skip
        refusal(lambda name=name: State.load(tmp_path / name), message, lines=1)
    state = metattt.build("layer=ttt_linear", "dim=16", "num_heads=2")(torch.randn(1, 3, 16))[1]
    for path in (tmp_path, tmp_path / "text" / "below", "/proc/nobody"):
        refusal(partial(state.save, path), "cannot be written")
    assert not list(tmp_path.glob("*.part"))


def rewritten(file: Path, change: Any) -> None:
    """The file with another text about its tensors, and a checksum that fits it: as somebody who wants to deceive writes it."""
    held, about = read_described(file)
    content = json.loads(about)
    change(content)
    write_tensors(file, held, json.dumps(content))


@pytest.mark.parametrize(("change", "message"), [
    (lambda it: it.update(version=2), "version 2"),
    (lambda it: it.update(format="other"), "not a state"),
    (lambda it: it["state"].update(kind="os.system"), "does not hold what a state holds"),
    (lambda it: it["state"].pop("pos"), "does not hold what a state holds"),
    (lambda it: it["state"].update(phase="seven"), "does not hold what a state holds"),
    (lambda it: it["state"].update(pos=it["state"]["weights"]["anchor"]["w1"]), "does not hold what a state holds"),
    (lambda it: it["state"].update(task={"a": 3}), "does not hold what a state holds"),
    (lambda it: it["state"].update(learner={"$call": "os"}), "is not allowed in a checkpoint"),
])  # fmt: skip
def test_forged_files(change: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "state"
    metattt.build("layer=linear_attention", "dim=16", "num_heads=2")(torch.randn(1, 3, 16))[1].save(file)
    rewritten(file, lambda content: None)
    State.load(file)
    rewritten(file, change)
    refusal(lambda: State.load(file), message)


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    file = tmp_path / "state"
    layer = metattt.build("layer=linear_attention", "dim=8", "num_heads=2")
    layer(torch.randn(1, 3, 8))[1].save(file)
    whole, wanted = file.read_bytes(), State.load(file)
    harmless = 0
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            harmless += same(State.load(file), wanted)
        except MetaTTTError:
            continue
        assert same(State.load(file), wanted), place  # padding of the header, or a name of its own
    assert harmless < len(whole) // 70
    file.write_bytes(whole[:-3])
    refusal(lambda: State.load(file), "truncated")


class Pair(NamedTuple):
    """The state of a layer that is not ours."""

    first: State
    second: Any


def test_states_of_layers_that_are_not_ours(tmp_path: Path) -> None:
    """Dictionaries, lists and numbers; named tuples that torch knows."""
    inner = metattt.build("layer=linear_attention", "dim=16", "num_heads=2")(torch.randn(1, 3, 16))[1]
    others = LanguageModelState((({"h.0": torch.ones(2, 3)}, [torch.zeros(2)], None, "text", 1.5),), (None,))
    alone = LanguageModelState((({"h.0": torch.ones(1, 3)}, [torch.zeros(1)], None, "text", 1.5),), (None,))
    assert same(others.select(torch.tensor([1])), alone)
    others.save(tmp_path / "others")
    assert same(LanguageModelState.load(tmp_path / "others"), others)
    state = LanguageModelState((Pair(inner, None),), (None,))
    refusal(lambda: state.save(tmp_path / "state"), "that holds Pair cannot be saved")
    with torch.serialization.safe_globals([Pair]):
        state.save(tmp_path / "state")
        found = LanguageModelState.load(tmp_path / "state")
    assert type(found.layers[0]) is Pair and type(found.layers[0].first) is State and same(found, state)
    refusal(lambda: LanguageModelState.load(tmp_path / "state"), "does not hold what a state holds")


# -- states in memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ttt_linear", "titans", "attention", "nested_transformer"])
def test_states_of_models_move_and_are_selected(name: str) -> None:
    """Integers and precision stay. (Of layers: the law `round_trips`.)"""
    model = LanguageModel(11, 16, 2, partial(metattt.build, f"layer={name}", "dim=16", "num_heads=2"))
    ids, index = torch.randint(11, (3, 7)), torch.tensor([2, 0, 2])
    state = model.step(ids[:, :5])[1]
    expected = model.step(ids[:, 5:], state)[0]
    before = [tensor.dtype for tensor in tensors_of(state)]
    for moved in (state.to("cpu"), state.to(device="cpu", copy=True), state.to(torch.float64).to(torch.float32)):
        assert [tensor.dtype for tensor in tensors_of(moved)] == before
        assert torch.equal(model.step(ids[:, 5:], moved)[0], expected)
    wanted = [torch.float64 if dtype.is_floating_point else dtype for dtype in before]
    for wide in (state.to("cpu", torch.float64), state.to(torch.ones(1).double())):
        assert [tensor.dtype for tensor in tensors_of(wide)] == wanted and torch.int64 in wanted
    for narrow in (torch.bfloat16, torch.int64):
        refusal(partial(state.to, narrow), "float32 or wider")
    torch.testing.assert_close(model.step(ids[index, 5:], state.select(index.tolist()))[0], expected[index])
    assert count_sequences(state.select([])) == 0
    for wrong in ([True, False], [[0, 1], [1, 0]], [-1]):  # flags of two sequences of three; beams of each; a beam that has ended
        with pytest.raises(IndexError):
            state.select(wrong)


def test_states_of_other_layers_that_keep_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused in a call and in `read`; what else fails is told as it is."""
    names, x = ("attention", "mesa_net", "gsa", "log_linear_mamba2"), torch.randn(2, 5, 8)
    layers = [metattt.build(f"layer={name}", "dim=8", "num_heads=2") for name in names]
    states = [layer(x)[1] for layer in layers]
    for layer, own in zip(layers, states, strict=True):
        for state in states:
            for call in (layer, layer.read) if state is not own else ():
                refusal(lambda: call(x, own._replace(learner=state.learner)), "the state is from another layer")  # noqa: B023
    monkeypatch.setattr(KernelEstimator, "estimate", lambda *given: torch.zeros(3) @ torch.zeros(4))
    with pytest.raises(RuntimeError, match="size"):
        layers[0](x, states[0])
