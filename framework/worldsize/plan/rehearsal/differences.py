"""Finds where ranks that must call the same collectives differ, and names the deviating ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import final

from worldsize.plan.rehearsal.calls import Call
from worldsize.plan.rehearsal.groups import Group, described
from worldsize.plan.rehearsal.rank import Rehearsed
from worldsize.spans import named

_END = "makes no further call"


@final
@dataclass(frozen=True)
class Difference:
    """The first call in which the members of a group differ.

    Attributes:
        group: The group.
        place: The number of the call in the group, from 1.
        ranks: Each call there, as text with its line, and the ranks that make it, fewest ranks first.
        when: The moment of the run.
    """

    group: Group
    place: int
    ranks: Sequence[tuple[str, Sequence[int]]]
    when: str

    def __str__(self) -> str:
        (odd, few), *others = self.ranks
        against = "; ".join(f"{named(many)}: {text}" for text, many in others)
        return f"{named(few)}: {odd}, as call {self.place} of {described(self.group)} ({self.when}). {against}."


def differences(ranks: Sequence[Rehearsed]) -> list[Difference]:
    """Return the first difference of each group, the earliest first.

    ``ranks``, in any order, may be part of the world: absent members of a group are assumed to call the same as the
    others. A rank that failed is ignored after its last call.
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
        (_moment(difference, ranks), difference)
        for group, calls in by_group.items()
        for difference in _parting(group, {rank: calls.get(rank, []) for rank in present if rank in group.ranks}, ended)
    ]
    return [difference for _, difference in sorted(differences, key=lambda pair: pair[0])]


def _parting(group: Group, calls: Mapping[int, Sequence[Call]], ended: set[int]) -> Iterator[Difference]:
    """Yield the first call in which members of a group differ, if there is one."""
    for place in range(max(map(len, calls.values()))):
        there = {rank: own[place] for rank, own in calls.items() if place < len(own)}
        gone = [rank for rank, own in calls.items() if place >= len(own) and rank not in ended]
        when = min(there.values(), key=lambda call: call.step).when
        if len({call.described for call in there.values()}) + bool(gone) > 1:
            yield Difference(group, place + 1, _sides(there, gone), when)
            return
        if (sides := _unequal(group, there)) is not None:
            yield Difference(group, place + 1, sides, when)
            return


def _unequal(group: Group, there: Mapping[int, Call]) -> list[tuple[str, list[int]]] | None:
    """Return the first two members of an all-to-all whose numbers of sent and received elements differ."""
    if not any(call.parts for call in there.values()):
        return None
    for giver, taker in permutations(there, 2):
        gives, takes = there[giver].parts, there[taker].parts
        if gives is None or takes is None:
            continue
        given, taken = gives[1][group.ranks.index(taker)], takes[0][group.ranks.index(giver)]
        if given != taken:
            return [
                (f"gives rank {taker} {given} numbers in {there[giver].described} at {there[giver].site}", [giver]),
                (f"takes {taken} of rank {giver} at {there[taker].site}", [taker]),
            ]
    return None


def _sides(there: Mapping[int, Call], gone: Sequence[int]) -> list[tuple[str, list[int]]]:
    sides: dict[str, list[int]] = {}
    for rank, call in there.items():
        sides.setdefault(f"calls {call.described} at {call.site}", []).append(rank)
    if gone:
        sides[_END] = list(gone)
    return sorted(sides.items(), key=lambda side: len(side[1]))


def _moment(difference: Difference, ranks: Sequence[Rehearsed]) -> tuple[int, int]:
    """Return the sort key of a difference: how many calls, of any group, a rank had made before."""
    befores = []
    for each in ranks:
        places = [place for place, call in enumerate(each.calls) if _counts(call, difference.group)]
        if len(places) >= difference.place:
            befores.append(places[difference.place - 1])
    return min(befores), -len(difference.group.ranks)  # if a call went to a wrong group, the right group comes first


def _counts(call: Call, group: Group) -> bool:
    return call.group == group and not call.is_message
