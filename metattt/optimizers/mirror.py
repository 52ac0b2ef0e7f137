"""Mirror descent: gradients are summed in a dual state, and a map turns it into weights at the end of every
mini-batch."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.memory import Memory
from metattt.modules import expand_like
from metattt.ops.linear_rule import Coefficients
from metattt.optimizers.base import Gates
from metattt.optimizers.block import BlockRule
from metattt.optimizers.gradient_descent import StepSize
from metattt.optimizers.momentum import Gate, check_gate
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors

SMOOTHING = 1e-6  # ε of |x| ≈ √(x² + ε) in ‖A‖_q, as in MIRAS (Remark 5): an A of zero has weights and derivatives, too


@register(group="optimizer", name="mirror")
class MirrorDescent(BlockRule):
    """`A_t = α_t A_{t−1} − η_t ∇ℓ_t(W)`, `W = m(A)` at the end of every mini-batch: the retentions of MIRAS (arXiv
    2504.13173, Sec. 5.2–5.4; equations and their numbers are those of a public reproduction of the paper).

    A is exact for every token, as in Eq. 28; W stays until the mini-batch ends, so mini-batches of one token are the
    published recurrences. The learner's W0 is the first A, and a sequence starts from m(W0); with `elastic_net`, from
    W0.

    | retention          | m(A), per fast weight                | A after it | in the paper                      |
    |--------------------|--------------------------------------|------------|-----------------------------------|
    | `lq`               | A / ‖A‖_q^(q−2), ‖·‖ over all entries | A          | ℓ_q stability, Moneta (Eq. 24)    |
    | `softmax`          | c · softmax(A)                       | log(W/c)   | KL divergence, Memora (Eq. 21, 27) |
    | `elastic_net`      | sign(A) max(0, |A| − γ)              | W          | elastic net (Eq. 22)              |
    | `elastic_net_ftrl` | the same                             | A          | elastic net, FTRL (Eq. 23)        |
    | `sigmoid`          | σ(A)                                 | A          | Bregman divergence of the logit   |

    Args:
        mini_batch_size, anchor, read, steps, base_lr, lr, lr_scale, compute_chunk: see `GradientDescent`.
        retention: the map m.
        decay, decay_init: α, as in `Momentum`.
        q: of `lq`; 2 is gradient descent with decay.
        mass: of `softmax`: n weights sum to c = mass · √n, so that mass is their norm where they are all alike.
            (Thousands of weights that sum to 1 are near 0.)
        simplex: what sums to c in `softmax`: the `whole` weight, or the weights into every `output` of a matrix (the
            outputs of a last layer are then nearly alike, and a norm after it enlarges what rounding leaves of them).
        threshold: γ of the elastic nets.

    Raises:
        MetaTTTError: a value that is not allowed, or a read or an anchor that needs weights per token.
    """

    read = "committed"
    retention: Literal["lq", "softmax", "elastic_net", "elastic_net_ftrl", "sigmoid"] = setting(
        default="lq", fixed=True
    )
    decay: Literal["none", "constant", "shared", "per_head"] = setting(default="per_head", fixed=True)
    decay_init: float = setting(default=0.99, fixed=True)
    q: float = setting(default=4.0, least=2, advice=" (2 leaves A as it is)")
    mass: float = setting(default=1.0, above=0)
    simplex: Literal["whole", "output"] = setting(default="whole")
    threshold: float = setting(default=1e-3, least=0)

    def configure(self) -> None:
        super().configure()
        self.own_slots = () if self.retention == "elastic_net" else ("dual",)

    def check_settings(self) -> None:
        check_gate("decay_init", self.decay, self.decay_init)
        super().check_settings()

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.decay_gate = Gate(self.decay, self.decay_init, dim, num_heads)

    def equations(self) -> list[str]:
        eta = StepSize.equations(self)
        decay = self.decay_gate.equations("α") if self.decay != "none" else []
        threshold = f"sign(A) max(0, |A| − {self.threshold:g})"
        kind = "every output of a matrix" if self.simplex == "output" else "the whole weight"
        maps = {
            "lq": f"A / ‖A‖_{self.q:g}^{self.q - 2:g}, over all entries a of a weight, |a| = √(a² + 1e-6)",
            "softmax": f"c softmax(A) over {kind}, c = {self.mass:g} √n for n entries",
            "sigmoid": "σ(A)",
            "elastic_net": threshold,
            "elastic_net_ftrl": threshold,
        }
        after = {"softmax": "log(W_j/c)", "elastic_net": "W_j"}.get(self.retention, "the A_t before it")
        first = "A begins as W_0" if "dual" not in self.own_slots else "A begins as W_0, and the weights as m(W_0)"
        return [
            *eta,
            *decay,
            f"A_t = {'α_t ' if decay else ''}A_{{t−1}} − {'η_t ' if eta else ''}G_t",
            f"W_j = m(A_t) at the end of mini-batch j, m(A) = {maps[self.retention]}",
            f"A_t goes on from {after}; {first}",
        ]

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        return gates._replace(alpha=self.decay_gate(x)), state

    def weights(self, dual: Tensor) -> Tensor:
        """m(A) for one fast weight `[B, H, *shape]`."""
        if self.retention == "lq":
            entries = (dual.square() + SMOOTHING).flatten(2)
            norm = entries.pow(0.5 * self.q).sum(-1).pow((self.q - 2) / self.q)  # ‖A‖_q^(q−2)
            return dual / expand_like(norm, dual)
        if self.retention == "softmax":
            by_output = self.simplex == "output" and dual.ndim > 3
            count = dual.shape[-2] if by_output else math.prod(dual.shape[2:])
            return self.mass * math.sqrt(count) * self._log_softmax(dual).exp()
        if self.retention == "sigmoid":
            return torch.sigmoid(dual)
        return F.softshrink(dual, self.threshold)

    def _log_softmax(self, dual: Tensor) -> Tensor:
        if self.simplex == "output" and dual.ndim > 3:
            return dual.log_softmax(-2)
        return dual.flatten(2).log_softmax(-1).view_as(dual)

    def begin(self, memory: Memory) -> Memory:
        if not self.own_slots:
            return memory
        return {
            slot: values if slot == "dual" else {name: self.weights(x) for name, x in values.items()}
            for slot, values in memory.items()
        }

    def move(self, memory: Memory, alpha: Tensor | None, beta: Tensor | None) -> Memory:
        lost = memory.get("pool", {}).get("lost")
        dual = {  # A after the tokens of the mini-batch
            name: (x if lost is None else expand_like(1 - lost, x) * x) + memory["update"][name]
            for name, x in memory["dual" if self.own_slots else "commit"].items()
        }
        after = {"commit": {name: self.weights(x) for name, x in dual.items()}}
        if self.retention == "softmax":
            dual = {name: self._log_softmax(x) for name, x in dual.items()}
        return after | ({"dual": dual} if self.own_slots else {})

    def pool_gates(self, memory: Memory, gates: Gates) -> Memory:
        """Collects `1 − Π_t α_t`, what the dual state of the last commit loses."""
        if gates.alpha is None:
            return memory
        kept = gates.alpha.prod(-1)
        if "pool" in memory:
            kept = kept * (1 - memory["pool"]["lost"])
        return memory | {"pool": {"lost": 1 - kept}}

    def coefficients(
        self, gates: Gates, phase: int | Tensor, carried: Collection[str], read: str | None
    ) -> Coefficients:
        alpha = gates.alpha
        if alpha is None:
            return super().coefficients(gates, phase, carried, read)
        later = F.pad(alpha[..., 1:].flip(-1).cumprod(-1).flip(-1), (0, 1), value=1.0)  # Π_{r>s} α_r
        kept: dict[str, Tensor | None] = {"update": alpha.prod(-1)} if "update" in carried else {}
        return Coefficients({"commit": None}, None, {"update": (kept, gates.eta * later)})
