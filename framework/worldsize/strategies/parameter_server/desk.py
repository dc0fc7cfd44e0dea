"""Deals the work of a run to its workers, and keeps what each sends back until the training loop asks for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, final

import torch

from worldsize.collectives.exact import Sums
from worldsize.errors import WorldsizeError
from worldsize.strategies.parameter_server.clock import Clock, Unit
from worldsize.transport.channel import Channel, LostError
from worldsize.transport.frames import Operation, RefusedError


@dataclass
class _Evaluation:
    """An evaluation, in parts that are dealt like units."""

    parts: int
    todo: deque[int]
    hands: dict[str, int] = field(default_factory=dict)
    sums: dict[int, Sums] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    done: int = 0


@final
class Desk:
    """``timeout``: seconds to go on without any worker."""

    def __init__(self, *, timeout: float) -> None:
        self._timeout = timeout
        self._begun = threading.Event()
        self._changed = threading.Condition()
        self._names: dict[str, int] = {}
        self._losses: dict[tuple[int, int], float] = {}
        self._recent: deque[float] = deque()
        self._evaluation: _Evaluation | None = None
        self._ended: str | None = None

    def begin(self, clock: Clock) -> None:
        """Deal from this clock; who joined before has been waiting for it."""
        self._clock, self._recent = clock, deque(maxlen=clock.logical_ranks)
        self._epochs = count(time.time_ns())  # later than those of whoever led before
        self._begun.set()

    # ------------------------------------------------------------ for connections

    def control(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        """One worker, from its arrival to its end: each TICK says what it has done, each TASK what comes next."""
        name = str(facts["name"])
        self._begun.wait(self._timeout)
        epoch = self._admit(name)
        try:
            channel.tell(Operation.WELCOME, {"epoch": epoch})
            while self._ended is None or name in self._clock.members:
                header = channel.header()
                if header.operation != Operation.TICK:
                    raise RefusedError(f"{header.operation.name} came, TICK was expected")
                channel.tell(Operation.TASK, self._turn(name, epoch, channel.message(header)))
        except LostError:
            self._retire(name, epoch, "its connection ended")
        except RefusedError:
            self._retire(name, epoch, "it was refused")
            raise

    def beat(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        """Signs of life of a worker."""
        channel.tell(Operation.WELCOME, {})
        self._begun.wait(self._timeout)
        while True:
            header = channel.header()
            if header.operation != Operation.HEARTBEAT:
                raise RefusedError(f"{header.operation.name} came, HEARTBEAT was expected")
            with self._changed:
                self._clock.renew(str(facts["name"]), time.monotonic())

    def _admit(self, name: str) -> int:
        with self._changed:
            clock = self._clock.join(name, time.monotonic())
            self._give_back(name)
            self._names[name] = epoch = next(self._epochs)
            self._changed.notify_all()
        print(f"{name} joins at clock {clock}", flush=True)
        return epoch

    def _retire(self, name: str, epoch: int, why: str) -> None:
        with self._changed:
            if self._names.get(name) != epoch:
                return  # it has come back since
            del self._names[name]
            unit = self._clock.retire(name)
            self._give_back(name)
            self._changed.notify_all()
        print(f"{name} is retired: {why}{f'; {unit} is dealt again' if unit else ''}", flush=True)

    def _give_back(self, name: str) -> None:
        if self._evaluation and (part := self._evaluation.hands.pop(name, None)) is not None:
            self._evaluation.todo.append(part)

    def _turn(self, name: str, epoch: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Take what a worker has done, and wait until there is something to do for it."""
        with self._changed:
            if self._names.get(name) != epoch:
                return {"do": "join"}  # it was retired meanwhile
            self._take(name, facts)
            leaves = facts.get("leaves") and len(self._clock.members) > 1
            while not leaves and self._ended is None:
                if self._names.get(name) != epoch:
                    return {"do": "join"}
                if task := self._part(name) or self._unit(name):
                    return task
                self._changed.wait()
            why = self._ended or "asked to leave"
            self._retire(name, epoch, why)
            return {"do": "stop", "why": why}

    def _take(self, name: str, facts: Mapping[str, Any]) -> None:
        if "unit" in facts:
            step, ranks = facts["unit"]
            if self._clock.finish(name, Unit(step, tuple(ranks))):
                self._losses.update({(step, rank): loss for rank, loss in zip(ranks, facts["losses"], strict=True)})
                self._recent.extend(facts["losses"])
        evaluation = self._evaluation
        if "part" in facts and evaluation and evaluation.hands.get(name) == facts["part"]:
            del evaluation.hands[name]
            evaluation.done += 1
            evaluation.names = tuple(facts["names"])
            evaluation.sums.update({int(index): _sums(pairs) for index, pairs in facts["sums"].items()})
        self._changed.notify_all()

    def _part(self, name: str) -> dict[str, Any] | None:
        evaluation = self._evaluation
        if evaluation is None or not evaluation.todo:
            return None
        part = evaluation.hands[name] = evaluation.todo.popleft()
        self._clock.renew(name, time.monotonic())
        return {"do": "evaluate", "part": part, "parts": evaluation.parts}

    def _unit(self, name: str) -> dict[str, Any] | None:
        unit = self._clock.next(name, time.monotonic())
        return {"do": "train", "step": unit.step, "ranks": unit.logical_ranks} if unit else None

    # ------------------------------------------------------------ for the training loop

    @property
    def workers(self) -> list[str]:
        return list(self._clock.members)

    def meet(self, count: int, *, seconds: float) -> None:
        """Wait until as many workers have joined, but not for longer: who comes later is welcome then."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._clock.members) >= count, seconds)

    def open(self, step: int) -> None:
        """Let steps up to ``step`` begin."""
        with self._changed:
            self._clock.open(step)
            self._changed.notify_all()

    def finished(self, step: int) -> list[float]:
        """The losses of ``step`` by logical rank, or, where steps overlap, the last ones, once it is complete.

        Raises:
            WorldsizeError: no worker has been there for too long.
        """
        self._wait_for(lambda: self._clock.complete >= step)
        with self._changed:
            losses = [self._losses.pop((step, rank), None) for rank in range(self._clock.logical_ranks)]
            return [loss for loss in losses if loss is not None] if None not in losses else list(self._recent)

    def evaluate(self, parts: int) -> tuple[dict[int, Sums], tuple[str, ...]]:
        """Sums and counts of each evaluation batch, and the metrics' names; by workers, each part by one."""
        with self._changed:
            self._evaluation = evaluation = _Evaluation(parts, deque(range(parts)))
            self._changed.notify_all()
        self._wait_for(lambda: evaluation.done == parts)
        self._evaluation = None
        return evaluation.sums, evaluation.names

    def end(self, why: str) -> None:
        """Tell each worker, when it has done what it has in hand, to end; returns when all know."""
        with self._changed:
            self._ended = why
            self._changed.notify_all()
        self._wait_for(lambda: not self._clock.members, alone=True)

    def _wait_for(self, done: Callable[[], bool], *, alone: bool = False) -> None:
        since = time.monotonic()
        with self._changed:
            while not done():
                self._changed.wait(self._clock.lease / 4)
                now = time.monotonic()
                busy = self._evaluation.hands if self._evaluation else ()
                late = [(name, self._names[name]) for name in self._clock.expired(now, busy)]
                since = now if self._clock.members else since
                if now - since > self._timeout and not alone:
                    raise WorldsizeError(
                        f"there has been no worker for {self._timeout:g} s (cluster.timeout). "
                        "Look into the workers' logs, or add workers."
                    )
                for name, epoch in late:
                    self._retire(name, epoch, f"no sign of life within its lease of {self._clock.lease:g} s")


def _sums(pairs: Mapping[str, Any]) -> Sums:
    return {name: (torch.tensor(a, dtype=torch.float64), torch.tensor(b)) for name, (a, b) in pairs.items()}
