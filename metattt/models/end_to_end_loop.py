"""An inner loop over the last blocks of a language model: the loss of the whole network moves their fast weights.

A mini-batch is complete when its b tokens have been read **and the token after them is there**: that token is the label
of the last one, so the step is taken before it is read, and no prediction sees a label of its own. Until then its
tokens wait, as they enter the blocks of the loop, beside the attention's state from before the first of them. A
mini-batch that a call holds from end to end is read once; one that was begun in another call is read again for its
step.

The loss reaches the weights through all keys and values of the mini-batch; those from before it are data (they were
made with other weights).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from metattt.functional import with_values
from metattt.inner.network_step import gradients_of
from metattt.inner.packing import Packing
from metattt.inner.recompute import recompute
from metattt.learners.window import EMPTY
from metattt.modules import expand_like, needs_probes, rounds
from metattt.nested import map_tensors, refill, tensors_of
from metattt.state import State, Tensors, in_files

PLACE = torch.empty(0)  # where a tensor stood


@in_files
class Adaptation(NamedTuple):
    """What the inner loop carries between calls for `B` sequences.

    Attributes:
        pos: `[B]` tokens read since the start of the document.
        phase: how many tokens wait for their step, 0 to b, where it is the same number for all sequences; else None.
        weights: fast weights of the blocks by name, `[B, 1, *shape]` each.
        inputs: what enters the blocks at the tokens that wait, `[B, n, D]`: n is the largest number of them, and the
            last columns of a sequence are its own.
        ids: `[B, n]` these tokens.
        start: states of the blocks' attention before the first of them; of a sequence whose first mini-batch of the
            document it is, they mean nothing. Empty until a step has been taken.
    """

    pos: Tensor
    phase: int | None
    weights: tuple[Tensors, ...]
    inputs: Tensor
    ids: Tensor
    start: tuple[Any, ...]

    map, nbytes = State.map, State.nbytes  # type: ignore[misc]


class Cut(NamedTuple):
    """A column of a call before which weights change.

    Attributes:
        column: of the tokens as they are sorted (padding last).
        learn: `[n]` sequences whose step is taken there; None: all.
        restart: `[B]` True where a document starts and the weights are W0 again; None: nowhere.
    """

    column: int
    learn: Tensor | None
    restart: Tensor | None


class Loop(NamedTuple):
    """The settings of the inner loop, and the modules that it goes through.

    Attributes:
        blocks: the last blocks of the model: `x, state, _ = block(x, state, None, None, packing, weights=...)`.
        norm, head: of the model.
        size: b, tokens of a mini-batch.
        lr: η.
        clip: largest norm of the gradient of a sequence, over all fast weights; None: any.
        first_order: the outer gradient takes the inner one as a constant.
        checkpoint: keep only what enters a mini-batch, and run it again in the backward pass.
    """

    blocks: tuple[nn.Module, ...]
    norm: nn.Module
    head: nn.Module
    size: int
    lr: float
    clip: float | None
    first_order: bool
    checkpoint: bool

    def fresh(self, batch: int) -> tuple[Tensors, ...]:
        """W0 for every sequence, in fp32 or wider."""
        return tuple(
            {
                name: value.to(torch.promote_types(value.dtype, torch.float32)).expand(batch, *value.shape).clone()
                for name, value in block.memory.init.items()  # type: ignore[union-attr, operator]
            }
            for block in self.blocks
        )

    def run(
        self, x: Tensor, ids: Tensor, states: Sequence[Any], held: Adaptation | None, packing: Packing | None
    ) -> tuple[Tensor, tuple[Any, ...], Adaptation]:
        """Reads a call, and takes the steps whose labels are there.

        Args:
            x: `[B, T, D]` what enters the first of the blocks.
            ids: `[B, T]` the tokens.
            states: of the blocks' attention; None at the start.
            held: what was carried; None at the start.
            packing: padding and documents of the call.

        Returns:
            What leaves the last block, `[B, T, D]`, its attention's states and what to carry on.
        """
        batch, count = ids.shape
        if held is None:
            held = Adaptation(ids.new_zeros(batch), 0, self.fresh(batch), x[:, :0], ids[:, :0], ())
        if packing is None:
            positions, pos = held.pos.unsqueeze(1) + torch.arange(count, device=ids.device), held.pos + count
        else:
            positions, pos = packing.positions(held.pos)
        cuts, waiting = plan(held, positions, pos, count, self.size, packing)
        inputs, lead = torch.cat([held.inputs.to(x.dtype), x], dim=1), held.inputs.shape[1]
        tokens = torch.cat([held.ids, ids], dim=1).long()
        weights, now, start = held.weights, tuple(states), held.start
        ys: list[Tensor] = []
        column = 0
        for cut in (*cuts, Cut(count, ids.new_empty(0), None)):
            here, rows = slice(column, cut.column), cut.learn
            part = None if packing is None else packing.part(column, cut.column)
            at = lead + cut.column
            whole = rows is None and cut.column - column == self.size  # the mini-batch of all, from end to end
            labels = tokens[:, at - self.size + 1 : at + 1]
            if cut.column > column:
                y, now, moved = self.step(x[:, here], now, weights, labels if whole else None, part)
                ys.append(y)
            if whole:
                weights, start = moved, now
            elif rows is None or len(rows):
                fresh = _rows(positions[:, cut.column], rows) == self.size
                before = tuple(_blank(map_tensors(lambda t: _rows(t, rows), one), fresh) for one in start)  # noqa: B023
                _, _, moved = self.step(
                    _rows(inputs[:, at - self.size : at], rows),
                    before or (None,) * len(self.blocks),
                    map_tensors(lambda t: _rows(t, rows), weights),  # noqa: B023
                    _rows(labels, rows),
                    None,
                )
                weights = _put(weights, moved, rows)
                start = now if rows is None or not start else self._merged(now, start, rows)
            if cut.restart is not None:
                weights = _put(weights, self.fresh(batch), cut.restart.nonzero().flatten(), select=True)
            column = cut.column
        inputs, tokens = _last((inputs, tokens), lead, count, waiting, packing)
        same = len(set(waiting)) == 1
        after = Adaptation(pos, waiting[0] if same else None, weights, inputs, tokens, start)
        return torch.cat(ys, dim=1), now, after

    def step(
        self,
        x: Tensor,
        states: Sequence[Any],
        weights: tuple[Tensors, ...],
        labels: Tensor | None,
        packing: Packing | None,
    ) -> tuple[Tensor, tuple[Any, ...], tuple[Tensors, ...]]:
        """Reads `x` `[B, t, D]` and, if `labels` `[B, t]` says what follows each token, moves the weights by them."""
        parts = nn.ModuleList([*self.blocks, self.norm, self.head])
        derivatives = torch.is_grad_enabled() or (needs_probes() and not torch.is_inference_mode_enabled())
        twice = labels is not None and not self.first_order and derivatives
        if not self.checkpoint or not torch.is_grad_enabled() or needs_probes():
            with _attention(twice):
                return self._step(parts, x, states, weights, labels, packing)
        entering = (x, states, weights)
        given = tensors_of(entering)
        parameters = dict(parts.named_parameters())
        again = _same_autocast(x.device.type)
        shape: list[Any] = []

        def body(*tensors: Tensor) -> list[Tensor]:
            values = dict(zip(parameters, tensors[len(given) :], strict=True))
            with again(), _attention(twice):  # alike in both passes
                made = self._step(with_values(parts, values), *refill(entering, tensors), labels, packing)
            shape[:] = [map_tensors(lambda _: PLACE, made)]  # nothing holds on to the tensors
            return tensors_of(made)

        found = recompute(body, *given, *parameters.values())
        y, after, moved = refill(shape[0], found)
        return y, after, moved

    def _step(
        self,
        parts: nn.ModuleList,
        x: Tensor,
        states: Sequence[Any],
        weights: tuple[Tensors, ...],
        labels: Tensor | None,
        packing: Packing | None,
    ) -> tuple[Tensor, tuple[Any, ...], tuple[Tensors, ...]]:
        *blocks, norm, head = parts

        def read(with_weights: tuple[Tensors, ...]) -> tuple[Tensor, tuple[Any, ...]]:
            y, after = x, []
            for block, state, own in zip(blocks, states, with_weights, strict=True):
                y, state, _ = block(y, state, None, None, packing, weights=own)
                after.append(state)
            return y, tuple(after)

        if labels is None:
            return *read(weights), weights

        def loss(own: tuple[Tensors, ...]) -> tuple[Tensor, tuple[Tensor, tuple[Any, ...]]]:
            y, after = read(own)
            logits = head(norm(y))
            widened = logits.to(torch.promote_types(logits.dtype, torch.float32))
            nats = F.cross_entropy(widened.flatten(0, 1), labels.flatten(), reduction="sum")
            return nats / self.size, (y, after)

        gradients, (y, after) = gradients_of(loss, weights, self.first_order, self.clip)
        moved = [w - self.lr * g for w, g in zip(tensors_of(weights), tensors_of(gradients), strict=True)]
        return y, after, refill(weights, moved)

    def _merged(self, now: tuple[Any, ...], before: tuple[Any, ...], rows: Tensor) -> tuple[Any, ...]:
        """The states of `rows` from `now`, the others from `before`."""
        found = []
        for block, one, other in zip(self.blocks, now, before, strict=True):
            sinks: int = block.layer.learner.sinks  # type: ignore[union-attr, assignment]
            places = max(one.learner["position"].shape[1], other.learner["position"].shape[1])
            found.append(_put(_widened(other, places, sinks), _widened(one, places, sinks), rows, select=True))
        return tuple(found)


def plan(
    held: Adaptation, positions: Tensor, pos: Tensor, count: int, size: int, packing: Packing | None
) -> tuple[list[Cut], list[int]]:
    """Where the weights change in a call, and how many tokens of each sequence wait after it (or the number, if it is
    the same for all).

    Where sequences stand alike, nothing is fetched from the device.
    """
    if packing is None and held.phase is not None:
        first = 0 if held.phase == size else size - held.phase
        return [Cut(column, None, None) for column in range(first, count, size)], [(held.phase + count - 1) % size + 1]
    place, begun, ended = positions.cpu(), held.pos.cpu(), pos.cpu()
    valid = torch.ones_like(place, dtype=torch.bool)
    if packing is not None and packing.valid is not None:
        valid = packing.valid.cpu()
    learn = valid & (place > 0) & (place % size == 0)
    before = torch.cat([begun.unsqueeze(1) - 1, place[:, :-1]], dim=1)
    restart = valid & (place == 0) & (before >= size)
    cuts = []
    for column in (learn | restart).any(0).nonzero().flatten().tolist():
        rows, again = learn[:, column], restart[:, column]
        chosen = None if rows.all() else rows.nonzero().flatten().to(pos.device)
        cuts.append(Cut(column, chosen, again.to(pos.device) if again.any() else None))
    return cuts, [(one - 1) % size + 1 if one else 0 for one in ended.tolist()]


def _attention(twice: bool) -> AbstractContextManager[Any]:
    """Attention by elementary operations, if it is to be differentiated twice: the fast backends have no second
    derivative, on any device."""
    return sdpa_kernel(SDPBackend.MATH) if twice else nullcontext()


def _same_autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Autocast as it is now, for the backward pass, where it is off. (A cache of weights would hold those of a pass
    without derivatives.)"""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    enabled, dtype = rounds(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)


# -- rows of a batch ---------------------------------------------------------------------------------------------------


def _rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)


def _put(into: Any, new: Any, rows: Tensor | None, select: bool = False) -> Any:
    """`into` with `new` in `rows`; `select`: those rows of `new`."""
    if rows is None:
        return new
    values = iter(tensors_of(new))

    def put(tensor: Tensor) -> Tensor:
        value = next(values)
        return tensor.index_copy(0, rows, (value.index_select(0, rows) if select else value).to(tensor.dtype))

    return map_tensors(put, into)


def _blank(state: State | None, fresh: Tensor) -> State | None:
    """A state of window attention from before a document, where `fresh` `[B]`: it holds no token."""
    if state is None:
        return None
    learner = dict(state.learner)
    learner["position"] = learner["position"].masked_fill(fresh.unsqueeze(1), EMPTY)
    task = {name: x.masked_fill(expand_like(fresh, x), 0) for name, x in state.task.items()}
    return state._replace(pos=state.pos.masked_fill(fresh, 0), learner=learner, task=task)


def _widened(state: State, places: int, sinks: int) -> State:
    """A state of window attention with empty places after those of the sinks."""
    more = places - state.learner["position"].shape[1]
    if not more:
        return state
    learner: Tensors = {}
    for name, x in state.learner.items():
        axis = 2 if x.ndim == 4 else 1
        shape = list(x.shape)
        shape[axis] = more
        empty = x.new_full(shape, EMPTY if name == "position" else 0)
        learner[name] = torch.cat([x.narrow(axis, 0, sinks), empty, x.narrow(axis, sinks, x.shape[axis] - sinks)], axis)
    return state._replace(learner=learner)


def _last(
    tensors: tuple[Tensor, ...], lead: int, count: int, waiting: Sequence[int], packing: Packing | None
) -> tuple[Tensor, ...]:
    """The tokens that wait, of `tensors` `[B, lead + T, ...]`, in the last columns."""
    most, total = max(waiting), lead + count
    if packing is None or packing.valid is None:
        found = tuple(x[:, total - most :] for x in tensors)
        # a state does not hold on to a long sequence
        return tuple(x.clone() for x in found) if total > 4 * most else found
    end = lead + packing.valid.sum(1, keepdim=True)
    index = (end - most + torch.arange(most, device=end.device)).clamp(min=0)
    return tuple(
        x.gather(1, index.view(*index.shape, *(1,) * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])) for x in tensors
    )
