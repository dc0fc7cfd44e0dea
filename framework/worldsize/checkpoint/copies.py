"""Copies of the training state in the memory of other processes.

:class:`ShardCopies` keeps the state after every n-th step, each part in two processes, so that one of them may die.
:func:`send_state` sends the whole state of one process to others of its group, from memory to memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from worldsize.checkpoint.manifest_tree import join, ordered_like, split
from worldsize.checkpoint.pieces import PieceLayout, Place, copied, gathered_layout
from worldsize.checkpoint.placements import Piece
from worldsize.collectives.peer_waits import INTERRUPTION
from worldsize.collectives.step_timer import receive, send, started, wait
from worldsize.core import StateDict
from worldsize.devices import synchronize_stream


@final
@dataclass
class Generation:
    """Holds what this process keeps of the state after one step.

    Attributes:
        number: Number of the membership that took it.
        step: The step.
        skipped: Steps up to it whose update was skipped.
        values: The plain values of the state, see :func:`worldsize.checkpoint.manifest_tree.split`.
        elements: Number of elements of all tensors of the state.
        dtypes: Those of all tensors of the state, by name.
        parts: Tensors in host memory, each of the shape of its part.
        shared: Plain values that every process keeps.
    """

    number: int
    step: int
    skipped: int
    values: Any
    elements: int
    dtypes: Mapping[str, torch.dtype]
    parts: Mapping[Piece, Tensor]
    shared: Any = None


@final
class ShardCopies:
    """The copies that one rank of a membership keeps; all ranks call :meth:`take` after the same steps.

    There are two generations of them: copies on the way to a peer do not replace those before until all have arrived
    everywhere.

    Args:
        number: Number of the membership.
        group: A gloo group of all ranks, in which nothing else communicates while training; None: one process.
        place: Where this rank is.
        device: Device of the state.
        before: What the membership before has left; it is kept until the first generation is complete.
        layout: Who holds what, if it is known already.
        at: Called at named points, at which tests inject faults.
    """

    def __init__(
        self,
        number: int,
        group: ProcessGroup | None,
        place: Place,
        *,
        device: torch.device,
        before: Generation | None = None,
        layout: PieceLayout | None = None,
        at: Callable[[str], None] = lambda point: None,
    ) -> None:
        self._at = at
        self._number, self._group, self._place, self._device = number, group, place, device
        self._rank = group.rank() if group else 0
        self._complete: tuple[Generation, _Buffers | None] | None = (before, None) if before else None
        self._flight: tuple[Generation, _Buffers, Work | None] | None = None
        self._layout = layout
        self.is_unused = True
        """Whether nothing has been taken in this membership."""
        self._free: list[_Buffers] = []

    @property
    def newest(self) -> Generation | None:
        """The newest generation of which this process has its own part."""
        newest = self._flight or self._complete
        return newest[0] if newest else None

    def take(self, state: StateDict, *, step: int, skipped: int, shared: Any = None) -> None:
        """Copy this rank's part of the state after ``step``, and start to send what no other rank holds.

        Before, it waits until the generation before is complete everywhere.
        """
        self._finish()
        tensors, values = split({part: child for part, child in state.items() if part != "strategy"})
        if self._layout is None or self._layout.dtypes.keys() != tensors.keys():
            self._layout = gathered_layout(tensors, self._group, self._place)
        self._free = [each for each in self._free if each.layout is self._layout]
        buffers = self._free.pop() if self._free else _Buffers(self._layout, self._rank, self._device)
        buffers.fill(tensors)
        elements = sum(tensor.numel() for tensor in tensors.values())
        dtypes = self._layout.dtypes
        generation = Generation(self._number, step, skipped, values, elements, dtypes, buffers.own, shared)
        self._flight = (generation, buffers, buffers.sent(self._group) if self._group else None)
        self.is_unused = False
        self._at("copies:sent")

    def left(self) -> list[Generation]:
        """Return what this process has of each generation, the newest first, once its membership has ended."""
        kept = []
        if self._flight is not None:
            generation, buffers, work = self._flight
            if work is None or (work.is_completed() and _has_succeeded(work)):
                generation.parts = buffers.all
            kept.append(generation)
        return [*kept, *([self._complete[0]] if self._complete else [])]

    def close(self) -> None:
        """Wait until the copies on the way have arrived everywhere."""
        self._finish()

    def _finish(self) -> None:
        if self._flight is None:
            return
        generation, buffers, work = self._flight
        if self._group is not None:
            wait(work)
            wait(dist.all_reduce(torch.zeros(1), group=self._group, async_op=True))  # all have got here
        generation.parts = buffers.all
        before, self._complete, self._flight = self._complete, (generation, buffers), None
        if before is not None and before[1] is not None:
            self._free.append(before[1])


@final
class _Buffers:
    """The memory of one generation: this rank's own parts, and the copies that it has received.

    What is to be sent comes first, so that it is sent from where it was copied to.
    """

    def __init__(self, layout: PieceLayout, rank: int, device: torch.device) -> None:
        self.layout = layout
        sole, kept = layout.sole(rank), layout.kept(rank)
        theirs = layout.sole(layout.peer_before(rank)) if layout.peer(rank) != rank else []
        pinned = device.type == "cuda"
        self._own = torch.empty(layout.placed([*sole, *kept])[1], dtype=torch.uint8, pin_memory=pinned)
        self._received = torch.empty(layout.placed(theirs)[1], dtype=torch.uint8)
        self._sent = layout.placed(sole)[1]  # bytes
        self._peers, self._device = (layout.peer(rank), layout.peer_before(rank)), device
        self.own = layout.views([*sole, *kept], self._own)
        self.all = {**self.own, **layout.views(theirs, self._received)}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts of ``tensors``, of any shapes."""
        copied(tensors, self.own)
        synchronize_stream(self._device)

    def sent(self, group: ProcessGroup) -> Work:
        """Start to send this rank's copies to its peer, and to receive those of another."""
        to, from_ = self._peers
        sent, received = [0] * group.size(), [0] * group.size()
        sent[to], received[from_] = self._sent, len(self._received)
        own = self._own[: self._sent]
        return started(dist.all_to_all_single(self._received, own, received, sent, group=group, async_op=True))


def _has_succeeded(work: Work) -> bool:
    try:
        work.wait()
    except RuntimeError:
        return False
    return True


Facts = Mapping[str, Any]
_Form = tuple[str, torch.dtype, Sequence[int]]  # name, type and shape of a tensor

_MESSAGE = 16 << 20  # bytes of small tensors that are sent together


def send_state(
    state: StateDict, facts: Facts, receivers: Sequence[int], group: ProcessGroup, device: torch.device
) -> None:
    """Send ``state``, whose tensors this process holds whole, and plain ``facts`` to ranks of ``group``, one by one.

    Tensors go by way of ``device``, which the group can reach: those of a model on a GPU are not all there.
    """
    tensors, values = split(state)
    forms = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    for receiver in receivers:
        head = [values, forms, dict(facts)]
        INTERRUPTION.call(partial(dist.send_object_list, head, group=group, group_dst=receiver))
        for names in _messages(forms):
            parts = [tensors[name].detach().to(device).flatten() for name in names]
            send(parts[0] if len(parts) == 1 else torch.cat(parts), group, to=receiver)


def receive_state(
    template: StateDict, sender: int, group: ProcessGroup, device: torch.device
) -> tuple[StateDict, Facts]:
    """Receive what rank ``sender`` of ``group`` sends with :func:`send_state`; keys are in the order of ``template``.

    Returns:
        The state, with each tensor where that of ``template`` is, and the facts.
    """
    places = {name: tensor.device for name, tensor in split(template)[0].items()}
    received: list[Any] = [None, None, None]
    INTERRUPTION.call(partial(dist.recv_object_list, received, group=group, group_src=sender))
    values, forms, facts = received
    tensors: dict[str, Tensor] = {}
    kinds = {name: (dtype, shape) for name, dtype, shape in forms}
    for names in _messages(forms):
        sizes = [math.prod(kinds[name][1]) for name in names]
        flat = torch.empty(sum(sizes), dtype=kinds[names[0]][0], device=device)
        receive(flat, group, source=sender)
        for name, part in zip(names, flat.split_with_sizes(sizes), strict=True):
            own = part if len(names) == 1 else part.clone()  # else each would keep the whole message in memory
            tensors[name] = own.view(kinds[name][1]).to(places.get(name, device))
    return ordered_like(join(values, tensors), template), facts


def _messages(forms: Sequence[_Form]) -> Iterator[list[str]]:
    """Yield the names of tensors of one type that are sent together, since each message costs some time."""
    for dtype, same in groupby(sorted(forms, key=lambda form: str(form[1])), key=lambda form: form[1]):
        names, size = list[str](), 0
        for name, _, shape in same:
            if names and size + math.prod(shape) * dtype.itemsize > _MESSAGE:
                yield names
                names, size = [], 0
            names.append(name)
            size += math.prod(shape) * dtype.itemsize
        yield names
