"""Metrics returned with the loss match a plain PyTorch loop, at every world size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.loop.test_fit import Idle
from tests.support.own_recipe import write_recipe
from worldsize.core import (
    Cluster,
    ConfigError,
    Event,
    LossOutput,
    MicroBatch,
    RunContext,
    StepDone,
    StepResult,
    Strategy,
    World,
)
from worldsize.data.batches import fetch_batch
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.loop.fit import LoopCallbacks, LoopConfig, TrainingProgress, fit
from worldsize.loop.training_metrics import TrainingMetrics, compute_means
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.loss_record import differentiable
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.zero import ZeRO
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds

STEPS, BATCH, EVERY = 10, 24, 4
Logged = dict[int, Mapping[str, float]]  # by the number of the logged step


@dataclass(frozen=True)
class ToldChain(Chain):
    """A chain whose loss returns its errors, with non-integer weights, and the number of small errors."""

    def loss(self, model: nn.Module, batch: Any) -> LossOutput:  # type: ignore[override]
        apart = (model(*self.model_inputs(batch)) - batch[1]).abs()
        weights = batch[1].abs()
        metrics = {
            "error": ((apart * weights).sum(), weights.sum()),
            "near": ((apart < 0.5).sum(), torch.tensor(apart.numel())),
        }
        return LossOutput(apart.square().mean(), metrics)


@dataclass(frozen=True)
class WeightedChain(ToldChain):
    """The same with a loss that is a sum and its weight."""

    def loss(self, model: nn.Module, batch: Any) -> LossOutput:  # type: ignore[override]
        output = super().loss(model, batch)
        assert isinstance(output.loss, Tensor)
        return LossOutput((output.loss * len(batch[1]), torch.tensor(len(batch[1]))), output.metrics)


def by_hand(recipe: ToldChain) -> Logged:
    """Train in plain PyTorch on whole batches, and divide the sums over the steps since the last logged one."""
    model, data = recipe.model(), recipe.data("train")
    optimizer, order = recipe.optimizer(model), Order(3, BATCH, 1, (0,))
    logged: Logged = {}
    totals: dict[str, list[float]] = {}
    for step in range(1, STEPS + 1):
        output = ToldChain.loss(recipe, model, fetch_batch(data, order.compute_indices(step, 0, len(data))))
        optimizer.zero_grad()
        output.loss.backward()  # type: ignore[union-attr]
        optimizer.step()
        for name, (total, count) in output.metrics.items():
            before = totals.get(name, [0.0, 0.0])
            totals[name] = [before[0] + total.item(), before[1] + count.item()]
        if step % EVERY == 0 or step in (1, STEPS):
            logged[step], totals = {name: total / count for name, (total, count) in totals.items()}, {}
    return logged


def trained(strategy: Strategy, world: World, logical_ranks: int, recipe: ToldChain) -> Logged:
    logged: Logged = {}

    def emit(event: Event) -> None:
        if isinstance(event, StepDone):
            logged[event.step] = event.metrics

    replica = strategy.replica(recipe, RunContext(world))
    parts = strategy.data_parallel(Cluster("test", 1, world.size, "cpu", "gloo"))
    mine = assign_logical_ranks(strategy.data_rank(world), parts, logical_ranks, replica.dealing)
    batches = micro_batches(recipe.data("train"), Order(3, BATCH, logical_ranks, mine), world.device)
    config = LoopConfig(STEPS, batch_size=BATCH, log_every=EVERY)
    fit(replica, batches, world, config=config, callbacks=LoopCallbacks(lambda step: {}, emit))
    return logged


@pytest.mark.parametrize("recipe", [ToldChain(), WeightedChain()], ids=["mean", "sum"])
@pytest.mark.parametrize(
    ("strategy", "processes", "logical_ranks"),
    [
        (Single(), 1, 1),
        (DDP(), 2, 8),
        (ZeRO(), 2, 4),
        (FSDP(), 3, 6),
        (Mesh(tensor=2), 2, 2),
        (Mesh(pipeline=2), 4, 8),
        (Mesh(pipeline=3), 3, 3),
    ],
    ids=str,
)
def test_metrics_of_the_loss_are_those_of_whole_batches(
    strategy: Strategy, processes: int, logical_ranks: int, recipe: ToldChain
) -> None:
    expected = by_hand(recipe)
    for logged in run_in_worlds(lambda world: trained(strategy, world, logical_ranks, recipe), processes):
        assert logged.keys() == expected.keys() == {1, 4, 8, 10}
        for step, metrics in logged.items():
            assert metrics == pytest.approx(expected[step], rel=1e-5)


@pytest.mark.parametrize(
    "strategy",
    [DDP(reduce="ordered"), FSDP(reduce="ordered"), FSDP(reduce="ordered", accumulate="sharded")],
    ids=["ddp", "fsdp", "fsdp, shards added up"],
)
def test_an_elastic_run_logs_the_same_bits_at_every_world_size(strategy: Strategy) -> None:
    alone = trained(DDP(reduce="ordered"), World.create_single(torch.device("cpu")), 8, ToldChain())
    for processes in (2, 4):
        assert run_in_worlds(lambda world: trained(strategy, world, 8, ToldChain()), processes) == [alone] * processes


@dataclass(frozen=True)
class Named(ToldChain):
    """Name the metric by the result of ``name`` for the batch."""

    name: Callable[[Any], str] = lambda batch: "a"

    def loss(self, model: nn.Module, batch: Any) -> LossOutput:  # type: ignore[override]
        output = super().loss(model, batch)
        return LossOutput(output.loss, {self.name(batch): (torch.tensor(1.0), torch.tensor(1))})


def test_names_that_differ_between_micro_batches_steps_or_ranks_are_refused() -> None:
    calls = iter(range(100))
    with pytest.raises(ConfigError, match=r"different metrics in two micro-batches: \[0\] and \[1\]"):
        trained(Single(), World.create_single(torch.device("cpu")), 2, Named(name=lambda batch: str(next(calls))))
    with pytest.raises(ConfigError, match=r"different metrics in two steps: \[2\] and \[3\]"):
        trained(Single(), World.create_single(torch.device("cpu")), 1, Named(name=lambda batch: str(next(calls))))

    def body(world: World) -> str:
        with pytest.raises(ConfigError) as caught:
            trained(DDP(), world, 2, Named(name=lambda batch: f"of_{world.rank}"))
        return str(caught.value)

    assert all("ranks 0 and 1: [of_0] and [of_1]." in message for message in run_in_worlds(body, 2))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": (torch.ones(()), 1)}, "the metric name 'loss' in the recipe's loss is reserved. Rename the metric"),
        ({"accuracy": torch.ones(())}, r"the metric 'accuracy' in the recipe's loss must be \(sum, count\)"),
        ({"accuracy": (torch.ones(3), 3)}, r"the metric 'accuracy' in the recipe's loss must be \(sum, count\)"),
        ({"accuracy": (1, 2, 3)}, r"the metric 'accuracy' in the recipe's loss must be \(sum, count\)"),
        (
            {"accuracy": ("1", 1)},
            r"the metric 'accuracy' in the recipe's loss must be \(sum, count\), two real scalars\.",
        ),
        ({"accuracy": (None, 1)}, r"two real scalars\."),
        ({"accuracy": (1j, 1)}, r"two real scalars\."),
        ({"accuracy": (torch.ones((), dtype=torch.complex64), 1)}, r"two real scalars\."),
        ({5: (1, 1)}, "invalid metric name 5 in the recipe's loss. Use only letters"),
        ({"": (1, 1)}, "invalid metric name '' in the recipe's loss. Use only letters"),
        ({"top 5": (1, 1)}, "invalid metric name 'top 5' in the recipe's loss. Use only letters"),
        ({"a\n": (1, 1)}, "Use only letters"),
    ],
    ids=str,
)
def test_metrics_that_cannot_be_logged_are_refused(metrics: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        differentiable(LossOutput(torch.ones(()), metrics))


def test_names_and_numbers_of_all_sorts_can_be_logged() -> None:
    given = {"top-5/a_b.c": (1, True), "é": (torch.ones(1, dtype=torch.int32), torch.tensor(2.0)), "x": (0.5, 2**53)}
    _, record = differentiable(LossOutput(torch.ones(()), given))  # type: ignore[arg-type]
    assert {name: pair.tolist() for name, pair in record.metrics.items()} == {
        "top-5/a_b.c": [1, 1],
        "é": [1, 2],
        "x": [0.5, 2**53],
    }


class CopiesFromCPU(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note each operation that copies a CPU tensor to a different device: on a GPU it waits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [each for each in args if isinstance(each, Tensor)]
        if isinstance(result, Tensor) and result.device.type != "cpu" and any(x.device.type == "cpu" for x in given):
            self.noted.append(str(func))
        return result


def test_a_number_or_a_scalar_on_the_cpu_is_not_copied_to_the_device_of_the_loss() -> None:
    """The device is meta, without memory or values to read."""
    on_cpu, requiring = torch.tensor(0.5), torch.tensor(3.0, requires_grad=True)
    loss = torch.ones((), device="meta")
    with CopiesFromCPU() as copies:
        metrics = {"a": (1, 2.5), "b": (on_cpu, torch.tensor([4])), "c": (requiring, loss)}
        _, record = differentiable(LossOutput((loss, torch.tensor(8)), metrics))  # type: ignore[arg-type]
    assert copies.noted == []
    for pair in (record.loss, *record.metrics.values()):
        assert (pair.device.type, pair.dtype, pair.shape) == ("meta", torch.float64, (2,))


def pairs(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def test_a_metric_renamed_since_the_checkpoint_begins_anew_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    metrics = TrainingMetrics({"old": pairs(5, 1), "kept": pairs(7, 1)})
    metrics.add({"new": pairs(1, 2), "kept": pairs(3, 4)})
    assert "have changed since the checkpoint was saved, from [kept, old] to [kept, new]." in caplog.text
    metrics.add({"new": pairs(1, 2), "kept": pairs(3, 4)})
    names, sums = metrics.take_sums(World.create_single(torch.device("cpu")))
    assert (names, sums.tolist()) == (["kept", "new"], [6, 8, 2, 4])
    with pytest.raises(ConfigError, match=r"different metrics in two steps: \[kept, new\] and \[old"):
        metrics.add({"old": pairs(1, 1)})


def test_metrics_of_the_same_names_go_on_where_the_checkpoint_was_saved(caplog: pytest.LogCaptureFixture) -> None:
    metrics = TrainingMetrics({"a": pairs(5, 1)})
    metrics.add({"a": pairs(1, 2)})
    assert metrics.sums["a"].tolist() == [[6, 3]]
    assert caplog.text == ""


class Tells(Idle):
    """A replica that computes nothing and returns one metric, with the given name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        return StepResult([torch.zeros(())], 0.1, metrics={self.name: pairs(1, 1)})


def test_ranks_compare_names_before_a_save_that_comes_before_the_first_logged_step() -> None:
    """Otherwise they would gather rows of unequal widths in that save."""
    config = LoopConfig(9, batch_size=1, log_every=4, save_every=2)

    def body(world: World) -> str:
        saved: list[int] = []
        callbacks = LoopCallbacks(lambda step: {}, lambda event: None, save=lambda done: saved.append(done.step))
        replica, first = Tells(f"of_{world.rank}"), TrainingProgress(5)
        with pytest.raises(ConfigError) as caught:
            fit(replica, repeat([]), world, config=config, callbacks=callbacks, first=first)
        return f"{saved} {caught.value}"

    assert all(
        said.startswith("[] ") and "ranks 0 and 1: [of_0] and [of_1]." in said for said in run_in_worlds(body, 2)
    )


def test_a_metric_that_nothing_counts_for_is_nan_and_infinities_are_shown() -> None:
    inf = math.inf
    sums_pn = torch.tensor([[0.0, 0.0, inf, 1.0, inf, 1.0], [0.0, 0.0, 2.0, 1.0, -inf, 1.0]], dtype=torch.float64)
    shown = compute_means(["none", "endless", "unknown"], sums_pn)
    assert shown["endless"] == inf
    assert math.isnan(shown["none"])
    assert math.isnan(shown["unknown"])


RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from worldsize.core import LossOutput, Recipe


class Told(Recipe):
    def model(self):
        return nn.Linear(4, 2)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def data(self, split):
        inputs = torch.randn(101, 4, generator=torch.Generator().manual_seed(len(split)))
        return TensorDataset(inputs, inputs[:, 0].gt(0).long())

    def loss(self, model, batch):
        logits, labels = model(batch[0]), batch[1]
        loss = nn.functional.cross_entropy(logits, labels)
        accuracy = (logits.argmax(1) == labels).sum(), torch.tensor(len(labels))
        weights = batch[0].abs().sum(1)
        return LossOutput(loss, {"accuracy": accuracy, "weighed": ((logits[:, 0] * weights).sum(), weights.sum())})

    def evaluate(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), torch.tensor(len(batch[1])))}
"""
YAML = """# @package _global_
# A recipe that tells
steps: 12
batch_size: 8
lr: 0.1
recipe:
  _target_: recipes.told.recipe.Told
"""
WORDS = ("recipe=told", "log_every=4", "cluster.threads=1", "reproducibility=elastic", "logical_ranks=4")


@pytest.fixture
def told(tmp_path: Path) -> None:
    """Write a recipe that reports its training accuracy into the project of ``train``."""
    write_recipe(tmp_path, "told", RECIPE, told=YAML)


def steps_of(run: Any) -> dict[int, Mapping[str, float]]:
    assert run.code == 0, run.error
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["metrics"] for row in rows if row["event"] == "step"}


@pytest.mark.usefixtures("told")
def test_a_parameter_server_logs_what_one_process_does(train: Any) -> None:
    alone = train(*WORDS, "strategy=single", "cluster.processes=1")
    expected = steps_of(alone)
    assert expected.keys() == {1, 4, 8, 12}
    assert all(metrics.keys() == {"accuracy", "weighed"} for metrics in expected.values())
    assert f"accuracy {expected[12]['accuracy']:.4f}" in alone.output
    served = train(*WORDS, "strategy=parameter_server", "cluster.processes=3")
    assert steps_of(served) == expected
    assert served.json("result.json")["metrics_digest"] == alone.json("result.json")["metrics_digest"]
    alike = ("recipe=told", "log_every=4", "cluster.threads=1", "strategy=parameter_server", "cluster.processes=3")
    overlapping = steps_of(train(*alike, "strategy.consistency=async"))
    assert all(0 <= metrics["accuracy"] <= 1 for metrics in overlapping.values())
    assert overlapping.keys() == expected.keys()


@pytest.mark.usefixtures("told")
def test_a_run_that_goes_on_between_two_logged_steps_logs_what_an_undisturbed_one_does(train: Any) -> None:
    alone = train(*WORDS, "strategy=ddp", "cluster.processes=1")
    killed = ("checkpoint.every=6", "faults=[{action: kill, rank: 1, step: 8}]", "launcher.max_restarts=1")
    again = train(*WORDS, "strategy=ddp", "cluster.processes=2", *killed)
    assert len(again.json("run_manifest.json")["attempts"]) == 2
    assert steps_of(again) == steps_of(alone)
