"""Step sizes that depend on the state: on how well the committed weights predict the token."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.optimizers.base import Gates
from metattt.optimizers.committed import Committed
from metattt.optimizers.momentum import Momentum
from metattt.registry import register
from metattt.setting import setting


@register(group="optimizer", name="state_gated")
class StateGated(Momentum):
    """`Momentum` whose step is `η_t σ(a s_t + c)`, with s_t from the token and W_a, the weights of the last commit.

    Args:
        mini_batch_size, anchor, read, steps, base_lr, lr, lr_scale, compute_chunk: see `GradientDescent`.
        momentum, momentum_init, nesterov, decay, decay_init, decay_to_init, gradient_at: see `Momentum`.
        step_gate: s_t: `alignment` ⟨f(k_t; W_a), v_t⟩/√d, the confidence of TTT3R (arXiv 2509.26645, Eq. 8: scaled
            products of state and observation), `loss` ℓ_t(W_a), or `gradient` ‖∇ℓ_t(W_a)‖, the momentary surprise of
            Titans (arXiv 2501.00663, Eq. 8).
        step_gate_params: a and c, 1 and 0 at the start: `learned` per head, or `constant`.

    Raises:
        MetaTTTError: as `Momentum`; in a call with `alignment`, for labels that are not as wide as predictions.
    """

    lr_scale = "head_dim"
    momentum = "none"
    decay: Literal["none", "constant", "shared", "per_head", "retnet", "mamba2"] = setting(default="none", fixed=True)
    step_gate: Literal["alignment", "loss", "gradient"] = setting(default="gradient")
    step_gate_params: Literal["learned", "constant"] = setting(default="learned", fixed=True)

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        if self.step_gate_params == "learned":
            self.step_gate_scale = nn.Parameter(torch.ones(num_heads))
            self.step_gate_bias = nn.Parameter(torch.zeros(num_heads))

    def equations(self) -> list[str]:
        signal = {"alignment": "⟨f(k_t; W_a), v_t⟩/√d", "loss": "ℓ_t(W_a)", "gradient": "‖∇ℓ_t(W_a)‖"}[self.step_gate]
        gate = (
            f"σ({signal})"
            if self.step_gate_params == "constant"
            else f"σ(a s_t + c), s_t = {signal}, a and c of each head"
        )
        lines = [line.replace("η_t", "η'_t") for line in super().equations()]
        before = "η'_t " if any(line.startswith("η'_t") for line in lines) else ""
        return [*lines, f"η_t = {before}{gate}"]

    def gates_at(self, gates: Gates, committed: Committed) -> Gates:
        logit = self._signal(committed).to(gates.eta.dtype)
        if self.step_gate_params == "learned":
            scale, bias = (x.to(logit.dtype).unsqueeze(-1) for x in (self.step_gate_scale, self.step_gate_bias))
            logit = scale * logit + bias
        return gates._replace(eta=gates.eta * torch.sigmoid(logit))

    def _signal(self, committed: Committed) -> Tensor:
        """s_t, `[B, H, n]`."""
        if self.step_gate == "loss":
            return committed.losses()
        if self.step_gate == "gradient":
            return committed.gradient_norms()
        found, v = committed.predict(committed.k), committed.v
        if found.shape[-1] != v.shape[-1]:
            raise MetaTTTError(
                f"optimizer.step_gate=alignment compares predictions of width {found.shape[-1]} with labels of width "
                f"{v.shape[-1]}: set optimizer.step_gate=gradient or loss, or another task"
            )
        return (found * v).sum(-1) / math.sqrt(v.shape[-1])
