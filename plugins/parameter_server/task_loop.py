"""A worker's membership in a run: connects to all shards, executes the leader's tasks.

Shared by all kinds of workers: heartbeats, evaluation, and the detection of changes to weights that no server owns.
Such changes would not reach other workers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, final

from torch import Tensor, nn

from plugins.parameter_server.protocol import Operation, shard_service
from plugins.parameter_server.shard_link import ShardLink
from worldsize.core import ConfigError, Recipe, RunContext, StopFlag
from worldsize.net.channel import Channel, LostError
from worldsize.net.frames import CommonOperation, Header, RefusedError
from worldsize.net.registry import Dialer, EndedError
from worldsize.strategies.layer_streams import LayerStreams
from worldsize.strategies.loss_watch import LossWatch
from worldsize.strategies.model_replica import autocast, collect_metrics

_logger = logging.getLogger(__name__)

Task = Mapping[str, Any]  # fields of the message TASK
Act = Callable[[Task], dict[str, Any]]  # executes a task, and returns the fields of the next TICK


@final
class TaskLoop:
    """Executes the tasks of one run, from the first to the last.

    Args:
        dialer: Connects to the servers.
        stop: Whether this worker is requested to leave.
        shards: Number of shards.
        connect: Called with new connections to the shards.
        acts: Functions that execute tasks, by the kind of task.
        last_words: Returns texts to log when the run ends.
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
        """Work until the leading server ends the run; reconnect if the connection is lost.

        ``lease``: seconds without a heartbeat before the worker is declared dead.
        """
        heartbeat = WorkerHeartbeat(self._dialer, lease)
        try:
            with suppress(EndedError):
                while not self._join_and_work():
                    _logger.info("rejoining")
        finally:
            heartbeat.stop()

    def _join_and_work(self) -> bool:
        """Join and work. Returns False if the leading server is lost, or has retired this worker."""
        with ExitStack() as connections:
            control, facts = self._dialer.connect(shard_service(0), "control")
            connections.callback(control.close)
            links = []
            try:
                for shard in range(self._shards):
                    links.append(ShardLink(self._dialer, shard, facts["epoch"]))
                    connections.callback(links[-1].close)
                self._connect(links)
                return self._execute_tasks(control)
            except LostError:
                return False

    def _execute_tasks(self, control: Channel) -> bool:
        """Execute tasks until the run ends. Returns False if this worker's membership ends earlier."""
        done: dict[str, Any] = {}
        while True:
            control.send_message(Operation.TICK, {**done, "leaves": self._stop.is_wanted()})
            task = control.receive_message(control.receive_answer(Operation.TASK))
            if task["do"] == "stop":
                _logger.info("%s", "; ".join([f"stopping: {task['why']}", *self._last_words()]))
                return True
            if task["do"] == "join":
                return False
            done = self._acts[task["do"]](task)


@final
class WorkerHeartbeat:
    """Sends heartbeats to the leading server from a background thread while the worker computes.

    Args:
        dialer: Connects to the leading server.
        lease: Seconds before the worker is declared dead; four heartbeats are sent in that time.
    """

    def __init__(self, dialer: Dialer, lease: float) -> None:
        self._dialer, self._interval = dialer, lease / 4
        self._ended = threading.Event()
        threading.Thread(target=self._send_heartbeats, daemon=True, name="heartbeat").start()

    def _send_heartbeats(self) -> None:
        channel: Channel | None = None
        while not self._ended.wait(self._interval):
            try:
                channel = channel or self._dialer.connect(shard_service(0), "beat")[0]
                channel.send(Header(CommonOperation.HEARTBEAT))
            except EndedError:
                return
            except (LostError, RefusedError):
                channel = None

    def stop(self) -> None:
        """Stop sending heartbeats."""
        self._ended.set()


def evaluate_part(
    recipe: Recipe, model: nn.Module, context: RunContext, task: Mapping[str, Any], streams: LayerStreams
) -> dict[str, Any]:
    """Evaluate the part of a split assigned by ``task``; return the fields of the message TICK.

    Args:
        recipe: The recipe that evaluates a batch.
        model: The recipe's model, with the weights to evaluate.
        context: The context of the run.
        task: The fields of the message TASK.
        streams: The random streams of this worker.
    """
    batches = context.data.evaluation(task["split"], task["step"], task["part"], task["parts"])
    with autocast(streams.device, context.numerics.precision):
        collector = collect_metrics(recipe, model, batches, streams=streams)
    sums_by_index = {
        i: {name: [float(a), float(b)] for name, (a, b) in each.items()} for i, each in collector.sums.items()
    }
    return {"part": task["part"], "sums": sums_by_index, "names": collector.names}


def create_worker_watch(model: nn.Module, context: RunContext) -> LossWatch:
    """Create the watch on a worker's losses. Workers have no group, and pulls overwrite weights."""
    return LossWatch(model, processes=2, logical_ranks=context.logical_ranks, ordered=False, has_group=False)


@final
class UnownedWeights:
    """Detects changes to ``model``'s frozen parameters and saved buffers, e.g. averages.

    The check compares two integers per tensor: its id, and the version counter maintained by torch.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = {
            name: (module, own)
            for prefix, module in model.named_modules()
            for own, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and tensor.numel() and own not in module._non_persistent_buffers_set
            if not tensor.requires_grad
            for name in [f"{prefix}.{own}".lstrip(".")]
        }
        self._before = self._versions()

    def check_unchanged(self) -> None:
        """Raise ConfigError if one of these tensors has changed since this object was created."""
        for name, version in self._versions().items():
            if version != self._before[name]:
                raise ConfigError(
                    f"training changed {name}, which is not a trained parameter; parameter servers do not save or "
                    "evaluate such changes. Use strategy=ddp, or register a cache with persistent=False."
                )

    def _versions(self) -> dict[str, tuple[int, int]]:
        tensors: dict[str, Tensor | None] = {name: getattr(module, own) for name, (module, own) in self._held.items()}
        return {name: (id(tensor), -1 if tensor is None else tensor._version) for name, tensor in tensors.items()}
