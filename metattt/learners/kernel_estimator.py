"""Non-parametric learners: the hidden state is the data, and a prediction is an average over it."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.errors import MetaTTTError, shown
from metattt.learners.base import Weight
from metattt.learners.non_parametric import NonParametric
from metattt.learners.window import Window
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, DataGates, Tensors
from metattt.tasks.base import Views

PIECE = 256  # queries of packed documents that are answered together: a mask of a whole call is quadratic in its length
MOST_SINKS = 2**16  # a state has a place for each from the start


@register(group="learner", name="kernel_estimator")
class KernelEstimator(NonParametric):
    """Nadaraya–Watson: `f(q) = Σ_s κ(q, k_s) v_s / Σ_s κ(q, k_s)` over the tokens read so far (arXiv 2407.04620, Eq. 3,
    Thm. 2).

    With the exponential kernel this is causal softmax attention and runs at its speed.

    Args:
        kernel: `exponential` κ = exp(q·k / h), `gaussian` κ = exp(−‖q − k‖² / 2h), or `nearest`: the mean of the
            nearest labels (those that are equally near share the last places).
        bandwidth: h; None uses √d.
        neighbours: how many labels `nearest` averages (tokens).
        window: a query sees the last `window` tokens, its own among them (sliding-window attention), and the state
            holds no more of them; None: all.
        sinks: with a window, the first tokens of a document that every query sees beside it (attention sinks, arXiv
            2309.17453).
        bias: add a constant to the estimate.
        learn_init: start from one learned data point (k₀, v₀); False starts from no data.
    """

    takes_groups = True

    learn_init = False
    kernel: Literal["exponential", "gaussian", "nearest"] = setting(default="exponential")
    bandwidth: float | None = setting(default=None, above=0, advice=", or null for the root of the head width")
    neighbours: int = setting(default=8)
    with_bias: bool = setting(default=False, alias="bias", fixed=True)
    window: int | None = setting(default=None, kw_only=True, advice=", or null for all tokens")
    sinks: int = setting(default=0, kw_only=True, least=0, most=MOST_SINKS)

    def check_settings(self) -> None:
        super().check_settings()
        if self.sinks and self.window is None:
            raise MetaTTTError(
                f"learner.sinks={self.sinks} has no meaning without a window, where every query sees all tokens: set "
                "learner.window, or learner.sinks=0"
            )

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        weights = {"bias": Weight((d_out,), std=0.0, fast=False)} if self.with_bias else {}
        if self.learn_init:
            weights |= {"k0": Weight((d_in,), fast=False), "v0": Weight((d_out,), fast=False)}
        return weights

    def equations(self) -> list[str]:
        seen = "s ≤ t" if self.window is None else f"t − {self.window} < s ≤ t"
        seen += f" or s ≤ {self.sinks}" if self.sinks else ""
        if self.kernel == "nearest":
            value = f"mean of v_s over the {self.neighbours} nearest k_s to q_t, {seen}"
        else:
            value = f"Σ_s κ(q_t, k_s) v_s / Σ_s κ(q_t, k_s){' + b' if self.with_bias else ''}, {seen}"
        if self.with_bias and self.kernel == "nearest":
            value = f"({value}) + b"
        lines = [f"f(q_t) = {self._in_symbols(value)}"]
        h = "√d" if self.bandwidth is None else f"{self.bandwidth:g}"
        if self.kernel == "exponential":
            lines.append(f"κ(q, k) = exp(q·k/{h}): softmax attention")
        elif self.kernel == "gaussian":
            lines.append(f"κ(q, k) = exp(−‖q − k‖²/2h), h = {h}")
        return [*lines, "(k_0, v_0) is learned, and every query sees it"] if self.learn_init else lines

    def scan(self, views: Views, state: Tensors, ctx: Context, gates: DataGates) -> tuple[Tensor, Tensors]:
        """Predictions `[B, H, T, d]` for the queries, and the data with the new tokens appended.

        `state` holds keys and values `[B, G, S, d]` (G heads, as the task makes them) and, where sequences differ,
        `document` `[B, S]` (−1 for padding); with a window, what `Window.scan` says.
        """
        self._check_state(state)
        if self.window is not None:
            y, after = Window(self.window, self.sinks).scan(self.estimate, views, state, ctx)
            return self.finished(y, views.q), after
        k, v, q = views[:3]
        count, past = q.shape[2], state["k"].shape[2] if state else 0
        document = documents(state, ctx, past)
        if state:
            k, v = torch.cat([state["k"].to(k.dtype), k], dim=2), torch.cat([state["v"].to(v.dtype), v], dim=2)
        bounds = [(0, 0, count)]
        if ctx.first is not None and not state and q.device.type == "cpu" and not torch.compiler.is_compiling():
            starts = torch.arange(0, count, PIECE, device="cpu")  # pieces, and where their oldest document begins
            bounds = torch.stack([starts - ctx.positions[:, starts].amax(0), starts, starts + PIECE], dim=1).tolist()
        ys = []
        for begun, start, end in bounds:
            of = None if document is None else document[:, begun : past + end]
            seen = self.visible(of, min(end, count) - start, past + start - begun, q.device)
            near = slice(begun, past + end)
            ys.append(self.estimate(q[:, :, start:end], k[:, :, near], v[:, :, near], seen))
        y = ys[0] if len(ys) == 1 else torch.cat(ys, dim=2)
        return self.finished(y, q), {"k": k, "v": v} | ({} if document is None else {"document": document})

    def read(self, views: Views, state: Tensors, ctx: Context, gates: DataGates) -> Tensor:
        """See `NonParametric.read`."""
        if not state and not self.learn_init:
            raise MetaTTTError(f"{type(self).__name__} has learned nothing yet: call learn first")
        self._check_state(state)
        k, v, q = views[:3]
        k, v = (state[name].to(q.dtype) if state else x[:, :, :0] for name, x in (("k", k), ("v", v)))
        visible = torch.ones(q.shape[0], q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        if state and self.window is not None:
            visible = Window(self.window, self.sinks).visible(ctx.positions, state["position"])
        elif "document" in state:
            document = state["document"]  # −1 for padding, which none reads, also where there is nothing else
            visible = visible & (document == document.max(1, keepdim=True).values.clamp(min=0)).unsqueeze(1)
        return self.finished(self.estimate(q, k, v, visible.unsqueeze(1)), q)

    def _check_state(self, state: Tensors) -> None:
        """Raises an error for the state of a learner with another window, or where only one of both has a window."""
        places = state["position"].shape[1] if "position" in state else None
        fits = places is None if self.window is None else places is not None and 0 <= places - self.sinks < self.window
        if state and not fits:
            found = "no window" if places is None else f"{places} places"
            raise MetaTTTError(
                f"the state is from another layer: it holds {found}, this one has learner.window={shown(self.window)} "
                f"and learner.sinks={self.sinks}"
            )

    def finished(self, y: Tensor, q: Tensor) -> Tensor:
        """Predictions from averages `y` `[B, H, T, d]`: with the constant, the norm and the queries `q`."""
        return self._wrapped(q, y + self.slow["bias"].unsqueeze(1) if self.with_bias else y)

    def visible(self, document: Tensor | None, count: int, past: int, device: torch.device) -> Tensor | None:
        """Which data each query may see, `[B or 1, 1, T, S]`; None means all earlier tokens of a call without a
        past."""
        if document is None and past == 0:
            return None
        causal = torch.ones(count, past + count, dtype=torch.bool, device=device).tril(past)
        if document is None:
            return causal[None, None]
        same = document[:, past:].unsqueeze(-1) == document.unsqueeze(1)
        # A padded query sees itself, so that its (unused) average is finite.
        return (causal & same).unsqueeze(1)

    def estimate(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """Averages `[B, H, T, d]` over the data that is `visible` `[B or 1, 1, T, S]` (None: causally all of it)."""
        bandwidth = math.sqrt(q.shape[-1]) if self.bandwidth is None else self.bandwidth
        grouped = k.shape[1] != q.shape[1]
        if grouped and (self.learn_init or self.kernel != "exponential"):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            grouped = False
        if self.learn_init:
            k, v = (
                torch.cat([self.slow[n].to(x.dtype).unsqueeze(1).expand(x.shape[0], -1, 1, -1), x], 2)
                for n, x in (("k0", k), ("v0", v))
            )
            if visible is None:
                visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
            visible = F.pad(visible, (1, 0), value=True)
        if self.kernel == "exponential":
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=visible, is_causal=visible is None, scale=1 / bandwidth, enable_gqa=grouped
            )
        if visible is None:
            visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
        # −‖q − k‖²/2h is q·k/h − ‖k‖²/2h up to a term that does not depend on the datum, so a bias on the scores is
        # enough.
        offset = k.square().sum(-1).unsqueeze(-2) / -2
        if self.kernel == "gaussian":
            bias = (offset / bandwidth).expand(-1, -1, q.shape[2], -1).masked_fill(~visible, -torch.inf)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1 / bandwidth)
        nearness = (q @ k.mT + offset).masked_fill(~visible, -torch.inf)
        last = nearness.topk(min(self.neighbours, k.shape[2]), dim=-1).values[..., -1:]
        closer, tied = (nearness > last).to(v.dtype), ((nearness == last) & visible).to(v.dtype)
        # the places that are left are shared by all that are equally near: their order is that of the memory
        share = (self.neighbours - closer.sum(-1, keepdim=True)) / tied.sum(-1, keepdim=True).clamp(min=1)
        chosen = closer + share.clamp(max=1) * tied
        return (chosen / chosen.sum(-1, keepdim=True).clamp(min=0.5)) @ v  # 0 where nothing is visible


def documents(state: Tensors, ctx: Context, past: int) -> Tensor | None:
    """The document that each datum is of, `[B, past + T]`, −1 for padding; None where all are of one."""
    if "document" not in state and ctx.valid is None and ctx.first is None:
        return None
    batch, count = ctx.positions.shape
    before = state.get("document", ctx.positions.new_zeros(batch, past))
    newest = before.max(1, keepdim=True).values.clamp(min=0) if past else ctx.positions.new_zeros(batch, 1)
    now = newest.expand(-1, count) if ctx.first is None else newest + ctx.first.cumsum(1)
    return torch.cat([before, now if ctx.valid is None else torch.where(ctx.valid, now, -1)], dim=1)
