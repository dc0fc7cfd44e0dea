"""Fully sharded data parallel: parameters, gradients and optimizer state divided over ranks (torch's fully_shard)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from worldsize.core import (
    Cluster,
    ConfigError,
    Cost,
    Precision,
    Recipe,
    Replica,
    Role,
    RunContext,
    Strategy,
    Workload,
    World,
)
from worldsize.cost.cluster import across, link, ring_share, slowest
from worldsize.cost.collectives import all_gather_seconds, divided, exposed_seconds, ring_all_reduce_seconds
from worldsize.strategies.sharded_reducer import sharded_reducer
from worldsize.strategies.synchronous import SynchronousReplica
from worldsize.strategies.train_state import TrainState
from worldsize.strategies.wrapping import Wrap, units

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True)
class FSDP(Strategy):
    """FSDP2 (Zhao et al. 2023, arXiv 2304.11277), which is ZeRO stage 3 (Rajbhandari et al. 2020, arXiv 1910.02054).

    ``shard``: ranks that together hold one copy of the model: "all", those of a "node" (hybrid: replicated across
    nodes), or their number. ``wrap``: what is gathered at once: the recipe's "blocks", modules of at least
    ``wrap_parameters`` by "size", or "auto": blocks if the recipe has any. ``reshard_after_forward=False`` keeps
    gathered parameters until the backward pass (ZeRO stage 2). ``param_dtype``, ``reduce_dtype``: in which
    parameters are gathered and computed with, and gradients summed (None: as they are; ``numerics.precision`` is
    autocast, as everywhere). ``reduce="ordered"``: the bits of every other strategy at every world size.
    """

    shard: Literal["all", "node"] | int = "all"
    wrap: Wrap = "auto"
    wrap_parameters: int = 1_000_000
    reshard_after_forward: bool = True
    param_dtype: Precision | None = None
    reduce_dtype: Precision | None = None
    activation_checkpointing: bool = False
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if not (self.shard in ("all", "node") or (isinstance(self.shard, int) and self.shard > 0)):
            raise ConfigError(f"strategy.shard={self.shard!r} is unknown. Known: all, node, or a number of ranks.")
        for name, dtype in (("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)):
            if dtype not in (None, *_DTYPES):
                raise ConfigError(f"strategy.{name}={dtype!r} is unknown. Known: {', '.join(_DTYPES)}, null.")

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        size = self._shard_size(cluster.processes, cluster.processes_per_node)
        if cluster.processes % size:
            raise ConfigError(
                f"{cluster.processes} processes do not divide into copies of {size} shards. "
                f"Set strategy.shard to a divisor of {cluster.processes}, or cluster.processes to a multiple of {size}."
            )
        if self.cpu_offload and cluster.device == "cpu":
            raise ConfigError("strategy.cpu_offload=true moves shards from GPUs to the host; cluster.device is cpu.")
        return {"worker": Role(processes=cluster.processes)}

    def _shard_size(self, processes: int, per_node: int) -> int:
        return {"all": processes, "node": per_node}.get(self.shard, self.shard)  # type: ignore[arg-type]

    def cost(self, work: Workload, cluster: Cluster) -> Cost:
        """Gathered for the forward pass and, unless kept, for the backward pass; gradients reduce-scattered, and with
        several copies all-reduced between them. gloo's reduce-scatter is an all-reduce of which most is thrown away
        (bytes counted at the interface: benchmarks/README.md), and waits for each unit; on GPUs only the first
        gather and the last reduce-scatter have nothing to hide behind (arXiv 2304.11277, section 3.3).
        """
        payload, size = work.parameter_bytes, self._shard_size(cluster.processes, cluster.processes_per_node)
        on_cpu = cluster.backend == "gloo"
        gathers, scatters = 2 if self.reshard_after_forward else 1, 2 if on_cpu else 1
        passes = gathers * _smaller(self.param_dtype) + scatters * _smaller(self.reduce_dtype or self.param_dtype)
        inside = slowest(cluster) if size > cluster.processes_per_node else link(cluster, "node")
        units = work.blocks + 1  # gathered one by one, the rest of the model as one
        seconds = passes * units * all_gather_seconds(payload / units, size, inside)
        sent = passes * ring_share(size) * payload
        copies, leaving = cluster.processes // size, sent if size > cluster.processes_per_node else 0.0
        if copies > 1:
            between = 2 * ring_share(copies) * payload / size
            shared = divided(slowest(cluster), cluster.processes_per_node)
            seconds += ring_all_reduce_seconds(payload / size, copies, shared)
            sent, leaving = sent + between, leaving + between * cluster.processes_per_node
        ends = 2 * all_gather_seconds(work.unit_bytes, size, inside)
        hidden = max(ends, exposed_seconds(seconds, work.overlap * work.compute_seconds))
        return Cost(
            memory_bytes=self._memory_bytes(work, size),
            sent_bytes=sent,
            across_bytes=across(cluster, leaving),
            communication_seconds=seconds,
            exposed_seconds=min(seconds, hidden) if work.overlap and not on_cpu else seconds,
            added_seconds=-ring_share(size) * work.update_seconds,
        )

    def _memory_bytes(self, work: Workload, size: int) -> float:
        gathered = 2 * work.unit_bytes if self.reshard_after_forward else work.parameter_bytes
        activations = work.boundary_bytes * work.blocks if self.activation_checkpointing else work.activation_bytes
        kept = 0.0 if self.cpu_offload else (2 * work.parameter_bytes + work.optimizer_bytes) / size
        return kept + gathered * _smaller(self.param_dtype) + activations

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        world = context.world
        model = recipe.model()
        if self.activation_checkpointing:
            for block in recipe.blocks(model):
                checkpoint(block)
        copies = None
        if world.size == 1:
            model = model.to(world.device)
        else:
            mesh = self._mesh(world)
            self._shard(recipe, model, mesh)
            copies = mesh.get_group("replicate") if mesh.size(0) > 1 else None
        sums = sharded_reducer(self.reduce, model, world, copies)
        return SynchronousReplica(recipe, context, train_state=TrainState.of(recipe, model), reducer=sums)

    def _mesh(self, world: World) -> DeviceMesh:
        """[copies, shards of a copy]; ranks that share a copy are neighbours."""
        node = world.groups.get("node")
        size = self._shard_size(world.size, node.size() if node else world.size)
        shape = (world.size // size, size)
        return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def _shard(self, recipe: Recipe, model: nn.Module, mesh: DeviceMesh) -> None:
        # ordered sums cross all copies at once, see strategies/sharded_reducer.py
        plain = mesh.size(0) == 1 or self.reduce == "ordered"
        policy = MixedPrecisionPolicy(_DTYPES.get(self.param_dtype or ""), _DTYPES.get(self.reduce_dtype or ""))
        offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
        for module in (*units(recipe, model, self.wrap, self.wrap_parameters), model):
            fully_shard(
                module,
                mesh=mesh["shard"] if plain else mesh,
                reshard_after_forward=self.reshard_after_forward,
                mp_policy=policy,
                offload_policy=offload,
            )


def _smaller(dtype: Precision | None) -> float:
    """Bytes for each of float32."""
    return _DTYPES[dtype].itemsize / 4 if dtype else 1.0
