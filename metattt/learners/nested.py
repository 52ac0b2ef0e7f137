"""A TTT layer as the hidden state of another layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from metattt.component import unchanged_on_error
from metattt.errors import MetaTTTError
from metattt.learners.base import Learner
from metattt.learners.module.adapter import ModuleLearner
from metattt.registry import register
from metattt.setting import setting
from metattt.torch_private import saved_tensor_hooks


class Outputs(nn.Module):
    """A sequence layer on one sequence without a state: `[n, d]` to `[n, d]`."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.unsqueeze(0))[0].squeeze(0)
        return y


@register(group="learner", name="nested_ttt")
class NestedTTT(ModuleLearner):
    """`f` is itself a TTT layer, which reads the tokens of one mini-batch from its own W0.

    The inner layer's parameters (its W0, views, learning rates and projections) are the fast weights that the outer
    loop's mini-batches train; the learner of the inner layer may be nested again. `f` mixes the tokens of a mini-batch,
    so the outer rule reads earlier commits (`optimizer.read=previous`); the inner rule has mini-batches of its own
    inside. With `layer.group_size=0` all sequences and heads run at once, otherwise one after the other, in less
    memory.

    Args:
        layer: makes the inner layer when called with `dim=` (the head width) and `group_size=`: a `functools.partial`
            of `TTTLayer`.
        learn_init: train W0.

    Raises:
        MetaTTTError: when the layer is built, for an inner layer that is not causal, or does not fit the width.
    """

    residual = True
    norm = True
    layer: Callable[..., nn.Module] = setting()
    module: nn.Module = setting(init=False)
    mixes_tokens: bool = setting(default=True, init=False)

    def configure(self) -> None:
        super().configure()
        self.module = nn.Identity()

    def check_settings(self) -> None:
        super().check_settings()
        if not callable(self.layer):
            raise MetaTTTError(
                f"learner.layer={self.layer!r} makes no layer: give a function of dim= and group_size=, such as "
                "partial(TTTLayer, ...)"
            )

    def setup(self, num_heads: int, d_in: int, d_out: int) -> Learner:
        with unchanged_on_error(self):
            # No recomputation inside: it does not work with torch.vmap, and the outer layer recomputes already.
            self.module = Outputs(self.layer(dim=d_in, group_size=0))
            return super().setup(num_heads, d_in, d_out)

    def equations(self) -> list[str]:
        from metattt.catalog.equations import equations, text  # of layers, which hold learners

        module, weights = self._own(), {name: weight[0].view(self._shapes[name]) for name, weight in self.init.items()}
        with self._holding(module, weights, next(iter(weights.values())).dtype):
            said = [one for one in equations(module.get_submodule("layer")) if one.title != "computed"]
        inner = (f"  {line}" for line in text(said).splitlines())
        return [f"f(x; W) = {self.wrapped('layer(x)')}, W the parameters of this layer:", *inner]

    def can_vmap(self) -> bool:
        # Under torch.vmap the inner layer takes its gradients with torch.func, which saved-tensor hooks (recomputation)
        # rule out.
        return self.batched and (torch.compiler.is_compiling() or saved_tensor_hooks(False) is None)
