"""Simulates the calls of all ranks together, to find deadlocks and unmatched messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import final

from worldsize.plan.rehearsal.calls import Call
from worldsize.plan.rehearsal.groups import Group, described
from worldsize.plan.rehearsal.rank import Rehearsed
from worldsize.spans import named

_ANY = -1  # stands for any sender
_Route = tuple[Group, int, int, int]  # sender, receiver and tag


@final
@dataclass(frozen=True)
class Deadlock:
    """Ranks that wait for each other forever, each with the call that it waits for."""

    waiting: Mapping[int, Call]

    def __str__(self) -> str:
        calls: dict[str, list[int]] = {}
        for rank, call in self.waiting.items():
            peer = "any rank" if call.peer is None else f"rank {call.peer}"
            with_whom = peer if call.is_message else described(call.group)
            calls.setdefault(f"{call.described} with {with_whom} at {call.site}", []).append(rank)
        sides = "; ".join(f"{named(ranks)}: {text}" for text, ranks in calls.items())
        return f"These wait for each other: {sides}."


def deadlock(ranks: Sequence[Rehearsed]) -> Deadlock | None:
    """Simulate the calls of all ``ranks``, in which a rank waits for a call until all members have made it.

    Return None if all ranks finish. Asynchronous calls block only where the rank waits for them. Sends do not block,
    receives do. Members that were not rehearsed are assumed to have made their calls already.
    """
    play = _Play(ranks)
    while any([play.advance(rank) for rank in play.scripts]):
        pass
    waiting = {rank: play.ahead[rank] for rank in play.scripts if rank in play.ahead}
    return Deadlock(waiting) if waiting else None


@final
class _Play:
    """The progress of the ranks, and the calls that each has made."""

    def __init__(self, ranks: Sequence[Rehearsed]) -> None:
        self.scripts = {each.rank: _script(each) for each in ranks}
        self.ahead: dict[int, Call] = {}
        """By rank: the call for which it waits; one that has ended is not here."""
        self._made: Counter[tuple[int, Group]] = Counter()  # collectives of a rank in a group
        self._sent: Counter[_Route] = Counter()
        self._received: Counter[_Route] = Counter()  # or will be received: the rank has posted the receive
        self._places: dict[tuple[int, int], int] = {}  # by rank and number of a call: its index in its group or route
        self._next: dict[int, tuple[int, Call, bool]] = {}

    def advance(self, rank: int) -> bool:
        """Advance ``rank`` as far as possible; return whether it has made progress."""
        moved = False
        while (act := self._next.pop(rank, None) or next(self.scripts[rank], None)) is not None:
            number, call, is_wait = act
            if not is_wait:
                self._make(rank, number, call)
            elif not self._is_met(rank, number, call):
                self._next[rank], self.ahead[rank] = act, call
                return moved
            moved = True
        self.ahead.pop(rank, None)
        return moved

    def _make(self, rank: int, number: int, call: Call) -> None:
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


def _script(rehearsed: Rehearsed) -> Iterator[tuple[int, Call, bool]]:
    """Yield a rank's actions: the number of a call, the call, and whether it is made here or waited for."""
    later: dict[int, list[int]] = defaultdict(list)
    for number, moment in (rehearsed.waits or {}).items():
        later[moment].append(number)
    for number, call in enumerate(rehearsed.calls):
        yield number, call, False
        for waited in [number] if rehearsed.waits is None else later[number + 1]:
            yield waited, rehearsed.calls[waited], True


# ---------------------------------------------------------------- messages


def mismatches(ranks: Sequence[Rehearsed]) -> list[str]:
    """Describe messages whose receiver expects another form, and messages that nobody receives.

    Ranks that were not rehearsed, or that failed, are assumed to receive every message.
    """
    sent, received = _messages(ranks, "send"), _messages(ranks, "recv")
    succeeded = {each.rank for each in ranks if each.error is None}
    from_any = Counter({(route[0], *route[2:]): len(own) for route, own in received.items() if route[1] == _ANY})
    unmatched = []
    for route, own in sent.items():
        (group, giver, taker, tag), taken = route, received.get(route, [])
        wrong = (pair for pair in zip(own, taken, strict=False) if pair[0].form != pair[1].form)
        for gift, take in islice(wrong, 1):
            unmatched.append(f"rank {giver}: {_gives(gift)}. rank {taker}: receives {take.form} at {take.site}.")
        left = own[len(taken) :]
        for_any = min(len(left), from_any[group, taker, tag])
        from_any[group, taker, tag] -= for_any
        if len(left) > for_any and taker in succeeded:
            unmatched.append(f"rank {giver}: {_gives(left[for_any])}, which never receives it.")
    return unmatched


def _gives(gift: Call) -> str:
    return f"sends {gift.form} at {gift.site} ({gift.when}) to rank {gift.peer}"


def _messages(ranks: Sequence[Rehearsed], operation: str) -> dict[_Route, list[Call]]:
    """Return the messages that were sent or received, by sender and receiver; ``_ANY`` for any sender."""
    messages: dict[_Route, list[Call]] = defaultdict(list)
    for each in ranks:
        for call in each.calls:
            if call.operation == operation:
                peer = _ANY if call.peer is None else call.peer
                ends = (each.rank, peer) if operation == "send" else (peer, each.rank)
                messages[call.group, *ends, call.tag].append(call)
    return messages
