"""A metric of an update that skips steps is the exact mean over the steps that include it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from worldsize.core import (
    ConfigError,
    LossOutput,
    MicroBatch,
    MultiUpdateRecipe,
    RunContext,
    StepDone,
    Strategy,
    Update,
    World,
)
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.loop.fit import LoopCallbacks, LoopConfig, TrainingProgress, fit
from worldsize.strategies.ddp import DDP
from worldsize.strategies.single import Single
from worldsize.testing.worlds import run_in_worlds

STEPS, EVERY, LOGGED, BATCH, RANKS = 17, 5, 4, 8, 4


@dataclass(frozen=True)
class Occasional(MultiUpdateRecipe):
    """A critic, and a generator updated every fifth step; each returns a metric, and so does the step."""

    by_rank: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.ModuleDict({"critic": nn.Linear(2, 1), "generator": nn.Linear(2, 1)})

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        return {name: SGD(module.parameters(), lr=0.1) for name, module in model.named_children()}

    def data(self, split: str) -> Any:
        return torch.utils.data.TensorDataset(torch.arange(80.0).view(40, 2) / 7)

    def updates(self, model: nn.Module, batch: Any, step: int) -> Iterable[Update]:
        assert isinstance(model, nn.ModuleDict)
        (rows,) = batch
        told = {"first": (rows[:, 0].sum(), torch.tensor(len(rows)))}
        yield "critic", LossOutput(model["critic"](rows).square().mean(), told)
        if step % EVERY == 0:
            name = "odd" if self.by_rank and float(rows[0, 0]) < float(rows.max()) / 2 else "large"
            above = (rows[:, 1] > 5).double()
            yield (
                "generator",
                LossOutput(model["generator"](rows).square().mean(), {name: (above.sum(), torch.tensor(len(rows)))}),
            )

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {}


def logged(strategy: Strategy, world: World, *, stops_at: int | None = None) -> list[tuple[int, Mapping[str, float]]]:
    """Train; with ``stops_at``, save there and continue in a new replica with new sums."""
    rows: list[tuple[int, Mapping[str, float]]] = []
    replica = strategy.replica(Occasional(), RunContext(world))
    order = Order(3, BATCH, RANKS, assign_logical_ranks(world.rank, world.size, RANKS, replica.dealing))
    kept: list[TrainingProgress] = []

    def emit(event: object) -> None:
        if isinstance(event, StepDone):
            rows.append((event.step, dict(event.metrics)))

    first = TrainingProgress()
    for until in (stops_at, STEPS):
        if until is None:
            continue
        batches = micro_batches(Occasional().data("train"), order, world.device, first=first.step)
        config = LoopConfig(STEPS, BATCH, log_every=LOGGED, save_every=until if until < STEPS else 0)
        callbacks = LoopCallbacks(lambda step: {}, emit, save=kept.append)
        source: Iterable[list[MicroBatch]] = islice(batches, until - first.step)
        try:
            fit(replica, source, world, config=config, callbacks=callbacks, first=first)
        except StopIteration:  # it was ended there
            first = kept[-1]
    return rows


def expected() -> list[tuple[int, Mapping[str, float]]]:
    """Compute the metrics by definition, from the samples of each step since the last logged one."""
    (data,), order = Occasional().data("train").tensors, Order(3, BATCH, 1, (0,))
    rows, critic, generator = list[tuple[int, Mapping[str, float]]](), list[Tensor](), list[Tensor]()
    for step in range(1, STEPS + 1):
        samples = data[order.compute_indices(step, 0, len(data))]
        critic.append(samples)
        generator += [samples] if step % EVERY == 0 else []
        if step in (1, STEPS) or step % LOGGED == 0:
            metrics = {"first": float(torch.cat(critic)[:, 0].double().sum()) / (BATCH * len(critic))}
            if generator:
                metrics["large"] = float((torch.cat(generator)[:, 1] > 5).double().mean())
            rows.append((step, metrics))
            critic.clear()
            generator.clear()
    return rows


def check(rows: list[tuple[int, Mapping[str, float]]]) -> None:
    assert [step for step, _ in rows] == [step for step, _ in expected()]
    for (step, found), (_, wanted) in zip(rows, expected(), strict=True):
        assert {name for name in found if "/" not in name} == wanted.keys(), step
        assert found.get("large") == wanted.get("large")
        assert found["first"] == pytest.approx(wanted["first"], rel=1e-6)  # the recipe sums in float32
        assert math.isnan(found["loss/generator"]) == ("large" not in wanted)


def test_a_metric_is_the_mean_over_the_steps_in_which_its_update_took_part() -> None:
    check(logged(Single(), World.create_single(torch.device("cpu"))))


def test_it_is_the_same_on_two_processes() -> None:
    for rows in run_in_worlds(lambda world: logged(DDP(), world), 2):
        check(rows)


@pytest.mark.parametrize("stops_at", [3, 5, 6, 9])
def test_it_is_the_same_where_a_run_goes_on_from_a_save(stops_at: int) -> None:
    check(logged(Single(), World.create_single(torch.device("cpu")), stops_at=stops_at))


def test_ranks_that_name_other_metrics_are_refused_in_a_sentence() -> None:
    def body(world: World) -> str:
        replica = DDP().replica(Occasional(by_rank=True), RunContext(world))
        rows = torch.tensor([[[9.0, 1.0], [9.0, 2.0]], [[0.0, 1.0], [0.0, 2.0]]])[world.rank]
        with pytest.raises(ConfigError) as refusal:
            replica.step([MicroBatch((rows,), seed=1, step=EVERY)])
        return str(refusal.value)

    for said in run_in_worlds(body, 2):
        assert said.startswith(
            "Occasional.updates: in step 5, the metric names of rank 1 differ from rank 0. Return names"
        )
