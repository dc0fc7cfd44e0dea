"""Faults that a configuration plants, so that users can rehearse them on their own cluster.

    train.py 'faults=[{action: kill, rank: 1, step: 7}, {action: raise, point: "checkpoint:after-shards", step: 20}]'

Points: checkpoint:begin, checkpoint:in-shard, checkpoint:after-shard, checkpoint:after-shards,
checkpoint:after-manifest, checkpoint:after-complete, checkpoint:after-rename, retention:begin,
retention:in-delete, retention:end, evaluate:begin, push:begin, push:next-server, process:begin, load:begin, step:data,
step:compute.

A rank that is slow from step 100 on, and one whose data are: action "slow" strikes whenever its point is passed.

    train.py 'faults=[{action: slow, rank: 2, seconds: 0.05, step: 100}]'
    train.py 'faults=[{action: slow, rank: 2, seconds: 0.05, point: "step:data"}]'

Action "perturb" moves what a process allocates from then on to other addresses, at every point that it passes; the
result must stay what it is.

    train.py 'faults=[{action: perturb, rank: null, attempt: null}]'
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, final

from worldsize.engine.heap import Heap
from worldsize.errors import ConfigError, neighbours

T = TypeVar("T")
PERTURB = "perturb"
OUT_OF_MEMORY = 137  # what the kernel's killer makes of a process, 128 + SIGKILL


def _send(number: int) -> Callable[[float], None]:
    return lambda _: os.kill(os.getpid(), number)


def _raise(_: float) -> None:
    raise RuntimeError("a fault that the configuration planted")


ACTIONS: Mapping[str, Callable[[float], None]] = {
    "kill": _send(signal.SIGKILL),
    "stop": _send(signal.SIGSTOP),
    "segfault": _send(signal.SIGSEGV),
    "terminate": _send(signal.SIGTERM),
    "interrupt": _send(signal.SIGINT),
    "user_signal": _send(signal.SIGUSR1),
    "out_of_memory": lambda _: os._exit(OUT_OF_MEMORY),
    "raise": _raise,
    "sleep": time.sleep,
    "slow": time.sleep,
}


@final
@dataclass(frozen=True)
class Fault:
    """``action`` on ``rank`` (None: every) when ``step`` begins (None: every step).

    With ``point``: the first time that this point is passed in or after ``step``. ``attempt``: only in that start
    of the run, or of the process if it was started again alone (None: in every one); ``seconds``: of the actions
    sleep and slow; the latter is repeated, at ``point`` "step:compute" unless another is given.
    """

    action: str
    rank: int | None = 0
    step: int | None = None
    point: str | None = None
    attempt: int | None = 1
    seconds: float = 3600.0


@final
@dataclass
class Faults:
    """The faults of one process; :meth:`within` tells it which process and step it is in."""

    planned: Sequence[Fault] = ()
    _mine: list[Fault] = field(default_factory=list)
    _step: int = 0
    _heap: Heap = field(default_factory=Heap)

    @staticmethod
    def parsed(rows: Iterable[Mapping[str, Any]]) -> Faults:
        """Raises ConfigError for an unknown key or action, with its neighbours."""
        return Faults([_fault(row) for row in rows])

    def begin(self, rank: int, attempt: int) -> None:
        """Which process, in which start of the run, this is."""
        self._mine = [f for f in self.planned if f.rank in (None, rank) and f.attempt in (None, attempt)]
        self.at("process:begin")

    def within(self, steps: Iterable[T], first: int) -> Generator[T]:
        """``steps`` as they are; a fault of step n happens before its data are given out."""
        for number, step in enumerate(steps, first + 1):
            self.enter(number)
            yield step

    def enter(self, step: int) -> None:
        """``step`` begins, or goes on."""
        if step != self._step:
            self._step = step
            self._strike(None)
            self.at("step:data")

    def at(self, point: str) -> None:
        if self._mine:
            self._strike(point)

    def _strike(self, point: str | None) -> None:
        for fault in [fault for fault in self._mine if fault.point == point or fault.action == PERTURB]:
            if fault.action == PERTURB:
                self._heap.perturb()
            elif fault.step in (None, self._step) if point is None else self._step >= (fault.step or 0):
                if point is not None and fault.action != "slow":
                    self._mine.remove(fault)
                ACTIONS[fault.action](fault.seconds)


def _fault(row: Mapping[str, Any]) -> Fault:
    known = [each.name for each in fields(Fault)]
    for key in row:
        if key not in known:
            raise ConfigError(f"faults: no key {key!r}{neighbours(key, known)}")
    action = str(row.get("action"))
    if action not in (actions := (*ACTIONS, PERTURB)):
        raise ConfigError(f"faults: no action {action!r}{neighbours(action, actions)}")
    return Fault(**({"point": "step:compute", **row} if action == "slow" else row))
