"""The agent of the first host meets the others, and tells them how the run has ended."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worldsize.core import Plan, Role
from worldsize.driver import agent as leading
from worldsize.errors import WorldsizeError
from worldsize.launch.agents import Lead
from worldsize.records.run_directory import RunDirectory
from worldsize.world.environments import Node

HERE = "127.0.0.1"


def test_a_first_host_that_is_not_satisfied_tells_the_others_that_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[object] = []

    class Other:
        rank, host = 1, "b"
        announce_end = log.append

    def refuse(*_: object) -> None:
        raise WorldsizeError("the hosts differ")

    def gathered(*_: object, **__: object) -> list[tuple[Other, dict[str, Any]]]:
        log.append("gathered")
        return [(Other(), {})]

    monkeypatch.setattr(leading, "facts_of", lambda *_: log.append("facts"))
    monkeypatch.setattr(leading, "gather", gathered)
    monkeypatch.setattr(leading, "check_hosts", refuse)
    record = SimpleNamespace(
        attempts=[], give_up=lambda cause, unstarted: log.append(f"{unstarted} not started: {cause}")
    )
    monkeypatch.setattr(leading, "opened", lambda *_: nullcontext(record))
    monkeypatch.setattr(leading, "read_key", lambda _: None)
    monkeypatch.setattr(leading, "_port", lambda *_: 1)
    settings = SimpleNamespace(recipe=None, cluster=SimpleNamespace(timeout=1.0))
    run, plan = RunDirectory(tmp_path), Plan(tmp_path, None, {"worker": Role(4)}, {})  # type: ignore[arg-type]
    with pytest.raises(WorldsizeError, match="the hosts differ"):
        leading._lead(settings, Lead(), plan, run, Node(0, 2, HERE))  # type: ignore[arg-type]
    assert log == ["facts", "gathered", "4 not started: the hosts differ", 1], "whoever has come is not kept waiting"
