"""The training loop evaluates and saves at the right steps, in the right order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count, repeat

import pytest
import torch

from worldsize.core import (
    Evaluated,
    EvaluationBatch,
    Event,
    MicroBatch,
    Replica,
    StateDict,
    StepDone,
    StepResult,
    World,
)
from worldsize.loop.agreement import Wishes
from worldsize.loop.fit import LoopCallbacks, LoopConfig, TrainingProgress, fit
from worldsize.testing.worlds import run_in_worlds

ALONE = World.create_single(torch.device("cpu"))


class Idle(Replica):
    """A replica that computes nothing."""

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        return StepResult([torch.zeros(())], 0.1, None, False)

    def evaluate(self, batches: Iterable[EvaluationBatch]) -> Mapping[str, float]:
        return {}

    def state(self) -> StateDict:
        return {}

    def load(self, state: StateDict) -> None: ...


def evaluations_and_saves(config: LoopConfig, first: TrainingProgress) -> list[str]:
    """Run the loop, and return its evaluations and saves in order."""
    log: list[str] = []

    def emit(event: Event) -> None:
        if isinstance(event, Evaluated):
            log.append(f"evaluated {event.step}")

    def save(position: TrainingProgress) -> None:
        log.append(f"saved {position.step}{'' if position.evaluated else ', not evaluated'}")

    callbacks = LoopCallbacks(lambda step: {}, emit, save)
    last = fit(Idle(), repeat([]), ALONE, config=config, callbacks=callbacks, first=first)
    assert last.step == config.steps
    return log


SAVES = LoopConfig(4, batch_size=1, evaluate_every=2, save_every=2, save_at_end=True)


@pytest.mark.parametrize(
    ("config", "first", "expected"),
    [
        (SAVES, TrainingProgress(), ["evaluated 2", "saved 2", "saved 4, not evaluated", "evaluated 4"]),
        (replace(SAVES, keeps_best=True), TrainingProgress(), ["evaluated 2", "saved 2", "evaluated 4", "saved 4"]),
        (LoopConfig(3, batch_size=1), TrainingProgress(), ["evaluated 3"]),
        (SAVES, TrainingProgress(4, evaluated=False), ["evaluated 4"]),
        (SAVES, TrainingProgress(4), []),
        # a complete run is trained further: its last evaluation came after the last save and was dropped
        (
            LoopConfig(6, batch_size=1, evaluate_every=2),
            TrainingProgress(4, evaluated=False),
            ["evaluated 4", "evaluated 6"],
        ),
        (LoopConfig(6, batch_size=1), TrainingProgress(4, evaluated=False), ["evaluated 6"]),
    ],
    ids=str,
)
def test_the_last_save_comes_before_the_last_evaluation(
    config: LoopConfig, first: TrainingProgress, expected: list[str]
) -> None:
    assert evaluations_and_saves(config, first) == expected


LOGS = LoopConfig(7, batch_size=1, log_every=2)


@pytest.mark.parametrize("config", [replace(LOGS, evaluate_every=2), replace(LOGS, save_every=2)], ids=str)
def test_logged_steps_are_examined_also_where_an_evaluation_or_a_save_follows(config: LoopConfig) -> None:
    examined: list[int] = []
    callbacks = LoopCallbacks(lambda step: {}, lambda event: None, examine=lambda done: examined.append(done.step))
    fit(Idle(), repeat([]), ALONE, config=config, callbacks=callbacks)
    assert examined == [1, 2, 4, 6], "after the last step there is nothing to examine for"


def test_a_run_that_is_asked_to_end_saves_without_examining_its_last_step() -> None:
    log: list[str] = []
    callbacks = LoopCallbacks(
        lambda step: {},
        lambda event: None,
        save=lambda progress: log.append(f"saved {progress.step}"),
        wishes=lambda: Wishes(stop=True),
        examine=lambda done: log.append(f"examined {done.step}"),
    )
    fit(Idle(), repeat([]), ALONE, config=LoopConfig(9, batch_size=1, log_every=1), callbacks=callbacks)
    assert log[-1].startswith("saved")
    assert f"examined {log[-1].removeprefix('saved ')}" not in log


def test_an_overdue_save_follows_on_all_ranks_once_the_last_finds_it_so() -> None:
    def saves(world: World) -> list[int]:
        saved, asked = [0], count(1)
        callbacks = LoopCallbacks(
            lambda step: {},
            lambda event: None,
            save=lambda progress: saved.append(progress.step),
            wishes=lambda: Wishes(save=next(asked) - saved[-1] >= 3 + 2 * world.rank),
        )
        fit(Idle(), repeat([]), world, config=LoopConfig(12, batch_size=1, log_every=1), callbacks=callbacks)
        return saved

    assert run_in_worlds(saves, 2) == [[0, 6, 12]] * 2


@pytest.mark.parametrize(
    ("log_every", "ranks", "measured"), [(1, 4096, 100), (10, 8, 100), (100, 64, 50), (100, 4096, 2), (10, 20_000, 10)]
)
def test_the_more_ranks_the_fewer_steps_are_measured(log_every: int, ranks: int, measured: int) -> None:
    config = LoopConfig(1000, batch_size=1, log_every=log_every)
    assert sum(config.measures(step, ranks) for step in range(101, 201)) == measured


class Diverging(Idle):
    """A replica of two micro-batches with given losses for each step, by rank."""

    def __init__(self, losses: Sequence[tuple[float, float]]) -> None:
        self._losses = iter(losses)

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        return StepResult([torch.tensor(loss) for loss in next(self._losses)], 0.1, None, False)


FINE, INF, NAN = (1.0, 2.0), (math.inf, 1.0), (math.nan, 1.0)


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        ([[FINE, FINE, (3.0, 4.0)], [FINE, FINE, (5.0, 7.0)]], 4.75),
        ([[FINE, INF, FINE], [FINE, FINE, FINE]], math.inf),
        ([[FINE, FINE, FINE], [(-math.inf, 1.0), FINE, FINE]], -math.inf),
        ([[FINE, NAN, INF], [FINE, INF, FINE]], math.nan),
        ([[FINE, INF, NAN], [FINE, FINE, NAN]], math.inf),  # the first step counts, not the last
        ([[NAN, FINE, FINE], [FINE, INF, FINE]], math.nan),
        ([[INF, FINE, FINE], [(-math.inf, 1.0), FINE, FINE]], math.nan),
    ],
)
def test_a_logged_loss_is_the_first_of_any_rank_that_is_not_finite_and_else_the_last(
    by_rank: Sequence[Sequence[tuple[float, float]]], expected: float
) -> None:
    def body(world: World) -> float:
        logged: list[float] = []

        def emit(event: Event) -> None:
            if isinstance(event, StepDone) and event.step == 4:
                logged.append(event.loss)

        replica = Diverging([FINE, *by_rank[world.rank]])
        config = LoopConfig(4, batch_size=1, log_every=4, stop_on_nonfinite=False)
        fit(replica, repeat([]), world, config=config, callbacks=LoopCallbacks(lambda step: {}, emit))
        return logged[0]

    assert run_in_worlds(body, 2) == pytest.approx([expected] * 2, abs=0, rel=0, nan_ok=True)
