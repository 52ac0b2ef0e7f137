"""In-Place TTT (arXiv 2604.06169): the last matrix of a pretrained MLP learns while it reads."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.errors import check_flag, check_integer, check_number
from metattt.state import State

TAPS = 5  # of the convolution, two of them ahead


class InPlaceState(NamedTuple):
    """What is carried for `B` sequences.

    Attributes:
        change: `[B, D, F]` Σ v hᵀ of all complete chunks, in fp32 or wider; None before the first.
        inputs: `[B, n, F]` h of the open chunk.
        labels: `[B, n, D]` t of the open chunk.
    """

    change: Tensor | None
    inputs: Tensor
    labels: Tensor

    map, select = State.map, State.select  # type: ignore[misc]


class InPlaceLinear(nn.Module):
    """A linear map `W h` whose chunk j of c tokens is mapped with

    `W + lr Σ_{i<j} Σ_{s in chunk i} v_s h_sᵀ`,   `v = Pᵀ conv(t)`,

    gradient descent on the loss `−⟨W h, v⟩` with mini-batches of c tokens, each read before it is learned. The
    convolution is depthwise, has five taps and looks two tokens ahead inside its chunk; it begins with 0, so that the
    map is unchanged at the start.

    Args:
        linear: the pretrained map, F to D.
        chunk: c (tokens).
        lr: step size.
        project: whether there is a P `[D, D]`, which begins with the identity; else v = conv(t).
    """

    def __init__(self, linear: nn.Linear, chunk: int = 4096, lr: float = 1.0, project: bool = True):
        super().__init__()
        check_integer("chunk", chunk)
        check_number("lr", lr)
        check_flag("project", project)
        self.linear, self.chunk, self.lr = linear, chunk, lr
        weight = linear.weight
        self.conv = nn.Parameter(weight.new_zeros(linear.out_features, 1, TAPS))
        self.project = nn.Parameter(torch.eye(linear.out_features).to(weight)) if project else None

    def forward(self, h: Tensor, t: Tensor, state: InPlaceState | None = None) -> tuple[Tensor, InPlaceState]:
        """`h` `[B, T, F]` and labels `t` `[B, T, D]` to `[B, T, D]`, and the state for the next call."""
        y, change, begun = self.linear(h), None, 0
        if state is not None:
            change, begun = state.change, state.inputs.shape[1]
            h, t = torch.cat([state.inputs, h], dim=1), torch.cat([state.labels, t], dim=1)
        outputs = []
        for inputs, labels in zip(h.split(self.chunk, dim=1), t.split(self.chunk, dim=1), strict=True):
            new, begun = inputs[:, begun:], 0  # those before were read in earlier calls
            part, y = y[:, : new.shape[1]], y[:, new.shape[1] :]
            outputs.append(part if change is None else part + self.lr * (new.to(change.dtype) @ change.mT).to(y.dtype))
            if inputs.shape[1] == self.chunk:
                with torch.autocast("cpu" if h.is_meta else h.device.type, enabled=False):
                    learned = self._labels(labels).mT @ inputs.to(torch.promote_types(inputs.dtype, torch.float32))
                change = learned if change is None else change + learned
        rest = h.shape[1] - h.shape[1] % self.chunk
        return torch.cat(outputs, dim=1), InPlaceState(change, h[:, rest:], t[:, rest:])

    def _labels(self, t: Tensor) -> Tensor:
        """v `[B, c, D]` of a complete chunk, in fp32 or wider."""
        wide = torch.promote_types(t.dtype, torch.float32)
        v = F.conv1d(t.to(wide).mT, self.conv.to(wide), padding=TAPS // 2, groups=len(self.conv)).mT
        return v if self.project is None else v @ self.project.to(wide)
