"""Calibration explains why this machine cannot run the recipe's steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import pytest
import torch
from torch import nn

from worldsize.core import ConfigError, Numerics
from worldsize.data.order import Order
from worldsize.plan.calibrate import calibrate
from worldsize.testing.recipes import Chain


def _too_much() -> NoReturn:
    torch.empty(2**62, dtype=torch.uint8)
    raise AssertionError


def _killed() -> NoReturn:
    """Kill this process, like the kernel when it runs out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _broken() -> NoReturn:
    raise ValueError("of its own")


@dataclass(frozen=True)
class Unbuilt(Chain):
    """A recipe whose model can never be built."""

    build: Callable[[], NoReturn] = _broken

    def model(self) -> nn.Module:
        self.build()


@pytest.mark.parametrize(("build", "name"), [(_too_much, "RuntimeError"), (_killed, "BrokenProcessPool")])
def test_too_little_memory_is_an_error_with_a_remedy(build: Callable[[], NoReturn], name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"does not fit on this machine with 2 concurrent process\(es\) \({name}\)\. Pass"
    ):
        calibrate(Unbuilt(build=build), Numerics(), Order(0, 4, 1, (0,)), "cpu", at_once=2)


def test_another_error_is_raised_unchanged() -> None:
    with pytest.raises(ValueError, match="of its own"):
        calibrate(Unbuilt(build=_broken), Numerics(), Order(0, 4, 1, (0,)), "cpu")
