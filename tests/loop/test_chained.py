"""Chained schedules match torch's SequentialLR, with a separate peak for each group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from worldsize.core import ConfigError
from worldsize.loop.schedules import chained

PEAK, STEPS = 0.5, 40
PARTS: list[dict[str, Any]] = [
    {"name": "linear", "steps": 8, "warmup": 1.0},
    {"name": "constant", "share": 0.25, "factor": 0.5},
    {"name": "cosine", "warmup_steps": 0, "floor": 0.0},
]


def rates(make: Any) -> list[list[float]]:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": PEAK / 5}]
    optimizer = torch.optim.SGD(groups, lr=PEAK)
    schedule, used = make(optimizer), []
    for _ in range(STEPS):
        used.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return used


def by_torch(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Chain torch's own schedules: a warm-up, a constant rate, and half a cosine."""
    schedules: Sequence[LRScheduler] = [
        LinearLR(optimizer, start_factor=1 / 8, end_factor=1.0, total_iters=7),
        ConstantLR(optimizer, factor=0.5, total_iters=STEPS),
        CosineAnnealingLR(optimizer, T_max=STEPS - 18),
    ]
    return SequentialLR(optimizer, list(schedules), milestones=[8, 18])


def test_rates_are_those_of_torchs_sequential_schedule_in_each_group() -> None:
    own = rates(partial(chained, steps=STEPS, parts=PARTS))
    assert own[:18] == [pytest.approx(pair) for pair in rates(by_torch)[:18]]
    # the first step of ours is one of a warm-up; torch's cosine begins at the peak
    cosine = [PEAK * (1 + math.cos(math.pi * (step - 18 - 1) / (STEPS - 18 - 1))) / 2 for step in range(19, STEPS)]
    assert [first for first, _ in own[19:]] == pytest.approx(cosine)
    assert [second for _, second in own] == pytest.approx([first / 5 for first, _ in own])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "parts is empty"),
        ([{"name": "linear"}, {"name": "cosine"}], r"parts\[0\] requires either steps or share"),
        (
            [{"name": "linear", "steps": 3, "share": 0.1}, {"name": "cosine"}],
            r"parts\[0\] requires either steps or share",
        ),
        ([{"name": "linear", "steps": 40}, {"name": "cosine"}], "40 of 40 steps are used"),
        ([{"name": "linear", "share": 0.0}, {"name": "cosine"}], "at least one"),
        ([{"name": "linear", "steps": 3}, {"name": "cosine", "steps": 3}], "Remove its steps or share"),
        ([{"name": "cosin"}], "unknown schedule 'cosin'; did you mean 'cosine'"),
        ([{"name": "cosine", "flor": 0.1}], r"unknown key 'schedule.parts\[0\].flor'; did you mean 'floor'"),
        ([{"name": "cosine", "floor": -1.0}], r"schedule.parts\[0\].floor"),
    ],
)
def test_parts_that_make_no_schedule_are_refused(parts: list[dict[str, Any]], message: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    with pytest.raises(ConfigError, match=message):
        chained(optimizer, steps=STEPS, parts=parts)
