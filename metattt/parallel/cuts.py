"""Whether the layers of a model go on from a state as if they had read everything: found out on a few tokens."""

from __future__ import annotations

import torch
from torch import nn

from metattt.errors import MetaTTTError
from metattt.inner.causality import run_apart, same
from metattt.models.end_to_end import ALONE, EndToEndBlock

TOKENS, CUT = 12, 7


def check_divisible(block: nn.Module) -> None:
    """Refuses a block that processes cannot divide among them."""
    if isinstance(block, EndToEndBlock):
        raise MetaTTTError(f"{ALONE}, which are not divided among processes: set trainer=default or trainer=ddp")


def check_cut(layer: nn.Module, dim: int, needs: str = "trainer.time_ranks=1") -> None:
    """Refuses a layer whose sequences cannot be read in parts, by several processes or one after the other.

    A layer that cannot be run here (another device's kernels, parameters without values) is left to its first step.

    Args:
        layer: called as `y, state = layer(x, state, mask=..., reset=...)`.
        dim: D, width of its tokens.
        needs: the override that does not divide them.
    """
    parameters = list(layer.parameters())
    if any(parameter.is_meta for parameter in parameters):
        return
    like = next((one for one in parameters if one.is_floating_point()), torch.empty(0))
    x = torch.randn(2, TOKENS, dim, generator=torch.Generator().manual_seed(0)).to(like)
    try:
        whole, _ = run_apart(layer, x)
        before, state = run_apart(layer, x[:, :CUT])
        after, _ = run_apart(layer, x[:, CUT:], state)
    except Exception:  # whatever a layer of others raises: it will be raised again where the layer is used
        return
    if not same(whole, torch.cat([before, after], dim=1)):
        raise MetaTTTError(
            f"{type(layer).__name__} needs all tokens of a sequence in one call: with the state of an earlier call its "
            f"outputs differ, so it needs {needs}"
        )
