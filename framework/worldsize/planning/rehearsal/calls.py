"""Records what one rank says to its groups: each collective, with whom, of what, and from which line."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worldsize.planning.rehearsal.exchange import Place, Said, Words, combined, words_of
from worldsize.planning.rehearsal.groups import Group, identified

# operators of torch's two namespaces of collectives, by the name of torch.distributed's own function
_OPERATIONS: Mapping[str, str] = {
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
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_ROOTS: Mapping[str, Sequence[str]] = {  # names of arguments
    "broadcast": ("root_rank", "src"),
    "reduce": ("root_rank", "dst"),
    "gather": ("root_rank", "dst"),
    "scatter": ("root_rank", "src"),
    "send": ("dst",),
    "recv": ("src",),
}
_SECOND = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")  # of c10d: outputs come first
_TORCH = f"{Path(torch.__file__).parent}/"
_FRAMEWORK = f"{Path(__file__).parents[2]}/"
_OWN = f"{Path(__file__).parent}/"


@final
@dataclass(frozen=True)
class Call:
    """One collective, or one message, as one rank calls it.

    Attributes:
        operation: The name of torch.distributed's function, such as "all_reduce".
        group: The members that have to call it too.
        form: What each member has to agree on: types, sizes, sums and roots.
        peer: The global rank that a message goes to or comes from; None: all members take part.
        nbytes: Bytes of the tensors that this rank puts in.
        site: The line of code, and the function it is in.
        step: The step, from 1; 0: before the first.
    """

    operation: str
    group: Group
    form: str
    peer: int | None
    nbytes: int
    site: str
    step: int

    @property
    def described(self) -> str:
        """The call without the group, for people."""
        return f"{self.operation}({self.form})"


@final
class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every collective of torch.distributed that is called within, whoever calls it.

    Args:
        heard: What the other ranks have said in an earlier rehearsal, which they are taken to say again.
    """

    def __init__(self, heard: Said | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        """The calls so far, in order."""
        self.words: dict[Place, Words] = {}
        """What this rank has said in small tensors."""
        self.step = 0
        """The step that calls belong to from here on."""
        self._heard = heard or Said()
        self._groups: dict[ProcessGroup, Group] = {}
        self._places: Counter[Group] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as what the rank itself computes
        kwargs = kwargs or {}
        if func.namespace not in _NAMESPACES or (operation := _OPERATIONS.get(func._opname)) is None:
            return func(*args, **kwargs)
        names = (argument.name for argument in func._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return self._called(_Operator(func, operation, given), func, args, kwargs)

    def _called(self, operator: _Operator, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensors = operator.inputs(args)
        call = self._call(operator, tensors)
        self.calls.append(call)
        if call.peer is not None:
            return func(*args, **kwargs)
        place = Place(call.group, self._places[call.group])
        self._places[call.group] += 1
        words = words_of(call.described, tensors)
        if words is None or operator.name not in ("all_reduce", "all_gather", "broadcast"):
            return func(*args, **kwargs)
        self.words[place] = words
        heard = self._heard.heard(place, call.described, tensors)
        result = func(*args, **kwargs)
        if heard is not None:
            answers = combined(operator.name, operator.reduction, operator.root or 0, heard)
            for outputs, answer in zip(operator.outputs(args, result, len(tensors)), answers, strict=True):
                _fill(outputs, answer)
        return result

    def _call(self, operator: _Operator, tensors: Sequence[Tensor]) -> Call:
        group = self._known(operator.group)
        site, is_object = _site()
        peer = None
        words = ["objects"] if is_object else [_described(tensor) for tensor in tensors]
        if operator.name in ("all_reduce", "reduce", "reduce_scatter"):
            words.append(operator.reduction)
        if operator.root is not None:
            if operator.name in ("send", "recv"):
                peer = group.ranks[operator.root]
            else:
                words.append(f"root {group.ranks[operator.root]}")
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return Call(operator.name, group, ", ".join(words), peer, nbytes, site, self.step)

    def _known(self, group: ProcessGroup) -> Group:
        if group not in self._groups:
            self._groups[group] = identified(group)
        return self._groups[group]


@final
@dataclass(frozen=True)
class _Operator:
    """An operator of torch that is a collective, with its arguments by name; ``name``: torch.distributed's function."""

    func: Any
    name: str
    given: Mapping[str, Any]

    @property
    def group(self) -> ProcessGroup:
        """The group among the arguments: an object, or its name."""
        return _group_of(self.given.values())

    @property
    def reduction(self) -> str:
        """The name of the reduction, in small letters; "sum" where there is none."""
        return _reduction(self.given)

    @property
    def root(self) -> int | None:
        """The place in the group of a root or peer; None: there is none."""
        names = _ROOTS.get(self.name, ())
        return next((int(self.given[name]) for name in names if name in self.given), None)

    def inputs(self, args: Sequence[Any]) -> list[Tensor]:
        """Return what this rank puts in."""
        if self.name == "barrier":
            return []
        place = 1 if self.func.namespace == "c10d" and self.name in _SECOND else 0
        return [leaf for leaf in tree_leaves(args[place]) if isinstance(leaf, Tensor)]

    def outputs(self, args: Sequence[Any], result: Any, count: int) -> list[list[Tensor]]:
        """Return what the call has filled, for each of ``count`` tensors that this rank has put in."""
        filled = args[0] if self.func.namespace == "c10d" else result
        leaves = [leaf for leaf in tree_leaves(filled) if isinstance(leaf, Tensor)]
        each = len(leaves) // count if count else 0
        return [leaves[first : first + each] for first in range(0, len(leaves), each)] if each else []


def _fill(outputs: Sequence[Tensor], answer: Tensor) -> None:
    """Write ``answer`` into ``outputs``, part after part."""
    parts = torch.split(answer.flatten(), [each.numel() for each in outputs])
    for output, part in zip(outputs, parts, strict=True):
        output.detach().copy_(part.view(output.shape))


def _group_of(values: Any) -> ProcessGroup:
    """Return the group among the arguments of an operator: an object, or its name."""
    found: ProcessGroup | None = None
    for value in values:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            found = ProcessGroup.unbox(value)
        elif isinstance(value, str) and value not in _REDUCTIONS:
            found = torch._C._distributed_c10d._resolve_process_group(GroupName(value))
        elif isinstance(value, ProcessGroup):
            found = value
    assert found is not None, "a collective has a group"
    return found


_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


def _reduction(given: Mapping[str, Any]) -> str:
    """Return the name of the reduction, in small letters."""
    for value in given.values():
        if isinstance(value, str) and value in _REDUCTIONS:
            return value
        if isinstance(value, torch.ScriptObject) and "ReduceOp" in str(value._type()):
            operation: object = dist.ReduceOp.unbox(value)
            kinds = dist.ReduceOp.RedOpType.__members__
            return next((name.lower() for name, kind in kinds.items() if operation == kind), "sum")
    return "sum"


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _site() -> tuple[str, bool]:
    """Return the innermost line outside torch, and whether torch pickles objects there, whose sizes may differ."""
    is_object = False
    for frame in _frames():
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(_TORCH):
            is_object = is_object or "object" in name
        elif not file.startswith((_OWN, "<")):
            return f"{short_path(file)}:{frame.f_lineno} ({name})", is_object
    return "torch", is_object


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def short_path(file: str) -> str:
    """Return a path as its reader knows it: of worldsize, of the working directory, or whole."""
    path = Path(file)
    if file.startswith(_FRAMEWORK):
        return str(path.relative_to(Path(_FRAMEWORK).parent))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
