"""A float16 overflow in an update is counted, logged once, and an event of the run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.observe.run_folders import write_run
from worldsize.core import Event, MicroBatch, Numerics, RunContext, UpdateOverflowed, World
from worldsize.core.sections import WeightAverage
from worldsize.loop.averaging import AveragedReplica
from worldsize.loop.fit import LoopCallbacks, LoopConfig, fit
from worldsize.observe.events import EventLog
from worldsize.observe.report.page import collect_summary
from worldsize.observe.report.read import read_run
from worldsize.observe.report.timeline import timeline
from worldsize.strategies import loss_scaling
from worldsize.strategies.single import Single
from worldsize.testing.loops import Loop

OVERFLOWS = (2, 4)


class Overflowing(Loop):
    """The gradient overflows float16 in some steps."""

    def loss_at(self, model: nn.Module, batch: Any, step: int) -> Tensor:
        loss = self.loss(model, batch)
        return loss * 1e6 if step in OVERFLOWS else loss / 100


class Fused(Overflowing):
    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, fused=True)


def replica_of(recipe: Overflowing, steps: int) -> AveragedReplica:
    context = RunContext(
        World.create_single(torch.device("cpu")), Numerics(precision="fp16"), seed=0, steps=steps, workers=1
    )
    return AveragedReplica(Single().replica(recipe, context), WeightAverage(0.5))


@pytest.mark.parametrize("kind", [Overflowing, Fused])
def test_updates_left_out_by_the_loss_scale_are_counted_and_told_once(
    kind: type[Overflowing], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scaling, "_told", [])
    recipe = kind()
    replica, data = replica_of(recipe, 5), recipe.data("train")
    batches = [[MicroBatch(data[:8], step, step)] for step in range(1, 6)]
    events: list[Event] = []
    with caplog.at_level(logging.WARNING, "worldsize"):
        progress = fit(
            replica,
            batches,
            World.create_single(torch.device("cpu")),
            config=LoopConfig(5, batch_size=8, log_every=5),
            callbacks=LoopCallbacks(lambda step: {}, events.append),
        )
    assert progress.skipped == len(OVERFLOWS)
    assert [event.step for event in events if isinstance(event, UpdateOverflowed)] == [*OVERFLOWS]
    assert [record.getMessage()[:15] for record in caplog.records] == ["precision=fp16:"]
    assert replica.state()["ema"]["updates"] == 5, "a plain loop averages after each step"


def test_overflows_are_events_of_the_run_and_counted_in_its_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    log = EventLog(run / "events.jsonl")
    for step in (*OVERFLOWS, OVERFLOWS[-1]):  # the last one is repeated after a restart
        log(UpdateOverflowed(step))
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [(row["event"], row["step"]) for row in rows] == [("overflow", 2), ("overflow", 4), ("overflow", 4)]
    record = read_run(run)
    assert ("updates skipped (float16 overflow)", "2") in collect_summary(record)
    line = timeline(record)
    assert line is not None
    texts = [mark.text for mark in line.marks if "float16" in mark.text]
    assert texts == ["step 2: update skipped (float16 gradient overflow)"]
