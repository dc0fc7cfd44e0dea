"""ZeRO stage 1: every rank holds the model, each the optimizer state of some parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch._dynamo  # noqa: F401 - DDP's constructor imports it; here it is imported once, before the fork
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from worldsize.core import Cluster, Numerics, Recipe, Reduction, Replica, Role, StateDict, Strategy, World
from worldsize.strategies.accumulation import accumulation
from worldsize.strategies.ddp import replicated
from worldsize.strategies.elsewhere import outline, overlaid
from worldsize.strategies.learning import Learning, named_state
from worldsize.strategies.synchronous import SynchronousReplica


@final
@dataclass(frozen=True)
class ZeRO(Strategy):
    """Torch's ZeroRedundancyOptimizer around the recipe's (Rajbhandari et al. 2020, arXiv 1910.02054, stage 1).

    Gradients are all-reduced as DDP does; each rank updates its parameters and sends them to the others. The options
    are those of :class:`~worldsize.strategies.ddp.DDP`.
    """

    numerics: Numerics = field(default_factory=Numerics)
    reduce: Reduction = "flat"
    bucket_mb: float = 25.0
    find_unused_parameters: bool = False

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        return {"worker": Role(processes=cluster.processes)}

    def replica(self, recipe: Recipe, world: World) -> Replica:
        model = recipe.model().to(world.device)
        learning, module = Learning.of(recipe, model), model
        if world.size > 1:
            learning = _sharded(recipe, model, world)
            options = {"bucket_cap_mb": self.bucket_mb, "find_unused_parameters": self.find_unused_parameters}
            module = replicated(model, world, **options)
        sums = accumulation(self.reduce, module, world.group)
        return SynchronousReplica(
            recipe, world, learning=learning, numerics=self.numerics, accumulation=sums, module=module
        )


def _sharded(recipe: Recipe, model: nn.Module, world: World) -> Learning:
    plain = recipe.optimizer(model)
    groups = [dict(group) for group in plain.param_groups]
    known = inspect.signature(type(plain)).parameters  # AdamW keeps a default that it does not take
    defaults = {name: value for name, value in plain.defaults.items() if name in known}
    sharded = ZeroRedundancyOptimizer(groups, type(plain), process_group=world.group, **defaults)
    return _ShardedLearning(model, sharded, recipe.schedule(sharded), outline(recipe, model)["optimizer"])


@dataclass(frozen=True)
class _ShardedLearning(Learning):
    """``whole``: the optimizer's state as one rank would hold it."""

    whole: Mapping[str, Any] = field(default_factory=dict)

    @property
    def _local(self) -> Optimizer:
        """The optimizer of this rank's parameters."""
        local: Optimizer = self.optimizer.optim  # type: ignore[attr-defined]
        return local

    def optimizer_state(self) -> StateDict:
        mine = named_state(self.model, self._local)
        groups = [
            {**whole, **_options(group)}
            for whole, group in zip(self.whole["param_groups"], self.optimizer.param_groups, strict=True)
        ]
        return {**overlaid(self.whole, {"state": mine["state"]}), "param_groups": groups}

    def load_optimizer(self, state: StateDict) -> None:
        mine = named_state(self.model, self._local)
        groups = [
            {**group, "params": own["params"]}
            for group, own in zip(state["param_groups"], mine["param_groups"], strict=True)
        ]
        part: Any = {"state": {name: state["state"][name] for name in mine["state"]}, "param_groups": groups}
        set_optimizer_state_dict(self.model, self._local, part)
        for loaded, group in zip(self._local.param_groups, self.optimizer.param_groups, strict=True):
            group.update(_options(loaded))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
