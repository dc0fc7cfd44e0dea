"""Barriers for a step with several updates: no worker continues until all have contributed to the update."""

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
        updates: The optimizers to whose update each worker has contributed, by the worker's name.
        records: Records of the losses, by logical rank.
        is_applied: Whether the update is applied; False: the step is abandoned; None: undecided.
    """

    updates: dict[str, tuple[str, ...]] = field(default_factory=dict)
    records: dict[int, LossRecord] = field(default_factory=dict)
    is_applied: bool | None = None


@final
@dataclass(frozen=True)
class Reported:
    """An update to which all workers have contributed their gradients.

    Attributes:
        names: The optimizers; empty: the step has no further update.
        records: Records of the losses, by logical rank.
    """

    names: Sequence[str]
    records: Sequence[LossRecord]


@final
class UpdateRounds:
    """Synchronizes the workers of ``scheduler`` at each update of a step.

    A worker that is lost during a step cannot be replaced: earlier updates are applied already, so that its part of
    them cannot be computed again. :meth:`reported` then returns None, and the step must be repeated.

    Args:
        kind: Name of the recipe's class.
        scheduler: Assigns units, and admits and retires workers.
    """

    def __init__(self, kind: str, scheduler: TaskScheduler) -> None:
        self.kind, self.scheduler = kind, scheduler
        self._round = _Round()
        self._counts: Mapping[str, int] = {}
        self._attempt = 0  # number of the attempt at a step

    # ------------------------------------------------------------ for connections

    def next_task(self, name: str, epoch: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Record a worker's result, a part of an update or any other task, and return its next task."""
        with self.scheduler.changed:
            if "update" in facts:
                if self._join_update(name, facts):
                    return {"do": "continue"}
                facts = {}  # its unit is dropped; it can ask to leave at the end of its next one
            task = self.scheduler.next_task(name, epoch, facts)
            return {**task, "attempt": self._attempt, "counts": self._counts} if task["do"] == "train" else task

    def _join_update(self, name: str, facts: Mapping[str, Any]) -> bool:
        """Record a worker's part of an update, and wait for all others; return False if the step is abandoned."""
        step, ranks = facts["unit_of"]
        member = self.scheduler.staleness.members.get(name)
        if facts["attempt"] != self._attempt or member is None or member.hand != Unit(step, tuple(ranks)):
            return False
        mine = self._round
        mine.updates[name] = tuple(map(str, facts["update"]))
        records = [LossRecord.from_message(message) for message in facts["records"]]
        mine.records.update(zip(ranks, records, strict=True))
        self.scheduler.changed.notify_all()
        self.scheduler.changed.wait_for(lambda: mine.is_applied is not None or self.scheduler.ended is not None)
        return bool(mine.is_applied)

    # ------------------------------------------------------------ for the training loop

    def open(self, step: int, counts: Mapping[str, int], *, again: bool) -> None:
        """Start ``step``, or start it again.

        Args:
            step: The step.
            counts: Number of updates of each optimizer, as the shards count them.
            again: Whether an earlier attempt was abandoned.
        """
        with self.scheduler.changed:
            self._end_round(is_applied=False)
            self._attempt, self._counts = self._attempt + 1, dict(counts)
            if again:
                self.scheduler.staleness.repeat()
            self.scheduler.open(step)

    def reported(self, step: int) -> Reported | None:
        """Wait until all workers have contributed to the next update of ``step``, or have ended the step.

        Returns:
            The update; None: a worker was lost, and the step must be repeated.

        Raises:
            ConfigError: Workers are at different updates.
            WorldsizeError: There was no worker for longer than the timeout.
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
            ends: list[tuple[str, ...]] = [()] if staleness.done > before else []
            first, *others = dict.fromkeys([*current.updates.values(), *ends])
            if others:
                raise updates_differ(self.kind, step, one="one worker", its=first, other="another", has=others[0])
            return Reported(first, [current.records[rank] for rank in sorted(current.records)])

    def complete_update(self) -> None:
        """Release the workers: the update is applied."""
        with self.scheduler.changed:
            self._end_round(is_applied=True)

    def _end_round(self, *, is_applied: bool) -> None:
        self._round.is_applied, self._round = is_applied, _Round()
        self.scheduler.changed.notify_all()
