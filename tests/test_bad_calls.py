"""Calls of the Python interface that are wrong: each raises a MetaTTTError of one or two lines. (Types and devices that
do not fit are torch's to say.)"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import metattt
from metattt.errors import MetaTTTError
from metattt.generation.sampling import generate, sample
from metattt.generation.text import generate_text
from metattt.layer import TTTLayer
from metattt.learners import (
    MLP,
    Convolution,
    GlobalEstimator,
    KernelEstimator,
    KernelRidge,
    Linear,
    ModuleLearner,
    NestedTTT,
    SwiGLU,
    Transformer,
)
from metattt.models.language_model import LanguageModel
from metattt.optimizers import (
    Adam,
    Append,
    BlockMomentum,
    GradientDescent,
    Momentum,
    Sign,
    WholeSequence,
)
from metattt.registry import register
from metattt.state import State
from metattt.tasks import DecodedReconstruction, NextToken, Reconstruction

NAN, INF = math.nan, math.inf

CONSTRUCTORS: dict[Callable[..., Any], dict[str, list[Any]]] = {
    Linear: {"bias": [1, None, "no"], "residual": ["no"], "norm": [0], "learn_init": [None]},
    MLP: {
        "depth": [0, -1, 1.5, "2", True, 10**9, None, NAN],
        "expansion": [0, -1, NAN, INF, "4", None, 1e-60],
        "activation": ["nobody", None, 3, []],
        "init": ["nobody", None],
        "bias": ["no"],
    },
    SwiGLU: {"expansion": [0, NAN, "2"]},
    Convolution: {"width": [0, 1.5], "channels": [0, -3, "4"], "over": ["nobody"], "activation": ["nobody"]},
    Transformer: {"num_heads": [0, "1"], "expansion": [0, NAN]},
    KernelEstimator: {"bandwidth": [0, -1, NAN, INF, "1"], "neighbours": [0, 1.5], "kernel": ["nobody"], "bias": [3]},
    KernelRidge: {"ridge": [0, NAN, INF, None], "bandwidth": [0, "1"], "kernel": [None]},
    GlobalEstimator: {"bandwidth": [0, NAN], "kernel": ["nobody"], "normalize": ["no"]},
    ModuleLearner: {"module": [None, 3, nn.Linear]},
    NestedTTT: {"layer": [None, 3]},
    Reconstruction: {
        "views": ["nobody", None], "conv_width": [0, 1.5, "4"], "rope": ["nobody"], "rope_theta": [0, NAN, INF, "1"],
        "feature_map": [None, []], "normalize_qk": ["no"], "bias": [2], "corruption": ["nobody"],
        "corruption_rate": [-1, NAN, "0.1"], "seed": [-1, 1.5, "0", 2**70], "loss": ["nobody"], "huber_delta": [0, NAN],
    },
    NextToken: {"conv_width": [0]},
    DecodedReconstruction: {"decoder_norm": ["no"]},
    GradientDescent: {
        "mini_batch_size": [0, -1, 1.5, "16", None, 2**40], "anchor": ["nobody", None], "read": ["nobody", 3],
        "steps": [0, 2, 1.5, 10**9], "base_lr": [NAN, INF, "1", None, 1e300], "lr": [0.1], "lr_scale": [None],
        "token_steps": ["nobody"], "max_norm": [0, NAN, INF, "1"], "compute_chunk": [0, 1.5],
    },
    Momentum: {
        "momentum_init": [0, 1, 2, NAN, "0.9"], "decay": ["nobody"], "decay_init": [-1], "nesterov": ["no"], "decay_to_init": [True, 1],
        "gradient_at": ["decayed"],
    },
    BlockMomentum: {"read": ["inclusive"], "momentum_init": [2, NAN], "decay_init": ["a"], "orthogonalize": [None], "pool": [3]},
    Adam: {"beta1": [1, -1, NAN], "beta2": [1.5], "eps": [0, NAN, INF]},
    Sign: {"base_lr": [NAN]},
    WholeSequence: {"steps": [0, None], "sampling": ["nobody"], "base_lr": [INF], "seed": [-1, "a"], "compute_chunk": [0]},
}  # fmt: skip


def layer(**options: Any) -> TTTLayer:
    given = {"dim": 8, "num_heads": 2, "task": Reconstruction(), "learner": Linear(), "optimizer": GradientDescent(4)}
    return TTTLayer(**(given | options))


def model(**options: Any) -> LanguageModel:
    given = {"vocab_size": 11, "dim": 8, "num_layers": 1, "layer": layer, "ffn_dim": 8}
    return LanguageModel(**(given | options))


X = torch.zeros(2, 5, 8)
IDS = torch.zeros(2, 5, dtype=torch.long)
FLAGS = torch.ones(2, 5, dtype=torch.bool)


def state(**changes: Any) -> State:
    return layer()(X)[1]._replace(**changes)


def other_weights(change: Callable[[Tensor], Any]) -> State:
    good = state()
    weights = {slot: {k: change(v) for k, v in named.items()} for slot, named in good.weights.items()}
    return good._replace(weights=weights)


class Tokenizer:
    separator, end = 10, None

    def encode(self, text: str) -> list[int]:
        return [min(9, byte) for byte in text.encode()]

    def decode(self, ids: Any) -> bytes:
        return bytes(ids)


CALLS: dict[str, Callable[[], Any]] = {
    f"{cls.__name__}({name}={value!r:.20})": partial(cls, **{name: value})
    for cls, settings in CONSTRUCTORS.items()
    for name, values in settings.items()
    for value in values
}
CALLS |= {
    f"TTTLayer({name}={value!r:.30})": partial(lambda name, value: layer(**{name: value}), name, value)
    for name, values in {
        "dim": [0, -8, 8.0, "8", None, 7, 10**9, 10**20], "num_heads": [0, 3, "2", None], "task": [None, "ttt", Linear()],
        "learner": [None, Linear, KernelEstimator()], "optimizer": [None, Append(), torch.optim.SGD], "form": ["nobody", None, 3, []],
        "group_size": [-1, 1.5, "a"], "output_norm": [None], "gate": ["no"], "output_bias": [3],
        "norm_eps": [0, -1, NAN, "a", True], "norm_eps_scale": ["no", None, 2],
    }.items()
    for value in values
}  # fmt: skip
CALLS |= {
    f"LanguageModel({name}={value!r:.30})": partial(lambda name, value: model(**{name: value}), name, value)
    for name, values in {
        "vocab_size": [0, -1, 1.5, "a", 10**12], "dim": [0, None, "8", 10**7], "num_layers": [0, -1, 1.5, 10**9], "layer": [None, layer()],
        "ffn_dim": [0, "a", 10**12], "conv_width": [0, 10**12], "norm_eps": [-1, 0, NAN, "a"], "pre_conv": ["no"],
        "tie_embeddings": [None], "causal": ["no"], "checkpoint_blocks": [3],
    }.items()
    for value in values
}  # fmt: skip
CALLS |= {
    "x: 2 axes": lambda: layer()(X[0]),
    "x: 4 axes": lambda: layer()(X[None]),
    "x: another width": lambda: layer()(X[..., :7]),
    "x: no tokens": lambda: layer()(X[:, :0]),
    "x: NaN": lambda: layer()(X * NAN),
    "x: inf": lambda: layer()(X + INF),
    "mask: a list": lambda: layer()(X, mask=[[True]]),
    "mask: integers": lambda: layer()(X, mask=FLAGS.long()),
    "mask: another shape": lambda: layer()(X, mask=FLAGS[:, :4]),
    "mask: one row": lambda: layer()(X, mask=FLAGS[:1]),
    "reset: numbers": lambda: layer()(X, reset=FLAGS.float()),
    "reset: another shape": lambda: layer()(X, reset=FLAGS[0]),
    "reset: numpy": lambda: layer()(X, reset=FLAGS.numpy()),
    "state: a text": lambda: layer()(X, "state"),
    "state: a tensor": lambda: layer()(X, X),
    "state: a dictionary": lambda: layer()(X, {}),
    "state: a tuple": lambda: layer()(X, tuple(state())),
    "state: of a model": lambda: layer()(X, model().step(IDS)[1]),
    "state: another batch": lambda: layer()(X[:1], state()),
    "state: pos of numbers": lambda: layer()(X, state(pos=torch.zeros(2))),
    "state: phase": lambda: layer()(X, state(phase=-1)),
    "state: phase a text": lambda: layer()(X, state(phase="a")),
    "state: phase too far": lambda: layer()(X, state(phase=4)),
    "state: weights empty": lambda: layer()(X, state(weights={})),
    "state: weights narrower": lambda: layer()(X, other_weights(Tensor.bfloat16)),
    "state: weights transposed": lambda: layer()(X, other_weights(lambda w: w.flatten(2))),
    "state: task of another": lambda: layer()(X, state(task={"conv": X})),
    "state: to bfloat16": lambda: state().to(torch.bfloat16),
    "state: to integers": lambda: state().to(torch.int64),
    "parts: twice": lambda: layer(learner=layer().learner),
    "parts: replaced": lambda: setattr(layer(), "learner", Linear()),
    "ids: numbers": lambda: model()(IDS.float()),
    "ids: bytes": lambda: model()(IDS.to(torch.uint8)),
    "ids: a list": lambda: model()([[0, 1]]),
    "ids: None": lambda: model()(None),
    "ids: one axis": lambda: model()(IDS[0]),
    "ids: three axes": lambda: model()(IDS[None]),
    "ids: no tokens": lambda: model()(IDS[:, :0]),
    "ids: too large": lambda: model()(IDS + 11),
    "ids: negative": lambda: model()(IDS - 1),
    "ids: mask of another shape": lambda: model()(IDS, FLAGS[:1]),
    "ids: mask of integers": lambda: model()(IDS, FLAGS.long()),
    "ids: reset of another shape": lambda: model()(IDS, None, FLAGS[:, :3]),
    "step: state a text": lambda: model().step(IDS, "state"),
    "step: state of a layer": lambda: model().step(IDS, state()),
    "step: another batch": lambda: model().step(IDS[:1], model().step(IDS)[1]),
    "step: fewer blocks": lambda: model(num_layers=2).step(IDS, model().step(IDS)[1]),
    "step: not causal": lambda: model(causal=False).step(IDS),
    "labels: too large": lambda: model().cross_entropy(IDS, IDS + 11),
    "labels: numbers": lambda: model().cross_entropy(IDS, IDS.float()),
    "labels: another shape": lambda: model().cross_entropy(IDS, IDS[:, :2]),
    "labels: None": lambda: model().cross_entropy(IDS, None),
    "labels: reduction": lambda: model().cross_entropy(IDS, IDS, reduction="mean"),
    "build: nobody": lambda: metattt.build("layer=nobody"),
    "build: no override": lambda: metattt.build("dim"),
    "build: a number": lambda: metattt.build(8),
    "build: None": lambda: metattt.build(None),
    "build: empty": lambda: metattt.build("dim="),
    "build: unknown": lambda: metattt.build("+anything=1"),
    "build: dim": lambda: metattt.build("dim=1000000000"),
    "build: a layer misspelt": lambda: metattt.build("ttt_mpl", dim=8),
    "build: an object": lambda: metattt.build("ttt_mlp", learner=MLP()),
    "build: a list of objects": lambda: metattt.build("ttt_mlp", **{"learner.trainable": [MLP]}),
    "build: a keyword misspelt": lambda: metattt.build("ttt_mlp", dmi=8),
    "build: seed": lambda: metattt.build("seed=-1"),
    "load_model: nothing": lambda: metattt.load_model("nowhere"),
    "register: twice": lambda: register("learner", "linear")(MLP),
    "register: **kwargs": lambda: register("learner", "swallows")(type("S", (), {"__init__": lambda self, **a: None})),
    "sample: temperature": lambda: sample(torch.zeros(1, 3), NAN),
    "sample: below 0": lambda: sample(torch.zeros(1, 3), -1),
    "sample: NaN": lambda: sample(torch.full((1, 3), NAN)),
    "sample: NaN at 0": lambda: sample(torch.full((1, 3), NAN), 0),
    "sample: top_k": lambda: sample(torch.zeros(1, 3), 1.0, 0),
    "sample: top_p": lambda: sample(torch.zeros(1, 3), 1.0, None, 2.0),
    "generate: -1": lambda: generate(model(), IDS, -1),
    "generate: 10**12": lambda: generate(model(), IDS, 10**12),
    "generate: 1.5": lambda: generate(model(), IDS, 1.5),
    "generate: temperature": lambda: generate(model(), IDS, 1, "hot"),
    "generate: top_k": lambda: generate(model(), IDS, 1, 1.0, 1.5),
    "generate: top_p": lambda: generate(model(), IDS, 1, 1.0, None, NAN),
    "generate: seed": lambda: generate(model(), IDS, 1, seed=-1),
    "generate: seed a text": lambda: generate(model(), IDS, 1, seed="a"),
    "generate: no prompts": lambda: generate(model(), IDS[:0], 1),
    "generate: no tokens": lambda: generate(model(), IDS[:, :0], 1),
    "generate: numbers": lambda: generate(model(), IDS.float(), 1),
    "generate: too large": lambda: generate(model(), IDS + 11, 1),
    "generate: a list": lambda: generate(model(), [[0]], 1),
    "generate: mask": lambda: generate(model(), IDS, 1, mask=~FLAGS),
    "generate: mask of another shape": lambda: generate(model(), IDS, 1, mask=FLAGS[:1]),
    "generate: stop": lambda: generate(model(), IDS, 1, stop=["a"]),
    "generate: stop of a number": lambda: generate(model(), IDS, 1, stop=3),
    "generate: not a model": lambda: generate(layer(), IDS, 1),
    "text: one text": lambda: generate_text(model(), Tokenizer(), "a", 1),
    "text: none": lambda: generate_text(model(), Tokenizer(), [], 1),
    "text: None": lambda: generate_text(model(), Tokenizer(), None, 1),
    "text: numbers": lambda: generate_text(model(), Tokenizer(), [3], 1),
    "text: a surrogate": lambda: generate_text(model(), Tokenizer(), ["\ud800"], 1),
    "text: stop": lambda: generate_text(model(), Tokenizer(), ["a"], 1, stop="."),
    "text: stop empty": lambda: generate_text(model(), Tokenizer(), ["a"], 1, stop=[""]),
    "text: stop None": lambda: generate_text(model(), Tokenizer(), ["a"], 1, stop=None),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call(name: str) -> None:
    with pytest.raises(MetaTTTError) as caught:
        CALLS[name]()
    assert 1 <= len(str(caught.value).splitlines()) <= 2 and len(str(caught.value)) < 600, caught.value


def test_a_model_that_does_not_fit_makes_nothing() -> None:
    made: list[int] = []
    with pytest.raises(MetaTTTError, match=r"numbers, .* GB, and this machine has .* GB: lower model.num_layers"):
        model(num_layers=10**9, layer=lambda: made.append(1) or layer())
    assert not made


def test_a_fault_of_ours_keeps_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    made = layer()
    monkeypatch.setattr(made, "tokens", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        made(X)
    whole = model()
    monkeypatch.setattr(whole.blocks[0], "forward", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        whole(IDS)


def test_mixed_types_under_autocast_are_no_mistake() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert layer()(X.bfloat16())[0].shape == X.shape
