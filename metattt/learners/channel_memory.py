"""Linear memories whose channels decay each by its own gate: the gated Oja rule, and slots read by softmax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.learners.non_parametric import NonParametric
from metattt.modules import exact, normalize
from metattt.ops.chunk import decays_of_logs, solve_unit_lower
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, DataGates, Tensors
from metattt.tasks.base import Views


class Part(NamedTuple):
    """Consecutive tokens of memories `S_t = S_{t−1} Diag(a_t) + x_tᵀ w_t`: x is d wide, w has n channels."""

    k: Tensor  # views [B, H, c, d]
    v: Tensor
    q: Tensor
    write: Tensor  # [B, H or 1, c, 1]
    gate: Tensor  # log a, [B, H, c, n], also at the start of a document
    decay: Tensor  # Π_{s<r≤t} a_r, [B, H, n, c, c] (t, s), lower triangular; 0 if a document starts in between
    kept: Tensor  # Π_{r≤t} a_r, [B, H, c, n]

    def scores(self, a: Tensor, w: Tensor) -> Tensor:
        """`Σ_n a_tn decay_ts,n w_sn` for s ≤ t: `[B, H, c, c]`."""
        return torch.einsum("...tn,...sn,...nts->...ts", a, w, self.decay)

    def read(self, x: Tensor, w: Tensor, start: Tensor) -> Tensor:
        """`q_t S_t`, `[B, H, c, n]`, from the memory before the chunk, `start` `[B, H, d, n]`."""
        return torch.einsum("...ts,...sn,...nts->...tn", self.q @ x.mT, w, self.decay) + self.kept * (self.q @ start)

    def after(self, x: Tensor, w: Tensor, start: Tensor) -> Tensor:
        """S after the chunk."""
        return self.kept[..., -1:, :] * start + x.mT @ (self.decay[..., -1, :].mT * w)


class ChannelMemory(NonParametric, takes=("residual", "norm")):
    """A learner with memories `[d, n]`, whose n channels decay as the rule says (`optimizer.channels`).

    Args:
        residual, norm: use `x + LN(f(x))`.
        chunk: tokens computed together; changes memory and speed, never a result.
    """

    gates = frozenset({"decay"})
    learn_init = False
    chunk: int = setting(default=8)

    def _parts(self, views: Views, ctx: Context, gates: DataGates) -> Iterator[Part]:
        """The tokens of a call, at most `chunk` at a time, in the type of the gates."""
        assert gates.decay is not None
        log = gates.decay if ctx.first is None else gates.decay.masked_fill(ctx.first[:, None, :, None], -torch.inf)
        k, v, q = (view.to(log.dtype) for view in views[:3])
        given = (x.split(self.chunk, 2) for x in (k, v, q, gates.write.unsqueeze(-1), gates.decay, log))
        for k, v, q, write, gate, between in zip(*given, strict=True):
            decay, kept = decays_of_logs(between.mT)
            yield Part(k, v, q, write, gate, decay, kept.mT)

    def _memory(self, name: str, state: Tensors, view: Tensor, gates: DataGates) -> Tensor:
        """What the memory of a view `[B, H, T, d]` holds before a call, `[B, H, d, n]`."""
        if gates.decay is None:
            raise MetaTTTError(f"{type(self).__name__} has a decay for every channel: set optimizer.channels")
        shape = (*view.shape[:2], view.shape[-1], gates.decay.shape[-1])
        memory = state[name] if state else gates.decay.new_zeros(shape)
        if memory.shape != shape:
            raise MetaTTTError(f"the state is from another layer: {name} {list(memory.shape)}, not {list(shape)}")
        return memory


@register(group="learner", name="oja")
class Oja(ChannelMemory):
    """`f(q_t) = q_t S_t`, `S_t = S' + write_t (k_t − v_t S'ᵀ)ᵀ v_t`, `S' = S_{t−1} Diag(a_t)`, for v of unit length:
    the key that the memory finds for a value is corrected (Oja's rule, J. Math. Biol. 15, 1982, with the gates of
    flash-linear-attention's `gated_oja_rule`). The errors of a chunk are solved together. The state is S.

    Args: see `ChannelMemory`.

    Raises:
        MetaTTTError: at a call, `optimizer.channels` that are not the width of v, or the state of another layer.
    """

    gates = frozenset({"write", "decay"})

    def equations(self) -> list[str]:
        return [
            f"f(q_t) = {self._in_symbols('q_t S_t')}, u_t = v_t/‖v_t‖",
            "S_t = S' + write_t (k_t − u_t S'ᵀ)ᵀ u_t, S' = S_{t−1} Diag(a_t)",
        ]

    def scan(self, views: Views, state: Tensors, ctx: Context, gates: DataGates) -> tuple[Tensor, Tensors]:
        """Predictions `[B, H, T, d]`, and `memory` = S `[B, H, d, d_v]`."""
        memory, ys = self._memory("memory", state, views.k, gates), []
        if (count := memory.shape[-1]) != (width := views.v.shape[-1]):
            raise MetaTTTError(f"optimizer.channels={count}, and v has {width}: set optimizer.channels=head_dim")
        with exact(views.k.device.type):
            for part in self._parts(views, ctx, gates):
                v = normalize(part.v)
                error = part.write * (part.k - (part.kept * v) @ memory.mT)
                error = solve_unit_lower(part.write * part.scores(v, v), error)
                ys.append(part.read(error, v, memory))
                memory = part.after(error, v, memory)
            return self._wrapped(views.q, torch.cat(ys, dim=2)), {"memory": memory}


@register(group="learner", name="slots")
class Slots(ChannelMemory):
    """`f(q_t) = softmax(q_t K_t) V_tᵀ`: n slots of a key and a value (gated slot attention, arXiv 2409.07146).

    `K_t = K_{t−1} Diag(a_t) + k_tᵀ (1 − a_t)`, and V_t of v_t likewise: a slot is written as far as it forgets.

    Args:
        residual, norm, chunk: see `ChannelMemory`.
        silu: of v before it is written, and of what is read, as in the released code.
    """

    silu: bool = setting(default=True)

    def equations(self) -> list[str]:
        read, v = ("silu(softmax(q_t K_t) V_tᵀ)", "silu(v_t)") if self.silu else ("softmax(q_t K_t) V_tᵀ", "v_t")
        return [
            f"f(q_t) = {self._in_symbols(read)}",
            f"K_t = K_{{t−1}} Diag(a_t) + k_tᵀ (1 − a_t), V_t = V_{{t−1}} Diag(a_t) + {v}ᵀ (1 − a_t)",
        ]

    def scan(self, views: Views, state: Tensors, ctx: Context, gates: DataGates) -> tuple[Tensor, Tensors]:
        """Predictions `[B, H, T, d]`, and `keys` = K `[B, H, d, n]` and `values` = V `[B, H, d_v, n]`."""
        keys, values = (self._memory(n, state, x, gates) for n, x in (("keys", views.k), ("values", views.v)))
        ys = []
        with exact(views.k.device.type):
            for part in self._parts(views, ctx, gates):
                w, v = -torch.expm1(part.gate), F.silu(part.v) if self.silu else part.v
                share = part.read(part.k, w, keys).softmax(-1)
                ys.append(part.scores(share, w) @ v + (part.kept * share) @ values.mT)
                keys, values = part.after(part.k, w, keys), part.after(v, w, values)
            y = torch.cat(ys, dim=2)
            return self._wrapped(views.q, F.silu(y) if self.silu else y), {"keys": keys, "values": values}
