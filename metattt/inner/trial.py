"""Tests of a task and a learner on a few random tokens: whether the loss of a token depends on that token alone, and
which form can express the learner."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.functional import with_values
from metattt.learners.base import Learner
from metattt.learners.fast_weights import FastWeights, RecordingWeights, WeightUse
from metattt.learners.opaque import UnsupportedOperation
from metattt.tasks.base import Task

P = TypeVar("P", bound=nn.Module)


def looks_ahead(task: Task, learner: Learner, num_heads: int, d_in: int) -> bool:
    """Whether a learner that mixes tokens lets them see later ones."""
    try:
        check_token_local(task, learner, num_heads, d_in)
    except MetaTTTError:
        return True
    return False


def unsupported(task: Task, learner: Learner, num_heads: int, d_in: int) -> str | None:
    """Why the dual form cannot express a learner (the weight and the operation), or None if it can."""
    task, learner = _in_double(task), _in_double(learner)
    with torch.device("cpu"), torch.enable_grad():
        for count in (1, 4):  # an input of another size is not a row for each token, whatever its size is
            fast, slow, k, v = _tiny(task, learner, num_heads, d_in, batch=2, count=count)
            record = _Watched(fast, slow, k.dtype)
            try:
                prediction = learner.predict(record, k)
            except UnsupportedOperation as error:
                return str(error)
            except RuntimeError as error:  # in the plain computation, which has been tried, there was none
                return f"recording it fails: {str(error).splitlines()[0].rstrip('.')}"
            for x, _ in record.seen:
                if x.shape[:3] != k.shape[:3]:
                    return f"a weight is applied to {list(x.shape)}, which are no rows of the tokens {list(k.shape)}"
        task.loss(prediction.detach(), v)  # which still notices what is changed in place
        if any(x._version != version for x, version in record.seen):
            return "a tensor that a weight has been applied to, or has made, is changed in place"
        vectors = {name for use in record.uses for name in (use.bias, use.weight if use.scale else None) if name}
        for use in record.uses:
            if use.weight in vectors and not use.scale:
                return f"{use.weight} is used as a matrix and as a vector"
    return None


class _Watched(RecordingWeights):
    """Remembers the versions of what it records: changed in place, it is not what gradients are computed from."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.seen: list[tuple[Tensor, int]] = []

    def _use(self, z: Tensor, use: WeightUse) -> Tensor:
        count, z = len(self.uses), super()._use(z, use)
        recorded = [z, use.input] if len(self.uses) > count else []
        self.seen += [(x, x._version) for x in recorded if x is not None]
        return z


def check_width(learner: Learner, num_heads: int, d_in: int, d_out: int) -> None:
    """Raises an error for a learner whose `forward` gives something else than one prediction a token, made by its fast
    weights.

    Raises:
        MetaTTTError: predictions of another shape than `[B, H, T, d_out]` or without a derivative.
    """
    learner = _in_double(learner)
    with torch.device("cpu"), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        fast, slow, k, _ = _tiny(None, learner, num_heads, d_in)
        fast = {name: x.requires_grad_() for name, x in fast.items()}
        given = k.clone()
        y = learner(FastWeights(fast, slow, k.dtype), given)
        made = isinstance(y, Tensor) and y.requires_grad
        grads = torch.autograd.grad(y.sum(), [*fast.values()], allow_unused=True) if made else [None]
    if not torch.equal(given, k):
        raise MetaTTTError(
            f"{type(learner).__name__}.forward changes in place the tokens that it is given, which others see too: "
            "make it compute on x.clone()"
        )
    if not isinstance(y, Tensor) or y.shape != (*k.shape[:-1], d_out):
        found = list(y.shape) if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise MetaTTTError(
            f"{type(learner).__name__}.forward returns {found} for tokens {list(k.shape)}: expected "
            f"{[*k.shape[:-1], d_out]}, a prediction of width d_out={d_out} for each"
        )
    if all(x is None for x in grads):
        raise MetaTTTError(
            f"what {type(learner).__name__}.forward returns has no derivative by its fast weights ({', '.join(fast)}): "
            "use them through w, and do not detach what they give"
        )


def check_token_local(task: Task, learner: Learner, num_heads: int, d_in: int) -> None:
    """Raises an error for a learner or loss that mixes tokens without declaring it, or sees later tokens: its gradients
    would be wrong.

    Raises:
        MetaTTTError: `∂ℓ_s/∂k_r ≠ 0` for some `r ≠ s`, or `r > s` for a learner that declares `mixes_tokens`.
    """
    task, learner = _in_double(task), _in_double(learner)
    with torch.device("cpu"), torch.enable_grad():
        fast, slow, k, v = _tiny(task, learner, num_heads, d_in)
        fast = {name: x.requires_grad_() for name, x in fast.items()}  # what is detached from k is not from these
        k = k.requires_grad_()
        y = learner.predict(FastWeights(fast, slow, k.dtype), k)
        losses = _losses(task, y, v)
        name = type(learner).__name__
        for s in range(k.shape[2]):
            found = torch.autograd.grad(
                losses[:, :, s].sum(), (k, y), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            others = [r for r in range(k.shape[2]) if r > s or (r < s and not learner.mixes_tokens)]
            sees, by_loss = (bool((grad[:, :, others].abs() > 0).any()) for grad in found)
            if not sees:
                continue
            if learner.mixes_tokens:
                raise MetaTTTError(f"{name} lets tokens see later ones: make it causal, or set optimizer.read=block")
            if by_loss:
                raise MetaTTTError(
                    f"{type(task).__name__}.loss lets tokens see each other: make the loss of a token depend on its "
                    "prediction and label alone"
                )
            raise MetaTTTError(
                f"{name} lets tokens see each other but does not declare it: set mixes_tokens = True on the class, or "
                "make forward act on each token alone"
            )


def check_alone(task: Task, learner: Learner, num_heads: int, d_in: int, whole: bool) -> None:
    """Raises an error if the loss of a token, or its derivatives, change with the other tokens and sequences of the
    call: a call may cut batches and sequences anywhere.

    Args:
        whole: the learner always sees whole mini-batches, and only what it makes of the batch is compared.

    Raises:
        MetaTTTError: sequences together and one by one differ, or the first and the last tokens of a sequence apart
            from the others, or two equal calls, or a head's loss depends on another's weights.
    """

    def seen(rows: slice, tokens: slice, of: slice, heads: slice = slice(None)) -> list[Tensor]:
        """The losses of tokens `of` among `tokens`, and the derivatives of their sum over `heads`."""
        weights = {name: x[rows].clone().requires_grad_() for name, x in fast.items()}
        k, v = keys[rows, :, tokens].clone().requires_grad_(), labels[rows, :, tokens]
        losses = _losses(task, learner.predict(FastWeights(weights, slow, k.dtype), k), v)[:, :, of]
        grads = torch.autograd.grad(
            losses[:, heads].sum(), [k, *weights.values()], allow_unused=True, materialize_grads=True
        )
        return [x.detach().nan_to_num() for x in (losses, grads[0][:, :, of], *grads[1:])]

    task, learner = _in_double(task), _in_double(learner)
    one, three, every, first, last = slice(0, 1), slice(0, 3), slice(0, 5), slice(0, 3), slice(2, 5)
    with torch.device("cpu"), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        fast, slow, keys, labels = _tiny(task, learner, num_heads, d_in, batch=3, count=4 if whole else 5)
        apart = [seen(slice(row, row + 1), every, every) for row in range(3)]
        pairs = {
            "chance (two equal calls differ)": (apart[0], seen(one, every, every)),
            "the other sequences of its batch": (
                [torch.cat(rows) for rows in zip(*apart, strict=True)],
                seen(three, every, every),
            ),
            # each head has an η of its own, by which forms would multiply other sums
            "the weights of other heads": tuple(
                [x[:, :1] for x in seen(one, every, every, heads)[2:]] for heads in (slice(0, 1), slice(None))
            ),
        }
        if not whole:
            pairs["later tokens, or on how many there are"] = seen(one, first, every), seen(one, every, first)
        if not learner.mixes_tokens:
            pairs["earlier tokens, or on its place among them"] = seen(one, last, every), seen(one, every, last)
    for what, (alone, together) in pairs.items():
        size = max(float(x.abs().max()) for x in alone)  # of all: a derivative may be 0 but for rounding
        if not all(torch.allclose(a, b, 1e-6, 1e-9 * size) for a, b in zip(alone, together, strict=True)):
            raise MetaTTTError(
                f"{type(task).__name__}.loss of what {type(learner).__name__} predicts for a token depends on {what}: "
                "make forward and loss act on each token of each head alone"
            )


def _losses(task: Task, y: Tensor, v: Tensor) -> Tensor:
    losses: object = task.loss(y, v)
    if not isinstance(losses, Tensor) or losses.shape != y.shape[:-1] or not losses.requires_grad:
        given = [*losses.shape] if isinstance(losses, Tensor) else losses
        raise MetaTTTError(
            f"{type(task).__name__}.loss returned {given} for tokens {[*y.shape[:-1]]}: expected one a token, with "
            "a derivative by the prediction"
        )
    return losses


def _in_double(part: P) -> P:
    """The part with its own parameters (those of a learned loss, say) in the type of the tokens of a trial."""
    narrow = {name: x for name, x in part.named_parameters() if x.dtype != torch.float64}
    return with_values(part, {name: x.double() for name, x in narrow.items()}) if narrow else part


def _tiny(
    task: Task | None, learner: Learner, num_heads: int, d_in: int, batch: int = 1, count: int = 4
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
    """Random weights (W0 may be zero, which hides everything), random tokens and labels, in double precision. (Four
    tokens are also a map.)"""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    label_dim = d_in if task is None else task.label_dim
    fast = {name: random(batch, *shape) for name, shape in learner.shapes.items() if name in learner.init}
    slow = {name: random(*shape) for name, shape in learner.shapes.items() if name in learner.slow}
    k = random(batch, num_heads, count, d_in)
    k[1:2] = -2 * k[:1]  # what depends on the sign of a sum goes one way for one of them, another for the batch
    return fast, slow, k, random(batch, num_heads, count, label_dim)
