"""Process groups of a mesh, and messages between pipeline stages.

Waits for messages end with the gang's membership. If a wait for a gloo point-to-point message times out, gloo closes
all connections of the group, so the wait cannot be split to check the membership; a wait for a collective can be
retried. Therefore, messages are broadcasts in groups of two. Tensors may have any shape, since the last batch of an
evaluation may be smaller than the others.
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
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from worldsize.collectives.group import Collective, connect_groups, start_collective
from worldsize.core import RunContext
from worldsize.devices import backend_for
from worldsize.strategies.mesh.layout import AXES, Layout, get_submesh

_MESHES = count()  # unique mesh names: torch caches properties of a mesh by its shape and names


@final
@dataclass(frozen=True)
class MeshGroups:
    """Creates the process groups of one rank.

    All ranks must call the same methods in the same order. ``interruptible``: whether waits in the groups end with the
    gang's membership.
    """

    context: RunContext
    layout: Layout
    interruptible: bool

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's coordinate on each axis."""
        return self.layout.coordinate(self.context.world.rank)

    def create_mesh(self, *, merges_context: bool, copies: int = 1) -> DeviceMesh:
        """Create the device mesh of all ranks.

        ``merges_context``: whether the mesh's data axis includes the context axis. ``copies``: size of an additional
        axis "replicate", which is split off the data axis.
        """
        number = str(next(_MESHES)) if self.interruptible else ""
        sizes, strides = zip(*((self.layout[axis], self.layout.strides[axis]) for axis in AXES), strict=True)
        ranks, axes = torch.arange(self.layout.size, device="cpu").as_strided(sizes, strides), list(AXES)
        if merges_context:
            axes.remove("context")
            place = axes.index("data")
            ranks = ranks.flatten(place, place + 1).sort(place).values  # process groups sort their ranks
        if copies > 1:
            place = axes.index("data")
            axes.insert(place, "replicate")
            ranks = ranks.unflatten(place, (copies, -1))  # type: ignore[no-untyped-call]
        names = tuple(f"{axis}{number}" for axis in axes)
        with self.context.making_groups():
            mesh = DeviceMesh(self.context.world.device.type, ranks, mesh_dim_names=names)
        for axis in axes:
            self._connect_group(get_submesh(mesh, axis).get_group())
        return mesh

    def create_context_group(self) -> ProcessGroup | None:
        """Create the group of ranks that share sequences; None for a context axis of one rank."""
        if self.layout["context"] == 1:
            return None
        ranks = self.layout.list_line_ranks("context", self.coordinate, range(self.layout["context"]))
        with self.context.making_groups():
            group = cast("ProcessGroup", dist.new_group(ranks, use_local_synchronization=True))
        self._connect_group(group)
        return group

    def create_edges(self, *, is_ring: bool) -> Edges | None:
        """Create groups for messages between stages; return None if they need not be interruptible.

        Without these groups, stages use torch's own messages (``dist.P2POp``). ``is_ring``: whether ranks have several
        stages, so that the last rank also sends to the first one.
        """
        if not (self.interruptible and backend_for(dist.get_backend(), self.context.world.device.type) == "gloo"):
            return None
        groups = {
            pair: self.create_group(sorted(pair)) for pair in neighbours(self.layout["pipeline"], is_ring=is_ring)
        }
        return Edges(self.coordinate["pipeline"], {pair: each for pair, each in groups.items() if each is not None})

    def create_group(self, ranks: Sequence[int]) -> ProcessGroup | None:
        """Create a group of pipeline ranks at this rank's other coordinates; None on non-members.

        Only members create the group. torch names groups by a counter, so all ranks must create the same number of
        them: other ranks create a group of only themselves.
        """
        own = self.context.world.rank
        members = self.layout.list_line_ranks("pipeline", self.coordinate, ranks)
        with self.context.making_groups():
            group = dist.new_group(members if own in members else [own], use_local_synchronization=True)
        self._connect_group(cast("ProcessGroup", group))
        return cast("ProcessGroup", group) if own in members else None

    def _connect_group(self, group: ProcessGroup) -> None:
        """Connect a new gloo group, with the default group's timeout instead of half an hour."""
        everyone, cpu = self.context.world.group, torch.device("cpu")
        if self.interruptible and everyone is not None and backend_for(dist.get_backend(everyone), "cpu") == "gloo":
            dist.set_timeout(everyone._get_backend(cpu).options._timeout, group)
            connect_groups([group])


def neighbours(pipeline: int, *, is_ring: bool) -> Iterator[tuple[int, int]]:
    """Yield the (sender, receiver) pairs of pipeline ranks, forward and backward.

    ``is_ring``: whether the last rank's stage can be followed by one on the first rank.
    """
    for rank in range(pipeline if is_ring and pipeline > 2 else pipeline - 1):
        yield rank, (rank + 1) % pipeline
        yield (rank + 1) % pipeline, rank


@final
@dataclass(frozen=True)
class Edges:
    """Messages of pipeline rank ``rank``, sent as broadcasts in groups of two ranks.

    ``groups``: keyed by (sender, receiver). Both ranks must start the messages of a group in the same order.
    """

    rank: int
    groups: Mapping[tuple[int, int], ProcessGroup]

    def start(self, tensor: Tensor, source: int, target: int) -> Collective:
        """Start sending ``tensor``, of any shape, on rank ``source`` and receiving it on ``target``."""
        first = 0 if source < target else 1  # the ranks of a group are in ascending order
        return start_collective(dist.broadcast, tensor, group=self.groups[source, target], group_src=first)

    def messages(self, messages: list[dist.P2POp]) -> list[dist.P2POp]:
        """Convert torch's messages between stages to interruptible ones."""
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
        send: Any = partial(_start_message, edges, pair)  # the returned work only needs wait()
        super().__init__(send, message.tensor, message.peer, message.group, message.tag)


def _start_message(edges: Edges, pair: tuple[int, int], tensor: Tensor, **_: Any) -> _Patient:
    message = tensor.contiguous()  # gloo requires it; torch may allocate receive buffers with any strides
    receives = pair[1] == edges.rank and message is not tensor
    return _Patient(edges.start(message, *pair), message, tensor if receives else None)


@final
@dataclass(frozen=True)
class _Patient:
    """A message in flight; ``filled``: the tensor to copy it to, unless received in place."""

    work: Collective
    message: Tensor
    filled: Tensor | None

    def wait(self) -> None:
        self.work.wait()
        if self.filled is not None:
            self.filled.detach().copy_(self.message)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
_HEADER = 10  # elements: dtype, number of dimensions, and up to eight sizes


@final
@dataclass(frozen=True)
class Passing:
    """Sends and receives tensors in ``group``, or over ``edges`` if waits are interruptible."""

    group: ProcessGroup
    edges: Edges | None
    device: torch.device

    def send(self, tensor: Tensor, to: int) -> None:
        """Send ``tensor``, with at most 8 dimensions, to rank ``to``, which calls :meth:`receive`."""
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[0], header[1] = _DTYPES.index(tensor.dtype), tensor.ndim
        header[2 : 2 + tensor.ndim] = torch.tensor(tensor.shape)
        for part in (header.to(tensor.device), tensor.contiguous()):
            if self.edges:
                self.edges.start(part, self.group.rank(), to).wait()
            else:
                dist.send(part, group=self.group, group_dst=to)

    def receive(self, source: int) -> Tensor:
        """Receive the tensor that rank ``source`` sends with :meth:`send`, in its shape."""
        header = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
        self._receive_into(header, source)
        dtype, dimensions, *sizes = header.tolist()
        tensor = torch.empty(sizes[:dimensions], dtype=_DTYPES[dtype], device=self.device)
        self._receive_into(tensor, source)
        return tensor

    def _receive_into(self, tensor: Tensor, source: int) -> None:
        if self.edges:
            self.edges.start(tensor, source, self.group.rank()).wait()
        else:
            dist.recv(tensor, group=self.group, group_src=source)
