"""Layout of a mesh: ranks, coordinates, and the tensors that each pipeline rank holds.

Tensors are identified by name, since sharding a module replaces them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, product
from operator import mul
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn

from worldsize.core import Cluster, ConfigError
from worldsize.errors import neighbours

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


AXES = ("pipeline", "data", "context", "tensor")  # of torch's mesh, from outermost to innermost
ORDER = ("tensor", "context", "data", "pipeline")  # default: tensor ranks are adjacent, stages are far apart

Coordinate = Mapping[str, int]
"""The position of a rank on each axis, keyed by axis name."""


@final
@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes by name, and their order from innermost to outermost.

    The data axis has ``copies`` of the model's shards, each over consecutive data-parallel ranks. Ranks along the
    first axis of ``order`` are consecutive; ranks along the last axis are the farthest apart. By default, the rank is
    ((p · data + d) · context + c) · tensor + t.
    """

    sizes: Mapping[str, int]
    order: Sequence[str] = ORDER
    copies: int = 1

    def __getitem__(self, axis: str) -> int:
        """Return the size of an axis."""
        return self.sizes.get(axis, 1)

    @property
    def size(self) -> int:
        """Number of ranks in the mesh."""
        return math.prod(self.sizes.values())

    @property
    def of_part(self) -> int:
        """Number of ranks per data-parallel part, which holds a whole model."""
        return self.size // self["data"]

    def format_sizes(self) -> str:
        """Return the sizes of the axes other than data, for messages."""
        return " × ".join(f"{axis}={self[axis]}" for axis in ORDER if axis != "data")

    @cached_property
    def strides(self) -> Mapping[str, int]:
        """Rank difference of two neighbors on each axis."""
        order = complete_order(self.order)
        inner = accumulate((self[axis] for axis in order), mul, initial=1)
        return dict(zip(order, inner, strict=False))

    @property
    def together(self) -> int:
        """Number of consecutive ranks that must be on one node, since they share layers."""
        return self.strides["tensor"] * self["tensor"] if self["tensor"] > 1 else 1

    @property
    def listed_order(self) -> Sequence[str]:
        """The order to show in messages, without a context axis of one rank."""
        return [axis for axis in self.order if axis != "context" or self[axis] > 1]

    def get_rank(self, place: Coordinate) -> int:
        """Return the rank at the coordinate ``place``."""
        return sum(place[axis] * stride for axis, stride in self.strides.items())

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of ``rank``."""
        strides = self.strides
        return {axis: rank // strides[axis] % self[axis] for axis in AXES}

    def list_groups(self) -> dict[str, list[list[int]]]:
        """Return, for each axis, the groups of ranks that differ only in that coordinate, in order."""
        points = product(*(range(self[axis]) for axis in AXES))
        places = [dict(zip(AXES, each, strict=True)) for each in points]
        return {
            axis: [self.list_line_ranks(axis, place, range(self[axis])) for place in places if place[axis] == 0]
            for axis in AXES
        }

    def list_line_ranks(self, axis: str, place: Coordinate, points: Iterable[int]) -> list[int]:
        """Return the ranks at ``points`` on an axis, with the other coordinates of ``place``."""
        return [self.get_rank({**place, axis: point}) for point in points]


def complete_order(order: Sequence[str]) -> Sequence[str]:
    """Return ``order`` with the context axis after the tensor axis, unless it is listed."""
    if "context" in order:
        return tuple(order)
    return tuple(each for axis in order for each in ((axis, "context") if axis == "tensor" else (axis,)))


def check_order(order: Sequence[str]) -> None:
    """Raise ConfigError unless ``order`` has each axis once; context may be missing."""
    axes = [axis for axis in ORDER if axis != "context" or axis in order]
    if sorted(map(str, order)) != sorted(axes):
        known = dict.fromkeys((*(axis for axis in order if axis in axes), *axes))
        raise ConfigError(
            f"strategy.order=[{', '.join(map(str, order))}] must contain each of {', '.join(axes)} exactly once, "
            f"innermost first. Set strategy.order=[{', '.join(known)}], for example."
        )


def check_shapes(shapes: Sequence[Mapping[str, int]], *, heals: bool, pipeline: int | None) -> None:
    """Raise ConfigError if a mesh cannot take one of ``shapes`` after a failure.

    ``heals``: whether the mesh continues without dead processes. ``pipeline``: the pipeline size, if the user set the
    layers of each stage, otherwise None.
    """
    axes = [axis for axis in ORDER if axis != "data"]
    if shapes and not heals:
        raise ConfigError(
            "strategy.heal_shapes requires strategy.on_failure=heal. Set strategy.on_failure=heal, or "
            "strategy.heal_shapes=[]."
        )
    for shape in shapes:
        if not (isinstance(shape, Mapping) and all(type(size) is int and size > 0 for size in shape.values())):
            raise ConfigError(
                f"strategy.heal_shapes has {shape!r}, but a shape maps axes to sizes of at least 1. Set e.g. "
                "strategy.heal_shapes=[{tensor: 1}]."
            )
        for axis, size in shape.items():
            if axis not in axes:
                raise ConfigError(f"strategy.heal_shapes: unknown axis {axis!r}{neighbours(axis, axes)}")
            if axis == "pipeline" and pipeline not in (None, size):
                raise ConfigError(
                    "strategy.heal_shapes with a different pipeline size is not supported with strategy.split: it "
                    "lists the layers of a fixed number of stages. Set strategy.split=null."
                )


def check_taken(parts: Sequence[Layout]) -> None:
    """Raise ConfigError for a shape that would never be taken.

    ``parts``: the layout of one data-parallel part in each shape, in order of preference.
    """
    for place, part in enumerate(parts):
        earlier = next((each for each in parts[:place] if part.size % each.size == 0), None)
        if earlier is not None:
            raise ConfigError(
                f"strategy.heal_shapes: {part.format_sizes()} would never be used: {earlier.format_sizes()}, an "
                f"earlier shape, fits every multiple of its {part.size} processes. Remove {part.format_sizes()}."
            )


def check_tensor(layout: Layout, cluster: Cluster) -> None:
    """Raise ConfigError if ranks that share layers are on different nodes."""
    block = layout.together
    if cluster.processes_per_node % block == 0:
        return
    fact = f"strategy.tensor={layout['tensor']} does not divide"
    remedy = f"Set strategy.tensor to a divisor of {cluster.processes_per_node}."
    if block > layout["tensor"]:
        fact = (
            f"strategy.order=[{', '.join(layout.listed_order)}]: the {block} ranks up to the tensor axis do not divide"
        )
        remedy = f"Set strategy.order=[{', '.join(dict.fromkeys(('tensor', *layout.listed_order)))}]."
    raise ConfigError(
        f"{fact} the {cluster.processes_per_node} processes per node, so tensor-parallel ranks would span nodes. "
        f"{remedy}"
    )


def check_heals(layout: Layout, cluster: Cluster) -> None:
    """Raise ConfigError if losing a process could spread ranks that share layers over nodes."""
    is_fixed = layout.listed_order.index("tensor") < layout.listed_order.index("data")
    if cluster.all_nodes > 1 and layout["tensor"] > 1 and not is_fixed:
        raise ConfigError(
            f"strategy.on_failure=heal on {cluster.all_nodes} nodes requires tensor before data, got "
            f"strategy.order=[{', '.join(layout.listed_order)}]. Otherwise tensor-parallel ranks could span nodes when "
            "a process dies. Move tensor before data in strategy.order."
        )


def parse_axis(name: str) -> str:
    """Return the axis of a mesh dimension ``name``, without its unique numeric suffix, if any."""
    return name.rstrip("0123456789")


def get_submesh(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """Return this rank's submesh along ``axes``, omitting those that the mesh does not have."""
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if parse_axis(name) in axes)]


Place = tuple[nn.Module, str]


def _iterate_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over parameters and buffers, including duplicates under other names."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _find_place(model: nn.Module, name: str) -> Place:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


@final
class Ownership:
    """Records which ranks of a pipeline hold each tensor of a model.

    ``ranks`` maps a tensor's first name to its ranks. A tensor outside all stages belongs to the first rank.

    Create this object before sharding the model; tensors may be on the meta device. ``stages``: the layers of each
    stage. ``rank_of_stage``: the pipeline rank of each stage. ``p``: this pipeline rank.
    """

    def __init__(
        self, model: nn.Module, stages: Sequence[Sequence[nn.Module]], *, rank_of_stage: Sequence[int], p: int
    ) -> None:
        self._model, self._p = model, p
        self._first = {id(tensor): name for name, tensor in reversed(list(_iterate_tensors(model)))}
        self._aliases = {name: self._first[id(tensor)] for name, tensor in _iterate_tensors(model)}
        self._parameters = {name for name, each in model.named_parameters() if each.requires_grad}
        self.stages: dict[str, list[int]] = {name: [] for name in self._aliases.values()}
        self._places: dict[str, Place] = {}
        self._uses: Counter[tuple[str, int]] = Counter()  # number of layers with a parameter, by its name and the stage
        for index, layers in enumerate(stages):
            self._add_stage(index, layers, mine=rank_of_stage[index] == p)
        self.ranks = {
            name: sorted({rank_of_stage[stage] for stage in indices or [0]}) for name, indices in self.stages.items()
        }
        self._others: set[Place] = {
            _find_place(model, name) for name, first in self._aliases.items() if p not in self.ranks[first]
        }

    def _add_stage(self, stage: int, layers: Sequence[nn.Module], *, mine: bool) -> None:
        for layer in layers:
            for own in {id(each) for each in layer.parameters()} & self._first.keys():
                self._uses[self._first[own], stage] += 1
        for module in {module for layer in layers for module in layer.modules()}:
            for key, tensor in (
                *module.named_parameters(recurse=False, remove_duplicate=False),
                *module.named_buffers(recurse=False, remove_duplicate=False),
            ):
                if id(tensor) not in self._first:
                    raise ConfigError(f"{key!r} of a layer is not in the model. Add it to the model.")
                name = self._first[id(tensor)]
                self.stages[name] = sorted({*self.stages[name], stage})
                if mine:
                    self._places[name] = (module, key)

    def has_tensor(self, module: nn.Module, key: str) -> bool:
        """Return whether this rank holds tensor ``key`` of ``module``, before :meth:`leave_others`."""
        return (module, key) not in self._others

    def check_shared(self, *, is_sharded: bool, is_ordered: bool) -> None:
        """Raise ConfigError for shared parameters that sharding or ordered sums do not support."""
        if is_sharded or is_ordered:
            self._check_sharded_once()
        if is_ordered:
            self._check_tied_order()

    def _check_sharded_once(self) -> None:
        """Raise ConfigError if two stages of a rank share a parameter, which would be sharded twice."""
        for name in self._parameters:
            if len(self.ranks[name]) < len(self.stages[name]):
                raise ConfigError(
                    f"the parameter {name} is shared by two stages of one rank, but can be sharded only once. Set "
                    "strategy.schedule=1f1b or a different strategy.split. To train without sharding instead, set "
                    "strategy.data=1 and strategy.on_failure=restart, and a reproducibility other than elastic."
                )

    def find_tied_parameters(self) -> dict[tuple[int, ...], list[str]]:
        """Return the names of parameters on several pipeline ranks, keyed by their stages, in order."""
        names_by_stages: dict[tuple[int, ...], list[str]] = {}
        for name in sorted(self._parameters):
            if len(self.ranks[name]) > 1:
                names_by_stages.setdefault(tuple(self.stages[name]), []).append(name)
        return names_by_stages

    def _check_tied_order(self) -> None:
        """Raise ConfigError if a shared parameter's gradients are not added in autograd's order.

        Autograd adds the gradients of all uses in a micro-batch, the last one first. A stage adds the gradients of its
        own uses before it receives those of other stages.
        """
        for name in self._parameters:
            stages = self.stages[name]
            if len(stages) > 1 and any(self._uses[name, stage] > 1 for stage in stages[:-1]):
                raise ConfigError(
                    f"the parameter {name} is used by several layers of one stage, and by a later stage. The order in "
                    "which their gradients are added would depend on strategy.pipeline. Set a different "
                    "strategy.split, or strategy.pipeline=1."
                )

    def parameters(self, names: Sequence[str]) -> list[nn.Parameter]:
        """Return those parameters in ``names`` that this rank holds, after sharding."""
        return [getattr(*self._places[name]) for name in names if name in self._places]

    def find_spare_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank that an earlier rank also holds."""
        names = [name for group in self.find_tied_parameters().values() for name in group]
        return self.parameters([name for name in names if self.ranks[name][0] != self._p])

    def leave_others(self) -> None:
        """Replace tensors held only by other ranks with meta tensors, after sharding."""
        empty: dict[str, Tensor] = {}
        for name, first in self._aliases.items():
            module, key = _find_place(self._model, name)
            if first in self._places:
                setattr(module, key, getattr(*self._places[first]))
            elif self._p not in self.ranks[first]:
                setattr(module, key, empty.setdefault(first, _create_meta_tensor(getattr(module, key))))


def _create_meta_tensor(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
