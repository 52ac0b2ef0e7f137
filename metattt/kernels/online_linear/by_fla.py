"""Online rules of a linear map on a GPU by the kernels of flash-linear-attention, where it is installed.

Each is compared with `naive.online_linear` on the device before it is used there, outputs and every gradient, once for
every rule, type and width; where it is wrong, or raises an error, the solved form computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metattt.inner.tokens import MiniBatches, Scan
from metattt.kernels.online_linear.naive import online_linear
from metattt.kernels.online_linear.rule import OnlineDot, OnlineLinear, Pairs, pairs_of
from metattt.kernels.operator import filled, flat, shell
from metattt.ops.foreign import Foreign, disagreement, operation
from metattt.state import Tensors

SHORTEST = 16  # tokens: below, a launch costs more than it saves
SMALLEST = 1e-30  # their decays are logarithms


class Rule(NamedTuple):
    """What decides which of their operations computes a rule: the loss, decays (`none`, `head`, `channel`), the views
    at hand, and whether F is of the decayed weights."""

    erases: bool
    decay: str
    erase_key: bool
    erase_direction: bool
    decayed: bool

    @property
    def operation(self) -> str:
        """Module and name of their operation."""
        if not self.erases:
            return "gla.chunk_gla" if self.decay == "channel" else "simple_gla.chunk_simple_gla"
        own = not (self.erase_key or self.erase_direction)
        if own and self.decay == "none":
            return "delta_rule.chunk_delta_rule"
        if own and self.decayed:
            return "kda.chunk_kda" if self.decay == "channel" else "gated_delta_rule.chunk_gated_delta_rule"
        return "generalized_delta_rule.chunk_dplr_delta_rule"


class FlaOnlineLinear(OnlineLinear):
    """Of the squared loss."""

    name = "online_linear.fla"
    device = "cuda"
    documents = "row"

    def reason_rejected(self, given: MiniBatches) -> str | None:
        tokens, gates = given.tokens, given.tokens.gates
        if gates.beta is not None or gates.weight_lr is not None or given.exclusive:
            return "a momentum gate, a step size for every weight, or an exclusive read"
        if given.matmul_dtype not in (torch.bfloat16, torch.float16):
            return "products of fp32, which they round to TF32"
        if tokens.views.q.shape[2] < SHORTEST:
            return f"fewer than {SHORTEST} tokens"
        rule = self.rule(given)
        key = (rule, tokens.views.k.device, given.matmul_dtype, tokens.views.k.shape[-1], tokens.views.v.shape[-1])
        return _disagreement(*key, given.begins is not None)

    def rule(self, given: MiniBatches) -> Rule:
        """What decides which of their operations is taken."""
        views, gates = given.tokens.views, given.tokens.gates
        decay = "channel" if gates.decay is not None else "none" if gates.alpha is None else "head"
        p, b = views.erase_key is not None, views.erase_direction is not None
        return Rule(self.erases, decay, p, b, given.decayed)

    def scan(
        self, given: MiniBatches, reference: Scan, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensors]:
        rule, empty = self.rule(given), shell(given)
        ((name, _),) = given.weights.items()

        def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            tokens, weights = filled(empty, tensors)[:2]
            return run_rule(rule, given.matmul_dtype, pairs_of(tokens), weights[name], documents)

        def again(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            y, after = reference(filled(empty, tensors))
            return y, after[name]

        y, after = Foreign.apply(run, again, *flat(given))
        return y, {name: after}


class FlaOnlineDot(OnlineDot, FlaOnlineLinear):
    """Of the dot product's loss."""

    name = "online_linear.fla_dot"


def run_rule(
    rule: Rule, dtype: torch.dtype, pairs: Pairs, w: Tensor, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`naive.online_linear` by their operation, in their layout `[B, T, H, d]`, with views of 16 bits; of each of the
    N documents, where B = 1 and their bounds `[N + 1]` in tokens are given."""
    k, v, q, p, b, eta, a = pairs
    call, each = operation(rule.operation), k.shape[2] // q.shape[2]
    assert call is not None
    q = q.repeat_interleave(each, 2)
    logs = None if a is None else a.masked_fill(a.abs() < SMALLEST, SMALLEST).log()  # NaN, if negative
    step = eta.unsqueeze(-1)
    given: dict[str, Tensor | None] = {"q": q, "k": k, "v": v}
    if not rule.erases:
        given |= {"v": step * v, "g": logs}
    elif "dplr" in rule.operation:
        asked = k if p is None else p
        if a is not None and logs is not None and rule.decay == "head":
            a, logs = (x.unsqueeze(-1).expand_as(k) for x in (a, logs))
        asked = asked if a is None or not rule.decayed else asked * a
        given |= {"k": step * k, "a": asked, "b": -step * (k if b is None else b)}
        given |= {"gk": torch.zeros_like(k, dtype=torch.float32) if logs is None else logs}
    else:
        given |= {"beta": eta} if logs is None else {"beta": eta, "g": logs}
    wide = ("g", "gk", "beta")
    there = {
        name: x.transpose(1, 2).to(torch.float32 if name in wide else dtype).contiguous()
        for name, x in given.items()
        if x is not None
    }
    bounds = {} if documents is None else {"cu_seqlens": documents * each}
    y, after = call(**there, **bounds, scale=1.0, initial_state=w.float(), output_final_state=True)
    return y.transpose(1, 2)[:, :, each - 1 :: each].to(eta.dtype), after.to(w.dtype)


@cache
def _disagreement(
    rule: Rule, device: torch.device, dtype: torch.dtype, rows: int, columns: int, packed: bool = False
) -> str | None:
    """Why its operation may not compute, from 80 random tokens of 2 heads, in three documents if `packed`."""
    if operation(rule.operation) is None:
        return f"flash-linear-attention, or its {rule.operation}, is not installed"
    draw = torch.Generator().manual_seed(0)

    def random(*own: int) -> Tensor:
        return torch.randn(1, 2, 80, *own, generator=draw).to(dtype).float().to(device)

    def unit() -> Tensor:
        return torch.nn.functional.normalize(random(rows), dim=-1)

    given = {"k": unit(), "v": random(columns), "q": unit(), "eta": random().sigmoid()}
    given |= {"p": unit()} if rule.erase_key else {}
    given |= {"b": unit()} if rule.erase_direction else {}
    if rule.decay != "none":
        given["a"] = torch.sigmoid((random(rows) if rule.decay == "channel" else random()) + 3)
    bounds = [0, 16, 63, 80] if packed else [0, 80]
    w = torch.randn(len(bounds) - 1, 2, rows, columns, generator=draw).to(device) / rows**0.5
    names, documents = list(given), torch.tensor(bounds, device=device) if packed else None

    def made(tensors: Sequence[Tensor]) -> Pairs:
        x: dict[str, Any] = dict(zip(names, tensors, strict=True))
        return Pairs(*[x.get(name) for name in Pairs._fields])  # type: ignore[arg-type]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return run_rule(rule, dtype, made(tensors[:-1]), tensors[-1], documents)

    def ours(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        found, flags = [], {"erases": rule.erases, "decayed": rule.decayed}
        for start, (first, stop) in zip(tensors[-1].split(1), pairwise(bounds), strict=True):
            k, v, q, p, b, eta, a = made([x[:, :, first:stop] for x in tensors[:-1]])
            found.append(online_linear(k, v, q, eta, start, p=p, b=b, a=a, **flags))
        return torch.cat([y for y, _ in found], 2), torch.cat([after for _, after in found])

    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        return disagreement(f"{rule.operation} in {dtype}", run, ours, [*given.values(), w])
