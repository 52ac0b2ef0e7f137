"""What a `TTTLayer` refuses: parts that do not go together, views and gates that do not fit, the state of another layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metattt.errors import MetaTTTError, check_integer
from metattt.learners.base import Learner, NonParametric
from metattt.memory import fits
from metattt.memory_limit import check_memory_limit
from metattt.optimizers.base import Gates, InnerOptimizer
from metattt.state import DataGates, State, Tensors
from metattt.tasks.base import Task, Views

if TYPE_CHECKING:
    from metattt.layer import TTTLayer


def check_parts(dim: int, num_heads: int, task: Task, learner: Learner, optimizer: InnerOptimizer) -> None:
    """Refuses what a layer cannot be made of, before anything is built.

    Raises:
        MetaTTTError: widths that do not fit, what is no task, learner or optimizer, or a learner that another kind of
            optimizer is for.
    """
    check_integer("dim", dim)
    check_integer("num_heads", num_heads)
    check_memory_limit(dim * dim, f"a layer of dim={dim}", "lower dim")
    for key, part, kind in (("task", task, Task), ("learner", learner, Learner), ("optimizer", optimizer, InnerOptimizer)):
        if not isinstance(part, kind):
            raise MetaTTTError(f"layer.{key} is a {type(part).__name__}: it must be a {kind.__name__}, set {key}=<name>")
    if dim % num_heads:
        divisors = ", ".join(str(n) for n in range(1, dim + 1) if dim % n == 0)
        raise MetaTTTError(f"num_heads={num_heads} does not divide dim={dim}: choose num_heads from {divisors}")
    if learner.has_weights != optimizer.updates:
        wrong = "needs a rule that updates" if learner.has_weights else "keeps its data itself"
        right = "minibatch" if learner.has_weights else "append"
        raise MetaTTTError(
            f"{type(learner).__name__} {wrong}, not {type(optimizer).__name__}: set optimizer={right}"
        )


def fitted(layer: TTTLayer, views: Views, gates: Gates, shape: tuple[int, ...]) -> tuple[Views, Gates]:
    """What the parts make of the tokens, with an entry for every sequence, head and token, `shape` `(B, H, T)`: a part of a
    user's own may give one for all, or anything. Kernels are handed addresses, and read what the shapes say.

    Raises:
        MetaTTTError: views that do not fit each other, or that the learner has no use for, gates of another kind, or a
            shape in which no axis of length 1 stands for all.
    """
    learner, optimizer, k = layer.learner, layer.optimizer, views.k
    for name in ("erase_key", "erase_direction"):
        view = getattr(views, name)
        if view is not None and view.shape != k.shape:
            raise MetaTTTError(f"the view {name} has shape {list(view.shape)}: it must be that of k, {list(k.shape)}")
    if views.weight is not None and views.weight.shape != k.shape[:-1]:
        given = list(views.weight.shape)
        raise MetaTTTError(f"the pairs' weight has shape {given}: it must be a number for each pair, {list(k.shape[:-1])}")
    if views.weight is not None and k.ndim != 5:
        raise MetaTTTError("a weight is for tokens with several pairs, k [B, H, T, n, d]: scale v, or the gate η, instead")
    keeps_data = isinstance(learner, NonParametric)
    if keeps_data and (views.erase_key is not None or views.erase_direction is not None or k.ndim != 4):
        raise MetaTTTError(
            f"{type(learner).__name__} keeps its data, and has no weights that an erase view or several pairs "
            "a token could change: set learner=linear_map"
        )
    if not isinstance(gates, DataGates if keeps_data else Gates):
        what = "with updates = False must return DataGates" if keeps_data else "that updates weights must return Gates"
        raise MetaTTTError(f"{type(optimizer).__name__}.gates returned {type(gates).__name__}: a rule {what}")
    if keeps_data:
        return views, gates
    if views.q.shape[:3] != shape or views.k.shape[:3] != shape:
        found = {name: list(view.shape) for name, view in (("k", views.k), ("q", views.q))}
        raise MetaTTTError(f"the task gives views {found}: k and q must be [B, H, T, ·], {[*shape, '·']} here")
    pairs = views.k.shape[3:-1]
    if views.v.shape[: 3 + len(pairs)] != shape + pairs:
        views = views._replace(v=_expanded("the view v", views.v, shape + pairs, views.v.shape[3 + len(pairs) :]))
    for name, gate in zip(gates._fields, gates, strict=True):
        if gate is None:
            continue
        own = gate.shape[3:] if name in ("weight_lr", "decay") or (name == "eta" and pairs) else ()
        if gate.shape != (*shape, *own):
            gates = gates._replace(**{name: _expanded(f"the gate {name}", gate, shape, own)})
    return views, gates


def _expanded(name: str, x: Tensor, shape: tuple[int, ...], own: tuple[int, ...]) -> Tensor:
    """`x` with the axes `shape` and its `own`, where it has 1 in place of the former."""
    wanted = (*shape, *own)
    if x.ndim != len(wanted) or any(n not in (1, size) for n, size in zip(x.shape, wanted, strict=True)):
        raise MetaTTTError(f"{name} has shape {list(x.shape)}: it must be {list(wanted)}, an axis may have length 1")
    return x.expand(wanted)


def check_memory(layer: TTTLayer, x: Tensor, state: State) -> None:
    """Refuses weights and positions in a state that are not of this layer.

    Raises:
        MetaTTTError: they are of other slots, shapes or types.
    """
    batch, plan, size = x.shape[0], layer.plan, layer.mini_batch_size
    wanted = {name: (batch, *shape) for name, shape in plan.weights.items()}
    for slot, weights in state.weights.items():
        if slot not in plan.slots or not fits(slot, weights, wanted):
            found = {name: tuple(w.shape) for name, w in weights.items()}
            raise MetaTTTError(
                f"the state is from another layer: it carries {slot} {found}, this layer {plan.slots} {wanted}"
            )
    # Kernels are handed addresses: what they read there must be what they take it for.
    accum_dtype = torch.promote_types(x.dtype, torch.float32)
    types = {w.dtype for slot, weights in state.weights.items() if slot != "pool" for w in weights.values()}
    if state.pos.dtype != torch.long or types - {accum_dtype}:
        raise MetaTTTError(
            f"the state has positions of {state.pos.dtype} and weights of {types}, expected torch.int64 and {accum_dtype}: "
            "move it with State.to, which keeps integers, or start with state=None"
        )
    if state.phase is not None and (type(state.phase) is not int or state.phase < 0):
        raise MetaTTTError(
            f"the state stands at token {state.phase!r} of a mini-batch: it must be an integer from 0 on, or None"
        )
    if state.phase is not None and state.phase >= size:
        raise MetaTTTError(f"the state is from another layer: it stands at token {state.phase} of {size}")
    if (len(state.weights) > 0) != layer.learner.has_weights:
        raise MetaTTTError(f"the state is from another layer: this one's learner is {type(layer.learner).__name__}")


def check_kept(part: Task | InnerOptimizer, before: Tensors, after: Tensors) -> None:
    """Refuses what a state has of a part, `before` the tokens, if it is not shaped as what the part makes of it.

    Raises:
        MetaTTTError: other names or shapes.
    """
    given, made = ({name: list(x.shape) for name, x in tensors.items()} for tensors in (before, after))
    if given != made:
        kind = type(part).__name__
        raise MetaTTTError(f"the state is from another layer: {kind} carries {made}, the state {given}")
