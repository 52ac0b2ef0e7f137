"""What else is timed: peers as their users call them, the device's ceilings, and ours and the best of the peers in
turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from metattt.bench.gpu.calls import Way, in_milliseconds, timed_call, under
from metattt.bench.gpu.child import reason
from metattt.bench.gpu.problems import DTYPES
from metattt.bench.gpu.subjects import load
from metattt.bench.peers import Peer, forget_autotuning, peer
from metattt.bench.timing import on_device, ratios

COPIED = {"cuda": 2**30, "cpu": 2**20}  # bytes of the copy that is the ceiling of bandwidth
SIDE = {"cuda": 8192, "cpu": 128}  # of the matrices whose product is the ceiling of the matrix units


class PeerTimes:
    """A peer, by its name in `metattt.bench.peers`."""

    def __init__(self, name: str):
        self.name = name

    def way(self, case: Mapping[str, Any], device: str, backward: bool = True) -> Way:
        """One timed call. What its user has anyway is made before: inputs, and the cotangent of the outputs."""
        known = peer(self.name, case["size"])
        shape = (case["tokens"] // case["length"], case["length"], case["heads"], case["width"])
        torch.manual_seed(0)
        inputs = known.inputs(shape, DTYPES[case["dtype"]], device)
        cotangent = torch.randn(shape, device=device, dtype=DTYPES[case["dtype"]])
        return partial(_step, known, inputs, [x for x in inputs if x.requires_grad], cotangent, backward)

    def measure(self, kind: str, case: dict[str, Any], device: str) -> dict[str, Any]:
        """As `subjects.Subject`, for the kind `time`."""
        way = self.way(case, device, case["pass"] != "forward")
        forget_autotuning()
        return timed_call(way, case["rounds"], device)


def _step(known: Peer, inputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangent: Tensor, backward: bool) -> object:
    with torch.set_grad_enabled(backward):
        o = known.call(*inputs)
        return torch.autograd.grad(o, leaves, cotangent) if backward else o


class Ceilings:
    """What the device can do at most: bytes read and written by a copy that no cache holds, and operations of a large
    product."""

    def measure(self, kind: str, case: dict[str, Any], device: str) -> dict[str, Any]:
        """As `subjects.Subject`."""
        size, side = COPIED[device], SIDE[device]
        source = torch.empty(size, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        a, b = (torch.randn(side, side, device=device, dtype=DTYPES[case["dtype"]]) for _ in range(2))
        ways: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source), "product": lambda: a @ b}
        took = on_device(ways, case["rounds"], device, warmup=3)
        return {
            "copied, GiB": size / 2**30,
            "copy, GB/s": 2 * size / min(took["copy"].device) / 1e9,
            "product, TFLOP/s": 2 * side**3 / min(took["product"].device) / 1e12,
        }


class InTurn:
    """Our operations with the launches that tuning found, and peers, round by round in one process."""

    def measure(self, kind: str, case: dict[str, Any], device: str) -> dict[str, Any]:
        """As `subjects.Subject`. What fails when it is tried is left out, and the reason is recorded."""
        ways: dict[str, Way] = {}
        failed: dict[str, str] = {}
        for name in (*case["operations"], *case["peers"]):
            try:
                way = load(name).way(case, device)
                for variant in case["launches"].get(name, ()):
                    way = under(load(name).variants(case)[variant], way)
                way()
                ways[name] = way
            except Exception as error:  # the others can be timed all the same
                failed[name] = reason(error)
        took = on_device(ways, case["rounds"], device)
        found = {}
        for name, times in took.items():
            found[name] = in_milliseconds(times)
            for ours in (one for one in case["operations"] if one in took):
                ratio = ratios(times.device, took[ours].device)
                found[name] |= {f"times {ours}, {key}": value for key, value in ratio._asdict().items()}
        return {"ways": found, "failed": failed}


ceilings, in_turn = Ceilings(), InTurn()
