"""The commands printed for torchrun train when run as printed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.heavy

DIGITS = ("recipe=digits", "steps=10", "reproducibility=elastic", "cluster.threads=1", "+cluster=torchrun")
HOSTS = ("cluster.nodes=2", "cluster.processes_per_node=2", "cluster.first=127.0.0.1")


def started(output: str, environment: dict[str, str], folder: Path) -> Path:
    """Run the printed commands, and return the run's folder."""
    commands = re.findall(r"# on node \d\n(.+)", output)
    nodes = [subprocess.Popen(["bash", "-c", command], cwd=folder, env=environment) for command in commands]
    assert [node.wait(240) for node in nodes] == [0] * len(commands)
    (result,) = folder.rglob("result.json")
    return result.parent


def with_worldsize(environment: dict[str, str], folder: Path, python: Path) -> dict[str, str]:
    """Return an environment where ``worldsize`` starts the warm Python, as torchrun's workers do."""
    worldsize = folder / "worldsize"
    worldsize.write_text(f'#!/bin/sh\nexec {python} -m worldsize "$@"\n')
    worldsize.chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{environment['PATH']}"
    return {**environment, "PATH": path, "PYTHON_EXEC": str(python)}


def test_the_printed_commands_train_to_the_bits_of_the_laptop(
    train: Any, tmp_path: Path, environment_without_wandb: dict[str, str], warm_python: Path
) -> None:
    environment = with_worldsize(environment_without_wandb, tmp_path, warm_python)
    for strategy in (("strategy=ddp",), ("strategy=parameter_server", "strategy.servers=2")):
        run = train(*DIGITS, *HOSTS, *strategy)
        assert run.code == 0, run.error
        folder = started(run.output, environment, run.folder)
        digest = json.loads((folder / "result.json").read_text())["state_digest"]
        assert digest == train(*DIGITS[:4], "cluster.processes=4").json("result.json")["state_digest"]
        (attempt,) = json.loads((folder / "run_manifest.json").read_text())["attempts"]
        assert attempt["exit_reason"] == "completed"


def test_the_first_rank_shows_progress_where_the_run_stopped_and_its_result(
    train: Any,
    begun: Any,
    command: Any,
    tmp_path: Path,
    environment_without_wandb: dict[str, str],
    warm_python: Path,
) -> None:
    environment = with_worldsize(environment_without_wandb, tmp_path, warm_python)
    slow = "faults=[{action: sleep, rank: null, step: null, seconds: 0.1, attempt: null}]"
    run = train(*DIGITS, "steps=100", "log_every=1", "cluster.processes=2", slow)
    assert run.code == 0, run.error
    assert "start the run with:" in run.output
    assert "follow the logs with" not in run.output
    (printed,) = re.findall(r"# on node \d\n(.+)", run.output)

    def start() -> subprocess.Popen[str]:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(["bash", "-c", printed], env=environment, start_new_session=True, **pipes)

    torchrun = start()
    begun(run.folder)
    os.killpg(torchrun.pid, signal.SIGINT)  # like Ctrl-C
    output, error = torchrun.communicate(timeout=240)
    (checkpoint,) = (run.folder / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step_"))
    assert output.count("step 1/100 ") == 1
    assert error.count(f"stopped and saved at step {step}; run the same command again to resume") == 1

    shown = command("logs", str(run.folder), cwd=tmp_path, environment=environment)
    assert shown.returncode == 2
    assert "no log files in" in shown.stderr
    assert "torchrun" in shown.stderr
    resumed = command("resume", str(run.folder), cwd=tmp_path, environment=environment)
    assert f"resume the run with:\n# on node 0\n{printed}" in resumed.stdout, resumed.stderr

    output, error = start().communicate(timeout=240)
    accuracy = json.loads((run.folder / "result.json").read_text())["metrics"]["accuracy"]
    assert output.count("step 100/100 ") == output.count(f"test accuracy  {accuracy:.4f}\n") == 1, error
    assert "step 1/100 " not in output


def test_doctor_shows_what_the_printed_commands_find(
    tmp_path: Path, environment_without_wandb: dict[str, str], warm_python: Path
) -> None:
    environment = with_worldsize(environment_without_wandb, tmp_path, warm_python)
    report, links = tmp_path / "report.json", "cluster.links.network={bandwidth: 1e6, latency: 1e-4}"
    doctor = subprocess.Popen(
        [
            "worldsize",
            "doctor",
            "--patience=100",
            "--json",
            str(report),
            "+cluster=torchrun",
            *HOSTS,
            *DIGITS[:1],
            links,
        ],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert doctor.stderr is not None
    shown = []
    for line in doctor.stderr:
        shown.append(line)
        if line.startswith("Run these commands."):
            break
    commands = re.findall(r"# on node \d\n(.+)", "".join(shown))
    assert len(commands) == 2, shown
    nodes = [subprocess.Popen(["bash", "-c", command], cwd=tmp_path, env=environment) for command in commands]
    assert [node.wait(200) for node in nodes] == [0, 0]
    output, _ = doctor.communicate(timeout=60)
    assert doctor.returncode == 0, output
    checks = json.loads(report.read_text())["checks"]
    assert {check["check"] for check in checks} >= {"answers", "all-reduce", "transport", "network link", "clock"}
    assert "4 ranks agree" in output
    assert not list((tmp_path / "runs" / "doctor").iterdir())
