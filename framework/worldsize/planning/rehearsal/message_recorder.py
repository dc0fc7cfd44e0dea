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

from worldsize.planning.rehearsal.exchange import Place, Said, Words, combined, readable, words_of
from worldsize.planning.rehearsal.groups import Group
from worldsize.planning.rehearsal.operators import MESSAGES, ROOTED, Operator

_ALL_SAY = ("all_reduce", "all_gather", "gather")


@final
@dataclass(frozen=True)
class Exchange:
    """One call: what it is to give this rank, if that is known.

    Attributes:
        answers: The tensors, each for as many outputs as there are of it; None: what torch's fake group gives.
        source: The place in the group of the sender of a message; None: it is none, or is sent.
    """

    answers: Sequence[Tensor] | None
    source: int | None

    def end(self, outputs: Sequence[Tensor]) -> None:
        """Write the answers into the ``outputs`` of the call, tensors of any shapes."""
        if not self.answers or not outputs or not readable(outputs):
            return
        each = len(outputs) // len(self.answers)
        with _disable_current_modes():  # what others say takes no memory of this rank
            for place, answer in enumerate(self.answers):
                _fill(outputs[place * each : (place + 1) * each], answer)


@final
class Conversation:
    """The words of one rank, and its answers.

    Args:
        heard: What all ranks have said in an earlier rehearsal.
    """

    def __init__(self, heard: Said) -> None:
        self.words: dict[Place, Words] = {}
        """What this rank has said in small tensors."""
        self._heard = heard
        self._places: Counter[tuple[Group, tuple[int, ...]]] = Counter()
        self._from_any: Counter[Group] = Counter()

    def begun(self, call: str, group: Group, operator: Operator, site: str, *, is_object: bool) -> Exchange:
        """Describe what this rank puts into ``call``, and find out what it gets."""
        mine = dist.get_rank()
        place = self._place(group, operator, mine)
        with _disable_current_modes():
            if _says(operator, group.ranks.index(mine), is_object=is_object):
                words = words_of(_as_sent(call), site, operator.inputs(), is_object=is_object)
                if words is not None:
                    self.words[place] = words
            answers = self._answers(place, _as_sent(call), operator, mine)
        source = group.ranks.index(place.route[0]) if operator.name == "recv" else None
        return Exchange(answers, source)

    def passed(self, group: Group) -> None:
        """Note a call of ``group`` in which nothing is said."""
        self._places[group, ()] += 1

    def _place(self, group: Group, operator: Operator, mine: int) -> Place:
        route: tuple[int, ...] = ()
        if operator.name == "send":
            route = mine, group.ranks[operator.root or 0], operator.tag
        elif operator.name == "recv":
            route = self._sender(group, operator, mine), mine, operator.tag
        number = self._places[group, route]
        self._places[group, route] += 1
        return Place(group, number, route)

    def _sender(self, group: Group, operator: Operator, mine: int) -> int:
        """Return who sends what is received; if that may be any, the others in turns."""
        if operator.root is not None:
            return group.ranks[operator.root]
        others = [rank for rank in group.ranks if rank != mine]
        self._from_any[group] += 1
        return others[(self._from_any[group] - 1) % len(others)]

    def _answers(self, place: Place, call: str, operator: Operator, mine: int) -> Sequence[Tensor] | None:
        like, name = operator.shown(), operator.name
        if not like or not readable(like):
            return None
        if name in _ALL_SAY:
            heard = self._heard.by_all(place, call, like) if place in self.words else None
            return None if heard is None else combined(name, operator.reduction, heard)
        if name not in (*ROOTED, "recv"):
            return None
        source = place.route[0] if name == "recv" else place.group.ranks[operator.root or 0]
        part = place.group.ranks.index(mine) if name == "scatter" else None
        if source == mine:
            return None if part is None else [operator.inputs()[part]]
        answers = self._heard.by_one(place, source, call, like, part)
        if answers is None and "(objects" in call:  # a size that nobody has said is not what memory holds by chance
            return [torch.zeros_like(each) for each in like]
        return answers


def _says(operator: Operator, place: int, *, is_object: bool) -> bool:
    """Return whether the member at ``place`` has something to say; objects that it is to get do not count."""
    if operator.name in (*_ALL_SAY, "send"):
        return True
    is_root = operator.root == place
    return operator.name in ROOTED and (is_root or (operator.name == "broadcast" and not is_object))


def _as_sent(call: str) -> str:
    """Return the words of a message that both ends have."""
    name, parenthesis, form = call.partition("(")
    return f"message{parenthesis}{form}" if name in MESSAGES else call


def _fill(outputs: Sequence[Tensor], answer: Tensor) -> None:
    """Write ``answer`` into ``outputs``, part after part."""
    parts = torch.split(answer.flatten(), [each.numel() for each in outputs])
    for output, part in zip(outputs, parts, strict=True):
        output.detach().copy_(part.view(output.shape))
