"""A host's agent takes part in attempts for as long as the first host lives."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from worldsize.core import Cluster, Outcome, Plan, Role
from worldsize.errors import WorldsizeError
from worldsize.launch import agents
from worldsize.launch.agents import Follower, Lead
from worldsize.launch.node import NodeLauncher
from worldsize.net.agent_connection import HeartbeatSender
from worldsize.world.environments import Node

HERE = "127.0.0.1"


class Announced:
    """A connection to a first host that announces an attempt and then disappears."""

    def __init__(self) -> None:
        self.messages: list[dict[str, int]] = [{"attempt": 2, "port": 1}]
        self.sent: list[dict[str, Any]] = []

    def receive(self) -> dict[str, int]:
        if not self.messages:
            raise ConnectionResetError
        return self.messages.pop()

    def send(self, **message: Any) -> None:
        self.sent.append(message)


class Waits:
    """A gang that ends when aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.abort = self.aborted.set

    def wait(self) -> Outcome:
        return Outcome("failed", 1) if self.aborted.wait(120.0) else Outcome("completed", 0)


def test_an_attempt_that_begins_when_its_first_host_is_gone_is_called_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang, launcher = Waits(), Lead()

    class Later(HeartbeatSender):  # type: ignore[misc]
        """Lets the attempt begin only after the loss of the first host has been noticed."""

        def __enter__(self) -> None:
            for thread in threading.enumerate():
                if thread.name == "listen":
                    thread.join(120.0)

    monkeypatch.setattr(agents, "HeartbeatSender", Later)
    monkeypatch.setattr(NodeLauncher, "start_node", lambda *_: gang)
    plan = Plan(tmp_path, Cluster("ssh", nodes=2, processes=2, device="cpu", backend="gloo"), {"worker": Role(2)}, {})
    with pytest.raises(WorldsizeError, match="did not respond"):
        Follower(launcher, plan, Node(1, 2, HERE), Announced()).follow_leader()  # type: ignore[arg-type]
    assert gang.aborted.is_set()


def test_a_first_host_that_only_slept_is_not_told_that_the_attempt_has_ended(tmp_path: Path) -> None:
    """Otherwise it would wait for the processes of this host instead of noticing its own loss."""
    roles = {"worker": Role(2, restart="heal")}
    plan = Plan(tmp_path, Cluster("ssh", nodes=2, processes=2, device="cpu", backend="gloo"), roles, {}, health=None)
    connection = Announced()
    with pytest.raises(WorldsizeError, match="did not respond"):
        Follower(Lead(), plan, Node(1, 2, HERE), connection).follow_leader()  # type: ignore[arg-type]
    assert not any("ended" in message for message in connection.sent)


@pytest.mark.parametrize("is_asked", [False, True])
def test_an_agent_knows_whether_it_was_asked_to_end_before_the_first_host_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_asked: bool
) -> None:
    """It has no time left then to find out whether the first host is alive."""

    def start(*_: object) -> None:
        if is_asked:
            os.kill(os.getpid(), signal.SIGTERM)
        raise OSError

    monkeypatch.setattr(agents, "start_process", start)
    roles = {"worker": Role(2, restart="heal")}
    plan = Plan(tmp_path, Cluster("slurm", nodes=2, processes=2, device="cpu", backend="gloo"), roles, {}, health=None)
    connection: Any = Announced()
    connection.messages.insert(0, {"rank": 1, "role": "worker", "role_rank": 1, "starts": 0})
    follower = Follower(Lead(), plan, Node(1, 2, HERE), connection)
    with pytest.raises(WorldsizeError, match="did not respond"):
        follower.follow_leader()
    assert follower.is_asked == is_asked
