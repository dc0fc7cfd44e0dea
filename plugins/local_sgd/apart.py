"""Strategies under which workers train apart: what local SGD and its descendants have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from plugins.local_sgd.replica import LocalReplica, Outer
from worldsize.core import (
    Cluster,
    ConfigError,
    Cost,
    Recipe,
    Replica,
    Role,
    RunContext,
    Strategy,
    Workload,
    World,
)
from worldsize.cost.cluster import across, all_reduce_seconds, ring_share, whole_bytes
from worldsize.strategies.synchronous import alone
from worldsize.strategies.train_state import TrainState


@dataclass(frozen=True)
class Apart(Strategy):
    """Abstract. Each worker takes ``inner_steps`` optimizer steps on its share of the batches, as if it were alone."""

    inner_steps: int = 8

    def __post_init__(self) -> None:
        if self.inner_steps < 1:
            raise ConfigError(f"strategy.inner_steps={self.inner_steps} must be 1 or more.")
        if self.reduce == "ordered":
            raise ConfigError(
                "reduce=ordered promises the same bits at any world size, but where workers train apart the result "
                "depends on how many they are. Set reproducibility=deterministic: the same bits at the same world size."
            )
        if self.reduce != "flat":
            raise ConfigError(
                f"reduce={self.reduce} is a way to sum gradients, and workers that train apart send none. "
                "Set strategy.reduce=flat."
            )

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        return {"worker": Role(processes=cluster.processes)}

    def cost(self, work: Workload, cluster: Cluster) -> Cost:
        """An all-reduce of the parameters, once in ``inner_steps`` steps."""
        sent = 2 * ring_share(cluster.processes) * work.parameter_bytes / self.inner_steps
        seconds = all_reduce_seconds(work.parameter_bytes, cluster) / self.inner_steps
        return Cost(whole_bytes(work), sent, across(cluster, sent), seconds, exposed_seconds=seconds, same=False)

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        world = context.world
        model = recipe.model().to(world.device)
        _make_equal(model, world)
        inner = alone(recipe, model, context)
        return LocalReplica(inner, world, self.outer(recipe, inner.train_state, world))

    @abstractmethod
    def outer(self, recipe: Recipe, train_state: TrainState, world: World) -> Outer: ...


def _make_equal(model: nn.Module, world: World) -> None:
    """Worker 0's weights everywhere: an outer gradient means nothing where workers began at different points."""
    if world.group is not None:
        for tensor in model.state_dict().values():
            dist.broadcast(first := tensor.contiguous(), group=world.group, group_src=0)
            tensor.copy_(first)


def trained(model: nn.Module) -> list[Tensor]:
    """Parameters that an optimizer may change."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def statistics(model: nn.Module) -> list[Tensor]:
    """Buffers that are saved with the model and can be averaged, such as BatchNorm's."""
    kept = model.state_dict().keys()
    return [buffer for name, buffer in model.named_buffers() if name in kept and buffer.is_floating_point()]
