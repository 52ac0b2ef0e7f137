"""What stands around a rule: short convolutions, norms and gates of the published blocks, and `block_style=plain` without them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import metattt
from metattt.composition.compose import compose

SIZE = ("dim=8", "num_heads=2")
FLA_EPS = 1e-6  # what the models of flash-linear-attention give their layers' norms
NORMS = {  # ε of the published model, and the factor of its queries: 1/√4 or none
    "linear_attention": (FLA_EPS, 0.5), "linear_attention_elu": (FLA_EPS, 0.5), "retnet": (FLA_EPS, 0.5),
    "gla": (FLA_EPS, 0.5), "delta_net": (FLA_EPS, 0.5), "gated_delta_net": (FLA_EPS, 0.5), "kda": (FLA_EPS, 0.5),
    "gated_delta_net2": (FLA_EPS, 0.5), "comba": (FLA_EPS, 0.5), "delta_gradient": (FLA_EPS, 0.5),
    "delta_product": (FLA_EPS, 0.5), "gated_delta_product": (FLA_EPS, 0.5), "preconditioned_delta_net": (FLA_EPS, 0.5),
    "pkda": (FLA_EPS, 0.5), "gsa": (FLA_EPS, 1), "gka": (FLA_EPS, 0.5),
    "hgrn2": (1e-5, 0.5), "mesa_net": (FLA_EPS, 1), "log_linear_gated_delta_net": (FLA_EPS, 1), "rwkv7": (4 * 1e-5, 1), "mamba2": (1e-5, 1),
    "log_linear_mamba2": (1e-5, 1), "lact": (1e-5, 1), "ttt_linear": (1e-6, 1), "ttt_mlp": (1e-6, 1),
}  # fmt: skip


@pytest.mark.parametrize("row", NORMS)
def test_the_norm_has_the_published_epsilon(row: str) -> None:
    """Answers as small as those of delta rules at the start, to which ε matters."""
    eps, factor = NORMS[row]
    norm = metattt.build(f"layer={row}", *SIZE).double().norm
    y = 0.003 * torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    o = (factor * y).unflatten(-1, (1, 8) if row in ("hgrn2", "gsa", "ttt_linear", "ttt_mlp") else (2, 4))
    if row in ("rwkv7", "ttt_linear", "ttt_mlp"):
        o = o - o.mean(-1, keepdim=True)
    expected = (o / (o.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
    torch.testing.assert_close(norm(y), expected, rtol=0, atol=1e-12)


def test_plain_takes_the_block_away_and_what_is_given_stays() -> None:
    plain = metattt.build("layer=kda", "block_style=plain", *SIZE)
    assert type(plain.norm) is torch.nn.LayerNorm and plain.norm.eps == 1e-6
    assert plain.gate is None and not hasattr(plain.task, "conv_q")
    mixed = metattt.build("layer=kda", "block_style=plain", "layer.gate=silu", "task.short_conv=3", *SIZE)
    assert mixed.gate.weight.shape == (8, 8) and mixed.task.conv_v.weight.shape == (8, 1, 3)
    block = compose("model.blocks=[kda,ttt_linear]", "block_style=plain", "model.blocks.kda.layer.gate=silu", *SIZE)
    first, second = (block.model.blocks.layers[name] for name in block.model.blocks.pattern)
    assert (first.gate, first.output_norm, second.gate) == ("silu", True, False)


def test_decays_begin_as_those_of_mamba2() -> None:
    for row, low, high in (("gated_delta_net", 0.0, 16.0), ("mamba2", 1.0, 16.0)):
        decay = metattt.build(f"layer={row}", "dim=256", "num_heads=256").optimizer.decay_gate
        rate, step = decay.log_rate.exp(), F.softplus(decay.bias)
        assert low <= rate.min() < low + 1 and high - 1 < rate.max() <= high and 7 < rate.mean() < 10
        assert 0.00099 < step.min() < 0.002 and 0.05 < step.max() < 0.1001
        assert 0.008 < step.log().mean().exp() < 0.0125  # log-uniform: its median is 0.01


def test_initial_values_of_projections() -> None:
    wide = ("layer=gated_delta_net", "dim=128", "num_heads=4")
    for init, std in (("normal", 0.02), ("xavier", 128**-0.5)):
        layer = metattt.build(*wide, f"layer.init={init}")
        for linear in (layer.task.q, layer.task.k, layer.task.v, layer.gate, layer.out):
            assert linear.weight.std().item() == pytest.approx(std, rel=0.03)
        assert layer.optimizer.lr_weight.std().item() == pytest.approx(0.02, rel=0.2)  # a gate is no projection
