"""Training and evaluation through pipeline stages, with torch's schedules.

The schedules split indices of micro-batches, not their data; a stage looks up the data by index. ``PipelineReplica``
is the replica of a rank that holds some stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from worldsize.collectives.group import start_collective
from worldsize.collectives.per_rank import get_local_shard
from worldsize.collectives.step_timer import measure_phase
from worldsize.core import EvaluationBatch, Loss, MicroBatch, Recipe, ReplicaWrapper, StepResult, World
from worldsize.metrics import MetricCollector
from worldsize.seeds import keep_generators
from worldsize.strategies.chunk_tensor import ChunkLayout
from worldsize.strategies.chunk_trial import try_chunks
from worldsize.strategies.declared_buffers import buffer_slots
from worldsize.strategies.gradient_reducer import Backward, GradientReducer
from worldsize.strategies.loss_record import LossRecord, check_same_form, step_metrics, trainable
from worldsize.strategies.mesh.groups import Edges, Passing
from worldsize.strategies.mesh.schedule import PipelineSchedule, create_schedule
from worldsize.strategies.mesh.stage import Stage, TimedStage
from worldsize.strategies.mesh.sums import DataParts, MeshNorm, WholeNorm
from worldsize.strategies.mesh.tied import Tied
from worldsize.strategies.model_replica import autocast, evaluating
from worldsize.strategies.synchronous import SynchronousReplica


@final
@dataclass
class Pipeline(GradientReducer):
    """Runs a step's micro-batches through the stages of a pipeline.

    ``stages``: this rank's stages, of those that ``schedule`` assigns to the ranks of ``group``. ``parts``: the
    data-parallel ranks with the same stages. ``edges``: carries messages between stages if their waits must end with
    the gang's membership.
    """

    divides_gradients = True

    stages: Sequence[Stage]
    schedule: PipelineSchedule
    group: ProcessGroup
    parts: DataParts
    device: torch.device
    tied: Sequence[Tied]
    norm: MeshNorm | WholeNorm
    edges: Edges | None = None
    _schedules: dict[int, Any] = field(default_factory=dict)
    _records: dict[int, LossRecord] = field(default_factory=dict)
    _form: tuple[bool, list[str], torch.dtype] | None = None

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, and so computes the loss."""
        return self.last_rank == self.group.rank()

    @property
    def last_rank(self) -> int:
        """The rank in ``group`` that holds the last stage."""
        return self.schedule.rank_of_stage[-1]

    @property
    def is_ordered(self) -> bool:
        return self.parts.reduce == "ordered"

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        """Run the schedule; ``backward`` is unused, since the stages run their own backward passes."""
        count = len(batches)
        order, idle = self.parts.order_micro_batches(count), self.parts.count_idle_passes(count)
        for stage in self.stages:
            stage.begin_step([batches[place] for place in (*[0] * idle, *order)])
        if count not in self._schedules:
            self._schedules = {count: self._create_schedule(count, idle)}
        numbers = torch.arange(idle + count)
        args = (numbers,) if self.stages[0].index == 0 else ()
        target = numbers if self.is_last else None
        with ExitStack() as steps:
            for stage in self.stages:
                assert stage.sums is not None
                steps.enter_context(stage.sums.step(count))
            with measure_phase("communication"):  # a schedule waits for neighbor stages between passes
                self._schedules[count].step(*args, number=numbers, target=target, return_outputs=False)
        with measure_phase("communication"):
            self._reduce_shared_tensors()
            losses = dict(zip(order, self._broadcast_losses(range(idle, idle + count)), strict=True))
        return [losses[place] for place in range(count)]

    def compute_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return self.norm.compute_norm(parameters)

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        return self.norm.clip(parameters, limit)

    def _create_schedule(self, count: int, idle: int) -> Any:
        """Create the schedule of ``count`` micro-batches after ``idle`` passes without effect."""
        stages = [
            TimedStage(stage, stage.index, self.schedule.stages, self.device, group=self.group, edges=self.edges)
            for stage in self.stages
        ]
        divisor = self.parts.get_loss_divisor(count)

        def compute_loss(output: Tensor, number: Tensor) -> Tensor:
            with measure_phase("compute"):
                loss, self._records[int(number)] = trainable(self.stages[-1].compute_loss(output, number))
                return loss / divisor * 0 if int(number) < idle else loss / divisor

        plan = self.schedule
        return create_schedule(
            plan.kind, stages, idle + count, table=plan.table, loss_fn=compute_loss, scale_grads=False
        )

    def _reduce_shared_tensors(self) -> None:
        """Sum gradients of tied parameters over stages; average buffers over data-parallel ranks."""
        for tied in self.tied:
            for parameter in tied.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradient = get_local_shard(parameter.grad)
                if self.is_ordered:  # the first stage has summed each micro-batch
                    start_collective(dist.broadcast, gradient, group=tied.group, group_src=tied.owners[0]).wait()
                else:
                    start_collective(dist.all_reduce, gradient, group=tied.group).wait()
        for buffer in self._statistics():
            start_collective(dist.all_reduce, buffer, group=self.parts.group).wait()
            buffer /= self.parts.group.size()

    def _statistics(self) -> list[Tensor]:
        if self.parts.group.size() == 1 or self.parts.reduce == "ordered":  # ordered sums also average buffers
            return []
        slots = [slot for stage in self.stages for slot in buffer_slots(stage)]
        return [slot.tensor for slot in slots if slot.is_known and slot.rule == "mean"]

    def _broadcast_losses(self, numbers: range) -> list[LossRecord]:
        """Return the last stage's loss records of the passes ``numbers``, on every rank."""
        records = [self._records[number] for number in numbers] if self.is_last else []
        check_same_form(records)
        is_weighted, names, dtype = self._form = self._form or self._broadcast_form(records)
        table_bkm = torch.zeros(len(numbers), 2, 1 + len(names), dtype=torch.float64, device=self.device)
        if self.is_last:
            metrics = step_metrics(records, names)
            for number, record in enumerate(records):
                table_bkm[number, : 2 if is_weighted else 1, 0] = record.loss
            for column, name in enumerate(names, start=1):
                table_bkm[:, :, column] = metrics[name]
        start_collective(dist.broadcast, table_bkm, group=self.group, group_src=self.last_rank).wait()
        losses = table_bkm[:, :, 0] if is_weighted else table_bkm[:, 0, 0].to(dtype)
        return [
            LossRecord(loss, dict(zip(names, pairs_2m[:, 1:].unbind(1), strict=True)))
            for loss, pairs_2m in zip(losses, table_bkm, strict=True)
        ]

    def _broadcast_form(self, records: Sequence[LossRecord]) -> tuple[bool, list[str], torch.dtype]:
        """Return (losses are weighted, metric names, dtype of losses), agreed for all steps."""
        first = records[0] if records else None
        form: list[Any] = [first and (first.is_weighted, sorted(first.metrics), first.loss.dtype)]
        dist.broadcast_object_list(form, group=self.group, group_src=self.last_rank)
        agreed: tuple[bool, list[str], torch.dtype] = form[0]
        return agreed

    def forward_batch(self, batch: EvaluationBatch) -> Tensor | None:
        """Return the output for ``batch``, in the model's shape, on the last stage, else None."""
        ranks, passing = self.schedule.rank_of_stage, Passing(self.group, self.edges, self.device)
        own, output = self.group.rank(), None
        for stage in self.stages:
            stage.begin_stream(batch.seed)
            if stage.index == 0:
                stage.feed_batch(batch.data)
                output = stage()
            else:
                before = ranks[stage.index - 1]
                output = stage(output if before == own else passing.receive(before))
            following = ranks[stage.index + 1 : stage.index + 2]
            if following and following[0] != own:
                passing.send(output, following[0])
        return output if self.is_last else None


@final
class PipelineReplica(ReplicaWrapper):
    """A synchronous replica that also evaluates batches stage by stage.

    ``data``: the world of ranks with the same stages, one per data-parallel part.
    """

    def __init__(self, recipe: Recipe, data: World, inner: SynchronousReplica, pipeline: Pipeline) -> None:
        super().__init__(inner)
        self._recipe, self._data, self._pipeline = recipe, data, pipeline
        self._streams, self._precision = inner.streams, inner.numerics.precision
        for stage in pipeline.stages:
            stage.streams = inner.streams
        self._untried_chunks = pipeline.stages[0].chunks  # until the first step

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        chunks, self._untried_chunks = self._untried_chunks, None
        if chunks is not None:
            try_chunks(self._recipe, self._pipeline.stages, micro_batches[0], chunks, partial(self._run_trial, chunks))
        return self._inner.step(micro_batches)

    def _run_trial(self, chunks: ChunkLayout, batch: MicroBatch, is_cut: bool) -> tuple[Loss | None, Mapping[str, Any]]:
        with ExitStack() as stack:
            for stage in self._pipeline.stages:
                stack.enter_context(stage.trying(chunks if is_cut else None))
            output = self._pipeline.forward_batch(EvaluationBatch(0, batch.data, seed=batch.seed))
            if output is None:
                return None, {}
            self._streams.begin(batch.seed)
            return self._recipe.micro_batch_loss(self._pipeline.stages[-1].create_model(output), batch), {}

    def evaluate(self, batches: Iterable[EvaluationBatch]) -> Mapping[str, float]:
        collector = self._collect_metrics(batches)
        answer: list[Any] = [collector.reduce(self._data) if self._pipeline.is_last else None]
        group = self._pipeline.group
        dist.broadcast_object_list(answer, group=group, group_src=self._pipeline.last_rank)
        metrics: Mapping[str, float] = answer[0]
        return metrics

    def _collect_metrics(self, batches: Iterable[EvaluationBatch]) -> MetricCollector:
        """Return the metrics of this rank's batches; empty unless it has the last stage."""
        collector = MetricCollector(self._recipe)
        with (
            torch.no_grad(),
            evaluating(self._pipeline.stages),
            keep_generators(self._data.device),
            autocast(self._data.device, self._precision),
        ):
            for batch in batches:
                output = self._pipeline.forward_batch(batch)
                if output is not None:
                    self._streams.begin(batch.seed)
                    collector.add(batch, self._pipeline.stages[-1].evaluate(output, batch.data))
        return collector
