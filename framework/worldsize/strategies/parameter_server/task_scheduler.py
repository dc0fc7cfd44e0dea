"""Deals the work of a run to its workers, and keeps what each sends back until the training loop asks for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, final

import torch

from worldsize.collectives.exact import Sums
from worldsize.errors import WorldsizeError
from worldsize.strategies.parameter_server.staleness import StalenessScheduler, Unit


@final
class _Evaluation:
    """One evaluation, cut into ``parts`` that are dealt like units of training."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.done = 0
        self.sums: dict[int, Sums] = {}
        self.names: tuple[str, ...] = ()
        self.hands: dict[str, int] = {}  # the part that each worker has in hand
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


@final
class TaskScheduler:
    """Decides what each worker does next. Safe for threads: workers' connections on one side, the loop on the other.

    Args:
        staleness: Which worker may begin what.
        timeout: Seconds to go on without any worker.
    """

    def __init__(self, staleness: StalenessScheduler, *, timeout: float) -> None:
        self._staleness, self._timeout = staleness, timeout
        self._epochs = count(time.time_ns())  # later than those of whoever led before
        self._changed = threading.Condition()
        self._epoch_of: dict[str, int] = {}
        self._losses: dict[tuple[int, int], float] = {}
        self._recent: deque[float] = deque(maxlen=staleness.logical_ranks)
        self._evaluation: _Evaluation | None = None
        self._ended: str | None = None

    # ------------------------------------------------------------ for connections

    def admit(self, name: str) -> int:
        """Make a worker a member of the run; the epoch of its membership."""
        with self._changed:
            clock = self._staleness.join(name, time.monotonic())
            self._give_back(name)
            self._epoch_of[name] = epoch = next(self._epochs)
            self._changed.notify_all()
        print(f"{name} joins at clock {clock}", flush=True)
        return epoch

    def expects(self, name: str) -> bool:
        """Whether a worker is to ask for tasks any more."""
        return self._ended is None or name in self._staleness.members

    def renew(self, name: str) -> None:
        """Note a worker's sign of life."""
        with self._changed:
            self._staleness.renew(name, time.monotonic())

    def retire(self, name: str, epoch: int, why: str) -> None:
        """End the membership that began in ``epoch``, unless the worker has come back since."""
        with self._changed:
            if self._epoch_of.get(name) != epoch:
                return
            del self._epoch_of[name]
            unit = self._staleness.retire(name)
            self._give_back(name)
            self._changed.notify_all()
        print(f"{name} is retired: {why}{f'; {unit} is dealt again' if unit else ''}", flush=True)

    def _give_back(self, name: str) -> None:
        if self._evaluation:
            self._evaluation.give_back(name)

    def next_task(self, name: str, epoch: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Take what a worker has done, and wait until there is something to do for it."""
        with self._changed:
            if self._epoch_of.get(name) != epoch:
                return {"do": "join"}  # it was retired meanwhile
            self._take(name, facts)
            leaves = facts.get("leaves") and len(self._staleness.members) > 1
            while not leaves and self._ended is None:
                if self._epoch_of.get(name) != epoch:
                    return {"do": "join"}
                if task := self._deal(name):
                    return task
                self._changed.wait()
            why = self._ended or "asked to leave"
            self.retire(name, epoch, why)
            return {"do": "stop", "why": why}

    def _take(self, name: str, facts: Mapping[str, Any]) -> None:
        if "unit" in facts:
            step, ranks = facts["unit"]
            if self._staleness.finish(name, Unit(step, tuple(ranks))):
                self._losses.update({(step, rank): loss for rank, loss in zip(ranks, facts["losses"], strict=True)})
                self._recent.extend(facts["losses"])
        if "part" in facts and self._evaluation:
            self._evaluation.take(name, facts)
        self._changed.notify_all()

    def _deal(self, name: str) -> dict[str, Any] | None:
        now = time.monotonic()
        evaluation = self._evaluation
        if evaluation and (part := evaluation.deal(name)) is not None:
            self._staleness.renew(name, now)
            return {"do": "evaluate", "part": part, "parts": evaluation.parts}
        unit = self._staleness.next(name, now)
        return {"do": "train", "step": unit.step, "ranks": unit.logical_ranks} if unit else None

    # ------------------------------------------------------------ for the training loop

    @property
    def workers(self) -> list[str]:
        """Names of the workers that are members now."""
        return list(self._staleness.members)

    def meet(self, count: int, *, seconds: float) -> None:
        """Wait until ``count`` workers have joined, but not for longer: who comes later is welcome then."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._staleness.members) >= count, seconds)

    def open(self, step: int) -> None:
        """Let steps up to ``step`` begin."""
        with self._changed:
            self._staleness.open(step)
            self._changed.notify_all()

    def finished(self, step: int) -> list[float]:
        """Wait for ``step``, and give its losses by logical rank, or the last ones where steps overlap.

        Raises:
            WorldsizeError: No worker has been there for too long.
        """
        self._wait_for(lambda: self._staleness.complete >= step)
        with self._changed:
            losses = [self._losses.pop((step, rank), None) for rank in range(self._staleness.logical_ranks)]
            return [loss for loss in losses if loss is not None] if None not in losses else list(self._recent)

    def evaluate(self, parts: int) -> tuple[dict[int, Sums], tuple[str, ...]]:
        """Have workers evaluate, each part by one; sums and counts of each batch by its index, and metrics' names."""
        with self._changed:
            self._evaluation = evaluation = _Evaluation(parts)
            self._changed.notify_all()
        self._wait_for(lambda: evaluation.done == parts)
        self._evaluation = None
        return evaluation.sums, evaluation.names

    def end(self, why: str) -> None:
        """Tell each worker to end when it has done what it has in hand; returns when all know."""
        with self._changed:
            self._ended = why
            self._changed.notify_all()
        self._wait_for(lambda: not self._staleness.members, alone=True)

    def _wait_for(self, done: Callable[[], bool], *, alone: bool = False) -> None:
        """Wait, and retire workers whose lease runs out; unless ``alone``, some worker must be there."""
        since = time.monotonic()
        with self._changed:
            while not done():
                self._changed.wait(self._staleness.lease / 4)
                now = time.monotonic()
                busy = self._evaluation.hands if self._evaluation else ()
                late = [(name, self._epoch_of[name]) for name in self._staleness.expired(now, busy)]
                since = now if self._staleness.members else since
                if now - since > self._timeout and not alone:
                    raise WorldsizeError(
                        f"there has been no worker for {self._timeout:g} s (cluster.timeout). "
                        "Look into the workers' logs, or add workers."
                    )
                for name, epoch in late:
                    self.retire(name, epoch, f"no sign of life within its lease of {self._staleness.lease:g} s")


def _sums(pairs: Mapping[str, Any]) -> Sums:
    return {name: (torch.tensor(a, dtype=torch.float64), torch.tensor(b)) for name, (a, b) in pairs.items()}
