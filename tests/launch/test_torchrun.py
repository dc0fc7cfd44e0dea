"""The commands printed for torchrun train when run as printed."""

from __future__ import annotations

import json
import re
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
        if line.startswith("Start these commands."):
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
