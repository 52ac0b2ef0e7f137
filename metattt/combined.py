"""Two sequence layers as one: side by side on the same tokens, or one after the other."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.inner.packing import Packing
from metattt.layer import TTTLayer
from metattt.modules import RMSNorm, projection, rms_norm
from metattt.sequence_layer import SequenceLayer, check_finite
from metattt.setting import setting
from metattt.state import State, in_files

NORM_EPS = 1e-5  # of the RMSNorms


@in_files
class CombinedState(NamedTuple):
    """The states of both layers; methods as those of `State`."""

    first: Any
    second: Any

    @property
    def pos(self) -> Tensor:
        """`[B]` tokens read since the start of the document."""
        pos: Tensor = self.first.pos
        return pos

    map, to, detach = State.map, State.to, State.detach  # type: ignore[misc]
    select, nbytes = State.select, State.nbytes  # type: ignore[misc]
    save, load = State.save, classmethod(State.load.__func__)  # type: ignore[misc]


class Combined(SequenceLayer):
    """Two layers in the place of one, called like each of them: `y, state = layer(x, state, mask=..., reset=...)`.

    | how | y |
    |---|---|
    | `sum` | first(x) + second(x) |
    | `gate` | RMSNorm(first(x)) ∘ σ(RMSNorm(second(x))), norms over D with a learned scale |
    | `serial` | second(first(x)) |

    `gate` is Titans' memory as gate, `serial` its memory as layer (arXiv 2501.00663, Sec. 4).

    Args:
        dim: model width D, that of both layers.
        first: a `TTTLayer`, a `Combined` or a `Mixer` (any `SequenceLayer`).
        second: as `first`.
        how: see the table.
        shared: with `sum`, of two `TTTLayer`: q, k and v are projected once, by the task of the first layer, and the
            sum has one output projection, the first layer's (LaCT, arXiv 2505.23884, in its language models).
        head_norm: with `shared`, RMSNorm of the predictions of each head of the second layer, with one learned scale
            `[d]`.
        head_scale: with `shared`, multiply it by silu(θ x + c), a number per head and token.
        group_size: of both layers; None keeps theirs.

    Raises:
        MetaTTTError: layers of other kinds or widths, or settings that exclude each other.
    """

    refuse_nan = False  #: both layers check their inputs
    first: nn.Module = setting()
    second: nn.Module = setting()
    how: Literal["sum", "gate", "serial"] = setting(default="sum", fixed=True)
    shared: bool = setting(default=False, fixed=True)
    with_head_norm: bool = setting(default=False, alias="head_norm", fixed=True)
    with_head_scale: bool = setting(default=False, alias="head_scale", fixed=True)
    group_size: int | None = setting(
        default=None, least=0, advice=" (0 stores everything, null leaves those of the layers)"
    )

    def check_settings(self) -> None:
        super().check_settings()
        self.check_held("first")
        self.check_held("second")
        if self.first is self.second:
            raise MetaTTTError("layer.first and layer.second are one layer: make two")
        both = isinstance(self.first, TTTLayer) and isinstance(self.second, TTTLayer)
        if self.shared and (self.how != "sum" or not both):
            raise MetaTTTError(
                f"layer.shared=true adds two TTTLayers, with layer.how=sum, not {self.how}: set one of them"
            )
        if not self.shared and (self.with_head_norm or self.with_head_scale):
            raise MetaTTTError(
                "layer.head_norm and layer.head_scale are of heads before the output projection, so they go with "
                "layer.shared=true"
            )

    def create_modules(self) -> None:
        first: Any = self.first
        second: Any = self.second
        dim = self.dim
        self.out: nn.Module | None = None
        self.head_norm: RMSNorm | None = None
        self.head_scale: nn.Linear | None = None
        self.norms = nn.ModuleList(RMSNorm(dim, eps=NORM_EPS) for _ in range(2)) if self.how == "gate" else None
        if self.shared:
            second.task.borrow(first.task)
            self.out, first.out, second.out = first.out, nn.Identity(), nn.Identity()
            self.head_norm = RMSNorm(second.head_dim, eps=NORM_EPS) if self.with_head_norm else None
            self.head_scale = projection(dim, second.num_heads, True) if self.with_head_scale else None

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "norms"):  # it is built
            self.refuse_late(name, value)
        super().__setattr__(name, value)
        if name == "group_size" and value is not None:
            self.first.group_size = self.second.group_size = value

    @property
    def causal(self) -> bool:  # type: ignore[override]
        """Whether no output depends on a later token, as the parts of both layers declare it."""
        return bool(self.first.causal and self.second.causal)

    def start(self, x: Tensor, packing: Packing | None = None) -> CombinedState:
        return CombinedState(None, None)

    def check_state(self, x: Tensor, state: Any) -> None:
        """Checks the type of the state; both layers check theirs."""
        if not isinstance(state, CombinedState):
            kind = type(state).__name__
            raise MetaTTTError(f"the state is from another layer: it is a {kind}, expected a CombinedState, or None")

    def run(
        self, x: Tensor, state: CombinedState, packing: Packing | None = None, donate_state: bool = False
    ) -> tuple[Tensor, CombinedState]:
        """See the table, and `SequenceLayer.run`."""
        if self.out is not None:
            return self._shared(x, state, packing, donate_state)
        one, first = self.first(x, state.first, packing=packing, donate_state=donate_state)
        given = one if self.how == "serial" else x
        two, second = self.second(given, state.second, packing=packing, donate_state=donate_state)
        return self._together(one, two), CombinedState(first, second)

    def answer(self, x: Tensor, state: CombinedState, packing: Packing | None = None) -> Tensor:
        """See `SequenceLayer.answer`; both layers are read."""
        layers: tuple[Any, Any] = (self.first, self.second)
        before = []
        for layer, one in zip(layers, state, strict=True):
            if one is not None:
                layer.check_state(x, one)
            before.append(layer.start(x, packing) if one is None else one)
        if self.out is None:
            one = layers[0].answer(x, before[0], packing)
            return self._together(one, layers[1].answer(one if self.how == "serial" else x, before[1], packing))
        found, projected = [], layers[0].task.project(x)
        for layer, own in zip(layers, before, strict=True):
            ctx = layer.call(x, own, packing).ctx
            views, gates, *_ = layer.tokens(x, own, ctx, projected)
            found.append(layer.output(x, layer.predictions(views, gates, own, ctx)))
        return self.out(found[0] + self._by_head(x, found[1]))

    def _together(self, one: Tensor, two: Tensor) -> Tensor:
        """The output from those of both layers."""
        if self.how == "serial":
            return two
        if self.norms is not None:
            return rms_norm(self.norms[0], one) * torch.sigmoid(rms_norm(self.norms[1], two))  # type: ignore[arg-type]
        return one + two

    def _shared(
        self, x: Tensor, state: CombinedState, packing: Packing | None, donate_state: bool
    ) -> tuple[Tensor, CombinedState]:
        """The sum of both layers, whose views are made of the first one's projections."""
        assert self.out is not None
        if self.first.refuse_nan:
            check_finite(x)
        layers, found = cast(tuple[TTTLayer, TTTLayer], (self.first, self.second)), []
        projected = layers[0].task.project(x)
        for layer, before in zip(layers, state, strict=True):
            if before is None:
                before = layer.start(x, packing)
            else:
                layer.check_state(x, before)
            call = layer.call(x, before, packing, donate_state)
            views, gates, after = layer.tokens(x, before, call.ctx, projected)
            y, after = layer.inner_loop(views, gates, after, call)
            found.append((layer.output(x, y), after))
        (one, first), (two, second) = found
        return self.out(one + self._by_head(x, two)), CombinedState(first, second)

    def _by_head(self, x: Tensor, y: Tensor) -> Tensor:
        """The predictions of the second layer's heads, `[B, T, D]`, normalised and scaled."""
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
