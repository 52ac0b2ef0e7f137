"""A language model of ours as Transformers knows models."""

from __future__ import annotations

from collections.abc import Collection
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from metattt.checkpoints.record import check_amounts
from metattt.checkpoints.tensors import read_described
from metattt.checkpoints.trained import check_numbers
from metattt.composition.instantiate import instantiate_model
from metattt.errors import MetaTTTError
from metattt.hf.cache import MetaTTTCache
from metattt.hf.config import MetaTTTConfig
from metattt.models.block import INIT_STD
from metattt.models.language_model import LanguageModel, document_starts
from metattt.optional import need

need("transformers", extra="hf", what="metattt.hf")
from transformers import GenerationMixin, PreTrainedModel  # noqa: E402
from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402
from transformers.utils.generic import can_return_tuple  # noqa: E402

# `cache` since Transformers 5.24
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
IGNORED = -100  # a label that does not count
GENERATING: ContextVar[object] = ContextVar("generating", default=None)  # the call of `generate` that runs


class MetaTTTForCausalLM(PreTrainedModel, GenerationMixin):
    """`LanguageModel` with the methods of Transformers: `from_pretrained`, `generate`, `save_pretrained`, ...

    Args:
        config: of the model.
        trust: modules of yours whose classes the configuration may name; `from_pretrained` takes it as well:
            `trust=["my_learner"]`.

    Attributes:
        model: the `LanguageModel`.
    """

    config_class = MetaTTTConfig
    base_model_prefix = "model"
    accepts_loss_kwargs = True  # Trainer: `num_items_in_batch`
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (as Transformers has it)
    _input_embed_layer = "embedding"
    _is_stateful = True

    config: MetaTTTConfig

    def __init__(self, config: MetaTTTConfig, trust: Collection[str] = ()):
        super().__init__(config)
        self.trust = trust
        self.model: LanguageModel = instantiate_model(config.composed(trust))
        first = {one: name for name, one in self.named_parameters()}
        names = self.named_parameters(remove_duplicate=False)
        self._tied_weights_keys = {name: first[one] for name, one in names if name != first[one]}
        self.post_init()

    @classmethod
    def of(cls, model: LanguageModel, config: DictConfig, trust: Collection[str] = ()) -> MetaTTTForCausalLM:
        """Around a model that is there: `MetaTTTForCausalLM.of(*metattt.load_model("runs/…"))`; no weights are copied.

        Args:
            model: it stays the same object, with its device and the types of its parameters.
            config: of its run, or of the model alone.
            trust: modules of yours whose classes the configuration names.

        Raises:
            MetaTTTError: a configuration of another model.
        """
        with torch.device("meta"):
            made = cls(MetaTTTConfig.of(config), trust)
        if _shapes(made.model) != _shapes(model):
            raise MetaTTTError("the configuration is of another model: give what metattt.load_model has returned")
        made.model = model
        made.config.dtype = next(model.parameters()).dtype
        return made.train(model.training)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: MetaTTTCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        inputs_embeds: None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: MetaTTTCache | None = None,
        tokenizer: Any = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token, and the state to go on from.

        Args:
            input_ids: `[B, T]` token ids.
            attention_mask: `[B, T]`, or with columns for what the cache has read before; 0 for padding, which may stand
                anywhere and changes nothing. Booleans, or numbers 0 and 1; additive masks (0 and −∞) are refused.
            past_key_values, cache: what an earlier call returned, by its old and its new name; it is changed in place,
                as every cache of Transformers.
            labels: `[B, T]` the same ids, which are shifted here, from each real token to the next real one; −100 does
                not count.
            use_cache: return the state; None: as the configuration says, and not while training.
            logits_to_keep: of the last so many columns, or of the columns of a tensor; 0: of all. 1: of the last real
                token of each sequence.
            num_items_in_batch: labels that count in all batches of a step, over which the loss is a mean.
            inputs_embeds, output_attentions, output_hidden_states: not there; libraries hand them on unasked.
            tokenizer: not used; `generate(stop_strings=...)` hands it on.
            position_ids: `[B or 1, T]`; without an attention_mask, a document begins where they begin again (as
                `DataCollatorWithFlattening` packs them). Layers count tokens themselves.
            seq_idx, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: say the same once more, for attentions;
                not used.

        Raises:
            MetaTTTError: a cache of another kind, a mask that does not fit, what is not there, or what the model
                refuses.
        """
        absent = ("inputs_embeds", inputs_embeds is not None), ("output_attentions", output_attentions)
        for name, asked in (*absent, ("output_hidden_states", output_hidden_states)):
            if asked:
                raise MetaTTTError(
                    f"{name} is not supported: a model of MetaTTT reads input_ids and returns logits; leave it out"
                    + "\n(prompt tuning of peft passes embeddings: use LoRA)" * (inputs_embeds is not None)
                )
        if input_ids is None:
            raise MetaTTTError("input_ids are not given: [B, T] token ids")
        if position_ids is None and (seq_idx is not None or cu_seq_lens_q is not None):
            raise MetaTTTError("packed documents need position_ids: let the collator have return_position_ids=True")
        cache = past_key_values if cache is None else cache
        if cache is not None and not isinstance(cache, MetaTTTCache):
            raise MetaTTTError(
                f"past_key_values is a {type(cache).__name__}: give a MetaTTTCache of an earlier call, or None\n"
                "(prefix tuning of peft gives keys and values, which MetaTTT layers do not have: use LoRA)"
            )
        self._check_adapters()
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if cache is None and use_cache:
            cache = MetaTTTCache()
        mask = _columns(attention_mask, input_ids)
        last_only = labels is None and isinstance(logits_to_keep, int) and logits_to_keep == 1
        if last_only and mask is not None and not mask.any(1).all():
            raise MetaTTTError("attention_mask has a row without a real token: leave out that prompt")
        if cache is not None and attention_mask is not None and not torch.compiler.is_compiling():
            cache.check_mask(attention_mask[:, : -input_ids.shape[1]], input_ids.shape[1], GENERATING.get())
        one = input_ids.shape[1:] == (1,) and (mask is None or (not mask.is_cuda and bool(mask.all())))
        if one and cache is not None and cache.is_initialized and (within := GENERATING.get()) is not None:
            logits = cache.advance(self.model, input_ids[:, 0], within).unsqueeze(1)
        else:
            state, donate = None if cache is None else cache.give_up(), not torch.is_grad_enabled()
            first = document_starts(position_ids) if mask is None and position_ids is not None else None
            first = None if first is None else first.expand(input_ids.shape)
            logits, state = self.model.step(input_ids, state, mask, first, last_only=last_only, donate_state=donate)
            if cache is not None:
                cache.take(state, input_ids.shape[1], mask)
        loss = None
        if labels is not None:
            following, size = _next(labels, mask), self.config.vocab_size
            loss = self.loss_function(
                logits, labels, size, num_items_in_batch=num_items_in_batch, shift_labels=following
            )
        keep: Any = logits_to_keep
        if isinstance(logits_to_keep, int):
            keep = slice(-logits_to_keep if logits_to_keep else None, None)
        returned: dict[str, Any] = {CACHE: cache if use_cache else None}
        return CausalLMOutputWithPast(loss=loss, logits=logits[:, keep], **returned)

    def generate(self, *args: Any, **options: Any) -> Any:
        """As Transformers has it; while it runs, the model does not change, so that the step of a token is recorded."""
        before = GENERATING.set(object())
        try:
            return super().generate(*args, **options)
        finally:
            GENERATING.reset(before)

    @wraps(GenerationMixin.prepare_inputs_for_generation)  # with its signature, which Transformers looks at
    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        """As Transformers has it, but for a cache that has read all of the prompt: it would read part of it again."""
        if (new := options.get("next_sequence_length")) is not None and new < 1:
            raise MetaTTTError("past_key_values has read all of input_ids: add new tokens, or begin with a new cache")
        return super().prepare_inputs_for_generation(input_ids, *args, **options)

    def _check_adapters(self) -> None:
        """Refuses an adapter (peft) on a weight that embeds tokens and predicts them: merged, it would change both.

        Raises:
            MetaTTTError: such an adapter.
        """
        ends = {"embedding": self.model.embedding, "head": self.model.head}
        weights = [getattr(one, "base_layer", one).weight for one in ends.values()]
        adapters = (name for name, one in ends.items() if hasattr(one, "base_layer"))
        own = (name for name in adapters if not hasattr(ends[name], "trainable_tokens_delta"))  # which peft ties
        if weights[0] is weights[1] and (adapted := next(own, None)):
            raise MetaTTTError(
                f"an adapter on `{adapted}` cannot be merged: the head is the embedding (model.tie_embeddings).\n"
                "Leave it out of target_modules, train it whole (modules_to_save=['embedding']), or make a model with "
                "model.tie_embeddings=false"
            )

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, path: Any, *args: Any, output_loading_info: bool = False, **options: Any
    ) -> Any:
        """As every model of Transformers, from a folder or a name on the Hub; only safetensors are read.

        Raises:
            MetaTTTError: weights that are damaged, missing, of another model or not finite.
        """
        folder = Path(path, options.get("subfolder") or "") if isinstance(path, (str, Path)) else None
        if folder is not None and folder.is_dir():  # before a model is made
            config = options.get("config")
            config = config if isinstance(config, MetaTTTConfig) else MetaTTTConfig.from_pretrained(folder)
            count = sum(len(read_described(file)[0]) for file in sorted(folder.glob("*.safetensors")))  # and checksums
            if config.metattt is not None and count:
                check_amounts(config.metattt["config"], folder, count)
        options = {"use_safetensors": True} | options | {"ignore_mismatched_sizes": True}  # they are named below
        loaded: Any = super().from_pretrained(path, *args, output_loading_info=True, **options)
        made, found = loaded
        problems = {kind: sorted(map(str, found[f"{kind}_keys"])) for kind in ("missing", "unexpected", "mismatched")}
        wrong = "; ".join(f"{kind}: {', '.join(names[:3])}" for kind, names in problems.items() if names)
        if wrong:
            raise MetaTTTError(f"{path} does not fit the model of its own config.json: {wrong}")
        made._compute_buffers()
        there = [(name, one) for name, one in made.model.named_parameters() if not one.is_meta]
        check_numbers([(name, one) for name, one in there if one.is_floating_point()], path)
        made.model.check_causal()
        return (made, found) if output_loading_info else made

    def _compute_buffers(self) -> None:
        """Values for the buffers that no file holds: those of a new model."""
        names = {name for name, _ in self.named_buffers()} - self.state_dict().keys()
        if not names:
            return
        with torch.random.fork_rng(devices=[]):
            fresh = dict(type(self)(self.config, self.trust).named_buffers())
        for name, buffer in self.named_buffers():
            if name in names:
                buffer.copy_(fresh[name])

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: our modules draw their parameters when they are made."""

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Not only the head: also what the class of the model shares, whether it ties the embeddings or not."""
        return dict(self._tied_weights_keys)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """False: `forward` makes the cache."""
        return False

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.model.head = new_embeddings

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As every model of Transformers: more or fewer tokens."""
        count = self.config.vocab_size
        embedding: nn.Embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        for one in () if mean_resizing else (embedding, self.model.head):  # torch has drawn them for other models
            nn.init.normal_(one.weight[count:], std=INIT_STD)
        self.model.vocab_size = embedding.num_embeddings
        assert self.config.metattt is not None
        self.config.metattt["config"]["model"]["vocab_size"] = self.config.vocab_size = embedding.num_embeddings
        return embedding

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, **options: Any) -> None:
        """Keeps what enters a block, and runs it again in the backward pass. (The inner loop does so by itself, in
        groups of mini-batches.)"""
        self.model.checkpoint_blocks = True

    def gradient_checkpointing_disable(self) -> None:
        """Keeps everything that the backward pass needs."""
        self.model.checkpoint_blocks = False

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.model.checkpoint_blocks

    is_activation_checkpointing = is_gradient_checkpointing  # its name since Transformers 5.24


def _columns(mask: Tensor | None, ids: Tensor) -> Tensor | None:
    """The mask of the tokens of this call: the last columns of one that may go back to the beginning."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != len(ids) or mask.shape[1] < ids.shape[1]:
        found = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise MetaTTTError(
            f"attention_mask is {found}, expected [B, T] with 1 for real tokens, of input_ids {list(ids.shape)}"
        )
    if mask.is_floating_point() and not (((mask == 0) | (mask == 1)).all() and mask.any()):
        raise MetaTTTError(
            "attention_mask is additive (0 and −inf, as attention adds it): give 1 for real tokens and 0 for padding, "
            "(mask == 0).long()"
        )
    return mask[:, mask.shape[1] - ids.shape[1] :].bool()


def _next(labels: Tensor, mask: Tensor | None) -> Tensor:
    """The label that each column predicts: that of the next real token; −100 for padding, and where there is none."""
    labels = F.pad(labels, (0, 1), value=IGNORED)
    if mask is None:
        return labels[:, 1:].contiguous()
    count = mask.shape[1]
    place = torch.where(mask, torch.arange(count, device=mask.device), count)
    following = F.pad(place, (0, 1), value=count)[:, 1:].flip(1).cummin(1).values.flip(1)
    return labels.gather(1, following).masked_fill(~mask, IGNORED)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in model.named_parameters()}
