"""Finds where ranks that must call the same collectives do not, and names who is alone with what it does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from worldsize.planning.rehearsal.calls import Call
from worldsize.planning.rehearsal.groups import Group
from worldsize.planning.rehearsal.rank import Rehearsed

_END = "makes no further call"


@final
@dataclass(frozen=True)
class Difference:
    """The place where the calls of a group part.

    Attributes:
        group: The group.
        place: The number of the call in the group, from 1.
        ranks: What the ranks do there, the fewest first: a call in words with its line, and those who make it.
        step: The step.
    """

    group: Group
    place: int
    ranks: Sequence[tuple[str, Sequence[int]]]
    step: int

    def __str__(self) -> str:
        (odd, few), *others = self.ranks
        against = "; ".join(f"{named(many)}: {text}" for text, many in others)
        return (
            f"{named(few)}: {odd}, as call {self.place} of {described(self.group)} "
            f"({f'step {self.step}' if self.step else 'before the first step'}). {against}."
        )


def differences(ranks: Sequence[Rehearsed]) -> list[Difference]:
    """Return where groups part, the earliest first; of each group, the first place alone.

    ``ranks``, in any order, may be some of the world's: a group's absent members are taken to do what the others do. A
    rank that an error has ended is left out from where it ended.
    """
    ranks = sorted(ranks, key=lambda each: each.rank)
    by_group: dict[Group, dict[int, list[Call]]] = defaultdict(dict)
    for each in ranks:
        for call in each.calls:
            if call.peer is None:
                by_group[call.group].setdefault(each.rank, []).append(call)
    ended = {each.rank for each in ranks if each.error is not None}
    present = [each.rank for each in ranks]
    found = [
        (_moment(difference, ranks), difference)
        for group, calls in by_group.items()
        for difference in _parting(group, {rank: calls.get(rank, []) for rank in present if rank in group.ranks}, ended)
    ]
    return [difference for _, difference in sorted(found, key=lambda pair: pair[0])]


def _parting(group: Group, calls: Mapping[int, Sequence[Call]], ended: set[int]) -> Iterator[Difference]:
    """Yield the first place at which members of a group do different things, if there is one."""
    for place in range(max(map(len, calls.values()))):
        there = {rank: own[place] for rank, own in calls.items() if place < len(own)}
        gone = [rank for rank, own in calls.items() if place >= len(own) and rank not in ended]
        kinds = Counter(call.described for call in there.values())
        if len(kinds) + bool(gone) < 2:
            continue
        yield Difference(group, place + 1, _sides(there, gone), min(call.step for call in there.values()))
        return


def _sides(there: Mapping[int, Call], gone: Sequence[int]) -> list[tuple[str, list[int]]]:
    sides: dict[str, list[int]] = {}
    for rank, call in there.items():
        sides.setdefault(f"calls {call.described} at {call.site}", []).append(rank)
    if gone:
        sides[_END] = list(gone)
    return sorted(sides.items(), key=lambda side: len(side[1]))


def _moment(difference: Difference, ranks: Sequence[Rehearsed]) -> tuple[int, int]:
    """Return how early ranks part: how many calls, of any group, a rank had made before that has one there."""
    befores = []
    for each in ranks:
        places = [place for place, call in enumerate(each.calls) if call.group == difference.group]
        if len(places) >= difference.place:
            befores.append(places[difference.place - 1])
    return min(befores), -len(difference.group.ranks)  # of a wrong group and the right one, first the right one


# ---------------------------------------------------------------- ranks that wait for each other


@final
@dataclass(frozen=True)
class Deadlock:
    """Ranks that wait for each other for ever, each with the call in which it waits."""

    waiting: Mapping[int, Call]

    def __str__(self) -> str:
        calls: dict[str, list[int]] = {}
        for rank, call in self.waiting.items():
            with_whom = described(call.group) if call.peer is None else f"rank {call.peer}"
            calls.setdefault(f"{call.described} with {with_whom} at {call.site}", []).append(rank)
        sides = "; ".join(f"{named(ranks)}: {text}" for text, ranks in calls.items())
        return f"These wait for each other: {sides}."


def deadlock(ranks: Sequence[Rehearsed]) -> Deadlock | None:
    """Play the calls of all ``ranks``, each of which waits until the other members have come to it; None: all end.

    A message is sent without waiting, and waited for. Members that were not rehearsed are taken to be there already.
    """
    calls, places = {each.rank: each.calls for each in ranks}, dict.fromkeys((each.rank for each in ranks), 0)
    sent: Counter[tuple[int, int, Group]] = Counter()

    def current(rank: int) -> Call | None:
        return calls[rank][places[rank]] if places[rank] < len(calls[rank]) else None

    def goes_on(rank: int, call: Call) -> bool:
        if call.operation == "send":
            return True
        if call.operation == "recv":
            return call.peer is None or call.peer not in calls or sent[call.peer, rank, call.group] > 0
        others = (current(other) for other in call.group.ranks if other in calls)
        return all(other is not None and other.group == call.group and other.peer is None for other in others)

    moved = True
    while moved:
        moved = False
        for rank in calls:
            call = current(rank)
            if call is None or not goes_on(rank, call):
                continue
            moved = True
            if call.peer is None and call.operation != "recv":
                for other in call.group.ranks:
                    if other in calls:
                        places[other] += 1
                continue
            if call.operation == "send" and call.peer is not None:
                sent[rank, call.peer, call.group] += 1
            elif call.peer is not None:
                sent[call.peer, rank, call.group] -= 1
            places[rank] += 1
    waiting = {rank: call for rank in calls if (call := current(rank)) is not None}
    return Deadlock(waiting) if waiting else None


# ---------------------------------------------------------------- in words


def named(ranks: Sequence[int]) -> str:
    """Name ranks for people: "rank 5", "ranks 0-4, 6-63"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def described(group: Group) -> str:
    """Name a group for people."""
    which = f", number {group.number + 1} of them" if group.number else ""
    return f"the group of {named(group.ranks)}{which}"


def spans(ranks: Sequence[int]) -> str:
    """Write ranks in short: "0-3, 8", or "0, 8 .. 56" where they are at equal distances."""
    ordered = sorted(ranks)
    distances = {after - before for before, after in pairwise(ordered)}
    if len(ordered) > 3 and len(distances) == 1 and distances != {1}:
        return f"{ordered[0]}, {ordered[1]} .. {ordered[-1]}"
    texts, first = [], 0
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or ordered[place] != ordered[place - 1] + 1:
            start, end = ordered[first], ordered[place - 1]
            texts.append(f"{start}" if start == end else f"{start}-{end}")
            first = place
    return ", ".join(texts)
