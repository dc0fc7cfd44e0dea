"""``worldsize status`` asks a scheduler about runs, and copes with one that does not answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.observe.run_folders import write_run
from worldsize.cli import status
from worldsize.core import BatchLauncher, Plan
from worldsize.errors import WorldsizeError
from worldsize.launch.scheduled import Scheduler, state_of
from worldsize.record.run_directory import RunDirectory
from worldsize.record.run_record import RunView


class Asked(BatchLauncher):
    """A launcher that gives its answers in turn, and counts how often it is asked."""

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
        (None, WorldsizeError("timed out"), "submitted; the scheduler does not answer"),
        (None, None, "its job is over, and no attempt is noted here"),
        ("running", WorldsizeError("timed out"), "running; the scheduler does not answer"),
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
    assert [state_of(view, scheduler) for _ in range(3)] == [expected] * 3, "asked once, answered three times"


def test_a_report_that_could_not_be_written_is_refused_before_any_host_is_examined(
    tmp_path: Path, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    words = ("doctor", "recipe=digits", "--json", str(tmp_path / "nowhere" / "report.json"))
    done = command(*words, cwd=tmp_path, environment=environment_without_wandb)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be written: its folder is missing or read-only" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_processes_of_spare_nodes_are_shown_beside_those_that_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"name": "ssh", "nodes": 2, "processes": 4, "processes_per_node": 2, "backend": "gloo", "links": {}}
    run = write_run(tmp_path / "run", steps=1, cluster={**shape, "spare_nodes": 3})
    monkeypatch.setattr(sys, "argv", ["worldsize status", str(run)])
    status.main()
    assert "  4 + 6  " in capsys.readouterr().out
