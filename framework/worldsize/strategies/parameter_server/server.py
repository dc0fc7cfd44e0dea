"""Serves a shard over the network: one thread per connection, one lock per shard."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any, final

from worldsize.net.certificates import Credentials
from worldsize.net.channel import Channel
from worldsize.net.connection_server import ConnectionServer, Service
from worldsize.net.frames import RefusedError
from worldsize.strategies.parameter_server.leader_service import LeaderService
from worldsize.strategies.parameter_server.operations import Operation
from worldsize.strategies.parameter_server.shard_master import ShardMaster, ignore_step
from worldsize.strategies.parameter_server.step_start import StepStart
from worldsize.strategies.parameter_server.worker_service import WorkerService

SERVER_PREFIX = "server-"  # beginning of the names of servers


@final
class ShardServer:
    """Serves the shard of ``master`` to the members of the run.

    The kind of a connection is "data" (a worker), "peer" (the leader of the run), "standby", or one of ``services``.
    Refused requests change nothing.

    Args:
        master: Changes and reads the shard.
        listener: The socket at which to accept connections.
        credentials: The certificate of this process; None without TLS.
        services: Further services, by the kind of connection.
        leader_prefix: The beginning of the names of processes that may lead the run.
        on_begin: Called with the number of each step with several updates that begins.

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
        leader = LeaderService(master, self.start_of_step, self.facts, leader_prefix=leader_prefix)
        own = {"data": workers.serve, "peer": leader.serve, "standby": self._serve_standby}
        self.connections = ConnectionServer(
            listener, credentials, {**own, **services}, timeout=master.timeout, operations=Operation
        )

    def start(self) -> None:
        """Start to serve, in background threads."""
        self.connections.start()
        self.master.log.start()

    def facts(self) -> dict[str, Any]:
        """Return the load since the last call, and the updates lost and frames refused since the start."""
        return self.master.facts(refused=self.connections.refused)

    def _serve_standby(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        name = str(facts["name"])
        if not name.startswith(SERVER_PREFIX):
            raise RefusedError(f"{name} is no server")
        self.master.log.lead(channel, name, self.master.image)
