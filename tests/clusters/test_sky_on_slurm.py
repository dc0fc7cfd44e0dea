"""SkyPilot itself, end to end: its Slurm cloud against a real Slurm. Slow: pytest -m slow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import slurm as real

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("sky_on_slurm.sh")
DIGITS = ("recipe=digits", "reproducibility=elastic", "cluster.threads=1", "log_every=1", "checkpoint.every=10")
PAUSE = "faults=[{action: sleep, seconds: 0.3, attempt: null}]"  # every step of rank 0


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[real.Slurm, list[str]]]:
    """A Slurm, and the command that runs sky against it."""
    if why := real.missing() or (None if os.geteuid() == 0 else "a mount namespace needs root"):
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("sky")
    uv = shutil.which("uv")
    assert uv is not None
    subprocess.run([uv, "venv", "-q", "--python", "3.11", str(folder / "venv")], check=True)
    package = ["skypilot[slurm,server]==0.14.1"]
    subprocess.run([uv, "pip", "install", "-q", "--python", f"{folder}/venv/bin/python", *package], check=True)
    with real.running(folder / "slurm", port=17_800) as slurm:
        environment = {**os.environ, **slurm.environment}
        common = [str(folder / "work"), str(folder / "venv")]
        subprocess.run(["bash", str(SCRIPT), "up", *common], env=environment, check=True, timeout=180)
        command = folder / "sky"
        told = f"export SLURM_CONF={slurm.folder}/slurm.conf\nexec bash {SCRIPT} run {' '.join(common)} sky"
        command.write_text(f'#!/bin/bash\n{told} "$@"\n')
        command.chmod(0o755)
        yield slurm, [str(command)]
        subprocess.run(["bash", str(SCRIPT), "down", *common], env=environment, check=False, timeout=60)


def launched(train: Any, sky: list[str], bucket: Path, *options: str) -> Any:
    nodes = ("+cluster=skypilot", "cluster.infra=slurm/here", "cluster.nodes=2", "cluster.processes_per_node=2")
    own = (f"cluster.python={sys.executable}", f"launcher.sky=[{','.join(sky)}]", "cluster.setup=['true']")
    words = (*DIGITS, *nodes, "cluster.cpus=2", f"cluster.checkpoint_bucket={bucket}", *own)
    run = train(*words, *options, timeout=300.0)
    assert run.code == 0, run.error
    return run


def ended(bucket: Path, seconds: float) -> Path:
    deadline = time.monotonic() + seconds
    while True:
        for file in bucket.rglob("result.json"):
            if json.loads(file.read_text()).get("exit_reason") == "completed":
                return file.parent
        assert time.monotonic() < deadline
        time.sleep(1)


def test_two_nodes_that_sky_launches_train_to_the_bits_of_the_laptop(sky: Any, train: Any, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    run = launched(train, sky[1], bucket, "steps=30", "launcher.managed=false")
    result = json.loads((ended(bucket, 120) / "result.json").read_text())
    alone = train(*DIGITS, "steps=30", "cluster.processes=4").json("result.json")
    assert result["state_digest"] == alone["state_digest"]
    name = run.json("run_manifest.json")["jobs"][0]["id"]
    subprocess.run([*sky[1], "down", "--yes", name], check=True, timeout=120, capture_output=True)


def test_a_managed_job_that_loses_its_nodes_is_recovered(sky: Any, train: Any, tmp_path: Path, begun: Any) -> None:
    slurm, command = sky
    bucket = tmp_path / "bucket"
    run = launched(train, command, bucket, "steps=120", PAUSE)
    deadline = time.monotonic() + 120
    while not list(bucket.rglob("step_0000010")):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    slurm.ask("scancel", *slurm.ask("squeue", "--noheader", "--format=%i").split())
    folder = ended(bucket, 240)
    alone = train(*DIGITS, "steps=120", "cluster.processes=4").json("result.json")
    assert json.loads((folder / "result.json").read_text())["state_digest"] == alone["state_digest"]
    assert len(json.loads((folder / "run_manifest.json").read_text())["attempts"]) == 2
    name = run.json("run_manifest.json")["jobs"][0]["id"]
    queue = subprocess.run([*command, "jobs", "queue", "-o", "json"], capture_output=True, text=True, timeout=60)
    assert name in queue.stdout
