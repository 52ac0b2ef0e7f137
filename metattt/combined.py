"""Two sequence layers as one: side by side on the same tokens, or one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.errors import MetaTTTError, check_choice, check_flag, check_integer
from metattt.inner.faults import FAILURES, explain
from metattt.inner.packing import Packing, check_flags, pack
from metattt.layer import TTTLayer
from metattt.mixers.base import Mixer
from metattt.modules import projection, rms_norm
from metattt.state import count_bytes, map_tensors, move_tensors

HOW = ("sum", "gate", "serial")
NORM_EPS = 1e-5  # of the RMSNorms


class CombinedState(NamedTuple):
    """The states of both layers; methods as those of `State`."""

    first: Any
    second: Any

    @property
    def pos(self) -> Tensor:
        """`[B]` tokens read since the start of the document."""
        pos: Tensor = self.first.pos
        return pos

    def map(self, function: Callable[[Tensor], Tensor]) -> CombinedState:
        """A state with `function` applied to every tensor."""
        return map_tensors(function, self)

    def to(self, *args: Any, **kwargs: Any) -> CombinedState:
        """The state on another device, or in another type: see `metattt.state.move_tensors`."""
        return move_tensors(self, *args, **kwargs)

    def detach(self) -> CombinedState:
        """Cuts the graph: later losses no longer reach what was read so far."""
        return self.map(Tensor.detach)

    def select(self, index: Tensor) -> CombinedState:
        """The states of the sequences `index` (to reorder beams or drop finished sequences)."""
        return self.map(lambda tensor: tensor.index_select(0, index))

    @property
    def nbytes(self) -> int:
        """Bytes of all distinct tensors."""
        return count_bytes(self)


torch.serialization.add_safe_globals([CombinedState])


class Combined(nn.Module):
    """Two layers in the place of one, called like each of them: `y, state = layer(x, state, mask=..., reset=...)`.

    | how | y |
    |---|---|
    | `sum` | first(x) + second(x) |
    | `gate` | RMSNorm(first(x)) ∘ σ(RMSNorm(second(x))), norms over D with a learned scale |
    | `serial` | second(first(x)) |

    `gate` is Titans' memory as gate, `serial` its memory as layer (arXiv 2501.00663, Sec. 4).

    Args:
        dim: model width D, that of both layers.
        first, second: a `TTTLayer`, a `Combined` or a `Mixer` each.
        how: see the table.
        shared: with `sum`, of two `TTTLayer`: q, k and v are projected once, by the task of the first layer, and the
            sum has one output projection, the first layer's (LaCT, arXiv 2505.23884, in its language models).
        head_norm: with `shared`, RMSNorm of what each head of the second layer answers, with one learned scale `[d]`.
        head_scale: with `shared`, multiply it by silu(θ x + c), a number per head and token.
        group_size: of both layers; None leaves theirs.

    Raises:
        MetaTTTError: layers of other widths or kinds, or switches that do not go together.
    """

    def __init__(
        self,
        dim: int,
        first: nn.Module,
        second: nn.Module,
        how: Literal["sum", "gate", "serial"] = "sum",
        shared: bool = False,
        head_norm: bool = False,
        head_scale: bool = False,
        group_size: int | None = None,
    ):
        super().__init__()
        check_integer("dim", dim)
        check_choice("layer.how", how, HOW)
        for name, flag in (("shared", shared), ("head_norm", head_norm), ("head_scale", head_scale)):
            check_flag(f"layer.{name}", flag)
        for name, layer in (("first", first), ("second", second)):
            if not isinstance(layer, TTTLayer | Combined | Mixer):
                raise MetaTTTError(
                    f"layer.{name} is a {type(layer).__name__}: it must be a TTTLayer, a Combined or a Mixer"
                )
            if layer.dim != dim:
                raise MetaTTTError(
                    f"layer.{name} has dim={layer.dim}, and both layers together dim={dim}: give the same"
                )
        if first is second:
            raise MetaTTTError("layer.first and layer.second are one layer: make two")
        if shared and (how != "sum" or not isinstance(first, TTTLayer) or not isinstance(second, TTTLayer)):
            raise MetaTTTError(f"layer.shared=true adds two TTTLayers, with layer.how=sum, not {how}: set one of them")
        if not shared and (head_norm or head_scale):
            raise MetaTTTError(
                "layer.head_norm and layer.head_scale are of heads before the output projection, so they go with "
                "layer.shared=true"
            )
        self.how = how
        self.dim: int = dim
        self.first, self.second = first, second
        self.group_size = group_size
        self.out: nn.Module | None = None
        self.head_norm: nn.RMSNorm | None = None
        self.head_scale: nn.Linear | None = None
        self.norms = nn.ModuleList(nn.RMSNorm(dim, eps=NORM_EPS) for _ in range(2)) if how == "gate" else None
        if shared:
            self._share(head_norm, head_scale)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "group_size" and value is not None:
            advice = " (0 stores everything, null leaves those of the layers)"
            check_integer("layer.group_size", value, 0, advice=advice)
            self.first.group_size = self.second.group_size = value
        super().__setattr__(name, value)

    def _share(self, head_norm: bool, head_scale: bool) -> None:
        first: Any = self.first
        second: Any = self.second
        second.task.borrow(first.task)
        self.out, first.out, second.out = first.out, nn.Identity(), nn.Identity()
        heads = second.num_heads
        self.head_norm = nn.RMSNorm(self.dim // heads, eps=NORM_EPS) if head_norm else None
        self.head_scale = projection(self.dim, heads, True) if head_scale else None

    @property
    def causal(self) -> bool:
        """Whether no output depends on a later token, as the parts of both layers declare it."""
        return bool(self.first.causal and self.second.causal)

    def forward(
        self,
        x: Tensor,
        state: CombinedState | None = None,
        *,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        packing: Packing | None = None,
        in_place: bool = False,
    ) -> tuple[Tensor, CombinedState]:
        """As `TTTLayer.forward`.

        Args:
            x: `[B, T, D]`.
            state: what the previous call returned; None at the start.
            mask, reset, packing, in_place: as there.

        Returns:
            Outputs `[B, T, D]` and the new state.

        Raises:
            MetaTTTError: as there, and a state that is none of this layer.
        """
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != self.dim or x.shape[1] == 0:
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise MetaTTTError(f"x has shape {shape}, expected [B, T, {self.dim}] with at least one token")
        if state is not None and not isinstance(state, CombinedState):
            raise MetaTTTError(
                f"the state is from another layer: it is a {type(state).__name__}, expected a CombinedState, or None"
            )
        placed = packing is not None
        if packing is not None:
            x = packing.clear(x)
        elif mask is not None or reset is not None:
            check_flags(x, mask, reset)
            packing = pack(mask, reset, x.device)
            x = x if packing is None else packing.sort(x)
        before = CombinedState(None, None) if state is None else state
        options: dict[str, Any] = {"packing": packing, "in_place": in_place}
        try:
            y, after = self._combined(x, before, options)
        except FAILURES as error:
            explain(error, x, self.parameters(), state, {})
            raise
        if packing is not None:
            y = packing.blank(y) if placed else packing.restore(packing.blank(y))
        return y, after

    def _combined(self, x: Tensor, state: CombinedState, options: dict[str, Any]) -> tuple[Tensor, CombinedState]:
        if self.how == "serial":
            y, first = self.first(x, state.first, **options)
            y, second = self.second(y, state.second, **options)
            return y, CombinedState(first, second)
        if self.out is not None:
            task: Any = self.first.task
            options = {**options, "projected": task.project(x)}
        one, first = self.first(x, state.first, **options)
        two, second = self.second(x, state.second, **options)
        if self.norms is not None:
            y = rms_norm(self.norms[0], one) * torch.sigmoid(rms_norm(self.norms[1], two))  # type: ignore[arg-type]
        elif self.out is None:
            y = one + two
        else:
            y = self.out(one + self._by_head(x, two))
        return y, CombinedState(first, second)

    def _by_head(self, x: Tensor, y: Tensor) -> Tensor:
        """The answers of the second layer's heads, `[B, T, D]`, normed and scaled."""
        if self.head_norm is None and self.head_scale is None:
            return y
        heads = y.unflatten(-1, (self.second.num_heads, -1))
        if self.head_norm is not None:
            heads = rms_norm(self.head_norm, heads)
        if self.head_scale is not None:
            heads = heads * F.silu(self.head_scale(x)).unsqueeze(-1)
        return heads.flatten(-2)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, how={self.how!r}"
