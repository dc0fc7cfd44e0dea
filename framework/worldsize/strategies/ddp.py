"""Distributed data parallel: every rank holds the model, gradients are all-reduced during backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final, get_args

import torch._dynamo  # noqa: F401 - DDP's constructor imports it, 1.7 s; here it is imported once, before the fork
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from worldsize.core import (
    Cluster,
    ConfigError,
    Cost,
    Numerics,
    Recipe,
    Reduction,
    Replica,
    Role,
    Strategy,
    Workload,
    World,
)
from worldsize.planning.spread import across, all_reduce_seconds, by_node_seconds, ring_share, whole_bytes
from worldsize.strategies.accumulation import Accumulation, accumulation
from worldsize.strategies.learning import Learning
from worldsize.strategies.reductions import SIZES, Compression, reduced
from worldsize.strategies.synchronous import SynchronousReplica


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

    numerics: Numerics = field(default_factory=Numerics)
    reduce: Reduction = "flat"
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

    def cost(self, work: Workload, cluster: Cluster) -> Cost:
        """The factor of ``compress`` counts where it applies: everywhere, or across nodes only."""
        payload, memory = work.parameter_bytes, whole_bytes(work)
        factor = SIZES.get(self.compress, 1.0)
        if self.reduce != "hierarchical":
            sent = 2 * ring_share(cluster.processes) * payload * factor
            return Cost(memory, sent, across(cluster, sent), all_reduce_seconds(payload * factor, cluster))
        inside = 2 * ring_share(cluster.processes_per_node) * payload
        between = 2 * ring_share(cluster.nodes) * payload * factor
        seconds = by_node_seconds(payload, cluster, smaller=factor)
        return Cost(memory, inside + between / cluster.processes_per_node, between, seconds)

    def replica(self, recipe: Recipe, world: World) -> Replica:
        model = recipe.model().to(world.device)
        options = {"bucket_cap_mb": self.bucket_mb, "find_unused_parameters": self.find_unused_parameters}
        module = replicated(model, world, **options) if world.size > 1 else model
        sums = self._accumulation(module, world)
        learning = Learning.of(recipe, model)
        return SynchronousReplica(
            recipe, world, learning=learning, numerics=self.numerics, accumulation=sums, module=module
        )

    def _accumulation(self, module: nn.Module, world: World) -> Accumulation:
        if isinstance(module, DistributedDataParallel):
            return reduced(self.reduce, self.compress, module, world, rank=self.powersgd_rank)
        return accumulation(self.reduce, module, None)


def replicated(model: nn.Module, world: World, **options: Any) -> DistributedDataParallel:
    """``model`` on ``world.device``, its gradients averaged over ``world.group`` during backward."""
    devices = [world.device] if world.device.type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=devices, process_group=world.group, gradient_as_bucket_view=True, **options
    )
