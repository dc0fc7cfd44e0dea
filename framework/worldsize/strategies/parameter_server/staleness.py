"""Rules for which worker may begin what: the clocks of the workers, and the parts of each step that are dealt to them.

The rule is Bösen's (Ho et al. 2013, NIPS, "stale synchronous parallel"): a worker that has finished c clocks may
begin the next one iff every other one has finished at least c - s. s = 0 is bulk-synchronous, s = ∞ asynchronous.
Pure logic: no sockets, no threads, and time is given from outside.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(frozen=True)
class Unit:
    """A worker's part of one clock: these logical ranks of one step. If it dies, another gets them."""

    step: int
    logical_ranks: tuple[int, ...]


@dataclass
class _Member:
    clock: int
    deadline: float
    hand: Unit | None = None


@final
@dataclass
class StalenessScheduler:
    """Deals units of training under stale synchronous parallelism (SSP).

    Steps after ``first`` up to ``last`` are dealt, none beyond :meth:`open`'s.

    Attributes:
        staleness: Clocks that the fastest worker may be ahead, 0 to infinity.
        logical_ranks: Parts of a step; each is a unit where steps need not be complete before the next begins.
        lease: Seconds without a sign of life after which a worker is taken for dead.
        done: Logical ranks of the steps after ``first`` that are done, all in all.
        orphans: Units that were dealt to workers that are gone, and the clock in which each was begun.
    """

    staleness: float
    logical_ranks: int
    lease: float
    first: int = 0
    last: int = 0
    members: dict[str, _Member] = field(default_factory=dict)
    done: int = 0
    orphans: dict[Unit, int] = field(default_factory=dict)
    _opened: int = 0
    _todo: deque[Unit] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._opened = self.first

    @property
    def complete(self) -> int:
        """The last step of which, counting all logical ranks that are done, none is missing."""
        return self.first + self.done // self.logical_ranks

    @property
    def floor(self) -> float:
        """The slowest clock; a dead worker's counts until what it had begun is done."""
        return min([*(member.clock for member in self.members.values()), *self.orphans.values()], default=math.inf)

    def open(self, last: int) -> None:
        """Let steps up to ``last`` begin."""
        self.last = max(self.last, last)

    def join(self, name: str, now: float) -> int:
        """Admit a worker, or have it come back; it starts as slow as the slowest. Gives its clock."""
        self.retire(name)
        clock = 0 if self.floor == math.inf else int(self.floor)
        self.members[name] = _Member(self._opened if self.staleness == 0 else clock, now + self.lease)
        return self.members[name].clock

    def retire(self, name: str) -> Unit | None:
        """Remove a worker and deal again what it had in hand, which is returned."""
        member = self.members.pop(name, None)
        if member is None:
            return None
        if member.hand is not None and member.hand not in self.orphans:
            self.orphans[member.hand] = member.clock
        elif self.staleness == 0 and member.clock < self._opened:
            self.orphans[self._todo.pop()] = member.clock  # of what was dealt, the part that it had not begun
        return member.hand

    def renew(self, name: str, now: float) -> bool:
        """Note a sign of life; False if the worker is no member (any more)."""
        if name in self.members:
            self.members[name].deadline = now + self.lease
        return name in self.members

    def expired(self, now: float, busy: Container[str] = ()) -> list[str]:
        """List workers whose lease has run out while others wait for them.

        They have a unit in hand, have not begun their part of a step that all take together, or are ``busy`` otherwise.
        """
        owed = self._opened if self.staleness == 0 else 0  # clocks that each has to finish
        late = [(name, member) for name, member in self.members.items() if member.deadline < now]
        return [name for name, member in late if member.hand or name in busy or member.clock < owed]

    def finish(self, name: str, unit: Unit) -> bool:
        """Note that ``name`` has done the unit in its hand; False if it was not in its hand (any more)."""
        member = self.members.get(name)
        if member is None or member.hand != unit:
            return False
        member.hand = None
        if unit in self.orphans:  # done for another: that one's clock goes, this one's has passed already
            del self.orphans[unit]
        else:
            member.clock += 1
        self.done += len(unit.logical_ranks)
        return True

    def next(self, name: str, now: float) -> Unit | None:
        """Deal what ``name`` begins now; None: it has to wait."""
        member = self.members[name]
        hands = {each.hand for each in self.members.values()}
        orphan = next((unit for unit in self.orphans if unit not in hands), None)
        member.hand = member.hand or orphan or self._dealt(member)
        if member.hand:
            member.deadline = now + self.lease
        return member.hand

    def repeat(self) -> None:
        """Deal the step in progress again, to the members of then, whatever of it is done; for ``staleness`` 0."""
        self._opened -= 1
        self.done = (self._opened - self.first) * self.logical_ranks
        self._todo.clear()
        self.orphans.clear()
        for member in self.members.values():
            member.hand, member.clock = None, self._opened

    def _dealt(self, member: _Member) -> Unit | None:
        if self.floor < member.clock - self.staleness:
            return None
        if not self._todo and self._opened < self.last:
            self._deal()
        if self.staleness == 0 and member.clock >= self._opened:
            return None  # it has done its part of this step
        return self._todo.popleft() if self._todo else None

    def _deal(self) -> None:
        """Cut the next step into units: over the members of this moment, or, where none waits, into equal ones."""
        self._opened += 1
        ranks = range(self.logical_ranks)
        if self.staleness:
            self._todo.extend(Unit(self._opened, (rank,)) for rank in ranks)
            return
        count = min(len(self.members), self.logical_ranks)
        self._todo.extend(Unit(self._opened, tuple(ranks[i::count])) for i in range(count))
        for spare in list(self.members.values())[count:]:
            spare.clock = self._opened
