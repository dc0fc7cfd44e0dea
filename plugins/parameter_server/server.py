"""Serves a shard over the network, with one thread per connection and one lock per shard.

Workers send pushes, and receive weights and rows. The leading process sends commits and stop requests, and receives
copies of the state. The parameters at the start of a step with several updates are saved, since the step is repeated if
a worker is lost.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, final

import torch

from plugins.parameter_server.protocol import Fields, Operation, Session, send_tree
from plugins.parameter_server.shard_master import ShardMaster, ignore_step
from worldsize.net.channel import Channel
from worldsize.net.credentials import Credentials
from worldsize.net.endpoints import ConnectionServer, Service
from worldsize.net.frames import CommonOperation, Header, RefusedError, view_bytes

SERVER_PREFIX = "server-"  # prefix of server names


@final
class ShardServer:
    """Accepts connections, and serves the shard of ``master``.

    The kind of a connection is "data" (a worker), "peer" (the leader of the run), "standby", or one of ``services``.
    Refused requests have no effect.

    Args:
        master: Changes and reads the shard.
        listener: The socket for accepting connections.
        credentials: The certificate of this process; None without TLS.
        services: Additional services, by kind of connection.
        leader_prefix: Name prefix of processes that may lead the run.
        on_begin: Called with the number of each step with several updates when it begins.

    Attributes:
        start_of_step: Saves the state at the start of such a step.
    """

    def __init__(
        self,
        master: ShardMaster,
        listener: socket.socket,
        credentials: Credentials | None,
        *,
        services: Mapping[str, Service] = {},
        leader_prefix: str = SERVER_PREFIX,
        on_begin: Callable[[int], None] = ignore_step,
    ) -> None:
        self.master, self.start_of_step = master, StepStart(master, on_begin)
        workers = WorkerService(master)
        leader = LeaderService(master, self.start_of_step, self.collect_server_load, leader_prefix=leader_prefix)
        own = {"data": workers.serve, "peer": leader.serve, "standby": self._serve_standby}
        self.connections = ConnectionServer(
            listener, credentials, {**own, **services}, timeout=master.timeout, operations=Operation
        )

    def start(self) -> None:
        """Start serving connections in background threads."""
        self.connections.start()
        self.master.log.start()

    def collect_server_load(self) -> dict[str, Any]:
        """Return the load since the last call, and total lost updates and refused frames."""
        return self.master.collect_shard_load(refused=self.connections.refused)

    def _serve_standby(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        name = str(facts["name"])
        if not name.startswith(SERVER_PREFIX):
            raise RefusedError(f"{name} is not a server")
        self.master.log.serve_standby(channel, name, self.master.export_standby_image)


@final
class LeaderService:
    """Serves the process that leads the run.

    Args:
        master: Changes and reads the shard.
        start: Saves the state at the start of a step with several updates.
        facts: Returns the server's load since the last call.
        leader_prefix: Name prefix of processes that may lead, such as "server-".
    """

    def __init__(
        self, master: ShardMaster, start: StepStart, facts: Callable[[], Mapping[str, Any]], *, leader_prefix: str
    ) -> None:
        self._master, self._start = master, start
        self._facts, self._leader_prefix = facts, leader_prefix

    def serve(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        """Serve one connection until it ends. Raises LostError or RefusedError."""
        name = str(facts["name"])
        if not name.startswith(self._leader_prefix):
            raise RefusedError(f"{name} is not the leading server of this run")
        channel.send_message(CommonOperation.WELCOME, {"step": self._master.shard.step})
        while True:
            self._answer_request(channel, channel.receive_header(), name)

    def _answer_request(self, channel: Channel, header: Header, name: str) -> None:
        match header.operation:
            case Operation.NORMS:
                channel.send_message(CommonOperation.MESSAGE, self._master.compute_step_norms())
            case Operation.APPLY:
                self._master.commit_update(**channel.receive_message(header))
                channel.send(Header(CommonOperation.DONE))
            case Operation.WEIGH:
                self._master.scale_step_gradient(**channel.receive_message(header))
                channel.send(Header(CommonOperation.DONE))
            case Operation.ADVANCE:
                self._master.advance_schedule(**channel.receive_message(header))
                channel.send(Header(CommonOperation.DONE))
            case Operation.RESET:
                self._master.reset_shard(**channel.receive_message(header))
                channel.send(Header(CommonOperation.DONE))
            case Operation.BEGIN:
                self._start.save_state(**channel.receive_message(header))
                channel.send(Header(CommonOperation.DONE))
            case Operation.ROLL_BACK:
                self._start.roll_back(**channel.receive_message(header))
                channel.send(Header(CommonOperation.DONE))
            case Operation.FACTS:
                channel.send_message(CommonOperation.MESSAGE, self._facts())
            case Operation.STATE:
                state = self._master.state()
                channel.send(Header(CommonOperation.DONE))  # the state is copied; the shard may change again
                send_tree(channel, state)
            case Operation.STOP:
                channel.receive_message(header)
                channel.send(Header(CommonOperation.DONE))
                self._master.log.ended.set()
            case _:
                raise RefusedError(f"unexpected {header.operation.name} from {name}")


_SEEN_MODULUS = 2**32


@final
class WorkerService:
    """Serves pushes and pulls to the shard of ``master``."""

    def __init__(self, master: ShardMaster) -> None:
        self._master = master

    def serve(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        """Serve the connection of one worker until it ends. Raises LostError or RefusedError."""
        self._master.log.wait_for_standby()
        session = self._master.open_session(
            str(facts["name"]), _read_number(facts, "epoch"), seen=_read_number(facts, "seen", 0)
        )
        welcome = {"sequence": session.sequence, "step": self._master.shard.step}
        channel.send_message(CommonOperation.WELCOME, welcome)
        while True:
            header = channel.receive_header()
            match header.operation:
                case Operation.PUSH | Operation.PUSH_ROWS:
                    self._receive_push(channel, header, session)
                case Operation.PULL:
                    self._send_buckets(channel, header)
                case Operation.PULL_ROWS:
                    self._pull_rows(channel, header)
                case CommonOperation.SHARE:
                    channel.accept_share(self._master.timeout)
                case _:
                    raise RefusedError(f"unexpected {header.operation.name} from a worker")

    def _receive_push(self, channel: Channel, header: Header, session: Session) -> None:
        fields = Fields._make(header.fields)
        if fields.epoch != session.epoch or fields.sequence != session.sequence + 1:
            raise RefusedError(
                f"received PUSH {fields.sequence} of epoch {fields.epoch}, expected PUSH {session.sequence + 1} of "
                f"epoch {session.epoch}"
            )
        payload, gradient = self._master.receiver.receive_push(channel, header)
        self._master.apply_push(header, payload, gradient, session)
        acknowledged = Fields(table=fields.table, sequence=fields.sequence)
        channel.send_later(Header(CommonOperation.DONE, fields=acknowledged))

    def _send_buckets(self, channel: Channel, header: Header) -> None:
        """Wait for the updates up to the step in the header, then send all buckets."""
        shard = self._master.shard
        seen = self._master.wait_for(Fields._make(header.fields).step) % _SEEN_MODULUS
        parameters = shard.parameters
        for index, (bucket, values_n) in enumerate(zip(parameters.buckets, parameters.values, strict=True)):
            fields = Fields(index, seen=seen, step=shard.step)
            channel.send(Header(Operation.WEIGHTS, bucket.dtype, (bucket.numel,), fields), [view_bytes(values_n)])
        self._master.count_pull(sum(values_n.nbytes for values_n in parameters.values))

    def _pull_rows(self, channel: Channel, header: Header) -> None:
        """Wait for the updates up to the step in the header, then send the requested rows."""
        asked = Fields._make(header.fields)
        rows, ids_n = self._master.receiver.receive_ids(channel, header)
        rows_nd, updates, step = self._master.pull_rows(rows, ids_n, step=asked.step)
        fields = Fields(asked.table, seen=updates % _SEEN_MODULUS, step=step)
        channel.send(Header(Operation.WEIGHTS, torch.float32, tuple(rows_nd.shape), fields), [view_bytes(rows_nd)])
        self._master.count_pull(rows_nd.nbytes)


def _read_number(facts: Mapping[str, Any], key: str, default: int | None = None) -> int:
    number = facts.get(key, default)
    if not isinstance(number, int):
        raise RefusedError(f"JOIN has an invalid {key}={str(number)[:50]}")
    return number


@final
class StepStart:
    """Saves a copy of the parameters and optimizer state of ``master`` at the start of a step.

    Args:
        master: Serves the shard.
        on_begin: Called with the number of each step that begins.
    """

    def __init__(self, master: ShardMaster, on_begin: Callable[[int], None] = ignore_step) -> None:
        self._master, self._on_begin = master, on_begin
        self._kept: Any = None

    def save_state(self, step: int) -> None:
        """Save the state at the start of ``step``; gradients may already have arrived."""
        self._on_begin(step)
        with self._master.log.changed:
            self._kept = deepcopy(self._master.shard.parameters.export_parameters())

    def roll_back(self, updates: int) -> None:
        """Restore the saved state as update number ``updates``. Repeated calls are ignored.

        Gradients of the abandoned attempt belong to updates up to that number. Late ones are thus not mistaken for
        gradients of the next attempt.
        """
        shard = self._master.shard
        with self._master.log.changed:
            if shard.step < updates:
                shard.parameters.restore(deepcopy(self._kept))  # a copy, since the optimizer changes these tensors
                shard.step = updates
                shard.reset_to_step(updates, None)
                self._master.log.changed.notify_all()
