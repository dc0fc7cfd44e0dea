"""The parameter server as a strategy: roles, consistency, transport."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from torch import nn

from worldsize.core import (
    Cluster,
    ConfigError,
    Cost,
    Numerics,
    Recipe,
    Replica,
    Role,
    RunContext,
    Strategy,
    Workload,
)
from worldsize.cost.cluster import across, served_bytes, served_seconds
from worldsize.cost.collectives import exposed_seconds
from worldsize.strategies.parameter_server.clock import Clock
from worldsize.strategies.parameter_server.codec import Codec, Compression, codec_of
from worldsize.strategies.parameter_server.coordinator import Coordinator, Peer
from worldsize.strategies.parameter_server.desk import Desk
from worldsize.strategies.parameter_server.house import House, Transport
from worldsize.strategies.parameter_server.layout import Shard as Owned
from worldsize.strategies.parameter_server.layout import plan_shards
from worldsize.strategies.parameter_server.rows import RowRule, Sharding
from worldsize.strategies.parameter_server.server import Server
from worldsize.strategies.parameter_server.shard import Rule
from worldsize.strategies.parameter_server.standby import Succession
from worldsize.strategies.parameter_server.whole import learning_of
from worldsize.strategies.parameter_server.worker import Worker
from worldsize.strategies.train_state import TrainState
from worldsize.transport.registry import EndedError

Consistency = Literal["sync", "bounded", "async"]


@final
@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Servers own the parameters; workers push gradients and pull weights (Li et al. 2014, OSDI).

    ``servers`` own a shard each; with ``replicas=1`` each has a hot standby that takes over when it dies.
    ``consistency``: "sync" (an update is the mean gradient of a whole step, as in DDP), "bounded" (a worker may be
    ``staleness`` clocks ahead of the slowest, Ho et al. 2013) or "async". ``lease``: seconds without a sign of life
    after which a worker's part is dealt to others. ``by_staleness``: where steps overlap, the learning rate of an
    update is lr / staleness (arXiv 1511.05950) instead of the share of the batch that it carries. ``bucket_mb``:
    size in MiB of what travels as one frame. ``compression`` of pushed gradients: "bf16", "onebit" or "topk" (the
    ``top_share`` of numbers that are largest), what is lost being added to the next.

    ``transport``: "unix" inside a host, "tls" between hosts (mutual TLS 1.3, with keys made for this run), "tcp"
    without either, on loopback alone; "auto" chooses by ``nodes``.
    ``host``: address that servers bind to (default: the one at which the other hosts reach this one).

    Embeddings with ``sparse=True`` are tables: a row exists on its server once it is touched, and its initial value
    follows from ``seed``, table and row. ``sharding``: rows go to servers by "hash" (id modulo servers) or "range".
    ``admit_after``: pushes before a row is kept; ``capacity``: rows of a table that a server keeps, the ones touched
    last. ``cache_rows``: of each table that a worker keeps; a row is pulled again when it has not seen all updates that
    ``staleness`` asks for, the worker's own among them.
    """

    servers: int = 1
    replicas: int = 0
    consistency: Consistency = "sync"
    staleness: int = 0
    lease: float = 5.0
    by_staleness: bool = False
    bucket_mb: float = 4.0
    compression: Compression = "none"
    top_share: float = 0.01
    transport: Transport = "auto"
    host: str | None = None
    nodes: int = 1
    seed: int = 0
    sharding: Sharding = "hash"
    admit_after: int = 0
    capacity: int | None = None
    cache_rows: int = 0

    def __post_init__(self) -> None:
        if self.consistency not in ("sync", "bounded", "async"):
            raise ConfigError(f"strategy.consistency={self.consistency!r} is unknown. Known: sync, bounded, async.")
        if self.staleness < 0 or (self.staleness and self.consistency != "bounded"):
            raise ConfigError(
                f"strategy.staleness={self.staleness} goes with strategy.consistency=bounded, and is 0 or more."
            )
        if self.compression != "none" and self.reduce == "ordered":
            raise ConfigError("compressed gradients depend on the number of workers. Set strategy.compression=none.")
        if self.cache_rows and (self.cache_rows < 0 or not self.staleness):
            raise ConfigError(
                f"strategy.cache_rows={self.cache_rows}: rows may be read again where reads may be stale. Set "
                "strategy.consistency=bounded and strategy.staleness, or strategy.cache_rows=0."
            )
        if not 0 < self.top_share <= 1:
            raise ConfigError(f"strategy.top_share={self.top_share} must be above 0 and at most 1.")

    def check_numerics(self, numerics: Numerics) -> None:
        if numerics.precision == "fp16":
            raise ConfigError("the parameter server has no loss scaling. Set precision=bf16 or fp32.")

    @property
    def bound(self) -> float:
        """Clocks that the fastest worker may be ahead of the slowest."""
        return {"sync": 0, "bounded": self.staleness, "async": math.inf}[self.consistency]

    @property
    def _codec(self) -> Codec | None:
        return codec_of(self.compression, share=self.top_share)

    @property
    def _rows(self) -> RowRule:
        return RowRule(self.seed, self.servers, self.sharding, self.admit_after, self.capacity)

    @property
    def _house(self) -> House:
        return House(self.servers, self.replicas, self.lease, self.transport, self.host, self.nodes)

    def prepare(self, folder: Path) -> None:
        self._house.prepare(folder)

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        workers = cluster.processes - self._house.processes
        self._house.check(cluster, workers)
        restart: Literal["gang", "individual"] = "individual" if self.replicas or self.bound else "gang"
        return {
            "server": Role(self._house.processes, restart=restart, serves=True, min_processes=self.servers),
            "worker": Role(workers, restart="individual", serves=True, min_processes=1),
        }

    def cost(self, work: Workload, cluster: Cluster) -> Cost:
        """Push, then pull, over the busiest link: of servers, unless there are as many as workers. Pushes, which
        ``compression`` makes smaller, hide behind the backward pass, but for the last frame; servers add up what comes
        meanwhile, and update when all has come.
        """
        payload, shards = work.parameter_bytes, range(self.servers)
        numel = round(payload / 4)
        pushed_bytes = self._codec.length(numel) * self._codec.dtype.itemsize if self._codec else payload
        workers = range(self._house.processes, cluster.processes)
        pull, push = (served_seconds(each, workers, shards, cluster) for each in (payload, pushed_bytes))
        added = len(workers) / self.servers * work.sum_seconds
        frame = served_seconds(min(pushed_bytes, self.bucket_mb * 2**20), workers, shards, cluster)
        pushed = max(frame, exposed_seconds(max(push, added), work.overlap * work.compute_seconds))
        worker = 2 * payload + work.activation_bytes
        return Cost(
            memory_bytes=max(worker, (payload + work.optimizer_bytes) / self.servers),
            sent_bytes=max(pushed_bytes, len(workers) * payload / self.servers),
            across_bytes=across(cluster, served_bytes(payload, workers, shards, cluster)),
            communication_seconds=push + pull,
            exposed_seconds=pushed + pull,
            added_seconds=work.update_seconds / self.servers - work.update_seconds,
            same=self.bound == 0,
        )

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        raise ConfigError("the processes of a parameter server serve; they have no replica of their own.")

    def serve(self, recipe: Recipe, context: RunContext) -> Replica | None:
        learning = learning_of(recipe)
        shards = self._shards(learning, context.numerics)
        if context.world.role == "server":
            server, succession, whole = self._house.server(
                recipe, learning, context, rule=self._rule(context), rows=self._rows, shards=shards
            )
            server.codec = self._codec
            self._warn(whole)
            return self._lead(server, succession, whole, context)
        dialer = self._house.dialer(f"worker-{context.world.rank}", context)
        worker = Worker(
            recipe,
            context,
            shards,
            dialer,
            gathers=self.bound == 0,
            rows=self._rows,
            staleness=self.staleness,
            cache_rows=self.cache_rows,
            codec=self._codec,
        )
        worker.run(self.lease)
        return None

    def _warn(self, learning: TrainState) -> None:
        """With a delay of 4 updates, momentum 0.9 is ten times slower on a quadratic; with 8 it diverges."""
        for group in learning.optimizer.param_groups:
            momentum = float(group.get("momentum") or 0.0)
            if momentum / (1 - momentum) * self.staleness >= _DIVERGES:
                print(
                    f"warning: momentum {momentum} with strategy.staleness={self.staleness} may diverge. "
                    "Lower one of them, or set strategy.by_staleness=true.",
                    flush=True,
                )

    def _shards(self, learning: TrainState, numerics: Numerics) -> list[Owned]:
        _check_buffers(learning)
        trained = {name: p for name, p in learning.model.named_parameters() if p.requires_grad and p.numel()}
        clips_exactly = self.reduce == "ordered" and numerics.clip_norm is not None  # norms of whole parameters
        cut = type(learning.optimizer).__name__ in _ELEMENTWISE and not clips_exactly
        return plan_shards(trained, self.servers, bucket_bytes=int(self.bucket_mb * 2**20), cut=cut)

    def _lead(self, server: Server, succession: Succession, whole: TrainState, context: RunContext) -> Replica | None:
        """From when this server is master of its shard, if ever, to the end; a replica if the shard is the first."""
        first, dialer = succession.shard == 0, succession.dialer
        desk = Desk(timeout=dialer.timeout)
        if first:
            server.services = {"control": desk.control, "beat": desk.beat}
        else:
            server.begins = context.faults.enter  # where training leads, its loop tells them
        try:
            self._house.open(server, succession)
        except EndedError:
            return None
        if not first:
            server.ended.wait()
            return None
        desk.begin(Clock(self.bound, context.logical_ranks, self.lease, first=server.shard.closed))
        desk.meet(context.workers, seconds=self.lease)
        if self.bound:
            desk.open(context.steps)
        peers = [Peer(dialer, shard) for shard in range(1, self.servers)]
        return Coordinator(
            server,
            desk,
            dialer.directory,
            peers,
            whole,
            context.world,
            rows=self._rows,
            numerics=context.numerics,
        )

    def _rule(self, context: RunContext) -> Rule:
        gathers = self.bound == 0
        return Rule(
            context.logical_ranks,
            gathers=gathers,
            by_staleness=self.by_staleness,
            approves=gathers,  # else who repeats the unit of a worker that died between two pushes would pull a mixture
            finite=context.numerics.nonfinite == "stop",
        )


_DIVERGES = 36  # momentum / (1 - momentum) × staleness, from which training slows down or diverges

# optimizers that treat each element by itself, so that a parameter can be cut between servers
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop")


def _check_buffers(learning: TrainState) -> None:
    for name, module in learning.model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise ConfigError(
                f"{name} is a {type(module).__name__}, whose statistics no server owns. Use LayerNorm or GroupNorm, "
                "or strategy=ddp."
            )
