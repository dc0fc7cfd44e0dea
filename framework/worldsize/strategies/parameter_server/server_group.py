"""The servers of a run: their addresses and credentials, and the start of each."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, final

from worldsize.core import Cluster, ConfigError, Recipe, Rendezvous, RunContext
from worldsize.net.certificates import Credentials, create_authority, issue_certificate
from worldsize.net.connection_server import Service
from worldsize.net.dialer import Dialer
from worldsize.net.endpoints import address_of, listen
from worldsize.net.registry import Registry
from worldsize.record.run_directory import private
from worldsize.strategies.parameter_server.mastership import RegisteredMastership
from worldsize.strategies.parameter_server.model_state import (
    empty_rows,
    full_state,
    load_full_state,
    tables_of,
    train_state_of,
)
from worldsize.strategies.parameter_server.operations import Operation, shard_service
from worldsize.strategies.parameter_server.push_receiver import PushReceiver
from worldsize.strategies.parameter_server.replication import ReplicationLog
from worldsize.strategies.parameter_server.server import SERVER_PREFIX, ShardServer
from worldsize.strategies.parameter_server.sessions import Sessions
from worldsize.strategies.parameter_server.shard import Rule, Shard
from worldsize.strategies.parameter_server.shard_master import ShardMaster, ignore_step
from worldsize.strategies.parameter_server.shard_parameters import ShardParameters
from worldsize.strategies.parameter_server.sharding import ShardingPlan
from worldsize.strategies.parameter_server.standby import Succession
from worldsize.strategies.train_state import TrainState, optimizer_of

Transport = Literal["auto", "unix", "tls", "tcp"]


@final
@dataclass(frozen=True)
class PendingServer:
    """A server that is not yet master of its shard.

    Attributes:
        train_state: The full model with the newest checkpoint's state, for saving and warnings.
        succession: Waits until this server is master; run it before :meth:`serve`.
        dialer: Connects this process to the other servers.
        listener: The socket at which this server will accept connections.
        lease: Seconds without a heartbeat after which a standby is given up.
        has_standby: Whether a standby will connect.
    """

    train_state: TrainState
    succession: Succession
    dialer: Dialer
    listener: socket.socket
    lease: float
    has_standby: bool

    @property
    def shard(self) -> Shard:
        """The shard, which copies the master's while another server is master."""
        return self.succession.receiver.shard

    def serve(
        self,
        *,
        services: Mapping[str, Service] = {},
        on_step: Callable[[int], None] = ignore_step,
        on_begin: Callable[[int], None] = ignore_step,
        leader_prefix: str = SERVER_PREFIX,
    ) -> ShardServer:
        """Serve as the shard's master; return when the standby has connected, or none did within a lease.

        Args:
            services: Further services, by the kind of connection.
            on_step: Called with the number of the step in progress at each push.
            on_begin: Called with the number of each step with several updates that begins.
            leader_prefix: The beginning of the names of processes that may lead the run.
        """
        log = ReplicationLog(self.succession.mastership, lease=self.lease, expects_standby=self.has_standby)
        sessions, timeout = self.succession.sessions, self.dialer.timeout
        master = ShardMaster(self.succession.receiver, sessions, log, timeout=timeout, on_step=on_step)
        server = ShardServer(
            master,
            self.listener,
            self.dialer.credentials,
            services=services,
            leader_prefix=leader_prefix,
            on_begin=on_begin,
        )
        server.start()
        log.wait_for_standby()
        return server


@final
@dataclass(frozen=True)
class ServerGroup:
    """The servers of a run. The options are those of :class:`ParameterServer`."""

    servers: int
    replicas: int
    lease: float
    transport: Transport
    host: str | None
    nodes: int

    @property
    def processes(self) -> int:
        """Number of servers and standbys together."""
        return self.servers * (1 + self.replicas)

    @property
    def wire(self) -> Transport:
        """The transport to use; "auto" is resolved."""
        return self.transport if self.transport != "auto" else "unix" if self.nodes == 1 else "tls"

    def check(self, cluster: Cluster, workers: int) -> None:
        """Raise ConfigError if the options cannot be used on ``cluster`` with this number of workers."""
        if cluster.device != "cpu":
            raise ConfigError(
                f"parameter servers send gradients from host memory, and cluster.device={cluster.device} computes them "
                "elsewhere. Set cluster.device=cpu, or use strategy=fsdp or zero."
            )
        if self.servers < 1 or workers < 1:
            raise ConfigError(
                f"a parameter server needs at least one server and one worker; the cluster has {cluster.processes} "
                f"processes, {self.processes} of them servers. "
                f"Set cluster.processes={max(1, self.processes) + 1} or more."
            )
        if self.wire == "unix" and self.nodes > 1:
            raise ConfigError(
                f"strategy.transport=unix works inside one host, and there are {self.nodes}. "
                "Set strategy.transport=tls."
            )

    def prepare(self, folder: Path) -> None:
        """Create the run's certificate authority if TLS is used; called in the launching process."""
        if self.wire == "tls":
            create_authority(private(folder) / "keys")

    def dialer(self, name: str, context: RunContext) -> Dialer:
        """Make the dialer of the process ``name`` to the servers of the run. Raises ConfigError outside of a run."""
        meeting = context.meeting_place(needs="a parameter server needs its servers")
        credentials = issue_certificate(meeting.folder / "keys", name) if self.wire == "tls" else None
        return Dialer(name, Registry(meeting.folder, meeting.timeout), credentials, meeting.timeout, Operation)

    def server(
        self, recipe: Recipe, train_state: TrainState, context: RunContext, *, plan: ShardingPlan, rule: Rule
    ) -> PendingServer:
        """Make this process's server, with the newest checkpoint's state.

        Args:
            recipe: The recipe of the run.
            train_state: The first model that the recipe made in this process; only it has the run's initial weights.
            context: The context of the run, with its newest checkpoint.
            plan: The assignment of parameters to servers.
            rule: When gradients become an update.
        """
        index = context.world.rank % self.servers
        shard, full = self._shard(recipe, train_state, context, index, plan=plan, rule=rule)
        dialer = self.dialer(f"{SERVER_PREFIX}{context.world.rank}", context)
        return self.pending(PushReceiver(shard, plan.codec), full, context, dialer, number=index)

    def pending(
        self, receiver: PushReceiver, full: TrainState, context: RunContext, dialer: Dialer, *, number: int
    ) -> PendingServer:
        """Make this process's server of shard ``number``.

        Args:
            receiver: Receives pushes to the shard.
            full: The full model, which receives the state of all shards when it is saved.
            context: The context of the run.
            dialer: Connects this process to the other servers.
            number: Index of the shard.
        """
        meeting = context.meeting_place(needs="a server needs its workers")
        listener = self._listener(dialer.credentials, meeting, f"{dialer.name}-{number}")
        service, address = shard_service(number), address_of(listener)
        succession = Succession(
            dialer,
            RegisteredMastership(dialer.registry, service, address=address, name=dialer.name),
            receiver,
            Sessions(),
            lease=self.lease,
            is_first=context.world.rank < self.servers,
            has_standbys=self.replicas > 0,
        )
        return PendingServer(full, succession, dialer, listener, self.lease, self.replicas > 0)

    def _shard(
        self,
        recipe: Recipe,
        train_state: TrainState,
        context: RunContext,
        index: int,
        *,
        plan: ShardingPlan,
        rule: Rule,
    ) -> tuple[Shard, TrainState]:
        """Make the shard, and the full model, from the newest checkpoint if there is one."""
        full = train_state_of(recipe)
        full.model.load_state_dict(train_state.model.state_dict())  # for frozen weights, which no shard has
        restored = context.checkpoints.restore(lambda: full_state(full, empty_rows(full), plan.rows))
        state, step = restored or (None, 0)
        if state is not None:
            load_full_state(train_state, state)
            load_full_state(full, state)
        tables = tables_of(train_state, plan.rows, index)  # after loading, which replaces the optimizer's groups
        if state is not None:
            for each in tables:
                each.load(state["tables"][each.table.name])
        own = ShardParameters(train_state, plan.shards[index], tables, make=partial(optimizer_of, recipe))
        return Shard(own, rule, step=step), full

    def _listener(self, credentials: Credentials | None, meeting: Rendezvous, name: str) -> socket.socket:
        if self.wire == "unix":
            return listen(f"unix:{meeting.socket(f'{name}-{os.getpid()}')}", None)
        host = self.host or ("127.0.0.1" if self.wire == "tcp" else meeting.address)
        return listen(f"tcp:{host}:0", credentials)
