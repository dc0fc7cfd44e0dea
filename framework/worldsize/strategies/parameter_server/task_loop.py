"""A worker's membership in a run: it is connected to all shards, and takes tasks from the leading server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, final

from worldsize.core import StopFlag
from worldsize.net.channel import Channel, LostError
from worldsize.net.dialer import Dialer
from worldsize.net.registry import EndedError
from worldsize.strategies.parameter_server.operations import Operation, shard_service
from worldsize.strategies.parameter_server.shard_link import ShardLink
from worldsize.strategies.parameter_server.worker_heartbeat import WorkerHeartbeat

_logger = logging.getLogger(__name__)

Task = Mapping[str, Any]  # the facts of the message TASK
Act = Callable[[Task], dict[str, Any]]  # does a task, and returns the facts for the next TICK


@final
class TaskLoop:
    """Does the tasks of one run, from the first to the last.

    Args:
        dialer: Connects to the servers.
        stop: Whether this worker is asked to leave.
        shards: Number of shards.
        connect: Called with new connections to the shards.
        acts: Functions that do a task, by its kind.
        last_words: Called at the end; what it returns is logged.
    """

    def __init__(
        self,
        dialer: Dialer,
        stop: StopFlag,
        *,
        shards: int,
        connect: Callable[[Sequence[ShardLink]], None],
        acts: Mapping[str, Act],
        last_words: Callable[[], Sequence[str]] = list,
    ) -> None:
        self._dialer, self._stop, self._shards = dialer, stop, shards
        self._connect, self._acts, self._last_words = connect, acts, last_words

    def run(self, lease: float) -> None:
        """Work until the leading server ends the run; reconnect to it if the connection is lost.

        ``lease``: seconds without a heartbeat after which the worker is declared dead.
        """
        heartbeat = WorkerHeartbeat(self._dialer, lease)
        try:
            with suppress(EndedError):
                while not self._joined():
                    _logger.info("joins again")
        finally:
            heartbeat.stop()

    def _joined(self) -> bool:
        """Work as a member; return False if the leading server is gone, or has retired this worker."""
        with ExitStack() as connections:
            control, facts = self._dialer.connect(shard_service(0), "control")
            connections.callback(control.close)
            links = []
            try:
                for shard in range(self._shards):
                    links.append(ShardLink(self._dialer, shard, facts["epoch"]))
                    connections.callback(links[-1].close)
                self._connect(links)
                return self._work(control)
            except LostError:
                return False

    def _work(self, control: Channel) -> bool:
        """Do task after task until the run ends; return False if this worker is no longer a member."""
        done: dict[str, Any] = {}
        while True:
            control.send_message(Operation.TICK, {**done, "leaves": self._stop.is_wanted()})
            task = control.message(control.answer(Operation.TASK))
            if task["do"] == "stop":
                _logger.info("%s", "; ".join([f"ends: {task['why']}", *self._last_words()]))
                return True
            if task["do"] == "join":
                return False
            done = self._acts[task["do"]](task)
