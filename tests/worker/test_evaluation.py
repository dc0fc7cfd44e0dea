"""An evaluation is tried with one batch before the first step, and leaves no trace."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.support.own_recipe import write_recipe
from worldsize.core import ConfigError, EvaluationBatch, EvaluationBatches, Recipe, World
from worldsize.metrics import MetricCollector
from worldsize.strategies.model_replica import evaluating
from worldsize.worker.evaluation import EvaluationData, try_evaluation

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from worldsize.core import Recipe


class Late(Recipe):
    def model(self):
        return nn.Linear(4, 1)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def data(self, split):
        return TensorDataset(torch.ones(64, 4))

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

    def evaluate(self, model, batch):
        return {"error": model(batch[0]).sum()}
"""
YAML = "# @package _global_\nsteps: 8\nbatch_size: 8\nlr: 0.1\nrecipe:\n  _target_: recipes.late.recipe.Late\n"


class Stream(torch.utils.data.IterableDataset[Tensor]):
    """A stream that must not be read."""

    def __iter__(self) -> Iterator[Tensor]:
        raise AssertionError


class Drawing:
    """A replica that counts an evaluation's batches, and draws from all generators."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def evaluate(self, batches: EvaluationBatches) -> Mapping[str, float]:
        self.batches += [batch.index for batch in batches]
        return {"loss": random.random() + numpy.random.random() + float(torch.rand(()))}


class Numbers:
    """The data of a recipe with three splits."""

    collate = Recipe.collate

    def data(self, split: str) -> Any:
        return Stream() if split == "stream" else list(torch.arange(9.0))


def settings(*splits: str, schedule_metric: str | None = None, best: str | None = None) -> Any:
    return SimpleNamespace(
        recipe=Numbers(),
        training=SimpleNamespace(evaluate_batch_size=4, seed=0, schedule_metric=schedule_metric),
        evaluation=SimpleNamespace(batches=None, splits=list(splits)),
        checkpoint=SimpleNamespace(keep=SimpleNamespace(best=best)),
        average=None,
        early_stopping=SimpleNamespace(metric="validation/loss") if "validation" in splits else None,
    )


def tried(own: Any, part: World) -> list[int]:
    """Return the numbers of the evaluated batches."""
    replica = Drawing()
    data = EvaluationData(own.recipe, own.training, own.evaluation.batches)
    try_evaluation(replica, data, own, part)  # type: ignore[arg-type]
    return replica.batches


@pytest.fixture
def alone() -> World:
    return World("worker", 0, 1, 0, 1, 0, 0, torch.device("cpu"))


def test_each_process_tries_its_first_batch_of_each_split_and_no_generator_moves(alone: World) -> None:
    torch.manual_seed(1)
    before = (random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist())  # type: ignore[index]
    assert tried(settings("test", "validation", "stream"), alone) == [0, 0]
    after = (random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist())  # type: ignore[index]
    assert (before[0], before[2]) == (after[0], after[2])
    assert torch.equal(before[1], after[1])


def test_a_metric_that_no_evaluation_has_is_refused_before_the_first_step(alone: World) -> None:
    with pytest.raises(
        ConfigError, match="^schedule_metric=los: metric 'los' not found in the evaluation; did you mean 'l"
    ):
        tried(settings("test", schedule_metric="los"), alone)
    with pytest.raises(ConfigError, match="^checkpoint.keep.best=los: metric 'los' not found in the evaluation; did"):
        tried(settings("test", best="test/los"), alone)
    with pytest.raises(
        ConfigError, match="^checkpoint.keep.best=ema/loss: metric 'ema/loss' not found in the evaluation"
    ):
        tried(settings("test", best="ema/loss"), alone)  # there is nothing averaged
    tried(settings("test", best="loss"), alone)
    tried(settings("test", "stream", schedule_metric="stream/loss"), alone)  # a stream is not read


def test_an_evaluation_leaves_the_buffers_of_a_model_as_they_were() -> None:
    model: Any = nn.BatchNorm1d(2)
    model.register_buffer("seen", torch.zeros(()))
    seen, mean = model.seen, model.running_mean
    with evaluating([model]), torch.no_grad():
        model.seen = model.seen + 1
        mean.add_(3)
    assert model.seen is seen
    assert model.running_mean is mean
    assert (float(seen), mean.tolist()) == (0.0, [0.0, 0.0])


def test_a_metric_may_be_two_python_numbers(alone: World) -> None:
    class Counts(Numbers):
        def metrics(self) -> Mapping[str, Any]:
            return {}

    collector = MetricCollector(cast(Recipe, Counts()))
    collector.add(EvaluationBatch(0, None, seed=0), {"accuracy": (3, 4), "loss": (0.1, 1), "top": (torch.ones(1), 8)})
    collector.add(EvaluationBatch(1, None, seed=0), {"accuracy": (2, 4), "loss": (0.2, 2), "top": (True, 8)})
    assert collector.reduce(alone) == {"accuracy": 5 / 8, "loss": math.fsum([0.1, 0.2]) / 3, "top": 2 / 16}
    for value, fact in (("3", "an object of type str"), (torch.ones(2), "a torch.float32 tensor of shape [2]")):
        with pytest.raises(ConfigError, match=re.escape(f"returned {fact} for the metric 'accuracy'. Return (sum, ")):
            collector.add(EvaluationBatch(2, None, seed=0), {"accuracy": (value, 4)})


def test_an_evaluation_that_cannot_succeed_fails_before_the_first_step(train: Any, tmp_path: Path) -> None:
    write_recipe(tmp_path, "late", RECIPE, late=YAML)
    run = train("recipe=late", "cluster.processes=1", "strategy=single", "cluster.threads=1", "log_every=1")
    assert (run.code, run.folder, run.output.count("step ")) == (2, None, 0)
    assert run.error.startswith("Recipe.evaluate must return the metric 'error' as (sum, count)")
