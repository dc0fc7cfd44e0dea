"""Calibration explains why this machine cannot take the recipe's steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import ConfigError, Numerics, Recipe
from worldsize.data.loader import Order
from worldsize.planning.calibrate import calibrate


class Unbuilt(Recipe):
    """A recipe whose model can never be built."""

    def __init__(self, build: Callable[[], NoReturn]) -> None:
        self.model = build  # type: ignore[method-assign]

    def model(self) -> nn.Module:
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> Optimizer:
        raise NotImplementedError

    def data(self, split: str) -> Any:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise NotImplementedError

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        raise NotImplementedError


def _too_much() -> NoReturn:
    torch.empty(2**62, dtype=torch.uint8)
    raise AssertionError


def _killed() -> NoReturn:
    """Kill this process, as the kernel does if it takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _broken() -> NoReturn:
    raise ValueError("of its own")


@pytest.mark.parametrize(("build", "name"), [(_too_much, "RuntimeError"), (_killed, "BrokenProcessPool")])
def test_too_little_memory_is_an_error_with_a_remedy(build: Callable[[], NoReturn], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot take the recipe's steps, 2 process\(es\) at once: {name}.*Give"):
        calibrate(Unbuilt(build), Numerics(), Order(0, 4, 1, (0,)), "cpu", at_once=2)


def test_another_error_is_raised_unchanged() -> None:
    with pytest.raises(ValueError, match="of its own"):
        calibrate(Unbuilt(_broken), Numerics(), Order(0, 4, 1, (0,)), "cpu")
