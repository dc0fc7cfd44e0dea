"""The first node of a job asks Slurm whether the job is still its own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from worldsize.launch.slurm import Slurm


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with what scontrol prints; without it, scontrol fails."""
    program, answer = tmp_path / "scontrol", tmp_path / "answer"
    program.write_text(f'#!/bin/sh\n[ "$*" = "show job --oneliner 7" ] && exec /bin/cat {answer}\n')
    program.chmod(0o755)
    for name, value in {"PATH": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    return answer


@pytest.mark.parametrize(
    ("said", "is_current"),
    [
        ("JobId=7 JobName=worldsize JobState=RUNNING Restarts=1", True),
        ("JobId=7 JobName=worldsize JobState=COMPLETING Restarts=1", True),
        ("JobId=7 JobName=worldsize JobState=CANCELLED Restarts=1", True),  # it saves
        ("JobId=7 JobName=worldsize JobState=PENDING Restarts=1", False),
        ("JobId=7 JobName=worldsize JobState=RUNNING Restarts=2", False),
    ],
)
def test_a_job_that_was_queued_again_is_not_that_of_its_first_node(
    answers: Path, said: str, *, is_current: bool
) -> None:
    answers.write_text(said + "\n")
    assert Slurm().is_current() == is_current


def test_a_node_that_cannot_ask_slurm_does_not_go_on(answers: Path) -> None:
    begun = time.monotonic()
    assert not Slurm(node_timeout=0.5).is_current()
    assert time.monotonic() - begun > 0.5


def test_a_node_waits_no_longer_for_a_slurm_that_hangs(answers: Path) -> None:
    (answers.parent / "scontrol").write_text("#!/bin/sh\nexec /bin/sleep 20\n")
    begun = time.monotonic()
    assert not Slurm(node_timeout=0.5).is_current()
    assert time.monotonic() - begun < 10


def test_an_agent_that_was_started_by_hand_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert Slurm().is_current()
