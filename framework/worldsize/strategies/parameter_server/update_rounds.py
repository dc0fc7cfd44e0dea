"""The rounds of a step with several updates: no worker goes on from an update before all have their part in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.parameter_server.staleness import Unit
from worldsize.strategies.parameter_server.task_scheduler import TaskScheduler
from worldsize.strategies.update_pass import updates_differ


@final
@dataclass
class _Round:
    """One update of the step in progress.

    Attributes:
        names: The optimizer whose update each worker has its part in, by the worker's name.
        records: Records of the losses, by logical rank.
        goes_on: Whether the update was made, so that workers go on; False: the step is given up; None: neither yet.
    """

    names: dict[str, str] = field(default_factory=dict)
    records: dict[int, LossRecord] = field(default_factory=dict)
    goes_on: bool | None = None


@final
@dataclass(frozen=True)
class Reported:
    """An update whose gradient the shards have from all workers.

    Attributes:
        name: The optimizer; None: there is no further update in the step.
        records: Records of the losses, by logical rank.
    """

    name: str | None
    records: Sequence[LossRecord]


@final
class UpdateRounds:
    """Has the workers of ``scheduler`` take the updates of a step together.

    A worker that is lost in a step cannot be replaced by another: the first updates are made, so that nobody could
    compute its part of them again. Then :meth:`reported` says that the step has to be repeated.

    Args:
        kind: Name of the recipe's class.
        scheduler: Deals the units, and admits and retires workers.
    """

    def __init__(self, kind: str, scheduler: TaskScheduler) -> None:
        self.kind, self.scheduler = kind, scheduler
        self._round = _Round()
        self._counts: Mapping[str, int] = {}
        self._attempt = 0  # of a step; each has its own

    # ------------------------------------------------------------ for connections

    def next_task(self, name: str, epoch: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Answer what a worker says that it has done: a part of an update, or what any worker does."""
        with self.scheduler.changed:
            if "update" in facts:
                if self._goes_on(name, facts):
                    return {"do": "continue"}
                facts = {}  # its unit counts no more; whether it wants to leave, it will say at the end of another
            task = self.scheduler.next_task(name, epoch, facts)
            return {**task, "attempt": self._attempt, "counts": self._counts} if task["do"] == "train" else task

    def _goes_on(self, name: str, facts: Mapping[str, Any]) -> bool:
        """Take a worker's part of an update, and wait until all others have theirs; False: the step is given up."""
        step, ranks = facts["unit_of"]
        member = self.scheduler.staleness.members.get(name)
        if facts["attempt"] != self._attempt or member is None or member.hand != Unit(step, tuple(ranks)):
            return False
        mine = self._round
        mine.names[name] = str(facts["update"])
        records = [LossRecord.from_message(message) for message in facts["records"]]
        mine.records.update(zip(ranks, records, strict=True))
        self.scheduler.changed.notify_all()
        self.scheduler.changed.wait_for(lambda: mine.goes_on is not None or self.scheduler.ended is not None)
        return bool(mine.goes_on)

    # ------------------------------------------------------------ for the training loop

    def open(self, step: int, counts: Mapping[str, int], *, again: bool) -> None:
        """Let ``step`` begin, or begin again.

        Args:
            step: The step.
            counts: The updates that the shards count of each optimizer.
            again: Whether it has been given up.
        """
        with self.scheduler.changed:
            self._end_round(goes_on=False)
            self._attempt, self._counts = self._attempt + 1, dict(counts)
            if again:
                self.scheduler.staleness.repeat()
            self.scheduler.open(step)

    def reported(self, step: int) -> Reported | None:
        """Wait until all workers have their part in the next update of ``step``, or have ended it.

        Returns:
            The update; None: a worker was lost, and the step is to be repeated.

        Raises:
            ConfigError: They are not at the same update.
            WorldsizeError: No worker has been there for too long.
        """
        staleness, current = self.scheduler.staleness, self._round
        before = (step - 1 - staleness.first) * staleness.logical_ranks

        def arrived() -> bool:
            ended = staleness.done - before
            return bool(staleness.orphans) or len(current.records) + ended == staleness.logical_ranks

        self.scheduler.wait_for(arrived)
        with self.scheduler.changed:
            if staleness.orphans:
                return None
            ends: list[str | None] = [None] if staleness.done > before else []
            first, *others = dict.fromkeys([*current.names.values(), *ends])
            if others:
                raise updates_differ(self.kind, step, one="one worker", its=first, other="another", name=others[0])
            return Reported(first, [current.records[rank] for rank in sorted(current.records)])

    def go_on(self) -> None:
        """Let all go on: the update is made."""
        with self.scheduler.changed:
            self._end_round(goes_on=True)

    def _end_round(self, *, goes_on: bool) -> None:
        self._round.goes_on, self._round = goes_on, _Round()
        self.scheduler.changed.notify_all()
