"""Arithmetic of ranks and coordinates in a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:  # it imports torch, for which those who only plan do not wait
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pipeline", "data", "tensor")


@final
@dataclass(frozen=True)
class Layout:
    """Sizes of the axes. Ranks are (p · data + d) · tensor + t, so that those that share a layer are consecutive."""

    pipeline: int
    data: int
    tensor: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The axes' sizes: pipeline, data, tensor."""
        return self.pipeline, self.data, self.tensor

    @property
    def size(self) -> int:
        """Number of ranks of the mesh."""
        return self.pipeline * self.data * self.tensor

    def rank(self, p: int, d: int, t: int) -> int:
        """Return the rank with the coordinate (p, d, t) on the axes pipeline, data and tensor."""
        return (p * self.data + d) * self.tensor + t

    def coordinate(self, rank: int) -> tuple[int, int, int]:
        """Return the coordinate (p, d, t) of ``rank``."""
        rest, t = divmod(rank, self.tensor)
        return *divmod(rest, self.data), t

    def groups(self) -> dict[str, list[list[int]]]:
        """Return the groups of ranks of each axis: those that differ only in that coordinate, in its order."""
        ps, ds, ts = map(range, self.sizes)
        return {
            "pipeline": [self.across(ps, d, t) for d in ds for t in ts],
            "data": [[self.rank(p, d, t) for d in ds] for p in ps for t in ts],
            "tensor": [[self.rank(p, d, t) for t in ts] for p in ps for d in ds],
        }

    def across(self, ps: range | list[int], d: int, t: int) -> list[int]:
        """Return the ranks with coordinates (p, d, t) for each p in ``ps``."""
        return [self.rank(p, d, t) for p in ps]


def axis_of(name: str) -> str:
    """Return the axis that a mesh calls ``name``: the axis itself, and a number if there may be several meshes."""
    return name.rstrip("0123456789")


def along(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Return this rank's line of a mesh along one of its axes."""
    (name,) = (each for each in mesh.mesh_dim_names or () if axis_of(each) == axis)
    return mesh[name]
