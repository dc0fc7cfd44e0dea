"""Evaluates the configured splits of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, final

import torch

from worldsize.checkpoint.format import read_checkpoint
from worldsize.checkpoint.load import load_checkpoint
from worldsize.config.schema import TrainingConfig
from worldsize.config.settings import Settings
from worldsize.core import EvaluationBatch, EvaluationBatches, Recipe, Replica, World, metric_key, parse_metric_key
from worldsize.data.batches import get_collate_fn, is_iterable
from worldsize.data.loader import evaluation_batches
from worldsize.loop.averaging import evaluate_all
from worldsize.loop.early_stopping import get_metric_value
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import write_result
from worldsize.seeds import derive_seed, keep_generators, seed_generators


@final
class EvaluationData:
    """Loads any shard of the evaluation data for any step; builds a split on its first use."""

    def __init__(self, recipe: Recipe, training: TrainingConfig, batches: int | None) -> None:
        self._recipe, self._training, self._batches = recipe, training, batches
        self._datasets: dict[str, Any] = {}

    def build_splits(self, splits: Sequence[str]) -> None:
        """Build the data of ``splits`` now instead of at the first evaluation."""
        for split in splits:
            if split not in self._datasets:
                self._datasets[split] = self._recipe.data(split)

    def load_batches(self, split: str, step: int, part: World) -> Iterator[EvaluationBatch]:
        """Yield the batches of the process with the rank and size of ``part``."""
        self.build_splits([split])
        return evaluation_batches(
            self._datasets[split],
            part,
            batch_size=self._training.evaluate_batch_size,
            collate=get_collate_fn(self._recipe),
            drawn=self._batches,
            seed=derive_seed(self._training.seed, f"evaluation/{split}", step),
        )

    def first_batch(self, split: str, part: World) -> Iterator[EvaluationBatch]:
        """Yield only this process's first batch of ``split``."""
        return islice(self.load_batches(split, 0, part), 1)

    def is_stream(self, split: str) -> bool:
        """Return whether the data of ``split`` can only be read in order."""
        self.build_splits([split])
        return is_iterable(self._datasets[split])


def try_evaluation(replica: Replica, data: EvaluationData, settings: Settings, part: World) -> None:
    """Evaluate one batch of each split, so that evaluation errors show up before the first step.

    Generators, buffers and modes do not change. Streams are skipped, since their position would change. Nothing is
    compiled, since compiled code would depend on the shapes of evaluation batches.

    Raises:
        ConfigError: the evaluation lacks a metric that the run needs.
    """
    splits = settings.evaluation.splits
    tried = [split for split in splits if not data.is_stream(split)]
    metrics: dict[str, float] = {}
    with keep_generators(part.device), torch.compiler.set_stance("force_eager"):
        for split in tried:
            own = replica.evaluate(EvaluationBatches(partial(data.first_batch, split, part), split))
            metrics |= {metric_key(split, name): value for name, value in own.items()}
    followed = {"schedule_metric": settings.training.schedule_metric}
    if best := settings.checkpoint.keep.best:
        followed["checkpoint.keep.best"] = metric_key(*parse_metric_key(best))
    if rule := settings.early_stopping:
        followed["early_stopping.metric"] = rule.metric
    for key, name in followed.items():
        is_average = settings.average is not None and str(name).startswith("ema/")  # no average exists yet
        if name is not None and len(tried) == len(splits) and not is_average:
            get_metric_value(metrics, name, key=key)


def evaluate_splits(
    replica: Replica, data: EvaluationData, splits: Sequence[str], *, step: int, part: World
) -> Mapping[str, float]:
    """Evaluate ``replica``, and its average if any, on all ``splits``.

    Returns the metrics by :func:`metric_key`; those of the average have the prefix ``ema/``.
    """

    def evaluate_each_split() -> Mapping[str, float]:
        metrics: dict[str, float] = {}
        for split in splits:
            own = replica.evaluate(EvaluationBatches(partial(data.load_batches, split, step, part), split, step))
            metrics |= {metric_key(split, name): value for name, value in own.items()}
        return metrics

    return evaluate_all(replica, evaluate_each_split)


def advance_schedules(replica: Replica, training: TrainingConfig, metrics: Mapping[str, float], *, step: int) -> None:
    """Advance schedules that depend on a metric, if the evaluation after ``step`` is regular.

    The evaluation at the end of a run may not be regular, since a longer run would not have it.
    """
    if training.schedule_metric is not None and step % training.evaluate_every == 0:
        value = get_metric_value(metrics, training.schedule_metric, key="schedule_metric")
        replica.advance_schedules(value, step=step)


def evaluate_alone(settings: Settings, run: RunDirectory, world: World, replica: Replica, path: Path) -> None:
    """Evaluate the checkpoint in ``path`` instead of training; one rank writes the result."""
    leads = settings.roles[world.role].serves
    part = replace(world, rank=0, size=1) if leads else settings.data_part(world)
    checkpoint = read_checkpoint(path)
    if replica.step_reached is None:
        replica.load(load_checkpoint(checkpoint, replica.state()))
    splits = settings.evaluation.splits
    seed_generators(derive_seed(settings.training.seed, "data"), world.device)  # as for the datasets in training
    data = EvaluationData(settings.recipe, settings.training, settings.evaluation.batches)
    metrics = evaluate_splits(replica, data, splits, step=checkpoint.step, part=part)
    if leads or world.rank == 0:
        write_result(run, {"metrics": dict(metrics)})
    replica.close(complete=True)
