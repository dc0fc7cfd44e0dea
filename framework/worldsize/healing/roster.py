"""Coordination of a healing gang's memberships: the next members and their first step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from worldsize.core import Block, MembershipRecord
from worldsize.healing.membership import NEWCOMER, Membership, Message
from worldsize.world.roles import find_block

_MOST_REPEATS = 3  # after this many equal memberships (members and first step), the program itself must be failing


@final
@dataclass
class Roster:
    """Decides on memberships.

    I/O is left to the caller, so that the processes may be on any hosts. A membership ends when a member dies or
    reports a lost peer. If a newcomer is ready or a member is to leave, it ends once all members have trained a few
    steps in it. Every member then receives a stop and answers with its last completed step, and the next membership
    starts with the members that have answered.

    The number of members is ``target`` while enough processes are alive, rounded down to whole blocks. If several kinds
    of blocks are possible, those with the most members are formed. Further processes wait as spares that replace dead
    ones; a spare that trained before transfers its shards of the state. A block consists of groups of adjacent members,
    each group on one host.

    Args:
        members: Global ranks of the processes that train, initially those of the first membership.
        tell: Sends a message to the process with a given global rank.
        patience: Seconds for a member to stop before it counts as hung.
        blocks: Possible data-parallel replicas, the preferred one first.
        parts: Maximum number of blocks.
        node_of: Returns the node of the process with a given global rank.
    """

    members: tuple[int, ...]
    tell: Callable[[int, Message], None]
    patience: float
    blocks: Sequence[Block] = (Block(),)
    parts: int = sys.maxsize
    node_of: Callable[[int], int] = lambda rank: 0
    number: int = 0
    """Number of the current or last membership; 0: none has begun."""
    records: list[MembershipRecord] = field(default_factory=list)
    target: int = 0
    """Desired number of training processes."""
    asked: dict[int, str] = field(default_factory=dict)
    """Source of the request, "workers" or "autoscale", for each process requested to join or leave."""
    _stopped: dict[int, int] = field(default_factory=dict)  # steps of the processes that wait for a membership
    _leaving: set[int] = field(default_factory=set)
    _running: list[int] = field(default_factory=list)  # processes that must stop before the next membership
    _begun: dict[int, bool] = field(default_factory=dict)  # members that train: whether they trained a few steps
    _lost: dict[int, str] = field(default_factory=dict)  # causes of death since the membership started
    _is_complete: bool = False  # whether a member has finished, so that all have completed all steps
    _ended: float = 0.0  # monotonic time at which the last membership was stopped
    _since: float | None = field(default_factory=time.monotonic)  # time of a pending stop; None while training

    def __post_init__(self) -> None:
        self.target = len(self.members)
        self._running = list(self.members)

    def apply_message(self, rank: int, message: Message) -> None:
        """Handle a message from process ``rank``, as sent by its :class:`MembershipChannel`."""
        match message:
            case {"stopped": int()} if rank not in self.members and (self._is_complete or rank in self._leaving):
                self._send_off(rank)
            case {"stopped": int(), "step": int(step)}:
                self._stopped[rank] = step
                self._running = [each for each in self._running if each != rank]
                if rank in self.members:
                    self._stop_membership()
            case {"lost": int(number)} if number == self.number and (
                any(self._begun.values()) or not _are_equal(self.records)
            ):
                self._stop_membership()
            case {"began": int(number), "first": int(first)} if number == self.number:
                self._begun[rank] = False
                self.records[-1]["first"] = first  # may precede the members' last steps, if their shards were lost
                if self.records[-1]["began"] is None and self._begun.keys() >= set(self.members):
                    self.records[-1]["began"] = self.records[-1]["ended"] + time.monotonic() - self._ended
            case {"trained": int(number)} if number == self.number:
                self._begun[rank] = True
        self._update_membership()

    def lose_rank(self, rank: int, cause: str | None) -> None:
        """Continue without a process that died of ``cause`` (None if it left)."""
        if rank in self.members and cause is not None:
            self._lost[rank] = cause
        is_needed = rank in self.members or rank in self._running
        self._leaving.discard(rank)
        self._forget_rank(rank)
        if is_needed:
            self._stop_membership()
        self._start_membership()

    def remove_rank(self, rank: int) -> None:
        """Continue without a process, as requested.

        The process exits when the next membership does not include it.
        """
        self.target -= 1
        self._leaving.add(rank)
        if rank in self._stopped and rank not in self.members:
            self._send_off(rank)
        self._update_membership()

    def has_ended(self, rank: int) -> None:
        """Record that a process exited without an error, since it left or training is complete."""
        if rank in self._leaving or rank not in self.members:
            self.lose_rank(rank, None)
            return
        self._is_complete = True
        self._forget_rank(rank)
        for newcomer in [each for each in self._stopped if each not in self.members]:
            self._send_off(newcomer)

    def find_late_members(self) -> list[int]:
        """Return the members that did not answer within ``patience`` seconds after a stop."""
        if self.seconds_left != 0:
            return []
        return [*self._running]

    @property
    def seconds_left(self) -> float | None:
        """Seconds until :meth:`find_late_members` may return members; None if no stop is pending."""
        if self._since is None or self.number == 0:
            return None
        return max(0.0, self._since + self.patience - time.monotonic())

    def _forget_rank(self, rank: int) -> None:
        self._stopped.pop(rank, None)
        self.members = tuple(member for member in self.members if member != rank)
        self._running = [each for each in self._running if each != rank]

    def _send_off(self, rank: int) -> None:
        """Dismiss a process that is waiting to join, so that it exits."""
        self._forget_rank(rank)
        self._leaving.discard(rank)
        self.tell(rank, Membership(self.number, ()).to_message())

    def _next_members(self) -> tuple[int, ...]:
        """Return the next members in whole blocks: staying ones, then newcomers up to the target."""
        return max(map(self._fill_blocks, self.blocks), key=len)  # the first kind of those with most members

    def _fill_blocks(self, block: Block) -> tuple[int, ...]:
        """Return the next members in whole blocks of one kind.

        Their number must be one for which :func:`find_block` returns this kind.
        """
        staying = {rank: None for rank in self.members if rank not in self._leaving}  # an ordered set
        newcomers = sorted(self._stopped.keys() - {*self.members})  # sorted, so that a host's ranks are adjacent
        able = _split_groups([*staying, *newcomers], block.together, self.node_of)
        able.sort(key=lambda group: group[0] not in staying)  # groups of newcomers last
        members = [rank for group in able for rank in group]
        count = min(len(members), max(self.target, len(staying))) // block.size
        sizes = (blocks * block.size for blocks in range(min(count, self.parts), 0, -1))
        return tuple(members[: next((size for size in sizes if find_block(size, self.blocks) == block), 0)])

    def _update_membership(self) -> None:
        """End a settled membership if its members should change; start the next one if possible."""
        is_settled = self._since is None and all(self._begun.get(rank) for rank in self.members)
        if is_settled and self._next_members() != self.members:
            self._stop_membership()
        self._start_membership()

    def _stop_membership(self) -> None:
        """Stop the current membership unless it has already been stopped."""
        if self._since is not None:
            return
        self._since = time.monotonic()
        for rank in self._running:
            self.tell(rank, {"stop": self.number})

    def _start_membership(self) -> None:
        """Start the next membership once all members (initially all processes) have stopped."""
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
            self.records.append(_create_record(membership, self._leaving.intersection(self._stopped), ended))
        spares = set() if self._is_complete else self._stopped.keys() - {*self.members, *members, *waiting}
        for rank in self._stopped.keys() - spares:  # a leaving process exits, since it is not among the members
            self.tell(rank, membership.to_message())
        self._leaving.difference_update(self._stopped)
        self._stopped = {rank: step for rank, step in self._stopped.items() if rank in spares}
        self.members, self._running, self._lost = members, [*members, *waiting], {}
        self._begun.clear()


def _split_groups(ranks: Sequence[int], size: int, node_of: Callable[[int], int]) -> list[list[int]]:
    """Return groups of ``size`` ranks of the same host, in the order in which they become full.

    Ranks left over on a host are in no group.
    """
    full, begun = list[list[int]](), dict[int, list[int]]()
    for rank in ranks:
        group = begun.setdefault(node_of(rank), [])
        group.append(rank)
        if len(group) == size:
            full.append(begun.pop(node_of(rank)))
    return full


def _create_record(membership: Membership, left: set[int], ended: float) -> MembershipRecord:
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
    """Return whether the last memberships were equal: the same members from the same first step."""
    newest = [(each["members"], each["first"]) for each in records[-_MOST_REPEATS:]]
    return newest == newest[-1:] * _MOST_REPEATS
