"""Records what one rank sends to its groups: each collective with its members, tensors and line of code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Self, final

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from worldsize.plan.rehearsal.exchange import SentMessages
from worldsize.plan.rehearsal.groups import Group, identified, next_of
from worldsize.plan.rehearsal.message_recorder import MessageRecorder
from worldsize.plan.rehearsal.operators import MESSAGES, Operator, operator_of
from worldsize.plan.rehearsal.pending import PendingCalls, groups_watched, waits_watched
from worldsize.plan.rehearsal.sites import site
from worldsize.spans import spans

Phase = Literal["building", "step", "logging", "evaluation"]


@final
@dataclass(frozen=True)
class Call:
    """One collective, or one message, as one rank calls it.

    Attributes:
        operation: The name of torch.distributed's function, such as "all_reduce".
        group: The members that have to call it too.
        form: The arguments that all members must agree on: types, sizes, reductions and roots.
        peer: The global rank that a message goes to or comes from; None: any rank, or not a message.
        nbytes: Bytes of the tensors that this rank puts in.
        site: The line of code and its function.
        step: The step, from 1; 0 before the first.
        phase: The part of the run: building the replica, a step, what the loop itself logs, or an evaluation.
        tag: The number that distinguishes messages between the same two ranks.
        parts: Element counts that an all-to-all receives from and sends to each member; None for other calls.
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
        """Describe the call without the group, for people."""
        return f"{self.operation}({self.form})"

    @property
    def is_message(self) -> bool:
        """Return whether the call is a message between two ranks."""
        return self.operation in MESSAGES

    @property
    def when(self) -> str:
        """Describe the moment of the run, for people."""
        if not self.step:
            return "before the first step"
        texts = {"logging": "logging of step", "evaluation": "evaluation after step"}
        return f"{texts.get(self.phase, 'step')} {self.step}"


@final
class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every collective of torch.distributed that is called inside.

    Args:
        received: The other ranks' messages in an earlier rehearsal, assumed to be sent again.
    """

    def __init__(self, received: SentMessages | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        """The calls so far, in order."""
        self.waits: dict[int, int] = {}
        """By the number of a call: how many calls had been made when the rank waited for it."""
        self.step = 0
        """The step that calls belong to from here on."""
        self.phase: Phase = "building"
        """The part of the run that calls belong to from here on."""
        self.message_recorder = MessageRecorder(received or SentMessages())
        """What this rank says, and what it hears."""
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
            return NotImplemented  # seen again later, as the rank's own computation
        kwargs = kwargs or {}
        if func.namespace == "_c10d_functional" and func._opname == "wait_tensor":
            self._waits_for(self._pending.making(args[0]))
        operator = operator_of(func, args, kwargs)
        return func(*args, **kwargs) if operator is None else self._called(operator, kwargs)

    def _called(self, operator: Operator, kwargs: Mapping[str, Any]) -> Any:
        where, is_object = site()
        call = self._call(operator, where, is_object=is_object)
        exchange = self.message_recorder.begun(call.described, call.group, operator, where, is_object=is_object)
        self.calls.append(call)
        result = _performed(operator, kwargs)
        exchange.end(operator.outputs(result))
        self._pending.add(len(self.calls) - 1, result, exchange.source)
        return result

    def _call(self, operator: Operator, where: str, *, is_object: bool) -> Call:
        group = self._known(operator.group)
        peer = None
        words = ["objects"] if is_object else [_described(tensor) for tensor in operator.shown()]
        parts = operator.parts()
        if parts is not None:  # whose sizes may differ
            words = [str(operator.inputs()[0].dtype).removeprefix("torch.")] if operator.inputs() else []
        if operator.name in ("all_reduce", "reduce", "reduce_scatter"):
            words.append(operator.reduction)
        if operator.root is not None:
            if operator.name in MESSAGES:
                peer = group.ranks[operator.root]
            else:
                words.append(f"root {group.ranks[operator.root]}")
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in operator.inputs())
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

    def _known(self, group: ProcessGroup) -> Group:
        if group not in self._groups:
            self._groups[group] = identified(group)
        return self._groups[group]

    def _makes_group(self, members: Sequence[int] | None, *, is_local: bool) -> None:
        """Record the creation of a group by all ranks, or by its members if it ``is_local``."""
        everyone = range(dist.get_world_size())
        ranks = sorted(everyone if members is None else members)
        if is_local and dist.get_rank() not in ranks:
            return
        who = next_of(ranks) if is_local else Group(tuple(everyone), 0)
        form = "" if is_local else f"ranks {spans(ranks)}"
        self.message_recorder.passed(who)
        self.calls.append(Call("new_group", who, form, None, 0, site()[0], self.step, self.phase))
        self._waits_for(len(self.calls) - 1)

    def _waits_for(self, number: int | None) -> None:
        """Record that the rank waits for its call ``number``, unless it has done so before."""
        if number is not None:
            self.waits.setdefault(number, len(self.calls))


def _performed(operator: Operator, kwargs: Mapping[str, Any]) -> Any:
    if operator.name == "monitored_barrier" and dist.get_backend(operator.group) == "fake":
        return None  # which has none
    return operator.func(*operator.args, **kwargs)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
