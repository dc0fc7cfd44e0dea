"""The cause of a failure is recorded, and shown by every command that shows the run."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.observe.run_folders import attempt, write_run
from worldsize.cli import logs, status
from worldsize.cli.watch import watch
from worldsize.core import Failure, Outcome
from worldsize.messages import last_error
from worldsize.observe.events import describe_event, is_event
from worldsize.observe.report.page import render_page
from worldsize.observe.watch import Watched, render_screen
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import open_record, refresh_run

FAILURE = {"role": "worker", "rank": 3, "host": "gpu-b", "step": 17, "cause": "ValueError: \x1b[31mno"}
LINE = "worker 3 on gpu-b failed at step 17: ValueError: \\x1b[31mno"
RAISED = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\nValueError: first\nsecond\n'


@pytest.fixture
def failed(tmp_path: Path) -> RunDirectory:
    """A run whose second attempt failed."""
    preempted = attempt(1, steps=[0, 5], reason="preempted")
    failed = attempt(2, steps=[5, 17], reason="failed", failure=FAILURE)
    return RunDirectory(write_run(tmp_path / "run", steps=17, attempts=[preempted, failed]))


@pytest.fixture
def unstarted(tmp_path: Path) -> RunDirectory:
    return RunDirectory(write_run(tmp_path / "run", steps=1, attempts=[]))


def test_status_and_logs_tell_why_a_run_failed(
    failed: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["worldsize status", str(failed.path)])
    status.main()
    assert capsys.readouterr().out.splitlines()[2] == f"  {LINE}"
    failed.get_log_file("worker", 0).parent.mkdir()
    failed.get_log_file("worker", 0).write_text("hello\n")
    monkeypatch.setattr(sys, "argv", ["worldsize logs", str(failed.path)])
    logs.main()
    assert capsys.readouterr().out.splitlines() == [f"attempt 2: {LINE}", "[worker 0] hello"]


def test_watch_and_report_tell_why_a_run_failed(failed: RunDirectory) -> None:
    out = io.StringIO()
    watch(failed, Console(file=out, width=160))
    assert out.getvalue().splitlines()[:3] == ["attempt 1: preempted", "attempt 2: failed", LINE]
    console = Console(file=io.StringIO(), width=160, force_terminal=True, record=True)
    console.print(render_screen(Watched(failed.path), refresh_run(failed).manifest, "failed"))
    assert "\x1b[31mworker 3 on gpu-b failed at step 17" in console.export_text(styles=True)
    text = render_page([failed.path])
    assert f'<p class="bad">{LINE}</p>' in text
    assert f"attempt 2 ended: failed after step 17 (exit code 1): {LINE}" in text


def test_a_failure_is_recorded_in_the_manifest_and_as_an_event(unstarted: RunDirectory) -> None:
    failure = Failure("server", 1, f"{RAISED}\nthe ranks' last collectives: ...", 1, step=4, host="gpu-b")
    with open_record(unstarted) as record:
        record.begin_attempt([], world_size=2)
        record.end_attempt(Outcome("failed", 1, failure))
    facts = {"role": "server", "rank": 1, "host": "gpu-b", "step": 4, "cause": "ValueError: first"}
    last = refresh_run(unstarted).attempts[-1]
    assert last["failure"] == facts
    (event,) = map(json.loads, unstarted.events.read_text().splitlines())
    assert event == {"event": "failure", "time": last["end_at"], "attempt": 1, **facts}
    assert is_event(event)
    assert describe_event(event) == "attempt 1: server 1 on gpu-b failed at step 4: ValueError: first"


def test_an_end_before_or_outside_of_an_attempt_is_a_failure_of_the_launching_process(unstarted: RunDirectory) -> None:
    with open_record(unstarted) as record:
        record.give_up("no attempt has begun")
        record.give_up("ConfigError: the hosts differ. Update them.", unstarted=4)
        record.begin_attempt([], world_size=4)
    host = os.uname().nodename
    killed = refresh_run(unstarted)
    events = [json.loads(line) for line in unstarted.events.read_text().splitlines()]
    assert [
        {"event": "failure", "time": each["end_at"], "attempt": each["number"], **each["failure"]}
        for each in killed.attempts
    ] == events
    assert [each["exit_reason"] for each in refresh_run(unstarted).attempts] == ["failed", "killed"]
    assert [each["failure"]["cause"] for each in refresh_run(unstarted).attempts] == [
        "ConfigError: the hosts differ. Update them.",
        "killed, or its host was lost",
    ]
    assert refresh_run(unstarted).failure == f"the launching process on {host} failed: killed, or its host was lost"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (RAISED, "ValueError: first"),
        (f"{RAISED}\nDuring handling of this:\n\n{RAISED.replace('first', 'last')}", "ValueError: last"),
        (f"did not respond at step 3.\n{RAISED}", "did not respond at step 3."),
        ("killed by SIGKILL", "killed by SIGKILL"),
        ("the disk is full.\nMake room.\n", "the disk is full."),
        ("\n", "no cause"),
    ],
)
def test_the_last_error_of_a_text_is_one_line(text: str, error: str) -> None:
    assert last_error(text) == error


def test_secret_values_in_an_error_are_not_recorded(unstarted: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "from-the-environment")
    given = {"WORLDSIZE_SECRETS": json.dumps([[["recipe", "url"], "from-the-configuration"]])}
    error = "KeyError: from-the-environment, from-the-configuration at https://me:key@store/?token=abc"
    with open_record(unstarted, given) as record:
        record.begin_attempt([], world_size=1)
        outcome = record.end_attempt(Outcome("failed", 1, Failure("worker", 0, error, 1)))
        record.give_up(error, unstarted=1)
    monkeypatch.setenv("WORLDSIZE_SECRETS", given["WORLDSIZE_SECRETS"])  # like a worker started by torchrun
    with open_record(unstarted) as record:
        record.give_up(error, unstarted=1)
        monkeypatch.delenv("WORLDSIZE_SECRETS")
        record.record_resume(record.manifest, config="", overrides="", secrets=given)
        record.give_up(error, unstarted=1)
    assert outcome.failure is not None
    assert outcome.failure.cause.startswith("KeyError: <redacted>, <redacted> at ")
    causes = [each["failure"]["cause"] for each in refresh_run(unstarted).attempts]
    assert causes == ["KeyError: <redacted>, <redacted> at https://store/?token=<redacted>"] * 4
    assert "from-the" not in unstarted.events.read_text()


def test_a_failure_is_not_noted_through_a_link(unstarted: RunDirectory, tmp_path: Path) -> None:
    with open_record(unstarted) as record:
        record.begin_attempt([], world_size=1)
    unstarted.events.symlink_to(tmp_path / "outside")
    assert refresh_run(unstarted).exit_reason == "killed"
    assert not (tmp_path / "outside").exists()
