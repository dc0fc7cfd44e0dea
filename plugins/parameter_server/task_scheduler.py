"""Assigns tasks to the workers of a run, and collects the results for the training loop.

The leading server sends tasks to workers and receives their heartbeats.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, final

from plugins.parameter_server.protocol import Operation
from plugins.parameter_server.task_pool import EvaluationTasks, StalenessScheduler, TaskPool
from worldsize.collectives.exact import Sums
from worldsize.collectives.group import PEER_WAIT
from worldsize.errors import WorldsizeError
from worldsize.net.channel import Channel, LostError
from worldsize.net.frames import CommonOperation, RefusedError
from worldsize.strategies.loss_record import LossRecord

_logger = logging.getLogger(__name__)


@final
class TaskScheduler:
    """Decides each worker's next task. Thread-safe: connections and the training loop call it.

    Args:
        staleness: Decides which worker may begin which unit.
        timeout: Seconds to wait without any worker.

    Attributes:
        changed: Guards all state, including ``staleness``; notified after each change.
        ended: Why the run has ended, or None.
    """

    def __init__(self, staleness: StalenessScheduler, *, timeout: float) -> None:
        self.staleness, self._pool, self._timeout = staleness, TaskPool(staleness), timeout
        self._epochs = count(time.time_ns())  # higher than the epochs of an earlier leader
        self.changed = threading.Condition()
        self._epoch_of: dict[str, int] = {}
        self.ended: str | None = None

    # ------------------------------------------------------------ for connections

    def admit_worker(self, name: str) -> int:
        """Admit a worker to the run; return the epoch of its membership."""
        with self.changed:
            clock = self._pool.add_worker(name, time.monotonic())
            self._epoch_of[name] = epoch = next(self._epochs)
            self.changed.notify_all()
        _logger.info("%s joined at clock %d", name, clock)
        return epoch

    def is_expected(self, name: str) -> bool:
        """Return whether a worker is still expected to request tasks."""
        return self.ended is None or name in self.staleness.members

    def record_heartbeat(self, name: str) -> None:
        """Record a worker's heartbeat."""
        with self.changed:
            self.staleness.renew_lease(name, time.monotonic())

    def retire_worker(self, name: str, epoch: int, why: str) -> None:
        """End the membership that began in ``epoch``, unless the worker has rejoined since."""
        with self.changed:
            if self._epoch_of.get(name) != epoch:
                return
            del self._epoch_of[name]
            unit = self._pool.remove_worker(name)
            self.changed.notify_all()
        _logger.info("retired %s: %s%s", name, why, f"; {unit} is reassigned" if unit else "")

    def next_task(self, name: str, epoch: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Record a worker's result, and wait for its next task.

        After the run has ended, the task is to stop. The worker remains a member until the caller has sent this task,
        since the server exits once all members have left.
        """
        with self.changed:
            if self._epoch_of.get(name) != epoch:
                return {"do": "join"}  # it was retired meanwhile
            self._pool.record_task_result(name, facts)
            self.changed.notify_all()
            leaves = facts.get("leaves") and len(self.staleness.members) > 1
            while not leaves and self.ended is None:
                if self._epoch_of.get(name) != epoch:
                    return {"do": "join"}
                if task := self._pool.assign_task(name, time.monotonic()):
                    return task
                self.changed.wait()
            if self.ended is None:
                # under the lock, so that at least one worker stays
                self.retire_worker(name, epoch, "requested to leave")
            return {"do": "stop", "why": self.ended or "requested to leave"}

    # ------------------------------------------------------------ for the training loop

    @property
    def workers(self) -> list[str]:
        """Names of the current members."""
        return list(self.staleness.members)

    def wait_for_workers(self, count: int, *, seconds: float) -> None:
        """Wait until ``count`` workers have joined, for at most ``seconds``; others may join later."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.staleness.members) >= count, seconds)

    def open_steps(self, step: int) -> None:
        """Allow steps up to ``step`` to begin."""
        with self.changed:
            self.staleness.allow_steps(step)
            self.changed.notify_all()

    def wait_for_step(self, step: int) -> list[LossRecord]:
        """Wait for ``step``; return its loss records by logical rank, or recent ones if steps overlap.

        Raises:
            WorldsizeError: There were no workers for longer than the timeout.
        """
        self.wait_for(lambda: self.staleness.complete >= step)
        with self.changed:
            return self._pool.pop_records(step)

    def evaluate(self, parts: int, *, split: str, step: int) -> tuple[dict[int, Sums], tuple[str, ...]]:
        """Let the workers evaluate ``split`` after ``step``, in ``parts``.

        Returns:
            Sums and counts of each batch, by batch index, and the names of the metrics.
        """
        with self.changed:
            self._pool.evaluation = evaluation = EvaluationTasks(parts, split=split, step=step)
            self.changed.notify_all()
        self.wait_for(lambda: evaluation.done == parts)
        self._pool.evaluation = EvaluationTasks(0)
        return evaluation.sums, evaluation.names

    def end_run(self, why: str) -> None:
        """End each worker's membership after its current task. Returns once all have been notified."""
        with self.changed:
            self.ended = why
            self.changed.notify_all()
        self.wait_for(lambda: not self.staleness.members, alone=True)

    def wait_for(self, done: Callable[[], bool], *, alone: bool = False) -> None:
        """Wait until ``done()``, and retire workers with expired leases; ``alone``: wait even without workers.

        Raises:
            WorldsizeError: There were no workers for longer than the timeout.
        """
        since = time.monotonic()
        with PEER_WAIT.name_wait("the workers"), self.changed:
            while not done():
                self.changed.wait(self.staleness.lease / 4)
                now = time.monotonic()
                late = [(name, self._epoch_of[name]) for name in self._pool.find_expired_workers(now)]
                since = now if self.staleness.members else since
                if now - since > self._timeout and not alone:
                    raise WorldsizeError(
                        f"no workers for {self._timeout:g} s (cluster.timeout). "
                        "Check the workers' logs, or add workers."
                    )
                for name, epoch in late:
                    self.retire_worker(name, epoch, f"no heartbeat within the lease of {self.staleness.lease:g} s")


NextTask = Callable[[str, int, Mapping[str, Any]], dict[str, Any]]  # arguments: worker, epoch, and the last result


@final
class TaskService:
    """Serves workers' connections, with tasks from ``scheduler``.

    Args:
        scheduler: Admits and retires workers.
        next_task: Answers a TICK; by default ``scheduler.next_task``.
    """

    def __init__(self, scheduler: TaskScheduler, next_task: NextTask | None = None) -> None:
        self._scheduler, self._next_task = scheduler, next_task or scheduler.next_task

    def serve_control(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        """Serve a worker: receive its last result in TICK, send the next task in TASK. Raises RefusedError."""
        name = str(facts["name"])
        epoch = self._scheduler.admit_worker(name)
        try:
            channel.send_message(CommonOperation.WELCOME, {"epoch": epoch})
            while self._scheduler.is_expected(name):
                header = channel.receive_header()
                if header.operation != Operation.TICK:
                    raise RefusedError(f"received {header.operation.name}, expected TICK")
                task = self._next_task(name, epoch, channel.receive_message(header))
                channel.send_message(Operation.TASK, task)
                if task["do"] == "stop":
                    self._scheduler.retire_worker(name, epoch, task["why"])
        except LostError as error:
            self._scheduler.retire_worker(name, epoch, f"lost the connection ({error})")
        except RefusedError:
            self._scheduler.retire_worker(name, epoch, "refused")
            raise

    def receive_heartbeats(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        """Receive a worker's heartbeats. Raises LostError or RefusedError."""
        channel.send_message(CommonOperation.WELCOME, {})
        while True:
            header = channel.receive_header()
            if header.operation != CommonOperation.HEARTBEAT:
                raise RefusedError(f"received {header.operation.name}, expected HEARTBEAT")
            self._scheduler.record_heartbeat(str(facts["name"]))
