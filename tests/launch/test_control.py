"""The control socket answers requests, and a client without one cannot hold up the run."""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from worldsize.core import Block, Role
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.launch import control as controls
from worldsize.launch import node
from worldsize.launch.control import Control, JobState, ListedProcess, send_request
from worldsize.launch.gang import Gang, Graces
from worldsize.launch.members import LostHostError, Member, Members
from worldsize.launch.membership_server import Resize
from worldsize.record.run_directory import RunDirectory
from worldsize.world.processes import ready_to_fork
from worldsize.world.scratch import private_folder

HOSTILE = {
    "deep": b"[" * 4000 + b"\n",
    "deep objects": b'{"a":' * 800 + b"\n",
    "no newline": b'{"do": "list"}',
    "a megabyte": b"x" * (1 << 20),
    "a megabyte and a newline": b"x" * (1 << 20) + b"\n",
    "binary": bytes(range(256)) + b"\n",
    "NaN": b'{"do": "add", "count": NaN}\n',
    "a long number": b'{"do": "add", "count": 1' + b"0" * 4000 + b"}\n",
    "no request": b'["do"]\n',
    "less than nothing": b'{"do": "add", "count": -1}\n',
    "more than a host starts meanwhile": b'{"do": "add", "count": 65}\n',
    "nothing": b"",
}


class Job:
    """A job whose number of processes is changed by requests."""

    def __init__(self) -> None:
        self.processes = 2

    def add_processes(self, count: int) -> list[str]:
        self.processes += count
        return [f"worker {count}"]

    def remove_processes(self, count: int) -> list[str]:
        raise ConfigError(f"{count} must stay")

    def resize_gang(self, processes: int) -> list[str]:
        changed, self.processes = abs(processes - self.processes), processes
        return ["worker"] * changed

    def describe_job(self) -> JobState:
        return {"step": 7, "processes": self.processes}

    def list_processes(self) -> list[ListedProcess]:
        return [{"role": "worker", "rank": rank, "pid": 100_000, "step": 100_000} for rank in range(self.processes)]


@pytest.fixture
def sign(tmp_path: Path) -> Iterator[Path]:
    """The file that names a control socket, served until the test ends."""
    ended, folder = socket.socketpair(), private_folder()
    control = Control(folder / "control", tmp_path / "control", Job())

    def serve() -> None:
        while True:
            sockets, seconds = control.collect_sockets()
            ready = wait([ended[0], *sockets], seconds)
            if ended[0] in ready:
                return
            for each in sockets:
                if each in ready:
                    control.serve_socket(each)

    with control, ended[0], ended[1]:
        thread = threading.Thread(target=serve)
        thread.start()
        yield tmp_path / "control"
        ended[1].send(b"!")
        thread.join()


def sent(sign: Path, data: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(120.0)
    connection.connect(sign.read_text())
    with suppress(OSError):  # it may refuse before it has received everything
        connection.sendall(data)
    return connection


def answered(sign: Path, data: bytes) -> bytes:
    with sent(sign, data) as connection, suppress(ConnectionError):
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(4096)
    return b""


def test_requests_are_answered(sign: Path) -> None:
    assert [each["rank"] for each in send_request(sign, do="list")] == [0, 1]
    assert send_request(sign, do="add", count=2) == ["worker 2"]
    assert len(send_request(sign, do="list")) == 4
    with pytest.raises(ConfigError, match="1 must stay"):
        send_request(sign, do="remove", count=1)


def test_a_long_answer_comes_whole(sign: Path) -> None:
    for _ in range(30):
        send_request(sign, do="add", count=64)
    assert len(send_request(sign, do="list")) == 2 + 30 * 64


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_request_changes_nothing(sign: Path, kind: str) -> None:
    answer = answered(sign, HOSTILE[kind])
    assert b"answer" not in answer
    assert not answer or "error" in json.loads(answer)
    assert len(send_request(sign, do="list")) == 2


def test_a_request_that_comes_in_pieces_is_answered(sign: Path) -> None:
    with sent(sign, b'{"do": ') as connection:
        assert len(send_request(sign, do="list")) == 2, "another one does not wait for it"
        connection.sendall(b'"list"}\n')
        assert [each["rank"] for each in json.loads(connection.recv(4096))["answer"]] == [0, 1]


def test_many_that_say_nothing_do_not_hold_up_one_that_asks(sign: Path) -> None:
    silent = [sent(sign, b"{") for _ in range(40)]
    assert len(send_request(sign, do="list")) == 2
    assert silent[0].recv(1) == b"", "the oldest one gives way"
    for each in silent:
        each.close()


def test_a_request_must_be_complete_in_time(sign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "_PATIENCE", 0.2)
    with sent(sign, b"{") as slow:
        assert slow.recv(1) == b""


@pytest.mark.parametrize("answer", [b"[1]\n", b"[" * 100_000 + b"\n", b"\xff\n", b"{}\n", b"x" * (2 << 20), b""])
def test_whoever_asks_believes_no_stranger(tmp_path: Path, answer: bytes) -> None:
    path = private_folder() / "socket"
    (tmp_path / "control").write_text(str(path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConfigError):
            send_request(tmp_path / "control", do="list")
        thread.join()


def member(tmp_path: Path, end: Any) -> Callable[[str, int, int], Member]:
    def start(role: str, rank: int, starts: int) -> Member:
        process = multiprocessing.get_context("fork").Process(target=end.wait)
        process.start()
        return Member(role, rank, process, tmp_path / "log", tmp_path / "error", tmp_path / "beat")

    return start


def test_a_gang_is_not_held_up_by_what_comes_to_its_control_socket(tmp_path: Path) -> None:
    end = multiprocessing.get_context("fork").Event()
    members = Members({"worker": Role(1)}, member(tmp_path, end), max_restarts=0, terminal=None)
    members.add_process("worker", 0)
    run, graces = RunDirectory(tmp_path), Graces(1.0, 1.0, 1.0)
    gang = Gang(run, members, private_folder(), graces, leads=True)
    listed: list[Any] = []

    def ask() -> None:
        try:
            while not run.control.exists():
                threading.Event().wait(0.01)
            open_ones = [sent(run.control, data) for data in HOSTILE.values() for _ in range(3)]
            listed.extend(send_request(run.control, do="list"))
            for each in open_ones:
                each.close()
        finally:
            end.set()

    thread = threading.Thread(target=ask)
    thread.start()
    outcome = gang.wait()
    thread.join()
    assert outcome.exit_reason == "completed"
    assert [each["role"] for each in listed] == ["worker"]


def test_a_host_that_does_not_lead_opens_no_control_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = multiprocessing.get_context("fork").Event()
    end.set()
    monkeypatch.setattr("worldsize.launch.gang.Control", None)
    members = Members({"worker": Role(1)}, member(tmp_path, end), max_restarts=0, terminal=None)
    members.add_process("worker", 0)
    run, graces = RunDirectory(tmp_path), Graces(1.0, 1.0, 1.0)
    gang = Gang(run, members, private_folder(), graces, leads=False)
    assert gang.wait().exit_reason == "completed"


# ---------------------------------------------------------------- a host without capacity for more processes


def forked(tmp_path: Path, failing: set[tuple[int, int]]) -> Callable[[str, int, int], Member]:
    """Start processes that fail at once; the ``failing`` ones, by rank and earlier starts, cannot even be started."""

    def start(role: str, rank: int, starts: int) -> Member:
        if (rank, starts) in failing:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        process = multiprocessing.get_context("fork").Process(target=os._exit, args=(1,))
        process.start()
        return Member(role, rank, process, tmp_path / "log", tmp_path / "error", tmp_path / "beat")

    return start


def test_a_request_for_more_than_the_host_can_start_does_not_end_the_run(tmp_path: Path) -> None:
    roles = {"worker": Role(2, restart="individual", min_processes=1)}
    members = Members(roles, forked(tmp_path, {(4, 0)}), max_restarts=0, terminal=None)
    for rank in range(2):
        members.add_process("worker", rank)
    with pytest.raises(WorldsizeError, match=r"failed to start worker 4: .*unavailable. Started: worker 2, worker 3"):
        Resize(members).add_processes(5)
    assert [each.rank for each in members.current] == [0, 1, 2, 3]
    members.kill_processes()


def test_processes_that_would_be_on_a_lost_host_are_left_out(tmp_path: Path) -> None:
    start = forked(tmp_path, set())

    def start_on_two_hosts(role: str, rank: int, starts: int) -> Member:
        if rank % 2:
            raise LostHostError("the host h2 is lost")
        return start(role, rank, starts)

    members = Members({"worker": Role(2, restart="individual")}, start_on_two_hosts, max_restarts=0, terminal=None)
    members.add_process("worker", 0)
    assert Resize(members).add_processes(2) == ["worker 2", "worker 4"]
    members.kill_processes()


@pytest.mark.parametrize(("must_live", "goes_on"), [(0, True), (1, False)])
def test_a_process_that_cannot_be_started_again_is_a_failure_of_its_own(
    tmp_path: Path, must_live: int, goes_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    roles = {"server": Role(1), "worker": Role(1, restart="individual", min_processes=must_live)}
    members = Members(roles, forked(tmp_path, {(0, 1)}), max_restarts=1, terminal=None)
    members.add_process("worker", 0)
    (dead,) = members.current
    dead.process.join()
    members.note_end(dead)
    assert "failed to restart worker 0" in caplog.text
    assert members.must_end is not goes_on
    assert members.lost == ([dead] if goes_on else [])


@pytest.mark.parametrize(("together", "goes_on"), [(1, True), (2, False)])
def test_a_gang_ends_if_no_host_has_enough_processes_for_those_that_must_be_on_one(
    tmp_path: Path, together: int, goes_on: bool
) -> None:
    """Two hosts have two processes each; one has died on each host."""
    end = multiprocessing.get_context("fork").Event()
    roles = {"worker": Role(4, restart="heal", min_processes=2, blocks=(Block(2, together),))}
    start = member(tmp_path, end)
    members = Members(roles, start, max_restarts=0, terminal=None, node_of=lambda role, rank: rank // 2)
    for rank in range(4):
        members.add_process("worker", rank)
    for dead in [members.current[1], members.current[2]]:
        dead.process.kill()
        dead.process.join()
        members.note_end(dead)
    assert members.must_end is not goes_on
    members.kill_processes()


def test_a_fork_that_failed_leaves_signals_and_collection_as_they_were() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    gc.unfreeze()  # frozen by earlier tests
    with pytest.raises(OSError, match="no room"), ready_to_fork(), node._block_signals():
        raise OSError("no room")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    assert gc.get_freeze_count() == 0
