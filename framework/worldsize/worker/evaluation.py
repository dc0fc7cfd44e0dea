"""Evaluates a run's splits as configured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

from worldsize.checkpoints.format import read
from worldsize.checkpoints.load import load
from worldsize.config.sections import TrainingConfig
from worldsize.config.settings import Settings
from worldsize.core import EvaluationBatch, EvaluationBatches, Replica, World, metric_key
from worldsize.data.evaluation import evaluation_batches
from worldsize.data.fetch import collate_of
from worldsize.engine.averaging import evaluate_all
from worldsize.engine.early_stopping import value_of
from worldsize.records.run_directory import RunDirectory
from worldsize.records.run_record import write_result
from worldsize.reproducibility.seeds import seed_generators, stream


@final
class EvaluationData:
    """Loads any part of the evaluation data for any step; a split's data are built at first use."""

    def __init__(self, settings: Settings) -> None:
        self._recipe, self._training = settings.recipe, settings.training
        self._batches = settings.evaluation.batches
        self._datasets: dict[str, Any] = {}

    def build(self, splits: Sequence[str]) -> None:
        """Build the data of ``splits`` now instead of at their first evaluation."""
        for split in splits:
            if split not in self._datasets:
                self._datasets[split] = self._recipe.data(split)

    def batches(self, split: str, step: int, part: World) -> Iterator[EvaluationBatch]:
        """Yield the batches of the process with the rank and size of ``part``."""
        self.build([split])
        return evaluation_batches(
            self._datasets[split],
            part,
            batch_size=self._training.evaluate_batch_size,
            collate=collate_of(self._recipe),
            drawn=self._batches,
            seed=stream(self._training.seed, f"evaluation/{split}", step),
        )


def evaluate_splits(
    replica: Replica, data: EvaluationData, splits: Sequence[str], *, step: int, part: World
) -> Mapping[str, float]:
    """Evaluate ``replica`` on each of ``splits``, and its average if it has one; metrics by :func:`metric_key`."""

    def evaluated() -> Mapping[str, float]:
        metrics: dict[str, float] = {}
        for split in splits:
            own = replica.evaluate(EvaluationBatches(partial(data.batches, split, step, part), split, step))
            metrics |= {metric_key(split, name): value for name, value in own.items()}
        return metrics

    return evaluate_all(replica, evaluated)


def advance_schedules(replica: Replica, training: TrainingConfig, metrics: Mapping[str, float], *, step: int) -> None:
    """Advance schedules that need a metric by those of the evaluation after ``step``, if it is a regular one.

    The last evaluation of a run may not be one: a longer run does not have it.
    """
    if training.schedule_metric is not None and step % training.evaluate_every == 0:
        value = value_of(metrics, training.schedule_metric, key="schedule_metric")
        replica.advance_schedules(value, step=step)


def evaluate_alone(settings: Settings, run: RunDirectory, world: World, replica: Replica, path: Path) -> None:
    """Load the checkpoint in ``path`` and evaluate it instead of training; the first rank writes the result."""
    leads = settings.roles[world.role].serves
    part = replace(world, rank=0, size=1) if leads else settings.data_part(world)
    checkpoint = read(path)
    if replica.step_reached is None:
        replica.load(load(checkpoint, replica.state()))
    splits = settings.evaluation.splits
    seed_generators(stream(settings.training.seed, "data"), world.device)  # as where the data set of a run is made
    metrics = evaluate_splits(replica, EvaluationData(settings), splits, step=checkpoint.step, part=part)
    if leads or world.rank == 0:
        write_result(run, {"metrics": dict(metrics)})
    replica.close(complete=True)
