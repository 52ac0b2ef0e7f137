"""Small language models, and what each of ours obeys: calls may be cut anywhere, and padding and other documents change nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metattt.composition.compose import compose
from metattt.composition.instantiate import instantiate_model

TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}


def small_model(*overrides: str, noise: float = 0.0, dtype: torch.dtype = torch.float64) -> Any:
    """The same language model every time; with noise away from its symmetric start, where a lost state would not show."""
    torch.manual_seed(0)
    model = instantiate_model(compose(*overrides, job="language_model")).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model


def read_in_pieces(model: Any, ids: Tensor, cuts: list[int]) -> tuple[Tensor, Any]:
    """Logits of calls that begin at `cuts` and hand their state on, and the last state."""
    pieces, state = [], None
    for piece in ids.tensor_split(cuts, 1):
        logits, state = model.step(piece, state)
        pieces.append(logits)
    return torch.cat(pieces, 1), state


def documents_are_apart(model: Any, ids: Tensor, more: Tensor, mask: Tensor, reset: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """Every document, without padding, has the logits that it has alone, in one call and in two, and so have `more` tokens after it. The
    logits of one call, and those of the documents alone."""
    logits, state = model.step(ids, None, mask, reset)
    first, before = model.step(ids[:, :cut], None, mask[:, :cut], reset[:, :cut])
    second, after = model.step(ids[:, cut:], before, mask[:, cut:], reset[:, cut:])
    torch.testing.assert_close(torch.cat([first, second], 1)[mask], logits[mask], **TOLERANCE)
    later, alone = model.step(more, state)[0], []
    torch.testing.assert_close(model.step(more, after)[0], later, **TOLERANCE)
    for row, here in enumerate(mask):
        starts = reset[row, here].nonzero().flatten().tolist()
        documents = ids[row, here].tensor_split([start for start in starts if start])
        alone += [model(one[None])[0] for one in documents]
        last = len(documents[-1])
        wanted = model(torch.cat([documents[-1], more[row]])[None])[0, last:]
        torch.testing.assert_close(later[row], wanted, **TOLERANCE)
    torch.testing.assert_close(logits[mask], torch.cat(alone), **TOLERANCE)
    return logits[mask], torch.cat(alone)
