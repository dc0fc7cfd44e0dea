"""The training loop evaluates and saves at the right steps, in the right order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat

import pytest
import torch

from worldsize.core import Evaluated, EvaluationBatch, Event, MicroBatch, Replica, StateDict, StepResult, World
from worldsize.engine.fit import LoopCallbacks, LoopConfig, TrainingProgress, fit

ALONE = World.alone(torch.device("cpu"))


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
        wants_stop=lambda: True,
        examine=lambda done: log.append(f"examined {done.step}"),
    )
    fit(Idle(), repeat([]), ALONE, config=LoopConfig(9, batch_size=1, log_every=1), callbacks=callbacks)
    assert log[-1].startswith("saved")
    assert f"examined {log[-1].removeprefix('saved ')}" not in log


@pytest.mark.parametrize(
    ("log_every", "ranks", "measured"), [(1, 4096, 100), (10, 8, 100), (100, 64, 50), (100, 4096, 2), (10, 20_000, 10)]
)
def test_the_more_ranks_the_fewer_steps_are_measured(log_every: int, ranks: int, measured: int) -> None:
    config = LoopConfig(1000, batch_size=1, log_every=log_every)
    assert sum(config.measures(step, ranks) for step in range(101, 201)) == measured
