"""The launching machine lets a different host lead if the first is lost, and only then."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.observe.run_folders import attempt, write_run
from worldsize.core import ConfigError
from worldsize.launch.ssh import Ssh
from worldsize.launch.ssh_job import HostSuccession, Lineup, Revival, SshAgent, SshJob
from worldsize.record.run_directory import RunDirectory

HOSTS = Lineup(("a", "b", "c", "d"))
LOST = 255  # ssh's exit code


@pytest.fixture
def killed(tmp_path: Path) -> RunDirectory:
    """A run whose last attempt has not recorded an end."""
    return RunDirectory(write_run(tmp_path / "run", steps=1, attempts=[attempt(1, steps=(0, 1), reason="killed")]))


def succession(run: RunDirectory, answering: set[str], *, least: int = 2, most: int = 1) -> HostSuccession:
    return HostSuccession(run, lambda: answering, lambda hosts: hosts >= least, 0.0, 0.0, most)


def test_those_that_answer_come_first_and_the_lost_one_last() -> None:
    assert HOSTS.replace_first({"b", "d"}) == Lineup(("b", "d", "c", "a"), 2, "a")
    assert HOSTS.replace_first({"a", "b", "c", "d"}) == Lineup(("b", "c", "d", "a"), 0, "a")
    assert HOSTS.replace_first({"a", "c"}).hosts == ("c", "a", "b", "d")


def test_the_hosts_that_answer_are_those_that_ssh_reaches(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\ncase "$*" in *" b true") exit 255;; esac\n')
    ssh.chmod(0o755)
    assert Ssh(hosts=["a", "b", "c"], ssh=[str(ssh)]).answering() == {"a", "c"}


@pytest.mark.parametrize(("code", "is_refused"), [(0, False), (24, False), (23, True)])
def test_a_file_that_vanishes_while_the_code_is_copied_does_not_matter(
    code: int, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other errors do, such as an unreadable file."""
    rsync = tmp_path / "rsync"
    rsync.write_text(f"#!/bin/sh\nexit {code}\n")
    rsync.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ConfigError, match="failed to copy the code to a") if is_refused else nullcontext():
        Ssh(hosts=["a"], folder="/there")._copy_code("a")


def test_others_go_on_as_often_as_they_may(killed: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    often = succession(killed, {"b", "c", "d"}, most=2)
    second = often.choose_next_lineup(HOSTS, LOST, [])
    assert second is not None
    assert second == Lineup(("b", "c", "d", "a"), 1, "a")
    assert "restarting without a, on b, c, d (1 of 2)" in caplog.text
    third = often.choose_next_lineup(second, LOST, [])
    assert third is not None
    assert third == Lineup(("c", "d", "b", "a"), 1, "b")
    assert often.choose_next_lineup(third, LOST, []) is None
    assert "the first host, c, is lost after launcher.max_restarts=2 restarts" in caplog.text


def test_a_run_that_has_ended_or_that_too_few_could_go_on_with_does_not_begin_again(
    killed: RunDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert succession(killed, {"b", "c"}).choose_next_lineup(HOSTS, 1, []) is None
    done = RunDirectory(write_run(tmp_path / "done", steps=1))
    assert succession(done, {"b", "c"}).choose_next_lineup(HOSTS, LOST, []) is None
    assert not caplog.text
    assert succession(killed, {"b"}).choose_next_lineup(HOSTS, LOST, []) is None
    assert "too few hosts respond to continue without a (responding: b)" in caplog.text
    assert succession(killed, {"b", "c"}).choose_next_lineup(HOSTS, LOST, [signal.SIGTERM]) is None
    signals = list[int]()

    def answering() -> set[str]:
        signals.append(signal.SIGTERM)  # arrives while the hosts are queried
        return {*HOSTS.hosts}

    asked = HostSuccession(killed, answering, lambda hosts: hosts > 0, 0.0, 600.0, 1)
    assert asked.choose_next_lineup(HOSTS, LOST, signals) is None


@pytest.fixture
def echo() -> Iterator[SshAgent]:
    """An agent that echoes its input."""
    words = [sys.executable, "-S", "-c", "import sys; sys.stdout.write(sys.stdin.read())"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield SshAgent("a", process)


def test_the_first_host_is_told_to_end_if_it_hears_nothing_only_where_another_may_lead(
    killed: RunDirectory, echo: SshAgent
) -> None:
    never, once = succession(killed, set(), most=0), succession(killed, set(), most=1)
    never.silence, once.silence = 8.0, 9.0
    for _ in range(3):  # at once, then at intervals of at least an eighth
        never.send_heartbeat(echo)
        once.send_heartbeat(echo)
    echo.let_go()
    assert echo.process.stdout is not None
    assert [*map(json.loads, echo.process.stdout)] == [{"within": 4.5}]


def test_agents_that_wait_for_a_lost_first_host_are_let_go_at_once(killed: RunDirectory) -> None:
    """One that connects as the first host is lost would wait for it for ``cluster.timeout`` seconds."""

    def start(lineup: Lineup, node: int) -> SshAgent:
        words = ["sh", "-c", f"exit {LOST}"] if node == 0 else ["cat"]  # it ends with its input, like an agent
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        return SshAgent(lineup.hosts[node], process)

    begun = time.monotonic()
    job = SshJob(start, HOSTS, 600.0, Revival(killed), succession(killed, set(), most=0))
    assert job.wait().exit_code == LOST
    assert time.monotonic() - begun < 120
