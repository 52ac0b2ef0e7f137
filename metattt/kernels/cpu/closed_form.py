"""Closed forms on the CPU: forward and backward of whole mini-batches in groups, written with batched products and no
inner autograd.

What depends on the weights is a serial walk of few small products per mini-batch; everything else (Qᵀ K, masks, reads,
most of the backward pass) is batched over a group. Only the weights at the start of each group are kept: the backward
pass runs a group again. The second-order terms are derived by hand, from the transpose of the gradient of the inner
loss (`inner_gradient`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metattt.inner.tokens import MiniBatches
from metattt.kernels.operator import Operation, Pass, Results, empty_gradients
from metattt.modules import exact
from metattt.ops.chunk import decay_matrix, decays

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


class ClosedForm(Operation):
    """Walks over the groups. A subclass computes one group, for weights in the order of the learner's `init`."""

    device = "cpu"
    traceable = True
    largest_group = 64

    @abstractmethod
    def forward_group(self, group: Group, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Predictions `[n, N, b, d]` and the weights after the group; weights are `[N, d_in, d_out]`, biases
        `[N, 1, d_out]`."""

    @abstractmethod
    def backward_group(
        self, group: Group, weights: Sequence[Tensor], dy: Tensor, dweights: Sequence[Tensor]
    ) -> tuple[Group, list[Tensor]]:
        """Cotangents of the group's tensors and of the weights before it, from those of the predictions and the weights
        after it."""

    def reason_rejected(self, given: MiniBatches) -> str | None:
        gates, dtype = given.tokens.gates, given.tokens.gates.eta.dtype
        if gates.beta is not None or gates.weight_lr is not None:
            return "a momentum gate, or a step size for every weight"
        if given.tau is not None and (gates.alpha is not None or gates.kappa is not None):
            return "token steps beside a gate"
        if given.matmul_dtype != dtype or dtype not in (torch.float32, torch.float64):
            return f"operands of {str(given.matmul_dtype).removeprefix('torch.')} on the CPU"
        return None

    def forward(self, call: Pass) -> Results:
        layout, (y, _, kept) = Layout(call), self.results(call)
        weights = layout.packed(layout.weights)
        for index, place in enumerate(layout.places()):
            for states in kept:
                torch.cat([w.flatten(1) for w in weights], 1, out=states[:, index, : layout.numbers])
            out, weights = self.forward_group(layout.group(place), weights)
            layout.put(y, place, out)
        return y, layout.unpacked(weights), kept

    def backward(
        self, call: Pass, kept: Sequence[Tensor], dy: Tensor | None, dweights: Sequence[Tensor | None]
    ) -> list[Tensor]:
        with exact("cpu"):  # a backward pass inside somebody's autocast is as exact as one outside
            layout = Layout(call)
            tokens, (scale, shift) = empty_gradients(layout.tokens), map(torch.zeros_like, layout.affine)
            tau = None if layout.tau is None else layout.tau.new_zeros(layout.tau.shape)
            if dy is None:
                dy = torch.zeros_like(layout.tokens.views.q, dtype=layout.dtype)
            moving = layout.packed(
                [torch.zeros_like(w) if dw is None else dw for w, dw in zip(layout.weights, dweights, strict=False)]
            )
            for index, place in reversed(list(enumerate(layout.places()))):
                weights = layout.split(kept[-1][:, index])
                found, moving = self.backward_group(layout.group(place), weights, layout.take(dy, place), moving)
                for x, part in zip(tokens.views[:3], found[:3], strict=True):
                    layout.put(x, place, part)
                for total, part in ((scale, found.scale), (shift, found.shift)):
                    total += part.unflatten(0, (layout.batch, layout.heads)).sum((0, 2))
                for name, part in layout.pull_coefficients(place, found.mix, found.rows).items():
                    if name != "tau":
                        layout.put(getattr(tokens.gates, name), place, part)
                    elif tau is not None:
                        part = part.unflatten(0, (layout.batch, layout.heads)).sum(0)
                        tau += part if tau.shape[0] == layout.heads else part.sum(0, keepdim=True)
            rest = [*(() if tau is None else (tau,)), scale, shift, *layout.unpacked(moving)]
            return [*(x for x in tokens.tensors if x is not None), *rest]


class Layout:
    """Between the caller's `[B, H, T, d]` and groups `[n, B·H, b, d]`."""

    def __init__(self, call: Pass):
        given, group = call.given, call.group
        self.tokens, self.weights, self.size = given.tokens, list(given.weights.values()), given.size
        self.affine = given.slow["norm_scale"], given.slow["norm_bias"]
        self.step = group * given.size
        self.batch, self.heads, self.length = self.tokens.views.k.shape[:3]
        self.dtype = self.tokens.gates.eta.dtype
        self.tau = given.tau
        self.numbers = sum([w[0, 0].numel() for w in self.weights])  # of a learner

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

    def for_every_learner(self, x: Tensor) -> Tensor:
        """Numbers of a head `[1 or H, ...]` for every learner: `[B·H, ...]`."""
        return x.to(self.dtype).expand(self.heads, *x.shape[1:]).repeat(self.batch, *(1,) * (x.ndim - 1))

    def group(self, place: slice) -> Group:
        k, v, q = (self.take(x, place) for x in self.tokens.views[:3])
        scale, shift = (self.for_every_learner(x).unsqueeze(1) for x in self.affine)
        return Group(k, v, q, *self.coefficients(place), scale, shift)

    def packed(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """`[B, H, *shape]` to `[B·H, d_in, d_out]`, or `[B·H, 1, d]` for biases."""
        return [w.flatten(0, 1) if w.ndim == 4 else w.flatten(0, 1).unsqueeze(1) for w in weights]

    def unpacked(self, weights: Sequence[Tensor]) -> list[Tensor]:
        return [w.reshape(like.shape) for w, like in zip(weights, self.weights, strict=True)]

    def split(self, kept: Tensor) -> list[Tensor]:
        """The weights, as `packed` gives them, from all numbers of each learner, `[B·H, state]`."""
        shapes = [w.shape[1:] for w in self.packed(self.weights)]
        parts = kept[:, : self.numbers].split([shape.numel() for shape in shapes], 1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]

    # -- coefficients --------------------------------------------------------------------------------------------------

    def gates(self, place: slice) -> tuple[Tensor | None, ...]:
        """η, α, κ `[n, B·H, b]` of a group and τ `[B·H, b]`."""
        given, tau = self.tokens.gates, None if self.tau is None else self.for_every_learner(self.tau)
        taken = (None if x is None else self.take(x, place) for x in (given.eta, given.alpha, given.kappa))
        return (*taken, tau)

    def coefficients(self, place: slice) -> tuple[Tensor, Tensor | None]:
        """`mix` and `rows` of a group."""
        eta, alpha, kappa, tau = self.gates(place)
        written = (eta if kappa is None else eta * kappa).unsqueeze(-2)  # type: ignore[operator, union-attr]
        if alpha is None:
            one = written.new_ones(self.size, 1) if tau is None else tau.unsqueeze(-1)
            return (one * written).tril(), None
        decay, rows = decays(alpha)
        return decay * written, rows

    def pull_coefficients(self, place: slice, dmix: Tensor, drows: Tensor | None) -> dict[str, Tensor]:
        """Cotangents of the gates and of τ, by name, from those of `mix` and `rows`: the transpose of
        `coefficients`."""
        eta, alpha, kappa, tau = self.gates(place)
        assert eta is not None
        written, found = eta if kappa is None else eta * kappa, {}
        if alpha is not None:
            # the inverse of 1 − S, where S holds α below the diagonal: dS = decayᵀ d decayᵀ
            decay = decay_matrix(alpha)
            ddecay = dmix * written.unsqueeze(-2)
            found["alpha"] = torch.zeros_like(alpha)
            if drows is not None:
                ddecay[..., 0] += drows * alpha[..., :1]
                found["alpha"][..., 0] = torch.linalg.vecdot(drows, decay[..., 0])
            found["alpha"][..., 1:] = (decay.mT @ ddecay @ decay.mT).diagonal(-1, -2, -1)
            dmix = dmix * decay
        elif tau is not None:
            dmix = dmix.tril()
            found["tau"] = (dmix @ written.unsqueeze(-1)).squeeze(-1).sum(0)
            dmix = dmix * tau.unsqueeze(-1)
        else:
            dmix = dmix.tril()
        dwritten = dmix.sum(-2)
        found["eta"] = dwritten if kappa is None else dwritten * kappa
        return found if kappa is None else found | {"kappa": dwritten * eta}


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

    With P the projection of `pull_norm`, `G = r P e` and `e = γ² x̂ + offset`: `de = r P u`. x̂ enters through e and P,
    r through z: `dx̂ = γ² de − r (u mean(x̂ e) + e mean(x̂ u))`, `dz = r (P dx̂ − x̂ mean(u G))`. `overlap` is
    `mean(x̂ e)·r`, `[N, b, 1]`.
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
    slope = torch.addcmul(group.k - group.v + group.shift, hats, group.scale, value=2)
    return dv, (derror * slope).sum((0, 2)).unsqueeze(1), -dv.sum((0, 2)).unsqueeze(1)


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
