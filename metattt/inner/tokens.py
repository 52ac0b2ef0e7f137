"""Types of the inner loop: tokens, blocks, and what a kernel receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.modules import product_type
from metattt.optimizers.base import Gates, InnerOptimizer
from metattt.state import DataGates, Tensors
from metattt.tasks.base import Views

if TYPE_CHECKING:
    from metattt.learners.base import Learner

VIEWS = ("k", "v", "q", "erase_key", "erase_direction")


class Tokens(NamedTuple):
    """Views `[B, H, T, ·]` and gates `[B, H, T]` of consecutive tokens.

    Where a token gives n pairs, k, v, p and b are `[B, H, T, n, ·]`, until `apart` has made n tokens of it. Where
    neighbouring tokens have pairs in common, k and v may then have T + n − 1 rows: pair j of token t is row t + j.
    """

    views: Views
    gates: Gates

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Views and gates in a row, in the order of `NAMES`."""
        return (*self.views, *self.gates)

    @classmethod
    def from_tensors(cls, tensors: Iterable[Tensor | None]) -> Tokens:
        """The inverse of `tensors`."""
        row = list(tensors)
        return cls(Views(*row[: len(Views._fields)]), Gates(*row[len(Views._fields) :]))  # type: ignore[arg-type]

    def with_views(self, **views: Tensor | None) -> Tokens:
        """Tokens with other views, by name."""
        return Tokens(self.views._replace(**views), self.gates)  # type: ignore[arg-type]

    def with_gates(self, **gates: Tensor | None) -> Tokens:
        """Tokens with other gates, by name."""
        return Tokens(self.views, self.gates._replace(**gates))  # type: ignore[arg-type]

    def map(self, function: Callable[[Tensor], Tensor]) -> Tokens:
        """Applies `function` to every tensor at hand."""
        return Tokens.from_tensors([None if x is None else function(x) for x in self.tensors])

    def wide(self) -> Tokens:
        """Tokens whose views have the type of the gates."""
        dtype, narrow = self.gates.eta.dtype, False
        for x in self.views:  # a task of one's own may round one alone
            narrow = narrow or (x is not None and x.dtype != dtype)
        if not narrow:
            return self
        alike = self.in_common  # stays so: a window of rows, not of copies
        views = [
            rows(x).to(dtype).unfold(2, x.shape[3], 1).mT if x is not None and alike and x.ndim == 5 else x
            for x in self.views
        ]
        wide: list[Any] = [None if x is None else x.to(dtype) for x in views]
        return Tokens(Views(*wide), self.gates)

    def split(self, lengths: Sequence[int] | int) -> list[Tokens]:
        """Consecutive pieces. One split for all, since a slice per piece would make the backward pass quadratic in
        T."""
        parts: list[Any] = [repeat(None) if x is None else x.split(lengths, dim=2) for x in self.tensors]
        return list(map(Tokens.from_tensors, zip(*parts, strict=False)))

    def masked(self, is_filled: Tensor) -> Tokens:
        """Unfilled columns change nothing: η = 0, α = β = 1, κ = 0, no decay. `is_filled` `[B, columns]`."""
        is_filled = is_filled.unsqueeze(1)
        eta, alpha, beta, kappa, weight_lr, decay = self.gates
        if kappa is None and not (alpha is None and beta is None and weight_lr is None):
            kappa = torch.ones_like(self.views.q[..., 0], dtype=eta.dtype)
        return self.with_gates(
            eta=torch.where(is_filled if eta.ndim == 3 else is_filled.unsqueeze(-1), eta, 0),
            alpha=None if alpha is None else torch.where(is_filled, alpha, 1),
            beta=None if beta is None else torch.where(is_filled, beta, 1),
            kappa=None if kappa is None else torch.where(is_filled, kappa, 0),
            decay=None if decay is None else torch.where(is_filled.unsqueeze(-1), decay, 0),
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """Which views and gates there are, and their axes after `[B, H, T]`."""
        return tuple([None if x is None else x.shape[3:] for x in (*self.views, *self.gates)])

    @property
    def erases(self) -> bool:
        """Whether there is an erase view or a decay per channel."""
        return (
            self.views.erase_key is not None or self.views.erase_direction is not None or self.gates.decay is not None
        )

    @property
    def generalised(self) -> bool:
        """Whether only the generic forms support these tokens: an erase view, decays per channel, several pairs, labels
        of another shape than keys."""
        return self.erases or self.views.k.ndim == 5 or self.views.k.shape != self.views.v.shape

    @property
    def pairs(self) -> int | None:
        """n, the pairs that a token gives; None where it gives one and has no axis for them."""
        return self.views.k.shape[3] if self.views.k.ndim == 5 else None

    @property
    def in_common(self) -> bool:
        """Whether pair j of a token is pair j − 1 of the next one, as in a window of tokens. It is where both are the
        same numbers in memory."""
        if self.pairs is None or self.views.erase_key is not None or self.views.erase_direction is not None:
            return False
        k, v = self.views.k, self.views.v
        return k.shape[2] > 1 < k.shape[3] and k.stride(2) == k.stride(3) and v.stride(2) == v.stride(3)

    def apart(self, in_common: bool = False) -> Tokens:
        """Every pair as a token of its own, but for q. Decays act before the first pair of a token; with momentum, the
        weights move after the last one.

        Args:
            in_common: rows of k and v that neighbouring tokens share are taken once: T + n − 1 rows.
        """
        pairs = self.pairs
        if pairs is None:
            return self

        def at(x: Tensor | None, place: int, elsewhere: float) -> Tensor | None:
            """`[B, H, T, ...]` to `[B, H, T·n, ...]`: `x` at one pair of each token."""
            if x is None or pairs == 1:
                return x
            rest = torch.full_like(x, elsewhere).unsqueeze(3)
            row = [rest] * pairs
            row[place] = x.unsqueeze(3)
            return torch.cat(row, 3).flatten(2, 3)

        gates, kappa = self.gates, self.gates.kappa
        eta = gates.eta if gates.eta.ndim == 4 else gates.eta.unsqueeze(3).expand(-1, -1, -1, pairs)
        if gates.beta is not None:
            kappa = at(torch.ones_like(gates.beta) if kappa is None else kappa, pairs - 1, 0.0)
        elif kappa is not None:
            kappa = kappa.repeat_interleave(pairs, 2)
        weight_lr = None if gates.weight_lr is None else gates.weight_lr.repeat_interleave(pairs, 2)
        alpha, beta, decay = at(gates.alpha, 0, 1.0), at(gates.beta, 0, 1.0), at(gates.decay, 0, 0.0)
        p, b = (None if x is None else x.flatten(2, 3) for x in (self.views.erase_key, self.views.erase_direction))
        k, v = (rows(x) if in_common else x.flatten(2, 3) for x in (self.views.k, self.views.v))
        return Tokens(Views(k, v, self.views.q, p, b), Gates(eta.flatten(2, 3), alpha, beta, kappa, weight_lr, decay))


NAMES = (*Views._fields, *Gates._fields)


def rows(pairs: Tensor) -> Tensor:
    """What tokens have in common once each: `[B, H, T, n, d]` to `[B, H, T + n − 1, d]`."""
    return torch.cat([pairs[:, :, 0, :-1], pairs[:, :, :, -1]], 2)


class Block(NamedTuple):
    """Consecutive columns inside one mini-batch, or several whole mini-batches one after the other.

    Attributes:
        length: columns of one.
        phase: place of the first column in its mini-batch; `[B]` if it differs between sequences (then `length` is 1).
        commit: whether the mini-batch is complete after these columns; `[B]` if it differs.
        filled: tokens of the mini-batch seen by the end of these columns; `[B]` if it differs.
        restart: `[B]` sequences that start a document here; None if none does.
        times: how many such blocks follow each other.
        whole: every sequence completes the mini-batch, or has no token here. (With `commit is True` all complete it.)
        begins: `restart` on the host.
    """

    length: int
    phase: int | Tensor
    commit: bool | Tensor
    filled: int | Tensor
    restart: Tensor | None = None
    times: int = 1
    whole: bool = False
    begins: Tensor | None = None

    @property
    def columns(self) -> int:
        """Columns of all of them."""
        return self.length * self.times


def each(blocks: Sequence[Block]) -> list[Block]:
    """The same with one mini-batch, or part of one, a block."""
    return [block._replace(times=1) for block in blocks for _ in range(block.times)]


def consecutive(length: int, phase: int, block: int) -> tuple[list[Block], int]:
    """Blocks of `length` tokens at the same phase in all sequences, and the phase after them.

    No list here is as long as the sequence: `torch.compile` makes one graph for all lengths of whole mini-batches.
    """
    blocks = []
    if phase != 0 and length > 0:
        size = min(block - phase, length)
        # an explicit branch: under torch.compile the comparison itself is symbolic
        blocks.append(Block(size, phase, True if phase + size == block else False, phase + size))  # noqa: SIM210
        length, phase = length - size, (phase + size) % block
    whole = length // block
    rest = length - whole * block
    if rest > 0:
        # numbers, where a compiler leaves the length open: torch 2.14 takes the strides of the first example's pieces
        # for those of all lengths
        whole, rest = len(range(whole)), len(range(rest))
    if whole > 0:
        blocks.append(Block(block, 0, True, block, times=whole))
    if rest > 0:
        blocks.append(Block(rest, 0, False, rest))
        phase = rest
    return blocks, phase


def most_joined(tokens: Tokens) -> int:
    """Tokens whose products with each other a form may find together: on a CPU as many as its cache holds."""
    return 256 if tokens.views.k.device.type == "cpu" else 1024


def joined(blocks: Sequence[Block], tokens: Tokens) -> list[Block]:
    """Joins blocks of a rule without phase, up to `most_joined` tokens, if no document starts between them."""
    most = most_joined(tokens)
    found: list[Block] = []
    for block in blocks:
        for _ in range(block.times):
            if found and block.restart is None and found[-1].length + block.length <= most:
                found[-1] = found[-1]._replace(length=found[-1].length + block.length)
            else:
                found.append(block._replace(times=1))
    return found


class MiniBatches(NamedTuple):
    """The input of a kernel: consecutive whole mini-batches of `b` tokens, and the committed weights before them.

    Attributes:
        tokens: views `[B, H, n·b, d]` as the task made them (any floating type, any strides) and gates `[B, H, n·b]` in
            fp32 or wider.
        weights: fast weights W_a by name at the start, `[B, H, *shape]`, fp32 or wider.
        slow: outer-loop weights of the learner by name, `[H, *shape]`.
        tau: token steps `[1 or H, b]`; None: all 1.
        size: b, tokens per mini-batch.
        matmul_dtype: type to which matmul operands are rounded.
        group_size: mini-batches whose weights are recomputed together in the backward pass; None leaves it to the
            kernel.
        exclusive, decayed: of an online rule, for which b = 1: queries read before their token; gradients are taken at
            decayed weights.
        begins: `[B, n]` on the host: a document begins with this mini-batch, at the weights `origin`; None: none does.
        origin: W0 by name, `[1, H, *shape]`; empty where no document begins.
    """

    tokens: Tokens
    weights: Tensors
    slow: Tensors
    tau: Tensor | None
    size: int
    matmul_dtype: torch.dtype
    group_size: int | None
    exclusive: bool = False
    decayed: bool = False
    begins: Tensor | None = None
    origin: Tensors = {}  # noqa: RUF012 (of a NamedTuple)


Scan = Callable[[MiniBatches], tuple[Tensor, Tensors]]


def rated(factor: Tensor, weight_lr: Tensor | None, index: int) -> Tensor:
    """`factor` `[B, H, n]` of the tokens' gradients as it is for fast weight number `index`."""
    return factor if weight_lr is None else factor * weight_lr[..., index]


def scaled(gradient: Tensor, factor: float | None) -> Tensor:
    """A gradient times the factor of its weight (`Learner.step_scale`); None: 1."""
    return gradient if factor is None else factor * gradient


def fitted(
    views: Views, gates: Gates | DataGates, learner: Learner, rule: InnerOptimizer, shape: tuple[int, ...]
) -> tuple[Views, Gates]:
    """Checks views and gates, and expands them to `shape` `(B, H, T)`: a user's part may return one value for all, or
    anything, and kernels read memory by these shapes. Views become the type of products (on a GPU, autocast leaves
    norms in fp32), gates fp32 or wider, and η includes the weight of each pair.

    Raises:
        MetaTTTError: views that do not fit each other, or that the learner has no use for, gates of another kind, or a
            shape in which no axis of length 1 stands for all.
    """
    k, keeps_data = views.k, not learner.has_weights
    for name in ("erase_key", "erase_direction"):
        view = getattr(views, name)
        if view is not None and view.shape != k.shape:
            raise MetaTTTError(f"the view {name} has shape {list(view.shape)}: it must be that of k, {list(k.shape)}")
    if views.weight is not None and views.weight.shape != k.shape[:-1]:
        given = list(views.weight.shape)
        raise MetaTTTError(
            f"the pairs' weight has shape {given}: it must be a number for each pair, {list(k.shape[:-1])}"
        )
    if views.weight is not None and k.ndim != 5:
        raise MetaTTTError(
            "a weight is for tokens with several pairs, k [B, H, T, n, d]: scale v, or the gate η, instead"
        )
    if keeps_data:
        check_views_of_data(learner, views)
    if not isinstance(gates, DataGates if keeps_data else Gates):
        what = "with updates = False must return DataGates" if keeps_data else "that updates weights must return Gates"
        raise MetaTTTError(f"{type(rule).__name__}.gates returned {type(gates).__name__}: a rule {what}")
    if isinstance(gates, Gates) and gates.beta is None and rule.has_momentum:
        gates = gates._replace(beta=gates.eta.new_zeros(1, 1, 1))  # S of an earlier call is not carried over this one
    pairs = k.shape[3:-1]
    of_keys = (shape[0], k.shape[1] if keeps_data else shape[1], shape[2])  # learners of data may share keys
    if views.q.shape[:3] != shape or k.shape[:3] != of_keys:
        both = {"k": list(k.shape), "q": list(views.q.shape)}
        raise MetaTTTError(f"the task gives views {both}: k and q must be [B, H, T, ·], {[*shape, '·']} here")
    if views.v.shape[: k.ndim - 1] != k.shape[:-1]:
        views = views._replace(v=_expanded("the view v", views.v, tuple(k.shape[:-1]), views.v.shape[k.ndim - 1 :]))
    if k.device.type != "meta" and torch.is_autocast_enabled(k.device.type):
        narrow = {name: x.to(product_type(x)) for name, x in zip(VIEWS, views, strict=False) if x is not None}
        views = views._replace(**narrow)
    found, accum_dtype = {}, torch.promote_types(k.dtype, torch.float32)
    for name, gate in zip(gates._fields, gates, strict=True):
        if gate is None:
            continue
        own = gate.shape[3:] if name in ("weight_lr", "decay", "levels") else ()
        own = pairs if name == "eta" and gate.ndim == 4 else own
        heads = 1 if keeps_data and gate.shape[1:2] == (1,) else shape[1]  # learners of data share one for all
        if gate.shape != (shape[0], heads, shape[2], *own):
            gate = _expanded(f"the gate {name}", gate, (shape[0], heads, shape[2]), own)
        if name == "eta" and views.weight is not None:
            gate = (gate if gate.ndim == 4 else gate.unsqueeze(-1)) * views.weight
        found[name] = gate.to(accum_dtype)
    return views, type(gates)(**found)  # type: ignore[return-value]


def check_views_of_data(learner: Learner, views: Views) -> None:
    """Raises an error for views that a learner without weights has no use for."""
    if views.erase_key is not None or views.erase_direction is not None or views.k.ndim != 4:
        raise MetaTTTError(
            f"{type(learner).__name__} keeps its data, and has no weights that an erase view or several pairs "
            "a token could change: set task=reconstruction"
        )


def _expanded(name: str, x: Tensor, shape: tuple[int, ...], own: tuple[int, ...]) -> Tensor:
    """`x` with the axes `shape` and its `own`, where it has 1 in place of the former."""
    wanted = (*shape, *own)
    if x.ndim != len(wanted) or any(n not in (1, size) for n, size in zip(x.shape, wanted, strict=True)):
        raise MetaTTTError(f"{name} has shape {list(x.shape)}: it must be {list(wanted)}, an axis may have length 1")
    return x.expand(wanted)
