"""Metrics that are not sums match torchmetrics on one process, at every world size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanSquaredError, Metric, PearsonCorrCoef
from torchmetrics.classification import BinaryAUROC, BinaryF1Score, MulticlassConfusionMatrix
from torchmetrics.functional.classification import binary_auroc

from plugins.parameter_server.strategy import ParameterServer
from worldsize.api.custom_loop import evaluate
from worldsize.collectives.exact import gather_tensors
from worldsize.core import Cluster, ConfigError, RunContext, StateMetric, Strategy, World
from worldsize.data.loader import evaluation_batches
from worldsize.metrics import TorchMetric, WholeSplit
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds

BATCH = 4  # of 23 samples: six batches, the last one short


def wrapped() -> dict[str, Metric]:
    return {
        "auroc": BinaryAUROC(),
        "binned": BinaryAUROC(thresholds=7),
        "f1": BinaryF1Score(),
        "largest": MaxMetric(),
        "squares": MeanSquaredError(),
    }


@dataclass(frozen=True)
class Classified(Chain):
    """A chain whose first output classifies the first target as above zero or not."""

    def metrics(self) -> Mapping[str, StateMetric]:
        return {"whole": WholeSplit(binary_auroc)} | {name: TorchMetric(each) for name, each in wrapped().items()}

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, ...]]:  # type: ignore[override]
        outputs, targets = model(*self.model_inputs(batch)), batch[1]
        scores, labels = outputs[:, 0].sigmoid(), targets[:, 0] > 0
        own = {"largest": (outputs.max(),), "squares": (outputs, targets)}
        error = (outputs - targets).abs().double().sum(), torch.tensor(targets.numel())
        classified = {name: (scores, labels.long()) for name in ("auroc", "binned", "f1", "whole")}
        return {"error": error, **own, **classified}


def by_torchmetrics() -> dict[str, float]:
    """Evaluate batch after batch on one process, with only torchmetrics."""
    recipe, metrics = Classified(), wrapped()
    model = recipe.model().eval()
    with torch.no_grad():
        for batch in evaluation_batches(
            recipe.data("test"), World.create_single(torch.device("cpu")), batch_size=BATCH
        ):
            given = recipe.evaluate(model, batch.data)
            for name, metric in metrics.items():
                metric.update(*given[name])
    values = {name: float(metric.compute()) for name, metric in metrics.items()}
    return {**values, "whole": values["auroc"]}


def evaluated(strategy: Strategy, world: World) -> Mapping[str, float]:
    recipe = Classified()
    replica = strategy.replica(recipe, RunContext(world))
    parts = strategy.data_parallel(Cluster("test", 1, world.size, "cpu", "gloo"))
    part = World(**{**vars(world), "rank": strategy.data_rank(world), "size": parts})
    return evaluate(replica, recipe.data("test"), part, batch_size=BATCH)


@pytest.mark.parametrize(
    ("strategy", "processes"), [(Single(), 1), (DDP(), 2), (DDP(), 4), (FSDP(), 3), (Mesh(pipeline=2), 4)], ids=str
)
def test_metrics_of_torchmetrics_have_the_value_of_one_process(strategy: Strategy, processes: int) -> None:
    expected = by_torchmetrics()
    for metrics in run_in_worlds(lambda world: evaluated(strategy, world), processes):
        assert metrics.keys() == {*expected, "error"}
        assert {name: metrics[name] for name in expected} == expected


def test_more_processes_than_batches_leave_the_value_as_it_is() -> None:
    recipe = Classified()

    def body(world: World) -> Mapping[str, float]:
        return evaluate(DDP().replica(recipe, RunContext(world)), recipe.data("test"), world, batch_size=12)

    alone = body(World.create_single(torch.device("cpu")))
    assert run_in_worlds(body, 3) == [alone] * 3  # two batches


def test_metrics_that_cannot_be_merged_exactly_are_refused() -> None:
    with pytest.raises(ConfigError, match="the custom reduction of state 'mean_x' in PearsonCorrCoef"):
        TorchMetric(PearsonCorrCoef())
    metric = TorchMetric(MulticlassConfusionMatrix(num_classes=2))
    with pytest.raises(ConfigError, match="must compute a single number"):
        metric.compute(metric.state(torch.tensor([0, 1]), torch.tensor([1, 1])))
    with pytest.raises(ConfigError, match="a scalar cannot be concatenated"):
        WholeSplit(max).state(torch.tensor(1.0))


def test_a_missing_or_old_torchmetrics_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_utilities.core.imports._version", lambda _: "1.7")
    with pytest.raises(ConfigError, match=r"requires torchmetrics>=1\.8, which is not installed"):
        TorchMetric(MaxMetric())


class Forgetful(Classified):
    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, ...]]:  # type: ignore[override]
        return {}


class Unnamed(Classified):
    def metrics(self) -> Mapping[str, StateMetric]:
        return {}

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, ...]]:  # type: ignore[override]
        return {"ranks": (batch[1], batch[1], batch[1])}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [(Forgetful(), "but Recipe.evaluate does not return it"), (Unnamed(), "or Recipe.metrics must define it")],
    ids=["forgetful", "unnamed"],
)
def test_what_evaluate_returns_has_to_fit_the_names(recipe: Classified, message: str) -> None:
    replica = Single().replica(recipe, RunContext(world := World.create_single(torch.device("cpu"))))
    with pytest.raises(ConfigError, match=message):
        evaluate(replica, recipe.data("test"), world, batch_size=BATCH)


def test_a_parameter_server_refuses_them_before_the_start() -> None:
    with pytest.raises(ConfigError, match=r"requires metrics as \(sum, count\)"):
        ParameterServer().check_recipe(Classified())


def test_tensors_of_any_shape_are_gathered_in_the_order_of_their_keys() -> None:
    def own(rank: int) -> dict[tuple[str, int], Tensor]:
        parts = {("b", 3 - rank): torch.arange(rank * 3), ("a", rank): torch.tensor(rank > 0)}
        return {**parts, ("c", rank): torch.full((2, rank), 0.5, dtype=torch.bfloat16)} if rank < 2 else {}

    expected = {key: part for rank in range(3) for key, part in own(rank).items()}
    for gathered in run_in_worlds(lambda world: gather_tensors(own(world.rank), world), 3):
        assert list(gathered) == sorted(expected)
        for key, part in expected.items():
            assert (gathered[key].dtype, gathered[key].shape) == (part.dtype, part.shape)
            assert torch.equal(gathered[key], part)
