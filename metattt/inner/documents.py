"""Packed documents that begin inside a call, as kernels take them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from metattt.inner.columns import to_device
from metattt.inner.plan import Kernel
from metattt.inner.tokens import MiniBatches, Scan
from metattt.memory import where
from metattt.state import Tensors


def packed(kernel: Kernel, given: MiniBatches, reference: Scan) -> tuple[Tensor, Tensors]:
    """`kernel.scan` of `given` with documents, as the kernel takes them (`Kernel.documents`)."""
    if kernel.documents == "inside":
        return kernel.scan(given, reference)
    if kernel.documents == "row":
        return in_one_row(kernel, given, reference)
    return between_starts(given, lambda part: kernel.scan(part, reference))


def between_starts(given: MiniBatches, scan: Scan) -> tuple[Tensor, Tensors]:
    """`scan` of the tokens from each mini-batch with which a document begins to the next such."""
    assert given.begins is not None
    begun, weights, outputs = given.begins.any(0), given.weights, []
    begun[0] = True
    starts = [*begun.nonzero().flatten().tolist(), len(begun)]
    parts = given.tokens.split([(stop - start) * given.size for start, stop in pairwise(starts)])
    for start, tokens in zip(starts, parts, strict=False):
        fresh = to_device(given.begins[:, start], tokens.views.k.device)
        weights = where(fresh, given.origin, weights)
        y, weights = scan(given._replace(tokens=tokens, weights=weights, begins=None, origin={}))
        outputs.append(y)
    return torch.cat(outputs, dim=2), weights


def in_one_row(kernel: Kernel, given: MiniBatches, reference: Scan) -> tuple[Tensor, Tensors]:
    """One call of `kernel.scan` for N documents, those that an earlier call began among them. They stand one after the
    other in one row of tokens `[1, H, B·T, ...]`; weights are `[N, H, ...]`, and bounds `[N + 1]` say in tokens where
    documents begin and end."""
    assert given.begins is not None
    starts, device = given.begins.clone(), given.tokens.views.k.device
    starts[:, 0] = True
    at, (batch, count) = starts.flatten().nonzero().squeeze(1), starts.shape
    bounds = torch.cat([at, at.new_tensor([batch * count])]) * given.size
    places = given.begins.flatten()[at], at // count, starts.sum(1).cumsum(0) - 1
    fresh, sequence, last = (to_device(x, device) for x in places)
    carried = {name: w.index_select(0, sequence) for name, w in given.weights.items()}
    tokens = given.tokens.map(lambda x: x.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0))

    def one_by_one(row: MiniBatches) -> tuple[Tensor, Tensors]:
        parts = row.tokens.split(bounds.diff().tolist())
        alone = [{name: w[i : i + 1] for name, w in row.weights.items()} for i in range(len(parts))]
        found = [reference(row._replace(tokens=x, weights=w)) for x, w in zip(parts, alone, strict=True)]
        return torch.cat([y for y, _ in found], 2), {n: torch.cat([w[n] for _, w in found]) for n in row.weights}

    row = given._replace(tokens=tokens, weights=where(fresh, given.origin, carried), begins=None, origin={})
    y, after = kernel.scan(row, one_by_one, to_device(bounds, device))  # type: ignore[call-arg]
    y = y.squeeze(0).transpose(0, 1).unflatten(0, (batch, count * given.size)).transpose(1, 2)
    return y, {name: w.index_select(0, last) for name, w in after.items()}
