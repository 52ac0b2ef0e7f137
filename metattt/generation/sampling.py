"""Sampling from a language model, one token at a time, with carried state."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from metattt.errors import MetaTTTError, NotFinite, check_integer, check_number
from metattt.generation.static_step import Step, one_token_step
from metattt.inner.diagnostics import require_ids
from metattt.inner.packing import check_flags
from metattt.models.language_model import LanguageModel, LanguageModelState, tokens_per_call
from metattt.nested import count_sequences

PIECE = 4096  # tokens of a prompt that are read in one call
MAX_NEW_TOKENS = 10_000_000  # more are a slip, and would not end


def draw(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    ended: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws one token per row of `logits` `[B, V]`, without waiting for the device: ids `[B]`, and whether all
    predictions are finite (a boolean tensor). Where they are not (torch's own draw would end a GPU's process), the
    row's token means nothing.

    Args:
        logits: unnormalised log-probabilities.
        temperature: divides the logits; 0 takes the most probable token.
        top_k: draw from the k most probable tokens only.
        top_p: draw from the smallest set of tokens that holds this probability (nucleus sampling, arXiv 1904.09751).
        generator: source of randomness, on the device of `logits`; None is torch's own.
        ended: rows `[B]` whose predictions need not be finite.
    """
    finite = torch.isfinite(logits.amax(-1, keepdim=True))
    logits = torch.where(finite, logits, 0)
    fine = (finite if ended is None else finite | ended.unsqueeze(1)).all()
    if temperature == 0:
        return logits.argmax(-1), fine
    logits = logits.float()
    logits = (logits - logits.max(-1, keepdim=True).values) / temperature  # so that no small temperature overflows
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if top_p is not None and top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True)
        probability = ordered.softmax(-1)
        outside = probability.cumsum(-1) - probability >= top_p  # the mass before a token: the first one always stays
        logits = logits.masked_fill(outside.scatter(1, index, outside), float("-inf"))
    # As `torch.multinomial` draws one, which first reads back whether it may: the first of exponential clocks to ring.
    probability = logits.softmax(-1)
    clocks = torch.empty_like(probability).exponential_(1, generator=generator)
    return (probability / clocks).argmax(-1), fine


class Report:
    """Flags on their way to the host, while the device computes.

    Args:
        flags: boolean tensors without axes.
    """

    def __init__(self, *flags: Tensor):
        self.host = found = torch.stack(flags)
        self.event: torch.cuda.Event | None = None
        if found.is_cuda:
            self.host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self.host.copy_(found, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(found.device))

    def read(self) -> list[bool]:
        """The flags, when they have arrived: what was launched since is not waited for."""
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()


def generate(
    model: LanguageModel,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Collection[int] = (),
    seed: int | None = None,
    mask: Tensor | None = None,
    state: LanguageModelState | None = None,
    compiled: bool = False,
) -> Iterator[Tensor]:
    """Continues prompts. They are read in pieces; then every token costs one step from the carried state, which is
    recorded where many follow (`metattt.generation.static_step`).

    Args:
        model: the model, in evaluation mode.
        ids: `[B, T]` prompts, at least one token each.
        max_new_tokens: tokens to generate at most.
        temperature, top_k, top_p: see `draw`.
        stop: token ids that end a sequence. An ended sequence continues with its stop token until all have ended.
        seed: of the draws; None is torch's own state.
        mask: `[B, T]` True for the real tokens of prompts of different lengths, padded on either side.
        state: of B sequences, which the prompts go on from; it stays as it is. None: from the beginning.

    Yields:
        The next token of every sequence, `[B]`; a stop token is the last one.

    Raises:
        MetaTTTError: an empty prompt, a mask of another shape, a token that is not in the vocabulary, a setting that is
            not allowed, or a state of other sequences; while it generates, `NotFinite`.
    """
    if not isinstance(model, LanguageModel):
        raise MetaTTTError(f"model is a {type(model).__name__}: it must be a LanguageModel")
    require_ids(ids, model.vocab_size, "prompts")
    if not len(ids):
        raise MetaTTTError("there is no prompt to continue: ids have shape [0, T]")
    if mask is not None:
        check_flags(ids, mask, None)
        if not mask.any(1).all():
            raise MetaTTTError(
                "mask has a row without a real token: it must be torch.bool, with a real token in every row"
            )
    check_integer("max_new_tokens", max_new_tokens, 0, MAX_NEW_TOKENS)
    check_sampling(temperature, top_k, top_p)
    if seed is not None:
        check_integer("seed", seed, 0, 2**63 - 1)
    if not isinstance(stop, Collection) or not all(isinstance(token, int) for token in stop):
        raise MetaTTTError(f"stop={stop!r:.100} is not allowed: it must be a collection of token ids")
    if state is not None and count_sequences(state) != len(ids):
        raise MetaTTTError(
            f"the state is of {count_sequences(state)} sequences, and there are {len(ids)} prompts: state.select(index)"
        )
    stops = torch.tensor(sorted(stop), device=ids.device, dtype=ids.dtype)

    def tokens() -> Iterator[Tensor]:
        carried = None if state is None else state.map(torch.clone)  # steps write over what they are given
        generator = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
        token = torch.zeros_like(ids[:, 0])
        ended = torch.zeros_like(token, dtype=torch.bool)
        ahead = False  # the next logits are on their way already
        step: Step | None = None
        for index in range(max_new_tokens):
            with torch.inference_mode():  # entered anew for every token: the caller's code runs between two of them
                if step is None:
                    logits, carried = read_prompts(model, ids, mask, carried)
                    step, carried = one_token_step(model, carried, max_new_tokens - 1, compiled), None
                elif not ahead:
                    logits = step(token)
                drawn, finite = draw(logits, temperature, top_k, top_p, generator, ended)
                token = torch.where(ended, token, drawn)
                ended = ended | (token.unsqueeze(1) == stops).any(1)
                report = Report(finite, ended.all())
                ahead = _runs_ahead(ids.device) and index + 1 < max_new_tokens
                if ahead:  # it reads the token while the host learns of it; a step too many at the end harms nobody
                    logits = step(token)
            fine, all_ended = report.read()
            if not fine:
                raise NotFinite(
                    "the model's predictions are not finite: its weights, or what the inner loop makes of them on this "
                    "text, have diverged; take an earlier checkpoint"
                )
            yield token
            if all_ended:
                return

    return tokens()


def read_prompts(
    model: LanguageModel, ids: Tensor, mask: Tensor | None, state: LanguageModelState | None
) -> tuple[Tensor, LanguageModelState]:
    """Logits `[B, V]` of the token after each prompt of `ids` `[B, T]`, and the state.

    `PIECE` columns are read at a time, so that memory does not grow with the prompts; all at once where a layer's
    mini-batch is a whole call.
    """
    size = tokens_per_call(model, PIECE, ids.shape[1])
    logits: Tensor | None = None
    for number, piece in enumerate(ids.split(size, 1)):
        real = None if mask is None else mask[:, number * size : number * size + piece.shape[1]]
        found, state = model.step(piece, state, real, last_only=True, donate_state=number > 0)
        after = found[:, -1]
        logits = after if logits is None or real is None else torch.where(real.any(1, keepdim=True), after, logits)
    return logits, state  # type: ignore[return-value]


def _runs_ahead(device: torch.device) -> bool:
    """Whether a device computes while the host reads what it has found."""
    return device.type == "cuda"


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuses settings of `draw` that are not allowed."""
    check_number("temperature", temperature, least=0, advice=" (0 takes the most probable token)")
    if top_k is not None:
        check_integer("top_k", top_k, advice=", or null")
    if top_p is not None:
        check_number("top_p", top_p, above=0, most=1, advice=", or null")
