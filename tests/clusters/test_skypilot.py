"""SkyPilot tasks are validated against its schema, and run on two hosts; one of them is reclaimed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clusters.doctor_job import DoctorJob
from worldsize.testing.hosts import Hosts

pytestmark = pytest.mark.heavy

DIGITS = ("recipe=digits", "reproducibility=elastic", "cluster.threads=1", "logger=none", "log_every=1")
SPOT = ("+cluster=skypilot", "cluster.nodes=2", "cluster.spot=true", "cluster.checkpoint_bucket=s3://mine")
CHECK = """
import json, sys, jsonschema, sky, yaml
from sky.utils import schemas
for file in sys.argv[1:]:
    text = yaml.safe_load(open(file))
    jsonschema.Draft7Validator(schemas.get_task_schema()).validate(text)
    task = sky.Task.from_yaml_config(text)
    again = sky.Task.from_yaml_config(task.to_yaml_config()).to_yaml_config()
    assert again == task.to_yaml_config()
    (resources,) = task.resources
    print(json.dumps([task.num_nodes, resources.use_spot, resources.job_recovery]))
"""


@pytest.fixture
def sky_python() -> str:
    """The interpreter of the environment that `uv tool install skypilot` creates."""
    sky = shutil.which("sky") or shutil.which("sky", path=str(Path.home() / ".local" / "bin"))
    if sky is None:
        pytest.skip("SkyPilot is not installed (uv tool install skypilot)")
    return Path(sky).resolve().read_text().splitlines()[0].removeprefix("#!")


def shown(train: Any, *options: str) -> str:
    run = train(*DIGITS, *SPOT, *options, "launch=show")
    assert run.code == 0, run.error
    return str(run.output)


RECOVERY: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "accelerators": (("cluster.accelerators=A100:4", "logical_ranks=8"), {}),
    "strategy": (("cluster.job_recovery=FAILOVER",), {"strategy": "FAILOVER"}),
    "old name": (("cluster.spot_recovery=EAGER_NEXT_REGION",), {"strategy": "EAGER_NEXT_REGION"}),
    "all": (("cluster.job_recovery={strategy: FAILOVER, max_restarts_on_errors: 7}",), {"max_restarts_on_errors": 7}),
    "more": (("+cluster.resources.disk_size=300", "cluster.infra=gcp", "cluster.cpus=8+"), {}),
}


def test_skypilot_accepts_every_task(train: Any, sky_python: str, tmp_path: Path) -> None:
    files = []
    for name, (options, _) in RECOVERY.items():
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(shown(train, *options).replace("s3://mine", "s3://worldsize-no-such-bucket"))
        task = yaml.safe_load(files[-1].read_text())
        del task["file_mounts"]  # Task would ask the cloud for the bucket
        files[-1].write_text(yaml.safe_dump({**task, "workdir": str(tmp_path)}))
    done = subprocess.run(
        [sky_python, "-c", CHECK, *map(str, files)], capture_output=True, text=True, cwd=tmp_path, timeout=240
    )
    assert done.returncode == 0, done.stderr
    for line, (_, recovery) in zip(done.stdout.splitlines(), RECOVERY.values(), strict=True):
        nodes, spot, job_recovery = json.loads(line)
        assert (nodes, spot) == (2, True)
        assert job_recovery["recover_on_exit_codes"] == [75]
        assert job_recovery.items() >= {"max_restarts_on_errors": 3, **recovery}.items()


def test_the_bucket_and_the_run_are_mounted_and_the_old_name_of_an_option_gives_a_warning(
    train: Any, tmp_path: Path
) -> None:
    run = train(*DIGITS, *SPOT, "cluster.spot_recovery=FAILOVER", "launch=show")
    assert "SkyPilot 0.8 renamed it to job_recovery" in run.error
    task = yaml.safe_load(run.output)
    assert task["file_mounts"]["/checkpoints"] == {"source": "s3://mine", "mode": "MOUNT"}
    assert task["file_mounts"]["~/worldsize_run"].startswith(f"{tmp_path}/runs/digits/")
    assert "/checkpoints/digits/" in task["run"]
    assert task["setup"].splitlines()[-1] == "uv sync --locked"


def test_a_launched_task_holds_no_secret(train: Any, tmp_path: Path, environment_without_wandb: dict[str, str]) -> None:
    arguments, sky = tmp_path / "arguments", tmp_path / "sky"
    sky.write_text(f'#!/bin/sh\necho "$@" > {arguments}\nexit 0\n')  # records its arguments
    sky.chmod(0o755)
    run = train(*DIGITS, *SPOT, f"launcher.sky=[{sky}]", "steps=3")
    assert run.code == 0, run.error
    words = arguments.read_text().split()
    assert words[:3] == ["jobs", "launch", "--name"]
    assert words[-1] == str(run.folder / "skypilot.yaml")
    key = (run.folder / "agents.key").read_text()
    assert key not in (run.folder / "skypilot.yaml").read_text()
    assert run.json("run_manifest.json")["jobs"][0]["id"] == words[3]


class Cluster:
    """Two fresh hosts with the bucket's folder that execute the `run` section of a SkyPilot task."""

    def __init__(self, hosts: Hosts, task: Any, home: Path, environment: dict[str, str]) -> None:
        addresses = "\n".join(f"10.77.0.{host}" for host in (1, 2))
        self.nodes = [
            subprocess.Popen(
                hosts.wrap_command(host, ["bash", "-c", task["run"]]),
                cwd=home,
                env={
                    **environment,
                    "HOME": str(home),
                    "SKYPILOT_NODE_RANK": str(host - 1),
                    "SKYPILOT_NUM_NODES": "2",
                    "SKYPILOT_NODE_IPS": addresses,
                    "SKYPILOT_NUM_GPUS_PER_NODE": "0",
                    "SKYPILOT_TASK_ID": "sky-managed-2026-11-21_mine_1-0",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host in (1, 2)
        ]

    def reclaim(self, grace: float) -> None:
        """Reclaim the hosts like a cloud: a warning, a grace period, and the end."""
        for node in self.nodes:
            node.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while any(node.poll() is None for node in self.nodes) and time.monotonic() < deadline:
            time.sleep(0.1)
        for node in self.nodes:
            node.kill()

    def end(self) -> list[int]:
        self.output = [node.communicate(timeout=240)[0] for node in self.nodes]
        return [node.returncode for node in self.nodes]


def test_a_reclaimed_run_resumes_from_the_bucket_on_fresh_hosts(
    hosts: Hosts, train: Any, tmp_path: Path, environment_without_wandb: dict[str, str], begun: Any, warm_python: Path
) -> None:
    bucket, home = tmp_path / "bucket", tmp_path / "home"
    home.mkdir()
    options = (f"cluster.mount={bucket}", f"cluster.python={warm_python}", "cluster.processes_per_node=2")
    slow = "faults=[{action: sleep, seconds: 0.5}]"  # slow in the first attempt, so that it can be reclaimed
    length = ("steps=100", "checkpoint.every=10", slow)
    run = train(*DIGITS, *SPOT, *options, *length, "launch=write", "launcher.node_timeout=30")
    assert run.code == 0, run.error
    task = yaml.safe_load(run.output.partition("written to")[0])
    shutil.copytree(run.folder, home / "worldsize_run")  # SkyPilot's file mount
    (home / "worldsize_run" / "agents.key").write_text("0" * 64)
    first = Cluster(hosts, task, home, environment_without_wandb)
    begun(bucket, after=12)
    first.reclaim(grace=120.0)
    assert first.end() == [75, 75], first.output
    second = Cluster(hosts, task, home, environment_without_wandb)
    assert second.end() == [0, 0], second.output
    (result,) = bucket.rglob("result.json")
    alone = train(*DIGITS, *length[:2], "cluster.processes=4").json("result.json")
    assert json.loads(result.read_text())["state_digest"] == alone["state_digest"]
    manifest = json.loads((result.parent / "run_manifest.json").read_text())
    assert len(manifest["attempts"]) == 2
    assert manifest["attempts"][-1]["job"]["id"] == "sky-managed-2026-11-21_mine_1-0"


SKY = """#!/bin/sh
case $2 in
launch) echo $4 > {here}/name; for task; do :; done; cp $task {here}/part; mv {here}/part {here}/task;;
queue) state=RUNNING; [ -f {here}/log ] && state=SUCCEEDED
  echo '[{{"job_name": "'$(cat {here}/name)'", "status": "'$state'"}}]';;
logs) cat {here}/log;;
esac
"""


def test_doctor_reads_the_report_in_the_log_of_the_task(
    hosts: Hosts, tmp_path: Path, environment_without_wandb: dict[str, str], warm_python: Path
) -> None:
    bucket, home, sky = (tmp_path / name for name in ("bucket", "home", "sky"))
    home.mkdir()
    sky.write_text(SKY.format(here=tmp_path))
    sky.chmod(0o755)
    options = (f"cluster.mount={bucket}", f"cluster.python={warm_python}", "cluster.processes_per_node=2")
    submitted = tmp_path / "task"
    doctor = DoctorJob(
        (*DIGITS[:3], *SPOT, *options, f"launcher.sky=[{sky}]"),
        python=warm_python,
        folder=tmp_path,
        environment=environment_without_wandb,
        submitted=submitted,
    )
    task = yaml.safe_load(submitted.read_text())
    shutil.copytree(task["file_mounts"]["~/worldsize_run"], home / "worldsize_run")
    nodes = Cluster(hosts, task, home, environment_without_wandb)
    assert nodes.end() == [0, 0], nodes.output
    lines = [f"(worldsize, pid=7) {each}\n" for each in nodes.output[0].splitlines()]
    doctor.check(tmp_path / "log", "".join(lines), bucket)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("cluster.checkpoint_bucket=null",), "is required for spot instances and multiple nodes"),
        (("cluster.checkpoint_bucket=mine",), "is not a bucket. Set it to a bucket such as s3://NAME"),
        (("cluster.checkpoint_bucket=/proc/mine",), "is not a writable folder"),
        (("cluster.bucket_mode=COPY",), "Available: MOUNT, MOUNT_CACHED"),
        (("cluster.accelerators=A100:four",), "must have the form NAME:COUNT"),
        (("cluster.job_recovery=FAILOVER", "cluster.spot_recovery=FAILOVER"), "the old name of cluster.job_recovery"),
        (("launcher.sky=[nowhere]",), "nowhere not found. Install SkyPilot"),
    ],
)
def test_a_task_that_skypilot_would_not_accept_is_refused(train: Any, options: tuple[str, ...], message: str) -> None:
    run = train(*DIGITS, *SPOT, *options)
    assert run.code == 2
    assert message in run.error
