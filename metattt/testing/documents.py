"""The law about a language model around the layer: documents that are packed and padded are read as if each were
alone."""

from __future__ import annotations

import torch
from torch import Tensor

from metattt.models.language_model import LanguageModel
from metattt.testing.specimen import NotApplicable, Specimen, distance

VOCABULARY = 11


def documents_in_a_model(spec: Specimen) -> float:
    """Logits of a model of two blocks with convolutions, with padding inside and between documents. A document may be
    announced by its first token, or by the padding before it."""
    layer = spec.make()
    if not layer.causal:
        raise NotApplicable("not causal: a model that predicts the next token refuses it")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = iter([spec.make(seed=1), spec.make(seed=2)])
        model = LanguageModel(VOCABULARY, spec.dim, 2, lambda: next(layers), ffn_dim=8, causal=False).double().eval()
    # causal=False: whether the layer tells the truth is the law of causality's to say
    size = layer.optimizer.mini_batch_size
    generator = torch.Generator().manual_seed(4)
    worst = 0.0
    for announced_by_padding in (False, True):
        rows = [
            _row(lengths, announced_by_padding, generator)
            for lengths in ([size + 1, 2, size], [3, 2 * size, 0], [1, 1, 0])
        ]
        longest = max(len(ids) for ids, _, _ in rows)
        ids, mask, reset = (torch.stack([_fill(row[part], longest) for row in rows]) for part in range(3))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            # what is drawn for a sequence depends on its row: then a row is read by itself, as its documents are
            drawn = "seed" in layer(torch.zeros(1, 1, spec.dim, dtype=torch.float64))[1].task
            groups = [slice(i, i + 1) for i in range(len(rows))] if drawn else [slice(len(rows))]
            found = torch.cat([_read(model, ids[group], mask[group], reset[group]) for group in groups])
            for row, (content, real, starts) in enumerate(rows):
                number = starts.cumsum(0)
                for document in number[real].unique():
                    places = (real & (number == document)).nonzero().squeeze(1)
                    worst = max(worst, distance(found[row, places], _read(model, content[places].unsqueeze(0))[0]))
    return worst


def _read(model: LanguageModel, *given: Tensor) -> Tensor:
    """Logits, with what tasks draw drawn anew."""
    torch.default_generator.manual_seed(0)
    logits: Tensor = model(*given)
    return logits


def _row(lengths: list[int], announced_by_padding: bool, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Documents one after the other, each after one token of padding and with one inside: ids, mask and reset, `[T]`
    each."""
    mask: list[bool] = []
    reset: list[bool] = []
    for length in lengths:
        if length:
            real = [False, True, False, *[True] * (length - 1)]
            start = [announced_by_padding, not announced_by_padding, *[False] * length]
            mask, reset = mask + real, reset + start
    ids = torch.randint(VOCABULARY, (len(mask),), generator=generator)
    return ids, torch.tensor(mask), torch.tensor(reset)


def _fill(row: Tensor, length: int) -> Tensor:
    return torch.cat([row, row.new_zeros(length - len(row))])
