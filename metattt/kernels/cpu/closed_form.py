"""Closed forms on the CPU: forward and backward of whole mini-batches in groups, written with batched products and no
inner autograd.

What depends on the weights is a serial walk of few small products per mini-batch; everything else (Qᵀ K, masks, reads,
most of the backward pass) is batched over a group. Only the weights at the start of each group are kept: the backward
pass runs a group again. The second-order terms are derived by hand, from the transpose of the gradient of the inner
loss (`inner_gradient`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metattt.inner.tokens import MiniBatches, Scan, Tokens
from metattt.kernels.base import Kernel
from metattt.ops.chunk import decay_matrix as transition
from metattt.optimizers.base import Gates
from metattt.state import Tensors

EPS = 1e-6  # of `learners.base.standardize`


class Group(NamedTuple):
    """n consecutive mini-batches of N = B·H learners.

    Attributes:
        k, v, q: `[n, N, b, d]`.
        mix: `[n, N, b, b]`, lower triangular: `W_t = γ_t W_a − Σ_s mix_ts ∇ℓ_s`. Its last row gives the next W_a.
        rows: γ, `[n, N, b]`; None: all 1.
        scale, shift: affine of the norm, `[N, 1, d]`.
    """

    k: Tensor
    v: Tensor
    q: Tensor
    mix: Tensor
    rows: Tensor | None
    scale: Tensor
    shift: Tensor


class ClosedForm(Kernel):
    """Walks over the groups. A subclass computes one group, for weights in the order of the learner's `init`."""

    device = "cpu"
    largest_group = 64  #: mini-batches; bounds what a group holds while it is computed

    @abstractmethod
    def forward(self, group: Group, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Predictions `[n, N, b, d]` and the weights after the group; weights are `[N, d_in, d_out]`, biases
        `[N, 1, d_out]`."""

    @abstractmethod
    def backward(
        self, group: Group, weights: Sequence[Tensor], dy: Tensor, dweights: Sequence[Tensor]
    ) -> tuple[Group, list[Tensor]]:
        """Cotangents of the group's tensors and of the weights before it, from those of the predictions and the weights
        after it."""

    def accepts(self, given: MiniBatches) -> str | None:
        tokens, dtype = given.tokens, given.tokens.gates.eta.dtype
        if tokens.gates.beta is not None or tokens.gates.rates is not None:
            return "a momentum gate, or a step size for every weight"
        if given.operand != dtype or dtype not in (torch.float32, torch.float64):
            return f"operands of {str(given.operand).removeprefix('torch.')} on the CPU"
        return None

    def scan(self, given: MiniBatches, reference: Scan) -> tuple[Tensor, Tensors]:
        y, *weights = _Scan.apply(self, reference, given, torch.is_grad_enabled(), *flat(given))
        return y, dict(zip(given.weights, weights, strict=True))

    def group_size(self, given: MiniBatches) -> int:
        """Mini-batches per group: √n keeps as many weights between groups as inside one."""
        count = given.tokens.views.k.shape[2] // given.size
        return given.group_size or max(1, min(self.largest_group, round(math.sqrt(count))))


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, form: ClosedForm, reference: Scan, given: MiniBatches, keep: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        layout = Layout(given, tensors, form.group_size(given))
        y = layout.empty_like_tokens(layout.tokens.views.q)
        kept: list[Tensor] = []
        weights = layout.start()
        for place in layout.places():
            kept += weights if keep and any(ctx.needs_input_grad) else []
            out, weights = form.forward(layout.group(place), weights)
            layout.put(y, place, out)
        ctx.form, ctx.reference, ctx.given = form, reference, shell(given)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *kept)
        return (y, *layout.unpacked(weights))

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # a backward pass inside somebody's autocast is as exact as one outside
    def backward(ctx: Any, dy: Tensor | None, *dweights: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, count = (
            ctx.saved_tensors,
            len(ctx.needs_input_grad) - 4,
        )  # read once: a checkpoint computes them for this
        tensors, kept = saved[:count], saved[count:]
        if torch.is_grad_enabled():  # someone differentiates this backward pass again
            return (None, None, None, None, *by_reference(ctx, tensors, (dy, *dweights)))
        layout = Layout(ctx.given, tensors, ctx.form.group_size(ctx.given._replace(tokens=_tokens(ctx.given, tensors))))
        number = len(ctx.given.weights)
        gradients = layout.gradients()
        if dy is None:
            dy = torch.zeros_like(layout.tokens.views.q, dtype=layout.dtype)
        moving = layout.packed(
            [torch.zeros_like(w) if dw is None else dw for w, dw in zip(layout.weights, dweights, strict=True)]
        )
        for index, place in reversed(list(enumerate(layout.places()))):
            weights = kept[index * number : (index + 1) * number]
            group = layout.group(place)
            found, moving = ctx.form.backward(group, weights, layout.take(dy, place), moving)
            layout.add(gradients, place, found)
        found = layout.flat(gradients, layout.unpacked(moving))
        return (
            None,
            None,
            None,
            None,
            *(x if need else None for x, need in zip(found, ctx.needs_input_grad[4:], strict=True)),
        )


class Layout:
    """Between the caller's `[B, H, T, d]` and groups `[n, B·H, b, d]`."""

    def __init__(self, given: MiniBatches, tensors: Sequence[Tensor], group_size: int):
        self.given = given
        self.tokens = _tokens(given, tensors)
        present = len([x for x in self.tokens.tensors if x is not None])
        rest = list(tensors[present:])
        self.tau = rest.pop(0) if given.tau is not None else None
        self.scale, self.shift = rest.pop(0), rest.pop(0)
        self.weights = rest
        self.size, self.step = given.size, group_size * given.size
        self.batch, self.heads, self.length = self.tokens.views.k.shape[:3]
        self.dtype = self.tokens.gates.eta.dtype

    def places(self) -> list[slice]:
        return [slice(start, min(start + self.step, self.length)) for start in range(0, self.length, self.step)]

    def take(self, x: Tensor, place: slice) -> Tensor:
        """Tokens of `x` `[B, H, T, ...]` as `[n, B·H, b, ...]`, contiguous."""
        part = x[:, :, place].to(self.dtype).unflatten(2, (-1, self.size)).movedim(2, 0)
        return part.reshape(part.shape[0], self.batch * self.heads, *part.shape[3:])

    def put(self, x: Tensor, place: slice, part: Tensor) -> None:
        """The inverse of `take`."""
        part = part.unflatten(1, (self.batch, self.heads)).movedim(0, 2)
        x[:, :, place].unflatten(2, (-1, self.size)).copy_(part)

    def empty_like_tokens(self, x: Tensor) -> Tensor:
        """Memory in which the heads of a token lie side by side, as the layer goes on to use them."""
        return x.new_empty(self.batch, self.length, self.heads, x.shape[-1], dtype=self.dtype).transpose(1, 2)

    def coefficients(self, gates: Gates, tau: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """`mix` and `rows` of a group from gates `[n, B·H, b]` and τ `[B·H or 1, b]`."""
        eta = gates.eta.unsqueeze(-2)
        if gates.alpha is None and gates.kappa is None:
            one = eta.new_ones(self.size, 1) if tau is None else tau.unsqueeze(-1)
            return (one * eta).tril(), None
        written = eta if gates.kappa is None else eta * gates.kappa.unsqueeze(-2)
        if gates.alpha is None:
            return written.expand(*written.shape[:-2], self.size, -1).tril(), None
        decay = transition(gates.alpha)
        return decay * written, decay[..., 0] * gates.alpha[..., :1]

    def gates(self, place: slice) -> Gates:
        return Gates(*(None if x is None else self.take(x, place) for x in self.tokens.gates))  # type: ignore[arg-type]

    def for_every_learner(self, x: Tensor) -> Tensor:
        """Numbers of a head `[1 or H, ...]` for every learner: `[B·H, ...]`."""
        return x.to(self.dtype).expand(self.heads, *x.shape[1:]).repeat(self.batch, *(1,) * (x.ndim - 1))

    def group(self, place: slice) -> Group:
        mix, rows = self.coefficients(self.gates(place), None if self.tau is None else self.for_every_learner(self.tau))
        k, v, q = (self.take(x, place) for x in self.tokens.views[:3])
        return Group(
            k,
            v,
            q,
            mix,
            rows,
            self.for_every_learner(self.scale).unsqueeze(1),
            self.for_every_learner(self.shift).unsqueeze(1),
        )

    def packed(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """`[B, H, *shape]` to `[B·H, d_in, d_out]`, or `[B·H, 1, d]` for biases."""
        return [w.flatten(0, 1) if w.ndim == 4 else w.flatten(0, 1).unsqueeze(1) for w in weights]

    def unpacked(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return [w.reshape(like.shape) for w, like in zip(weights, self.weights, strict=True)]

    def start(self) -> list[Tensor]:
        return self.packed([w.contiguous() for w in self.weights])

    # -- gradients -----------------------------------------------------------------------------------------------------

    def gradients(self) -> tuple[Tokens, Tensor | None, Tensor, Tensor]:
        """Where the gradients of tokens, τ and the affine are collected."""
        tokens = self.tokens.map(torch.empty_like)
        tau = None if self.tau is None else torch.zeros_like(self.tau)
        return tokens, tau, torch.zeros_like(self.scale), torch.zeros_like(self.shift)

    def add(self, gradients: tuple[Tokens, Tensor | None, Tensor, Tensor], place: slice, found: Group) -> None:
        """The share of one group."""
        tokens, tau, scale, shift = gradients
        for x, part in zip(tokens.views[:3], found[:3], strict=True):
            self.put(x, place, part)
        for total, part in ((scale, found.scale), (shift, found.shift)):
            total += part.unflatten(0, (self.batch, self.heads)).sum((0, 2))
        with torch.enable_grad():  # through a few numbers per token: not through the scan
            gates = Gates(*(x if x is None else x.detach().requires_grad_() for x in self.gates(place)))  # type: ignore[arg-type]
            steps = None if self.tau is None else self.for_every_learner(self.tau.detach()).requires_grad_()
            made = [x for x in self.coefficients(gates, steps) if x is not None]
            inputs = {name: x for name, x in gates._asdict().items() if x is not None} | (
                {} if steps is None else {"tau": steps}
            )
            cotangents = [x for x in (found.mix, found.rows) if x is not None]
            shares = torch.autograd.grad(
                made, list(inputs.values()), cotangents, allow_unused=True, materialize_grads=True
            )
        for name, share in zip(inputs, shares, strict=True):
            if name != "tau":
                self.put(getattr(tokens.gates, name), place, share)
            elif tau is not None:
                share = share.unflatten(0, (self.batch, self.heads)).sum(0)
                tau += share if tau.shape[0] == self.heads else share.sum(0, keepdim=True)

    def flat(self, gradients: tuple[Tokens, Tensor | None, Tensor, Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
        """In the order of `flat`."""
        tokens, tau, scale, shift = gradients
        return [*(x for x in tokens.tensors if x is not None), *(() if tau is None else (tau,)), scale, shift, *weights]


def flat(given: MiniBatches) -> list[Tensor]:
    """The tensors of `given` in one row: an `autograd.Function` tracks its arguments only."""
    slow = (given.slow["norm_scale"], given.slow["norm_bias"])
    return [
        *[x for x in given.tokens.tensors if x is not None],
        *(() if given.tau is None else (given.tau,)),
        *slow,
        *given.weights.values(),
    ]


def shell(given: MiniBatches) -> MiniBatches:
    """`given` without its tensors, which are saved by the Function; what was there is still to be seen."""
    nothing = torch.empty(0)
    return given._replace(
        tokens=Tokens.from_tensors([None if x is None else nothing for x in given.tokens.tensors]),
        weights=dict.fromkeys(given.weights, nothing),
        slow={},
        tau=None if given.tau is None else nothing,
    )


def _tokens(given: MiniBatches, tensors: Sequence[Tensor]) -> Tokens:
    rest = iter(tensors)
    return Tokens.from_tensors([None if x is None else next(rest) for x in given.tokens.tensors])


def by_reference(ctx: Any, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The backward pass as a graph that can be differentiated, through the generic dual form."""
    needed = ctx.needs_input_grad[-len(tensors) :]
    aliases = [x.view_as(x) if need else x for x, need in zip(tensors, needed, strict=True)]
    layout = Layout(ctx.given, aliases, 1)
    slow = {"norm_scale": layout.scale, "norm_bias": layout.shift}
    weights = dict(zip(ctx.given.weights, layout.weights, strict=True))
    y, after = ctx.reference(ctx.given._replace(tokens=layout.tokens, tau=layout.tau, slow=slow, weights=weights))
    pairs = [
        (out, given)
        for out, given in zip((y, *after.values()), cotangents, strict=True)
        if given is not None and out.requires_grad
    ]
    wanted = [x for x, need in zip(aliases, needed, strict=True) if need]
    outputs, given = [out for out, _ in pairs], [cotangent for _, cotangent in pairs]
    found = iter(torch.autograd.grad(outputs, wanted, given, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needed]


# -- the inner loss ½‖x + LN(z) − v‖² ----------------------------------------------------------------------------------


class Normed(NamedTuple):
    """z and its statistics: `x̂ = (z − mean)·rstd`."""

    z: Tensor
    hat: Tensor
    mean: Tensor
    rstd: Tensor


def normalize(z: Tensor) -> Normed:
    hat, mean, rstd = torch.native_layer_norm(z, z.shape[-1:], None, None, EPS)
    return Normed(z, hat, mean, rstd)


def pull_norm(dhat: Tensor, normed: Normed) -> Tensor:
    """`(dx̂ − mean(dx̂) − x̂ mean(dx̂ ∘ x̂))·rstd`: cotangent of z from that of x̂. The matrix is symmetric: it is its
    own transpose."""
    shape = normed.z.shape[-1:]
    return torch.ops.aten.native_layer_norm_backward(
        dhat, normed.z, shape, normed.mean, normed.rstd, None, None, [True, False, False]
    )[0]


class InnerGradient(NamedTuple):
    """`G = ∂ℓ/∂z` of ℓ = ½‖k + γ x̂(z) + β − v‖², and what its transpose needs."""

    value: Tensor
    normed: Normed
    error: Tensor  # γ (γ x̂ + β + k − v), the cotangent of x̂


def inner_gradient(z: Tensor, offset: Tensor, squared_scale: Tensor) -> InnerGradient:
    """G for tokens `[N, b, d]`, from `offset = γ (β + k − v)` and γ²."""
    normed = normalize(z)
    error = torch.addcmul(offset, normed.hat, squared_scale)
    return InnerGradient(pull_norm(error, normed), normed, error)


def transposed(u: Tensor, gradient: InnerGradient, overlap: Tensor, squared_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents of `error` (as a function of `offset`) and of z, from that of G: the second-order terms.

    With P the projection of `pull_norm`, `G = r P e`, `e = γ² x̂ + offset`: `de = r P u`; x̂ enters through e and P, r
    through z:
    `dx̂ = γ² de − r (u mean(x̂ e) + e mean(x̂ u))`, `dz = r (P dx̂ − x̂ mean(u G))`. `overlap` is `mean(x̂ e)·r`,
    `[N, b, 1]`.
    """
    hat, rstd = gradient.normed.hat, gradient.normed.rstd
    width = u.shape[-1]
    de = pull_norm(u, gradient.normed)
    along = torch.linalg.vecdot(u, hat).unsqueeze(-1) * (rstd / width)
    dhat = (squared_scale * de).addcmul_(overlap, u, value=-1).addcmul_(along, gradient.error, value=-1)
    dz = pull_norm(dhat, gradient.normed)
    return de, dz.addcmul_(hat, torch.linalg.vecdot(u, gradient.value).unsqueeze(-1) * (rstd / width), value=-1)


def overlaps(steps: Sequence[InnerGradient]) -> Tensor:
    """`mean(x̂ e)·r` of every mini-batch, `[n, N, b, 1]`, for `transposed`."""
    pairs = [torch.linalg.vecdot(step.normed.hat, step.error).unsqueeze(-1) * step.normed.rstd for step in steps]
    return torch.stack(pairs) / steps[0].error.shape[-1]


def label_cotangents(group: Group, derror: Tensor, steps: Sequence[InnerGradient]) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of v (of k it is the opposite), γ and β through `error = γ² x̂ + γ (β + k − v)`, from those of
    `error`."""
    dv = -group.scale * derror
    hats = torch.stack([step.normed.hat for step in steps])
    dscale = (
        (derror * torch.addcmul(group.k - group.v + group.shift, hats, group.scale, value=2)).sum((0, 2)).unsqueeze(1)
    )
    return dv, dscale, -dv.sum((0, 2)).unsqueeze(1)


# -- batched over mini-batches and learners ----------------------------------------------------------------------------


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` over two leading axes."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def baddbmm(x: Tensor, a: Tensor, b: Tensor, alpha: float = 1) -> Tensor:
    """`x + alpha · a @ b` over two leading axes."""
    return torch.baddbmm(x.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1), alpha=alpha).unflatten(0, a.shape[:2])


def products(a: Tensor, b: Tensor, bias: bool) -> Tensor:
    """`a_t·b_s`, `[n, N, b, b]`: what the gradient of token s adds to what token t reads; plus 1 for a bias."""
    inner = bmm(a, b.mT)
    return inner.add_(1) if bias else inner
