"""Tasks and results of workers, with stale synchronous parallel (SSP) scheduling.

A scheduler tracks the workers' clocks, and the units of each step that they compute. The rule is from Bösen (Ho et al.
2013, NIPS): a worker that has finished c clocks may begin the next one iff all others have finished at least c - s. s =
0 is bulk-synchronous, s = ∞ asynchronous.

Pure logic without sockets or threads. The caller must hold a lock, and passes the time as an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch

from worldsize.collectives.exact import Sums
from worldsize.strategies.loss_record import LossRecord


@final
@dataclass(frozen=True)
class Unit:
    """The logical ranks of one step that a worker computes as one task."""

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
    """Assigns training units under stale synchronous parallelism (SSP).

    It assigns steps after ``first``, up to the last one allowed by :meth:`allow_steps`.

    Attributes:
        staleness: Maximum clock difference between the fastest and slowest worker, 0 to infinity.
        logical_ranks: Number of logical ranks per step; each is a unit if steps may overlap.
        lease: Seconds without a heartbeat before a worker is declared dead.
        done: Total number of completed logical ranks in steps after ``first``.
        orphans: Units of workers that have left, each with the clock in which it began.
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
        """The last complete step, derived from the number of completed logical ranks."""
        return self.first + self.done // self.logical_ranks

    @property
    def floor(self) -> float:
        """The lowest clock; a lost worker's clock counts until its unit is done."""
        return min([*(member.clock for member in self.members.values()), *self.orphans.values()], default=math.inf)

    def allow_steps(self, last: int) -> None:
        """Allow steps up to ``last`` to begin."""
        self.last = max(self.last, last)

    def add_member(self, name: str, now: float) -> int:
        """Admit or readmit a worker at time ``now``, in seconds; return its initial clock."""
        self.remove_member(name)
        clock = 0 if self.floor == math.inf else int(self.floor)
        self.members[name] = _Member(self._opened if self.staleness == 0 else clock, now + self.lease)
        return self.members[name].clock

    def remove_member(self, name: str) -> Unit | None:
        """Remove a worker; return its unit, which will be reassigned."""
        member = self.members.pop(name, None)
        if member is None:
            return None
        if member.hand is not None and member.hand not in self.orphans:
            self.orphans[member.hand] = member.clock
        elif self.staleness == 0 and member.clock < self._opened:
            self.orphans[self._todo.pop()] = member.clock  # a unit that the worker had not started
        return member.hand

    def renew_lease(self, name: str, now: float) -> bool:
        """Renew a worker's lease at time ``now``, in seconds. Returns False if the worker is not a member."""
        if name in self.members:
            self.members[name].deadline = now + self.lease
        return name in self.members

    def find_expired_members(self, now: float, busy: Container[str] = ()) -> list[str]:
        """Return workers with pending work and an expired lease at time ``now``, in seconds.

        A worker has pending work if it has a unit, has not begun its share of a synchronous step, or is in ``busy``.
        """
        owed = self._opened if self.staleness == 0 else 0  # clocks that each worker must finish
        late = [(name, member) for name, member in self.members.items() if member.deadline < now]
        return [name for name, member in late if member.hand or name in busy or member.clock < owed]

    def finish_unit(self, name: str, unit: Unit) -> bool:
        """Record ``unit`` as completed by worker ``name``. Returns False if the unit is not assigned to that worker."""
        member = self.members.get(name)
        if member is None or member.hand != unit:
            return False
        member.hand = None
        if unit in self.orphans:  # this worker's clock has already advanced in this step
            del self.orphans[unit]
        else:
            member.clock += 1
        self.done += len(unit.logical_ranks)
        return True

    def assign_unit(self, name: str, now: float) -> Unit | None:
        """Assign a unit to worker ``name`` at time ``now``, in seconds; return None if the worker has to wait."""
        member = self.members[name]
        hands = {each.hand for each in self.members.values()}
        orphan = next((unit for unit in self.orphans if unit not in hands), None)
        member.hand = member.hand or orphan or self._pop_unit(member)
        if member.hand:
            member.deadline = now + self.lease
        return member.hand

    def reassign_step(self) -> None:
        """Reassign the step in progress to the current members. Only for ``staleness`` 0."""
        self._opened -= 1
        self.done = (self._opened - self.first) * self.logical_ranks
        self._todo.clear()
        self.orphans.clear()
        for member in self.members.values():
            member.hand, member.clock = None, self._opened

    def _pop_unit(self, member: _Member) -> Unit | None:
        if self.floor < member.clock - self.staleness:
            return None
        if not self._todo and self._opened < self.last:
            self._split_next_step()
        if self.staleness == 0 and member.clock >= self._opened:
            return None  # it has completed its share of this step
        return self._todo.popleft() if self._todo else None

    def _split_next_step(self) -> None:
        """Split the next step into units: one per member, or one per logical rank if steps overlap."""
        self._opened += 1
        ranks = range(self.logical_ranks)
        if self.staleness:
            self._todo.extend(Unit(self._opened, (rank,)) for rank in ranks)
            return
        count = min(len(self.members), self.logical_ranks)
        self._todo.extend(Unit(self._opened, tuple(ranks[i::count])) for i in range(count))
        for spare in list(self.members.values())[count:]:
            spare.clock = self._opened


@final
class EvaluationTasks:
    """One evaluation, split into ``parts`` that are assigned like training units.

    Attributes:
        split: Name of the evaluated split.
        step: The last step before the evaluation.
        done: Number of completed parts.
        sums: Sums and counts of each batch, by batch index.
        names: Names of the metrics.
        hands: The part assigned to each worker.
    """

    def __init__(self, parts: int, *, split: str = "", step: int = 0) -> None:
        self.parts, self.split, self.step = parts, split, step
        self.done = 0
        self.sums: dict[int, Sums] = {}
        self.names: tuple[str, ...] = ()
        self.hands: dict[str, int] = {}
        self._todo = deque(range(parts))

    def assign_part(self, name: str) -> int | None:
        """Assign a part to a worker, or return None if none is left."""
        if not self._todo:
            return None
        self.hands[name] = part = self._todo.popleft()
        return part

    def give_back(self, name: str) -> None:
        """Return the part of a lost worker to the queue."""
        if (part := self.hands.pop(name, None)) is not None:
            self._todo.append(part)

    def record_part(self, name: str, facts: Mapping[str, Any]) -> None:
        """Record the result of a part, if it is assigned to the worker."""
        if self.hands.get(name) == facts["part"]:
            del self.hands[name]
            self.done += 1
            self.names = tuple(facts["names"])
            self.sums.update({int(index): _parse_sums(pairs) for index, pairs in facts["sums"].items()})


def _parse_sums(pairs: Mapping[str, Any]) -> Sums:
    return {name: (torch.tensor(a, dtype=torch.float64), torch.tensor(b)) for name, (a, b) in pairs.items()}


@final
class TaskPool:
    """Assigns tasks: parts of an evaluation first, then training units as ``staleness`` allows.

    Attributes:
        evaluation: The evaluation in progress, or one without parts.
    """

    def __init__(self, staleness: StalenessScheduler) -> None:
        self.staleness = staleness
        self.evaluation = EvaluationTasks(0)
        self._records: dict[tuple[int, int], LossRecord] = {}  # records not yet returned, by step and logical rank
        self._recent: deque[LossRecord] = deque(maxlen=staleness.logical_ranks)  # with metric counts set to 0

    def add_worker(self, name: str, now: float) -> int:
        """Admit or readmit a worker, without a task, at time ``now`` in seconds; return its clock."""
        self.evaluation.give_back(name)
        return self.staleness.add_member(name, now)

    def remove_worker(self, name: str) -> Unit | None:
        """Remove a worker and release its tasks; return its training unit."""
        self.evaluation.give_back(name)
        return self.staleness.remove_member(name)

    def assign_task(self, name: str, now: float) -> dict[str, Any] | None:
        """Return a member's next task at ``now``, in seconds, as TASK fields; None to wait."""
        if (part := self.evaluation.assign_part(name)) is not None:
            self.staleness.renew_lease(name, now)
            which = {"split": self.evaluation.split, "step": self.evaluation.step}
            return {"do": "evaluate", "part": part, "parts": self.evaluation.parts, **which}
        unit = self.staleness.assign_unit(name, now)
        return {"do": "train", "step": unit.step, "ranks": unit.logical_ranks} if unit else None

    def record_task_result(self, name: str, facts: Mapping[str, Any]) -> None:
        """Record the result in a worker's TICK message, if it belongs to the assigned task."""
        if "unit" in facts:
            step, ranks = facts["unit"]
            if self.staleness.finish_unit(name, Unit(step, tuple(ranks))):
                records = [LossRecord.from_message(message) for message in facts["records"]]
                self._records.update({(step, rank): record for rank, record in zip(ranks, records, strict=True)})
                self._recent.extend(record.copy_with_zero_metrics() for record in records)
        if "part" in facts:
            self.evaluation.record_part(name, facts)

    def pop_records(self, step: int) -> list[LossRecord]:
        """Return a loss record per logical rank. Each received metric counts once per run.

        These are the records of ``step``, plus late metrics of earlier steps. If steps overlap and a record of ``step``
        is missing, they are the most recent losses, with the metrics of all records received.
        """
        ranks = range(self.staleness.logical_ranks)
        is_whole = all((step, rank) in self._records for rank in ranks)
        due = {key: self._records.pop(key) for key in sorted(self._records) if key[0] <= step or not is_whole}
        losses = [due[step, rank] for rank in ranks] if is_whole else self._recent
        counted = ([record for (_, rank), record in due.items() if rank == own] for own in ranks)
        return [record.copy_with_metrics(records) for record, records in zip(losses, counted, strict=True)]

    def find_expired_workers(self, now: float) -> list[str]:
        """Return workers with a task and an expired lease at time ``now``, in seconds."""
        return self.staleness.find_expired_members(now, self.evaluation.hands)
