"""Compares the calls of all ranks: deadlocks, unmatched messages, different calls."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from typing import final

from worldsize.messages import format_ranks
from worldsize.plan.rehearsal.calls import Call
from worldsize.plan.rehearsal.operators import Group, describe_group
from worldsize.plan.rehearsal.rank import Rehearsed

_ANY = -1  # any sender
_Route = tuple[Group, int, int, int]  # with sender, receiver and tag


@final
@dataclass(frozen=True)
class Deadlock:
    """A deadlock: the ranks that wait for each other forever, and the call that blocks each."""

    waiting: Mapping[int, Call]

    def __str__(self) -> str:
        calls: dict[str, list[int]] = {}
        for rank, call in self.waiting.items():
            peer = "any rank" if call.peer is None else f"rank {call.peer}"
            with_whom = peer if call.is_message else describe_group(call.group)
            calls.setdefault(f"{call.described} with {with_whom} at {call.site}", []).append(rank)
        sides = "; ".join(f"{format_ranks(ranks)} in {text}" for text, ranks in calls.items())
        return f"deadlock: {sides}."


def deadlock(ranks: Sequence[Rehearsed]) -> Deadlock | None:
    """Simulate the calls of all ``ranks``: a rank waits until all members make the call.

    Return None if all ranks finish. Asynchronous calls block only when the rank waits for them. Sends do not block,
    receives do. Members that were not rehearsed are assumed to have made their calls.
    """
    play = _Play(ranks)
    while any([play.advance_rank(rank) for rank in play.scripts]):
        pass
    waiting = {rank: play.ahead[rank] for rank in play.scripts if rank in play.ahead}
    return Deadlock(waiting) if waiting else None


@final
class _Play:
    """The progress of the ranks, and the calls that each has made."""

    def __init__(self, ranks: Sequence[Rehearsed]) -> None:
        self.scripts = {each.rank: _list_actions(each) for each in ranks}
        self.ahead: dict[int, Call] = {}
        """The call that each rank waits for; ranks that have ended are absent."""
        self._made: Counter[tuple[int, Group]] = Counter()  # number of a rank's collectives in a group
        self._sent: Counter[_Route] = Counter()
        self._received: Counter[_Route] = Counter()  # including posted receives
        self._places: dict[tuple[int, int], int] = {}  # by rank and call number: the call's index in its group or route
        self._next: dict[int, tuple[int, Call, bool]] = {}

    def advance_rank(self, rank: int) -> bool:
        """Advance ``rank`` as far as possible; return whether it made progress."""
        moved = False
        while (act := self._next.pop(rank, None) or next(self.scripts[rank], None)) is not None:
            number, call, is_wait = act
            if not is_wait:
                self._register_call(rank, number, call)
            elif not self._is_met(rank, number, call):
                self._next[rank], self.ahead[rank] = act, call
                return moved
            moved = True
        self.ahead.pop(rank, None)
        return moved

    def _register_call(self, rank: int, number: int, call: Call) -> None:
        if not call.is_message:
            self._places[rank, number] = self._made[rank, call.group]
            self._made[rank, call.group] += 1
        elif call.operation == "recv":
            route = call.group, _ANY if call.peer is None else call.peer, rank, call.tag
            self._places[rank, number] = self._received[route]
            self._received[route] += 1
        elif call.peer is not None:
            self._sent[call.group, rank, call.peer, call.tag] += 1

    def _is_met(self, rank: int, number: int, call: Call) -> bool:
        if call.operation == "send":
            return True
        place = self._places[rank, number]
        if not call.is_message:
            present = (other for other in call.group.ranks if other in self.scripts)
            return all(self._made[other, call.group] > place for other in present)
        if call.peer is not None:
            return call.peer not in self.scripts or self._sent[call.group, call.peer, rank, call.tag] > place
        others = [other for other in call.group.ranks if other != rank]
        if any(other not in self.scripts for other in others):
            return True
        spare = (
            self._sent[call.group, other, rank, call.tag] - self._received[call.group, other, rank, call.tag]
            for other in others
        )
        return sum(max(0, each) for each in spare) > place


def _list_actions(rehearsed: Rehearsed) -> Iterator[tuple[int, Call, bool]]:
    """Yield a rank's actions: call number, call, and whether the action is the wait for the call."""
    later: dict[int, list[int]] = defaultdict(list)
    for number, moment in (rehearsed.waits or {}).items():
        later[moment].append(number)
    for number, call in enumerate(rehearsed.calls):
        yield number, call, False
        for waited in [number] if rehearsed.waits is None else later[number + 1]:
            yield waited, rehearsed.calls[waited], True


# ---------------------------------------------------------------- messages


def mismatches(ranks: Sequence[Rehearsed]) -> list[str]:
    """Describe messages with a different form at the receiver, and messages without a receiver.

    Ranks that were not rehearsed, or that failed, are assumed to receive all messages.
    """
    sent, received = _messages(ranks, "send"), _messages(ranks, "recv")
    succeeded = {each.rank for each in ranks if each.error is None}
    from_any = Counter({(route[0], *route[2:]): len(own) for route, own in received.items() if route[1] == _ANY})
    unmatched = []
    for route, own in sent.items():
        (group, giver, taker, tag), taken = route, received.get(route, [])
        wrong = (pair for pair in zip(own, taken, strict=False) if pair[0].form != pair[1].form)
        for gift, take in islice(wrong, 1):
            unmatched.append(
                f"rank {giver} {_describe_send(gift)}, but rank {taker} receives {take.form} at {take.site}."
            )
        left = own[len(taken) :]
        for_any = min(len(left), from_any[group, taker, tag])
        from_any[group, taker, tag] -= for_any
        if len(left) > for_any and taker in succeeded:
            unmatched.append(f"rank {giver} {_describe_send(left[for_any])}, but the message is never received.")
    return unmatched


def _describe_send(gift: Call) -> str:
    return f"sends {gift.form} at {gift.site} ({gift.when}) to rank {gift.peer}"


def _messages(ranks: Sequence[Rehearsed], operation: str) -> dict[_Route, list[Call]]:
    """Return sent or received messages by group, sender or ``_ANY``, receiver and tag."""
    messages: dict[_Route, list[Call]] = defaultdict(list)
    for each in ranks:
        for call in each.calls:
            if call.operation == operation:
                peer = _ANY if call.peer is None else call.peer
                ends = (each.rank, peer) if operation == "send" else (peer, each.rank)
                messages[call.group, *ends, call.tag].append(call)
    return messages


_END = "no further call"


@final
@dataclass(frozen=True)
class Difference:
    """The first call for which the members of a group differ.

    Attributes:
        group: Process group in which the calls differ.
        place: Number of the call in the group, from 1.
        ranks: Each different call, as text with its line, and the ranks that make it, fewest ranks first.
        when: Position in the run; see :attr:`Call.when`.
    """

    group: Group
    place: int
    ranks: Sequence[tuple[str, Sequence[int]]]
    when: str

    def __str__(self) -> str:
        (odd, few), *others = self.ranks
        against = "; ".join(f"{format_ranks(many)}: {text}" for text, many in others)
        call = f"call {self.place} of {describe_group(self.group)}"
        return f"calls differ at {call} ({self.when}). {format_ranks(few)}: {odd}; {against}."


def differences(ranks: Sequence[Rehearsed]) -> list[Difference]:
    """Return the first difference in each group, earliest first.

    ``ranks``, in any order, may be part of the world. Absent members of a group are assumed to make the same calls as
    the others. A failed rank is ignored after its last call.
    """
    ranks = sorted(ranks, key=lambda each: each.rank)
    by_group: dict[Group, dict[int, list[Call]]] = defaultdict(dict)
    for each in ranks:
        for call in each.calls:
            if not call.is_message:
                by_group[call.group].setdefault(each.rank, []).append(call)
    ended = {each.rank for each in ranks if each.error is not None}
    present = [each.rank for each in ranks]
    differences = [
        (_compute_sort_key(difference, ranks), difference)
        for group, calls in by_group.items()
        for difference in _find_difference(
            group, {rank: calls.get(rank, []) for rank in present if rank in group.ranks}, ended
        )
    ]
    return [difference for _, difference in sorted(differences, key=lambda pair: pair[0])]


def _find_difference(group: Group, calls: Mapping[int, Sequence[Call]], ended: set[int]) -> Iterator[Difference]:
    """Yield the first call for which the members of a group differ, if there is one."""
    for place in range(max(map(len, calls.values()))):
        there = {rank: own[place] for rank, own in calls.items() if place < len(own)}
        gone = [rank for rank, own in calls.items() if place >= len(own) and rank not in ended]
        when = min(there.values(), key=lambda call: call.step).when
        if len({call.described for call in there.values()}) + bool(gone) > 1:
            yield Difference(group, place + 1, _group_by_call(there, gone), when)
            return
        if (sides := _find_unequal_parts(group, there)) is not None:
            yield Difference(group, place + 1, sides, when)
            return


def _find_unequal_parts(group: Group, there: Mapping[int, Call]) -> list[tuple[str, list[int]]] | None:
    """Find the first two ranks of an all-to-all whose sent and expected element counts differ.

    Returns:
        A description and the ranks of both sides; None if all counts agree.
    """
    if not any(call.parts for call in there.values()):
        return None
    for giver, taker in permutations(there, 2):
        gives, takes = there[giver].parts, there[taker].parts
        if gives is None or takes is None:
            continue
        given, taken = gives[1][group.ranks.index(taker)], takes[0][group.ranks.index(giver)]
        if given != taken:
            return [
                (f"{given} numbers to rank {taker} in {there[giver].described} at {there[giver].site}", [giver]),
                (f"{taken} numbers from rank {giver} at {there[taker].site}", [taker]),
            ]
    return None


def _group_by_call(there: Mapping[int, Call], gone: Sequence[int]) -> list[tuple[str, list[int]]]:
    sides: dict[str, list[int]] = {}
    for rank, call in there.items():
        sides.setdefault(f"{call.described} at {call.site}", []).append(rank)
    if gone:
        sides[_END] = list(gone)
    return sorted(sides.items(), key=lambda side: len(side[1]))


def _compute_sort_key(difference: Difference, ranks: Sequence[Rehearsed]) -> tuple[int, int]:
    """Return a sort key: the fewest calls, in any group, that a rank makes before the difference."""
    befores = []
    for each in ranks:
        places = [place for place, call in enumerate(each.calls) if _is_group_call(call, difference.group)]
        if len(places) >= difference.place:
            befores.append(places[difference.place - 1])
    return min(befores), -len(difference.group.ranks)  # if a call went to a wrong group, the right group comes first


def _is_group_call(call: Call, group: Group) -> bool:
    return call.group == group and not call.is_message
