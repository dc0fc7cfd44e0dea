"""The commands that are printed for torchrun train when they are started as printed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

DIGITS = ("recipe=digits", "steps=10", "reproducibility=elastic", "cluster.threads=1", "+cluster=torchrun")
HOSTS = ("cluster.nodes=2", "cluster.processes_per_node=2", "cluster.first=127.0.0.1")


def started(output: str, environment: dict[str, str], folder: Path) -> Path:
    """Run the printed commands, and return the run's folder."""
    commands = re.findall(r"# on node \d\n(.+)", output)
    nodes = [subprocess.Popen(["bash", "-c", command], cwd=folder, env=environment) for command in commands]
    assert [node.wait(240) for node in nodes] == [0] * len(commands)
    (result,) = folder.rglob("result.json")
    return result.parent


def test_the_printed_commands_train_to_the_bits_of_the_laptop(
    train: Any, tmp_path: Path, environment_without_wandb: dict[str, str], warm_python: Path
) -> None:
    worldsize = tmp_path / "worldsize"  # stands in for the installed command, and starts the warm Python
    worldsize.write_text(f'#!/bin/sh\nexec {warm_python} -m worldsize "$@"\n')
    worldsize.chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{environment_without_wandb['PATH']}"
    environment = {**environment_without_wandb, "PATH": path, "PYTHON_EXEC": str(warm_python)}  # for its workers
    for strategy in (("strategy=ddp",), ("strategy=parameter_server", "strategy.servers=2")):
        run = train(*DIGITS, *HOSTS, *strategy)
        assert run.code == 0, run.error
        folder = started(run.output, environment, run.folder)
        digest = json.loads((folder / "result.json").read_text())["state_digest"]
        assert digest == train(*DIGITS[:4], "cluster.processes=4").json("result.json")["state_digest"]
        (attempt,) = json.loads((folder / "run_manifest.json").read_text())["attempts"]
        assert attempt["exit_reason"] == "completed"
