"""Schedules that need a metric advance once per evaluation, whatever happens to processes meanwhile."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau

from worldsize.config.compose import compose_only
from worldsize.core import ConfigError
from worldsize.launch.execute import build_checked_settings
from worldsize.loop.early_stopping import get_metric_value
from worldsize.strategies.schedules import Schedule


def optimizer() -> Optimizer:
    return SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)


def test_a_repeated_evaluation_does_not_advance_a_schedule_again() -> None:
    """A restored schedule includes the earlier evaluations; updates do not advance it."""
    schedule = Schedule(ReduceLROnPlateau(optimizer(), patience=1, factor=0.5))
    for step, value in ((3, 1.0), (6, 1.0), (6, 1.0), (6, 1.0)):
        schedule.step()
        schedule.advance_by(value, step=step)
    again = Schedule(ReduceLROnPlateau(optimizer(), patience=1, factor=0.5))
    again.load_state_dict(schedule.state_dict())
    for each in (schedule, again):
        group = each.plain.optimizer.param_groups[0]
        each.advance_by(1.0, step=6)
        assert group["lr"] == 1.0
        each.advance_by(1.0, step=9)
        assert group["lr"] == 0.5
        assert each.state_dict() == schedule.state_dict()


def test_other_schedules_are_advanced_by_updates_alone_with_their_state() -> None:
    schedule, plain = (ConstantLR(optimizer(), factor=0.5, total_iters=2) for _ in range(2))
    wrapped = Schedule(schedule)
    for optimized, each in ((schedule, wrapped), (plain, plain)):
        optimized.optimizer.step()
        each.step()
    wrapped.advance_by(0.0, step=1)
    assert wrapped.state_dict() == plain.state_dict()


class ByBatch:
    """A schedule from a different library, such as timm."""

    def step(self, epoch: int, metric: float | None = None) -> None:
        """Set the rate of ``epoch``."""

    def step_update(self, updates: int) -> None:
        """Set the rate after ``updates``."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load ``state``."""


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            ByBatch(),
            "schedule returned a ByBatch, but its step() requires epoch. Return a schedule with step(), called after",
        ),
        (
            lambda step: 1.0,
            "schedule() returned a function without a step() method. Return a scheduler from torch.optim",
        ),
    ],
    ids=["other arguments", "a function"],
)
def test_what_cannot_be_advanced_is_refused_in_a_sentence(schedule: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Schedule(schedule)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("schedule=plateau",), "ReduceLROnPlateau requires an evaluation metric. Set schedule_metric to"),
        (
            ("schedule=plateau", "schedule_metric=loss"),
            "schedule_metric=loss requires evaluations during training. Set",
        ),
        (
            ("schedule_metric=loss", "evaluate_every=5"),
            "schedule_metric=loss requires a schedule that steps on a metric",
        ),
        (("schedule_metric=validation/loss", "evaluate_every=5"), "requires the split"),
        (
            (
                "schedule=plateau",
                "schedule_metric=loss",
                "evaluate_every=5",
                "strategy=parameter_server",
                "strategy.consistency=async",
                "cluster.processes=3",
            ),
            "ParameterServer, as configured, does not support schedules that step on an evaluation metric",
        ),
    ],
    ids=str,
)
def test_a_metric_without_its_schedule_or_evaluation_is_refused(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_checked_settings(compose_only(["recipe=digits", "logger=none", *options]))


def test_a_metric_that_no_evaluation_has_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(
        ConfigError, match="schedule_metric=los: metric 'los' not found in the evaluation; did you mean 'loss'"
    ):
        get_metric_value({"loss": 1.0, "accuracy": 0.5}, "los", key="schedule_metric")


PLATEAU = (
    "recipe=digits",
    "schedule=plateau",
    "schedule_metric=loss",
    "schedule.patience=0",
    "schedule.threshold=0.2",
    "steps=14",
    "evaluate_every=2",
    "log_every=1",
    "checkpoint.every=5",
    "reproducibility=elastic",
)


def test_a_plateau_has_the_bits_of_an_undisturbed_run_over_kills(train: Any) -> None:
    """One run restarts from a checkpoint; others heal when a process dies at an evaluation or in the step after it."""
    straight = train(*PLATEAU, "cluster.processes=1")
    restarted = train(
        *PLATEAU,
        "cluster.processes=2",
        "strategy=zero",
        "faults=[{action: kill, step: 9, rank: 1}]",
        "launcher.max_restarts=1",
    )
    healed = train(
        *PLATEAU,
        "cluster.processes=2",
        "strategy.on_failure=heal",
        "faults=[{action: kill, step: 8, rank: 1, point: 'evaluate:begin'}]",
    )
    sharded = train(
        *PLATEAU,
        "cluster.processes=2",
        "strategy=fsdp",
        "strategy.on_failure=heal",
        "faults=[{action: kill, step: 9, rank: 1, point: 'step:backward'}]",
    )
    for run in (straight, restarted, healed, sharded):
        assert run.code == 0, run.error
        for name in ("state_digest", "metrics_digest"):
            assert run.json("result.json")[name] == straight.json("result.json")[name]
    rates = [row["lr"] for row in straight.steps()]
    assert rates[0] > rates[-1], rates
