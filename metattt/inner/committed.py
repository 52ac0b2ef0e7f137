"""What gates may depend on inside the inner loop: the weights of the last commit, and their predictions and losses."""

from __future__ import annotations

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.forms import dual, primal
from metattt.inner.gradients import vjp
from metattt.inner.parts import Parts
from metattt.inner.tokens import Tokens
from metattt.modules import expand_like
from metattt.optimizers.base import Gates
from metattt.state import Tensors

EPS = 1e-6  # a norm is √(‖·‖² + ε²): it has a derivative at 0


class Committed:
    """Implements `metattt.optimizers.committed.Committed`; every value is computed when it is first used."""

    def __init__(self, loop: Parts, weights: Tensors, tokens: Tokens):
        self.weights, self.k, self.v, self.q = weights, tokens.views.k, tokens.views.v, tokens.views.q
        self._loop, self._tokens = loop, tokens

    def predict(self, x: Tensor) -> Tensor:
        """f(x; W_a), `[B, H, n, d]`."""
        return self._loop.predict(self.weights, x)

    def losses(self) -> Tensor:
        """ℓ(f(k_t; W_a), v_t), `[B, H, n]`."""
        return self._loop.task.loss(self.predict(self.k), self.v)

    def gradient_norms(self) -> Tensor:
        """‖∇ℓ_t(W_a)‖ over all fast weights, `[B, H, n]`."""
        loop = self._loop
        if loop.plan.form == "dual":
            uses, deltas = dual.record(loop, self.weights, self._tokens)
            gram = dual.PerTokenGradients(uses, deltas[0], loop.matmul_dtype, {}).gram()
            squared = gram.diagonal(dim1=-2, dim2=-1)
        elif loop.learner.mixes_tokens:
            squared = self._one_by_one()
        else:
            found = primal.gradients(loop, self._tokens, self.weights)
            squared = torch.stack([g.flatten(3).square().sum(-1) for g in found.values()]).sum(0).transpose(1, 2)
        # A sum of products that cancel, as where a convolution's gradient is almost 0, may be less than 0 by rounding.
        return (squared.clamp(min=0) + EPS**2).sqrt()

    def _one_by_one(self) -> Tensor:
        """‖∇ℓ_t‖² by a backward pass per token, for learners that mix tokens."""
        loop, like = self._loop, self._tokens.gates.eta
        losses = loop.losses_by(self.weights, self.k, self.v)
        each = torch.eye(like.shape[2], dtype=like.dtype, device=like.device).unbind(0)
        constant = loop.plan.outer == "first_order"
        found = vjp(losses, list(self.weights.values()), [row.expand_as(like) for row in each], constant)
        norms = [torch.stack([g.flatten(2).square().sum(-1) for g in one]).sum(0) for one in found]
        return torch.stack(norms, dim=-1)


def gated(loop: Parts, tokens: Tokens, commit: Tensors) -> Tokens:
    """The tokens with the gates that the rule computes from the last commit.

    Raises:
        MetaTTTError: `gates` and `gates_at` of the rule do not return the same gates.
    """
    given = tokens.gates
    found = loop.rule.gates_at(given, Committed(loop, commit, tokens))
    is_filled, changed = given.eta != 0, {}
    for name, before, after in zip(Gates._fields, given, found, strict=True):
        if (before is None) != (after is None):
            raise MetaTTTError(
                f"{type(loop.rule).__name__}.gates_at must return the gates that it was given, and {name} was "
                f"{'not' if before is None else 'one'} of them: give the same gates in `gates`"
            )
        if after is not None and after is not before:
            assert before is not None
            changed[name] = torch.where(expand_like(is_filled, after), after.to(before), before)
    return tokens.with_gates(**changed)
