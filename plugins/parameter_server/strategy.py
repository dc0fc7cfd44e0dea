"""The parameter server strategy: roles, consistency, transport, and the cost of a step.

``run_updates`` runs one process of a run with several updates per step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, final

from torch import nn
from torch.optim import Optimizer

from plugins.parameter_server.coordinator import run_server
from plugins.parameter_server.gradients import Compression, create_codec
from plugins.parameter_server.remote_embedding import build_linked_model
from plugins.parameter_server.row_store import Sharding, check_rows
from plugins.parameter_server.row_tables import RowRule
from plugins.parameter_server.server_group import ServerGroup, Transport, create_train_state
from plugins.parameter_server.shard import Rule
from plugins.parameter_server.sharding import (
    ShardPlanner,
    check_no_tables,
    check_served,
    check_updates,
    refuse_remembering,
)
from plugins.parameter_server.update_coordinator import UpdateCoordinator
from plugins.parameter_server.update_servers import pending_update_server
from plugins.parameter_server.update_worker import UpdateWorker
from plugins.parameter_server.worker import Worker, WorkerOptions
from worldsize.collectives.cluster_cost import estimate_leaving_bytes, estimate_push_bytes, estimate_push_seconds
from worldsize.collectives.cost import estimate_exposed_seconds
from worldsize.core import (
    ONE_UPDATE,
    Cluster,
    ConfigError,
    Cost,
    Range,
    Recipe,
    Replica,
    Role,
    RunContext,
    Strategy,
    Workload,
)
from worldsize.core.limits import MEBIBYTES, SECONDS
from worldsize.strategies.declared_buffers import refuse_unserved_buffers
from worldsize.strategies.loss_watch import build_max_norm_error, find_bounded_embeddings
from worldsize.strategies.optimizer_checks import refuse_extra_state, refuse_joint_updates
from worldsize.strategies.train_state import TrainState

_logger = logging.getLogger(__name__)

Consistency = Literal["sync", "bounded", "async"]


@final
@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Servers own parameters; workers push gradients and pull weights (Li et al. 2014, OSDI).

    Embeddings with ``sparse=True`` are tables: a row is created on its server on first use, with an initial value that
    depends on ``seed``, table and row.

    A recipe with several updates per step needs ``consistency="sync"``. All workers contribute to each update, and each
    server has a shard of every optimizer. Servers save their state at the start of the step, and restore it if a worker
    is lost.

    Attributes:
        servers: Number of servers; each owns a shard.
        replicas: Number of hot standbys per server, 0 or 1, which take over when it dies.
        consistency: With "sync", an update is the mean gradient of a whole step, as in DDP. With "bounded", a worker
            may be ``staleness`` clocks ahead of the slowest (Ho et al. 2013); with "async", any number.
        staleness: The bound for "bounded".
        lease: Seconds without a heartbeat before a worker's unit is reassigned.
        by_staleness: If steps overlap, whether the learning rate of an update is lr / staleness (Zhang et al. 2016,
            arXiv 1511.05950) instead of proportional to its fraction of the batch.
        bucket_mb: MiB of parameters per frame.
        compression: Wire format of pushed gradients, "bf16", "onebit" or "topk", with error feedback.
        top_share: Fraction of elements, the largest in magnitude, that "topk" sends.
        transport: "unix" within a host, "tls" between hosts (mutual TLS 1.3, with keys created for this run), "tcp"
            without TLS, only on loopback. "auto" chooses by ``nodes``.
        host: Address that servers bind to. None for this host's address as seen from other hosts.
        nodes: Number of hosts of the run.
        seed: Seed of the initial values of rows.
        sharding: Assignment of rows to servers, by "hash" (id modulo servers) or by "range" of ids.
        admit_after: Number of pushes before a row is stored.
        capacity: Maximum rows per table and server; the least recently used are evicted. None for unlimited.
        cache_rows: Number of rows of each table cached by a worker. Rows are pulled again if they lack updates required
            by ``staleness``, including the worker's own.
    """

    supports = frozenset({"multi_update", "activation_checkpointing"})
    serves_rows: ClassVar[bool] = True
    divides_lr: ClassVar[bool] = True
    servers: int = 1
    replicas: Annotated[int, Range(least=0, most=1, hint="the number of standbys per server")] = 0
    consistency: Consistency = "sync"
    staleness: int = 0
    lease: Annotated[float, SECONDS] = 5.0
    by_staleness: bool = False
    bucket_mb: Annotated[float, MEBIBYTES] = 4.0
    compression: Compression = "none"
    top_share: Annotated[float, Range(above=0, most=1)] = 0.01
    transport: Transport = "auto"
    host: str | None = None
    nodes: int = 1
    seed: int = 0
    sharding: Sharding = "hash"
    admit_after: Annotated[int, Range(least=0)] = 0
    capacity: Annotated[int | None, Range(least=1)] = None
    cache_rows: Annotated[int, Range(least=0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.staleness < 0:
            raise ConfigError(f"strategy.staleness must be at least 0, got {self.staleness}. Set strategy.staleness=0.")
        if self.staleness and self.consistency != "bounded":
            raise ConfigError(
                f"strategy.staleness={self.staleness} requires strategy.consistency=bounded. "
                "Set strategy.consistency=bounded, or strategy.staleness=0."
            )
        if self.compression != "none" and self.reduce == "ordered":
            raise ConfigError(
                "strategy.compression is not supported with reproducibility=elastic: compressed gradients depend "
                "on the number of workers. Set strategy.compression=none."
            )
        if self.cache_rows and not self.staleness:
            raise ConfigError(
                f"strategy.cache_rows={self.cache_rows} requires strategy.staleness of at least 1, since cached "
                "rows are stale. Set strategy.consistency=bounded and strategy.staleness, or "
                "strategy.cache_rows=0."
            )

    @property
    def bound(self) -> float:
        """Maximum number of clocks by which workers may be apart; infinite for "async"."""
        return {"sync": 0, "bounded": self.staleness, "async": math.inf}[self.consistency]

    @property
    def _group(self) -> ServerGroup:
        return ServerGroup(self.servers, self.replicas, self.lease, self.transport, self.host, self.nodes)

    def prepare(self, folder: Path) -> None:
        self._group.prepare_keys(folder)

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        workers = cluster.processes - self._group.processes
        self._group.check_cluster(cluster, workers)
        restart: Literal["gang", "individual"] = "individual" if self.replicas or self.bound else "gang"
        return {
            "server": Role(self._group.processes, restart=restart, serves=True, min_processes=self.servers),
            "worker": Role(workers, restart="individual", serves=True, min_processes=1),
        }

    def update_parts(self, cluster: Cluster, logical_ranks: int) -> int | None:
        return logical_ranks if self.bound else None

    def cost(self, work: Workload, cluster: Cluster) -> Cost:
        numel = round(work.parameter_bytes / 4)
        codec = create_codec(self.compression, share=self.top_share)
        pushed_bytes = codec.compute_length(numel) * codec.dtype.itemsize if codec else work.parameter_bytes
        return estimate_server_cost(
            work,
            cluster,
            servers=self.servers,
            first_worker=self._group.processes,
            pushed_bytes=pushed_bytes,
            bucket_bytes=self.bucket_mb * 2**20,
            same=self.bound == 0,
        )

    @property
    def schedules_by_metric(self) -> bool:
        return self.bound == 0

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        raise ConfigError("parameter server processes do not have a replica. Call serve instead.")

    def serve(self, recipe: Recipe, context: RunContext) -> Replica | None:
        planner = self._create_planner()
        if recipe.has_several_updates:
            return run_updates(recipe, context, self._group, planner)
        if context.world.role == "server":
            train_state = create_train_state(recipe)
            plan = planner.create_plans(recipe, train_state)[ONE_UPDATE]
            rule = _create_rule(context, self.bound, by_staleness=self.by_staleness)
            pending = self._group.create_server(recipe, train_state, context, plan=plan, rule=rule)
            _warn_of_momentum(pending.train_state.optimizer, staleness=self.staleness)
            return run_server(pending, context, bound=self.bound, rows=_row_rule(self))
        model, tables = build_linked_model(recipe, _row_rule(self), cache_rows=self.cache_rows)
        plan = planner.create_plans(recipe, TrainState.from_recipe(recipe, model))[ONE_UPDATE]
        dialer = self._group.create_dialer(f"worker-{context.world.rank}", context)
        options = WorkerOptions(self.bound == 0, staleness=self.staleness, ordered=self.reduce == "ordered")
        Worker(recipe, context, dialer, plan, options, model=model, tables=tables).run(self.lease)
        return None

    def check_recipe(self, recipe: Recipe) -> None:
        super().check_recipe(recipe)
        refuse_remembering(recipe)
        if recipe.has_several_updates:
            overlaps = self.consistency if self.bound else "sync"
            check_updates(recipe, consistency=overlaps, replicas=self.replicas, compression=self.compression)

    def check_built(self, recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
        check_served(model, optimizer)
        refuse_unserved_buffers(recipe, model)
        for name in find_bounded_embeddings(model):
            raise build_max_norm_error(name)
        check_rows(model, optimizer)
        refuse_joint_updates(recipe, model, optimizer, because="each server updates some of them")
        refuse_extra_state(recipe, model, optimizer)
        if recipe.has_several_updates:
            check_no_tables(recipe, model)

    def _create_planner(self) -> ShardPlanner:
        return ShardPlanner(
            self.servers,
            bucket_bytes=int(self.bucket_mb * 2**20),
            keeps_whole=self.reduce == "ordered",  # for norms of whole parameters
            rows=_row_rule(self),
            codec=create_codec(self.compression, share=self.top_share),
        )


def _row_rule(strategy: ParameterServer) -> RowRule:
    return RowRule(strategy.seed, strategy.servers, strategy.sharding, strategy.admit_after, strategy.capacity)


_DIVERGES = 36  # momentum / (1 - momentum) × staleness above which training slows down or diverges


def _create_rule(context: RunContext, bound: float, *, by_staleness: bool) -> Rule:
    synchronous = bound == 0
    return Rule(
        context.logical_ranks,
        synchronous=synchronous,
        by_staleness=by_staleness,
        # otherwise a worker that repeats a unit of one that died between two pushes would pull mixed weights
        requires_commit=synchronous,
        finite=context.numerics.nonfinite == "stop",
    )


def _warn_of_momentum(optimizer: Optimizer, *, staleness: int) -> None:
    """Warn of momentum with stale weights: 0.9 slows training 10 × at staleness 4, diverges at 8."""
    for group in optimizer.param_groups:
        momentum = float(group.get("momentum") or 0.0)
        if momentum / (1 - momentum) * staleness >= _DIVERGES:
            _logger.warning(
                "momentum %s with strategy.staleness=%d may diverge. "
                "Lower one of them, or set strategy.by_staleness=true.",
                momentum,
                staleness,
            )


def estimate_server_cost(
    work: Workload,
    cluster: Cluster,
    *,
    servers: int,
    first_worker: int,
    pushed_bytes: float,
    bucket_bytes: float,
    same: bool,
) -> Cost:
    """Return a step's cost: a push and a pull over the busiest links of servers or workers.

    Pushes of ``pushed_bytes`` overlap with the backward pass, except for the last frame of ``bucket_bytes``. Servers
    accumulate gradients as they arrive, and update once all have arrived. Workers are the processes from
    ``first_worker``.
    """
    payload, shards, workers = work.parameter_bytes, range(servers), range(first_worker, cluster.processes)
    pull, push = (estimate_push_seconds(each, workers, shards, cluster) for each in (payload, pushed_bytes))
    added = len(workers) / servers * work.sum_seconds
    frame = estimate_push_seconds(min(pushed_bytes, bucket_bytes), workers, shards, cluster)
    pushed = max(frame, estimate_exposed_seconds(max(push, added), work.overlap * work.compute_seconds))
    worker = 2 * payload + work.activation_bytes
    return Cost(
        memory_bytes=max(worker, (payload + work.optimizer_bytes) / servers),
        sent_bytes=max(pushed_bytes, len(workers) * payload / servers),
        across_bytes=estimate_leaving_bytes(cluster, estimate_push_bytes(payload, workers, shards, cluster)),
        communication_seconds=push + pull,
        exposed_seconds=pushed + pull,
        added_seconds=work.update_seconds / servers - work.update_seconds,
        same=same,
    )


def run_updates(
    recipe: Recipe, context: RunContext, group: ServerGroup, planner: ShardPlanner
) -> UpdateCoordinator | None:
    """Run this process as a server or a worker, according to its role.

    Returns:
        On the first server, the replica for the training loop. Otherwise None, after the run ends.
    """
    model, serves = recipe.model(), context.world.role == "server"
    train_state = TrainState.from_recipe(recipe, model if serves else model.to(context.world.device))
    plans = planner.create_plans(recipe, train_state)
    if serves:
        pending = pending_update_server(group, recipe, train_state, context, plans=plans)
        return pending.run(context, count=group.servers)
    dialer = group.create_dialer(f"worker-{context.world.rank}", context)
    UpdateWorker(recipe, context, dialer, plans, train_state).run(group.lease)
    return None
