"""Weights are drawn unless all of them are loaded then, and nothing of a membership outlasts it but what must."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from worldsize.core import Event, RunStarted, World
from worldsize.record.run_directory import RunDirectory
from worldsize.strategies.deferred.model import DeferredModel
from worldsize.worker import carried
from worldsize.worker.carried import Carried, LoggedEvents

HOST = torch.device("cpu")


@pytest.mark.parametrize(
    ("is_saved", "ignored", "initial", "draws"),
    [
        (False, [], None, True),
        (True, [], None, False),
        (True, ["optimizer", "ema"], None, False),
        (True, ["model"], None, True),
        (False, [], SimpleNamespace(strict=True), False),
        (False, [], SimpleNamespace(strict=False), True),  # what it lacks keeps its random weights
        (True, ["model"], SimpleNamespace(strict=True), True),  # which only a run without checkpoints begins from
    ],
)
def test_weights_are_drawn_unless_all_of_them_are_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_saved: bool, ignored: list[str], initial: Any, draws: bool
) -> None:
    checkpoint: Any = SimpleNamespace(step=3) if is_saved else None
    monkeypatch.setattr(carried, "newest", lambda *_, **__: checkpoint)
    config: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(allow_older=False, ignored=lambda step: ignored), initial=initial
    )
    begun = Carried(config, None)
    before = torch.get_rng_state()
    with begun.beginning(RunDirectory(tmp_path), World.alone(HOST)):
        DeferredModel.build(lambda: nn.Linear(300, 300)).fill(HOST)
    assert torch.equal(torch.get_rng_state(), before) is not draws
    assert begun.checkpoint is checkpoint


class Told:
    """A listener of the whole run, or of one membership, of which it then knows the replica."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)


def test_listeners_of_a_membership_are_told_of_the_start_and_not_kept() -> None:
    lasting, passing, started = Told(), Told(), RunStarted("run", 10)
    log = LoggedEvents()
    log.tell_started(started, [lasting, passing], passing=[passing])
    gone = weakref.ref(passing)
    assert passing.events == [started]
    del passing
    assert gone() is None
    log.tell_started(started, [lasting, another := Told()], passing=[another])
    assert (lasting.events, another.events) == ([started], [started])
