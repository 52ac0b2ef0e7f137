"""A language model whose sequence layers are interchangeable: the backbone of the TTT papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError, check_choice
from metattt.inner.diagnostics import FAILURES, require_ids
from metattt.inner.packing import Packing, check_flags, pack
from metattt.models.block import INIT_STD, Backbone, pattern_of, take
from metattt.models.linear_cross_entropy import linear_cross_entropy
from metattt.modules import RMSNorm
from metattt.nested import map_tensors
from metattt.registry import register
from metattt.setting import setting
from metattt.state import WHOLE_CALL, Context, State, in_files


@in_files
class LanguageModelState(NamedTuple):
    """What the model carries between calls for `B` sequences; methods as those of `State`.

    Attributes:
        layers: state of every block's sequence layer; after them what else a model carries (`EndToEnd`: its inner
            loop).
        tails: last inputs of every block's convolution `[B, conv_width − 1, D]`; None without a convolution.
    """

    layers: tuple[Any, ...]
    tails: tuple[Tensor | None, ...]

    def map(self, function: Callable[[Tensor], Tensor]) -> LanguageModelState:
        """A state with `function` applied to every tensor."""
        return map_tensors(function, self)

    def select(self, index: Tensor | Sequence[int]) -> LanguageModelState:
        """The states of the sequences `index`, as `State.select`."""
        return State.select(self, index)  # type: ignore[arg-type, return-value]

    to, detach, nbytes = State.to, State.detach, State.nbytes  # type: ignore[misc]
    save, load = State.save, classmethod(State.load.__func__)  # type: ignore[misc]


@register(group="model", name="language_model", version=2)
class LanguageModel(Backbone):
    """Embedding, `num_layers` pre-norm blocks, final RMSNorm, head (arXiv 2407.04620, App. C).

    Args:
        vocab_size: V, number of token ids.
        dim: D, width of the residual stream.
        num_layers: number of blocks.
        layer: makes the sequence layer of one block; called `num_layers` times. The layer is called as
            `y, state = layer(x, state, mask=..., reset=...)`.
        blocks: in place of `layer`, such functions for a pattern of blocks, which is repeated to `num_layers`: every
            block gets the layer of its place. In configurations: names of layers (`metattt.composition.blocks`).
        ffn_dim: hidden width of the SwiGLU. None: 8/3 of dim, rounded up to a multiple of 16.
        pre_conv: a causal depthwise convolution before the layer (the Mamba backbone of the paper).
        conv_width: its taps (tokens).
        norm_eps: epsilon of the RMSNorms.
        tie_embeddings: the head shares the embedding's weights.
        causal: every prediction is made from the tokens before it alone: layers that see later ones are refused.
            False, from Python alone: they are allowed, as for tokens that are masked out; `cross_entropy` and
            `step`, which predict the next token, then refuse.
        checkpoint_blocks: keep only what enters a block, and run it again in the backward pass: less memory, a third
            more time.

    Raises:
        MetaTTTError: a size that is not positive, a layer that sees the future, or a pattern of more blocks than there
            are.
    """

    vocab_size: int = setting()
    dim: int = setting()
    num_layers: int = setting()
    layer: Callable[[], nn.Module] | None = setting(default=None)
    ffn_dim: int | None = setting(default=None)
    pre_conv: bool = setting(default=True)
    conv_width: int = setting(default=4)
    norm_eps: float = setting(default=1e-6, above=0)
    tie_embeddings: bool = setting(default=True)
    checkpoint_blocks: bool = setting(default=False)
    causal: bool = setting(default=True)
    pattern: Any = setting(default=None, alias="blocks")

    def create_modules(self) -> None:
        dim, vocab_size = self.dim, self.vocab_size
        self.embedding = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.embedding.weight, std=INIT_STD)
        layers = pattern_of(take(self, "layer"), take(self, "pattern"), self.num_layers)
        self.make_blocks(layers, self.num_layers, self.causal)
        self.final_norm = RMSNorm(dim, eps=self.norm_eps)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if self.tie_embeddings:
            self.head.weight = self.embedding.weight
        else:
            nn.init.normal_(self.head.weight, std=INIT_STD)

    carried = 0  #: entries of a state's `layers` after those of the blocks

    def forward(self, ids: Tensor, mask: Tensor | None = None, reset: Tensor | None = None) -> Tensor:
        """Logits of the next token.

        Args:
            ids: `[B, T]` token ids.
            mask: `[B, T]` True for real tokens; logits of the others mean nothing. None: all are real.
            reset: `[B, T]` True for the first token of a packed document. None: one document per sequence.

        Returns:
            `[B, T, V]`.
        """
        logits: Tensor = self.head(self.features(ids, None, mask, reset)[0])
        return logits

    def step(
        self,
        ids: Tensor,
        state: LanguageModelState | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        *,
        last_only: bool = False,
        donate_state: bool = False,
    ) -> tuple[Tensor, LanguageModelState]:
        """As `forward`, going on from `state` (None: from the beginning), with the state after the last token.

        `last_only`: logits `[B, 1, V]` of the last real token of every sequence, which is all that sampling needs.
        `donate_state`: the caller gives up `state`, and its weights may be written over.
        """
        self._require_causal()
        features, state = self.features(ids, state, mask, reset, donate_state)
        if last_only and mask is not None:
            last = (torch.arange(ids.shape[1], device=ids.device) * mask).argmax(1)
            features = features[torch.arange(len(ids), device=ids.device), last].unsqueeze(1)
        elif last_only:
            features = features[:, -1:]
        return self.head(features), state

    def cross_entropy(
        self,
        ids: Tensor,
        labels: Tensor,
        state: LanguageModelState | None = None,
        reset: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "sum",
    ) -> tuple[Tensor, LanguageModelState]:
        """Cross-entropy of the predictions, and the state after the last token. The logits of all tokens are never
        there at once.

        Args:
            ids: `[B, T]` token ids.
            labels: `[B, T]` the token that follows each.
            state: as in `step`.
            reset: as in `forward`.
            ignore_index: a label that does not count.
            reduction: `sum`, or `none` for `[B, T]` losses (nats).
        """
        self._require_causal()
        features, state = self.features(ids, state, None, reset)
        if not isinstance(labels, Tensor) or labels.shape != ids.shape or labels.dtype != torch.long:
            found = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
            raise MetaTTTError(f"labels are {found}, expected torch.int64 {list(ids.shape)}, the shape of ids")
        check_choice("reduction", reduction, ("sum", "none"))
        rows = features.flatten(0, 1)
        try:
            losses = linear_cross_entropy(
                rows, self.head.weight, labels.flatten(), ignore_index=ignore_index, reduction=reduction
            )
        except FAILURES:
            require_ids(labels.masked_fill(labels == ignore_index, 0), self.vocab_size, "labels")
            raise
        return losses if reduction == "sum" else losses.view_as(labels), state

    def features(
        self,
        ids: Tensor,
        state: LanguageModelState | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        donate_state: bool = False,
    ) -> tuple[Tensor, LanguageModelState]:
        """As `step`, with what the head reads in place of logits: `[B, T, D]`, normed."""
        read = ids
        try:
            packing = None
            if mask is not None or reset is not None:
                check_flags(ids, mask, reset)
                packing = pack(mask, reset, ids.device)
            if packing is not None:  # real tokens first: then convolutions and layers see neighbours as neighbours
                ids, mask, reset = packing.sort(ids), packing.valid, packing.first
            else:
                mask = reset = None
            ctx = Context(ids, mask, reset, 1)  # no block looks at positions: the layers count for themselves
            count = len(self.blocks) + self.carried
            before = LanguageModelState((None,) * count, (None,) * count) if state is None else state
            self.check_blocks_of(len(before.layers) - self.carried)
            x, layers, tails = self._read(ids, before, ctx, packing, donate_state)
            features = self.final_norm(x)
            if packing is not None:
                features = packing.restore(features)
            return features, LanguageModelState(tuple(layers), tuple(tails))
        except FAILURES as error:
            self._explain(error, read, state)
            raise

    def _read(
        self, ids: Tensor, before: LanguageModelState, ctx: Context, packing: Packing | None, donate_state: bool
    ) -> tuple[Tensor, list[Any], list[Any]]:
        """What the last block makes of the tokens `[B, T, D]`, and what the state after them is made of."""
        return self._through(len(self.blocks), self.embedding(ids), before, ctx, packing, donate_state)

    def check_causal(self) -> None:
        """As `Backbone.check_causal`; a model that was made for layers that see the future is refused, too."""
        self._require_causal()
        super().check_causal()

    def _explain(self, error: Exception, ids: object, state: object) -> None:
        """Raises what is wrong with the inputs of a call that has failed; returns where nothing is."""
        if isinstance(ids, Tensor) and ids.device != self.embedding.weight.device:
            here = self.embedding.weight.device
            raise MetaTTTError(f"ids are on {ids.device}, and the model on {here}: move one of them") from error
        require_ids(ids, self.vocab_size)
        if state is not None and not isinstance(state, LanguageModelState):
            raise MetaTTTError(
                f"state is a {type(state).__name__}, expected what an earlier call of the model has returned, or None"
            ) from error
        for tail in () if state is None else state.tails:
            shape = (len(ids), self.dim)  # type: ignore[arg-type]
            if tail is not None and (not isinstance(tail, Tensor) or tail.shape[::2] != shape):
                count = len(tail) if isinstance(tail, Tensor) else "no"
                raise MetaTTTError(
                    f"the state is of another model or batch (its sequences: {count}, those of ids: {shape[0]}): start "
                    "with state=None, or choose and repeat its sequences with state.select"
                ) from error

    def _require_causal(self) -> None:
        if not self.causal:
            raise MetaTTTError(
                "a model with causal=False may see the token that it is to predict: set model.causal=true"
            )


def tokens_per_call(model: nn.Module, most: int, count: int) -> int:
    """How many of `count` tokens a call may read: `most`, or all of them where a layer's mini-batch is a whole call, to
    which a sequence in parts is another one."""
    whole = any(getattr(module, "mini_batch_size", None) == WHOLE_CALL for module in model.modules())
    return count if whole else most


def document_starts(position_ids: Tensor) -> Tensor | None:
    """`[B, T]` where positions begin again, by which Transformers tells packed documents apart; None: nowhere."""
    first = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1
    return first if bool(first.any()) else None
