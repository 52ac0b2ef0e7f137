"""A rule of one's own that erases along another key than it writes, in one file, and every law checked on it.

    python examples/erase_view.py          a layer of it, and what it does to a sequence
    pytest examples/erase_view.py          its conformance test

The delta rule takes away what the weights answer to the key that it is about to write, `W − η kᵀ(k W − v)`. This one takes
away what they answer to `p_t`, a learned mixture of the keys of this token and of the last one, `W − η kᵀ(p W − v)`. A task
gives such an *erase view* `p` beside k, v and q; the solved form, the loop over tokens, decay gates, cuts, padding and
packed documents then hold without another line.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metattt import TTTLayer
from metattt.learners import Linear
from metattt.modules import CausalConv
from metattt.optimizers import ChannelDecay, GradientDescent
from metattt.registry import register
from metattt.state import Context, Tensors
from metattt.tasks import Reconstruction, Views
from metattt.testing import Conformance
from metattt.testing.specimen import Specimen


@register(group="task", name="erase_the_last")
class EraseTheLast(Reconstruction):
    """Reconstruction that asks the weights along `p_t = c_0 ∘ k_t + c_1 ∘ k_{t−1}`, with factors c learned for every channel."""

    def __init__(self) -> None:
        super().__init__(normalize_qk=True)

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.mixture = CausalConv(dim, 2)  # it carries the last key, and forgets it where a document starts
        nn.init.constant_(self.mixture.weight, 0.5)

    def views(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Views, Tensors]:
        views, _ = super().views(x, {}, ctx)
        keys = views.k.transpose(1, 2).flatten(2)
        mixed, last = self.mixture(keys, state.get("last"), ctx)
        return views._replace(erase_key=self._heads(mixed)), {"last": last}


class TestEraseTheLast(Conformance):
    """The laws, with a step token by token, and with a decay of every channel."""

    def specimens(self) -> dict[str, Specimen]:
        def linear() -> Linear:
            return Linear(bias=False, residual=False, norm=False)

        return {
            "online": self.specimen(linear, EraseTheLast, lambda: GradientDescent(1, "online", lr_scale="none")),
            "decaying": self.specimen(linear, EraseTheLast, ChannelDecay),
        }


def main() -> float:
    """The length of the weights after the same tokens, against that of the plain delta rule."""
    lengths = {}
    x = torch.randn(1, 256, 32, generator=torch.Generator().manual_seed(0))
    for task in (EraseTheLast(), Reconstruction(normalize_qk=True)):
        torch.manual_seed(0)
        learner = Linear(bias=False, residual=False, norm=False, learn_init=False)
        layer = TTTLayer(32, 2, task, learner, GradientDescent(1, "online", lr_scale="none"))
        _, state = layer(x)
        lengths[type(task).__name__] = state.weights["weights"]["w1"].norm().item()
        print(
            f"{type(task).__name__}: form {layer.form} ({layer.plan.form}), ‖W‖ = {lengths[type(task).__name__]:.3f}"
        )
    return lengths["EraseTheLast"] / lengths["Reconstruction"]


if __name__ == "__main__":
    main()
