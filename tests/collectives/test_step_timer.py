"""The step timer attributes time to phases; its clock here ticks once whenever it is read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count, islice
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed import Work
from torch.distributed import _functional_collectives as functional

from plugins.local_sgd.strategy import LocalSGD
from worldsize.collectives import step_timer
from worldsize.collectives.step_timer import Phase, StepTimer, measure_phase
from worldsize.core import RunContext, Strategy, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.synchronous import SynchronousReplica
from worldsize.strategies.zero import ZeRO
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds

CPU = torch.device("cpu")


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> StepTimer:
    """A timer whose clock reads 0, 1, 2 ..."""
    clock = SimpleNamespace(perf_counter=map(float, count()).__next__)  # read only by this timer, not by other threads
    monkeypatch.setattr(step_timer, "time", clock)
    return StepTimer(CPU)


def test_time_within_a_phase_counts_there_and_all_other_time_is_computing(timer: StepTimer) -> None:
    with timer.record_phases():
        timer.start_step(data=7.0)  # reads 0
        with measure_phase("update"), measure_phase("communication"):  # reads 1 and 2, then 3 and 4
            pass
        timer.end_step()  # reads 5
    assert timer.collect_step_times().tolist() == [[7.0, 2.0, 1.0, 2.0]]
    assert timer.collect_step_times().tolist() == []


def test_a_phase_that_fails_ends_and_one_that_nobody_measures_reads_no_clock(timer: StepTimer) -> None:
    with measure_phase("update"):
        pass
    with timer.record_phases():
        with measure_phase("update"):
            pass
        timer.start_step(data=0.0)
        with suppress(ValueError), measure_phase("update"):
            raise ValueError
        timer.end_step()
    assert timer.collect_step_times().tolist() == [[0.0, 2.0, 0.0, 1.0]]


def test_nothing_of_pytorch_is_replaced_while_a_timer_is_open(timer: StepTimer) -> None:
    def waits() -> list[object]:
        places = (Work, torch.futures.Future, functional, dist)
        return [value for place in places for name, value in vars(place).items() if "wait" in name or "cast" in name]

    before = waits()
    with timer.record_phases():
        timer.start_step(data=0.0)
        assert waits() == before
        timer.end_step()


STRATEGIES: Sequence[Strategy] = (
    DDP(),
    DDP(reduce="ordered"),
    DDP(compress="int8"),
    ZeRO(),
    FSDP(),
    FSDP(reduce="ordered"),
    Mesh(pipeline=2),
    Mesh(tensor=2),
    LocalSGD(inner_steps=1),
)


def measured(strategy: Strategy, world: World) -> list[float]:
    """Take three steps, and return the ticks spent in each phase of the last one."""
    replica, order = strategy.replica(Chain(), RunContext(world)), Order(0, 8, 4, (world.rank, 2 + world.rank))
    timer = StepTimer(world.device)
    with timer.record_phases():
        for batches in islice(micro_batches(Chain().data("train"), order, world.device), 3):
            timer.start_step(data=0.0)
            replica.step(batches)
            timer.end_step()
    replica.close(complete=True)
    return [float(seconds) for seconds in timer.collect_step_times()[-1]]


def test_every_strategy_spends_time_computing_communicating_and_updating() -> None:
    def body(world: World) -> list[list[float]]:
        return [measured(strategy, world) for strategy in STRATEGIES]

    for rank in run_in_worlds(body, 2):
        for strategy, (_, compute, communication, update) in zip(STRATEGIES, rank, strict=True):
            assert min(compute, communication, update) > 0, f"{strategy}: {compute} {communication} {update}"


def test_the_wait_for_ddps_reducer_begins_after_the_last_gradient() -> None:
    def body(world: World) -> list[str]:
        replica = DDP().replica(
            Chain(depth=300), RunContext(world)
        )  # too large to be gathered, so that the reducer in C++ sums it
        assert isinstance(replica, SynchronousReplica)
        order, timer, seen = Order(0, 8, 2, (world.rank,)), StepTimer(world.device), list[str]()
        batches = micro_batches(Chain().data("train"), order, world.device)
        replica.step(next(batches))  # the first step has extra exchanges
        _note(replica.model, timer, seen)
        with timer.record_phases():
            timer.start_step(data=0.0)
            replica.step(next(batches))
            timer.end_step()
        return seen

    for seen in run_in_worlds(body, 2):
        backward = seen[: seen.index("update")]
        assert "gradient" in backward[: backward.index("communication")]
        assert "gradient" not in backward[backward.index("communication") :]


def _note(model: nn.Module, timer: StepTimer, seen: list[str]) -> None:
    """Record gradients and phase changes in order."""
    switch = timer.switch_phase

    def noted(phase: Phase) -> Phase:
        seen.append(phase)
        return switch(phase)

    timer.switch_phase = noted  # type: ignore[method-assign]
    for parameter in model.parameters():
        accumulates = get_gradient_edge(parameter).node  # hooks of parameters are called once a step, after all passes
        accumulates.register_hook(lambda *_: seen.append("gradient"))
