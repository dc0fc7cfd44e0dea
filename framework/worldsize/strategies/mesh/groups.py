"""The process groups of a mesh, beyond those of all ranks, and the messages between the stages of a pipeline.

Waits for messages end when the gang does. When a wait for a message of gloo times out, gloo closes all connections of
the group, so that nobody can look in between whether the gang has ended; the wait for a collective can be tried
again. So a message is a broadcast in a group of two. Tensors may have any shape, since the last batch of an
evaluation is smaller than the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from worldsize.collectives.step_timer import connect, started, wait
from worldsize.core import RunContext
from worldsize.devices import backend_for
from worldsize.strategies.mesh.layout import AXES, Layout, along

_MESHES = count()  # torch caches what it knows of a mesh, for all of the same shape and names


@final
@dataclass(frozen=True)
class MeshGroups:
    """Makes the groups of one rank; ``interruptible``: waits in them end when the gang does, which goes on in others.

    All ranks of the mesh must call the same methods in the same order.
    """

    context: RunContext
    layout: Layout
    interruptible: bool

    @property
    def coordinate(self) -> dict[str, int]:
        """The coordinate of this rank on each axis."""
        return self.layout.coordinate(self.context.world.rank)

    def mesh(self) -> DeviceMesh:
        """Make the mesh of all ranks."""
        number = str(next(_MESHES)) if self.interruptible else ""
        names = tuple(f"{axis}{number}" for axis in AXES)
        sizes, strides = zip(*((self.layout[axis], self.layout.strides[axis]) for axis in AXES), strict=True)
        ranks = torch.arange(self.layout.size, device="cpu").as_strided(sizes, strides)
        with self.context.making_groups():
            mesh = DeviceMesh(self.context.world.device.type, ranks, mesh_dim_names=names)
        for axis in AXES:
            self._bound(along(mesh, axis).get_group())
        return mesh

    def edges(self, *, is_ring: bool) -> Edges | None:
        """Make the groups in which neighbour stages send each other messages; None: other messages are as good.

        ``is_ring``: ranks have several stages, so that the last one sends to the first one, too.
        """
        if not (self.interruptible and backend_for(dist.get_backend(), self.context.world.device.type) == "gloo"):
            return None
        groups = {pair: self.of(sorted(pair)) for pair in neighbours(self.layout["pipeline"], is_ring=is_ring)}
        return Edges(self.coordinate["pipeline"], {pair: each for pair, each in groups.items() if each is not None})

    def of(self, ranks: Sequence[int]) -> ProcessGroup | None:
        """Make the group of these pipeline ranks at this rank's coordinate on the other axes; None: it is no member.

        Only members create the group. All ranks must create the same number of groups in this way, since torch names
        groups by a counter: a rank that is not a member creates a group of itself.
        """
        own = self.context.world.rank
        members = self.layout.line("pipeline", self.coordinate, ranks)
        with self.context.making_groups():
            group = dist.new_group(members if own in members else [own], use_local_synchronization=True)
        self._bound(cast("ProcessGroup", group))
        return cast("ProcessGroup", group) if own in members else None

    def _bound(self, group: ProcessGroup) -> None:
        """Let waits in a new group of gloo end as early as those in that of all ranks; torch gives it half an hour."""
        everyone, cpu = self.context.world.group, torch.device("cpu")
        if self.interruptible and everyone is not None and backend_for(dist.get_backend(everyone), "cpu") == "gloo":
            dist.set_timeout(everyone._get_backend(cpu).options._timeout, group)
            connect([group])


def neighbours(pipeline: int, *, is_ring: bool) -> Iterator[tuple[int, int]]:
    """Yield the pairs of ranks of a pipeline of which the first one sends to the second, forward and backward.

    ``is_ring``: the stage after the last rank's is on the first rank again.
    """
    for rank in range(pipeline if is_ring and pipeline > 2 else pipeline - 1):
        yield rank, (rank + 1) % pipeline
        yield (rank + 1) % pipeline, rank


@final
@dataclass(frozen=True)
class Edges:
    """Messages of pipeline rank ``rank``; ``groups``: by the ranks that send and receive, a group of the two.

    Both ranks must start the messages of a group in the same order.
    """

    rank: int
    groups: Mapping[tuple[int, int], ProcessGroup]

    def start(self, tensor: Tensor, source: int, target: int) -> Work:
        """Start to send ``tensor``, of any shape, if this is rank ``source``, or to fill it if it is ``target``."""
        first = 0 if source < target else 1  # the ranks of a group are in ascending order
        return started(dist.broadcast(tensor, group=self.groups[source, target], group_src=first, async_op=True))

    def messages(self, messages: list[dist.P2POp]) -> list[dist.P2POp]:
        """Return these messages between stages, to be sent and waited for in this way."""
        return [_Message(each, self) for each in messages]


@final
class _Message(dist.P2POp):
    def __new__(cls, message: dist.P2POp, edges: Edges) -> _Message:
        made = super().__new__(cls, message.op, message.tensor)
        assert isinstance(made, cls)
        return made

    def __init__(self, message: dist.P2POp, edges: Edges) -> None:
        sends, peer = message.op is dist.isend, message.group_peer
        pair = (edges.rank, peer) if sends else (peer, edges.rank)
        start: Any = partial(_started, edges, pair)  # what it returns need only have wait()
        super().__init__(start, message.tensor, message.peer, message.group, message.tag)


def _started(edges: Edges, pair: tuple[int, int], tensor: Tensor, **_: Any) -> _Patient:
    message = tensor.contiguous()  # gloo takes no other; torch may allocate what it receives with any strides
    receives = pair[1] == edges.rank and message is not tensor
    return _Patient(edges.start(message, *pair), message, tensor if receives else None)


@final
@dataclass(frozen=True)
class _Patient:
    """A message on its way; ``filled``: the tensor to copy it to once it is there, if it is not that tensor itself."""

    work: Work
    message: Tensor
    filled: Tensor | None

    def wait(self) -> None:
        wait(self.work)
        if self.filled is not None:
            self.filled.detach().copy_(self.message)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
_HEADER = 10  # dtype, dimensions, and up to eight sizes


@final
@dataclass(frozen=True)
class Passing:
    """Passes tensors along the ranks of ``group``; ``edges``: send them, if waits are to end when the gang does."""

    group: ProcessGroup
    edges: Edges | None
    device: torch.device

    def send(self, tensor: Tensor, to: int) -> None:
        """Send ``tensor``, of any shape up to 8 dimensions, to rank ``to``, which must :meth:`receive`."""
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[0], header[1] = _DTYPES.index(tensor.dtype), tensor.ndim
        header[2 : 2 + tensor.ndim] = torch.tensor(tensor.shape)
        for part in (header.to(tensor.device), tensor.contiguous()):
            if self.edges:
                wait(self.edges.start(part, self.group.rank(), to))
            else:
                dist.send(part, group=self.group, group_dst=to)

    def receive(self, source: int) -> Tensor:
        """Receive the tensor that rank ``source`` sends by :meth:`send`, in its shape."""
        header = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
        self._fill(header, source)
        dtype, dimensions, *sizes = header.tolist()
        tensor = torch.empty(sizes[:dimensions], dtype=_DTYPES[dtype], device=self.device)
        self._fill(tensor, source)
        return tensor

    def _fill(self, tensor: Tensor, source: int) -> None:
        if self.edges:
            wait(self.edges.start(tensor, source, self.group.rank()))
        else:
            dist.recv(tensor, group=self.group, group_src=source)
