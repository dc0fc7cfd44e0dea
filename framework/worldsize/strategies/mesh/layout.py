"""Arithmetic of ranks and coordinates in a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from worldsize.core import Cluster, ConfigError

if TYPE_CHECKING:  # it imports torch, for which those who only plan do not wait
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pipeline", "data", "tensor")
ORDER = ("tensor", "data", "pipeline")  # ranks that share a layer are neighbours, stages are far apart


@final
@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and which of them is the innermost.

    Ranks that differ only on the first axis of ``order`` are consecutive, those that differ only on the last are the
    farthest apart: by default the rank is (p · data + d) · tensor + t.
    """

    pipeline: int
    data: int
    tensor: int
    order: Sequence[str] = ORDER

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The axes' sizes: pipeline, data, tensor."""
        return self.pipeline, self.data, self.tensor

    @property
    def size(self) -> int:
        """Number of ranks of the mesh."""
        return self.pipeline * self.data * self.tensor

    @property
    def strides(self) -> Mapping[str, int]:
        """The difference between the ranks of two neighbours on each axis."""
        sizes, strides, stride = dict(zip(AXES, self.sizes, strict=True)), {}, 1
        for axis in self.order:
            strides[axis] = stride
            stride *= sizes[axis]
        return strides

    @property
    def together(self) -> int:
        """Number of consecutive ranks that have all ranks which share a layer: these belong on one node."""
        return self.strides["tensor"] * self.tensor if self.tensor > 1 else 1

    def rank(self, p: int, d: int, t: int) -> int:
        """Return the rank with the coordinate (p, d, t) on the axes pipeline, data and tensor."""
        strides = self.strides
        return p * strides["pipeline"] + d * strides["data"] + t * strides["tensor"]

    def coordinate(self, rank: int) -> tuple[int, int, int]:
        """Return the coordinate (p, d, t) of ``rank``."""
        p, d, t = (rank // self.strides[axis] % size for axis, size in zip(AXES, self.sizes, strict=True))
        return p, d, t

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


def check_order(order: Sequence[str]) -> None:
    """Raise ConfigError unless ``order`` has each axis once."""
    if sorted(map(str, order)) != sorted(ORDER):
        known = dict.fromkeys((*(axis for axis in order if axis in ORDER), *ORDER))
        raise ConfigError(
            f"strategy.order=[{', '.join(map(str, order))}] must have tensor, data and pipeline once each, the "
            f"innermost first. Set strategy.order=[{', '.join(known)}], say."
        )


def check_tensor(layout: Layout, cluster: Cluster) -> None:
    """Raise ConfigError if ranks that share layers are on different nodes."""
    block = layout.together
    if cluster.processes_per_node % block == 0:
        return
    fact = f"strategy.tensor={layout.tensor} does not divide"
    remedy = "Set strategy.tensor to a divisor of them."
    if block > layout.tensor:
        fact = f"strategy.order=[{', '.join(layout.order)}]: the {block} ranks up to the tensor axis do not divide"
        remedy = f"Set strategy.order=[{', '.join(dict.fromkeys(('tensor', *layout.order)))}]."
    raise ConfigError(
        f"{fact} the {cluster.processes_per_node} processes of a node, and ranks that share layers would communicate "
        f"between nodes. {remedy}"
    )


def check_heals(layout: Layout, cluster: Cluster) -> None:
    """Raise ConfigError if ranks that share layers would end up on different nodes when others are lost."""
    is_fixed = layout.order.index("tensor") < layout.order.index("data")
    if cluster.all_nodes > 1 and layout.tensor > 1 and not is_fixed:
        raise ConfigError(
            f"strategy.on_failure=heal: with strategy.order=[{', '.join(layout.order)}] the ranks that share layers "
            "are as far apart as there are parts of the data, which change when one dies: on "
            f"{cluster.all_nodes} nodes they would end up on different ones. Name tensor before data in strategy.order."
        )


def axis_of(name: str) -> str:
    """Return the axis that a mesh calls ``name``: the axis itself, and a number if there may be several meshes."""
    return name.rstrip("0123456789")


def along(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Return this rank's line of a mesh along one of its axes."""
    (name,) = (each for each in mesh.mesh_dim_names or () if axis_of(each) == axis)
    return mesh[name]
