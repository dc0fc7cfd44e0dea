"""Changes a shard on its master, under one lock, and waits until the standby has applied it, too.

``ServerLoad`` counts the load of a server since the last query.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from plugins.parameter_server.gradients import Gradient
from plugins.parameter_server.protocol import Fields, Operation, Session, Sessions
from plugins.parameter_server.replication import ReplicationLog
from plugins.parameter_server.row_tables import Rows
from plugins.parameter_server.shard import PushReceiver, Shard
from worldsize.net.frames import Header, RefusedError, encode_message

_logger = logging.getLogger(__name__)

_HOTTEST = 5  # number of most used rows per table in the facts


def ignore_step(step: int) -> None:
    """Do nothing; the default for callbacks at the start of a step."""


@final
class ShardMaster:
    """Changes and reads a shard while it is served. Each method acquires the lock itself.

    Args:
        receiver: Receives pushes to the shard.
        sessions: The record of pushes of each worker.
        log: Forwards all changes to the standby; its lock guards the shard.
        timeout: Seconds to wait for a step to end.
        on_step: Called at each push with the number of the step in progress.
    """

    def __init__(
        self,
        receiver: PushReceiver,
        sessions: Sessions,
        log: ReplicationLog,
        *,
        timeout: float,
        on_step: Callable[[int], None] = ignore_step,
    ) -> None:
        self.shard, self.receiver, self.log = receiver.shard, receiver, log
        self.timeout = timeout
        self._sessions, self._on_step = sessions, on_step
        self._load = ServerLoad()
        self._lost = 0  # updates that workers received before this server lost them

    def open_session(self, name: str, epoch: int, *, seen: int) -> Session:
        """Open the session of a worker with weights of ``seen`` updates. Raises RefusedError."""
        with self.log.changed:
            session = self._sessions.open_session(name, epoch)
            missing = seen - self.shard.updates - self._lost
            if missing > 0:  # this server was restored from a checkpoint
                self._lost += missing
                text = "%d updates received by %s are lost; continuing at step %d"
                _logger.info(text, self._lost, name, self.shard.step)
            return session

    def apply_push(self, header: Header, payload: Sequence[memoryview], gradient: Gradient, session: Session) -> None:
        """Apply a session's next push here and on the standby. Raises RefusedError."""
        sequence = Fields._make(header.fields).sequence
        self._load.adjust_waiting(+1)
        with self.log.changed:
            self._load.adjust_waiting(-1)
            if sequence != session.sequence + 1:
                raise RefusedError(f"PUSH {sequence} was received twice concurrently")
            self._on_step(self.shard.step + 1)
            ticket = self.log.forward_operation(header, payload)
            self.receiver.push_gradient(header, gradient)
            session.sequence += 1
            self._load.count_push(header.length)
            self.log.changed.notify_all()
        self.log.wait_for_ticket(ticket)

    def wait_for(self, step: int) -> int:
        """Wait until the updates up to ``step`` are applied; return their number since the run's start.

        Raises:
            RefusedError: The step did not end in time.
        """
        with self.log.changed:
            if not self.log.changed.wait_for(lambda: self.shard.step >= step, self.timeout):
                raise RefusedError(f"step {step} did not finish; the shard is at step {self.shard.step}")
            return self.shard.updates

    def pull_rows(self, rows: Rows, ids_n: Tensor, *, step: int) -> tuple[Tensor, int, int]:
        """Read rows ``ids_n`` (n,), once they include the updates up to ``step``.

        Returns:
            The rows, float32 (n, dim), the number of applied updates, and the last step up to which all are complete.

        Raises:
            RefusedError: The step did not end in time.
        """
        with self.log.changed:
            self.wait_for(step)
            return rows.pull(ids_n), self.shard.updates, self.shard.closed

    def count_pull(self, nbytes: int) -> None:
        """Add a pull of ``nbytes`` bytes to the server's load."""
        self._load.count_pull(nbytes)

    def compute_step_norms(self) -> dict[str, list[float]]:
        """Return the gradient norms of the uncommitted step by parameter, once complete.

        Raises:
            RefusedError: The gradients did not arrive in time.
        """
        with self.log.changed:
            _await_gradients(self.log, self.shard, seconds=self.timeout)
            return self.shard.compute_norms()

    def commit_update(self, step: int, factor: float | None) -> None:
        """Commit the update of ``step``. Repeated calls are ignored. See :meth:`Shard.commit_step`."""
        with self.log.changed:
            ticket = self.log.forward_operation(*encode_message(Operation.APPLY, {"step": step, "factor": factor}))
            self.shard.commit_step(step, factor)
            self.log.changed.notify_all()
        self.log.wait_for_ticket(ticket)

    def advance_schedule(self, value: float, step: int) -> None:
        """Advance the schedule by the metric evaluated after ``step``. Repeated calls are ignored."""
        with self.log.changed:
            ticket = self.log.forward_operation(*encode_message(Operation.ADVANCE, {"value": value, "step": step}))
            self.shard.parameters.advance_schedule_by(value, step=step)
        self.log.wait_for_ticket(ticket)

    def scale_step_gradient(self, step: int, factor: float) -> None:
        """Scale the mean gradient of ``step`` by ``factor``, once complete; see :meth:`Shard.scale_gradient`.

        Raises:
            RefusedError: The gradients did not arrive in time.
        """
        with self.log.changed:
            _await_gradients(self.log, self.shard, seconds=self.timeout)
            ticket = self.log.forward_operation(*encode_message(Operation.WEIGH, {"step": step, "factor": factor}))
            self.shard.scale_gradient(step, factor)
        self.log.wait_for_ticket(ticket)

    def reset_shard(self, step: int, factor: float | None) -> None:
        """Prepare for a new leader, given the last commit's ``factor``; see :meth:`Shard.reset_to_step`."""
        with self.log.changed:
            ticket = self.log.forward_operation(*encode_message(Operation.RESET, {"step": step, "factor": factor}))
            self.shard.reset_to_step(step, factor)
            self.log.changed.notify_all()
        self.log.wait_for_ticket(ticket)

    def state(self) -> dict[str, Any]:
        """Return a copy of the shard's state."""
        with self.log.changed:
            return self.shard.state()

    def export_standby_image(self) -> dict[str, Any]:
        """Return the complete state for a standby. The caller must hold the lock."""
        return {"shard": self.shard.export_image(), "sessions": self._sessions.export_sequences()}

    def collect_shard_load(self, *, refused: int) -> dict[str, Any]:
        """Return the load since the last call, and total lost updates and ``refused`` frames."""
        with self.log.changed:
            load, self._load = self._load, ServerLoad(waiting=self._load.waiting)
            tables = {rows.table.name: rows.collect_usage(hottest=_HOTTEST) for rows in self.shard.parameters.tables}
        state = {"step": self.shard.step, "lost_updates": self._lost, "refused": refused}
        return {**state, **load.export_counts(), **({"tables": tables} if tables else {})}


def _await_gradients(log: ReplicationLog, shard: Shard, *, seconds: float) -> None:
    """Wait for all gradients of the next step to commit. The caller must hold the lock."""
    if not log.changed.wait_for(lambda: shard.waits_for_commit, seconds):
        raise RefusedError(f"the gradients of step {shard.step + 1} are incomplete")


@final
@dataclass
class ServerLoad:
    """Counts pushes, pulls, and the bytes of both.

    Attributes:
        waiting: Number of pushes now waiting for the shard.
        longest_queue: Maximum number of pushes waiting at once.
        since: Start time of the counts, in seconds of ``time.perf_counter``.
    """

    pushes: int = 0
    pulls: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    waiting: int = 0
    longest_queue: int = 0
    since: float = field(default_factory=time.perf_counter)

    def adjust_waiting(self, change: int) -> None:
        """Count a push that starts (1) or stops (-1) waiting."""
        self.waiting += change
        self.longest_queue = max(self.longest_queue, self.waiting)

    def count_push(self, nbytes: int) -> None:
        self.pushes += 1
        self.bytes_in += nbytes

    def count_pull(self, nbytes: int) -> None:
        self.pulls += 1
        self.bytes_out += nbytes

    def export_counts(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return {
            "pushes": self.pushes,
            "pulls": self.pulls,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "longest_queue": self.longest_queue,
            "seconds": round(time.perf_counter() - self.since, 3),
        }
