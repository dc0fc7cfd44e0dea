"""Distributed data parallel: every rank holds the model, gradients are all-reduced during backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final, get_args

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from worldsize.collectives.gathered import LARGEST
from worldsize.collectives.step_timer import time_buffers
from worldsize.core import (
    Cluster,
    ConfigError,
    Cost,
    Recipe,
    Reduction,
    Replica,
    Role,
    RunContext,
    Strategy,
    Workload,
    World,
)
from worldsize.cost.cluster import (
    across,
    all_gather_all_seconds,
    all_reduce_seconds,
    by_node_seconds,
    exchanged_across_bytes,
    exchanged_all_seconds,
    ring_share,
    whole_bytes,
)
from worldsize.cost.collectives import bucketed_exposed_seconds
from worldsize.strategies.compressed_reducer import SIZES, Compression, reduced
from worldsize.strategies.gradient_reducer import GradientReducer, gradient_reducer
from worldsize.strategies.synchronous import SynchronousReplica
from worldsize.strategies.train_state import TrainState


@final
@dataclass(frozen=True)
class DDP(Strategy):
    """Torch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704).

    ``reduce``: "flat" is torch's all-reduce, "ordered" gives the same bits at every world size, "hierarchical" sums
    inside nodes first, so that 1/G of a rank's bytes cross the network with G ranks a node;
    ``compress``: gradients are sent as "bf16", "fp16", "int8" with error feedback, or by "powersgd" of rank
    ``powersgd_rank`` (Vogels et al. 2019, arXiv 1905.13727); with "hierarchical" only across nodes;
    ``bucket_mb``: size in MiB of the gradient buckets that are all-reduced as soon as they are full;
    ``find_unused_parameters``: allow models in which some parameters get no gradient in a step.
    """

    reductions = get_args(Reduction)

    compress: Compression = "none"
    powersgd_rank: int = 4
    bucket_mb: float = 25.0
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        if self.compress not in get_args(Compression):
            raise ConfigError(
                f"strategy.compress={self.compress!r} is unknown. Known: {', '.join(get_args(Compression))}."
            )
        if self.reduce == "ordered" and self.compress != "none":
            raise ConfigError(
                f"strategy.compress={self.compress} rounds sums otherwise at each world size, which "
                "strategy.reduce=ordered (reproducibility=elastic) forbids. Set one of them."
            )

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        return {"worker": Role(processes=cluster.processes)}

    def cost(self, work: Workload, cluster: Cluster) -> Cost | None:
        """Buckets hide behind the backward pass. What ``compress`` saves counts where it applies: everywhere, or
        across nodes only; PowerSGD's bytes depend on the shape of each matrix. Gradients that are small on CPUs are
        gathered whole, see collectives/gathered.py.
        """
        if self.compress == "powersgd":
            return None
        payload, ranks = work.parameter_bytes, cluster.processes
        if self._is_by_node(cluster):
            inside, between = 2 * ring_share(cluster.processes_per_node), 2 * ring_share(cluster.nodes) * self._factor
            sent, leaving = (inside + between / cluster.processes_per_node) * payload, between * payload
        elif self._is_small(work, cluster):
            sent = leaving = (ranks - 1) * payload
        else:
            sent = leaving = 2 * ring_share(ranks) * payload * self._factor
            leaving = exchanged_across_bytes(payload * self._factor, cluster) if self._is_exchanged else leaving
        seconds = partial(self._seconds, work=work, cluster=cluster)
        hidden = bucketed_exposed_seconds(payload, self.bucket_mb * 2**20, work.overlap * work.compute_seconds, seconds)
        return Cost(
            memory_bytes=whole_bytes(work),
            sent_bytes=sent,
            across_bytes=across(cluster, leaving),
            communication_seconds=seconds(payload),
            exposed_seconds=hidden if work.overlap else None,
        )

    @property
    def _factor(self) -> float:
        """Bytes that are sent for each of float32."""
        return SIZES.get(self.compress, 1.0)

    @property
    def _is_exchanged(self) -> bool:
        return self.reduce == "ordered" or self.compress in SIZES

    def _is_by_node(self, cluster: Cluster) -> bool:
        return self.reduce == "hierarchical" and cluster.nodes > 1

    def _is_small(self, work: Workload, cluster: Cluster) -> bool:
        plain = not self._is_by_node(cluster) and not self._is_exchanged and self.compress == "none"
        return plain and cluster.device == "cpu" and cluster.processes * work.parameter_bytes <= LARGEST

    def _seconds(self, payload_bytes: float, *, work: Workload, cluster: Cluster) -> float:
        if self._is_by_node(cluster):
            return by_node_seconds(payload_bytes, cluster, smaller=self._factor)
        if self._is_small(work, cluster):
            return all_gather_all_seconds(payload_bytes * cluster.processes, cluster)
        if self._is_exchanged:
            return exchanged_all_seconds(payload_bytes * self._factor, cluster)
        return all_reduce_seconds(payload_bytes * self._factor, cluster)

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        world = context.world
        model = recipe.model().to(world.device)
        options = {"bucket_cap_mb": self.bucket_mb, "find_unused_parameters": self.find_unused_parameters}
        module = replicated(model, world, **options) if world.size > 1 else model
        sums = self._reducer(module, world)
        train_state = TrainState.of(recipe, model)
        return SynchronousReplica(recipe, context, train_state=train_state, reducer=sums, module=module)

    def _reducer(self, module: nn.Module, world: World) -> GradientReducer:
        if isinstance(module, DistributedDataParallel):
            return reduced(self.reduce, self.compress, module, world, rank=self.powersgd_rank)
        return gradient_reducer(self.reduce, module, None)


def replicated(model: nn.Module, world: World, **options: Any) -> DistributedDataParallel:
    """``model`` on ``world.device``, its gradients averaged over ``world.group`` during backward."""
    devices = [world.device] if world.device.type == "cuda" else None
    module = DistributedDataParallel(
        model, device_ids=devices, process_group=world.group, gradient_as_bucket_view=True, **options
    )
    time_buffers(module)
    return module
