"""What the inner loop remembers of every sequence: tensors by slot and by the name of a fast weight.

| slot | what it holds | its value if it is absent |
|---|---|---|
| `commit`, `anchor`, `origin`, `dual` | W_a, W_g, W_0; A of mirror descent | (a rule that has it always carries it) |
| `weights` | W_t | the last commit: no step since then |
| `update` | what the open mini-batch adds, before token steps | zeros: the mini-batch has just begun |
| `momentum`, `second`, others of a rule's own | sums over mini-batches | zeros: there was none |
| `age` | mini-batches that were committed, a number for each head | zero |
| `pool` | gates of the open mini-batch, by gate | nothing |

All but `age` and `pool` are `[B, H, *shape]`, as the weight is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from metattt.modules import expand_like
from metattt.state import Tensors

Memory = dict[str, Tensors]

WEIGHTS = ("commit", "anchor", "origin", "dual")  # slots that hold W0 at the start of a sequence
COUNTERS = ("age",)  # slots with a number for each head


def newest(slots: Collection[str]) -> str:
    """The slot of the newest weights."""
    return "weights" if "weights" in slots else "commit" if "commit" in slots else "anchor"


def at_start(slots: Iterable[str], init: Iterable[tuple[str, Tensor]], batch: int, dtype: torch.dtype) -> Memory:
    """W0 `[B, H, *shape]` in every slot of a fresh sequence, each a separate copy that the caller may keep;
    `weights` is one if there is neither `commit` nor `anchor`."""
    memory: Memory = {}
    for slot in slots:
        if slot in WEIGHTS:
            memory[slot] = {}
    if "commit" not in memory and "anchor" not in memory:
        memory["weights"] = {}
    for name, value in init:
        start = value.to(dtype).expand(batch, *value.shape)
        for held in memory.values():
            held[name] = start.clone(memory_format=torch.contiguous_format)
    return memory


def named(names: Iterable[tuple[str, str]], tensors: Iterable[Tensor]) -> Memory:
    """A memory of tensors in a row, by the slot and the name of each."""
    memory: Memory = {}
    for (slot, name), x in zip(names, tensors, strict=True):
        memory.setdefault(slot, {})[name] = x
    return memory


def zeros(slot: str, like: Tensors) -> Tensors:
    """A slot of zeros for weights `like`, `[B, H, *shape]`."""
    return {name: x.new_zeros(x.shape[:2]) if slot in COUNTERS else torch.zeros_like(x) for name, x in like.items()}


def content(memory: Memory, slot: str) -> Tensors | None:
    """The value of a slot, also if it is absent; None: zeros."""
    return memory.get(slot, memory[newest(memory)] if slot == "weights" else None)


def choose(some: Tensor, a: Memory, b: Memory, slots: Iterable[str]) -> Memory:
    """`slots` of `a` in the sequences `some` `[B]`, and of `b` in the others."""
    return {slot: where(some, content(a, slot), content(b, slot)) for slot in slots}


def where(some: Tensor, a: Tensors | None, b: Tensors | None) -> Tensors:
    """`a` where `some` `[B]`, else `b`; None stands for zeros."""
    return {
        name: torch.where(expand_like(some, x), 0 if a is None else a[name], 0 if b is None else b[name])
        for name, x in (a or b or {}).items()
    }


def fits(slot: str, held: Tensors, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a slot holds what weights of these shapes `[B, H, *shape]` have in it. (Counters once had the shape of
    their weight, and may still.)"""
    if slot == "pool":
        return True
    return held.keys() == shapes.keys() and all(
        x.shape == shapes[name] or (slot in COUNTERS and x.shape == shapes[name][:2]) for name, x in held.items()
    )
