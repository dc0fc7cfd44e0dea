"""Records a rank's small tensors in each call, and replays those of other ranks from an earlier rehearsal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from worldsize.plan.rehearsal.exchange import Message, Place, SentMessages, combined, message_of, readable
from worldsize.plan.rehearsal.groups import Group
from worldsize.plan.rehearsal.operators import MESSAGES, ROOTED, Operator

_ALL_SEND = ("all_reduce", "all_gather", "gather")


@final
@dataclass(frozen=True)
class Exchange:
    """The result of one call for this rank, if known.

    Attributes:
        answers: The result tensors, each split over an equal number of outputs; None: those of torch's fake group.
        source: The sender's index in the group, for a received message; else None.
    """

    answers: Sequence[Tensor] | None
    source: int | None

    def end(self, outputs: Sequence[Tensor]) -> None:
        """Write the answers into the ``outputs`` of the call, tensors of any shapes."""
        if not self.answers or not outputs or not readable(outputs):
            return
        each = len(outputs) // len(self.answers)
        with _disable_current_modes():  # other ranks' tensors do not count as this rank's memory
            for place, answer in enumerate(self.answers):
                _fill(outputs[place * each : (place + 1) * each], answer)


@final
class MessageRecorder:
    """Records the messages of one rank, and answers with those of other ranks.

    Args:
        received: The messages of all ranks in an earlier rehearsal.
    """

    def __init__(self, received: SentMessages) -> None:
        self.messages: dict[Place, Message] = {}
        """Small tensors that this rank has sent."""
        self._received = received
        self._places: Counter[tuple[Group, tuple[int, ...]]] = Counter()
        self._from_any: Counter[Group] = Counter()

    def begun(self, call: str, group: Group, operator: Operator, site: str, *, is_object: bool) -> Exchange:
        """Record this rank's input of ``call``, and look up its result."""
        this_rank = dist.get_rank()
        place = self._place(group, operator, this_rank)
        with _disable_current_modes():
            if _sends(operator, group.ranks.index(this_rank), is_object=is_object):
                message = message_of(_as_sent(call), site, operator.inputs(), is_object=is_object)
                if message is not None:
                    self.messages[place] = message
            answers = self._answers(place, _as_sent(call), operator, this_rank)
        source = group.ranks.index(place.route[0]) if operator.name == "recv" else None
        return Exchange(answers, source)

    def passed(self, group: Group) -> None:
        """Count a call of ``group`` without recorded tensors."""
        self._places[group, ()] += 1

    def _place(self, group: Group, operator: Operator, this_rank: int) -> Place:
        route: tuple[int, ...] = ()
        if operator.name == "send":
            route = this_rank, group.ranks[operator.root or 0], operator.tag
        elif operator.name == "recv":
            route = self._sender(group, operator, this_rank), this_rank, operator.tag
        number = self._places[group, route]
        self._places[group, route] += 1
        return Place(group, number, route)

    def _sender(self, group: Group, operator: Operator, this_rank: int) -> int:
        """Return the sender of a received message; if it may be any rank, the others in turns."""
        if operator.root is not None:
            return group.ranks[operator.root]
        others = [rank for rank in group.ranks if rank != this_rank]
        self._from_any[group] += 1
        return others[(self._from_any[group] - 1) % len(others)]

    def _answers(self, place: Place, call: str, operator: Operator, this_rank: int) -> Sequence[Tensor] | None:
        like, name = operator.shown(), operator.name
        if not like or not readable(like):
            return None
        if name in _ALL_SEND:
            received = self._received.from_all(place, call, like) if place in self.messages else None
            return None if received is None else combined(name, operator.reduction, received)
        if name not in (*ROOTED, "recv"):
            return None
        source = place.route[0] if name == "recv" else place.group.ranks[operator.root or 0]
        part = place.group.ranks.index(this_rank) if name == "scatter" else None
        if source == this_rank:
            return None if part is None else [operator.inputs()[part]]
        answers = self._received.from_one(place, source, call, like, part)
        if answers is None and "(objects" in call:  # an unknown size must not be read from uninitialized memory
            return [torch.zeros_like(each) for each in like]
        return answers


def _sends(operator: Operator, place: int, *, is_object: bool) -> bool:
    """Return whether the member at ``place`` sends tensors; buffers for objects to receive do not count."""
    if operator.name in (*_ALL_SEND, "send"):
        return True
    is_root = operator.root == place
    return operator.name in ROOTED and (is_root or (operator.name == "broadcast" and not is_object))


def _as_sent(call: str) -> str:
    """Return the description of a message that is the same at both ends."""
    name, parenthesis, form = call.partition("(")
    return f"message{parenthesis}{form}" if name in MESSAGES else call


def _fill(outputs: Sequence[Tensor], answer: Tensor) -> None:
    """Copy consecutive parts of ``answer`` into ``outputs``, tensors of any shapes."""
    parts = torch.split(answer.flatten(), [each.numel() for each in outputs])
    for output, part in zip(outputs, parts, strict=True):
        output.detach().copy_(part.view(output.shape))
