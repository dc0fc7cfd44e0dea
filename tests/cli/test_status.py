"""``worldsize status`` queries a scheduler about runs, and copes with one that does not respond."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.observe.run_folders import write_run
from worldsize.cli import status
from worldsize.core import BatchLauncher, Plan
from worldsize.errors import WorldsizeError
from worldsize.launch.scheduled import Scheduler, describe_state
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import RunView


class Asked(BatchLauncher):
    """A launcher that returns scripted answers in turn and counts the queries."""

    def __init__(self, *answers: str | Exception | None) -> None:
        self.answers = list(answers)

    def submit(self, plan: Plan) -> str:
        raise NotImplementedError

    def cancel(self, job: str) -> None:
        raise NotImplementedError

    def describe(self, plan: Plan) -> str:
        raise NotImplementedError

    def state(self, job: str) -> str | None:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("reason", "answer", "expected"),
    [
        (None, "PENDING", "PENDING"),
        (None, WorldsizeError("timed out"), "submitted; the scheduler is not responding"),
        (None, None, "the job ended without a recorded attempt"),
        ("running", WorldsizeError("timed out"), "running; the scheduler is not responding"),
        ("running", "RUNNING", "RUNNING"),
        ("completed", "never asked", "completed"),
    ],
)
def test_a_run_has_not_ended_because_its_scheduler_does_not_answer(
    tmp_path: Path, reason: str | None, answer: Any, expected: str
) -> None:
    manifest = {"jobs": [{"id": "7"}], "attempts": [{"exit_reason": reason}] if reason else []}
    launcher = Asked(answer)
    view = RunView(RunDirectory(tmp_path), manifest)
    scheduler = Scheduler(view.directory, launcher)
    assert [describe_state(view, scheduler) for _ in range(3)] == [expected] * 3, "asked once, answered three times"


def test_a_report_that_could_not_be_written_is_refused_before_any_host_is_examined(
    tmp_path: Path, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    words = ("doctor", "recipe=digits", "--json", str(tmp_path / "nowhere" / "report.json"))
    done = command(*words, cwd=tmp_path, environment=environment_without_wandb)
    assert (done.returncode, done.stdout) == (2, "")
    assert "report.json: its folder is missing or read-only" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_processes_of_spare_nodes_are_shown_beside_those_that_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"name": "ssh", "nodes": 2, "processes": 4, "processes_per_node": 2, "backend": "gloo", "links": {}}
    run = write_run(tmp_path / "run", steps=1, cluster={**shape, "spare_nodes": 3})
    monkeypatch.setattr(sys, "argv", ["worldsize status", str(run)])
    status.main()
    assert "  4 + 6  " in capsys.readouterr().out


def test_the_newest_run_comes_first_with_its_metric_and_all_of_it_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    attempt = {"number": 1, "exit_reason": "completed", "exit_code": 0, "world_size": 4, "hosts": ["h"]}
    for name, start in (("old", 1_000_000_000), ("new", 1_000_100_000)):
        times = {"start_at": float(start), "end_at": start + 90.0, "start": "then", "end": "later"}
        results = {"exit_reason": "completed", "metrics": {"accuracy": 0.98765}}
        write_run(tmp_path / "runs" / "digits" / name, steps=1, attempts=[{**attempt, **times}], results=results)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["worldsize status"])
    status.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[-1] for row in rows] == ["runs/digits/new", "runs/digits/old"]
    assert head.split() == [*status._HEAD]
    assert all(word in rows[1] for word in ("completed  digits", "90 s", "2001-09-09 01:46", "accuracy 0.9877"))
    monkeypatch.setattr(sys, "argv", ["worldsize status", "--json"])
    status.main()
    new, _ = json.loads(capsys.readouterr().out)
    assert (new["run"], new["seconds"], new["started_at"]) == ("runs/digits/new", 90.0, 1_000_100_000.0)
    assert new["metrics"] == {"accuracy": 0.98765}
