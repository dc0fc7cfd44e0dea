"""The service of the leading server for workers: it sends them tasks and receives their heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from worldsize.net.channel import Channel, LostError
from worldsize.net.frames import CommonOperation, RefusedError
from worldsize.strategies.parameter_server.operations import Operation
from worldsize.strategies.parameter_server.task_scheduler import TaskScheduler

NextTask = Callable[[str, int, Mapping[str, Any]], dict[str, Any]]  # of a worker, its epoch, and its last result


@final
class TaskService:
    """Serves the connections on which workers ask ``scheduler`` for tasks.

    Args:
        scheduler: Admits and retires workers.
        next_task: Answers a TICK; by default ``scheduler.next_task``.
    """

    def __init__(self, scheduler: TaskScheduler, next_task: NextTask | None = None) -> None:
        self._scheduler, self._next_task = scheduler, next_task or scheduler.next_task

    def control(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        """Serve one worker: each TICK has its last result, each TASK its next task. Raises RefusedError."""
        name = str(facts["name"])
        epoch = self._scheduler.admit(name)
        try:
            channel.send_message(CommonOperation.WELCOME, {"epoch": epoch})
            while self._scheduler.expects(name):
                header = channel.header()
                if header.operation != Operation.TICK:
                    raise RefusedError(f"received {header.operation.name}, expected TICK")
                task = self._next_task(name, epoch, channel.message(header))
                channel.send_message(Operation.TASK, task)
                if task["do"] == "stop":
                    self._scheduler.retire(name, epoch, task["why"])
        except LostError as error:
            self._scheduler.retire(name, epoch, f"its connection ended ({error})")
        except RefusedError:
            self._scheduler.retire(name, epoch, "it was refused")
            raise

    def beat(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        """Receive the heartbeats of a worker. Raises LostError or RefusedError."""
        channel.send_message(CommonOperation.WELCOME, {})
        while True:
            header = channel.header()
            if header.operation != CommonOperation.HEARTBEAT:
                raise RefusedError(f"received {header.operation.name}, expected HEARTBEAT")
            self._scheduler.renew(str(facts["name"]))
