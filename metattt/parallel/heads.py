"""Heads divided among processes: every process has some heads' projections, gates, weights and states.

Tensor parallelism in torch's own terms: `parallelize_module` with a style for the sequence layer (`HeadParallel`) and
torch's column and row styles for the SwiGLU. Parameters become DTensors that are divided over the axis of the mesh;
what is whole (norms, embedding, head) is the same in every process. A block costs two sums over the processes in each
direction, and one more of two numbers a token for an output norm, which mixes heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from metattt.errors import MetaTTTError
from metattt.functional import replica, with_values
from metattt.inner.causality import same, visible
from metattt.inner.packing import Packing
from metattt.layer import TTTLayer
from metattt.output import HeadRMSNorm
from metattt.state import State

COUNT = 6  # tokens that a divided layer is tried on
LOW_RANK = ("optimizer.down", "optimizer.channels.down", "task.rate_down")  # first maps of two, which heads share


def divide_heads(block: nn.Module, mesh: DeviceMesh) -> None:
    """Divides a block of a language model in place.

    Args:
        block: with a `layer` and a SwiGLU `ffn`; the same in every process.
        mesh: one-dimensional.

    Raises:
        MetaTTTError: a layer whose heads cannot be divided so.
    """
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {"layer": HeadParallel(), "ffn.gate": columns, "ffn.up": columns, "ffn.down": rows}
    parallelize_module(block, mesh, plan)


class HeadParallel(ParallelStyle):
    """The style of a `TTTLayer`: each process reads with H / P of its heads.

    Whether the parts of a layer can be divided is found out on a few tokens: the heads of this process alone must
    answer as they do among all.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, TTTLayer) or not runs_alike(module):
            raise MetaTTTError(
                f"{type(module).__name__} has no heads that could be divided: set trainer.tensor_ranks=1"
            )
        size = device_mesh.size()
        if module.num_heads % size:
            raise MetaTTTError(
                f"num_heads={module.num_heads} cannot be divided among trainer.tensor_ranks={size} processes: set one "
                "of them"
            )
        part, axes = some_heads(module, size), {name: axis_of(module, name, p) for name, p in module.named_parameters()}
        check_heads(module, part, axes, device_mesh)
        for name, parameter in list(module.named_parameters()):
            owner, _, key = name.rpartition(".")
            axis = axes[name]
            whole = distribute_tensor(parameter.detach(), device_mesh, [Replicate() if axis is None else Shard(axis)])
            divided = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            module.get_submodule(owner).register_parameter(key, divided)
        module.__class__ = DividedLayer
        module.__dict__["division"] = (part, axes, device_mesh)
        return module


def runs_alike(layer: TTTLayer) -> bool:
    """Whether a layer runs as a `TTTLayer` does: its class may have changed the steps of `run`, not `run` itself."""
    kind = type(layer)
    return kind.forward is TTTLayer.forward and kind.run is TTTLayer.run


class DividedLayer(TTTLayer):
    """A layer of which this process has some heads. Its state is that of these heads."""

    def run(
        self, x: Tensor, state: State, packing: Packing | None = None, donate_state: bool = False
    ) -> tuple[Tensor, State]:
        """As `TTTLayer.run`; `x` and the outputs are those of all heads, the same in every process."""
        local, x = self.local(x)
        return local.run(x, state, packing, donate_state)

    def check_state(self, x: Tensor, state: Any) -> None:
        self.__dict__["division"][0].check_state(x, state)

    def local(self, x: Tensor) -> tuple[TTTLayer, Tensor]:
        """The layer with this process's heads, and its tokens: derivatives by both are summed over the processes."""
        part, axes, mesh = self.__dict__["division"]
        group = mesh.get_group()
        values = {name: p.to_local() for name, p in self.named_parameters() if isinstance(p, DTensor)}
        for name in values:
            if axes[name] is None and name != "out.bias":  # each process has the derivatives of its own heads' use
                values[name] = _Enter.apply(values[name], group)
        local = with_values(part, values)
        for own, module in zip(local.modules(), self.modules(), strict=True):  # what may change during a run
            own.training = module.training
            if getattr(module, "follows_base_lr", False):
                own.__dict__["scale"] = module.scale
        if isinstance(norm := local.norm, nn.LayerNorm | nn.RMSNorm) and not isinstance(norm, HeadRMSNorm):
            local.norm = NormOverHeads(values["norm.weight"], values.get("norm.bias"), norm.eps, group)
        local.out = SumOverHeads(values["out.weight"], values.get("out.bias"), group)
        return local, _Enter.apply(x, group)


class NormOverHeads(nn.Module):
    """LayerNorm over the features of all heads, of which this process has some; without a bias, RMSNorm."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float | None, group: dist.ProcessGroup):
        super().__init__()
        assert eps is not None
        self.values, self.eps, self.group = (weight, bias), eps, group

    def forward(self, y: Tensor) -> Tensor:
        """`y` `[B, T, D / P]` to the same."""
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        count = y.shape[-1] * dist.get_world_size(self.group)
        weight, bias = self.values
        centred = wide if bias is None else wide - _sum_for_all(wide.sum(-1, keepdim=True), self.group) / count
        variance = _sum_for_all(centred.square().sum(-1, keepdim=True), self.group) / count
        normed = centred * torch.rsqrt(variance + self.eps) * weight
        return (normed if bias is None else normed + bias).to(y.dtype)


class SumOverHeads(nn.Module):
    """The output projection: a product of this process's features, summed over the processes."""

    def __init__(self, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup):
        super().__init__()
        self.values, self.group = (weight, bias), group

    def forward(self, y: Tensor) -> Tensor:
        """`y` `[B, T, D / P]` to `[B, T, D]`."""
        weight, bias = self.values
        out: Tensor = _Leave.apply(nn.functional.linear(y, weight), self.group)
        return out if bias is None else out + bias


def axis_of(layer: TTTLayer, name: str, parameter: Tensor) -> int | None:
    """The axis along which a parameter's heads lie; None: all heads share it."""
    if name.startswith("out."):
        return 1 if name == "out.weight" else None
    shared_scale = name == "norm.weight" and isinstance(layer.norm, HeadRMSNorm)
    if name in LOW_RANK or name.startswith("gate.0.") or shared_scale:
        return None  # what all heads share, though its first axis may be H by chance
    return 0 if parameter.shape[0] in (layer.num_heads, layer.dim) else None


def some_heads(layer: TTTLayer, size: int) -> TTTLayer:
    """A layer with one `size`-th of the heads, without values."""
    part, heads = replica(layer), layer.num_heads // size
    for module in (part, *part.task.modules(), *part.optimizer.modules()):  # (a learner's heads are its own)
        for count in ("num_heads", "groups"):  # groups: heads of k and v
            if module.__dict__.get(count) == layer.num_heads:
                module.__dict__[count] = heads
    learner = part.learner
    learner.__dict__["shapes"] = {name: (heads, *shape[1:]) for name, shape in learner.shapes.items()}
    weights = {name: (heads, *shape[1:]) for name, shape in layer.plan.weights.items()}
    part.__dict__["_plan"] = replace(layer.plan, weights=weights, shapes={})
    part._plan.basis = part._basis()
    return part


def check_heads(layer: TTTLayer, part: TTTLayer, axes: Mapping[str, int | None], mesh: DeviceMesh) -> None:
    """Refuses a layer whose heads answer otherwise without the others.

    Raises:
        MetaTTTError: this process's heads do.
    """
    if any(parameter.is_meta for parameter in layer.parameters()):
        return
    rank, size = mesh.get_local_rank(), mesh.size()
    values = {name: visible(parameter.detach()) for name, parameter in layer.named_parameters()}
    own = {
        name: value if axes[name] is None else value.tensor_split(size, dim=axes[name] or 0)[rank]
        for name, value in values.items()
    }
    like = next(iter(values.values()))
    x = torch.randn(2, COUNT, layer.dim, generator=torch.Generator().manual_seed(0)).to(like)
    try:
        whole, few = (_answers(with_values(one, given), x) for one, given in ((layer, values), (part, own)))
        alike = same(whole.tensor_split(size, dim=1)[rank], few)
    except (RuntimeError, MetaTTTError, KeyError, ValueError):  # shapes that do not fit each other
        alike = False
    everywhere = torch.tensor([alike], dtype=torch.uint8, device=like.device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, mesh.get_group())
    if not everywhere.item():
        raise MetaTTTError(
            f"the heads of {type(layer.task).__name__}, {type(layer.learner).__name__} and "
            f"{type(layer.optimizer).__name__} cannot be divided among processes: some heads give other outputs "
            "without the rest; set trainer.tensor_ranks=1"
        )


@torch.no_grad()
def _answers(layer: TTTLayer, x: Tensor) -> Tensor:
    """What the heads answer, `[B, H, T, d]`."""
    devices = [x.device] if x.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        state = layer.start(x)
        call = layer.call(x, state)
        views, gates, state = layer.tokens(x, state, call.ctx)
        return layer.inner_loop(views, gates, state, call)[0]


# -- into the region where processes have different heads, and out of it -----------------------------------------------


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class _Enter(torch.autograd.Function):
    """The same in every process; derivatives are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    """The sum over the processes, which goes on as the same value in each; derivatives are its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _sum_for_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the processes, which each uses for values of its own: derivatives are summed, too."""
    found: Tensor = _Leave.apply(_Enter.apply(x, group), group)
    return found
