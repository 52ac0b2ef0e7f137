"""Linear memories whose channels decay each by its own gate: the gated Oja rule, and slots read by softmax."""

from __future__ import annotations

from itertools import repeat
from typing import Any, NamedTuple

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
    """The tokens of a call, in chunks of c, of memories `S_t = S_{t−1} Diag(a_t) + x_tᵀ w_t`: x is d wide, w has n
    channels."""

    k: Tensor  # views [B, H, chunks, c, d]
    v: Tensor
    q: Tensor
    write: Tensor  # [B, H or 1, chunks, c, 1]
    gate: Tensor  # log a, [B, H, chunks, c, n], also at the start of a document
    decay: Tensor  # Π_{s<r≤t} a_r, [B, H, chunks, n, c, c] (t, s), lower triangular; 0 if a document starts in between
    kept: Tensor  # Π_{r≤t} a_r, [B, H, chunks, c, n]

    def scores(self, a: Tensor, w: Tensor) -> Tensor:
        """`Σ_n a_tn decay_ts,n w_sn` for s ≤ t: `[B, H, chunks, c, c]`."""
        return torch.einsum("...tn,...sn,...nts->...ts", a, w, self.decay)

    def read(self, x: Tensor, w: Tensor, starts: Tensor) -> Tensor:
        """`q_t S_t`, `[B, H, chunks, c, n]`, from the memories before the chunks, `starts` `[B, H, chunks, d, n]`."""
        return torch.einsum("...ts,...sn,...nts->...tn", self.q @ x.mT, w, self.decay) + self.kept * (self.q @ starts)

    def left(self, w: Tensor) -> Tensor:
        """The share of w that is left at the end of its chunk."""
        return self.decay[..., -1, :].mT * w

    def memories(self, added: Tensor, first: Tensor, change: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """S before every chunk, and after the last: `S' = S Diag(kept) + added − S change`; `first` `[B, H, d, n]`."""
        starts, memory = [], first
        erased: Any = repeat(None) if change is None else change.unbind(2)
        for kept, more, lost in zip(self.kept[..., -1:, :].unbind(2), added.unbind(2), erased, strict=False):
            starts.append(memory)
            memory = torch.addcmul(more if lost is None else more - memory @ lost, kept, memory)
        return torch.stack(starts, 2), memory


class ChannelMemory(NonParametric, takes=("residual", "norm")):
    """A learner with memories `[d, n]`, whose n channels decay as the rule says (`optimizer.channels`).

    Args:
        chunk: tokens computed together; changes memory and speed, never a result.
    """

    gates = frozenset({"decay"})
    learn_init = False
    chunk: int = setting(default=8)

    def _part(self, views: Views, ctx: Context, gates: DataGates) -> Part:
        """The tokens of a call in the type of the gates; those that fill the last chunk are inert."""
        assert gates.decay is not None
        log = gates.decay if ctx.first is None else gates.decay.masked_fill(ctx.first[:, None, :, None], -torch.inf)
        size = min(self.chunk, log.shape[2])
        missing = -log.shape[2] % size
        k, v, q = (view.to(log.dtype) for view in views[:3])
        k, v, q, write, gate, log = (
            (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (-1, size))
            for x in (k, v, q, gates.write.unsqueeze(-1), gates.decay, log)
        )
        decay, kept = decays_of_logs(log.mT)
        return Part(k, v, q, write, gate, decay, kept.mT)

    def _memory(self, name: str, state: Tensors, view: Tensor, gates: DataGates) -> Tensor:
        """What the memory of a view `[B, H, T, d]` holds before a call, `[B, H, d, n]`."""
        if gates.decay is None:
            raise MetaTTTError(f"{type(self).__name__} has a decay for every channel: set optimizer.channels=head_dim")
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
        memory = self._memory("memory", state, views.k, gates)
        if (channels := memory.shape[-1]) != (width := views.v.shape[-1]):
            raise MetaTTTError(f"optimizer.channels={channels}, and v has {width}: set optimizer.channels=head_dim")
        with exact(views.k.device.type):
            part = self._part(views, ctx, gates)
            v = normalize(part.v)
            asked = torch.cat([part.write * part.k, part.write * part.kept * v], -1)
            own, met = solve_unit_lower(part.write * part.scores(v, v), asked).split([part.k.shape[-1], width], -1)
            left = part.left(v)  # the errors are `own − met Sᵀ`
            starts, memory = part.memories(own.mT @ left, memory, met.mT @ left)
            y = part.read(own - met @ starts.mT, v, starts).flatten(2, 3)[:, :, : views.q.shape[2]]
            return self._wrapped(views.q, y), {"memory": memory}


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
        with exact(views.k.device.type):
            part = self._part(views, ctx, gates)
            w, v = -torch.expm1(part.gate), F.silu(part.v) if self.silu else part.v
            left = part.left(w)
            before, keys = part.memories(part.k.mT @ left, keys)
            share = part.read(part.k, w, before).softmax(-1)
            before, values = part.memories(v.mT @ left, values)
            y = part.scores(share, w) @ v + (part.kept * share) @ before.mT
            y = y.flatten(2, 3)[:, :, : views.q.shape[2]]
            return self._wrapped(views.q, F.silu(y) if self.silu else y), {"keys": keys, "values": values}
