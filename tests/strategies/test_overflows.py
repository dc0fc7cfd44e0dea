"""An update that float16 overflows in is counted, and told of once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from worldsize.core import MicroBatch, Numerics, RunContext, World
from worldsize.strategies import loss_scaling
from worldsize.strategies.single import Single
from worldsize.testing.loops import Loop

OVERFLOWS = (2, 4)


class Overflowing(Loop):
    """The gradient of some steps leaves the range of float16."""

    def loss_at(self, model: nn.Module, batch: Any, step: int) -> Tensor:
        loss = self.loss(model, batch)
        return loss * float("inf") if step in OVERFLOWS else loss / 100


def test_updates_left_out_by_the_loss_scale_are_counted_and_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scaling, "_told", [])
    world = World.alone(torch.device("cpu"))
    recipe = Overflowing()
    replica = Single().replica(recipe, RunContext(world, Numerics(precision="fp16"), seed=0, steps=5, workers=1))
    data = recipe.data("train")
    with caplog.at_level(logging.WARNING, "worldsize"):
        results = [replica.step([MicroBatch(data[:8], step, step)]) for step in range(1, 6)]
    assert [result.skipped for result in results] == [step in OVERFLOWS for step in range(1, 6)]
    assert [record.getMessage()[:15] for record in caplog.records] == ["precision=fp16:"]
