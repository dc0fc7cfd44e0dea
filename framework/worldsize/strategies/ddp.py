"""Distributed data parallel: gradients of model replicas are all-reduced during backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, final, get_args

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from worldsize.core import (
    Block,
    Cluster,
    ConfigError,
    Cost,
    Numerics,
    Range,
    Recipe,
    Reduction,
    Replica,
    Role,
    RunContext,
    Strategy,
    Workload,
)
from worldsize.core.limits import MEBIBYTES
from worldsize.strategies.gradient_reducer import GradientReducer
from worldsize.strategies.model_replica import CAPABILITIES
from worldsize.strategies.multi_update import refuse_healing_updates, whole_multi_update
from worldsize.strategies.optimizer_checks import refuse_unsent
from worldsize.strategies.reducers import (
    Compression,
    CompressionKind,
    create_compressed_reducer,
    gradient_reducer,
    interruptible_reducer,
)
from worldsize.strategies.step_cost import ddp_cost, gathering
from worldsize.strategies.synchronous import SynchronousReplica, wrap_in_ddp
from worldsize.strategies.train_state import TrainState
from worldsize.strategies.wrapping import refuse_complex, sparse_embeddings
from worldsize.world.roles import round_up

OnFailure = Literal["restart", "heal"]


@final
@dataclass(frozen=True)
class DDP(Strategy):
    """Torch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704).

    ``reduce``: "flat" is torch's all-reduce, "ordered" gives the same bits at every world size, "hierarchical" sums
    within nodes first, so that with G ranks per node only 1/G of each rank's gradient bytes cross the network.
    ``compress``: send gradients as "bf16", "fp16", "int8" with error feedback, or "powersgd" of rank ``powersgd_rank``
    (Vogels et al. 2019, arXiv 1905.13727), or send only some elements: the largest ("topk"), or a random subset in
    each step ("randomk", optionally without ``error_feedback``). With "hierarchical", compress only between nodes.
    ``density``: the fraction of elements that "topk" and "randomk" send.
    ``bucket_mb``: size of a gradient bucket in MiB; a bucket is all-reduced as soon as it is full.
    ``find_unused_parameters``: allow models in which some parameters get no gradient in a step.
    ``on_failure``: reaction to a dead process: all processes restart from the last checkpoint ("restart"), or the
    remaining processes take over its logical ranks from that step on ("heal").
    """

    reductions = get_args(Reduction)
    supports = CAPABILITIES | {"integrity", "operations", "sparse_gradients", "adamw_8bit", "schedule_free"}

    compress: CompressionKind = "none"
    powersgd_rank: Annotated[int, Range(least=1)] = 4
    density: Annotated[float, Range(above=0, most=1)] = 0.01
    error_feedback: bool = True
    bucket_mb: Annotated[float, MEBIBYTES] = 25.0
    find_unused_parameters: bool = False
    on_failure: OnFailure = "restart"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_failure == "heal" and (self.compress != "none" or self.reduce == "hierarchical"):
            raise ConfigError(
                "strategy.on_failure=heal is not supported with gradient compression or strategy.reduce=hierarchical: "
                "compression errors and partial sums are lost with a process. Set strategy.compress=none and "
                "strategy.reduce=flat (or ordered), or strategy.on_failure=restart."
            )
        if self.reduce == "ordered" and self.compress != "none":
            raise ConfigError(
                f"strategy.compress={self.compress} is not supported with strategy.reduce=ordered "
                f"(reproducibility=elastic): compression {'omits' if self._is_sparse else 'rounds'} different values "
                "at each world size. Set strategy.compress=none, or a different reproducibility level."
            )
        if not self.error_feedback and self.compress != "randomk":
            raise ConfigError(
                f"strategy.error_feedback=false is not supported with strategy.compress={self.compress}: the "
                "compression is biased. Set strategy.error_feedback=true, or strategy.compress=randomk."
            )

    @property
    def _is_sparse(self) -> bool:
        return self.compress in ("topk", "randomk")

    def check_numerics(self, numerics: Numerics) -> None:
        if self._is_sparse and self.error_feedback and numerics.policy.scales_loss:
            raise ConfigError(
                f"strategy.compress={self.compress} with error feedback is not supported with "
                f"precision={numerics.precision}: the loss scale changes between steps. Set precision=bf16, or "
                "strategy.compress=bf16."
            )

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        if self.compress == "topk":
            self._check_density(cluster)
        return worker_roles(cluster, self.on_failure)

    def _check_density(self, cluster: Cluster) -> None:
        """Refuse a density at which "topk" sends more than an uncompressed all-reduce."""
        senders, kind = gathering(cluster, self.reduce)
        if senders * self.density > 1 and senders > 1:
            raise ConfigError(
                f"strategy.density={self.density:g} is too high for strategy.compress=topk on {senders} {kind}: "
                "gathering values and indices would send more than an uncompressed all-reduce. Set strategy.density to "
                f"at most 1/{senders}, or strategy.compress=randomk."
            )

    def check_recipe(self, recipe: Recipe) -> None:
        if recipe.has_several_updates and (self.compress != "none" or self.reduce == "hierarchical"):
            raise ConfigError(
                "gradient compression and strategy.reduce=hierarchical do not support several updates per step "
                f"({type(recipe).__name__}). Set strategy.compress=none and strategy.reduce=flat (or ordered)."
            )
        if self.on_failure == "heal":
            refuse_healing_updates(recipe)

    def check_built(self, recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
        if self.on_failure == "heal":
            refuse_unsent(recipe, model, optimizer)
        if self.compress != "none":
            refuse_complex(model, because=f"strategy.compress={self.compress} supports only real numbers")
            for name in sparse_embeddings(model):
                raise ConfigError(
                    f"strategy.compress={self.compress} does not support sparse gradients: {name} has sparse=True. Set "
                    "sparse=False, or strategy.compress=none."
                )
        scalars = [name for name, parameter in model.named_parameters() if not parameter.ndim]
        if self.compress == "powersgd" and scalars:
            raise ConfigError(
                f"strategy.compress=powersgd does not support scalars: {scalars[0]} is a scalar. Make it "
                "nn.Parameter(torch.ones(1)), or set strategy.compress=int8."
            )

    def cost(self, work: Workload, cluster: Cluster) -> Cost | None:
        """Return the cost of a step; None with PowerSGD, since it depends on the matrix shapes."""
        if self.compress == "powersgd":
            return None
        return ddp_cost(
            work,
            cluster,
            reduce=self.reduce,
            compress=self.compress,
            density=self.density,
            bucket_mb=self.bucket_mb,
        )

    @property
    def schedules_by_metric(self) -> bool:
        return True

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        world = context.world
        model = recipe.model().to(world.device)
        if recipe.has_several_updates:
            return whole_multi_update(
                recipe, context, TrainState.from_recipe(recipe, model), self.reduce, self.bucket_mb
            )
        options = {"bucket_cap_mb": self.bucket_mb, "find_unused_parameters": self.find_unused_parameters}
        heals = self.on_failure == "heal"
        module = wrap_in_ddp(model, world, interruptible=heals, **options) if world.size > 1 else None
        logical_ranks = context.logical_ranks if heals else None  # None: the same number on each process
        sums = self._create_reducer(module or model, context, logical_ranks)
        return SynchronousReplica(
            recipe,
            context,
            train_state=TrainState.from_recipe(recipe, model),
            reducer=sums,
            module=module,
            logical_ranks=logical_ranks,
        )

    def _create_reducer(self, module: nn.Module, context: RunContext, logical_ranks: int | None) -> GradientReducer:
        world = context.world
        if not isinstance(module, DistributedDataParallel):
            return gradient_reducer(self.reduce, module, None, logical_ranks)
        if self.on_failure == "heal":
            return interruptible_reducer(self.reduce, module, world, logical_ranks)
        compression = Compression(self.compress, self.powersgd_rank, self.density, self.error_feedback)
        return create_compressed_reducer(self.reduce, compression, module, world, seed=context.seed)


def worker_roles(cluster: Cluster, on_failure: OnFailure, blocks: tuple[Block, ...] = (Block(),)) -> Mapping[str, Role]:
    """Return the roles of a strategy with only workers, which may heal in whole ``blocks``."""
    if on_failure == "heal":
        least = cluster.min_processes if blocks == (Block(),) else round_up(cluster.min_processes, blocks)
        return {"worker": Role(cluster.processes, restart="heal", min_processes=least, blocks=blocks)}
    return {"worker": Role(processes=cluster.processes)}
