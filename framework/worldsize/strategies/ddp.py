"""Distributed data parallel: every rank holds the model, gradients are all-reduced during backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch._dynamo  # noqa: F401 - DDP's constructor imports it, 1.7 s; here it is imported once, before the fork
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from worldsize.core import Cluster, Numerics, Recipe, Reduction, Replica, Role, Strategy, World
from worldsize.strategies.accumulation import accumulation
from worldsize.strategies.learning import Learning
from worldsize.strategies.synchronous import SynchronousReplica


@final
@dataclass(frozen=True)
class DDP(Strategy):
    """Torch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704).

    ``reduce``: "flat" is torch's all-reduce, "ordered" gives the same bits at every world size;
    ``bucket_mb``: size in MiB of the gradient buckets that are all-reduced as soon as they are full;
    ``find_unused_parameters``: allow models in which some parameters get no gradient in a step.
    """

    numerics: Numerics = field(default_factory=Numerics)
    reduce: Reduction = "flat"
    bucket_mb: float = 25.0
    find_unused_parameters: bool = False

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        return {"worker": Role(processes=cluster.processes)}

    def replica(self, recipe: Recipe, world: World) -> Replica:
        model = recipe.model().to(world.device)
        options = {"bucket_cap_mb": self.bucket_mb, "find_unused_parameters": self.find_unused_parameters}
        module = replicated(model, world, **options) if world.size > 1 else model
        sums = accumulation(self.reduce, module, world.group)
        learning = Learning.of(recipe, model)
        return SynchronousReplica(
            recipe, world, learning=learning, numerics=self.numerics, accumulation=sums, module=module
        )


def replicated(model: nn.Module, world: World, **options: Any) -> nn.Module:
    """``model`` on ``world.device``, its gradients averaged over ``world.group`` during backward."""
    devices = [world.device] if world.device.type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=devices, process_group=world.group, gradient_as_bucket_view=True, **options
    )
