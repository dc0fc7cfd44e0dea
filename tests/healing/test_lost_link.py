"""If two hosts lose their connection, one of them decides how the run continues, and the other obeys."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from worldsize.core import Cluster, Plan, Role
from worldsize.errors import FirstHostLostError, WorldsizeError
from worldsize.healing import lost_link
from worldsize.healing.lost_link import LossPolicy, claim_decision, come_back, is_left_behind, is_over
from worldsize.launch.remote import RemoteHosts
from worldsize.net.agent_connection import AgentConnection, Mailbox, RemoteAgent
from worldsize.net.handshake import MessageSeal
from worldsize.record.run_directory import RunDirectory, run_lock

PATIENCE = 0.2  # seconds a host waits for a message from the first
_open: list[AgentConnection] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the connections of a test at its end."""
    yield
    while _open:
        _open.pop().close()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "logs").mkdir()
    return RunDirectory(tmp_path)


def connected(node: int) -> tuple[AgentConnection, AgentConnection]:
    """Connect the first host with a second; return both ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    keys = {"one": b"%032d" % node, "other": b"%032d" % -node}
    first = AgentConnection(ours, MessageSeal(sending=keys["one"], receiving=keys["other"]), 10.0)
    other = AgentConnection(theirs, MessageSeal(sending=keys["other"], receiving=keys["one"]), 10.0)
    _open.extend((first, other))
    return first, other


class First:
    """A first host's agent with ``count`` others; ``others`` are their ends of the connections."""

    def __init__(self, run: RunDirectory, count: int, policy: LossPolicy, min_processes: int | None = None) -> None:
        pairs = {node: connected(node) for node in range(1, count + 1)}
        self.others = {node: other for node, (_, other) in pairs.items()}
        cluster = Cluster("slurm", nodes=count + 1, processes=count + 1, device="cpu", backend="gloo")
        role = Role(count + 1, restart="heal", min_processes=min_processes)
        self._plan, self._policy = Plan(run.path, cluster, {"worker": role}, {}), policy
        self._agents = [RemoteAgent(node, f"h{node + 1}", first) for node, (first, _) in pairs.items()]
        self.hosts = self.attempt()

    def attempt(self) -> RemoteHosts:
        """Return the other hosts in a new attempt."""
        return RemoteHosts(self._agents, self._plan, 1, self._plan.run_dir, 10.0, None, self._policy)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Notice lost hosts inside the context; at its end all are lost, and the attempt is over."""
        self.hosts.start_listeners()
        yield
        for other in self.others.values():
            other.close()
        self.hosts.end_attempts()


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Mailbox[int]:
    """The signals that the first host sends itself to exit."""
    signals: Mailbox[int] = Mailbox()
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.put(number) if pid == os.getpid() else None)
    return signals


def eventually(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def shared(patience: float = PATIENCE) -> LossPolicy:
    return LossPolicy(is_shared=True, patience=patience)


def test_one_of_two_hosts_decides_even_if_both_do_at_the_same_time(run: RunDirectory) -> None:
    for number in range(50):
        file, both, won = run.get_lost_link_file(str(number)), threading.Barrier(2), list[bool]()

        def race(file: Path = file, both: threading.Barrier = both, won: list[bool] = won) -> None:
            both.wait()
            won.append(claim_decision(file))

        threads = [threading.Thread(target=race) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won) == [False, True]


def test_both_ends_of_a_connection_know_it_by_the_same_name_and_no_other() -> None:
    names = [(first.name, other.name) for first, other in map(connected, (1, 2))]
    assert [first for first, _ in names] == [other for _, other in names]
    assert len({first for first, _ in names}) == 2


def test_a_host_that_alone_loses_the_first_learns_that_it_goes_on(run: RunDirectory, killed: Mailbox[int]) -> None:
    first = First(run, 2, shared(30.0))
    with first.listening():
        first.others[1].close()
        assert is_left_behind(first.others[1], run, 30.0)
        assert not run.get_lost_link_file(first.others[2].name).exists()
    assert not killed.arrival.poll()


def test_a_host_that_hears_nothing_of_a_dead_first_one_takes_the_run_over(run: RunDirectory) -> None:
    _, other = connected(1)
    begun = time.monotonic()
    assert not is_left_behind(other, run, PATIENCE)
    assert time.monotonic() - begun > 1.5 * PATIENCE


def test_a_first_host_that_slept_ends_if_another_has_taken_the_run_over(
    run: RunDirectory, killed: Mailbox[int]
) -> None:
    """The scheduler has not noticed yet: it is queried between the decision and the command."""
    first = First(run, 2, shared())
    assert not is_left_behind(first.others[1], run, PATIENCE)
    with first.listening():
        first.others[1].close()
        assert killed.get() == signal.SIGKILL


def test_a_host_that_was_lost_before_an_attempt_is_not_decided_about_again(
    run: RunDirectory, killed: Mailbox[int]
) -> None:
    first = First(run, 2, shared())
    with first.listening():
        first.others[1].close()
        eventually(lambda: first.hosts._hosts[1].is_lost)
    again = first.attempt()
    again.start_listeners()
    again.end_attempts()
    assert all(host.is_lost for host in again._hosts.values())
    assert not killed.arrival.poll()


def test_a_host_that_was_lost_long_ago_is_none_of_several_that_are_lost_at_once(run: RunDirectory) -> None:
    """A first host with one other host left does not treat itself as cut off when it loses that link, too."""
    first = First(run, 2, shared(30.0))
    hosts = first.hosts._hosts
    with first.listening():
        first.others[2].close()
        eventually(lambda: hosts[2].is_lost)
        hosts[2].lost_at -= 100
        first.others[1].close()
        eventually(lambda: hosts[1].is_lost)
        assert run.get_lost_link_file(first.others[1].name).exists()


def test_a_decision_about_another_connection_is_none_about_this(run: RunDirectory) -> None:
    """For example about an earlier attempt's, or one between the first host and a third."""
    (earlier, _), (_, other) = connected(1), connected(2)
    assert claim_decision(run.get_lost_link_file(earlier.name))
    assert not is_left_behind(other, run, PATIENCE)


def test_a_view_of_the_folder_that_is_old_does_not_mislead(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may briefly report that a file is missing, but does not create it a second time."""
    first, other = connected(1)
    assert claim_decision(run.get_lost_link_file(first.name))
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert is_left_behind(other, run, PATIENCE)


def test_several_hosts_that_lose_the_first_at_once_take_over_from_one_that_is_cut_off_itself(
    run: RunDirectory, killed: Mailbox[int]
) -> None:
    first = First(run, 2, shared(60.0))
    with first.listening():
        for other in first.others.values():
            other.close()
        assert not all([is_left_behind(other, run, PATIENCE) for other in first.others.values()])
        assert killed.get() == signal.SIGKILL


def test_a_first_host_whose_others_are_all_dead_goes_on_after_a_while(run: RunDirectory, killed: Mailbox[int]) -> None:
    first = First(run, 2, shared())
    with first.listening():
        for other in first.others.values():
            other.close()
        eventually(lambda: all(run.get_lost_link_file(other.name).exists() for other in first.others.values()))
    assert not killed.arrival.poll()


@pytest.mark.parametrize(("least", "goes_on"), [(2, True), (3, False)])
def test_a_run_that_could_not_go_on_without_a_host_is_left_to_it(
    run: RunDirectory, killed: Mailbox[int], least: int, *, goes_on: bool
) -> None:
    first = First(run, 2, shared(60.0), min_processes=least)
    with first.listening():
        first.others[1].close()
        assert is_left_behind(first.others[1], run, 60.0 if goes_on else PATIENCE) == goes_on
        first.others[2].close()
        assert not is_left_behind(first.others[2], run, PATIENCE)


def test_a_host_without_a_run_folder_to_share_decides_nothing(run: RunDirectory) -> None:
    first = First(run, 1, LossPolicy())
    with first.listening():
        first.others[1].close()
        eventually(lambda: first.hosts._hosts[1].is_lost)
    assert not [*(run.path / "logs").iterdir()]


def test_a_folder_in_which_no_host_can_decide_leaves_the_run_to_the_scheduler(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Path) -> bool:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(lost_link, "claim_decision", full)
    assert not is_left_behind(connected(1)[1], run, PATIENCE)


def test_a_run_that_was_deleted_is_left_to_the_scheduler(run: RunDirectory) -> None:
    (run.path / "logs").rmdir()
    assert not is_left_behind(connected(1)[1], run, PATIENCE)


def unreachable() -> AgentConnection:
    raise WorldsizeError("the first node does not answer")


def test_a_run_is_over_once_nobody_holds_it_and_it_says_how_it_ended(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {"completed": True, "failed": True, "running": False, "killed": False}
    for said, is_end in ends.items():
        reason(monkeypatch, said)
        assert is_over(run) == is_end
    reason(monkeypatch, "completed")
    monkeypatch.setattr(lost_link, "is_locked", lambda _: True)
    assert not is_over(run)


def reason(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    view: Any = type("View", (), {"exit_reason": said})
    monkeypatch.setattr(lost_link, "read_run", lambda _: view)


def test_a_host_takes_part_again_once_it_reaches_the_first(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    reason(monkeypatch, "running")
    (_, other), tries = connected(1), iter(range(3))
    assert come_back(run, lambda: other if next(tries) == 2 else unreachable(), PATIENCE * 100) is other


@pytest.mark.parametrize("said", ["completed", "failed", "preempted"])
def test_a_host_that_is_left_behind_ends_with_the_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    reason(monkeypatch, said)
    assert come_back(run, unreachable, 30.0) is None


def test_a_host_that_is_left_behind_takes_over_if_the_first_dies_after_all(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason(monkeypatch, "running")
    looks = iter([True, True])
    monkeypatch.setattr(lost_link, "is_locked", lambda _: next(looks, False))
    with pytest.raises(FirstHostLostError):
        come_back(run, unreachable, PATIENCE)


def test_a_lock_that_is_seen_on_the_first_host_alone_does_not_tell_that_it_died(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason(monkeypatch, "running")
    (_, other), tries = connected(1), iter(range(5))
    assert come_back(run, lambda: other if next(tries) == 4 else unreachable(), PATIENCE) is other


def test_a_host_that_is_left_behind_waits_while_the_first_holds_the_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason(monkeypatch, "running")
    begun, held = threading.Event(), time.monotonic() + 4 * PATIENCE

    def join() -> AgentConnection:
        begun.set()
        if time.monotonic() < held:
            raise WorldsizeError("the first node does not answer")
        return connected(1)[1]

    with run_lock(run.path):
        assert come_back(run, join, PATIENCE) is not None
    assert begun.is_set()
