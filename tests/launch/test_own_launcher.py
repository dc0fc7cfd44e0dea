"""A launcher of one's own: one file, one YAML, nothing changed elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LAUNCHER = '''
"""Starts every process as a program of its own."""

import os
import subprocess
import sys
from dataclasses import dataclass

from worldsize.core import Job, Launcher, Outcome
from worldsize.world.environments import Placement


@dataclass(frozen=True)
class Programs(Launcher):
    niceness: int = 0

    def launch(self, plan):
        store = f"file://{plan.run_dir}/meeting_{plan.attempt}"
        processes = []
        for rank in range(plan.world_size):
            place = Placement(rank, plan.world_size, rank, plan.world_size, store, plan.attempt)
            environment = {**os.environ, **plan.environment, **plan.secrets, **place.variables()}
            words = ["nice", "-n", str(self.niceness), sys.executable, "-m", "worldsize.worker", str(plan.run_dir)]
            processes.append(subprocess.Popen(words, env=environment))
        return Programmes(processes)

    def describe(self, plan):
        return f"{plan.world_size} programs"


@dataclass
class Programmes(Job):
    processes: list

    def wait(self):
        codes = {process.wait() for process in self.processes}
        return Outcome("completed", 0) if codes == {0} else Outcome("failed", 1)

    def cancel(self):
        for process in self.processes:
            process.terminate()
'''
CLUSTER = """
# @package _global_
cluster: {name: programs, processes: 2, device: cpu}
launcher: {_target_: plugins.programs.launcher.Programs, niceness: 3}
"""


def test_a_launcher_of_ones_own_is_one_file_and_one_yaml(train: Any, tmp_path: Path, warm_python: Path) -> None:
    plugin = tmp_path / "plugins" / "programs"
    (plugin / "conf" / "cluster").mkdir(parents=True)
    (plugin / "launcher.py").write_text(LAUNCHER)
    (plugin / "conf" / "cluster" / "programs.yaml").write_text(CLUSTER)
    options = ("recipe=digits", "steps=10", "reproducibility=elastic", "cluster.threads=1")
    run = train(*options, "+cluster=programs", "launcher.niceness=5", python=warm_python)
    assert run.code == 0, run.error
    alone = train(*options, "cluster.processes=2").json("result.json")
    assert run.json("result.json")["state_digest"] == alone["state_digest"]
    assert run.json("run_manifest.json")["attempts"][0]["exit_reason"] == "completed"
    assert "2 programs" in train(*options, "+cluster=programs", "launch=show").output
