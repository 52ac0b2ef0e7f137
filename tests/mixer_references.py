"""Plain loops over tokens, written from the published equations of the mixers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Parameters = dict[str, Tensor]


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`y_t = bias + Σ_j w_j x_{t − width + 1 + j}`; x `[B, T, D]`, weight `[D, 1, width]`."""
    width, rows = weight.shape[-1], []
    for t in range(x.shape[1]):
        y = bias.expand(x.shape[0], -1)
        for back in range(min(width, t + 1)):
            y = y + weight[:, 0, width - 1 - back] * x[:, t - back]
        rows.append(y)
    return torch.stack(rows, 1)


def mamba(p: Parameters, x: Tensor) -> Tensor:
    """Algorithm 2 of arXiv 2312.00752 in the block of its Fig. 3."""
    u, z = (x @ p["in_proj.weight"].T).chunk(2, -1)
    u = F.silu(causal_conv(u, p["conv1d.weight"], p["conv1d.bias"]))
    a = -p["A_log"].exp()
    states, rank = a.shape[1], p["dt_proj.weight"].shape[1]
    h, rows = x.new_zeros(len(x), *a.shape), []
    for t in range(x.shape[1]):
        chosen = u[:, t] @ p["x_proj.weight"].T
        low, b, c = chosen[:, :rank], chosen[:, rank : rank + states], chosen[:, rank + states :]
        dt = torch.log1p((low @ p["dt_proj.weight"].T + p["dt_proj.bias"]).exp())
        h = torch.exp(dt[:, :, None] * a) * h + dt[:, :, None] * b[:, None, :] * u[:, t, :, None]
        y = (h * c[:, None, :]).sum(-1) + p["D"] * u[:, t]
        rows.append((y * z[:, t] * torch.sigmoid(z[:, t])) @ p["out_proj.weight"].T)
    return torch.stack(rows, 1)


def longhorn(p: Parameters, x: Tensor) -> Tensor:
    """Eq. 9 of arXiv 2407.14207, channel by channel, with the diagonal of k kᵀ, in Mamba's block."""
    v, z = (x @ p["in_proj.weight"].T).chunk(2, -1)
    v = F.silu(causal_conv(v, p["conv1d.weight"], p["conv1d.bias"]))
    rank, width = p["dt_head.weight"].shape[1], v.shape[-1]
    states = (p["x_proj.weight"].shape[0] - rank) // 2
    s, rows = x.new_zeros(len(x), width, states), []
    for t in range(x.shape[1]):
        chosen = v[:, t] @ p["x_proj.weight"].T
        low, k, q = chosen[:, :rank], chosen[:, rank : rank + states], chosen[:, rank + states :]
        beta = 1 / (1 + (-(low @ p["dt_head.weight"].T + p["dt_head.bias"])).exp())
        delta = beta / (1 + beta * (k * k).sum(-1, keepdim=True))
        s = (1 - delta[:, :, None] * (k * k)[:, None, :]) * s + (delta * v[:, t])[:, :, None] * k[:, None, :]
        y = (s * q[:, None, :]).sum(-1) + p["D"] * v[:, t]
        rows.append((y * z[:, t] * torch.sigmoid(z[:, t])) @ p["out_proj.weight"].T)
    return torch.stack(rows, 1)


def mamba2_mixer(p: Parameters, x: Tensor, groups: int = 1) -> Tensor:
    """The recurrence of arXiv 2405.21060, head by head, in the block of its Fig. 6."""
    heads, width, convolved = len(p["A_log"]), len(p["norm.weight"]), len(p["conv1d.bias"])
    size, states = width // heads, (convolved - width) // (2 * groups)
    projected = x @ p["in_proj.weight"].T
    z, dt = projected[..., :width], projected[..., width + convolved :]
    mixed = F.silu(causal_conv(projected[..., width : width + convolved], p["conv1d.weight"], p["conv1d.bias"]))
    u, b, c = mixed.split([width, groups * states, groups * states], -1)
    hs = [x.new_zeros(len(x), size, states) for _ in range(heads)]
    rows = []
    for t in range(x.shape[1]):
        outputs = []
        for head in range(heads):
            group = head * groups // heads
            ours = slice(head * size, (head + 1) * size)
            theirs = slice(group * states, (group + 1) * states)
            step = torch.log1p((dt[:, t, head] + p["dt_bias"][head]).exp())[:, None]
            decay = torch.exp(-step * p["A_log"][head].exp())
            hs[head] = decay[:, :, None] * hs[head] + (step * u[:, t, ours])[:, :, None] * b[:, t, None, theirs]
            outputs.append((hs[head] * c[:, t, None, theirs]).sum(-1) + p["D"][head] * u[:, t, ours])
        y = torch.cat(outputs, -1) * z[:, t] * torch.sigmoid(z[:, t])
        parts = [part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() for part in y.chunk(groups, -1)]
        rows.append((torch.cat(parts, -1) * p["norm.weight"]) @ p["out_proj.weight"].T)
    return torch.stack(rows, 1)
