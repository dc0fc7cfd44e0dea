"""Small tensors exchanged between ranks: recorded in one rehearsal, replayed in the next.

A rank is rehearsed without peers, as if they had the same values. If their values differ, it is rehearsed again with
the messages that they sent in the previous rehearsal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from worldsize.plan.rehearsal.operators import MESSAGES, ROOTED, Group, Operator

_LARGEST = 4096  # maximum bytes of floating-point tensors; larger ones do not affect later calls
_LARGEST_INTEGERS = 1 << 20  # maximum bytes of integer tensors, such as indices
_REPORTS = "worldsize/collectives/exact.py"  # sums that are only logged and do not affect later calls
_PAIRS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class CallIndex(NamedTuple):
    """Index of a call in its group, from 0; messages are counted per sender and receiver.

    Attributes:
        group: Process group of the call.
        number: Index of the call in the group.
        route: Sender, receiver and tag of a point-to-point message; empty for collectives.
    """

    group: Group
    number: int
    route: tuple[int, ...] = ()

    @property
    def ranks(self) -> Sequence[int]:
        """The participating ranks."""
        return self.route[:2] or self.group.ranks


class Message(NamedTuple):
    """The small tensors sent by one rank in one call.

    Attributes:
        call: Description of the call, equal at both ends of a message.
        tensors: The bytes of each tensor.
        is_news: Whether the tensors may affect later calls on other ranks.
        is_integral: Whether all are integers or pickled objects, which depend only on the received messages.
    """

    call: str
    tensors: tuple[bytes, ...]
    is_news: bool = True
    is_integral: bool = False


def readable(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are on the CPU and have data, that is, none is a fake or meta tensor."""
    return not any(isinstance(each, FakeTensor) or each.is_meta or each.device.type != "cpu" for each in tensors)


def create_message(call: str, site: str, tensors: Sequence[Tensor], *, is_object: bool) -> Message | None:
    """Return the message of pickled objects or small tensors; None if they are large or fake."""
    if not readable(tensors):
        return None
    is_integral = not any(each.is_floating_point() or each.is_complex() for each in tensors)
    largest = _LARGEST_INTEGERS if is_integral else _LARGEST
    if not is_object and sum(each.numel() * each.element_size() for each in tensors) > largest:
        return None
    contents = tuple(bytes(each.detach().contiguous().flatten().view(torch.uint8).numpy().data) for each in tensors)
    return Message(call, contents, not site.startswith(_REPORTS), is_integral)


@final
@dataclass(frozen=True)
class SentMessages:
    """The messages of all ranks in one rehearsal, by call and rank."""

    messages: Mapping[CallIndex, Mapping[int, Message]] = field(default_factory=dict)

    def read_all_tensors(self, place: CallIndex, call: str, own_tensors: Sequence[Tensor]) -> list[list[Tensor]] | None:
        """Return all members' tensors, in group order, shaped like ``own_tensors``; None if all are unknown.

        A member that is unknown or made a different call at that index is assumed to have ``own_tensors``.
        """
        known = self.messages.get(place)
        if known is None:
            return None
        contents = (_decode_message(known.get(rank), call, own_tensors) for rank in place.group.ranks)
        return [[each.clone() for each in own_tensors] if tensors is None else tensors for tensors in contents]

    def read_rank_tensors(
        self, place: CallIndex, rank: int, call: str, like: Sequence[Tensor], part: int | None = None
    ) -> list[Tensor] | None:
        """Return ``rank``'s tensors in ``call`` (or only index ``part``), shaped like ``like``; None if unknown."""
        message = self.messages.get(place, {}).get(rank)
        if message is not None and part is not None:
            message = message._replace(tensors=message.tensors[part : part + 1])
        return _decode_message(message, call, like)

    def has_news(self, ranks: Collection[int]) -> bool:
        """Return whether any of ``ranks`` would receive a message different from the one it sent."""
        return any(
            len({known.get(rank) for rank in place.ranks if rank in ranks}) > 1
            for place, known in self.messages.items()
            if any(message.is_news for message in known.values())
        )

    @property
    def integers(self) -> Mapping[tuple[CallIndex, int], Message]:
        """Integer messages that may affect other ranks; the same in each repetition once all ranks agree."""
        return {
            (place, rank): message
            for place, known in self.messages.items()
            for rank, message in known.items()
            if message.is_news and message.is_integral
        }


def _decode_message(message: Message | None, call: str, like: Sequence[Tensor]) -> list[Tensor] | None:
    """Decode a message's tensors in the shapes of ``like``; objects are cut or padded."""
    if message is None or message.call != call or len(message.tensors) != len(like):
        return None
    read = []
    for content, each in zip(message.tensors, like, strict=True):
        size = each.numel() * each.element_size()
        if len(content) != size and "(objects" not in call:
            return None
        own = bytearray(content[:size].ljust(size, b"\0"))
        read.append(torch.frombuffer(own, dtype=each.dtype).view(each.shape) if own else each.detach().clone())
    return read


def combine_tensors(operation: str, reduction: str, received: Sequence[Sequence[Tensor]]) -> list[Tensor] | None:
    """Return the result of a gather or reduction: one tensor per position in ``received``.

    ``received``: each member's tensors. A gather flattens and concatenates them. None if the reduction is unknown.
    """
    columns = list(zip(*received, strict=True))
    if operation in ("all_gather", "gather"):
        return [torch.cat([each.flatten() for each in column]) for column in columns]
    if reduction not in _PAIRS:
        return None
    sums = [reduce(_PAIRS[reduction], column) for column in columns]
    return [_divide_sum(each, len(received)) for each in sums] if reduction == "avg" else sums


def _divide_sum(total: Tensor, count: int) -> Tensor:
    return total / count if total.is_floating_point() else total // count


_ALL_SEND = ("all_reduce", "all_gather", "gather")


@final
@dataclass(frozen=True)
class CallResult:
    """The result of one call for this rank, if known.

    Attributes:
        answers: The result tensors, each split over the same number of outputs. None to leave the fake group's result.
        source: The sender's index in the group, for a received message, else None.
    """

    answers: Sequence[Tensor] | None
    source: int | None

    def write_answers(self, outputs: Sequence[Tensor]) -> None:
        """Copy the answers, if known, to the ``outputs`` of the call."""
        if not self.answers or not outputs or not readable(outputs):
            return
        each = len(outputs) // len(self.answers)
        with _disable_current_modes():  # exclude other ranks' tensors from this rank's memory
            for place, answer in enumerate(self.answers):
                _fill_outputs(outputs[place * each : (place + 1) * each], answer)


@final
class MessageRecorder:
    """Records the messages of one rank, and returns other ranks' messages.

    Args:
        received: The messages of all ranks in an earlier rehearsal.
    """

    def __init__(self, received: SentMessages) -> None:
        self.messages: dict[CallIndex, Message] = {}
        """Small tensors sent by this rank."""
        self._received = received
        self._places: Counter[tuple[Group, tuple[int, ...]]] = Counter()
        self._from_any: Counter[Group] = Counter()

    def begin_call(self, call: str, group: Group, operator: Operator, site: str, *, is_object: bool) -> CallResult:
        """Record this rank's input to ``call``, and look up its result."""
        this_rank = dist.get_rank()
        place = self._index_call(group, operator, this_rank)
        with _disable_current_modes():
            if _is_sender(operator, group.ranks.index(this_rank), is_object=is_object):
                message = create_message(_normalize_call(call), site, operator.get_inputs(), is_object=is_object)
                if message is not None:
                    self.messages[place] = message
            answers = self._find_answers(place, _normalize_call(call), operator, this_rank)
        source = group.ranks.index(place.route[0]) if operator.name == "recv" else None
        return CallResult(answers, source)

    def count_call(self, group: Group) -> None:
        """Count a call in ``group`` whose tensors are not recorded, so that the indices of later calls include it."""
        self._places[group, ()] += 1

    def _index_call(self, group: Group, operator: Operator, this_rank: int) -> CallIndex:
        route: tuple[int, ...] = ()
        if operator.name == "send":
            route = this_rank, group.ranks[operator.root or 0], operator.tag
        elif operator.name == "recv":
            route = self._find_sender(group, operator, this_rank), this_rank, operator.tag
        number = self._places[group, route]
        self._places[group, route] += 1
        return CallIndex(group, number, route)

    def _find_sender(self, group: Group, operator: Operator, this_rank: int) -> int:
        """Return the source rank of a receive; if any source is allowed, assume the other ranks in turn."""
        if operator.root is not None:
            return group.ranks[operator.root]
        others = [rank for rank in group.ranks if rank != this_rank]
        self._from_any[group] += 1
        return others[(self._from_any[group] - 1) % len(others)]

    def _find_answers(self, place: CallIndex, call: str, operator: Operator, this_rank: int) -> Sequence[Tensor] | None:
        like, name = operator.get_compared_tensors(), operator.name
        if not like or not readable(like):
            return None
        if name in _ALL_SEND:
            received = self._received.read_all_tensors(place, call, like) if place in self.messages else None
            return None if received is None else combine_tensors(name, operator.reduction, received)
        if name not in (*ROOTED, "recv"):
            return None
        source = place.route[0] if name == "recv" else place.group.ranks[operator.root or 0]
        part = place.group.ranks.index(this_rank) if name == "scatter" else None
        if source == this_rank:
            return None if part is None else [operator.get_inputs()[part]]
        answers = self._received.read_rank_tensors(place, source, call, like, part)
        if answers is None and "(objects" in call:  # objects of unknown size must not be read from uninitialized memory
            return [torch.zeros_like(each) for each in like]
        return answers


def _is_sender(operator: Operator, place: int, *, is_object: bool) -> bool:
    """Return whether the member at index ``place`` sends tensors, other than object buffers."""
    if operator.name in (*_ALL_SEND, "send"):
        return True
    is_root = operator.root == place
    return operator.name in ROOTED and (is_root or (operator.name == "broadcast" and not is_object))


def _normalize_call(call: str) -> str:
    """Give a send and the matching receive the same description; return collectives unchanged."""
    name, parenthesis, form = call.partition("(")
    return f"message{parenthesis}{form}" if name in MESSAGES else call


def _fill_outputs(outputs: Sequence[Tensor], answer: Tensor) -> None:
    """Split the flattened ``answer`` over ``outputs``, in order."""
    parts = torch.split(answer.flatten(), [each.numel() for each in outputs])
    for output, part in zip(outputs, parts, strict=True):
        output.detach().copy_(part.view(output.shape))
