"""A shard on the network: one thread a connection, one lock a shard."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any, final

from worldsize.strategies.parameter_server.leader_service import LeaderService
from worldsize.strategies.parameter_server.operations import Operation
from worldsize.strategies.parameter_server.shard_master import ShardMaster, ignore_step
from worldsize.strategies.parameter_server.step_start import StepStart
from worldsize.strategies.parameter_server.worker_service import WorkerService
from worldsize.transport.certificates import Credentials
from worldsize.transport.channel import Channel
from worldsize.transport.connection_server import ConnectionServer, Service
from worldsize.transport.frames import RefusedError

SERVER_PREFIX = "server-"  # of the names of servers


@final
class ShardServer:
    """Serves the shard that ``master`` keeps to the members of the run.

    A connection is for "data" (a worker), "peer" (whoever leads the run), "standby", or one of ``services``. What is
    refused changes nothing.

    Args:
        master: Changes and reads the shard.
        listener: The socket at which to accept connections.
        credentials: The certificate of this process; None without TLS.
        services: Further services, by the kind of connection.
        leader_prefix: The beginning of the names of processes that may lead the run.
        on_begin: Called with the number of each step with several updates that begins.

    Attributes:
        start_of_step: Keeps where such a step began.
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
        """Serve from now on, in threads of its own."""
        self.connections.start()
        self.master.log.start()

    def facts(self) -> dict[str, Any]:
        """Return the load since the last call, and what was lost and refused since the start."""
        return self.master.facts(refused=self.connections.refused)

    def _serve_standby(self, channel: Channel, facts: Mapping[str, Any]) -> None:
        name = str(facts["name"])
        if not name.startswith(SERVER_PREFIX):
            raise RefusedError(f"{name} is no server")
        self.master.log.lead(channel, name, self.master.image)
