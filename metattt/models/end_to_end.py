"""TTT-E2E: a language model that trains the MLPs of its last blocks on the text that it reads, by its own loss."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

from torch import Tensor, nn

from metattt.errors import MetaTTTError, check_integer
from metattt.inner.packing import Packing
from metattt.layer import TTTLayer
from metattt.learners.base import Learner
from metattt.learners.fast_weights import FastWeights
from metattt.learners.kernel_estimator import KernelEstimator
from metattt.learners.swiglu import SwiGLU
from metattt.models.block import INIT_STD, Block, take
from metattt.models.end_to_end_loop import Adaptation, Loop
from metattt.models.language_model import LanguageModel, LanguageModelState
from metattt.modules import RMSNorm, product_type
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors

TAKEN = (
    "vocab_size", "dim", "num_layers", "layer", "ffn_dim", "norm_eps", "tie_embeddings", "checkpoint_blocks",
)  # fmt: skip
"""Settings of every language model that this one has."""

ALONE = "model=ttt_e2e has one inner loop over all of its tokens and last blocks"


class EndToEndBlock(Block):
    """`x += N(layer(norm(x)))`, `x += N(memory(norm(x); W))` (in the last blocks), `x += N(SwiGLU(norm(x)))`; N is an
    RMSNorm (`post_norm`), or nothing.

    Args:
        dim, layer, ffn_dim, norm_eps: as for `Block`.
        post_norm: norm what is added, too.
        memory: a learner whose weights are the block's fast weights; None: the block has none.
    """

    def __init__(
        self, dim: int, layer: nn.Module, ffn_dim: int, norm_eps: float, post_norm: bool, memory: Learner | None
    ):
        super().__init__(dim, layer, ffn_dim, None, norm_eps)

        def post() -> nn.Module:
            return RMSNorm(dim, eps=norm_eps) if post_norm else nn.Identity()

        self.layer_post, self.ffn_post = post(), post()
        self.memory = memory
        self.memory_norm = None if memory is None else RMSNorm(dim, eps=norm_eps)
        self.memory_post = None if memory is None else post()

    def forward(
        self,
        x: Tensor,
        state: Any,
        tail: None,
        ctx: Context,
        packing: Packing | None = None,
        donate_state: bool = False,
        weights: Tensors | None = None,
    ) -> tuple[Tensor, Any, None]:
        """As `Block.forward`, with the fast weights `[B, 1, *shape]` by name."""
        y, state = self.mix(x, state, ctx, packing, donate_state)
        x = x + self.layer_post(y)
        if self.memory is not None:
            assert self.memory_norm is not None and self.memory_post is not None and weights is not None
            x = x + self.memory_post(self.remember(self.memory_norm(x), weights))
        return x + self.ffn_post(self.ffn(self.ffn_norm(x))), state, None

    def remember(self, x: Tensor, weights: Tensors) -> Tensor:
        """`f(x; W)` of the memory, `[B, T, D]`; sums are in the type of the weights."""
        memory, accum_dtype = self.memory, next(iter(weights.values())).dtype
        assert memory is not None
        slow = {name: value.to(accum_dtype) for name, value in memory.slow.items()}
        y: Tensor = memory.predict(FastWeights(weights, slow, product_type(x)), x.to(accum_dtype).unsqueeze(1))
        return y.squeeze(1).to(x.dtype)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        if self.memory is not None:
            raise MetaTTTError(
                f"{ALONE}, which is differentiated twice, and compiled code only once: set compile=false"
            )
        super().compile(*args, **kwargs)


@register(group="model", name="ttt_e2e", version=2)
class EndToEnd(LanguageModel, takes=TAKEN):
    """End-to-end test-time training (arXiv 2512.23675): window attention in every block, and in the last ones a second
    MLP whose weights W are the hidden state. They learn to predict the next token, by the loss of the whole network:

    `W_i = W_{i−1} − (η / b) Σ_{t in mini-batch i} ∇_W CE(logits_t(W_{i−1}), token_{t+1})`, clipped to a norm,

    and the tokens of a mini-batch are predicted with the weights that the mini-batches before it left. Everything else
    stands still in the inner loop. The outer loop trains W0 and all other parameters through these steps.

    The label of a mini-batch's last token is the first token of the next one: the step is taken when that token comes,
    before it is read. Every sequence has weights of its own, which begin again from W0 with every document.

    Args:
        vocab_size, dim, num_layers, ffn_dim, norm_eps, tie_embeddings, checkpoint_blocks: as for
            `LanguageModel`; `checkpoint_blocks` is for the blocks without fast weights.
        layer: makes the attention of one block; the last blocks need a window (`layer=window_attention`).
        suffix: how many of the last blocks have fast weights. None: a quarter, rounded up.
        mini_batch_size: b (tokens).
        inner_lr: η.
        inner_clip: largest norm of a sequence's gradient over all fast weights; None: any.
        first_order: the outer gradient takes the inner gradients as constants (cheaper, not exact).
        post_norm: norm what a branch adds, too, as the published models do.
        learner: the memory of a block, not yet built; every block gets a copy. None: a SwiGLU as wide as the ordinary
            one, drawn from N(0, 0.02²).
        checkpoint_mini_batches: keep only what enters a mini-batch, its weights among it, and run it again in the
            backward pass.

    Raises:
        MetaTTTError: a value that is not allowed, attention without a window, or a learner that sees several tokens.
    """

    carried = 1
    pre_conv = False
    scale, follows_base_lr = 1.0, True  #: of η: the callback inner_warmup moves it
    suffix: int | None = setting(default=None, advice=", or null for a quarter of the blocks")
    mini_batch_size: int = setting(default=1024)
    inner_lr: float = setting(default=1.0)
    inner_clip: float | None = setting(default=1.0, above=0, advice=", or null for no bound")
    first_order: bool = setting(default=False)
    post_norm: bool = setting(default=True)
    learner: Any = setting(default=None)
    checkpoint_mini_batches: bool = setting(default=True)

    def create_modules(self) -> None:
        if self.suffix is None:
            self.suffix = max(1, math.ceil(self.num_layers / 4))
        check_integer("model.suffix", self.suffix, 1, self.num_layers, ", or null for a quarter of the blocks")
        self.prefix = self.num_layers - self.suffix
        learner = take(self, "learner")
        if learner is not None and not isinstance(learner, Learner):
            raise MetaTTTError(f"model.learner is a {type(learner).__name__}: it must be a Learner, such as SwiGLU()")
        if learner is not None and (not learner.has_weights or learner.mixes_tokens or not learner.causal):
            kind = type(learner).__name__
            raise MetaTTTError(f"model.learner is a {kind}, which has no weights or sees several tokens: set another")
        self.__dict__["memory"] = learner  # for `_block`; it is no module of the model
        super().create_modules()
        del self.__dict__["memory"]

    def _block(self, number: int, layer: nn.Module) -> EndToEndBlock:
        assert self.ffn_dim is not None
        make = partial(EndToEndBlock, self.dim, layer, self.ffn_dim, self.norm_eps, self.post_norm)
        if number < self.prefix:
            return make(None)
        found = layer.learner if isinstance(layer, TTTLayer) else layer
        if not isinstance(found, KernelEstimator) or found.window is None:
            kind = f"{type(found).__name__}{' without a window' if isinstance(found, KernelEstimator) else ''}"
            raise MetaTTTError(
                f"block {number} has fast weights, and its layer is a {kind}: set layer=window_attention, or fewer "
                "model.suffix"
            )
        learner = self.__dict__["memory"]
        memory = SwiGLU(expansion=self.ffn_dim / self.dim) if learner is None else copy.deepcopy(learner)
        memory.setup(1, self.dim, self.dim)
        if learner is None:
            for weight in memory.init.values():
                nn.init.normal_(weight, std=INIT_STD)
        return make(memory)

    @property
    def base_lr(self) -> float:
        """η, by the name that inner optimizers have for it."""
        return self.inner_lr

    @property
    def inner(self) -> Loop:
        """The inner loop over the last blocks as they are now."""
        return Loop(
            tuple(self.blocks)[self.prefix :], self.final_norm, self.head, self.mini_batch_size,
            self.inner_lr * self.scale, self.inner_clip, self.first_order, self.checkpoint_mini_batches,
        )  # fmt: skip

    def _read(
        self, ids: Tensor, before: LanguageModelState, ctx: Context, packing: Packing | None, donate_state: bool
    ) -> tuple[Tensor, list[Any], list[Any]]:
        """The layers of a state are those of the blocks, and an `Adaptation`."""
        held, suffix = before.layers[-1], len(self.blocks) - self.prefix
        if held is not None and (not isinstance(held, Adaptation) or len(held.weights) != suffix):
            raise MetaTTTError("the state is of another model: start with state=None")
        if held is not None and len(held.pos) != len(ids):
            count = len(held.pos)
            raise MetaTTTError(f"the state is for {count} sequences, ids hold {len(ids)}: start with state=None")
        x, layers, tails = self._through(self.prefix, self.embedding(ids), before, ctx, packing, donate_state)
        x, states, held = self.inner.run(x, ids, before.layers[self.prefix : -1], held, packing)
        return x, [*layers, *states, held], [*tails, *(None for _ in states), None]
