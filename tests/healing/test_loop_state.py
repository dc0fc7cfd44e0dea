"""Weights are drawn unless all of them are loaded afterwards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from worldsize.core import World
from worldsize.healing import loop_state
from worldsize.healing.loop_state import LoopState
from worldsize.record.run_directory import RunDirectory
from worldsize.strategies.deferred.model import DeferredModel

HOST = torch.device("cpu")


@pytest.mark.parametrize(
    ("is_saved", "ignored", "initial", "draws"),
    [
        (False, [], None, True),
        (True, [], None, False),
        (True, ["optimizer", "ema"], None, False),
        (True, ["model"], None, True),
        (False, [], SimpleNamespace(strict=True), False),
        (False, [], SimpleNamespace(strict=False), True),  # weights missing from it stay random
        (True, ["model"], SimpleNamespace(strict=True), True),  # only a run without checkpoints starts from it
    ],
)
def test_weights_are_drawn_unless_all_of_them_are_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_saved: bool, ignored: list[str], initial: Any, draws: bool
) -> None:
    checkpoint: Any = SimpleNamespace(step=3) if is_saved else None
    monkeypatch.setattr(loop_state, "find_newest", lambda *_, **__: checkpoint)
    config: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(allow_older=False, list_ignored_parts=lambda step: ignored), initial=initial
    )
    before = torch.get_rng_state()
    state, context = LoopState().prepare_start(config, RunDirectory(tmp_path), World.create_single(HOST))
    with context:
        DeferredModel.from_factory(lambda: nn.Linear(300, 300)).fill_tensors(HOST)
    assert torch.equal(torch.get_rng_state(), before) is not draws
    assert state.checkpoint is checkpoint
