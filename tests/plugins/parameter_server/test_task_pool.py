"""Results from workers reach the training loop once, however far the workers drift apart."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from plugins.parameter_server.task_pool import StalenessScheduler, TaskPool
from worldsize.strategies.loss_record import LossRecord

STEPS, RANKS = 40, 4


def sent(task: dict[str, Any]) -> dict[str, Any]:
    """Return a worker's result for a unit; its loss and metric encode the step and the logical rank."""
    step, ranks = task["step"], task["ranks"]
    metrics = [{"error": torch.tensor([100.0 * step + rank, rank + 1], dtype=torch.float64)} for rank in ranks]
    records = [LossRecord(torch.tensor(float(step)), own) for own in metrics]
    return {"unit": (step, ranks), "records": [record.to_message() for record in records]}


def work(staleness: float, speeds: Sequence[float], seed: int) -> tuple[TaskPool, list[list[LossRecord]]]:
    """Let workers of these speeds train all steps; the loop pops each step as soon as it is complete."""
    clock = StalenessScheduler(staleness, RANKS, lease=math.inf)
    pool, generator, hands = TaskPool(clock), random.Random(seed), dict[str, dict[str, Any]]()
    names = [f"worker-{number}" for number in range(len(speeds))]
    for name in names:
        pool.add_worker(name, 0.0)
    popped: list[list[LossRecord]] = []
    clock.allow_steps(1 if staleness == 0 else STEPS)
    while len(popped) < STEPS:
        (name,) = generator.choices(names, speeds)
        if name in hands:
            pool.record_task_result(name, sent(hands.pop(name)))
        elif task := pool.assign_task(name, 0.0):
            hands[name] = task
        while len(popped) < min(clock.complete, STEPS):
            popped.append(pool.pop_records(len(popped) + 1))
            clock.allow_steps(len(popped) + 1 if staleness == 0 else STEPS)
    return pool, popped


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("staleness", [0, 3, math.inf])
def test_with_unequal_workers_each_metric_counts_once_and_nothing_is_left(staleness: float, seed: int) -> None:
    pool, popped = work(staleness, (20, 5, 1), seed)
    pairs = torch.stack([record.metrics["error"] for records in popped for record in records])
    steps, ranks = range(1, STEPS + 1), range(RANKS)
    assert pairs[:, 0].sum() == sum(100 * step + rank for step in steps for rank in ranks)
    assert pairs[:, 1].sum() == STEPS * sum(rank + 1 for rank in ranks)
    assert [len(records) for records in popped] == [RANKS] * STEPS
    assert pool._records == {}


def test_steps_that_do_not_overlap_are_handed_over_as_they_are() -> None:
    for staleness, speeds in ((0, (20, 5, 1)), (math.inf, (1,))):
        _, popped = work(staleness, speeds, seed=0)
        for step, records in enumerate(popped, 1):
            assert [record.loss.item() for record in records] == [step] * RANKS
            assert [record.metrics["error"].tolist() for record in records] == [
                [100.0 * step + rank, rank + 1] for rank in range(RANKS)
            ]


def test_a_step_without_news_counts_nothing_under_the_same_names() -> None:
    """The records of step 2 came before the last one of step 1, and were returned in its place."""
    clock = StalenessScheduler(math.inf, 1, lease=math.inf)
    pool = TaskPool(clock)
    clock.allow_steps(3)
    for name in ("slow", "fast"):
        pool.add_worker(name, 0.0)
    late, early = (pool.assign_task(name, 0.0) for name in ("slow", "fast"))
    assert late
    assert early
    pool.record_task_result("fast", sent(early))
    last = pool.assign_task("fast", 0.0)
    assert last
    pool.record_task_result("fast", sent(last))
    assert pool.pop_records(1)[0].metrics["error"].tolist() == [200.0 + 300.0, 2.0]
    (record,) = pool.pop_records(2)
    assert (record.loss.item(), record.metrics["error"].tolist()) == (3.0, [0.0, 0.0])
    pool.record_task_result("slow", sent(late))
    assert pool.pop_records(3)[0].metrics["error"].tolist() == [100.0, 1.0]
    assert pool._records == {}
