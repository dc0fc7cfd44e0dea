"""Construction of one rank of a mesh: its part of the model, its optimizer and its replica."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from worldsize.core import ONE_UPDATE, MicroBatch, Numerics, Recipe, Reduction, Replica, RunContext, StateDict, World
from worldsize.errors import ConfigError
from worldsize.optimizers.groups import create_optimizer
from worldsize.seeds import keep_generators
from worldsize.strategies.bit_mismatch import WHOLE
from worldsize.strategies.chunk_tensor import ChunkLayout
from worldsize.strategies.deferred.model import DeferredModel
from worldsize.strategies.deferred_weights import allow_deferring
from worldsize.strategies.gradient_reducer import Backward, GradientReducer, Observe
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.mesh.groups import MeshGroups
from worldsize.strategies.mesh.layout import Layout, Ownership, get_submesh, parse_axis
from worldsize.strategies.mesh.parallel import Sharding, keep_held, shard_model
from worldsize.strategies.mesh.pipeline import Pipeline, PipelineReplica
from worldsize.strategies.mesh.schedule import PipelineSchedule, split_stages
from worldsize.strategies.mesh.stage import Stage
from worldsize.strategies.mesh.sums import DataParts, MeshNorm, WholeNorm
from worldsize.strategies.mesh.tied import Tied
from worldsize.strategies.model_replica import CallingRoot
from worldsize.strategies.sharded_reducer import create_sharded_reducer
from worldsize.strategies.sharded_state import ShardedOptimizerState, meta_states
from worldsize.strategies.sharded_steps import carry_assignments, refuse_wrong_updates, step_apart, step_locally
from worldsize.strategies.synchronous import SynchronousReplica
from worldsize.strategies.train_state import TrainState
from worldsize.strategies.unit_sharding import guard_units
from worldsize.strategies.wrapping import refuse_scalars


@final
@dataclass(frozen=True)
class MeshRank:
    """Builds the replica of one mesh rank."""

    recipe: Recipe
    context: RunContext
    layout: Layout
    schedule: PipelineSchedule
    sharding: Sharding
    reduce: Reduction = "flat"

    @property
    def _sums_context_apart(self) -> bool:
        """Whether gradients are summed over the context axis in the backward pass.

        Otherwise, they are summed together with the data axis. Required for ordered sums, and if data-parallel parts
        may have different numbers of logical ranks.
        """
        return self.reduce == "ordered" or self.sharding.interruptible

    def build_replica(self) -> Replica:
        """Build this rank's replica; all ranks of the mesh must call it."""
        merges, copies = not self._sums_context_apart, self.layout.copies
        mesh = self._groups.create_mesh(merges_context=merges, copies=copies)
        parts = get_submesh(self._groups.create_mesh(merges_context=merges) if copies > 1 else mesh, "data")
        is_first = self.context.world.rank == 0
        deferred = DeferredModel.from_factory(self.recipe.model, warns=is_first)  # no process holds the whole model
        return (
            self._build_sharded_replica(deferred, mesh, parts)
            if self.schedule.stages == 1
            else self._build_pipeline_replica(deferred, mesh, parts)
        )

    @property
    def _logical_ranks(self) -> int | None:
        """Total number of logical ranks, if data-parallel parts may have different shares."""
        return self.context.logical_ranks if self.sharding.interruptible else None

    @property
    def _groups(self) -> MeshGroups:
        return MeshGroups(self.context, self.layout, self.sharding.interruptible)

    def _build_data_world(self, parts: DeviceMesh) -> World:
        """Return the world of ranks that hold the same part of the model, those along ``parts``."""
        world = self.context.world
        groups = {world.role: parts.get_group()} if parts.size() > 1 else {}
        if world.group is not None:
            groups[WHOLE] = world.group
        return replace(self.context.world, rank=parts.get_local_rank(), size=parts.size(), groups=groups)

    def _get_copies(self, mesh: DeviceMesh) -> ProcessGroup | None:
        """Return the ranks with the same shards; None if there is only one copy."""
        return get_submesh(mesh, "replicate").get_group() if self.layout.copies > 1 else None

    def _create_chunks(self) -> ChunkLayout | None:
        """Return the layout of sequence chunks (None: whole); all mesh ranks must call this."""
        group, size, rank = (
            self._groups.create_context_group(),
            self.layout["context"],
            self._groups.coordinate["context"],
        )
        chunks = self.context.numerics.logical_context
        if self.reduce == "ordered":
            return ChunkLayout(chunks, size, rank, group) if chunks > 1 else None
        if size == 1:
            return None
        return ChunkLayout(2 * size, size, rank, group, is_ordered=False, is_complete=self._sums_context_apart)

    def _create_norm(self, mesh: DeviceMesh, spare: Collection[Tensor]) -> MeshNorm | WholeNorm:
        if self.reduce == "ordered":
            stages = get_submesh(mesh, "pipeline").get_group() if self.layout["pipeline"] > 1 else None
            return WholeNorm(self.context.world.device, stages, spare)
        axes = {axis: get_submesh(mesh, axis).get_local_rank() for axis in map(parse_axis, mesh.mesh_dim_names or ())}
        del axes["pipeline"]
        return MeshNorm(self.context.world, axes, spare)

    def _full_state(self, model: nn.Module) -> StateDict:
        """Return the unsharded optimizer state on the meta device, leaving generators unchanged."""
        with keep_generators(self.context.world.device):
            return meta_states(self.recipe, model)[ONE_UPDATE]

    def _train_state(self, model: nn.Module, full_state: StateDict) -> TrainState:
        """Create the optimizer of this rank's part; ``full_state``: unsharded optimizer state."""
        optimizer = create_optimizer(self.recipe, model)
        keep_held(optimizer)
        is_checked = self.reduce == "ordered" or self.sharding.interruptible  # checked before the run starts
        if not is_checked and refuse_wrong_updates(self.recipe, model, optimizer, _prepare_optimizer):
            optimizer = create_optimizer(self.recipe, model)
            keep_held(optimizer)
        step_locally(optimizer)
        step_apart(optimizer)
        carry_assignments(model, [optimizer])
        parts = ShardedOptimizerState(model, optimizer, full_state)
        return TrainState.from_recipe(self.recipe, model, {ONE_UPDATE: optimizer}, {ONE_UPDATE: parts})

    def _build_sharded_replica(self, deferred: DeferredModel, mesh: DeviceMesh, parts: DeviceMesh) -> Replica:
        """Build the replica of a rank that holds a part of every layer."""
        model = deferred.model
        full_state, data = self._full_state(model), self._build_data_world(parts)
        root = CallingRoot(model)
        shard_model(self.recipe, model, [root], mesh, self.sharding)
        deferred.fill_tensors(self.context.world.device)
        _move(model, self.context.world.device)
        guard_units(root, remedy=_format_remedy(self.layout), names_uses=not self.context.numerics.compile)
        ranks = self._logical_ranks
        sums = _WithMeshNorm(
            create_sharded_reducer(self.reduce, root, data, self._get_copies(mesh), logical_ranks=ranks),
            self._create_norm(mesh, ()),
        )
        state, context = self._train_state(model, full_state), replace(self.context, world=data)
        return SynchronousReplica(
            self.recipe,
            context,
            train_state=state,
            reducer=sums,
            logical_ranks=ranks,
            module=root,
            chunks=self._create_chunks(),
        )

    def _build_pipeline_replica(self, deferred: DeferredModel, mesh: DeviceMesh, parts: DeviceMesh) -> Replica:
        """Build the replica of a rank that holds the layers of some stages."""
        model, device = deferred.model, self.context.world.device
        _check_blocks(self.recipe, model, self.context.numerics)
        full_state, data = self._full_state(model), self._build_data_world(parts)
        chain = split_stages(self.recipe, model, self.schedule.stages, self.schedule.split)
        ranks = self.schedule.rank_of_stage
        owned = Ownership(model, chain, rank_of_stage=ranks, p=self._p)
        is_sharded = data.size > 1 or self.sharding.interruptible  # more data-parallel parts may join later
        owned.check_shared(is_sharded=is_sharded, is_ordered=self.reduce == "ordered")
        if is_sharded:
            refuse_scalars(model)
        precision, chunks = self.context.numerics.precision, self._create_chunks()
        mine = [
            Stage(
                self.recipe,
                chain[index],
                index=index,
                first=sum(map(len, chain[:index])),
                device=device,
                precision=precision,
                chunks=chunks,
                is_last=index == self.schedule.stages - 1,
            )
            for index in range(self.schedule.stages)
            if ranks[index] == self._p
        ]
        shard_model(self.recipe, model, mine, mesh, self.sharding)
        deferred.fill_tensors(device, lambda slot: owned.has_tensor(slot.module, slot.name))
        for stage in mine:
            _move(stage, device)
            stage.register_index_hook()
        owned.leave_others()
        pipeline = self._pipeline(mine, owned, mesh, parts.get_group())
        inner = SynchronousReplica(
            self.recipe,
            replace(self.context, world=data),
            train_state=self._train_state(model, full_state),
            reducer=pipeline,
            logical_ranks=self._logical_ranks,
            chunks=chunks,
        )
        if self.schedule.splits_backward:
            for stage in mine:
                allow_deferring(stage)
        return PipelineReplica(self.recipe, data, inner, pipeline)

    def _pipeline(self, mine: Sequence[Stage], owned: Ownership, mesh: DeviceMesh, group: ProcessGroup) -> Pipeline:
        """Connect this rank's stages to other ranks; all ranks of the mesh must call it.

        ``group``: the ranks with the same stages.
        """
        # with one stage per rank, and parameters that stay gathered, a step gathers once
        equal_passes = self.schedule.is_looped or self.sharding.reshard_after_forward
        parts = DataParts(group, self.reduce, self._logical_ranks, equal_passes, self._get_copies(mesh))
        tied = self._group_tied_parameters(owned)
        for stage in mine:
            stage.sums, stage.at = parts.create_sums(stage, tied), self.context.faults.report_point
        return Pipeline(
            stages=mine,
            schedule=self.schedule,
            group=get_submesh(mesh, "pipeline").get_group(),
            parts=parts,
            device=self.context.world.device,
            tied=tied,
            norm=self._create_norm(mesh, owned.find_spare_parameters()),
            edges=self._groups.create_edges(is_ring=self.schedule.is_ring),
        )

    @property
    def _p(self) -> int:
        return self._groups.coordinate["pipeline"]

    def _group_tied_parameters(self, owned: Ownership) -> list[Tied]:
        """Group parameters shared by pipeline ranks; all ranks of the mesh must call it."""
        found = []
        for stages, names in owned.find_tied_parameters().items():
            owners = [self.schedule.rank_of_stage[stage] for stage in stages]
            ranks = sorted(set(owners))
            if group := self._groups.create_group(ranks):
                found.append(Tied(owned.parameters(names), group, [ranks.index(owner) for owner in owners]))
        return found


def _move(module: nn.Module, device: torch.device) -> None:
    """Move ``module`` unless it is on ``device``: fakes of a rehearsal cannot be replaced."""
    if any(each.device != device for each in itertools.chain(module.parameters(), module.buffers())):
        module.to(device)


def _prepare_optimizer(optimizer: Optimizer) -> None:
    keep_held(optimizer)
    step_apart(optimizer)


def _format_remedy(layout: Layout) -> str:
    """Return the remedy for a loss that needs whole parameters."""
    tensor = "strategy.tensor=1 and " if layout["tensor"] > 1 else ""
    return f"Set {tensor}strategy.wrap=none (gathers the full model for each loss), or use strategy=ddp or zero."


def _check_blocks(recipe: Recipe, model: nn.Module, numerics: Numerics) -> None:
    if (numerics.compile or numerics.activation_offload) and not recipe.blocks(model):
        raise ConfigError(
            "compile=true and activation_offload=true require blocks in a pipeline, but Recipe.blocks returned none. "
            "Define Recipe.blocks, or set both to false."
        )


@final
@dataclass(frozen=True)
class _WithMeshNorm(GradientReducer):
    """Wraps the reducer ``inner``, but computes the norm over the whole mesh."""

    divides_gradients = True

    inner: GradientReducer
    norm: MeshNorm | WholeNorm

    @property
    def is_ordered(self) -> bool:
        return self.inner.is_ordered

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        return self.inner.run(batches, backward)

    def run_apart(self, batch: MicroBatch, backward: Backward) -> LossRecord:
        return self.inner.run_apart(batch, backward)

    def observe_gradients(self, observe: Observe) -> AbstractContextManager[None]:
        return self.inner.observe_gradients(observe)

    def scale(self, parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
        self.inner.scale(parameters, factor)

    def compute_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return self.norm.compute_norm(parameters)

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        return self.norm.clip(parameters, limit)

    def on_resume(self) -> None:
        self.inner.on_resume()
