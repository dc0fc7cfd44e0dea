"""The process groups of a mesh, beyond those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import cast, final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from worldsize.core import RunContext
from worldsize.devices import backend_for
from worldsize.dist.connecting import connect
from worldsize.strategies.mesh.edges import Edges, neighbours
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
        return dict(zip(AXES, self.layout.coordinate(self.context.world.rank), strict=True))

    def mesh(self) -> DeviceMesh:
        """Make the mesh of all ranks."""
        number = str(next(_MESHES)) if self.interruptible else ""
        names = tuple(f"{axis}{number}" for axis in AXES)
        strides = [self.layout.strides[axis] for axis in AXES]
        ranks_pdt = torch.arange(self.layout.size, device="cpu").as_strided(self.layout.sizes, strides)
        with self.context.making_groups():
            mesh = DeviceMesh(self.context.world.device.type, ranks_pdt, mesh_dim_names=names)
        for axis in AXES:
            self._bound(along(mesh, axis).get_group())
        return mesh

    def edges(self, *, is_ring: bool) -> Edges | None:
        """Make the groups in which neighbour stages send each other messages; None: other messages are as good.

        ``is_ring``: ranks have several stages, so that the last one sends to the first one, too.
        """
        if not (self.interruptible and backend_for(dist.get_backend(), self.context.world.device.type) == "gloo"):
            return None
        groups = {pair: self.of(sorted(pair)) for pair in neighbours(self.layout.pipeline, is_ring=is_ring)}
        return Edges(self.coordinate["pipeline"], {pair: each for pair, each in groups.items() if each is not None})

    def of(self, ranks: Sequence[int]) -> ProcessGroup | None:
        """Make the group of these pipeline ranks at this rank's coordinate on the other axes; None: it is no member.

        Only members create the group. All ranks must create the same number of groups in this way, since torch names
        groups by a counter: a rank that is not a member creates a group of itself.
        """
        own, place = self.context.world.rank, self.coordinate
        members = self.layout.across(list(ranks), place["data"], place["tensor"])
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
