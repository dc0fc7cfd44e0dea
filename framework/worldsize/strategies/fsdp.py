"""Fully sharded data parallel: parameters, gradients and optimizer state are sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.optim import Optimizer

from worldsize.collectives.group import connect_groups
from worldsize.core import (
    Cluster,
    ConfigError,
    Cost,
    Numerics,
    Range,
    Recipe,
    Replica,
    Role,
    RunContext,
    Strategy,
    Workload,
    World,
)
from worldsize.devices import backend_for
from worldsize.strategies.compiled import refuse_graphs
from worldsize.strategies.ddp import OnFailure, worker_roles
from worldsize.strategies.deferred.model import DeferredModel
from worldsize.strategies.model_replica import CAPABILITIES, CallingRoot
from worldsize.strategies.multi_update import MultiUpdateReplica, refuse_healing_updates
from worldsize.strategies.optimizer_checks import refuse_divided_state, refuse_divided_updates, refuse_unsent
from worldsize.strategies.parameter_changes import refuse_gradient_hooks
from worldsize.strategies.sharded_reducer import create_sharded_reducer
from worldsize.strategies.sharded_steps import carry_assignments, refuse_wrong_updates, step_apart, step_locally
from worldsize.strategies.step_cost import FSDPSharding, fsdp_cost
from worldsize.strategies.step_hooks import recipe_hooks, refuse_mixing_hooks
from worldsize.strategies.synchronous import SynchronousReplica, create_local_replica
from worldsize.strategies.train_state import TrainState
from worldsize.strategies.unit_sharding import cast_inputs, detach_shards, guard_units, shard_units
from worldsize.strategies.wrapping import (
    Wrap,
    refuse_divided_matrices,
    refuse_fused,
    refuse_mixed_dtypes,
    refuse_sparse_gradients,
)

_REMEDY = "Set strategy.wrap=none (gathers the full model for each loss), or use strategy=ddp or zero."
_WHOLE_AT_MOST = 2**30  # bytes: the limit up to which accumulate="auto" keeps gradients unsharded
_Dtype = Literal["fp32", "bf16", "fp16"]
_MESHES = count()  # unique mesh names: torch caches properties of a mesh by its shape and names
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True)
class FSDP(Strategy):
    """Torch's FSDP2 (Zhao et al. 2023, arXiv 2304.11277), i.e. ZeRO stage 3 (arXiv 1910.02054).

    ``shard``: number of ranks that hold one copy of the model: "all", one "node" (hybrid: replicated across nodes), or
    an integer. ``wrap``: the units to gather: the recipe's "blocks"; modules of at least ``wrap_parameters`` ("size");
    blocks if the recipe has any, else by size ("auto"); or the whole model, for losses that use it freely ("none").
    ``reshard_after_forward=False`` keeps gathered parameters until the backward pass (ZeRO stage 2).
    ``param_dtype``: dtype of gathered parameters and their computations (None: unchanged); ``numerics.precision`` is
    autocast. ``reduce_dtype``: dtype of gradient reduction (None: ``param_dtype``). ``cpu_offload``: keep all shards in
    host memory, and update them there. ``accumulate``: between micro-batches, keep gradients "whole" and reduce them
    once per step, or keep them "sharded" and reduce them each time; "auto" shards gradients above 1 GiB. Either way,
    ``reduce="ordered"`` gives the same bits as every other strategy at every world size.
    ``on_failure="heal"``: the other processes continue without a dead one, from copies of its shards in the memory of
    peers. If ``shard`` does not divide their number, they use the next larger number of shards that does.
    """

    supports = CAPABILITIES | {"integrity", "schedule_free"}
    shards_state = True

    shard: Literal["all", "node"] | Annotated[int, Range(least=1)] = "all"
    wrap: Wrap = "auto"
    wrap_parameters: Annotated[int, Range(least=1)] = 1_000_000
    reshard_after_forward: bool = True
    param_dtype: _Dtype | None = None
    reduce_dtype: _Dtype | None = None
    accumulate: Literal["auto", "whole", "sharded"] = "auto"
    cpu_offload: bool = False
    on_failure: OnFailure = "restart"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.shard in ("all", "node") or isinstance(self.shard, int)):
            raise ConfigError(f"strategy.shard must be all, node, or a number of ranks, got {self.shard!r}.")
        if self.on_failure == "heal" and self.accumulate == "sharded" and self.reduce == "ordered":
            raise ConfigError(
                "strategy.on_failure=heal with reproducibility=elastic is not supported with "
                "strategy.accumulate=sharded: the order of sums would depend on the number of processes. Set "
                "strategy.accumulate=whole, or strategy.on_failure=restart."
            )

    def check_recipe(self, recipe: Recipe) -> None:
        if recipe.has_several_updates and self.param_dtype is not None:
            raise ConfigError(
                f"strategy.param_dtype={self.param_dtype} is not supported with {type(recipe).__name__}: the inputs of "
                "directly called submodules are not cast. Set strategy.param_dtype=null and, for speed, "
                "precision=bf16."
            )
        if self.on_failure == "heal":
            refuse_healing_updates(recipe)

    def check_built(self, recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
        refuse_sparse_gradients(model)
        refuse_gradient_hooks(model)
        refuse_divided_matrices(optimizer)
        refuse_fused(optimizer, self.reduce)
        refuse_divided_updates(recipe, model, optimizer, reduce=self.reduce, heals=self.on_failure == "heal")
        refuse_divided_state(recipe, model, optimizer)
        refuse_mixed_dtypes(recipe, model, self.wrap, self.wrap_parameters)
        if self.on_failure == "heal":
            refuse_unsent(recipe, model, optimizer)
        if recipe_hooks(optimizer):
            refuse_mixing_hooks(recipe, model)

    def check_numerics(self, numerics: Numerics) -> None:
        refuse_graphs(numerics, strategy=type(self).__name__)

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        size = self._shard_size(cluster.processes, cluster.processes_per_node)
        if cluster.processes % size:
            raise ConfigError(
                f"{cluster.processes} processes cannot be split into groups of {size} shards. Set strategy.shard to a "
                f"divisor of {cluster.processes}, or cluster.processes to a multiple of {size}."
            )
        if size == 1 < cluster.processes and self.reduce == "ordered":
            shard = next(each for each in range(2, cluster.processes + 1) if cluster.processes % each == 0)
            raise ConfigError(
                f"strategy.shard={self.shard} puts a whole copy of the model on each rank, so FSDP would not sum "
                f"gradients in the order of reproducibility=elastic. Set strategy.shard={shard}, or strategy=ddp, "
                "which gives bitwise identical results."
            )
        if self.accumulate == "sharded" and not self._may_sum_shards(cluster.processes):
            raise ConfigError(
                "strategy.accumulate=sharded with reproducibility=elastic requires the number of processes to be a "
                f"power of two, got {cluster.processes}. Set "
                f"cluster.processes={2 ** (cluster.processes.bit_length() - 1)}, or strategy.accumulate=whole."
            )
        if self.cpu_offload and cluster.device == "cpu":
            raise ConfigError(
                "strategy.cpu_offload=true requires GPUs, but cluster.device is cpu. Set strategy.cpu_offload=false."
            )
        if self.cpu_offload and backend_for(cluster.backend, "cpu") != "gloo":
            raise ConfigError(
                f"strategy.cpu_offload=true requires gloo for CPU tensors, got cluster.backend={cluster.backend}. "
                "Set 'cluster.backend=\"cpu:gloo,cuda:nccl\"', including the quotes."
            )
        return worker_roles(cluster, self.on_failure)

    def _shard_size(self, processes: int, per_node: int) -> int:
        """Return the number of shards per copy.

        For healing, it is rounded up to a divisor of ``processes``, at least 2 if ordered.
        """
        planned: int = {"all": processes, "node": per_node}.get(self.shard, self.shard)  # type: ignore[arg-type]
        if self.on_failure == "heal":
            least = max(planned, 2) if self.reduce == "ordered" else planned
            return next((size for size in range(least, processes) if processes % size == 0), processes)
        return planned

    def cost(self, work: Workload, cluster: Cluster) -> Cost:
        sharding = FSDPSharding(
            ranks=self._shard_size(cluster.processes, cluster.processes_per_node),
            reshard_after_forward=self.reshard_after_forward,
            gathered_share=_share_of_fp32(self.param_dtype),
            scattered_share=_share_of_fp32(self.reduce_dtype or self.param_dtype),
            cpu_offload=self.cpu_offload,
            accumulates_shards=self._accumulates_shards(work.parameter_bytes, cluster.processes),
        )
        return fsdp_cost(work, cluster, sharding)

    def _accumulates_shards(self, parameter_bytes: float, processes: int) -> bool:
        if self.accumulate == "auto":
            return parameter_bytes > _WHOLE_AT_MOST and self._may_sum_shards(processes)
        return self.accumulate == "sharded"

    def _may_sum_shards(self, processes: int) -> bool:
        """Return whether shards can be accumulated; the fixed tree requires 2^k processes for that."""
        return self.reduce != "ordered" or (processes.bit_count() == 1 and self.on_failure != "heal")

    @property
    def schedules_by_metric(self) -> bool:
        return True

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        world = context.world
        if world.size == 1:
            return create_local_replica(recipe, recipe.model().to(world.device), context, self.reduce)
        deferred = DeferredModel.from_factory(recipe.model, warns=world.rank == 0)  # no process holds the whole model
        model = deferred.model
        with context.making_groups():
            mesh = self._create_mesh(world)
        root = CallingRoot(model)
        if self.on_failure == "heal":
            connect_groups(mesh.get_all_groups())
        self._shard_model(recipe, model, mesh, root)
        if self.param_dtype is not None:
            cast_inputs(model, _DTYPES[self.param_dtype])
        deferred.fill_tensors(world.device, shards=torch.device("cpu") if self.cpu_offload else None)
        guard_units(root, remedy=_REMEDY, names_uses=not context.numerics.compile)
        copies = mesh.get_group(0) if mesh.size(0) > 1 else None
        shards = self._accumulates_shards(
            sum(parameter.numel() * parameter.itemsize for parameter in model.parameters()), world.size
        )
        ranks = context.logical_ranks if self.on_failure == "heal" else None  # None: the same number on each process
        sums = create_sharded_reducer(
            self.reduce,
            root,
            world,
            copies,
            takes_one_update=not recipe.has_several_updates,
            accumulates_shards=shards,
            logical_ranks=ranks,
        )
        state = TrainState.from_recipe(recipe, model)
        if any([self._tries_updates(recipe, model, each) for each in state.optimizers]):
            state = TrainState.from_recipe(recipe, model)
        for optimizer in state.optimizers:
            step_locally(optimizer)
            step_apart(optimizer)
        carry_assignments(model, state.optimizers)
        if recipe.has_several_updates:
            return MultiUpdateReplica(recipe, context, train_state=state, reducer=sums, module=root)
        return SynchronousReplica(recipe, context, train_state=state, reducer=sums, logical_ranks=ranks, module=root)

    def _tries_updates(self, recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> bool:
        """Run :func:`refuse_wrong_updates` if needed; return whether to recreate ``optimizer``."""
        if self.reduce == "ordered" or self.on_failure == "heal":  # checked before the run starts
            return False
        return refuse_wrong_updates(recipe, model, optimizer, step_apart)

    def _create_mesh(self, world: World) -> DeviceMesh:
        """Return the mesh (copies, shards per copy); each copy has consecutive ranks."""
        node = world.groups.get("node")
        per_node = node.size() if node else world.size
        if self.shard == "node" and self.on_failure == "heal":
            per_node = _most_on_a_node(world)
        size = self._shard_size(world.size, per_node)
        shape = (world.size // size, size)
        number = next(_MESHES)
        return init_device_mesh(world.device.type, shape, mesh_dim_names=(f"replicate{number}", f"shard{number}"))

    def _shard_model(self, recipe: Recipe, model: nn.Module, mesh: DeviceMesh, root: nn.Module) -> None:
        names = mesh.mesh_dim_names or ()
        # without a copies axis, strategies/sharded_reducer.py sums over copies
        plain = mesh.size(0) == 1 or self.reduce == "ordered" or self.on_failure == "heal"
        policy = MixedPrecisionPolicy(_DTYPES.get(self.param_dtype or ""), _DTYPES.get(self.reduce_dtype or ""))
        offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
        detach_shards()
        shard_units(
            recipe,
            model,
            [root],
            wrap=self.wrap,
            least=self.wrap_parameters,
            mesh=mesh[names[-1]] if plain else mesh,
            reshard_after_forward=self.reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
        )


def _most_on_a_node(world: World) -> int:
    """Return the largest number of ranks on one node; all ranks must call it."""
    nodes = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    nodes[world.rank] = world.node_rank
    dist.all_reduce(nodes, group=world.group)
    return int(nodes.bincount().max())


def _share_of_fp32(dtype: _Dtype | None) -> float:
    """Return the size of ``dtype`` relative to float32."""
    return _DTYPES[dtype].itemsize / 4 if dtype else 1.0
