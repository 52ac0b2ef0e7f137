"""Gradients of processes that each saw a part of the tokens, put together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET = 2**25  # numbers that are summed in one message


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replaces every gradient by its mean over the processes of a group, in place.

    A parameter that has no gradient counts as zeros where another process has one; where none has, it stays without.

    Args:
        parameters: in the same order in every process.
        group: processes that hold the same parameters.
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if not wanted:
        return
    there = torch.tensor([one.grad is not None for one in wanted], dtype=torch.uint8, device=wanted[0].device)
    dist.all_reduce(there, dist.ReduceOp.MAX, group)
    found = [parameter for parameter, one in zip(wanted, there.tolist(), strict=True) if one]
    for parameter in found:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([parameter.grad for parameter in found if parameter.grad is not None]):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for gradient, mean in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def _buckets(gradients: list[Tensor]) -> Iterable[list[Tensor]]:
    """Consecutive gradients of one type, together at most `BUCKET` numbers (or one gradient)."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        full = sum(one.numel() for one in bucket) + gradient.numel() > BUCKET
        if bucket and (full or bucket[0].dtype != gradient.dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
