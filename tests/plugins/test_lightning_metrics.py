"""Torchmetrics logged by a LightningModule match Lightning's values over the whole split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.plugins.lightning_programs import BATCH, Classifier, points
from tests.plugins.lightning_reference import validated
from tests.plugins.test_lightning_module import ALONE, CONFIG, recipe
from worldsize.core import ConfigError, EvaluationBatches, RunContext, World
from worldsize.data.loader import evaluation_batches
from worldsize.strategies.ddp import DDP
from worldsize.strategies.synchronous import create_local_replica
from worldsize.testing.port_runs import initial_model, load_steps
from worldsize.testing.worlds import run_in_worlds


class Measured(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.auroc = torchmetrics.AUROC("multiclass", num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.log("train_accuracy", self.train_accuracy(logits, y))
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.auroc.update(logits, y)
        self.log("val/accuracy", self.accuracy)
        self.log("val/auroc", self.auroc, on_epoch=True)
        self.log("val_loss", F.cross_entropy(logits, y))


def expected(weights: Any) -> dict[str, float]:
    module = Measured()
    module.load_state_dict(weights)
    return validated(module, DataLoader(points(), batch_size=32))


def test_values_are_those_of_lightning_over_all_batches() -> None:
    own = recipe(Measured)
    model = initial_model(own, CONFIG)
    replica = create_local_replica(own, model, RunContext(ALONE))
    for step in list(load_steps(own, CONFIG))[:2]:
        result = replica.step(step)
    assert result.metrics["train_accuracy"][0, 1] == BATCH
    batches = list(evaluation_batches(own.data("test"), ALONE, batch_size=20))
    values = replica.evaluate(EvaluationBatches(lambda: iter(batches)))
    assert dict(values) == pytest.approx(expected(model.state_dict()), abs=1e-6)


def test_two_processes_find_what_one_finds() -> None:
    own = recipe(Measured)

    def evaluated(world: World) -> dict[str, float]:
        torch.manual_seed(0)
        replica = DDP().replica(own, RunContext(world))
        batches = list(evaluation_batches(own.data("test"), world, batch_size=20))
        return dict(replica.evaluate(EvaluationBatches(lambda: iter(batches))))

    (one,) = run_in_worlds(evaluated, 1)
    assert run_in_worlds(evaluated, 2) == [one, one]
    assert one.keys() == {"val/accuracy", "val/auroc", "val_loss"}


def test_a_metric_in_training_is_logged_as_its_value() -> None:
    class Logged(Measured):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("whole", self.train_accuracy)
            return loss

    own = recipe(Logged)
    with pytest.raises(ConfigError, match=r"logs 'whole' as a MulticlassAccuracy.*Log the value of each batch"):
        own.loss(initial_model(own, CONFIG), next(iter(DataLoader(points()))))


def test_a_collection_is_refused() -> None:
    class Collected(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.collected = torchmetrics.MetricCollection([torchmetrics.Accuracy("multiclass", num_classes=3)])

    with pytest.raises(ConfigError, match=r"Collected.collected .MetricCollection.\. Assign each metric"):
        recipe(Collected)
