"""The processes that read one sequence, each a part of the time, and the messages between neighbours.

A state goes to the next process as two messages:

- the *frame*: the state with a `Slot` in the place of every tensor, pickled. It travels only when it differs from the
  frame before it of the same block; a number says so.
- the *content*: the bytes of all tensors, in one buffer.

Its derivatives come back as the content of those that there are, after a byte for each that says so.

Frames are read by the host, so they go over a group for the CPU; contents stay on their device (NCCL, or gloo on the
CPU). Both sides send and receive in the same order, so nothing is numbered. A process works while its messages leave.
"""

from __future__ import annotations

import io
import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from metattt.errors import MetaTTTError
from metattt.nested import map_tensors

MANY = 512  # messages of a process that may be on their way


class Slot(NamedTuple):
    """Stands for a tensor in a frame.

    Attributes:
        place: of the tensor in the content; one tensor that stands at several places has one.
        shape, dtype: of the tensor.
        differentiable: derivatives are expected back.
    """

    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Line:
    """The processes of one sequence in order of time, as one of them sees them.

    Args:
        mesh: one-dimensional, in order of time.
        frames: a group of the same processes that the host can use (gloo); None: that of the mesh.
        in_flight: parts of a batch that are handed on one after the other, so that processes need not wait for each
            other's whole batch; None: every sequence on its own.

    Attributes:
        waited: seconds that this process has spent on waiting for messages (where the host waits for them: not with
            NCCL).
    """

    def __init__(self, mesh: DeviceMesh, frames: dist.ProcessGroup | None = None, in_flight: int | None = None):
        self.mesh, self.in_flight, self.waited = mesh, in_flight, 0.0
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.first, self.last = self.rank == 0, self.rank == self.size - 1  # whether it reads the beginning, the end
        self.group = mesh.get_group()
        self.frames = self.group if frames is None else frames
        self.ranks = dist.get_process_group_ranks(self.group)
        self.device = torch.empty(0, device=mesh.device_type).device  # with the number of this process's own
        self._known: dict[tuple[str, object], bytes] = {}
        self._leaving: deque[tuple[Any, Tensor]] = deque()

    # -- what this process reads ---------------------------------------------------------------------------------------

    def own(self, x: Tensor) -> Tensor:
        """The part in time of `x` `[B, T, ...]` that this process reads: T / R tokens, one more where it does not
        divide.

        Raises:
            MetaTTTError: fewer tokens than processes.
        """
        if x.shape[1] < self.size:
            raise MetaTTTError(
                f"{x.shape[1]} tokens cannot be divided among trainer.time_ranks={self.size} processes: "
                "set data.context_length or trainer.time_ranks"
            )
        return x.tensor_split(self.size, dim=1)[self.rank]

    def count_parts(self, batch: int) -> int:
        """Into how many parts `batch` sequences are divided: at most one for each."""
        return batch if self.in_flight is None else min(batch, self.in_flight)

    # -- messages ------------------------------------------------------------------------------------------------------

    def send_state(self, key: object, state: Any) -> tuple[list[Slot], list[Tensor]]:
        """Sends a state to the next process, and returns its tensors with what stands for them in the frame.

        Args:
            key: of the frames that are likely to be alike, e.g. the number of a block.
            state: tensors in tuples, lists and dictionaries, with plain values.

        Raises:
            MetaTTTError: a state that keeps tensors elsewhere.
        """
        frame, slots, tensors = frame_of(state)
        dumped, to = dump(frame), self.ranks[self.rank + 1]
        again = self._known.get(("sent", key)) == dumped
        self._known["sent", key] = dumped
        self._send(torch.tensor([0 if again else len(dumped)]), to, self.frames)
        if not again:
            self._send(torch.frombuffer(bytearray(dumped), dtype=torch.uint8), to, self.frames)
        self._send_content([tensor.detach() for tensor in tensors], to)
        return slots, tensors

    def receive_frame(self, key: object) -> tuple[Any, list[Slot]]:
        """The frame of the state that the process before sends, and its slots in order."""
        source = self.ranks[self.rank - 1]
        (length,) = self._receive(torch.empty(1, dtype=torch.int64), source, self.frames).tolist()
        if length:
            dumped = self._receive(torch.empty(length, dtype=torch.uint8), source, self.frames)
            self._known["received", key] = dumped.numpy().tobytes()
        frame = pickle.loads(self._known["received", key])  # from another process of this run, as torch's own objects
        slots: dict[int, Slot] = {}
        fill(frame, lambda slot: slots.setdefault(slot.place, slot))
        return frame, [slots[place] for place in range(len(slots))]

    def receive_state(self, slots: Sequence[Slot]) -> list[Tensor]:
        """The tensors of the state that the process before sends."""
        return self._receive_content(slots, self.ranks[self.rank - 1])

    def send_back(self, derivatives: Sequence[Tensor | None]) -> None:
        """Sends derivatives by the state that came in to the process that it came from; None where there is none."""
        to = self.ranks[self.rank - 1]
        self._send(torch.tensor([one is not None for one in derivatives], dtype=torch.uint8), to, self.frames)
        self._send_content([one for one in derivatives if one is not None], to)

    def receive_back(self, slots: Sequence[Slot]) -> list[Tensor | None]:
        """Derivatives by the tensors of the state that was sent, from the process that it went to."""
        source = self.ranks[self.rank + 1]
        there = self._receive(torch.empty(len(slots), dtype=torch.uint8), source, self.frames).tolist()
        found = iter(self._receive_content([slot for slot, one in zip(slots, there, strict=True) if one], source))
        return [next(found) if one else None for one in there]

    def finish(self) -> None:
        """Waits until every message of this process has left: before other messages, and before the line is given
        up."""
        while self._leaving:
            self._leaving[0][0].wait()
            self._leaving.popleft()

    def _receive_content(self, slots: Sequence[Slot], source: int) -> list[Tensor]:
        order = _order(slots)
        buffer = torch.empty(sum(slot.nbytes for slot in slots), dtype=torch.uint8, device=self.device)
        if len(buffer):
            self._receive(buffer, source, self.group)
        pieces = buffer.split([slots[number].nbytes for number in order])
        found = dict(zip(order, pieces, strict=True))
        return [found[number].view(slot.dtype).view(slot.shape) for number, slot in enumerate(slots)]

    def _send_content(self, tensors: Sequence[Tensor], to: int) -> None:
        slots = [Slot(n, tuple(x.shape), x.dtype, False) for n, x in enumerate(tensors)]
        pieces = [tensors[number].contiguous().view(-1).view(torch.uint8) for number in _order(slots)]
        if sum(map(len, pieces)):
            self._send(torch.cat(pieces), to, self.group)

    def _send(self, content: Tensor, to: int, group: dist.ProcessGroup) -> None:
        # What leaves must stay until it has left: gloo drops a message that nobody holds, without a word. (It does not
        # tell which have left, either, so the oldest are waited for.)
        while self._leaving and (len(self._leaving) >= MANY or self._leaving[0][0].is_completed()):
            self._leaving[0][0].wait()
            self._leaving.popleft()
        self._leaving.append((dist.isend(content, to, group=group), content))

    def _receive(self, into: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
        started = time.perf_counter()
        dist.recv(into, source, group=group)
        self.waited += time.perf_counter() - started
        return into


def frame_of(state: Any) -> tuple[Any, list[Slot], list[Tensor]]:
    """A state with a slot in the place of every tensor, the slots in order, and their tensors."""
    slots: dict[int, Slot] = {}
    tensors: list[Tensor] = []

    def slot(x: Tensor) -> Any:
        if id(x) not in slots:
            slots[id(x)] = Slot(len(tensors), tuple(x.shape), x.dtype, x.requires_grad)
            tensors.append(x)
        return slots[id(x)]

    return map_tensors(slot, state), list(slots.values()), tensors


def fill(frame: Any, function: Callable[[Slot], Any]) -> Any:
    """A frame with `function` of every slot in its place."""
    return map_tensors(function, frame, Slot)


def _order(slots: Sequence[Slot]) -> list[int]:
    """Widest numbers first: then every tensor begins at a multiple of its numbers' width."""
    return sorted(range(len(slots)), key=lambda number: -slots[number].dtype.itemsize)


class _Pickler(pickle.Pickler):
    """Refuses tensors: one that is found here would travel without its derivatives."""

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, Tensor):
            raise MetaTTTError(
                "a layer's state keeps a tensor in an object of its own, and only tuples, lists and dictionaries can "
                "be sent between processes: return such a state, or leave out trainer.time_ranks"
            )


def dump(frame: Any) -> bytes:
    """A frame as bytes.

    Raises:
        MetaTTTError: a state that keeps tensors elsewhere than in tuples, lists and dictionaries.
    """
    stream = io.BytesIO()
    try:
        _Pickler(stream).dump(frame)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise MetaTTTError(f"a layer's state cannot be sent between processes: {error}") from error
    return stream.getvalue()
