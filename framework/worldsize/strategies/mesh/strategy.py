"""The strategy for data × context × tensor × pipeline parallelism, with its cost model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, final

from worldsize.collectives.cluster_cost import count_leaving_edges, find_limiting_link, get_link, ring_share
from worldsize.collectives.cost import (
    all_gather_seconds,
    estimate_exposed_seconds,
    message_seconds,
    ring_all_reduce_seconds,
)
from worldsize.core import (
    Block,
    Cluster,
    ConfigError,
    Cost,
    Numerics,
    OneOf,
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
from worldsize.strategies.mesh.layout import (
    AXES,
    ORDER,
    Layout,
    Ownership,
    check_heals,
    check_order,
    check_shapes,
    check_taken,
    check_tensor,
    complete_order,
)
from worldsize.strategies.mesh.parallel import Sharding
from worldsize.strategies.mesh.rank import MeshRank
from worldsize.strategies.mesh.schedule import Kind, PipelineSchedule, check_pipelines, split_stages
from worldsize.strategies.optimizer_checks import (
    refuse_divided_state,
    refuse_divided_updates,
    refuse_joint_updates,
    refuse_unsent,
)
from worldsize.strategies.parameter_changes import refuse_gradient_hooks
from worldsize.strategies.sequence_chunks import check_sequences
from worldsize.strategies.step_hooks import recipe_hooks, refuse_mixing_hooks
from worldsize.strategies.synchronous import create_local_replica
from worldsize.strategies.tensor_layers import check_divides, get_tensor_plan
from worldsize.strategies.token_shard import list_blocks
from worldsize.strategies.wrapping import (
    Wrap,
    refuse_divided_matrices,
    refuse_fused,
    refuse_mixed_dtypes,
    refuse_scalars,
    refuse_sparse_gradients,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@final
@dataclass(frozen=True)
class Mesh(Strategy):
    """Data, context, tensor and pipeline parallelism (Narayanan et al. 2021, arXiv 2104.04473).

    Runs on ``data`` × ``context`` × ``tensor`` × ``pipeline`` processes.

    ``data``: number of data-parallel parts, over which the model is sharded as in FSDP (None: as many as possible).
    ``replicate``: number of copies of the shards, as in HSDP; each is sharded over ``data / replicate`` parts.
    ``tensor``: number of ranks on a node that split each layer (Megatron, Shoeybi et al. 2019, arXiv 1909.08053).
    ``sequence_parallel``: whether these ranks also divide the tokens outside of these layers, so that norms, dropout
    and their inputs are not replicated (Korthikanti et al. 2022, arXiv 2205.05198).
    ``loss_parallel``: whether they also divide the tokens of the head's outputs, and each computes the cross entropy of
    its own tokens; the head must be "gathered" in ``Recipe.tensor_plan``.
    ``context``: number of ranks that share each sequence (Llama 3, arXiv 2407.21783, section 3.3.2).
    ``pipeline``: number of pipeline ranks; each micro-batch is one logical rank.
    ``schedule``: "gpipe" (Huang et al. 2018, arXiv 1811.06965), "1f1b" (PipeDream, arXiv 1806.03377), "interleaved"
    (arXiv 2104.04473) or "zero_bubble" (ZB-H1, Qi et al. 2024, arXiv 2401.10241), both with ``stages_per_rank`` stages
    per rank (None: 2). "zbv" (the same, section 6) and "dualpipev" (DeepSeek-V3, arXiv 2412.19437) assign two stages to
    a rank, the first and the last to rank 0. The last three defer weight gradients.
    ``schedule_csv``: the passes of each rank as CSV text, instead of ``schedule``; see
    :mod:`~worldsize.strategies.mesh.pass_table`.
    ``split``: index of the first layer of each stage after the first (None: balanced by parameter count).
    ``order``: the axes from innermost (adjacent ranks) to outermost (slowest links), as in Megatron's
    ``initialize_model_parallel``. It does not affect results with ``reduce="ordered"``, which are bitwise equal to
    those of one process; ``logical_tensor`` must be a multiple of ``tensor``, and ``logical_context`` of ``context``.
    ``micro_batches``: default number of logical ranks per data-parallel part (None: 2 × pipeline, or 1 without one).
    ``wrap``, ``wrap_parameters``, ``reshard_after_forward``: as in FSDP (None for the last: only without a pipeline).
    ``on_failure="heal"``: the other processes continue without a dead one, from copies of its shards in the memory of
    peers. They form as many data-parallel parts as possible, initially ``data``; excess processes wait.
    ``heal_shapes``: sizes of ``tensor``, ``context`` and ``pipeline`` to change to if fewer processes would then wait.
    For example, ``[{"tensor": 1}]`` keeps the other sizes. If several shapes are equally good, the first is used.
    """

    supports = frozenset({"state_metrics", "ema", "compile", "activation_checkpointing", "features", "integrity"})
    shards_state = True

    data: Annotated[int | None, Range(least=1)] = None
    replicate: Annotated[int, Range(least=1)] = 1
    tensor: Annotated[int, Range(least=1)] = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    context: Annotated[int, Range(least=1)] = 1
    pipeline: Annotated[int, Range(least=1)] = 1
    schedule: Kind = "1f1b"
    schedule_csv: str | None = None
    stages_per_rank: Annotated[int | None, Range(least=1)] = None
    micro_batches: Annotated[int | None, Range(least=1)] = None
    split: list[int] | None = None
    wrap: Wrap = "auto"
    wrap_parameters: Annotated[int, Range(least=1)] = 1_000_000
    reshard_after_forward: bool | None = None
    on_failure: OnFailure = "restart"
    order: list[Annotated[str, OneOf(*ORDER)]] = field(default_factory=lambda: list(ORDER))
    heal_shapes: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        pipeline = None if self.split is None else self.pipeline
        check_shapes(self.heal_shapes, heals=self.on_failure == "heal", pipeline=pipeline)
        if self.reduce == "hierarchical":
            raise ConfigError(
                f"strategy.reduce={self.reduce} is not supported with strategy=mesh. Set strategy.reduce=flat."
            )
        if self.replicate > 1 and self.on_failure == "heal":
            raise ConfigError(
                f"strategy.replicate={self.replicate} is not supported with strategy.on_failure=heal. Set "
                "strategy.replicate=1, or strategy.on_failure=restart."
            )
        if self.schedule_csv is not None and self.on_failure == "heal":
            raise ConfigError(
                "strategy.schedule_csv is not supported with strategy.on_failure=heal, since its number of "
                "micro-batches is fixed. Set strategy.on_failure=restart, or strategy.schedule_csv=null."
            )
        check_order(self.order)
        _ = self.pipeline_schedule  # raises for incompatible options, before any process starts
        if self.heal_shapes:
            check_taken([shape.part for shape in self.shapes])

    @property
    def pipeline_schedule(self) -> PipelineSchedule:
        """The pipeline options."""
        return PipelineSchedule(self.pipeline, self.schedule, self.stages_per_rank, self.split, self.schedule_csv)

    @property
    def shapes(self) -> Sequence[Mesh]:
        """This strategy in each of its possible shapes, its own first, without ``heal_shapes``."""
        plain = replace(self, heal_shapes=[])
        return [plain, *(replace(plain, data=None, **shape) for shape in self.heal_shapes)]  # type: ignore[arg-type]

    def _take_shape(self, processes: int) -> Mesh:
        """Return this strategy in the shape that ``processes`` processes take."""
        if self.data is not None or not self.heal_shapes:
            return self
        shapes = self.shapes
        return next((shape for shape in shapes if processes % shape.block.size == 0), self)

    def _check_others(self, check: Callable[[Mesh], None]) -> None:
        """Check the shapes in ``heal_shapes``; refusals name the shape."""
        for shape in self.shapes[1:]:
            try:
                check(shape)
            except ConfigError as error:
                raise ConfigError(f"strategy.heal_shapes, {shape.part.format_sizes()}: {error}") from None

    @property
    def part(self) -> Layout:
        """The layout of one data-parallel part."""
        sizes = {"data": 1, "pipeline": self.pipeline, "tensor": self.tensor, "context": self.context}
        return Layout(sizes, complete_order(self.order))

    @property
    def block(self) -> Block:
        """The processes of one data-parallel part."""
        return Block(self.part.size, self.part.together)

    def check_audit(self, cluster: Cluster) -> None:
        if self.pipeline > 1:
            raise ConfigError(
                f"integrity.audit is not supported with strategy.pipeline={self.pipeline}: a stage does not compute "
                "single passes. Set strategy.pipeline=1, or integrity.audit=0."
            )
        super().check_audit(cluster)

    def check_numerics(self, numerics: Numerics) -> None:
        self._check_others(lambda shape: shape.check_numerics(numerics))
        refuse_graphs(numerics, strategy="Mesh")
        if numerics.policy.has_8_bits and self.tensor > 1:
            raise ConfigError(
                f"precision={numerics.precision} is not supported with strategy.tensor={self.tensor}: each shard of a "
                "layer would have a different scale. Set strategy.tensor=1, or precision=bf16."
            )
        if self.pipeline_schedule.splits_backward and numerics.compile:
            raise ConfigError(
                "compile=true is not supported with I and W passes in strategy.schedule_csv. Set compile=false, or use "
                "B passes."
                if self.schedule_csv
                else f"compile=true is not supported with strategy.schedule={self.schedule}: it runs the backward pass "
                "of a stage in two parts. Set compile=false, or strategy.schedule=interleaved."
            )
        divides = self.tensor > 1
        for option, is_on, off in (
            (f"strategy.context={self.context}", self.context > 1, "strategy.context=1"),
            ("strategy.sequence_parallel=true", divides and self.sequence_parallel, "strategy.sequence_parallel=false"),
            ("strategy.loss_parallel=true", divides and self.loss_parallel, "strategy.loss_parallel=false"),
        ):
            if numerics.compile and is_on:
                raise ConfigError(f"compile=true is not supported with {option}. Set compile=false, or {off}.")
        for axis, size, logical in (
            ("tensor", self.tensor, numerics.logical_tensor),
            ("context", self.context, numerics.logical_context),
        ):
            if self.reduce == "ordered" and logical % size:
                power = 1 << (size - 1).bit_length()
                remedy = f"Set logical_{axis}={power}, or to the largest strategy.{axis} that you will use."
                if power != size:
                    remedy = (
                        f"Set strategy.{axis} to a power of two, such as {power}, and logical_{axis} to the same value."
                    )
                raise ConfigError(
                    f"strategy.{axis}={size} requires logical_{axis} to be a multiple of {size}, got {logical}. "
                    f"Otherwise results would depend on strategy.{axis}. {remedy}"
                )

    @property
    def default_micro_batches(self) -> int:
        if (table := self.pipeline_schedule.table) is not None:
            return self.micro_batches or table.micro_batches
        return self.micro_batches or (2 * self.pipeline if self.pipeline > 1 else 1)

    def check_micro_batches(self, count: int) -> None:
        self.pipeline_schedule.check_micro_batches(count)

    def check_recipe(self, recipe: Recipe) -> None:
        self._check_others(lambda shape: shape.check_recipe(recipe))
        if self.tensor > 1:
            check_divides(recipe, key="strategy.tensor")
        if self.pipeline > 1:
            check_pipelines(recipe)

    def check_built(self, recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
        self._check_others(lambda shape: shape.check_built(recipe, model, optimizer))
        refuse_sparse_gradients(model)
        refuse_gradient_hooks(model)
        refuse_divided_matrices(optimizer)
        refuse_fused(optimizer, self.reduce)
        heals, dims = self.on_failure == "heal", (0, 1) if self.tensor > 1 else (0,)
        refuse_divided_updates(recipe, model, optimizer, reduce=self.reduce, heals=heals, dims=dims)
        refuse_divided_state(recipe, model, optimizer)
        if heals:
            refuse_unsent(recipe, model, optimizer)
        if self.pipeline > 1:
            refuse_joint_updates(
                recipe, model, optimizer, because="each stage of a pipeline updates only its own parameters"
            )
        refuse_mixed_dtypes(recipe, model, self.wrap, self.wrap_parameters)
        if recipe_hooks(optimizer):
            refuse_mixing_hooks(recipe, model)
        if self.context > 1 and self.reduce != "ordered":  # otherwise, logical_context has been checked
            check_sequences(recipe, model, 2 * self.context, key="strategy.context")
        if self.tensor > 1:
            plan = get_tensor_plan(recipe, model, slices=self.tensor, key="strategy.tensor")
            if self.sequence_parallel:
                list_blocks(recipe, model)
            from torch.nn import Linear  # imported here, since torch takes seconds

            heads = [model.get_submodule(name) for name, style in plan.items() if style == "gathered"]
            if self.loss_parallel and not any(isinstance(head, Linear) for head in heads):
                raise ConfigError(
                    'strategy.loss_parallel=true requires a head with the style "gathered" in Recipe.tensor_plan, '
                    f"but {type(recipe).__name__} has none. Set strategy.loss_parallel=false."
                )
        if self.pipeline > 1:
            stages = split_stages(recipe, model, self.pipeline_schedule.stages, self.split)
            owned = Ownership(model, stages, rank_of_stage=self.pipeline_schedule.rank_of_stage, p=0)
            is_sharded = self.on_failure == "heal" or (self.data or 1) * self.context > 1
            owned.check_shared(is_sharded=is_sharded, is_ordered=self.reduce == "ordered")
            if self.schedule_csv is not None and self.reduce == "ordered" and owned.find_tied_parameters():
                raise ConfigError(
                    "strategy.schedule_csv with reproducibility=elastic does not support a weight shared by several "
                    "pipeline ranks, such as a tied embedding: its gradient could wait for a later pass. Set "
                    "strategy.schedule_csv=null, or do not share the weight."
                )
            if is_sharded:
                refuse_scalars(model)

    def healing(self) -> Strategy:
        return replace(self, data=None)

    def create_layout(self, processes: int) -> Layout:
        """Return the mesh layout for ``processes`` processes.

        Raises:
            ConfigError: the sizes of the axes do not match the number of processes.
        """
        part = self._take_shape(processes).part
        rest = part.size
        data = self.data or processes // rest
        if data * rest != processes:
            given = part.sizes if self.data is None else {**part.sizes, "data": self.data}
            sizes = " × ".join(
                f"strategy.{axis}={size}" for axis, size in given.items() if (axis, size) != ("context", 1)
            )
            raise ConfigError(
                f"{processes} processes do not match {sizes}. Set cluster.processes={data * rest or rest}, or sizes "
                f"with a product of {processes}."
            )
        if data % self.replicate:
            raise ConfigError(
                f"strategy.replicate={self.replicate} does not divide the data-parallel size, {data}. Set it to a "
                f"divisor of {data}, or cluster.processes to a multiple of {self.replicate * rest}."
            )
        if data == self.replicate > 1 and self.reduce == "ordered":
            raise ConfigError(
                f"strategy.replicate={self.replicate} leaves one shard per copy, so FSDP would not sum gradients in "
                "the order of reproducibility=elastic. Set it to a smaller divisor of the data-parallel size."
            )
        return Layout({**part.sizes, "data": data}, part.order, self.replicate)

    def axis_sizes(self, processes: int) -> Mapping[str, int]:
        layout = self.create_layout(processes)
        return {axis: layout[axis] for axis in AXES if axis in layout.listed_order}

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        layout = self.create_layout(cluster.processes)
        check_tensor(layout, cluster)
        if self.on_failure == "heal":
            check_heals(layout, cluster)
        self._check_others(lambda shape: check_heals(shape.part, cluster))
        if cluster.nodes > 1:  # one node holds any shape
            self._check_others(lambda shape: check_tensor(shape.part, cluster))
        return worker_roles(cluster, self.on_failure, tuple(shape.block for shape in self.shapes))

    def cost(self, work: Workload, cluster: Cluster) -> Cost:
        layout, count = self.create_layout(cluster.processes), work.micro_batches or self.default_micro_batches
        schedule = self._take_shape(cluster.processes).pipeline_schedule
        return mesh_cost(work, cluster, layout, micro_batches=count, schedule=schedule)

    def groups(self, cluster: Cluster) -> Mapping[str, list[list[int]]]:
        layout = self.create_layout(cluster.processes)
        groups = layout.list_groups()
        return {axis: groups[axis] for axis in AXES if axis in layout.listed_order}

    def data_parallel(self, cluster: Cluster) -> int:
        return self.create_layout(cluster.processes)["data"]

    def data_rank(self, world: World) -> int:
        return self.create_layout(world.size).coordinate(world.rank)["data"]

    @property
    def schedules_by_metric(self) -> bool:
        return True

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        world = context.world
        if world.size == 1:
            return create_local_replica(recipe, recipe.model().to(world.device), context, self.reduce)
        schedule = self._take_shape(world.size).pipeline_schedule
        reshard = schedule.ranks == 1 if self.reshard_after_forward is None else self.reshard_after_forward
        slices = context.numerics.logical_tensor
        heals, is_ordered = self.on_failure == "heal", self.reduce == "ordered"
        divides = self.sequence_parallel, self.loss_parallel
        sharding = Sharding(self.wrap, self.wrap_parameters, reshard, heals, slices, is_ordered, *divides)
        return MeshRank(
            recipe, context, self.create_layout(world.size), schedule, sharding, self.reduce
        ).build_replica()


def mesh_cost(
    work: Workload, cluster: Cluster, layout: Layout, *, micro_batches: int, schedule: PipelineSchedule
) -> Cost:
    """Return the cost of a step with ``micro_batches`` per data-parallel part.

    Tensor: four all-reduces of a block's output per micro-batch, within a node (Shoeybi et al. 2019, arXiv
    1909.08053, section 3).
    Context: keys and values of a block are gathered twice per micro-batch, and their gradients scattered.
    Pipeline: outputs and their gradients at both ends of a stage.
    Data: FSDP of the rank's part of the model; gradient shards are summed over copies.
    Pipeline and data traffic use the slowest link between neighbors on the axis, and share it with the other groups of
    the axis.
    """
    strides = layout.strides
    pipeline, data, context, tensor = (layout[axis] for axis in ("pipeline", "data", "context", "tensor"))
    held = work.parameter_bytes / (pipeline * tensor)
    count = micro_batches
    blocks, near = work.blocks / pipeline, get_link(cluster, "node")
    boundary = work.boundary_bytes / context
    reduced = 4 * blocks * count * boundary
    passed = 0.0 if pipeline == 1 else 2 * count * boundary
    gathered = 2 * work.boundary_bytes / tensor  # keys and values of a block
    # gloo implements reduce-scatter as a blocking all-reduce
    on_cpu = backend_for(cluster.backend, cluster.device) == "gloo"
    gathers = (2 if pipeline == 1 else 1) + (2 if on_cpu else 1)
    waited = 4 * blocks * count * ring_all_reduce_seconds(boundary, tensor, near)
    beside = find_limiting_link(cluster, context, strides["context"])
    waited += 3 * blocks * count * all_gather_seconds(gathered, context, beside)
    if pipeline > 1:
        between = find_limiting_link(cluster, pipeline, strides["pipeline"])
        waited += 2 * message_seconds(boundary, between) * count
    copies, shards = layout.copies, data // layout.copies
    along = find_limiting_link(cluster, shards, strides["data"])
    between = find_limiting_link(cluster, copies, strides["data"] * shards)
    along_data = gathers * all_gather_seconds(held, shards, along)
    along_data += ring_all_reduce_seconds(held / shards, copies, between)
    exposed = waited + estimate_exposed_seconds(along_data, 0.0 if on_cpu else work.overlap * work.compute_seconds)
    sharded = gathers * ring_share(shards) * held
    replicated = 2 * ring_share(copies) * held / shards
    share = (2 * held + work.optimizer_bytes * held / work.parameter_bytes) / shards
    memory = share + (2 * work.unit_bytes / tensor if data > 1 else 0.0)
    memory += work.activation_bytes * schedule.count_kept(count) / layout.of_part
    shared = 3 * blocks * count * ring_share(context) * gathered
    sent = sharded + replicated + passed + shared + 2 * ring_share(tensor) * reduced
    idle = schedule.estimate_idle_share(count)
    across = sharded * count_leaving_edges(cluster, shards, strides["data"])
    across += replicated * count_leaving_edges(cluster, copies, strides["data"] * shards)
    across += passed * count_leaving_edges(cluster, pipeline, strides["pipeline"])
    across += shared * count_leaving_edges(cluster, context, strides["context"])
    return Cost(memory, sent, across, waited + along_data, idle, exposed)
