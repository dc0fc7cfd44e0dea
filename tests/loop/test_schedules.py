"""Learning-rate schedules match their formulas, and continue after a resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from worldsize.loop.schedules import warmup_cosine, warmup_inverse_sqrt, warmup_linear, warmup_stable_decay

PEAK, STEPS, RISING = 0.5, 40, 4
Make = Callable[[torch.optim.Optimizer], LRScheduler]


def rates(make: Make, count: int = STEPS) -> list[float]:
    """Return the learning rate of each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule, used = make(optimizer), []
    for _ in range(count):
        used.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return used


def formula(name: str, step: int) -> float:
    """Return the share of the peak in ``step``, from 0, as in the papers."""
    if step < RISING:
        return (step + 1) / RISING
    done = (step - RISING) / (STEPS - RISING)
    late = max(0.0, (step - 30) / 10)  # for a decay over the last 10 steps
    shares: dict[str, float] = {
        "cosine": 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2,
        "linear": 1 - done,
        "inverse_sqrt": math.sqrt(RISING / (step + 1)),
        "sqrt": 1 - math.sqrt(late),
        "straight": 0.2 + 0.8 * (1 - late),
    }
    return shares[name]


SCHEDULES: dict[str, Make] = {
    "cosine": partial(warmup_cosine, steps=STEPS, warmup=0.1),
    "linear": partial(warmup_linear, steps=STEPS, warmup_steps=RISING),
    "inverse_sqrt": partial(warmup_inverse_sqrt, steps=STEPS, warmup=0.1),
    "sqrt": partial(warmup_stable_decay, steps=STEPS, warmup=0.1, decay=0.25),
    "straight": partial(warmup_stable_decay, steps=STEPS, warmup_steps=RISING, decay=0.25, shape="linear", floor=0.2),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_the_formula(name: str) -> None:
    assert rates(SCHEDULES[name]) == pytest.approx([PEAK * formula(name, step) for step in range(STEPS)])


@pytest.mark.parametrize("name", SCHEDULES)
def test_after_the_last_step_the_rate_stays_where_it_is_or_falls(name: str) -> None:
    *_, last, beyond, later = rates(SCHEDULES[name], STEPS + 3)
    assert last >= beyond >= later >= 0


def test_a_run_that_is_resumed_has_the_rates_of_one_that_is_not(train: Any) -> None:
    options = (
        "recipe=digits",
        "recipe.width=4",
        "steps=12",
        "log_every=1",
        "schedule=warmup_stable_decay",  # all depend on the step number in the same way
        "checkpoint.every=5",
    )
    undisturbed = train(*options, "run.name=whole")
    killed = train(*options, "run.name=killed", "launcher.max_restarts=1", "faults=[{action: kill, rank: 0, step: 8}]")
    assert (undisturbed.code, killed.code) == (0, 0), killed.error
    assert undisturbed.json("result.json")["metrics_digest"] == killed.json("result.json")["metrics_digest"]
