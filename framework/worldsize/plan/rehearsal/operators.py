"""Parses torch's collective operators and messages: group, root, reduction, tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName
from torch.utils._pytree import tree_leaves

from worldsize.messages import format_ranks

# names of torch.distributed functions, by the operator in torch's collective namespaces
OPERATIONS: Mapping[str, str] = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "gather_into_tensor_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
}
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
MESSAGES = ("send", "recv")
ROOTED = ("broadcast", "scatter")  # only the root sends
_ROOTS: Mapping[str, Sequence[str]] = {  # argument names
    "broadcast": ("root_rank", "src"),
    "reduce": ("root_rank", "dst"),
    "gather": ("root_rank", "dst"),
    "scatter": ("root_rank", "src"),
    "send": ("dst",),
    "recv": ("src",),
}
_SECOND = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")  # in c10d, inputs are the second argument
_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


def parse_operator(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operator | None:
    """Parse a call of ``func``; return None if it is not a collective."""
    if func.namespace not in NAMESPACES or (name := OPERATIONS.get(func._opname)) is None:
        return None
    names = (argument.name for argument in func._schema.arguments)
    return Operator(func, name, args, {**dict(zip(names, args, strict=False)), **kwargs})


@final
@dataclass(frozen=True)
class Operator:
    """A torch operator that is a collective, with its arguments.

    Attributes:
        func: The operator.
        name: The name of the torch.distributed function.
        args: Positional arguments.
        given: All arguments by name.
    """

    func: Any
    name: str
    args: Sequence[Any]
    given: Mapping[str, Any]

    @property
    def group(self) -> ProcessGroup:
        """The group in the arguments, given as an object or by name."""
        return _find_group(self.given.values())

    @property
    def reduction(self) -> str:
        """The name of the reduction in lower case; "sum" without one."""
        return _reduction(self.given)

    @property
    def root(self) -> int | None:
        """The group index of a root or peer. None without one, or to receive from any source."""
        names = _ROOTS.get(self.name, ())
        return next((int(self.given[name]) for name in names if name in self.given), None)

    @property
    def tag(self) -> int:
        """The tag that distinguishes messages between two ranks."""
        return int(self.given.get("tag", 0)) if self.name in MESSAGES else 0

    def get_inputs(self) -> list[Tensor]:
        """Return this rank's input tensors; none for a barrier."""
        if self.name in ("barrier", "monitored_barrier"):
            return []
        return _collect_tensors(self.args[1 if self.func.namespace == "c10d" and self.name in _SECOND else 0])

    def get_outputs(self, result: Any) -> list[Tensor]:
        """Return the call's output tensors; ``result``: a functional operator's return value."""
        return _collect_tensors(self.args[0] if self.func.namespace == "c10d" else result)

    def get_compared_tensors(self) -> list[Tensor]:
        """Return the tensors whose shapes must match on all members: outputs of a scatter, else inputs."""
        return self.get_outputs(None) if self.name == "scatter" else self.get_inputs()

    def count_elements(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return an all-to-all's received and sent element counts per member, else None."""
        if self.func._opname == "alltoall_":
            gets, gives = (tuple(each.numel() for each in _collect_tensors(part)) for part in self.args[:2])
            return gets, gives
        if self.name != "all_to_all" or "input_split_sizes" not in self.given:
            return None
        size, given = self.group.size(), self.get_inputs()[0]
        gives = _count_split_elements(self.given["input_split_sizes"], given, size)
        if self.func.namespace == "c10d":
            return _count_split_elements(
                self.given["output_split_sizes"], _collect_tensors(self.args[0])[0], size
            ), gives
        row = given[:1].numel() if len(given) else 0
        return tuple(int(rows) * row for rows in self.given["output_split_sizes"]), gives


def _count_split_elements(splits: Sequence[Any], tensor: Tensor, size: int) -> tuple[int, ...]:
    """Return the number of elements per split of ``tensor``; even splits if ``splits`` is empty."""
    if not splits:
        return (tensor.numel() // size,) * size
    row = tensor.numel() // len(tensor) if len(tensor) else 0
    return tuple(int(rows) * row for rows in splits)


def _collect_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _find_group(values: Iterable[Any]) -> ProcessGroup:
    """Return the group in an operator's arguments, given as an object or by name."""
    group: ProcessGroup | None = None
    for value in values:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            group = ProcessGroup.unbox(value)
        elif isinstance(value, str) and value not in _REDUCTIONS:
            group = torch._C._distributed_c10d._resolve_process_group(GroupName(value))
        elif isinstance(value, ProcessGroup):
            group = value
    assert group is not None, "a collective has a group"
    return group


def _reduction(given: Mapping[str, Any]) -> str:
    """Return the name of the reduction in lower case."""
    for value in given.values():
        if isinstance(value, str) and value in _REDUCTIONS:
            return value
        if isinstance(value, torch.ScriptObject) and "ReduceOp" in str(value._type()):
            operation: object = dist.ReduceOp.unbox(value)
            kinds = dist.ReduceOp.RedOpType.__members__
            return next((name.lower() for name, kind in kinds.items() if operation == kind), "sum")
    return "sum"


@final
@dataclass(frozen=True)
class Group:
    """Identity of a process group.

    Attributes:
        ranks: The global ranks of its members.
        number: Number of groups with the same members created before it.
    """

    ranks: tuple[int, ...]
    number: int


def identify_group(group: ProcessGroup) -> Group:
    """Return the identity of a group created in this process, equal on all members."""
    members = dist.get_process_group_ranks(group)
    return Group(tuple(members), _find_groups(members).index(group))


def identify_next_group(members: Sequence[int]) -> Group:
    """Return the identity of the next group with ``members``."""
    return Group(tuple(members), len(_find_groups(list(members))))


def _find_groups(members: list[int]) -> list[ProcessGroup]:
    made = [each for each in dist.distributed_c10d._world.pg_group_ranks if isinstance(each, ProcessGroup)]
    return [each for each in made if dist.get_process_group_ranks(each) == members]


def describe_group(group: Group) -> str:
    """Describe a group in words."""
    which = f" (number {group.number + 1} with these ranks)" if group.number else ""
    return f"the group of {format_ranks(group.ranks)}{which}"
