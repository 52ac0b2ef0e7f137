"""A non-parametric learner whose predictions use all tokens of the call: the attention layers of vision
transformers."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.learners.non_parametric import NonParametric
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, DataGates, Tensors
from metattt.tasks.base import Views


@register(group="learner", name="global_estimator")
class GlobalEstimator(NonParametric, takes=()):
    """`f(q) = Σ_s κ(q, k_s) v_s / Z` over all tokens s of the call: not causal, and without state between calls.

    | kernel | Z | layer |
    |---|---|---|
    | exponential, exp(q·k / h) | Σ_s κ(q, k_s) | self-attention |
    | linear, q·k / h, after elu + 1 | Σ_s κ(q, k_s) | linear attention of Katharopoulos et al. (arXiv 2006.16236) |
    | linear, q·k / h | N tokens | linear attention, the identity map: `q (kᵀv) / (N d)` (arXiv 2310.13807, Sec. 5) |

    Args:
        kernel: `exponential` or `linear`; the latter never makes the N × N matrix.
        normalize: Z is the sum of the kernel's values; False: the number of tokens N.
        bandwidth: h; None takes √d for the exponential and d for the linear kernel.

    Raises:
        MetaTTTError: a bandwidth that is not positive, or exponential without normalize; at a call with a state or
            `reset`.
    """

    causal = False
    streams = False

    learn_init = False
    kernel: Literal["exponential", "linear"] = setting(default="exponential")
    normalize: bool = setting(default=True)
    bandwidth: float | None = setting(default=None, above=0, advice=", or null")

    def check_settings(self) -> None:
        super().check_settings()
        if self.kernel == "exponential" and not self.normalize:
            raise MetaTTTError("learner.normalize=false goes with learner.kernel=linear only")

    def equations(self) -> list[str]:
        below = "Σ_s κ(q_t, k_s)" if self.normalize else "N"
        usual = "√d" if self.kernel == "exponential" else "d"
        h = usual if self.bandwidth is None else f"{self.bandwidth:g}"
        kernel = f"exp(q·k/{h}): softmax attention" if self.kernel == "exponential" else f"q·k/{h}"
        return [
            f"f(q_t) = Σ_s κ(q_t, k_s) v_s / {below}, s over all N tokens of the call (not causal)",
            f"κ(q, k) = {kernel}",
        ]

    def read(self, views: Views, state: Tensors, ctx: Context, gates: DataGates) -> Tensor:
        """Refused: see `scan`."""
        raise MetaTTTError(
            "learner=global_estimator answers from all tokens of one call: it cannot read apart from learning "
            "(causal attention is layer=attention)"
        )

    def scan(self, views: Views, state: Tensors, ctx: Context, gates: DataGates) -> tuple[Tensor, Tensors]:
        """Predictions `[B, H, T, d]`, and the number of tokens seen, `[B]`, by which a later call with this state
        raises an error."""
        if state or ctx.first is not None:
            raise MetaTTTError(
                "learner=global_estimator answers from all tokens of one call: it takes no state and no reset= "
                "(causal attention is layer=attention)"
            )
        k, v, q = views[:3]
        valid = None if ctx.valid is None else ctx.valid[:, None, None]  # [B, 1, 1, T]
        if self.kernel == "exponential":
            scale = 1 / (math.sqrt(k.shape[-1]) if self.bandwidth is None else self.bandwidth)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=valid, scale=scale), {"count": ctx.lengths}
        if valid is not None:
            k = torch.where(valid.mT, k, 0)
        count = ctx.lengths.clamp(min=1).to(torch.promote_types(k.dtype, torch.float32)).view(-1, 1, 1, 1)
        root = count.sqrt().to(k.dtype)  # in fp16 a sum over all tokens may be infinite, and so may N; k / N may be 0
        if self.normalize:  # h cancels, and so does N
            k, q = k / root, q / root
            weights = k.mT @ v
            total = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)
            # Where all kernels are 0 (elu + 1 rounds to 0 from about −17 on, in bf16 from −6 on; the query of padding
            # may be 0) predictions are 0, and derivatives finite.
            total = torch.where(total == 0 if valid is None else (total == 0) | ~valid.mT, 1, total)
            return (q @ weights) / total, {"count": ctx.lengths}
        rest = count / root * (k.shape[-1] if self.bandwidth is None else self.bandwidth)
        return q @ ((k / root).mT @ v / rest.to(k.dtype)), {"count": ctx.lengths}
