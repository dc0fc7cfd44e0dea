"""The tasks of a run, and what workers send back. Pure logic: callers hold a lock, and time is given from outside."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, final

import torch

from worldsize.collectives.exact import Sums
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.parameter_server.staleness import StalenessScheduler, Unit


@final
class EvaluationTasks:
    """One evaluation, cut into ``parts`` that are dealt like units of training.

    Attributes:
        split: The data that are evaluated.
        step: The step after which they are.
        done: The number of parts that are done.
        sums: Sums and counts of each batch, by its index.
        names: The names of the metrics.
        hands: The part that each worker has in hand.
    """

    def __init__(self, parts: int, *, split: str = "", step: int = 0) -> None:
        self.parts, self.split, self.step = parts, split, step
        self.done = 0
        self.sums: dict[int, Sums] = {}
        self.names: tuple[str, ...] = ()
        self.hands: dict[str, int] = {}
        self._todo = deque(range(parts))

    def deal(self, name: str) -> int | None:
        """Give a worker a part; None: there is none left."""
        if not self._todo:
            return None
        self.hands[name] = part = self._todo.popleft()
        return part

    def give_back(self, name: str) -> None:
        """Deal the part of a worker that has gone to another."""
        if (part := self.hands.pop(name, None)) is not None:
            self._todo.append(part)

    def take(self, name: str, facts: Mapping[str, Any]) -> None:
        """Take a part that a worker has done, if it is the one that it has in hand."""
        if self.hands.get(name) == facts["part"]:
            del self.hands[name]
            self.done += 1
            self.names = tuple(facts["names"])
            self.sums.update({int(index): _sums(pairs) for index, pairs in facts["sums"].items()})


def _sums(pairs: Mapping[str, Any]) -> Sums:
    return {name: (torch.tensor(a, dtype=torch.float64), torch.tensor(b)) for name, (a, b) in pairs.items()}


@final
class TaskPool:
    """Deals the parts of an evaluation first, then units of training as ``staleness`` allows.

    Attributes:
        evaluation: The evaluation in progress; if there is none, one without parts.
    """

    def __init__(self, staleness: StalenessScheduler) -> None:
        self.staleness = staleness
        self.evaluation = EvaluationTasks(0)
        self._records: dict[tuple[int, int], LossRecord] = {}  # not handed over yet, by step and logical rank
        self._recent: deque[LossRecord] = deque(maxlen=staleness.logical_ranks)  # their metrics count nothing

    def join(self, name: str, now: float) -> int:
        """Admit a worker, or have it come back with empty hands; gives its clock."""
        self.evaluation.give_back(name)
        return self.staleness.join(name, now)

    def retire(self, name: str) -> Unit | None:
        """Remove a worker and deal again what it had in hand; gives the unit of training among it."""
        self.evaluation.give_back(name)
        return self.staleness.retire(name)

    def deal(self, name: str, now: float) -> dict[str, Any] | None:
        """Give a member its next task, as the message TASK; None: it has to wait."""
        if (part := self.evaluation.deal(name)) is not None:
            self.staleness.renew(name, now)
            which = {"split": self.evaluation.split, "step": self.evaluation.step}
            return {"do": "evaluate", "part": part, "parts": self.evaluation.parts, **which}
        unit = self.staleness.next(name, now)
        return {"do": "train", "step": unit.step, "ranks": unit.logical_ranks} if unit else None

    def take(self, name: str, facts: Mapping[str, Any]) -> None:
        """Take what a worker has done, as its message TICK says, if it is what it has in hand."""
        if "unit" in facts:
            step, ranks = facts["unit"]
            if self.staleness.finish(name, Unit(step, tuple(ranks))):
                records = [LossRecord.from_message(message) for message in facts["records"]]
                self._records.update({(step, rank): record for rank, record in zip(ranks, records, strict=True)})
                self._recent.extend(record.without_counts() for record in records)
        if "part" in facts:
            self.evaluation.take(name, facts)

    def pop_records(self, step: int) -> list[LossRecord]:
        """Hand over a record for each logical rank; over the steps of a run, each metric that was sent counts once.

        They are the records of ``step``, with the metrics of earlier steps' that came too late for these. If steps
        overlap and one of ``step`` is missing, they are the last losses, with the metrics of all that has arrived.
        """
        ranks = range(self.staleness.logical_ranks)
        is_whole = all((step, rank) in self._records for rank in ranks)
        due = {key: self._records.pop(key) for key in sorted(self._records) if key[0] <= step or not is_whole}
        losses = [due[step, rank] for rank in ranks] if is_whole else self._recent
        counted = ([record for (_, rank), record in due.items() if rank == own] for own in ranks)
        return [record.with_counts_of(records) for record, records in zip(losses, counted, strict=True)]

    def expired(self, now: float) -> list[str]:
        """List the workers whose lease has run out while they had a task in hand."""
        return self.staleness.expired(now, self.evaluation.hands)
