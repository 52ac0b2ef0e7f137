"""What cannot be computed, is no setting or no input, is said when a part is built or called: the value, what is allowed, in
a line or two. (Types and devices that do not fit are torch's to say.)"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals_for_tests import refusal
from torch import nn

import metattt
from metattt.combined import Combined
from metattt.errors import MetaTTTError
from metattt.generation.sampling import generate
from metattt.generation.text import generate_text
from metattt.layer import TTTLayer
from metattt.learners import MLP, KernelEstimator, KernelRidge, Learner, Linear, NestedTTT, RecurrentRidge, Transformer
from metattt.learners.depthwise import Depthwise
from metattt.models.language_model import LanguageModel
from metattt.nested import map_tensors
from metattt.optimizers import (
    Adam,
    Append,
    BlockMomentum,
    GradientDescent,
    InnerOptimizer,
    MirrorDescent,
    Momentum,
    Sign,
    WholeSequence,
)
from metattt.optimizers.channel_decay import ChannelDecay
from metattt.registry import REGISTERED, register
from metattt.state import State
from metattt.tasks import DecodedReconstruction, Pairs, Reconstruction
from metattt.tasks.window import WindowViews


def layer(learner: Learner | None = None, rule: InnerOptimizer | None = None, task: Any = None, dim: int = 8) -> TTTLayer:
    return TTTLayer(dim, 2, task or Reconstruction(), learner or Linear(), rule or GradientDescent(4))


PLAIN = partial(Linear, bias=False, residual=False, norm=False)


def shared(task: Any = None, **options: Any) -> Combined:
    return Combined(8, layer(), layer(task=task), **{"shared": True, **options})


def inner() -> Callable[..., TTTLayer]:
    return partial(TTTLayer, num_heads=1, task=Reconstruction(), learner=Linear(), optimizer=GradientDescent(2))


CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: KernelRidge(ridge=0.0), "ridge=0.0"),
    (lambda: RecurrentRidge(ridge=1, ridge_floor=1), "above 1"),
    (lambda: Depthwise(size=4), "learner.size=4 has no place in the middle"),
    (lambda: Transformer(num_heads=3).setup(1, 8, 8), "does not divide the head width 8"),
    (lambda: NestedTTT(3), "partial"),
    (lambda: layer(NestedTTT(inner())), "read=previous"),
    (lambda: NestedTTT(inner(), residual=False).setup(2, 4, 8), "width 4"),
    (lambda: Momentum(nesterov=True, momentum="none"), "optimizer.momentum=none"),
    (lambda: Momentum(decay_to_init=True), "optimizer.decay=none"),
    (lambda: Momentum(gradient_at="decayed", decay="per_head"), "optimizer.anchor=online"),
    (lambda: Momentum(momentum_init=1.5), "optimizer.momentum_init=1.5"),
    (lambda: Momentum(4, base_lr=0.0, decay="mamba2"), "no meaning with optimizer.decay=mamba2"),
    (lambda: BlockMomentum(4, base_lr=-1.0, lr="per_weight"), "no meaning with optimizer.lr=per_weight"),
    (lambda: BlockMomentum(read="inclusive"), "optimizer.read=previous"),
    (lambda: Adam(beta1=1.0), "optimizer.beta1=1.0"),
    (lambda: GradientDescent(max_norm=0.0), "optimizer.max_norm=0.0"),
    (lambda: GradientDescent(max_norm=float("inf")), "positive and finite"),
    (lambda: WholeSequence(base_lr=float("-inf")), "must be finite"),
    (lambda: MirrorDescent(q=1.5), "optimizer.q=1.5"),
    (lambda: MirrorDescent(read="inclusive"), "optimizer.read=previous"),
    (lambda: Reconstruction(loss="lp", loss_p=0.5), "task.loss_p=0.5"),
    (lambda: Reconstruction(huber_delta_from="per_head"), "task.loss=squared has none"),
    # which parts go together
    (lambda: layer(MLP(), ChannelDecay()), "set learner=linear_map (MLP is not a linear map)"),
    (lambda: layer(Linear(norm=False, residual=False), ChannelDecay()), "have no meaning for a bias: set learner.bias"),
    (lambda: layer(Linear(), task=WindowViews(degree=2)), "needs equal widths, not 14 and 4: set learner.residual=false"),
    (lambda: layer(MLP(step_scale=0.5), Sign()), "set learner.step_scale=null"),
    (lambda: layer(MLP(step_scale=0.5), BlockMomentum(orthogonalize=True)), "set learner.step_scale=null"),
    (lambda: layer(KernelEstimator(trainable=["w1"]), Append()), "KernelEstimator keeps its data"),
    (lambda: layer(KernelEstimator(step_scale=0.5), Append()), "KernelEstimator keeps its data"),
    # weights that learn, and how fast
    (lambda: layer(MLP(trainable=["w9"])), "learner.trainable names w9: the weights of MLP are w1, b1, w2, b2, norm_scale"),
    (lambda: layer(MLP(trainable=[])), "learner.trainable=[] leaves the inner loop nothing to learn: name one of w1"),
    (lambda: layer(MLP(trainable="w1")), "learner.trainable=w1 is not allowed: it must be a list of w1, b1"),
    (lambda: layer(MLP(step_scale={"w9": 1.0})), "learner.step_scale names w9: the fast weights of MLP are w1, b1, w2, b2"),
    (lambda: layer(MLP(trainable=["w2"], step_scale={"w1": 0.5})), "the fast weights of MLP are w2"),
    (lambda: layer(MLP(step_scale={"w1": 0})), "learner.step_scale.w1=0 is not allowed"),
    (lambda: layer(MLP(step_scale=-1.0)), "learner.step_scale=-1.0 is not allowed"),
    # two layers in the place of one
    (lambda: Combined(8, *(layer(),) * 2), "are one layer: make two"),
    (lambda: Combined(8, layer(), nn.Linear(8, 8)), "layer.second is a Linear: it must be a TTTLayer"),
    (lambda: Combined(8, layer(dim=16), layer()), "layer.first is a TTTLayer of dim=16: it must be"),
    (lambda: shared(how="gate"), "with layer.how=sum, not gate"),
    (lambda: shared(shared=False, head_norm=True), "go with layer.shared=true"),
    (lambda: shared(DecodedReconstruction()), "has no projections that two layers can share"),
    (lambda: shared(Reconstruction("shared_qk")), "task.views=separate"),
    (lambda: Combined(8, layer(), layer(PLAIN(), GradientDescent(1, "online"), Pairs()), shared=True), "not [8, 16, 16] and [8, 8, 8]"),
    (lambda: shared(Reconstruction(kv_heads=1)), "as many features of them, not [8, 4, 4] and [8, 8, 8]"),
    (lambda: shared(Reconstruction(qk_norm=True)), "set layer.first.task.qk_norm"),
]  # fmt: skip

# -- calls -------------------------------------------------------------------------------------------------------------

X, IDS, FLAGS = torch.zeros(2, 5, 8), torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.bool)
NAN = math.nan


def model(**options: Any) -> LanguageModel:
    return LanguageModel(**{"vocab_size": 11, "dim": 8, "num_layers": 1, "layer": layer, "ffn_dim": 8, **options})


def made(**options: Any) -> TTTLayer:
    given = {"dim": 8, "num_heads": 2, "task": Reconstruction(), "learner": Linear(), "optimizer": GradientDescent(4)}
    return TTTLayer(**(given | options))


def state(**changes: Any) -> State:
    return layer()(X)[1]._replace(**changes)


def of_type(dtype: torch.dtype) -> State:
    return narrow(state(), dtype)


def narrow(good: State, dtype: torch.dtype = torch.bfloat16) -> State:
    """What FSDP2 makes of a state that it casts to the type of the parameters."""
    return map_tensors(lambda one: one.to(dtype) if one.is_floating_point() else one, good)


def levels(count: int) -> nn.Module:
    return metattt.build("log_linear_mamba2", dim=8, num_heads=2, **{"optimizer.levels": count})


SGD = "layer=mttt_mlp optimizer.steps=4 optimizer.sampling=sgd"


class Tokenizer:
    separator, end = 10, None

    def encode(self, text: str) -> list[int]:
        return [min(9, byte) for byte in text.encode()]


CALLS += [
    *((lambda n=n, v=v: made(**{n: v}), n) for n, values in {
        "dim": [0, 8.0, None], "num_heads": [0, 3, "2"], "task": [None, Linear()], "learner": [Linear], "form": ["nobody", 3],
        "optimizer": [torch.optim.SGD], "group_size": [-1], "norm_eps": [0, "a"], "output_bias": [3],
    }.items() for v in values),
    (lambda: made(learner=KernelEstimator()), "optimizer=append"),
    (lambda: made(optimizer=Append()), "optimizer=minibatch"),
    (lambda: TTTLayer(6, 2, Reconstruction(rope="full"), Linear(), GradientDescent(4)), "task.rope=none"),
    *((lambda n=n, v=v: model(**{n: v}), n) for n, values in {
        "vocab_size": [0], "dim": [None, 10**7], "num_layers": [-1, 10**9], "ffn_dim": ["a"], "conv_width": [-1],
        "tie_embeddings": [None],
    }.items() for v in values),
    (lambda: model(layer=layer()), "layer"),
    # a layer's call
    *((lambda v=v: layer()(X + v), "NaN") for v in (NAN, -math.inf)),
    *((lambda x=x: layer()(x), "expected [B, T, 8]") for x in (X[0], X[None], X[..., :7], X[:, :0], X.long(), X.numpy())),
    *((lambda n=n, flags=flags: layer()(X, **{n: flags}), n) for n in ("mask", "reset")
      for flags in (FLAGS.long(), FLAGS[:, 1:], FLAGS[:1], FLAGS.numpy(), [[True]])),
    *((lambda it=it: layer()(X, it() if callable(it) else it), "state") for it in (
        "state", X, {}, lambda: tuple(state()), lambda: model().step(IDS)[1], lambda: state(pos=torch.zeros(2)),
        lambda: of_type(torch.bfloat16), lambda: of_type(torch.float64), lambda: state(phase=-1), lambda: state(phase="a"),
        lambda: state(phase=4), lambda: state(phase=2.0), lambda: state(weights={}), lambda: state(task={"conv": X}))),
    (lambda: layer()(X[:1], state()), "the state is for 2 sequences, x holds 1"),
    (lambda: state().to(torch.bfloat16), "float32 or wider"),
    (lambda: (one := metattt.build("gka", dim=8, num_heads=2))(X, one(X)[1].to(torch.float64)), "of other numbers"),
    (lambda: (one := metattt.build("mamba", dim=8, num_heads=2))(X, narrow(one(X)[1])), "a memory of torch.bfloat16"),
    *((lambda pos=pos: layer()(X, state(phase=None, pos=pos)), "the state") for pos in (IDS[:, 0].int(), X[:, 0, 0])),
    (lambda: layer(rule=GradientDescent(4, read="final"))(X, reset=torch.eye(2, 5).bool()), "read=final"),
    *((lambda given=given: metattt.build(*given.split(), dim=8, num_heads=2)(X), message) for given, message in (
        ("layer=gsa optimizer.channels=0", "set optimizer.channels=head_dim"),
        ("layer=gated_oja optimizer.channels=3", "optimizer.channels=head_dim"),
        ("layer=vittt", "5 tokens are no square map: set learner.columns"),
        ("layer=vittt task.rope=map", "5 tokens are no square map: set task.rope_columns"),
        (SGD, "5 tokens do not divide into optimizer.steps=4 parts"))),
    (lambda: metattt.build(*SGD.split(), dim=8, num_heads=2)(X[:, :4], mask=torch.eye(2, 4).bool()), "padding makes them"),
    (lambda: metattt.build("self_attention", dim=8, num_heads=2)(X, reset=FLAGS), "takes no state and no reset="),
    *((lambda a=a, b=b: b()(X, a()(X)[1]), "another layer") for other in (
        lambda: layer(MLP()), lambda: layer(Linear(bias=False)), lambda: layer(KernelEstimator(), Append()),
        lambda: layer(rule=GradientDescent(4, "batch")), lambda: layer(task=Reconstruction("shared_qk")),
    ) for a, b in ((other, layer), (layer, other))),
    (lambda: layer()(X, layer(dim=16)(torch.zeros(2, 5, 16))[1]), "another layer"),
    (lambda: levels(15)(X, levels(4)(X)[1]), "it holds 4 levels, this one has optimizer.levels=15"),
    (lambda: setattr(layer(), "learner", Linear()), "was made together"),
    *((lambda name=name: made(**{name: getattr(layer(), name)}), "already belongs")
      for name in ("task", "learner", "optimizer")),
    # a model's call
    *((lambda ids=ids: model()(ids), "ids") for ids in (IDS.float(), [[0, 1]], None, IDS[0], IDS[:, :0], IDS + 11, IDS - 1)),
    (lambda: model()(IDS, FLAGS.long()), "mask"),
    (lambda: model()(IDS, None, FLAGS[:, :3]), "reset"),
    (lambda: model().step(IDS, state()), "state"),
    (lambda: model().step(IDS[:1], model().step(IDS)[1]), "another model or batch"),
    (lambda: model(num_layers=2).step(IDS, model().step(IDS)[1]), "state"),
    *((lambda labels=labels: model().cross_entropy(IDS, labels), "labels") for labels in (IDS + 11, IDS.float(), IDS[:, :2], None)),
    # build, load, register
    *((lambda given=given: metattt.build(given), "") for given in (8, None, "dim", "dim=", "+anything=1", "layer=nobody")),
    (lambda: metattt.build("ttt_mpl", dim=8), "ttt_mlp"),
    (lambda: metattt.build("ttt_mlp", learner=MLP()), "learner"),
    (lambda: metattt.build("ttt_mlp", dmi=8), "dim"),
    (lambda: metattt.load_model("nowhere"), "nowhere"),
    (lambda: register("learner", "linear")(MLP), "linear"),
    (lambda: register("learner", "swallows")(type("S", (), {"__init__": lambda self, **a: None})), "misspelt"),
    *((lambda v=v: register("learner", "held")(type("S", (), {"__init__": lambda self, form=v: None})), "the default of form is")
      for v in (Enum("Form", "sine").sine, Path("x"), torch.float32, {"a": [Path("x")]})),  # type: ignore[attr-defined]
    # generation
    *((lambda n=n: generate(model(), IDS, n), "max_new_tokens") for n in (-1, 10**12, 1.5)),
    *((lambda given=given: generate(model(), IDS, 1, **given), next(iter(given))) for given in (
        *({"temperature": t} for t in ("hot", NAN, -1)), {"top_k": 1.5}, {"top_k": 0}, {"top_p": NAN}, {"top_p": 2.0}, {"seed": -1},
        {"mask": ~FLAGS}, {"mask": FLAGS[:1]}, {"stop": ["a"]})),
    *((lambda ids=ids: generate(model(), ids, 1), "") for ids in (IDS[:0], IDS[:, :0], IDS.float(), IDS + 11, [[0]])),
    (lambda: generate(layer(), IDS, 1), ""),
    *((lambda texts=texts: generate_text(model(), Tokenizer(), texts, 1), "") for texts in ("a", [], None, [3], ["\ud800"])),
    *((lambda stop=stop: generate_text(model(), Tokenizer(), ["a"], 1, stop=stop), "stop") for stop in (".", [""], None)),
]  # fmt: skip


PARTS = [(group, target) for (group, _), target in REGISTERED.items() if group in ("task", "learner", "optimizer")]


@pytest.mark.parametrize("target", sorted(target for _, target in PARTS if target.startswith("metattt.")))
def test_every_setting_of_every_part_is_checked(target: str) -> None:
    """A number of no type that a setting has, and for numbers NaN; `trainable` and `step_scale` are known when it is built."""
    module, _, name = target.rpartition(".")
    part = getattr(import_module(module), name)
    settings = inspect.signature(part).parameters.values()
    required = {setting.name: 1j for setting in settings if setting.default is setting.empty}
    for setting in settings:
        if setting.name in ("trainable", "step_scale"):
            continue
        for value in (1j, *([NAN] if type(setting.default) in (int, float) else [])):
            refusal(partial(part, **(required | {setting.name: value})))


OVERRIDES: list[tuple[str, str]] = [
    ("layer=window_attention learner.window=0", "learner.window=0 is not allowed: it must be at least 1, or null"),
    ("layer=window_attention learner.window=null learner.sinks=2", "learner.sinks=2 has no meaning without a window"),
    ("layer=window_attention learner.window=abc", "expected an integer or null"),
    ("layer=attention task.kv_heads=3", "task.kv_heads=3 does not divide num_heads=2: choose from 1, 2"),
    ("layer=attention task.kv_heads=1 task.views=shared_qk", "task.kv_heads=1 needs keys of their own"),
    ("layer=attention task.loss=huber task.huber_delta_from=per_head", "set task.huber_delta_from=constant"),
    ("layer=attention optimizer.decay=per_head", "does not use the keep gate of its rule: set optimizer.decay=none"),
    ("layer=kernel_ridge optimizer.write=shared", "does not use the write gate of its rule: set optimizer.write=none"),
    ("layer=mesa_net optimizer.levels=4", "does not use the levels gate of its rule: set optimizer.levels=0"),
    ("layer=mesa_net optimizer.write=step", "optimizer.write=step is the step size of optimizer.decay=mamba2"),
    ("layer=mesa_net optimizer.levels=1", "optimizer.levels=1 has no level"),
    ("layer=mesa_net optimizer.channels=4", "does not use the decay gate of its rule: set optimizer.channels=0"),
    ("layer=mesa_net optimizer.blend=shared", "does not use the blend gate of its rule: set optimizer.blend=none"),
    ("layer=gsa optimizer.channels=many", "optimizer.channels=many"),
    ("layer=self_attention learner.normalize=false", "learner.kernel=linear"),
    ("layer=vittt task.rope=map dim=18 num_heads=3", "multiple of 4"),
    ("layer=vittt task.rope=map task.rope_columns=0", "task.rope_columns=0"),
    ("layer=vittt task.rope=mapp", "full, map"),
    # what stands around a rule
    ("layer=mamba block_style=plain", "block_style=plain changes nothing in this layer"),
    ("layer=kda layer.gate=false", "layer.gate_rank=head_dim is of a gate"),
    ("layer=kda layer.output_norm=batch", "layer.output_norm=batch is not allowed: it must be true"),
    ("layer=kda layer.init=orthogonal", "layer.init=orthogonal"),
    ("layer=kda direction=left", "direction=left is not allowed: choose from forward, both"),
    ("layer=titans optimizer.mini_batch_size=null", "optimizer.read=committed shows that to its last token alone"),
    ("layer=ttt_linear optimizer.mini_batch_size=null", "optimizer.token_steps=shared has a number for each place"),
    ("layer=efla optimizer.step=half", "optimizer.step=half` is not allowed: choose one of exact, projection"),
    ("layer=mdn optimizer.write_init=1.5", "optimizer.write_init=1.5"),
    ("layer=kda layer.of_heads=3", "8"),
    ("layer=kda layer.norm_eps=0", "layer.norm_eps=0.0 is not allowed: it must be positive"),
    ("layer=delta_net task.views=shared_qk", "set task.views=separate, or task.short_conv=null"),
    # two layers in the place of one
    ("layer=titans_mag layer.first.learner.windw=3", "Did you mean `layer.first.learner.window`?"),
    ("layer=titans_mag layer.shared=true", "with layer.how=sum, not gate"),
    ("layer=lact_block layer.shared=false", "go with layer.shared=true"),
    ("layer=lact_block layer.second.num_heads=3", "num_heads=3 does not divide dim=8"),
    ("layer=lact_block task.rope_heads=8", "task.rope_heads=8 does not divide 8 features into heads of an even width"),
    # mixers
    ("layer=mamba layer.group_size=-1", "layer.group_size=-1 is not allowed"),
    ("layer=mamba layer.dt_max=1e-4", "layer.dt_max=0.0001 is not allowed: it must be at least 0.001"),
    ("layer=mamba layer.expand=1000000000", "layer: there is not enough memory for another"),
    ("layer=rwkv7 task.rank=1000000000000000000", "layer: there is not enough memory"),
    ("layer=longhorn +learner.bias=false", "`+learner.bias=false` sets nothing: this layer has no learner"),
    ("layer=longhorn learner=mlp", "`learner=mlp` chooses nothing: this layer has no learner"),
    ("layer=longhorn optimizer.base_lr=2", "this layer has no optimizer"),
    ("layer=mamba2_mixer num_heads=3", "num_heads=3 does not divide dim=8"),
    ("layer=mamba2_mixer layer.head_dim=3", "layer.head_dim=3 does not divide layer.expand x dim = 16"),
    ("layer=mamba2_mixer layer.ngroups=3", "layer.ngroups=3 does not divide the 4 heads"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_in_python(call: Callable[[], object], message: str) -> None:
    refusal(call, message, longest=600)


@pytest.mark.parametrize(("overrides", "message"), OVERRIDES)
def test_as_overrides(overrides: str, message: str) -> None:
    refusal(lambda: metattt.build("dim=8", "num_heads=2", *overrides.split()), message, longest=600)


@pytest.mark.parametrize(("overrides", "fix"), [
    ("layer=ttt_linear task=gated", "learner=linear_map and optimizer=online"),
    ("layer=custom task=gated learner=linear_map optimizer=online optimizer.max_norm=1",
        "optimizer.token_steps=none, optimizer.max_norm=null and optimizer.steps=1"),
    ("layer=custom task=gated learner=linear_map optimizer=online optimizer.read=previous layer.form=summed", "layer.form=auto"),
    ("layer=hgrn2 learner=depthwise optimizer.read=block", "learner=linear_map"),
    ("layer=kernel_ridge task=pairs", "task=reconstruction"),
    ("layer=titans optimizer.anchor=online", "optimizer.anchor=minibatch"),
])  # fmt: skip
def test_what_an_error_message_sets_leads_to_a_layer(overrides: str, fix: str) -> None:
    given, fixed = overrides.split(), fix.replace(" and", ",").split(", ")
    refusal(lambda: metattt.build("dim=8", "num_heads=2", *given), f"set {fix}", longest=600)
    replaced = {one.split("=")[0] for one in fixed}
    kept = [one for one in given if one.split("=")[0] not in replaced]
    metattt.build("dim=8", "num_heads=2", *kept, *fixed)


def test_a_model_that_does_not_fit_makes_nothing() -> None:
    kept: list[int] = []
    with pytest.raises(MetaTTTError, match=r"would take .* GB, and this machine has .* GB: lower model.num_layers"):
        model(num_layers=10**9, layer=lambda: kept.append(1) or layer())
    assert not kept


def test_a_fault_of_ours_keeps_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    one, whole = layer(), model()
    monkeypatch.setattr(one, "tokens", broken)
    monkeypatch.setattr(whole.blocks[0], "forward", broken)
    for call in (lambda: one(X), lambda: whole(IDS)):
        with pytest.raises(RuntimeError, match="a bug"):
            call()


def test_mixed_types_under_autocast_and_junk_in_padding_are_no_mistake() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert layer()(X.bfloat16())[0].shape == X.shape
    x, mask = X.clone(), FLAGS.clone()
    x[1, 3, 2], mask[1, 3] = NAN, False
    assert layer()(x, mask=mask)[0].isfinite().all()
