"""Where servers live: their addresses and keys, and the path of each to being master of its shard."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from worldsize.core import Cluster, ConfigError, Recipe, RunContext
from worldsize.records.run_directory import private
from worldsize.strategies.parameter_server.client import Dialer
from worldsize.strategies.parameter_server.layout import Shard as Owned
from worldsize.strategies.parameter_server.rows import RowRule
from worldsize.strategies.parameter_server.server import Server
from worldsize.strategies.parameter_server.shard import Rule, Shard
from worldsize.strategies.parameter_server.standby import Succession
from worldsize.strategies.parameter_server.whole import learning_of, load_whole, tables_of, whole_state
from worldsize.strategies.train_state import TrainState
from worldsize.transport.certificates import Keys, mint, mint_authority
from worldsize.transport.channel import address_of, listen
from worldsize.transport.registry import Directory

Transport = Literal["auto", "unix", "tls", "tcp"]


@final
@dataclass(frozen=True)
class House:
    """``servers`` shards, each with ``replicas`` standbys; the rest as in :class:`ParameterServer`."""

    servers: int
    replicas: int
    lease: float
    transport: Transport
    host: str | None
    nodes: int

    @property
    def processes(self) -> int:
        return self.servers * (1 + self.replicas)

    @property
    def wire(self) -> Transport:
        return self.transport if self.transport != "auto" else "unix" if self.nodes == 1 else "tls"

    def check(self, cluster: Cluster, workers: int) -> None:
        """Raise ConfigError for what cannot run."""
        if self.servers < 1 or workers < 1:
            raise ConfigError(
                f"a parameter server needs at least one server and one worker; the cluster has {cluster.processes} "
                f"processes, {self.processes} of them servers. "
                f"Set cluster.processes={max(1, self.processes) + 1} or more."
            )
        if self.wire == "unix" and self.nodes > 1:
            raise ConfigError(f"strategy.transport=unix ends at the host, and there are {self.nodes}. Set tls.")
        if self.lease <= 0:
            raise ConfigError(f"strategy.lease={self.lease} must be positive; it is in seconds.")
        if self.replicas not in (0, 1):
            raise ConfigError(f"strategy.replicas={self.replicas}: a shard has no standby (0) or one (1).")

    def prepare(self, folder: Path) -> None:
        """In the launching process: what makes a process a member of this run."""
        if self.wire == "tls":
            mint_authority(private(folder) / "keys")

    def dialer(self, name: str, context: RunContext) -> Dialer:
        meeting = context.meeting_place(needs="a parameter server needs its servers")
        keys = mint(meeting.folder / "keys", name) if self.wire == "tls" else None
        return Dialer(name, Directory(meeting.folder, meeting.timeout), keys, meeting.timeout)

    def server(
        self,
        recipe: Recipe,
        learning: TrainState,
        context: RunContext,
        *,
        rule: Rule,
        rows: RowRule,
        shards: Sequence[Owned],
    ) -> tuple[Server, Succession, TrainState]:
        """This process's server with the newest checkpoint's state, how it may become master, and the whole model.

        ``learning`` is what the recipe made first in this process: only that has the run's initial weights.
        """
        world = context.world
        dialer, index = self.dialer(f"server-{world.rank}", context), world.rank % self.servers
        whole = learning_of(recipe)
        empty = {each.table.name: each.state() for each in tables_of(learning, rows, index)}
        state, step = context.checkpoints.restore(lambda: whole_state(whole, empty, rows)) or (None, 0)
        if state is not None:
            load_whole(learning, state)
            load_whole(whole, state)
        tables = tables_of(learning, rows, index)  # by the optimizer's groups, which loading has made anew
        if state is not None:
            for each in tables:
                each.load(state["tables"][each.table.name])
        shard = Shard(learning, shards[index], rule, step=step, tables=tables)
        listener = self._listener(dialer.keys, context.meeting_place(needs="a server needs its workers").address)
        server = Server(shard, listener, dialer.keys, dialer.timeout, lease=self.lease, replicated=self.replicas > 0)
        founds = world.rank < self.servers
        return server, Succession(dialer, index, address_of(listener), lease=self.lease, founds=founds), whole

    def _listener(self, keys: Keys | None, address: str) -> socket.socket:
        if self.wire == "unix":
            return listen(f"unix:{Path(tempfile.mkdtemp(prefix='worldsize_'), 'server')}", None)
        host = self.host or ("127.0.0.1" if self.wire == "tcp" else address)
        return listen(f"tcp:{host}:0", keys)

    def open(self, server: Server, succession: Succession) -> None:
        """Become master, and serve. Raises EndedError if it was never needed."""
        succession.run(server)
        server.fence, server.is_master = succession.fence, succession.is_master
        server.start()
        server.followed.wait(self.lease)
