"""Run SkyPilot itself end to end: its API server, and its Slurm cloud against a real Slurm."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import slurm as real
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("skypilot.sh")
SKYPILOT = "skypilot[slurm,server]==0.14.1"
SERVER = 46580  # the port where SkyPilot's client expects its server
SLURM = 17_800
NEEDED = ("uv", "sshd", "ssh-keygen", "rsync", "curl", "nsenter", "unshare", "setpriv")
DIGITS = ("recipe=digits", "reproducibility=elastic", "cluster.threads=1", "log_every=1", "checkpoint.every=10")
NODES = ("+cluster=skypilot", "cluster.infra=slurm/here", "cluster.nodes=2", "cluster.processes_per_node=2")
PAUSE = "faults=[{action: sleep, seconds: 0.3, attempt: null}]"  # slows every step of rank 0


def missing() -> str | None:
    if os.geteuid() != 0:
        return "a mount namespace needs root"
    if why := real.missing():
        return why
    if absent := [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]:
        return f"{', '.join(absent)} not installed (apt-get install openssh-server rsync curl; pip install uv)"
    if not Path("/sys/fs/cgroup/freezer").is_dir():
        return "Slurm's cgroup plugin needs cgroups v1"
    if _python310() is None:
        return "SkyPilot's nodes need Python 3.10 (uv python install 3.10)"
    with socket.socket() as taken:
        if taken.connect_ex(("127.0.0.1", SERVER)) == 0:
            return f"port {SERVER} is taken, by another SkyPilot"
    return None


def _python310() -> Path | None:
    """Find Python 3.10, also among the versions of pyenv, where uv does not search."""
    if installed := sorted(Path.home().glob(".pyenv/versions/3.10.*/bin/python3.10")):
        return installed[-1].resolve()
    uv = subprocess.run(["uv", "python", "find", "--no-project", "3.10"], capture_output=True, text=True, check=False)
    return Path(uv.stdout.strip()).resolve() if uv.returncode == 0 else None


@dataclass(frozen=True)
class Sky:
    """SkyPilot in a namespace with a temporary home and /tmp."""

    command: Path
    slurm: real.Slurm

    def ask(self, *words: str) -> str:
        done = subprocess.run([self.command, *words], capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def job(self, name: str) -> dict[str, Any]:
        queue = json.loads(self.ask("jobs", "queue", "--all", "-o", "json"))
        (match,) = (job for job in queue if job["job_name"] == name)
        return dict(match)


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """Let one test process run at a time, since SkyPilot's port is always the same."""
    with SCRIPT.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def sky(alone: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sky]:
    if why := missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("sky")
    _install(folder / "venv")
    inside = ["bash", str(SCRIPT), "inside", str(folder)]
    command = folder / "sky"
    command.write_text(f'#!/bin/bash\nexec {shlex.join([*inside, "sky"])} "$@"\n')
    command.chmod(0o755)
    kept = [tmp_path_factory.getbasetemp(), REPOSITORY, *map(Path, (sys.prefix, sys.base_prefix))]
    with (
        _namespace(folder, kept),
        real.running(folder / "slurm", port=SLURM, proctrack="cgroup", inside=inside) as slurm,
    ):
        sky = Sky(command, slurm)
        sky.ask("api", "start")
        assert "Slurm: enabled" in (shown := sky.ask("check", "slurm")), shown
        yield sky
        sky.ask("api", "stop")


def _install(venv: Path) -> None:
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, str(venv)], check=True)
    subprocess.run(["uv", "pip", "install", "-q", "--python", str(venv / "bin" / "python"), SKYPILOT], check=True)
    # SkyPilot probes public addresses before it recovers a job; here it probes its own server instead
    (file,) = venv.glob("lib/python3*/site-packages/sky/backends/backend_utils.py")
    text = file.read_text()
    probe = "_TEST_IP_LIST = ['https://8.8.8.8', 'https://1.1.1.1']"
    assert probe in text
    own = f"_TEST_IP_LIST = ['http://127.0.0.1:{SERVER}/api/health']"
    file.unlink()  # the file may be a hard link into uv's cache
    file.write_text(text.replace(probe, own))


@contextmanager
def _namespace(folder: Path, kept: list[Path]) -> Iterator[None]:
    """Hold namespaces that keep the ``kept`` folders as they are here, and end all processes in them on exit."""
    python = _python310()
    assert python is not None
    # uv on the path may be a shim, as pyenv's, that needs files of the home folder
    which = ["uv", "run", "--no-project", "printenv", "UV"]
    uv = subprocess.run(which, capture_output=True, text=True, check=True).stdout.strip()
    names = {
        "SKY": folder / "venv",
        "UV": uv,
        "NODE_PATH": f"{folder}/shim:{python.parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "SLURM_CONF": folder / "slurm" / "slurm.conf",
        "PORT": SLURM + 50,
    }
    (folder / "names").write_text("".join(f"{name}={shlex.quote(str(value))}\n" for name, value in names.items()))
    kept = [*kept, python.parents[1], Path(uv).parent]
    ends = ["setpriv", "--pdeathsig", "KILL"]  # the holder exits with this process, even if this one is killed
    apart = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "--propagation", "private"]
    with (folder / "hold.log").open("w") as log:
        hold = ["bash", str(SCRIPT), "hold", str(folder), *map(str, kept)]
        holder = subprocess.Popen([*ends, *apart, *hold], stdout=log, stderr=log)
    try:
        while not (folder / "ready").exists():
            assert holder.poll() is None, (folder / "hold.log").read_text()
            time.sleep(0.05)
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()
        (folder / "pid").write_text(children.split()[0])
        yield
    finally:
        holder.kill()
        holder.wait()
        _forget_cgroups()


def _forget_cgroups() -> None:
    """Remove the empty cgroups left by Slurm's nodes."""
    time.sleep(1)
    for node in Path("/sys/fs/cgroup").glob("*/slurm_127.0.0.*"):
        for group, *_ in os.walk(node, topdown=False):
            with suppress(OSError):
                Path(group).rmdir()


def launched(train: Any, sky: Sky, bucket: Path, *options: str) -> str:
    """Launch a run, and return its name in SkyPilot."""
    own = (f"cluster.python={sys.executable}", f"launcher.sky=[{sky.command}]", "cluster.setup=['true']")
    run = train(*DIGITS, *NODES, "cluster.cpus=2", f"cluster.checkpoint_bucket={bucket}", *own, *options)
    assert run.code == 0, run.output + run.error
    return str(run.json("run_manifest.json")["jobs"][0]["id"])


def ended(bucket: Path, seconds: float) -> Path:
    def completed() -> list[Path]:
        results = bucket.rglob("result.json")
        return [file.parent for file in results if json.loads(file.read_text()).get("exit_reason") == "completed"]

    wait_until(lambda: bool(completed()), lambda: sorted(bucket.rglob("*")), seconds)
    return completed()[0]


def checkpointed(bucket: Path, seconds: float) -> None:
    wait_until(lambda: any(bucket.rglob("step_0000020")), lambda: sorted(bucket.rglob("*")), seconds)


def digest(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["state_digest"])


def test_two_nodes_that_sky_launches_train_to_the_bits_of_the_laptop(sky: Sky, train: Any, tmp_path: Path) -> None:
    (bucket := tmp_path / "bucket").mkdir()
    name = launched(train, sky, bucket, "steps=30", "launcher.managed=false")
    laptop = train(*DIGITS, "steps=30", "cluster.processes=4").json("result.json")
    assert digest(ended(bucket, 300)) == laptop["state_digest"]
    sky.ask("down", "--yes", name)


def test_a_managed_job_that_loses_its_nodes_is_recovered(sky: Sky, train: Any, tmp_path: Path) -> None:
    (bucket := tmp_path / "bucket").mkdir()
    name = launched(train, sky, bucket, "steps=120", PAUSE)
    checkpointed(bucket, 300)
    sky.slurm.ask("scancel", *sky.slurm.ask("squeue", "--noheader", "--format=%i").split())
    folder = ended(bucket, 300)
    laptop = train(*DIGITS, "steps=120", "cluster.processes=4").json("result.json")
    assert digest(folder) == laptop["state_digest"]
    assert len(json.loads((folder / "run_manifest.json").read_text())["attempts"]) == 2
    wait_until(lambda: sky.job(name)["status"] == "SUCCEEDED", lambda: sky.job(name))
    assert sky.job(name)["recovery_count"] == 1
