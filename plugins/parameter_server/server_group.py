"""The servers of a run: addresses, credentials, startup, and all shards' state.

The combined state is converted to and from the format that all strategies save.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plugins.parameter_server.protocol import Operation, Sessions, shard_service
from plugins.parameter_server.remote_embedding import RemoteTable, find_remote_tables, rowless_model
from plugins.parameter_server.replication import RegisteredMastership, ReplicationLog, Succession
from plugins.parameter_server.row_store import RowUpdate, create_row_update
from plugins.parameter_server.row_tables import RowRule, Rows, Table, initial_rows
from plugins.parameter_server.server import SERVER_PREFIX, ShardServer
from plugins.parameter_server.shard import PushReceiver, Rule, Shard
from plugins.parameter_server.shard_master import ShardMaster, ignore_step
from plugins.parameter_server.shard_parameters import ShardParameters
from plugins.parameter_server.sharding import ShardingPlan
from worldsize.core import ONE_UPDATE, Cluster, ConfigError, Recipe, Rendezvous, RunContext, StateDict
from worldsize.net.credentials import Credentials, create_authority, issue_certificate
from worldsize.net.endpoints import Service, get_listener_address, open_listener
from worldsize.net.registry import Dialer, Registry
from worldsize.optimizers.groups import create_optimizer
from worldsize.record.run_directory import create_private_folder
from worldsize.strategies.train_state import OptimizerPart, TrainState

Transport = Literal["auto", "unix", "tls", "tcp"]


@final
@dataclass(frozen=True)
class PendingServer:
    """A server that is not yet master of its shard.

    Attributes:
        train_state: The full model with the state of the newest checkpoint, for saving and warnings.
        succession: Waits until this server is master; call its ``run`` before :meth:`serve`.
        dialer: Connects this process to the other servers.
        listener: The socket on which this server will accept connections.
        lease: Seconds without a heartbeat before a standby is given up.
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
        """The shard, replicated from the master while a different server is master."""
        return self.succession.receiver.shard

    def serve(
        self,
        *,
        services: Mapping[str, Service] = {},
        on_step: Callable[[int], None] = ignore_step,
        on_begin: Callable[[int], None] = ignore_step,
        leader_prefix: str = SERVER_PREFIX,
    ) -> ShardServer:
        """Serve as master in the background, and wait at most one lease for the standby to connect.

        Args:
            services: Additional services, by kind of connection.
            on_step: Called at each push with the number of the step in progress.
            on_begin: Called with the number of each step with several updates when it begins.
            leader_prefix: Name prefix of processes that may lead the run.
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
    """The servers of a run, with the options of :class:`ParameterServer`."""

    servers: int
    replicas: int
    lease: float
    transport: Transport
    host: str | None
    nodes: int

    @property
    def processes(self) -> int:
        """Total number of servers and standbys."""
        return self.servers * (1 + self.replicas)

    @property
    def wire(self) -> Transport:
        """The transport in use, with "auto" resolved."""
        return self.transport if self.transport != "auto" else "unix" if self.nodes == 1 else "tls"

    def check_cluster(self, cluster: Cluster, workers: int) -> None:
        """Raise ConfigError if the options are invalid for ``cluster`` with this number of workers."""
        if cluster.device != "cpu":
            raise ConfigError(
                f"parameter servers require gradients in host memory, but cluster.device={cluster.device}. Set "
                "cluster.device=cpu, or use strategy=fsdp or zero."
            )
        if self.servers < 1 or workers < 1:
            raise ConfigError(
                "a parameter server requires at least one server and one worker; got "
                f"cluster.processes={cluster.processes}, with {self.processes} for servers. Set "
                f"cluster.processes={max(1, self.processes) + 1} or more."
            )
        if self.wire == "unix" and self.nodes > 1:
            raise ConfigError(
                f"strategy.transport=unix requires a single host, found {self.nodes}. Set strategy.transport=tls."
            )

    def prepare_keys(self, folder: Path) -> None:
        """Create the run's certificate authority if TLS is used. Called in the launching process."""
        if self.wire == "tls":
            create_authority(create_private_folder(folder) / "keys")

    def create_dialer(self, name: str, context: RunContext) -> Dialer:
        """Create a dialer from process ``name`` to the servers. Raises ConfigError outside a run."""
        meeting = context.meeting_place(needs="parameter server workers require servers")
        credentials = issue_certificate(meeting.folder / "keys", name) if self.wire == "tls" else None
        return Dialer(name, Registry(meeting.folder, meeting.timeout), credentials, meeting.timeout, Operation)

    def create_server(
        self, recipe: Recipe, train_state: TrainState, context: RunContext, *, plan: ShardingPlan, rule: Rule
    ) -> PendingServer:
        """Create this process's server with the state of the newest checkpoint.

        Args:
            recipe: The recipe of the run.
            train_state: The first model that the recipe created in this process; only it has the run's initial weights.
            context: The context of the run, with its newest checkpoint.
            plan: The assignment of parameters to servers.
            rule: When gradients become an update.
        """
        index = context.world.rank % self.servers
        shard, full = self._create_shard(recipe, train_state, context, index, plan=plan, rule=rule)
        dialer = self.create_dialer(f"{SERVER_PREFIX}{context.world.rank}", context)
        return self.create_pending_server(PushReceiver(shard, plan.codec), full, context, dialer, number=index)

    def create_pending_server(
        self, receiver: PushReceiver, full: TrainState, context: RunContext, dialer: Dialer, *, number: int
    ) -> PendingServer:
        """Create this process's server for shard ``number``.

        Args:
            receiver: Receives pushes to the shard.
            full: The full model, filled with the state of all shards for saving.
            context: The context of the run.
            dialer: Connects this process to the other servers.
            number: Index of the shard.
        """
        meeting = context.meeting_place(needs="parameter servers require workers")
        listener = self._listener(dialer.credentials, meeting, f"{dialer.name}-{number}")
        service, address = shard_service(number), get_listener_address(listener)
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

    def _create_shard(
        self,
        recipe: Recipe,
        train_state: TrainState,
        context: RunContext,
        index: int,
        *,
        plan: ShardingPlan,
        rule: Rule,
    ) -> tuple[Shard, TrainState]:
        """Create the shard and the full model, from the newest checkpoint if there is one."""
        full, part = create_train_state(recipe), train_state.parts[ONE_UPDATE]
        full.model.load_state_dict(train_state.model.state_dict())  # for frozen weights, which no shard has
        restored = context.checkpoints.restore(lambda: full_state(full, empty_rows(part), plan.rows))
        state, step = restored or (None, 0)
        if state is not None:
            load_full_state(train_state, state)
            load_full_state(full, state)
        tables = create_tables(part, plan.rows, index)  # after loading, which replaces the optimizer's groups
        if state is not None:
            for each in tables:
                each.load(state["tables"][each.table.name])
        own = ShardParameters(part, plan.shards[index], tables, make=partial(create_optimizer, recipe))
        return Shard(own, rule, step=step), full

    def _listener(self, credentials: Credentials | None, meeting: Rendezvous, name: str) -> socket.socket:
        if self.wire == "unix":
            return open_listener(f"unix:{meeting.get_socket_path(f'{name}-{os.getpid()}')}", None)
        host = self.host or ("127.0.0.1" if self.wire == "tcp" else meeting.address)
        return open_listener(f"tcp:{host}:0", credentials)


_DENSE = 1 << 30  # bytes; smaller tables are also saved as dense weights, including untouched rows
RowStates = Mapping[str, Mapping[str, Tensor]]


def create_train_state(recipe: Recipe) -> TrainState:
    """Create the model and optimizer of a recipe, without table rows."""
    return TrainState.from_recipe(recipe, rowless_model(recipe))


def create_tables(part: OptimizerPart, rule: RowRule, shard: int) -> list[Rows]:
    """Create a server's rows of each table, updated with the options of the table's parameter group."""
    return [
        Rows(each.table, rule, shard, _create_row_update(part.optimizer, each))
        for each in find_remote_tables(part.model)
    ]


def empty_rows(part: OptimizerPart) -> dict[str, dict[str, Tensor]]:
    """Return the state of tables without rows, by table: ids (0,) and rows (0, width)."""
    return {
        each.table.name: {
            "ids": torch.empty(0, dtype=torch.int64),
            "rows": torch.empty(0, _create_row_update(part.optimizer, each).compute_width(each.table.dim)),
        }
        for each in find_remote_tables(part.model)
    }


def _create_row_update(optimizer: Optimizer, remote: RemoteTable) -> RowUpdate:
    groups = optimizer.param_groups
    own = next((group for group in groups if any(each is remote.weight for each in group["params"])), groups[0])
    return create_row_update(optimizer, own, remote.table.name)


def join_rows(states: Sequence[RowStates]) -> dict[str, dict[str, Tensor]]:
    """Join the rows of all shards, sorted by id, by table: ids (n,) and rows (n, width)."""
    joined = {}
    for name in states[0]:
        ids_n = torch.cat([state[name]["ids"] for state in states])
        order_n = ids_n.argsort()
        rows_nw = torch.cat([state[name]["rows"] for state in states])
        joined[name] = {"ids": ids_n[order_n], "rows": rows_nw[order_n]}
    return joined


def full_state(train_state: TrainState, rows: RowStates, rule: RowRule) -> StateDict:
    """Return model, optimizer and schedule like :meth:`TrainState.state`, with the tables."""
    return add_tables({**train_state.state(), "scaler": {}}, train_state.model, rows, rule)


def add_tables(state: StateDict, model: nn.Module, rows: RowStates, rule: RowRule) -> StateDict:
    """Add the tables' rows to ``state``; small tables also as the model's dense weights."""
    if not rows:
        return state
    dense = {
        remote.table.name: _build_dense_weight(remote.table, rows[remote.table.name], rule)
        for remote in find_remote_tables(model)
        if remote.table.rows * remote.table.dim * 4 <= _DENSE
    }
    return {**state, "model": {**state["model"], **dense}, "tables": {name: dict(each) for name, each in rows.items()}}


def _build_dense_weight(table: Table, state: Mapping[str, Tensor], rule: RowRule) -> Tensor:
    values_rd = initial_rows(rule.seed, table, torch.arange(table.rows))
    values_rd[state["ids"]] = state["rows"][:, : table.dim]
    return values_rd


def load_full_state(train_state: TrainState, state: StateDict) -> None:
    """Load a :func:`full_state` without its tables."""
    empty = {remote.table.name: remote.weight for remote in find_remote_tables(train_state.model)}
    train_state.load({**state, "model": {**state["model"], **empty}})
