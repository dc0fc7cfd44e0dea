"""Records one rank's collectives and messages, with their group, tensors and line of code."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol, Self, final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worldsize.messages import abbreviate_ranks
from worldsize.plan.rehearsal.exchange import MessageRecorder, SentMessages
from worldsize.plan.rehearsal.operators import (
    MESSAGES,
    Group,
    Operator,
    identify_group,
    identify_next_group,
    parse_operator,
)

Phase = Literal["building", "step", "logging", "evaluation"]


@final
@dataclass(frozen=True)
class Call:
    """One collective or point-to-point message, as called by one rank.

    Attributes:
        operation: The name of the torch.distributed function, such as "all_reduce".
        group: Process group; all members must make the call.
        form: The arguments that must match on all members: types, sizes, reductions and roots.
        peer: Global rank of a message's receiver or sender. None for any sender, or for collectives.
        nbytes: Bytes of this rank's input tensors.
        site: The line of code and its function.
        step: The step, from 1; 0 before the first.
        phase: The part of the run: building the replica, a step, the loop's own logging, or an evaluation.
        tag: The tag that distinguishes messages between the same two ranks.
        parts: Element counts that an all-to-all receives from and sends to each member. None for other calls.
    """

    operation: str
    group: Group
    form: str
    peer: int | None
    nbytes: int
    site: str
    step: int
    phase: Phase = "step"
    tag: int = 0
    parts: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def described(self) -> str:
        """Description of the call without its group."""
        return f"{self.operation}({self.form})"

    @property
    def is_message(self) -> bool:
        """Whether the call is a message between two ranks."""
        return self.operation in MESSAGES

    @property
    def when(self) -> str:
        """Position of the call in the run, such as "evaluation after step 2"."""
        if not self.step:
            return "before the first step"
        texts = {"logging": "logging of step", "evaluation": "evaluation after step"}
        return f"{texts.get(self.phase, 'step')} {self.step}"


@final
class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records all torch.distributed collectives called in its context.

    Args:
        received: Other ranks' messages from an earlier rehearsal, replayed to this rank.
    """

    def __init__(self, received: SentMessages | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        """The calls so far, in order."""
        self.waits: dict[int, int] = {}
        """Number of calls made before the rank first waited for a call, by that call's number."""
        self.step = 0
        """Step to record for subsequent calls."""
        self.phase: Phase = "building"
        """Phase of the run to record for subsequent calls."""
        self.message_recorder = MessageRecorder(received or SentMessages())
        """Recorder of the small tensors that this rank sends and receives."""
        self._groups: dict[ProcessGroup, Group] = {}
        self._pending = PendingCalls()
        self._watching = ExitStack()

    def __enter__(self) -> Self:
        self._watching.enter_context(waits_watched(self._pending, self._waits_for))
        self._watching.enter_context(groups_watched(self._makes_group))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._watching.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # the inner tensors are dispatched later
        kwargs = kwargs or {}
        if func.namespace == "_c10d_functional" and func._opname == "wait_tensor":
            self._waits_for(self._pending.pop_number(args[0]))
        operator = parse_operator(func, args, kwargs)
        return func(*args, **kwargs) if operator is None else self._record_call(operator, kwargs)

    def _record_call(self, operator: Operator, kwargs: Mapping[str, Any]) -> Any:
        where, is_object = find_call_site()
        call = self._build_call(operator, where, is_object=is_object)
        exchange = self.message_recorder.begin_call(call.described, call.group, operator, where, is_object=is_object)
        self.calls.append(call)
        result = _perform_call(operator, kwargs)
        exchange.write_answers(operator.get_outputs(result))
        self._pending.add(len(self.calls) - 1, result, exchange.source)
        return result

    def _build_call(self, operator: Operator, where: str, *, is_object: bool) -> Call:
        group = self._identify_group(operator.group)
        peer = None
        words = ["objects"] if is_object else [_describe_tensor(tensor) for tensor in operator.get_compared_tensors()]
        parts = operator.count_elements()
        if parts is not None:  # their sizes may differ between members
            words = [str(operator.get_inputs()[0].dtype).removeprefix("torch.")] if operator.get_inputs() else []
        if operator.name in ("all_reduce", "reduce", "reduce_scatter"):
            words.append(operator.reduction)
        if operator.root is not None:
            if operator.name in MESSAGES:
                peer = group.ranks[operator.root]
            else:
                words.append(f"root {group.ranks[operator.root]}")
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in operator.get_inputs())
        return Call(
            operator.name,
            group,
            ", ".join(words),
            peer,
            nbytes,
            where,
            self.step,
            self.phase,
            operator.tag,
            parts,
        )

    def _identify_group(self, group: ProcessGroup) -> Group:
        if group not in self._groups:
            self._groups[group] = identify_group(group)
        return self._groups[group]

    def _makes_group(self, members: Sequence[int] | None, *, is_local: bool) -> None:
        """Record the creation of a group as a call of all ranks, or of the members only with ``is_local``."""
        everyone = range(dist.get_world_size())
        ranks = sorted(everyone if members is None else members)
        if is_local and dist.get_rank() not in ranks:
            return
        who = identify_next_group(ranks) if is_local else Group(tuple(everyone), 0)
        form = "" if is_local else f"ranks {abbreviate_ranks(ranks)}"
        self.message_recorder.count_call(who)
        self.calls.append(Call("new_group", who, form, None, 0, find_call_site()[0], self.step, self.phase))
        self._waits_for(len(self.calls) - 1)

    def _waits_for(self, number: int | None) -> None:
        """Record that the rank waits for call ``number``, unless it has done so before."""
        if number is not None:
            self.waits.setdefault(number, len(self.calls))


def _perform_call(operator: Operator, kwargs: Mapping[str, Any]) -> Any:
    if operator.name == "monitored_barrier" and dist.get_backend(operator.group) == "fake":
        return None  # not supported by the fake backend
    return operator.func(*operator.args, **kwargs)


def _describe_tensor(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@final
class PendingCalls:
    """Maps objects that a rank waits for (a Work, or a functional collective's tensor) to calls."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Work, int] = weakref.WeakKeyDictionary()
        self._sources: weakref.WeakKeyDictionary[Work, int] = weakref.WeakKeyDictionary()
        self._made: dict[int, int] = {}  # by storage address
        self._last: Work | None = None  # keep the Work alive until the caller has received it

    def add(self, number: int, result: Any, source: int | None) -> None:
        """Record call ``number``'s result; ``source``: group index of a received message's sender."""
        self._last = None
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.ScriptObject) and str(leaf._type()).endswith(".Work"):
                self._last = work = Work.unbox(leaf)
                self._numbers[work] = number
                if source is not None:
                    self._sources[work] = source
            elif isinstance(leaf, Tensor):
                self._made[leaf.untyped_storage()._cdata] = number

    def get_number(self, work: Work) -> int | None:
        """Return the number of the call that returned ``work``, or None if it was not recorded."""
        if work is self._last:
            self._last = None
        return self._numbers.get(work)

    def pop_number(self, tensor: Tensor) -> int | None:
        """Return and forget the number of the pending call that fills ``tensor``, or None."""
        return self._made.pop(tensor.untyped_storage()._cdata, None)

    def get_source(self, work: Work) -> int:
        """Return the group index of a received message's sender, 0 if unknown."""
        return self._sources.get(work, 0)


@contextmanager
def waits_watched(pending: PendingCalls, report: Callable[[int | None], None]) -> Iterator[None]:
    """Call ``report`` with the number of each awaited call, and set the senders of received messages."""
    with ExitStack() as stack:
        for kind in _walk_subclasses(Work):
            if "wait" in vars(kind):
                stack.enter_context(patch.object(kind, "wait", _wrap_wait(kind.wait, pending, report)))
        original = Work._source_rank

        def get_source_rank(work: Work) -> int:
            try:
                return int(original(work))
            except RuntimeError:  # raised by the fake group
                return pending.get_source(work)

        stack.enter_context(patch.object(Work, "_source_rank", get_source_rank))
        yield


def _wrap_wait(original: Any, pending: PendingCalls, report: Callable[[int | None], None]) -> Any:
    def report_and_wait(work: Work, *args: Any, **kwargs: Any) -> Any:
        report(pending.get_number(work))
        return original(work, *args, **kwargs)

    return report_and_wait


def _walk_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    below: list[type[Any]] = kind.__subclasses__()
    for each in below:
        yield from _walk_subclasses(each)


class _GroupMade(Protocol):
    def __call__(self, members: Sequence[int] | None, *, is_local: bool) -> None: ...


@contextmanager
def groups_watched(report: _GroupMade) -> Iterator[None]:
    """Call ``report`` before each process group is created, with members and ``is_local``."""
    original = dist.distributed_c10d._new_group_with_tag

    def report_and_create(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> ProcessGroup | Any:
        report(ranks, is_local=bool(kwargs.get("use_local_synchronization", False) or (len(args) > 4 and args[4])))
        return original(ranks, *args, **kwargs)

    with patch.object(dist.distributed_c10d, "_new_group_with_tag", report_and_create):
        yield


_TORCH = f"{Path(torch.__file__).parent}/"
_FRAMEWORK = f"{Path(__file__).parents[2]}/"
_PASSED_ON = (f"{Path(__file__).parent}/", f"{_FRAMEWORK}collectives/group.py", "<")


def find_call_site() -> tuple[str, bool]:
    """Return the innermost line outside torch, and whether torch pickles objects there."""
    is_object = False
    for frame in _walk_frames():
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(_TORCH):
            is_object = is_object or "object" in name
        elif not file.startswith(_PASSED_ON) and name != "__torch_function__":  # skips torch function modes
            return f"{short_path(file)}:{frame.f_lineno} ({name})", is_object
    return "torch", is_object


def _walk_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def short_path(file: str) -> str:
    """Shorten a path: relative to worldsize or to the working directory, else absolute."""
    path = Path(file)
    if file.startswith(_FRAMEWORK):
        return str(path.relative_to(Path(_FRAMEWORK).parent))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
