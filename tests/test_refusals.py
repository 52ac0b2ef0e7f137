"""What cannot be computed, or is no setting, is said when a part or a layer is built: the value, what is allowed, in a line
or two."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

import metattt
from metattt.combined import Combined
from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.learners import (
    MLP,
    Convolution,
    KernelEstimator,
    KernelRidge,
    Learner,
    Linear,
    NestedTTT,
    RecurrentRidge,
    SwiGLU,
    Transformer,
)
from metattt.optimizers import (
    Adam,
    Append,
    BlockMomentum,
    GradientDescent,
    InnerOptimizer,
    MirrorDescent,
    Momentum,
    Sign,
    StateGated,
    WholeSequence,
)
from metattt.optimizers.channel_decay import ChannelDecay
from metattt.tasks import DecodedReconstruction, Reconstruction

LINEAR_MAP = partial(Linear, residual=False, norm=False, bias=False)


def layer(learner: Learner | None = None, rule: InnerOptimizer | None = None, task: Any = None, dim: int = 8) -> TTTLayer:
    return TTTLayer(dim, 2, task or Reconstruction(), learner or Linear(), rule or GradientDescent(4))


def shared(task: Any = None, **options: Any) -> Combined:
    return Combined(8, layer(), layer(task=task), **{"shared": True, **options})


def inner() -> Callable[..., TTTLayer]:
    return partial(TTTLayer, num_heads=1, task=Reconstruction(), learner=Linear(), optimizer=GradientDescent(2))


CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: SwiGLU(0), "expansion=0"),
    (lambda: Convolution("rows"), "learner.over=rows"),
    (lambda: Convolution(width=0), "width=0"),
    (lambda: KernelRidge(ridge=0.0), "ridge=0.0"),
    (lambda: KernelRidge("cubic"), "kernel=cubic"),
    (lambda: KernelRidge(bandwidth=-1.0), "bandwidth=-1.0"),
    (lambda: RecurrentRidge(ridge=1, ridge_floor=1), "above 1"),
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
    (lambda: GradientDescent(base_lr=float("nan")), "must be finite"),
    (lambda: Sign(base_lr=float("inf")), "must be finite"),
    (lambda: WholeSequence(base_lr=float("-inf")), "must be finite"),
    (lambda: MirrorDescent(retention="l2"), "optimizer.retention"),
    (lambda: MirrorDescent(q=1.5), "optimizer.q=1.5"),
    (lambda: MirrorDescent(mass=0.0), "optimizer.mass=0.0"),
    (lambda: MirrorDescent(threshold=-1.0), "optimizer.threshold=-1.0"),
    (lambda: MirrorDescent(read="inclusive"), "optimizer.read=previous"),
    (lambda: StateGated(step_gate="surprise"), "optimizer.step_gate"),
    (lambda: Reconstruction(loss="lp", loss_p=0.5), "task.loss_p=0.5"),
    (lambda: Reconstruction(loss="nobody"), "task.loss"),
    (lambda: Reconstruction(huber_delta_from="per_head"), "task.loss=squared has none"),
    # which parts go together
    (lambda: layer(MLP(), ChannelDecay()), "decays for every channel needs a linear learner"),
    (lambda: layer(Linear(norm=False, residual=False), ChannelDecay()), "has no meaning for a bias: set learner.bias"),
    (lambda: layer(MLP(step_scale=0.5), Sign()), "set learner.step_scale=null"),
    (lambda: layer(MLP(step_scale=0.5), Adam()), "set learner.step_scale=null"),
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
    (lambda: Combined(8, layer(dim=16), layer()), "layer.first has dim=16"),
    (lambda: shared(how="gate"), "with layer.how=sum, not gate"),
    (lambda: shared(shared=False, head_norm=True), "go with layer.shared=true"),
    (lambda: shared(DecodedReconstruction()), "has no projections that two layers can share"),
    (lambda: shared(Reconstruction("shared_qk")), "task.views=separate"),
    (lambda: shared(Reconstruction(kv_heads=1)), "as many features of k, not 4 and 8"),
    (lambda: shared(Reconstruction(qk_norm=True)), "set layer.first.task.qk_norm"),
]  # fmt: skip

OVERRIDES: list[tuple[str, str]] = [
    ("layer=window_attention learner.window=0", "learner.window=0 is not allowed: it must be at least 1, or null"),
    ("layer=window_attention learner.sinks=-1", "learner.sinks=-1 is not allowed: it must be at least 0"),
    ("layer=window_attention learner.window=null learner.sinks=2", "learner.sinks=2 has no meaning without a window"),
    ("layer=window_attention learner.window=abc", "expected an integer or null"),
    ("layer=attention task.kv_heads=3", "task.kv_heads=3 does not divide num_heads=2: choose from 1, 2"),
    ("layer=attention task.kv_heads=0", "task.kv_heads=0 is not allowed: it must be at least 1"),
    ("layer=attention task.kv_heads=1 task.views=shared_qk", "task.kv_heads=1 needs keys of their own"),
    ("layer=attention task.loss=huber task.huber_delta_from=per_head", "set task.huber_delta_from=constant"),
    ("layer=attention optimizer.decay=per_head", "does not use the keep gate of its rule: set optimizer.decay=none"),
    ("layer=kernel_ridge optimizer.write=shared", "does not use the write gate of its rule: set optimizer.write=none"),
    ("layer=mesa_net optimizer.levels=4", "does not use the levels gate of its rule: set optimizer.levels=0"),
    ("layer=mesa_net optimizer.write=step", "optimizer.write=step is the step size of optimizer.decay=mamba2"),
    ("layer=mesa_net optimizer.levels=1", "optimizer.levels=1 has no level"),
    ("layer=self_attention learner.normalize=false", "learner.kernel=linear"),
    ("layer=lact optimizer.newton_schulz=three", "choose one of constant, scheduled"),
    ("layer=ttt_mlp learner.trainble=[w2]", "trainable"),
    ("layer=ttt_linear layer.outer=frist_order", "layer.outer"),
    # what stands around a rule
    ("layer=mamba block_style=plain", "block_style=plain changes nothing in this layer"),
    ("layer=kda layer.gate=false", "layer.gate_rank=head_dim is of a gate"),
    ("layer=kda layer.gate_rank=0", "layer.gate_rank=0"),
    ("layer=kda layer.output_norm=batch", "layer.output_norm=batch is not allowed: it must be true"),
    ("layer=kda layer.norm_eps=0", "layer.norm_eps=0.0 is not allowed: it must be positive"),
    ("layer=kda layer.norm_eps_scale=d", "choose one of head_dim"),
    ("layer=delta_net task.views=shared_qk", "set task.views=separate, or task.short_conv=null"),
    ("layer=delta_net task.short_conv=0", "task.short_conv=0"),
    ("layer=gated_delta_net layer.init=orthogonal", "layer.init=orthogonal"),
    # two layers in the place of one
    ("layer=titans_mag layer.how=product", "choose one of sum, gate, serial"),
    ("layer=titans_mag layer.first.learner.windw=3", "Did you mean `layer.first.learner.window`?"),
    ("layer=titans_mag layer.shared=true", "with layer.how=sum, not gate"),
    ("layer=lact_block layer.shared=false", "go with layer.shared=true"),
    ("layer=lact_block layer.second.num_heads=3", "num_heads=3 does not divide dim=8"),
    ("layer=lact_block task.rope_heads=8", "task.rope_heads=8 does not divide dim=8 into heads of an even width"),
    # mixers
    ("layer=mamba layer.chunk_size=0", "layer.chunk_size=0 is not allowed"),
    ("layer=mamba layer.group_size=-1", "layer.group_size=-1 is not allowed"),
    ("layer=mamba layer.dt_max=1e-4", "layer.dt_max=0.0001 is below layer.dt_min=0.001"),
    ("layer=mamba layer.dt_rank=0", "layer.dt_rank=0 is not allowed"),
    ("layer=mamba layer.d_stat=2", "Did you mean `layer.d_state`"),
    ("layer=mamba layer.expand=1000000000", "lower dim, layer.expand"),
    ("layer=longhorn +learner.bias=false", "`+learner.bias=false` sets nothing: this layer has no learner"),
    ("layer=longhorn learner=mlp", "`learner=mlp` chooses nothing: this layer has no learner"),
    ("layer=longhorn optimizer.base_lr=2", "`optimizer` is not a key"),
    ("layer=mamba2_mixer num_heads=3", "num_heads=3 does not divide dim=8"),
    ("layer=mamba2_mixer layer.head_dim=3", "layer.head_dim=3 does not divide layer.expand x dim = 16"),
    ("layer=mamba2_mixer layer.ngroups=3", "layer.ngroups=3 does not divide the 4 heads"),
]


def said(call: Callable[[], object], message: str) -> None:
    with pytest.raises(MetaTTTError) as error:
        call()
    assert message in str(error.value) and len(str(error.value).splitlines()) <= 2


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_in_python(call: Callable[[], object], message: str) -> None:
    said(call, message)


@pytest.mark.parametrize(("overrides", "message"), OVERRIDES)
def test_as_overrides(overrides: str, message: str) -> None:
    said(lambda: metattt.build("dim=8", "num_heads=2", *overrides.split()), message)
