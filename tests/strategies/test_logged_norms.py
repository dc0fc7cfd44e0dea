"""Each logged step has the norm of its gradient, also without clipping; other steps do not compute it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import (
    Cluster,
    Event,
    LossOutput,
    MicroBatch,
    Numerics,
    RunContext,
    StepDone,
    Strategy,
    World,
)
from worldsize.data.batches import fetch_batch
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.loop.before_update import BeforeUpdate
from worldsize.loop.fit import LoopCallbacks, LoopConfig, fit
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.synchronous import SynchronousReplica
from worldsize.strategies.zero import ZeRO
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds

pytestmark = pytest.mark.heavy

STEPS, BATCH, EVERY = 7, 24, 3
LOGGED = (1, 3, 6, 7)
CPU = torch.device("cpu")
PLAIN = Numerics()
Norms = dict[int, float | None]  # by the number of the logged step


@dataclass(frozen=True)
class SummedChain(Chain):
    """A chain whose loss is a sum and its weight."""

    def loss(self, model: nn.Module, batch: Any) -> LossOutput:  # type: ignore[override]
        count = len(batch[1])
        return LossOutput((super().loss(model, batch) * count, torch.tensor(count)))


@dataclass(frozen=True)
class HalfTrained(Chain):
    """A chain whose first layer requires a gradient, but is not in the optimizer."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(list(model.parameters())[2:], lr=0.01)


@dataclass(frozen=True)
class Overflowing(Chain):
    """A chain whose gradient is infinite, or too large to sum its squares."""

    factor: float = math.inf

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return sum(each.sum() for each in model.parameters()) * self.factor  # type: ignore[return-value]


def by_hand(recipe: Chain, outside: int = 0) -> Norms:
    """Train in plain PyTorch on whole batches; skip the norm of the first ``outside`` parameters."""
    model, data = recipe.model(), recipe.data("train")
    optimizer, order = recipe.optimizer(model), Order(3, BATCH, 1, (0,))
    norms: Norms = {}
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        batch = fetch_batch(data, order.compute_indices(step, 0, len(data)))
        Chain.loss(recipe, model, batch).backward()  # type: ignore[no-untyped-call]
        if step in LOGGED:
            gradients = [each.grad for each in list(model.parameters())[outside:] if each.grad is not None]
            norms[step] = nn.utils.get_total_norm(gradients).item()
        optimizer.step()
    return norms


def logged_norms(
    strategy: Strategy,
    world: World,
    logical_ranks: int,
    recipe: Chain,
    numerics: Numerics = PLAIN,
    steps: int = STEPS,
) -> Norms:
    norms: Norms = {}

    def emit(event: Event) -> None:
        if isinstance(event, StepDone):
            norms[event.step] = event.grad_norm

    link = BeforeUpdate()
    replica = strategy.replica(recipe, RunContext(world, numerics, logs_norm=lambda: link.may_log))
    parts = strategy.data_parallel(Cluster("test", 1, world.size, "cpu", "gloo"))
    mine = assign_logical_ranks(strategy.data_rank(world), parts, logical_ranks, replica.dealing)
    batches = micro_batches(recipe.data("train"), Order(3, BATCH, logical_ranks, mine), world.device)
    config = LoopConfig(steps, batch_size=BATCH, log_every=EVERY, stop_on_nonfinite=False)
    fit(replica, batches, world, config=config, callbacks=LoopCallbacks(lambda step: {}, emit, before_update=link))
    return norms


CASES = {
    "single": (Single(), 1, 2),
    "ddp": (DDP(), 2, 4),
    "zero": (ZeRO(), 2, 4),
    "fsdp": (FSDP(), 3, 6),
    "hsdp": (FSDP(shard=2), 4, 4),
    "tensor": (Mesh(tensor=2), 2, 2),
    "pipeline": (Mesh(pipeline=2), 4, 8),
    "ordered ddp": (DDP(reduce="ordered"), 2, 4),
    "ordered fsdp": (FSDP(reduce="ordered"), 2, 4),
    "ordered pipeline": (Mesh(pipeline=2, reduce="ordered"), 2, 4),
}


@pytest.mark.parametrize("recipe", [Chain(), SummedChain()], ids=["mean", "sum"])
@pytest.mark.parametrize("name", CASES)
def test_logged_norms_are_those_of_plain_pytorch(name: str, recipe: Chain) -> None:
    strategy, processes, logical_ranks = CASES[name]
    expected = by_hand(recipe)
    for norms in run_in_worlds(lambda world: logged_norms(strategy, world, logical_ranks, recipe), processes):
        assert tuple(norms) == LOGGED
        assert norms == pytest.approx(expected, rel=1e-5)


def test_an_elastic_run_logs_the_same_bits_at_every_world_size() -> None:
    alone = logged_norms(DDP(reduce="ordered"), World.create_single(CPU), 8, Chain())
    for strategy in (DDP(reduce="ordered"), FSDP(reduce="ordered"), FSDP(reduce="ordered", accumulate="sharded")):
        for processes in (2, 4):
            norms = run_in_worlds(lambda world: logged_norms(strategy, world, 8, Chain()), processes)  # noqa: B023
            assert norms == [alone] * processes


def test_only_logged_steps_compute_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    step = SynchronousReplica.step

    def count(replica: SynchronousReplica, batches: Sequence[MicroBatch]) -> Any:
        result = step(replica, batches)
        calls.append(result.grad_norm is not None)
        return result

    monkeypatch.setattr(SynchronousReplica, "step", count)
    logged_norms(Single(), World.create_single(CPU), 1, Chain())
    assert [number for number, computed in enumerate(calls, 1) if computed] == list(LOGGED)


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "pipeline"])
def test_gradients_outside_the_optimizer_do_not_count(name: str) -> None:
    """They are never reset, so their sum would grow."""
    strategy, processes, logical_ranks = CASES[name]
    expected = by_hand(HalfTrained(), outside=2)
    for norms in run_in_worlds(lambda world: logged_norms(strategy, world, logical_ranks, HalfTrained()), processes):
        assert norms == pytest.approx(expected, rel=1e-5)


def test_the_norm_does_not_include_the_loss_scale() -> None:
    norms = logged_norms(Single(), World.create_single(CPU), 1, Chain(), Numerics("fp16"), steps=1)
    assert norms[1] == pytest.approx(by_hand(Chain())[1], rel=0.02)


@pytest.mark.parametrize("factor", [math.inf, 1e30])
def test_a_norm_that_is_infinite_does_not_change_the_gradient(factor: float) -> None:
    recipe = Overflowing(factor=factor)
    replica = Single().replica(recipe, RunContext(World.create_single(CPU), logs_norm=lambda: True))
    assert isinstance(replica, SynchronousReplica)
    batch = MicroBatch(fetch_batch(recipe.data("train"), torch.arange(4)), seed=1)
    norm = replica.step([batch]).grad_norm
    assert norm is not None
    assert norm.isinf()
    assert all((each.grad == factor).all() for each in replica.model.parameters() if each.grad is not None)


SERVERS = ("strategy=parameter_server", "strategy.servers=2")


def test_servers_and_shards_log_the_digests_of_one_process(train: Any) -> None:
    elastic = ("recipe=digits", "steps=6", "log_every=2", "cluster.threads=1", "reproducibility=elastic")

    def run(*options: str) -> tuple[str, list[float]]:
        done = train(*elastic, "logical_ranks=4", *options)
        assert done.code == 0, done.error
        return done.json("result.json")["metrics_digest"], [step["grad_norm"] for step in done.steps()]

    alone = run("strategy=single", "cluster.processes=1")
    assert all(norm > 0 for norm in alone[1])
    assert run("strategy=fsdp", "cluster.processes=2") == alone
    assert run(*SERVERS, "cluster.processes=4") == alone


@pytest.mark.parametrize(
    ("words", "has_norm"),
    [
        ((*SERVERS, "cluster.processes=4"), True),
        ((*SERVERS, "cluster.processes=4", "strategy.consistency=async"), False),
        (("strategy=local_sgd", "cluster.processes=2"), True),
    ],
    ids=["sync servers", "async servers", "local_sgd"],
)
def test_a_strategy_without_a_common_gradient_logs_its_own_or_none(
    train: Any, words: tuple[str, ...], has_norm: bool
) -> None:
    done = train("recipe=digits", "steps=4", "log_every=2", "cluster.threads=1", *words)
    assert done.code == 0, done.error
    assert [step["grad_norm"] is not None for step in done.steps()] == [has_norm] * 3


def test_a_step_at_which_the_run_ends_early_has_the_norm(train: Any) -> None:
    rule = ("evaluate_every=3", "early_stopping.metric=loss", "early_stopping.patience=1", "lr=0")
    done = train("recipe=digits", "steps=40", "cluster.threads=1", "cluster.processes=1", *rule)
    assert done.code == 0, done.error
    assert [step["step"] for step in done.steps()] == [1, 6]
    assert all(step["grad_norm"] > 0 for step in done.steps())
