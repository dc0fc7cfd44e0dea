"""Agrees with the processes of a gang that heals on who of them train together, and after which step they go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from worldsize.core import MembershipRecord
from worldsize.world.membership import NEWCOMER, Membership, Message

_MOST_REPEATS = 3  # memberships of the same members from the same step on: the program itself fails


@final
@dataclass
class Roster:
    """Decides on memberships; it does no I/O, so that agents on several hosts can share one.

    A membership ends when a member dies or reports a lost peer; for a newcomer that is ready, or a member that is to
    leave, it ends once all members have trained a few steps in it. Then every member is told to stop, answers with the
    last step that it has completed, and the next membership begins with those that have answered.

    As many train as ``target`` says, as long as so many live, in whole blocks. Further processes that are ready wait as
    spares, and take the places of those that die. One that trained before hands over what it keeps of the state.
    A block consists of groups of neighbours in the list of members, each on one host.

    Args:
        members: Global ranks of the processes that train, at first of those with which the gang begins.
        tell: Sends a message to a process, given its global rank.
        patience: Seconds that a member has to stop before it counts as hung.
        block: The number that train is a multiple of it.
        together: The number of neighbours that are on one host; ``block`` is a multiple of it.
        node_of: Returns the number of the host of a process, given its global rank.
    """

    members: tuple[int, ...]
    tell: Callable[[int, Message], None]
    patience: float
    block: int = 1
    together: int = 1
    node_of: Callable[[int], int] = lambda rank: 0
    number: int = 0
    """Number of the present membership, or of the last one; 0: none has begun."""
    records: list[MembershipRecord] = field(default_factory=list)
    target: int = 0
    """Number of processes that are to train."""
    asked: dict[int, str] = field(default_factory=dict)
    """Who has asked for each process that is to join or to leave on request."""
    _stopped: dict[int, int] = field(default_factory=dict)  # the step of each process that waits for the next one
    _leaving: set[int] = field(default_factory=set)
    _running: list[int] = field(default_factory=list)  # those that the membership needs, and that wait for no other
    _begun: dict[int, bool] = field(default_factory=dict)  # members that train; True: they have trained a few steps
    _lost: dict[int, str] = field(default_factory=dict)  # since the membership began
    _is_complete: bool = False  # a member has trained to the end, and all others have done all steps
    _ended: float = 0.0  # when members of the last membership were told to stop, by the monotonic clock
    _since: float | None = field(default_factory=time.monotonic)  # when members were told to stop; None: they train

    def __post_init__(self) -> None:
        self.target = len(self.members)
        self._running = list(self.members)

    def take(self, rank: int, message: Message) -> None:
        """Take a message of a process."""
        match message:
            case {"stopped": int()} if rank not in self.members and (self._is_complete or rank in self._leaving):
                self._send_off(rank)
            case {"stopped": int(), "step": int(step)}:
                self._stopped[rank] = step
                self._running = [each for each in self._running if each != rank]
                if rank in self.members:
                    self._end()
            case {"lost": int(number)} if number == self.number and (
                any(self._begun.values()) or not _are_equal(self.records)
            ):
                self._end()
            case {"began": int(number), "first": int(first)} if number == self.number:
                self._begun[rank] = False
                self.records[-1]["first"] = first  # earlier than any member's own step if a part of that was lost
                if self.records[-1]["began"] is None and self._begun.keys() >= set(self.members):
                    self.records[-1]["began"] = self.records[-1]["ended"] + time.monotonic() - self._ended
            case {"trained": int(number)} if number == self.number:
                self._begun[rank] = True
        self._change()

    def lose(self, rank: int, cause: str | None) -> None:
        """Go on without a process that died, of ``cause`` (None: it has left); the others stop if they need it."""
        if rank in self.members and cause is not None:
            self._lost[rank] = cause
        is_needed = rank in self.members or rank in self._running
        self._leaving.discard(rank)
        self._forget(rank)
        if is_needed:
            self._end()
        self._form()

    def leave(self, rank: int) -> None:
        """Go on without a process, which ends by itself when it learns that it is no member any more."""
        self.target -= 1
        self._leaving.add(rank)
        if rank in self._stopped and rank not in self.members:
            self._send_off(rank)
        self._change()

    def has_ended(self, rank: int) -> None:
        """Record that a process has ended without an error: it has left, or all training is done."""
        if rank in self._leaving or rank not in self.members:
            self.lose(rank, None)
            return
        self._is_complete = True
        self._forget(rank)
        for newcomer in [each for each in self._stopped if each not in self.members]:
            self._send_off(newcomer)

    def late(self) -> list[int]:
        """Return the members that were told to stop longer ago than ``patience`` and have not answered."""
        if self.seconds_left != 0:
            return []
        return [*self._running]

    @property
    def seconds_left(self) -> float | None:
        """Seconds until :meth:`late` may name a member; None: nobody was told to stop."""
        if self._since is None or self.number == 0:
            return None
        return max(0.0, self._since + self.patience - time.monotonic())

    def _forget(self, rank: int) -> None:
        self._stopped.pop(rank, None)
        self.members = tuple(member for member in self.members if member != rank)
        self._running = [each for each in self._running if each != rank]

    def _send_off(self, rank: int) -> None:
        """Let a process end that waits to join."""
        self._forget(rank)
        self._leaving.discard(rank)
        self.tell(rank, Membership(self.number, ()).message())

    def _next_members(self) -> tuple[int, ...]:
        """Return the members of the next membership: those that stay, then newcomers for the places that are free."""
        staying = {rank: None for rank in self.members if rank not in self._leaving}  # in this order
        newcomers = sorted(self._stopped.keys() - {*self.members})  # neighbours, if they are of one host
        able = _groups([*staying, *newcomers], self.together, self.node_of)
        able.sort(key=lambda group: group[0] not in staying)  # a group of newcomers may be complete before another
        most = max(self.target, len(staying)) // self.block * self.block
        members = [rank for group in able for rank in group][:most]
        return tuple(members[: len(members) // self.block * self.block])

    def _change(self) -> None:
        """End the membership if somebody waits to join or to leave and all members have trained; begin the next one."""
        is_settled = self._since is None and all(self._begun.get(rank) for rank in self.members)
        if is_settled and self._next_members() != self.members:
            self._end()
        self._form()

    def _end(self) -> None:
        """End the present membership, unless it has ended."""
        if self._since is not None:
            return
        self._since = time.monotonic()
        for rank in self._running:
            self.tell(rank, {"stop": self.number})

    def _form(self) -> None:
        """Begin the next membership if all members of the last one, and at first all processes, have stopped."""
        if self._since is None or self._running:
            return
        members = self._next_members()
        if self._is_complete:
            members = ()
        elif not members:
            return
        steps = tuple(self._stopped[rank] for rank in members)
        self._ended = self._since
        ended = time.time() - (time.monotonic() - self._since)
        self.number, self._since = self.number + 1, None
        changed = {*members, *self.members} - ({*members} & {*self.members})
        asked = {rank: self.asked.pop(rank) for rank in sorted(changed & self.asked.keys())}
        trained = [rank for rank, step in self._stopped.items() if rank in self.members or step != NEWCOMER]
        too_many = [rank for rank in trained if rank not in members and rank not in self._leaving]
        waiting = () if self._is_complete else tuple(too_many)
        membership = Membership(self.number, members, steps, dict(self._lost), asked, waiting)
        if members:
            self.records.append(_record(membership, self._leaving.intersection(self._stopped), ended))
        spares = set() if self._is_complete else self._stopped.keys() - {*self.members, *members, *waiting}
        for rank in self._stopped.keys() - spares:  # those that leave learn it from the list
            self.tell(rank, membership.message())
        self._leaving.difference_update(self._stopped)
        self._stopped = {rank: step for rank, step in self._stopped.items() if rank in spares}
        self.members, self._running, self._lost = members, [*members, *waiting], {}
        self._begun.clear()


def _groups(ranks: Sequence[int], size: int, node_of: Callable[[int], int]) -> list[list[int]]:
    """Return groups of ``size`` of these ranks, each on one host, in the order in which they are full."""
    full, begun = list[list[int]](), dict[int, list[int]]()
    for rank in ranks:
        group = begun.setdefault(node_of(rank), [])
        group.append(rank)
        if len(group) == size:
            full.append(begun.pop(node_of(rank)))
    return full


def _record(membership: Membership, left: set[int], ended: float) -> MembershipRecord:
    return {
        "number": membership.number,
        "first": max(0, *membership.steps),
        "members": list(membership.members),
        "lost": {str(rank): cause for rank, cause in membership.lost.items()},
        "left": sorted(left),
        "ended": ended,
        "began": None,
    }


def _are_equal(records: Sequence[MembershipRecord]) -> bool:
    """Return whether memberships have ended at the same step again and again, though nobody was lost."""
    newest = [(each["members"], each["first"]) for each in records[-_MOST_REPEATS:]]
    return newest == newest[-1:] * _MOST_REPEATS
