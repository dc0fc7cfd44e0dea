"""The replica of a rank that holds some stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from worldsize.core import EvaluationBatch, MicroBatch, Recipe, Replica, StateDict, StepResult, World
from worldsize.metrics.collector import MetricCollector
from worldsize.record.seeds import generators_kept, seed_generators
from worldsize.strategies.mesh.pipeline import Pipeline
from worldsize.strategies.mesh.stage import KnownOutput
from worldsize.strategies.model_flags import evaluating
from worldsize.strategies.model_replica import autocast
from worldsize.strategies.synchronous import SynchronousReplica


@final
class PipelineReplica(Replica):
    """A synchronous replica whose evaluation batches also pass from stage to stage.

    ``data``: the world of the ranks with the same stages, one for each data-parallel part.
    """

    def __init__(self, recipe: Recipe, data: World, inner: SynchronousReplica, pipeline: Pipeline) -> None:
        self._recipe, self._data, self._inner, self._pipeline = recipe, data, inner, pipeline

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        return self._inner.step(micro_batches)

    def evaluate(self, batches: Iterable[EvaluationBatch]) -> Mapping[str, float]:
        collector = self._collected(batches)
        answer: list[Any] = [collector.reduce(self._data) if self._pipeline.is_last else None]
        group = self._pipeline.group
        dist.broadcast_object_list(answer, group=group, group_src=(self._pipeline.total - 1) % group.size())
        metrics: Mapping[str, float] = answer[0]
        return metrics

    def _collected(self, batches: Iterable[EvaluationBatch]) -> MetricCollector:
        """Return the metrics of this rank's batches, if it has the last stage."""
        collector = MetricCollector(self._recipe)
        with (
            torch.no_grad(),
            evaluating(self._pipeline.stages),
            generators_kept(self._data.device),
            autocast(self._data.device, self._inner.numerics.precision),
        ):
            for batch in batches:
                seed_generators(batch.seed, self._data.device)
                output = self._pipeline.output(batch.data)
                if output is not None:
                    collector.add(batch, self._recipe.evaluate(KnownOutput(output), batch.data))
        return collector

    def facts(self) -> Mapping[str, Any]:
        return self._inner.facts()

    def trained_weights(self) -> Mapping[str, Tensor]:
        return self._inner.trained_weights()

    def advance_schedules(self, value: float, *, step: int) -> None:
        self._inner.advance_schedules(value, step=step)

    def state(self) -> StateDict:
        return self._inner.state()

    def load(self, state: StateDict) -> None:
        self._inner.load(state)
