"""Adapts a pretrained language model to the documents that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.adaptation.constant_gates import constant_gates
from metattt.adaptation.fast_model import FastModel, text_setting
from metattt.checkpoints.states import read_state, write_state
from metattt.errors import MetaTTTError, NotFinite, check_integer, check_number
from metattt.generation.sampling import generate
from metattt.inner.network_step import gradients_of
from metattt.memory import Memory, at_start, choose
from metattt.modules import expand_like
from metattt.nested import map_tensors
from metattt.optimizers import Adam
from metattt.optimizers.block import BlockRule

Ids = Tensor | Sequence[Tensor]
Seen = tuple[tuple[int, int], ...]


class Adapted(NamedTuple):
    """What an adapter has learned, and where it stands in `B` documents.

    Attributes:
        weights: the fast weights and what the rule keeps beside them, by slot and name, `[B, 1, *shape]`.
        tokens: `[B, n]` the tokens of the open mini-batch, after those before it that are read once more.
        position: tokens of the documents up to the open mini-batch.
        waiting: tokens of the open mini-batch.
        ends: length of each document, where it has ended; else None.
        model: state of a `LanguageModel` before the open mini-batch; None: none is carried.
        documents: their numbers, counted from the first that the adapter has read.
        seen: what the weights of each have learned: numbers of documents, and up to which token (exclusive).
    """

    weights: Memory
    tokens: Tensor
    position: int
    waiting: int
    ends: tuple[int | None, ...]
    model: Any
    documents: tuple[int, ...]
    seen: tuple[Seen, ...]


torch.serialization.add_safe_globals([Adapted])


class Score(NamedTuple):
    """Predictions of tokens, and what the weights that made them had learned.

    Attributes:
        nats: `[B, n]` cross-entropy of every token; NaN for the first of a document, which nothing predicts, and for
            padding.
        documents: numbers of the documents.
        start: position of the first token in its document.
        seen: for every mini-batch of the tokens: its first column, and for every row what the weights had learned.
        logits: `[B, n, V]` of the tokens, if they were asked for.
    """

    nats: Tensor
    documents: tuple[int, ...]
    start: int
    seen: tuple[tuple[int, tuple[Seen, ...]], ...]
    logits: Tensor | None = None


class Adapter:
    """A pretrained language model that trains some of its weights on the text that it reads, each mini-batch after it
    has been scored (dynamic evaluation, arXiv 1709.07432; test-time training):

    `W_j = rule(W_{j−1}, (1/b) Σ_{t in mini-batch j} ∇_W CE(logits_t(W_{j−1}), token_t))`.

    A mini-batch is learned when its b tokens have been read; how they are split into calls changes nothing. Every
    document of a batch has weights of its own, which begin with the model's. The model itself never changes. Several
    threads may `score` and `generate` at once.

    ```
    adapter = Adapter(model, fast="lora", rule=Adam(base_lr=1e-3, eps=1e-11, mini_batch_size=64))
    score = adapter.read(ids)           # scores a mini-batch, then learns it, and so on
    nats = adapter.score(more).nats     # scores without learning
    ids = adapter.generate(prompt, max_new_tokens=100)
    ```

    Args:
        model: a `LanguageModel` (`metattt.load_model`), or any causal language model of Transformers.
        fast: which parameters learn: `lora`, `mlp`, `norms`, `all`, or patterns of names; see `FastModel`.
        rank: of the change to each chosen matrix; None: 8 for `lora`, whole matrices for the others.
        frozen_blocks: the first so many blocks stay as they are.
        seed: of the first factors of low-rank changes.
        rule: how they learn: a rule that moves its weights once per mini-batch (`Adam`, `BlockMomentum`, `Sign`, …) and
            whose gates are constants. Its `mini_batch_size` is b (tokens), its `steps` the steps on each mini-batch.
            None: Adam, steps of 1e-3, b = 64. (The moments of `Adam` are of η G, so its eps is the usual one times η.)
        context: tokens before a mini-batch that are read once more for it, with the weights of the time. None: 0 for a
            `LanguageModel`, whose state is carried from mini-batch to mini-batch, and b for a model of Transformers.
        clip: largest norm of a document's gradient over all fast weights; None: any.

    Attributes:
        state: an `Adapted`; None before the first token.

    Raises:
        MetaTTTError: a rule that cannot be used here, or parameters that cannot learn.
    """

    def __init__(
        self,
        model: nn.Module,
        fast: str | Sequence[str] = "lora",
        rule: BlockRule | None = None,
        rank: int | None = None,
        context: int | None = None,
        frozen_blocks: int = 0,
        clip: float | None = 1.0,
        seed: int = 0,
    ):
        if clip is not None:
            check_number("clip", clip, above=0, advice=", or null for no bound")
        self.base, self.clip = model, clip
        self.fast = FastModel(model, fast, rank, frozen_blocks, seed)
        self.rule = Adam(base_lr=1e-3, eps=1e-11, mini_batch_size=64) if rule is None else rule
        widest = max(self.fast.start.values(), key=lambda value: value.dtype.itemsize)
        self._gates = constant_gates(self.rule, list(self.fast.start), widest)
        self.carries = context is None and self.fast.ours
        self.context = (0 if self.carries else self.rule.mini_batch_size) if context is None else context
        check_integer("context", self.context, 0)
        most = text_setting(model, "max_position_embeddings")
        if self.context + self.rule.mini_batch_size > most:
            raise MetaTTTError(
                f"context={self.context} and a mini-batch of {self.rule.mini_batch_size} tokens are more than the "
                f"{most} positions of the model: lower context or the rule's mini_batch_size"
            )
        self.state: Adapted | None = None
        self._documents = 0

    def reset(self) -> None:
        """Forgets everything: the next tokens begin new documents with the model's own weights."""
        self.state = None

    @torch.inference_mode(False)  # what is carried may be learned from later
    def next_documents(self) -> None:
        """The next tokens begin new documents, with the weights that the documents before have left. The tokens of an
        open mini-batch are learned first, as a smaller one."""
        if self.state is None:
            return
        state = self.state
        if state.waiting > (state.position == 0):  # a first token alone predicts nothing
            state = self._learned(state, state.waiting, False)[1]
        documents = self._numbers(len(state.tokens))
        self.state = state._replace(
            tokens=state.tokens[:, :0], position=0, waiting=0, ends=(None,) * len(documents), model=None,
            documents=documents,
        )  # fmt: skip
        self._documents = max(documents) + 1

    def read(self, ids: Ids, logits: bool = False) -> Score:
        """Scores the next tokens of the documents, mini-batch by mini-batch, and learns each after it was scored.

        Args:
            ids: `[B, n]` token ids, or B tensors of different lengths: these documents then end there. What is left of
                one in a mini-batch that others complete is learned with it, as `next_documents` learns it of all.
            logits: return them, too.

        Raises:
            MetaTTTError: another number of documents than before, or documents that have ended.
            NotFinite: a loss that is none: the weights have diverged.
        """
        return self._advance(ids, learns=True, scores=True, logits=logits)

    def score(self, ids: Ids, logits: bool = False) -> Score:
        """Scores the next tokens with the weights as they are. Nothing is learned, and the documents stay where they
        are. Arguments and errors are those of `read`."""
        return self._advance(ids, learns=False, scores=True, logits=logits)

    def learn(self, ids: Ids) -> None:
        """Learns the next tokens, whose predictions are not wanted. Arguments and errors are those of `read`."""
        self._advance(ids, learns=True, scores=False, logits=False)

    def generate(self, prompt: Tensor, max_new_tokens: int | None = None, **options: Any) -> Tensor:
        """Continues prompts with what was learned. The prompts are not learned.

        Args:
            prompt: `[B, n]` token ids, each the beginning of a text of its own; of one document, any number of them.
            max_new_tokens: at most; 256 unless you, `max_length` or `generation_config` say another.
            options: of `metattt.generation.sampling.generate`, or of the `generate` of Transformers.

        Returns:
            `[B, n + new]` ids: the prompts and what follows.

        Raises:
            MetaTTTError: prompts of several lengths, or of another number than the documents.
        """
        if max_new_tokens is not None or not options.keys() & {"max_length", "generation_config"}:
            options["max_new_tokens"] = 256 if max_new_tokens is None else max_new_tokens
        prompt, lengths = self.fast.token_ids(prompt)
        if len({*lengths}) > 1:
            raise MetaTTTError(f"the prompts have {lengths} tokens: give prompts of one length")
        weights = (self._begun(len(prompt)) if self.state is None else self.state).weights["commit"]
        held = len(next(iter(weights.values())))
        if held not in (1, len(prompt)):
            raise MetaTTTError(f"the adapter holds {held} documents, and there are {len(prompt)} prompts: give {held}")
        config = options.get("generation_config") or getattr(self.base, "generation_config", None)
        keys = ("num_beams", "num_return_sequences")
        rows = max(options.get(key) or getattr(config, key, None) or 1 for key in keys)
        if held > 1 and rows > 1:  # Transformers puts those of a prompt one after the other
            weights = {name: value.repeat_interleave(rows, 0) for name, value in weights.items()}
        model: Any = self.fast.generating(weights)
        try:
            with torch.no_grad():
                if self.fast.ours:
                    return torch.stack([*prompt.unbind(1), *generate(model, prompt, **options)], dim=1)
                options.setdefault("attention_mask", torch.ones_like(prompt))
                return model.generate(prompt, **options)
        finally:
            self.fast.generating({})

    def save(self, path: str | Path) -> None:
        """Writes `state` to a file, apart from the model, which the file names by a checksum.

        Raises:
            MetaTTTError: nothing was read yet, or the file cannot be written.
        """
        if self.state is None:
            raise MetaTTTError("the adapter has read nothing yet: there is nothing to save")
        write_state(path, self.state, self.base)

    @torch.inference_mode(False)
    def load(self, path: str | Path) -> None:
        """Goes on from a file of `save`.

        Raises:
            MetaTTTError: no such file, one that is damaged or of another model, other fast weights than these, or
                those of another rule or context.
        """
        device = next(self.base.parameters()).device
        state = read_state(path, Adapted, device, self.base)
        shapes = {name: tuple(value.shape[2:]) for name, value in state.weights["commit"].items()}
        if shapes != {name: tuple(value.shape[1:]) for name, value in self.fast.start.items()}:
            raise MetaTTTError(f"{path} holds other fast weights: make the adapter with the same fast and rank")
        begun = set(self._begun(1).weights)  # before the first step; then all that the rule keeps is there, too
        known = set(state.weights) in (begun, begun | {*self.rule.own_slots})
        if not known or state.waiting >= self.rule.mini_batch_size:
            raise MetaTTTError(
                f"{path} was made by another rule: make the adapter with the same rule and mini_batch_size"
            )
        held = state.tokens.shape[1] - state.waiting, state.model is not None
        if held != (min(state.position, self.context + 1), self.carries and state.position > 1):  # after a first token
            raise MetaTTTError(
                f"{path} was made with another context: make the adapter with the same one, or call next_documents() "
                "before save"
            )
        self.state, self._documents = state, max(state.documents) + 1

    # -- one call ------------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def _advance(self, ids: Ids, learns: bool, scores: bool, logits: bool) -> Score:
        ids, lengths = self.fast.token_ids(ids)
        state = self._begun(len(ids)) if self.state is None else self.state
        if len(state.tokens) != len(ids):
            raise MetaTTTError(f"the adapter reads {len(state.tokens)} documents, and ids hold {len(ids)}: reset() it")
        if any(end is not None for end in state.ends):
            raise MetaTTTError("a document has ended: call reset(), or next_documents() to go on with what was learned")
        start, count, size = state.position + state.waiting, ids.shape[1], self.rule.mini_batch_size
        ends = tuple(None if length == count else start + length for length in lengths)
        state = state._replace(ends=ends)
        found: list[Tensor] = []
        rows: list[Tensor] = []
        seen: list[tuple[int, tuple[Seen, ...]]] = []
        done = 0
        while done < count:
            part = ids[:, done : done + size - state.waiting]
            waiting = state.waiting + part.shape[1]
            state = state._replace(tokens=torch.cat([state.tokens, part], dim=1), waiting=waiting)
            seen.append((done, state.seen))
            if waiting == size and learns and state.position + waiting > 1:  # a first token alone predicts nothing
                nats, state, values = self._learned(state, part.shape[1], logits)
            elif scores or (waiting == size and self.carries):
                nats, after, values = self._read(state, part.shape[1], logits)
                state = state._replace(model=after) if waiting == size else state
            else:
                nats, values = part.new_zeros(part.shape, dtype=torch.float32), None
            if waiting == size:
                state = state._replace(
                    tokens=state.tokens[:, -(self.context + 1) :], position=state.position + size, waiting=0
                )
            found.append(nats)
            rows += [] if values is None else [values]
            done += part.shape[1]
        if learns:
            self.state, self._documents = state, max(state.documents) + 1
        nats = torch.cat(found, dim=1)
        return Score(nats, state.documents, start, tuple(seen), torch.cat(rows, dim=1) if logits else None)

    def _read(self, state: Adapted, count: int, logits: bool) -> tuple[Tensor, Any, Tensor | None]:
        """Nats of the last `count` tokens, the model's state, and their logits if asked for."""
        with torch.no_grad():
            nats, after, values = self._losses(state.weights["commit"], state)
        return self._scored(nats, state, count), after, _last(values, count) if logits else None

    def _learned(self, state: Adapted, count: int, logits: bool) -> tuple[Tensor, Adapted, Tensor | None]:
        """As `_read`, with what is carried on after the inner steps on the open mini-batch."""
        memory, size = state.weights, self.rule.mini_batch_size
        first: Any = None
        valid = self._valid(state)
        complete = valid.any(1).tolist()  # all tokens of the mini-batch are there, or no more will come

        def loss(weights: dict[str, Tensor]) -> tuple[Tensor, tuple[Any, ...]]:
            nats, after, values = self._losses(weights, state)
            return nats.masked_fill(~valid, 0).sum() / size, (nats, after, values if logits else None)

        for _ in range(self.rule.steps):
            with torch.no_grad():
                gradients, found = gradients_of(loss, memory["commit"], True, self.clip)
                first = found if first is None else first
                memory = self._moved(memory, gradients, complete)
        nats, model, values = first
        scored = self._scored(nats, state, count)
        stop = state.position + state.waiting
        seen = tuple(
            (*(one for one in before if one[0] != document), (document, stop if end is None else min(end, stop)))
            if taken else before
            for before, document, end, taken in zip(state.seen, state.documents, state.ends, complete, strict=True)
        )  # fmt: skip
        after = state._replace(weights=memory, model=model, seen=seen)
        return scored, after, None if values is None else _last(values, count)

    def _moved(self, memory: Memory, gradients: dict[str, Tensor], complete: list[bool]) -> Memory:
        """The memory after a step, in the documents whose mini-batch is `complete`."""
        gates = map_tensors(lambda gate: gate.expand(len(complete), -1, -1), self._gates)
        eta = gates.eta[:, :, 0]
        update = {name: -expand_like(eta, gradient) * gradient for name, gradient in gradients.items()}
        after = self.rule.commit(self.rule.pool_gates(memory, gates) | {"update": update}, self.rule.mini_batch_size)
        return after if all(complete) else choose(torch.tensor(complete, device=eta.device), after, memory, after)

    def _losses(self, weights: dict[str, Tensor], state: Adapted) -> tuple[Tensor, Any, Tensor]:
        """Nats `[B, m]` and logits `[B, m, V]` of the open mini-batch, m tokens of it that have one before them, and
        the model's state after it."""
        count = state.waiting - (state.position == 0)
        if not count:  # a first token alone
            nothing = state.tokens[:, :0].float()
            return nothing, state.model, nothing.unsqueeze(-1).expand(-1, -1, self.fast.num_logits)
        try:
            logits, after = self.fast(weights, state.tokens[:, :-1], state.model if self.carries else None, count)
        except NotFinite as error:  # what a layer finds in its tokens
            raise _diverged(state) from error
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        nats = F.cross_entropy(values.mT, state.tokens[:, -count:], reduction="none")
        return nats, map_tensors(Tensor.detach, after) if self.carries else None, values

    def _scored(self, nats: Tensor, state: Adapted, count: int) -> Tensor:
        """The last `count` entries, NaN where nothing is predicted."""
        nats = nats.masked_fill(~self._valid(state), torch.nan)
        if bool((~nats.isfinite() & self._valid(state)).any()):
            raise _diverged(state)
        nats = F.pad(nats, (int(state.position == 0), 0), value=torch.nan)
        return nats[:, nats.shape[1] - count :]

    def _valid(self, state: Adapted) -> Tensor:
        """`[B, m]` tokens of the open mini-batch that are predicted, and no padding."""
        first = max(1, state.position)
        place = torch.arange(first, state.position + state.waiting, device=state.tokens.device)
        stop = state.position + state.waiting
        ends = torch.tensor([stop if end is None else end for end in state.ends], device=place.device)
        return place < ends.unsqueeze(1)

    def _begun(self, batch: int) -> Adapted:
        """The state at the start of `batch` documents."""
        start = self.fast.start
        memory = self.rule.begin(at_start(self.rule.slots, start.items(), batch, self._gates.eta.dtype))
        device = next(self.base.parameters()).device
        tokens = torch.empty(batch, 0, dtype=torch.long, device=device)
        none = (None,) * batch
        return Adapted(memory, tokens, 0, 0, none, None, self._numbers(batch), ((),) * batch)

    def _numbers(self, batch: int) -> tuple[int, ...]:
        return tuple(range(self._documents, self._documents + batch))


def _diverged(state: Adapted) -> NotFinite:
    return NotFinite(
        f"the loss is not finite after {state.position} tokens of the document: the fast weights have diverged; lower "
        "the rule's base_lr"
    )


def _last(values: Tensor, count: int) -> Tensor:
    """The last `count` rows of logits `[B, m, V]`; zeros for the first token of a document."""
    return F.pad(values, (0, 0, max(0, count - values.shape[1]), 0))[:, -count:]
