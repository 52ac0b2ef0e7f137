"""Gradients of processes that each saw a part of the tokens, put together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

BUCKET = 2**25  # numbers that are summed in one message


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replaces every gradient by its mean over the processes of a group, in place.

    A parameter that has no gradient counts as zeros where another process has one; where none has, it stays without.
    Of a parameter that is divided among other processes (a DTensor), the parts at the same place are put together.

    Args:
        parameters: in the same order in every process.
        group: processes that hold the same parameters.
    """
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if not wanted:
        return
    device = _local(wanted[0]).device
    there = torch.tensor([parameter.grad is not None for parameter in wanted], dtype=torch.uint8, device=device)
    dist.all_reduce(there, dist.ReduceOp.MAX, group)
    found = [parameter for parameter, one in zip(wanted, there.tolist(), strict=True) if one]
    for parameter in found:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([_local(parameter.grad) for parameter in found if parameter.grad is not None]):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for gradient, mean in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def several_meshes(parameters: Iterable[Tensor]) -> bool:
    """Whether parameters are divided in different ways, so that torch does not take them together."""
    return len({x.device_mesh if isinstance(x, DTensor) else None for x in parameters}) > 1


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients together, however each is divided among processes."""
    sums: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, Tensor] = {}
    for gradient in gradients:
        key = (gradient.device_mesh, tuple(gradient.placements)) if isinstance(gradient, DTensor) else None
        square = _local(gradient).float().square().sum()
        sums[key] = sums[key] + square if key in sums else square
    for key, square in sums.items():
        mesh, placements = ((), ()) if key is None else key
        for axis, placement in enumerate(placements):
            if not placement.is_replicate():  # also what is divided twice along one axis, which is no plain shard
                assert isinstance(mesh, DeviceMesh)
                dist.all_reduce(square, group=mesh.get_group(axis))
    return torch.stack(list(sums.values())).sum().sqrt()


def clip_norm(parameters: Iterable[nn.Parameter], largest: float) -> None:
    """Scales gradients that are divided in different ways so that their norm is at most `largest`, in place."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    factor = (largest / (total_norm(gradients) + 1e-6)).clamp(max=1)  # torch's own
    for gradient in gradients:
        _local(gradient).mul_(factor)


def _local(x: Tensor) -> Tensor:
    """The part of a tensor that is here."""
    return x.to_local() if isinstance(x, DTensor) else x


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
