"""A run outlives its terminal: one that hangs up, is narrow, or is a file or pipe that no longer accepts output."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.runs import Run
from tests.support.small_disk import mounted
from worldsize.errors import ConfigError
from worldsize.launch import interruption
from worldsize.launch import members as module
from worldsize.world import scratch

REPOSITORY = Path(__file__).parents[2]
WORDS = ("recipe=digits", "cluster.processes=2", "strategy=ddp", "cluster.threads=1", "logger=none", "log_every=1")
SLOW = "faults=[{action: sleep, seconds: 0.05, attempt: null}]"
NARROW = struct.pack("HHHH", 24, 20, 0, 0)


class Terminal:
    """A terminal of 20 columns, and a run in its foreground."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, NARROW)
        begin = partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0)  # its signals reach this session
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=begin,
        )
        os.close(slave)
        self.shown = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def hang_up(self) -> None:
        os.kill(self.process.pid, signal.SIGHUP)  # like a shell; the kernel also sends it to the foreground
        os.close(self.master)

    def _read(self) -> None:
        with suppress(OSError):
            while data := os.read(self.master, 1024):
                self.shown += data


@pytest.fixture
def terminal(tmp_path: Path, environment_without_wandb: dict[str, str]) -> Iterator[Any]:
    started: list[Terminal] = []

    def start(*words: str, before: tuple[str, ...] = (), **variables: str) -> Terminal:
        environment = {**environment_without_wandb, "TERM": "xterm", **variables}
        environment.pop("COLUMNS", None)
        program = [*before, sys.executable, str(REPOSITORY / "train.py"), *WORDS, *words]
        started.append(Terminal(program, tmp_path, environment))
        return started[0]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def last_attempt(folder: Path) -> dict[str, Any]:
    attempt: dict[str, Any] = json.loads((folder / "run_manifest.json").read_text())["attempts"][-1]
    return attempt


@pytest.mark.heavy
def test_a_run_whose_terminal_hangs_up_saves(terminal: Any, begun: Callable[..., Path], tmp_path: Path) -> None:
    running = terminal("steps=2000", SLOW)
    folder = begun(tmp_path)
    running.hang_up()
    assert running.process.wait(120) == 75
    assert last_attempt(folder)["exit_reason"] == "preempted"
    assert list((folder / "checkpoints").glob("step_*/COMPLETE"))


@pytest.mark.heavy
def test_a_run_saves_if_a_worker_alone_gets_the_signal(
    terminal: Any, begun: Callable[..., Path], tmp_path: Path
) -> None:
    running = terminal("steps=2000", SLOW)
    begun(tmp_path)
    pid = running.process.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(child), signal.SIGHUP)
    assert running.process.wait(120) == 75


@pytest.mark.heavy
def test_under_nohup_a_run_whose_terminal_hangs_up_trains_on(
    terminal: Any, begun: Callable[..., Path], tmp_path: Path
) -> None:
    running = terminal("steps=40", SLOW, before=("nohup",))
    folder = begun(tmp_path)
    running.hang_up()
    assert running.process.wait(120) == 0
    assert last_attempt(folder)["exit_reason"] == "completed"


@pytest.mark.heavy
def test_a_narrow_terminal_without_unicode_shows_a_run(terminal: Any, tmp_path: Path) -> None:
    running = terminal("steps=5", PYTHONIOENCODING="ascii")
    assert running.process.wait(120) == 0, running.shown.decode()
    assert b"Traceback" not in running.shown
    assert b"state" in running.shown


@pytest.mark.parametrize("output", ["/dev/full", "a closed pipe"])
def test_output_that_takes_nothing_does_not_end_a_run(
    output: str, tmp_path: Path, environment_without_wandb: dict[str, str], warm_python: Path
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = [str(warm_python), str(REPOSITORY / "train.py"), *WORDS, "steps=5", "run.name=a"]
    with os.fdopen(writing, "wb") if output == "a closed pipe" else Path(output).open("wb") as file:
        done = subprocess.run(
            program, stdout=file, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment_without_wandb
        )
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: failed to write to stdout (")
    assert last_attempt(tmp_path / "runs" / "digits" / "a")["exit_reason"] == "completed"


def test_one_request_to_end_may_come_as_several_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(interruption, "time", SimpleNamespace(monotonic=lambda: now))
    with interruption.Signals() as signals:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            signal.raise_signal(number)
        assert signals.seen == [signal.SIGTERM]  # systemd sends SIGHUP as well; timeout sends each signal twice
        now = 1.0
        signal.raise_signal(signal.SIGTERM)
        assert signals.seen == [signal.SIGTERM] * 2


def test_sockets_are_elsewhere_than_in_a_folder_with_a_long_name(
    train: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("t" * 70)
    long.mkdir()
    run = train("recipe=digits", "cluster.processes=2", "strategy=parameter_server", "steps=2", TMPDIR=str(long))
    assert run.code == 0, run.error
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"^TMPDIR=.*t is too long for Unix socket paths\. Set a shorter path\.$"):
        scratch.socket_folder()


def test_a_full_folder_for_temporary_files_is_blamed_itself(train: Callable[..., Run], tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "32k") as small:
        run = train("recipe=digits", "cluster.processes=1", "steps=2", TMPDIR=str(small))
        assert (run.code, run.folder) == (2, None)
        assert run.error == f"the temporary folder {small} is full. Set TMPDIR to a folder with free space.\n"


@pytest.mark.parametrize("chunk", [1, 2, 1 << 20])
def test_lines_of_an_earlier_attempt_are_counted_as_python_splits_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    log, text = tmp_path / "log", b"a\nb\r\n10 %\r20 %\r\r\n\xff\xc3\xa9\n\ncut off"
    log.write_bytes(text)
    for start in range(len(text) + 1):
        lines = io.StringIO(text[:start].decode(errors="replace"), newline=None).readlines()
        assert module._lines_before(start, log) == sum(line.endswith("\n") for line in lines)
