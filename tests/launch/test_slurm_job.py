"""The nodes of a job ask Slurm whether the job is still their own, and whether it must be queued again."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from worldsize.core import Cluster, Plan, Role
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


@pytest.mark.parametrize(
    ("code", "said", "is_queued"),
    [
        (76, "JobState=RUNNING Restarts=0 ExitCode=0:0", True),
        (76, "JobState=COMPLETING Restarts=0 ExitCode=0:9", True),  # Slurm has killed the script with its node
        (75, "JobState=COMPLETING Restarts=0 ExitCode=0:9", True),
        (143, "JobState=COMPLETING Restarts=0 ExitCode=0:9", True),  # this agent was not ready for a signal yet
        (143, "JobState=RUNNING Restarts=0 ExitCode=0:0", False),
        (75, "JobState=RUNNING Restarts=0 ExitCode=0:0", False),  # the script itself queues it again
        (76, "JobState=COMPLETING Restarts=0 ExitCode=0:0", False),  # it is cancelled
        (76, "JobState=CANCELLED Restarts=0 ExitCode=0:15", False),
        (0, "JobState=COMPLETING Restarts=0 ExitCode=0:9", False),
    ],
)
def test_another_node_queues_the_job_again_if_the_first_is_lost(
    tmp_path: Path, code: int, said: str, *, is_queued: bool
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f'#!/bin/sh\n[ "$1" = requeue ] && exec touch {tmp_path}/queued_$2\necho "JobId=7 {said} NumNodes=2"\n'
    )
    scontrol.chmod(0o755)
    plan = Plan(tmp_path, Cluster("slurm", 2, 2, "cpu", "gloo"), {"worker": Role(2, restart="heal")}, {})
    script = Slurm().describe(plan).partition("bash -c \\\n  '")[2].partition("' \\\n")[0]
    variables = {"SLURM_NODEID": "1", "SLURM_JOB_ID": "7", "WORLDSIZE_CODE": f"{tmp_path}/code"}
    environment = {**variables, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script, "bash", "sh", "-c", f"exit {code}"], env=environment, check=False)
    assert done.returncode == code
    assert (tmp_path / "queued_7").exists() == is_queued
