"""The tasks of a run, and the results of workers. Pure logic: callers hold a lock, and the time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, final

import torch

from worldsize.dist.exact import Sums
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.parameter_server.staleness import StalenessScheduler, Unit


@final
class EvaluationTasks:
    """One evaluation, divided into ``parts`` that are assigned like units of training.

    Attributes:
        split: Name of the evaluated split.
        step: The step after which it is evaluated.
        done: Number of completed parts.
        sums: Sums and counts of each batch, by its index.
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

    def deal(self, name: str) -> int | None:
        """Assign a part to a worker; None: none is left."""
        if not self._todo:
            return None
        self.hands[name] = part = self._todo.popleft()
        return part

    def give_back(self, name: str) -> None:
        """Make the part of a worker that has left available again."""
        if (part := self.hands.pop(name, None)) is not None:
            self._todo.append(part)

    def take(self, name: str, facts: Mapping[str, Any]) -> None:
        """Record the result of a part, if it is the one assigned to the worker."""
        if self.hands.get(name) == facts["part"]:
            del self.hands[name]
            self.done += 1
            self.names = tuple(facts["names"])
            self.sums.update({int(index): _sums(pairs) for index, pairs in facts["sums"].items()})


def _sums(pairs: Mapping[str, Any]) -> Sums:
    return {name: (torch.tensor(a, dtype=torch.float64), torch.tensor(b)) for name, (a, b) in pairs.items()}


@final
class TaskPool:
    """Assigns parts of an evaluation first, then units of training as ``staleness`` allows.

    Attributes:
        evaluation: The evaluation in progress; if there is none, one without parts.
    """

    def __init__(self, staleness: StalenessScheduler) -> None:
        self.staleness = staleness
        self.evaluation = EvaluationTasks(0)
        self._records: dict[tuple[int, int], LossRecord] = {}  # records not yet returned, by step and logical rank
        self._recent: deque[LossRecord] = deque(maxlen=staleness.logical_ranks)  # with metrics whose counts are 0

    def join(self, name: str, now: float) -> int:
        """Admit or readmit a worker, without a task, at the time ``now`` in seconds; return its clock."""
        self.evaluation.give_back(name)
        return self.staleness.join(name, now)

    def retire(self, name: str) -> Unit | None:
        """Remove a worker, and make its tasks available again; return its unit of training."""
        self.evaluation.give_back(name)
        return self.staleness.retire(name)

    def deal(self, name: str, now: float) -> dict[str, Any] | None:
        """Return a member's next task at the time ``now`` in seconds, as facts of TASK; None: it has to wait."""
        if (part := self.evaluation.deal(name)) is not None:
            self.staleness.renew(name, now)
            which = {"split": self.evaluation.split, "step": self.evaluation.step}
            return {"do": "evaluate", "part": part, "parts": self.evaluation.parts, **which}
        unit = self.staleness.next(name, now)
        return {"do": "train", "step": unit.step, "ranks": unit.logical_ranks} if unit else None

    def take(self, name: str, facts: Mapping[str, Any]) -> None:
        """Record the result in a worker's message TICK, if it is that of the task assigned to it."""
        if "unit" in facts:
            step, ranks = facts["unit"]
            if self.staleness.finish(name, Unit(step, tuple(ranks))):
                records = [LossRecord.from_message(message) for message in facts["records"]]
                self._records.update({(step, rank): record for rank, record in zip(ranks, records, strict=True)})
                self._recent.extend(record.without_counts() for record in records)
        if "part" in facts:
            self.evaluation.take(name, facts)

    def pop_records(self, step: int) -> list[LossRecord]:
        """Return a record for each logical rank; over the steps of a run, each metric that was sent counts once.

        They are the records of ``step``, plus the metrics of earlier steps that arrived late. If steps overlap and a
        record of ``step`` is missing, they are the most recent losses, with the metrics of all records that arrived.
        """
        ranks = range(self.staleness.logical_ranks)
        is_whole = all((step, rank) in self._records for rank in ranks)
        due = {key: self._records.pop(key) for key in sorted(self._records) if key[0] <= step or not is_whole}
        losses = [due[step, rank] for rank in ranks] if is_whole else self._recent
        counted = ([record for (_, rank), record in due.items() if rank == own] for own in ranks)
        return [record.with_counts_of(records) for record, records in zip(losses, counted, strict=True)]

    def expired(self, now: float) -> list[str]:
        """Return the workers with a task whose lease has expired at the time ``now``, in seconds."""
        return self.staleness.expired(now, self.evaluation.hands)
