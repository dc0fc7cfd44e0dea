"""The parameter server as a strategy: roles, consistency, transport."""

from __future__ import annotations

import math
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

from torch import nn

from worldsize.core import Cluster, ConfigError, Duty, Numerics, Recipe, Reduction, Replica, Role, Strategy, World
from worldsize.run_directory import private
from worldsize.strategies.learning import Learning
from worldsize.strategies.parameter_server.channel import address_of, listen, own_address
from worldsize.strategies.parameter_server.client import Dialer
from worldsize.strategies.parameter_server.clock import Clock
from worldsize.strategies.parameter_server.coordinator import Coordinator, Peer
from worldsize.strategies.parameter_server.desk import Desk
from worldsize.strategies.parameter_server.directory import Directory, EndedError
from worldsize.strategies.parameter_server.keys import Keys, mint, mint_authority
from worldsize.strategies.parameter_server.layout import Shard as Owned
from worldsize.strategies.parameter_server.layout import plan_shards
from worldsize.strategies.parameter_server.server import Server
from worldsize.strategies.parameter_server.shard import Rule, Shard
from worldsize.strategies.parameter_server.standby import Succession
from worldsize.strategies.parameter_server.worker import Worker

Consistency = Literal["sync", "bounded", "async"]
Transport = Literal["auto", "unix", "tls", "tcp"]


@final
@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Servers own the parameters; workers push gradients and pull weights (Li et al. 2014, OSDI).

    ``servers`` own a shard each; with ``replicas=1`` each has a hot standby that takes over when it dies.
    ``consistency``: "sync" (an update is the mean gradient of a whole step, as in DDP), "bounded" (a worker may be
    ``staleness`` clocks ahead of the slowest, Ho et al. 2013) or "async". ``lease``: seconds without a sign of life
    after which a worker's part is dealt to others. ``by_staleness``: where steps overlap, the learning rate of an
    update is lr / staleness (arXiv 1511.05950) instead of the share of the batch that it carries. ``bucket_mb``:
    size in MiB of what travels as one frame. ``transport``: "unix" inside a host, "tls" between hosts (mutual TLS
    1.3, with keys made for this run), "tcp" without either, on loopback alone; "auto" chooses by ``nodes``.
    ``host``: address that servers bind to (default: that of the interface that leads out).
    """

    numerics: Numerics = field(default_factory=Numerics)
    reduce: Reduction = "flat"
    servers: int = 1
    replicas: int = 0
    consistency: Consistency = "sync"
    staleness: int = 0
    lease: float = 5.0
    by_staleness: bool = False
    bucket_mb: float = 4.0
    transport: Transport = "auto"
    host: str | None = None
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.consistency not in ("sync", "bounded", "async"):
            raise ConfigError(f"strategy.consistency={self.consistency!r} is unknown. Known: sync, bounded, async.")
        if self.staleness < 0 or (self.staleness and self.consistency != "bounded"):
            raise ConfigError(
                f"strategy.staleness={self.staleness} goes with strategy.consistency=bounded, and is 0 or more."
            )
        if self.replicas not in (0, 1):
            raise ConfigError(f"strategy.replicas={self.replicas}: a shard has no standby (0) or one (1).")
        if self.numerics.precision == "fp16":
            raise ConfigError("the parameter server has no loss scaling. Set precision=bf16 or fp32.")
        if self.transport == "unix" and self.nodes > 1:
            raise ConfigError(f"strategy.transport=unix ends at the host, and there are {self.nodes}. Set tls.")
        if self.lease <= 0:
            raise ConfigError(f"strategy.lease={self.lease} must be positive; it is in seconds.")

    @property
    def bound(self) -> float:
        """Clocks that the fastest worker may be ahead of the slowest."""
        return {"sync": 0, "bounded": self.staleness, "async": math.inf}[self.consistency]

    @property
    def _wire(self) -> Transport:
        return self.transport if self.transport != "auto" else "unix" if self.nodes == 1 else "tls"

    def prepare(self, folder: Path) -> None:
        if self._wire == "tls":
            mint_authority(private(folder) / "keys")

    def _listener(self, keys: Keys | None) -> socket.socket:
        if self._wire == "unix":
            return listen(f"unix:{Path(tempfile.mkdtemp(prefix='worldsize_'), 'server')}", None)
        host = self.host or ("127.0.0.1" if self._wire == "tcp" else own_address())
        return listen(f"tcp:{host}:0", keys)

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        servers = self.servers * (1 + self.replicas)
        workers = cluster.processes - servers
        if self.servers < 1 or workers < 1:
            raise ConfigError(
                f"parameter_server needs at least one server and one worker; the cluster has {cluster.processes} "
                f"processes, {servers} of them servers. Set cluster.processes={max(1, servers) + 1} or more."
            )
        restart: Literal["alone", "together"] = "alone" if self.replicas or self.bound else "together"
        return {
            "server": Role(servers, restart=restart, serves=True, least=self.servers),
            "worker": Role(workers, restart="alone", serves=True, least=1),
        }

    def replica(self, recipe: Recipe, world: World) -> Replica:
        raise ConfigError("the processes of a parameter server serve; they have no replica of their own.")

    def serve(self, recipe: Recipe, world: World, duty: Duty) -> Replica | None:
        name = f"{world.role}-{world.rank}"
        keys = mint(duty.folder / "keys", name) if self._wire == "tls" else None
        dialer = Dialer(name, Directory(duty.folder, duty.timeout), keys, duty.timeout)
        learning = Learning.of(recipe, recipe.model())
        shards = self._shards(learning)
        if world.role == "worker":
            gathers = self.bound == 0
            Worker(recipe, world, duty, shards, dialer, numerics=self.numerics, gathers=gathers).run(self.lease)
            return None
        return self._serve(recipe, learning, shards[world.rank % self.servers], world, duty, dialer)

    def _shards(self, learning: Learning) -> list[Owned]:
        _check_buffers(learning)
        trained = {name: p for name, p in learning.model.named_parameters() if p.requires_grad}
        clips_exactly = self.reduce == "ordered" and self.numerics.clip_norm is not None  # norms of whole parameters
        cut = type(learning.optimizer).__name__ in _ELEMENTWISE and not clips_exactly
        return plan_shards(trained, self.servers, bucket_bytes=int(self.bucket_mb * 2**20), cut=cut)

    def _serve(
        self, recipe: Recipe, learning: Learning, owned: Owned, world: World, duty: Duty, dialer: Dialer
    ) -> Replica | None:
        whole = Learning.of(recipe, recipe.model())
        state, step = duty.restore(lambda: {**whole.state(), "scaler": {}}) or (None, 0)
        if state is not None:
            learning.load(state)
            whole.load(state)
        server = Server(
            Shard(learning, owned, self._rule(duty), step=step),
            self._listener(dialer.keys),
            dialer.keys,
            duty.timeout,
            lease=self.lease,
            replicated=self.replicas > 0,
        )
        succession = Succession(
            dialer,
            world.rank % self.servers,
            address_of(server.listener),
            lease=self.lease,
            founds=world.rank < self.servers,
        )
        return self._master(server, succession, whole, world, duty)

    def _master(
        self, server: Server, succession: Succession, whole: Learning, world: World, duty: Duty
    ) -> Replica | None:
        """From when this server is master of its shard, if ever, to the end; a replica if the shard is the first."""
        try:
            succession.run(server)
        except EndedError:
            return None
        server.fence, server.is_master = succession.fence, succession.is_master
        if succession.shard != 0:
            server.begins = duty.begins  # where training leads, its loop tells them
            server.start()
            server.ended.wait()
            return None
        clock = Clock(self.bound, duty.logical_ranks, self._share(duty), self.lease, first=server.shard.closed)
        desk = Desk(clock, timeout=duty.timeout)
        server.services = {"control": desk.control, "beat": desk.beat}
        server.start()
        server.followed.wait(self.lease)
        desk.meet(duty.workers, seconds=self.lease)
        if self.bound:
            desk.open(duty.steps)
        dialer = succession.dialer
        peers = [Peer(dialer, shard) for shard in range(1, self.servers)]
        return Coordinator(
            server,
            desk,
            dialer.directory,
            peers,
            whole,
            world,
            clip_norm=self.numerics.clip_norm,
            skips=self.numerics.nonfinite == "skip",
        )

    def _share(self, duty: Duty) -> int:
        """Logical ranks of a unit where steps overlap."""
        return 1

    def _rule(self, duty: Duty) -> Rule:
        gathers, skips = self.bound == 0, self.numerics.nonfinite == "skip"
        return Rule(
            duty.logical_ranks,
            gathers=gathers,
            share=self._share(duty),
            by_staleness=self.by_staleness,
            approves=gathers and (skips or self.numerics.clip_norm is not None or self.replicas > 0),
            finite=self.numerics.nonfinite == "stop",
        )


# optimizers that treat each element by itself, so that a parameter can be cut between servers
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop")


def _check_buffers(learning: Learning) -> None:
    for name, module in learning.model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise ConfigError(
                f"{name} is a {type(module).__name__}, whose statistics no server owns. Use LayerNorm or GroupNorm, "
                "or strategy=ddp."
            )
