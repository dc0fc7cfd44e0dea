"""The nodes of a job ask Slurm whether they still own it, and whether it must be requeued."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import folders
from worldsize.config.cluster import build_cluster
from worldsize.core import Cluster, ConfigError, Plan, Role
from worldsize.core.limits import check_limits
from worldsize.launch.slurm import Slurm

BASE: dict[str, Any] = {"name": "slurm", "nodes": 2, "processes": 4, "device": "cpu"}


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with scontrol's output; without it, scontrol fails."""
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


def test_a_job_of_an_array_is_asked_for_by_its_place(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An element's job id may equal the array's: with it, Slurm would show and requeue all elements."""
    for name, value in {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(name, value)
    shown = f'#!/bin/sh\n[ "$*" = "show job --oneliner 7_3" ] && exec /bin/cat {answers}\n'
    (answers.parent / "scontrol").write_text(shown)
    answers.write_text("JobId=7 JobState=RUNNING Restarts=1")
    assert Slurm().is_current()
    plans = [Plan(answers.parent / name, Cluster("slurm", 2, 2, "cpu", "gloo"), {}, {}) for name in ("a", "b")]
    script = Slurm().describe_all(plans)
    assert 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' in script
    assert 'requeue "$SLURM_JOB_ID"' not in script


def options(folder: Path, cluster: Cluster, **given: Any) -> list[str]:
    """Return the sbatch options in the job script of a launcher with the cluster options ``given``."""
    script = Slurm(**given).describe(Plan(folder, cluster, {}, {}))
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_a_job_asks_for_the_cpus_that_its_processes_need(tmp_path: Path) -> None:
    config = {**BASE, "threads": 3}
    cluster = build_cluster(config, threads=None, data_workers=2)
    assert "cpus-per-task=10" in options(tmp_path, cluster)  # 2 processes of 3 threads and 2 data workers
    assert "cpus-per-task=6" in options(tmp_path, build_cluster(BASE, threads=1, data_workers=2))
    assert "cpus-per-task=4" in options(tmp_path, build_cluster(BASE, threads=None, data_workers="auto"))
    assert "cpus-per-task=5" in options(tmp_path, cluster, cpus_per_task=5)
    assert "cpus-per-task=5" in options(tmp_path, cluster, cpus_per_task=5, exclusive=True)
    asked = options(tmp_path, cluster, options={"cpus-per-gpu": 7}, gpus_per_node=2)  # Slurm uses it instead
    assert "cpus-per-gpu=7" in asked
    assert not any(each.startswith("cpus-per-task") for each in asked)


def test_runs_of_a_sweep_that_ask_for_different_jobs_are_not_one_array(train: Any, tmp_path: Path) -> None:
    """Otherwise all would get the nodes, CPUs and secrets of the first one."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        '#!/bin/sh\n[ "$1" = --test-only ] && exit\nnumber=$(ls -d job_* 2>/dev/null | wc -l)\nmkdir job_$number\n'
        '[ "$number" = "$FULL" ] && rmdir job_$number && echo "the queue is full" >&2 && exit 1\n'
        'cp "$2" job_$number/script\nprintenv WORLDSIZE_SECRETS > job_$number/secrets\necho $((100 + number))\n'
    )
    sbatch.chmod(0o755)
    project = "logger.project='${oc.env:TOKEN_${cluster.nodes}_${seed}}'"
    tokens = {f"TOKEN_{nodes}_{seed}": f"canary-{nodes == seed == 2}" for nodes in (1, 2) for seed in (1, 2)}
    words = ("--multirun", "+cluster=slurm", "cluster.nodes=1,2", "seed=1,2", project)
    run = train("recipe=digits", *words, logger="wandb", PATH=f"{sbatch.parent}:{os.environ['PATH']}", **tokens)
    assert run.code == 0, run.error
    jobs = []
    for folder in folders(tmp_path / "runs"):
        manifest = json.loads((folder / "run_manifest.json").read_text())
        job, _, place = manifest["jobs"][-1]["id"].partition("_")
        script, secrets = ((tmp_path / f"job_{int(job) - 100}" / name).read_text() for name in ("script", "secrets"))
        key = (manifest["config"]["cluster"]["nodes"], manifest["config"]["seed"])
        assert f"#SBATCH --nodes={key[0]}\n" in script
        assert f'"canary-{key == (2, 2)}"' in secrets
        assert script.count("#SBATCH --array=0-1\n") == (key[0] == 1)
        jobs.append((key, job, place))
    assert [(job, place) for _, job, place in sorted(jobs)] == [("100", "0"), ("100", "1"), ("101", ""), ("102", "")]

    these = ("--multirun", "+cluster=slurm", "cluster.nodes=1,2", "run.name=${cluster.nodes}")
    run = train("recipe=digits", *these, PATH=f"{sbatch.parent}:{os.environ['PATH']}", FULL="4")
    assert (run.code, "job 103 submitted: " in run.output) == (1, True), run.error
    assert re.search(r"failed to submit \S+/2: .*the queue is full", run.error)


def test_a_node_of_its_own_is_used_with_all_its_cpus(tmp_path: Path) -> None:
    plan = Plan(tmp_path, build_cluster(BASE, threads=None), {}, {})
    script = Slurm(exclusive=True).describe(plan)
    assert "cpus-per-task" not in script
    assert "srun --ntasks-per-node=1 --cpu-bind=none " in script


def test_gpus_are_asked_for_once_with_their_type(tmp_path: Path) -> None:
    cluster = build_cluster(BASE, threads=None)
    assert "gpus-per-node=2" in options(tmp_path, cluster, gpus_per_node=2)
    assert "gpus-per-node=a100:2" in options(tmp_path, cluster, gpus_per_node=2, gpu_type="a100")
    for other in ({"gres": "gpu:a100:2"}, {"gpus": 2}, {"gpus-per-task": 1}, {"tres-per-node": "gres/gpu:2"}):
        with pytest.raises(ConfigError, match=r"cluster.gpus_per_node and cluster.options.[\w-]+ both request GPUs"):
            Slurm(gpus_per_node=2, options=other).check(cluster)
    with pytest.raises(ConfigError, match=r"cluster.gpu_type=a100 requires GPUs"):
        Slurm(gpu_type="a100").check(cluster)


def test_gpus_are_not_requested_for_a_run_on_cpus() -> None:
    gpus = {"gres": "gpu:2"}
    with pytest.raises(ConfigError, match=r"options.gres=gpu:2 requests GPUs, but cluster.device=cpu"):
        Slurm(options=gpus).check(build_cluster(BASE, threads=None))


def test_every_option_that_a_job_script_sets_is_refused_as_a_free_option(tmp_path: Path) -> None:
    words: dict[str, Any] = dict.fromkeys(
        ("partition", "account", "qos", "gpu_type", "memory", "constraint", "exclude"), "a"
    )
    launcher = Slurm(time="10", gpus_per_node=2, cpus_per_task=1, exclusive=True, **words)
    healing = {"worker": Role(4, restart="heal")}
    cluster = Cluster("slurm", 2, 4, "cpu", "gloo")
    plans = [Plan(tmp_path / name, cluster, healing, {}) for name in ("a", "b")]
    names = re.findall(r"^#SBATCH --([\w-]+)", launcher.describe_all(plans), re.MULTILINE)
    assert {"array", "no-kill", "signal", "requeue", "exclusive", "open-mode", "gpus-per-node"} <= {*names}
    spellings = [spelling for name in names for spelling in (name, name.replace("-", "_"), f"--{name}")]
    for name in (*spellings, "sig", "ntasks", "n", "N", "tasks-per-node", "no-requeue", "error", "J", "gpus", "wait"):
        with pytest.raises(ConfigError, match=rf": {name} conflicts with the job script's own settings"):
            check_limits(Slurm, {"options": {"comment": "x", name: 1}}, key="cluster")


def test_options_of_sbatch_that_a_job_script_leaves_alone_are_free() -> None:
    """Long options of Slurm 22.05's sbatch, among them beginnings and continuations of the script's own."""
    free = """acctg-freq batch bb begin clusters comment container contiguous core-spec cores-per-socket cpu-freq
        cpus-per-gpu deadline delay-boot dependency distribution export extra-node-info gid gpu-bind gpu-freq gres
        gres-flags hint hold ignore-pbs input kill-on-invalid-dep licenses mail-type mail-user mcs-label mem-bind
        mem-per-cpu mem-per-gpu mincpus network nice nodefile nodelist oversubscribe overcommit power prefer priority
        profile propagate reboot reservation sockets-per-node spread-job switches thread-spec threads-per-core time-min
        tmp tres-per-task uid use-min-nodes verbose wait-all-nodes wckey"""
    check_limits(Slurm, {"options": dict.fromkeys(free.split())}, key="cluster")


UNREACHABLE = """sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sbatch: fatal: Could not establish a configuration source"""


def test_a_script_is_written_where_sbatch_cannot_reach_slurm(train: Any, tmp_path: Path) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/sh\necho '{UNREACHABLE}' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    path = f"{sbatch.parent}:{os.environ['PATH']}"
    said = f"sbatch cannot reach Slurm: {'; '.join(UNREACHABLE.splitlines())}. "
    run = train("recipe=digits", "+cluster=slurm", PATH=path)
    assert (run.code, run.folder) == (2, None)
    assert said in run.error
    run = train("recipe=digits", "+cluster=slurm", "launch=write", PATH=path)
    assert run.code == 0, run.error
    assert said in run.error
    assert (run.folder / "slurm.sh").read_text().startswith("#!/bin/bash")
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n")
    run = train("recipe=digits", "+cluster=slurm", "launch=write", PATH=path)
    assert run.code == 2
    assert "Slurm rejected the request: sbatch: error: invalid partition specified: x" in run.error


def test_doctor_shows_the_lines_of_a_scheduler_without_escapes(tmp_path: Path) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\nprintf 'sbatch: error: one\\nsbatch: error: two\\n' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    words = (sys.executable, "-m", "worldsize", "doctor", "recipe=digits", "+cluster=slurm", f"run.root={tmp_path}")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "one; sbatch: error: two" in " ".join(done.stdout.split())
    assert "\\n" not in done.stdout


def test_a_node_that_cannot_ask_slurm_does_not_go_on(answers: Path) -> None:
    begun = time.monotonic()
    assert not Slurm(node_timeout=0.5).is_current()
    assert time.monotonic() - begun > 0.5


def test_a_node_waits_no_longer_for_a_slurm_that_hangs(answers: Path) -> None:
    (answers.parent / "scontrol").write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    begun = time.monotonic()
    assert not Slurm(node_timeout=0.5).is_current()
    assert time.monotonic() - begun < 120


def test_an_agent_that_was_started_by_hand_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert Slurm().is_current()


def test_a_job_that_may_not_be_queued_again_is_not_by_a_node_that_has_lost_the_first(
    answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [Slurm(max_requeues=most).requeues for most in (0, 1, 2)] == [False, False, True]
    monkeypatch.delenv("SLURM_JOB_ID")
    assert not Slurm().requeues  # started by hand


@pytest.mark.parametrize(
    ("code", "said", "is_queued"),
    [
        (76, "JobState=RUNNING Restarts=0 ExitCode=0:0", True),
        (76, "JobState=COMPLETING Restarts=0 ExitCode=0:9", True),  # Slurm has killed the script with its node
        (75, "JobState=COMPLETING Restarts=0 ExitCode=0:9", True),
        (143, "JobState=COMPLETING Restarts=0 ExitCode=0:9", True),  # this agent was not ready for a signal yet
        (143, "JobState=RUNNING Restarts=0 ExitCode=0:0", False),
        (75, "JobState=RUNNING Restarts=0 ExitCode=0:0", False),  # the script itself requeues it
        (76, "JobState=COMPLETING Restarts=0 ExitCode=0:0", False),  # it is cancelled
        (76, "JobState=CANCELLED Restarts=0 ExitCode=0:15", False),
        (0, "JobState=COMPLETING Restarts=0 ExitCode=0:9", False),
    ],
)
def test_another_node_queues_the_job_again_if_the_first_is_lost(
    tmp_path: Path, code: int, said: str, *, is_queued: bool
) -> None:
    end_agent(tmp_path, node=1, code=code, said=said)
    assert (tmp_path / "queued_7").exists() == is_queued


@pytest.mark.parametrize("code", [75, 143])
def test_a_node_that_the_job_goes_on_without_does_not_stand_in_the_way_of_one_that_loses_the_first(
    tmp_path: Path, code: int
) -> None:
    """The previous node was removed from the job, so its agent got SIGTERM."""
    said = "JobState=RUNNING Restarts=0 ExitCode=0:0"
    end_agent(tmp_path, node=1, code=code, said=said)
    end_agent(tmp_path, node=2, code=76, said=said)
    assert (tmp_path / "queued_7").exists()


def end_agent(folder: Path, *, node: int, code: int, said: str) -> None:
    """Run the job script's part for a node whose agent exits with ``code``; ``said``: Slurm's facts about the job."""
    scontrol = folder / "scontrol"
    scontrol.write_text(
        f'#!/bin/sh\n[ "$1" = requeue ] && exec touch {folder}/queued_$2\necho "JobId=7 {said} NumNodes=2"\n'
    )
    scontrol.chmod(0o755)
    plan = Plan(folder, Cluster("slurm", 2, 2, "cpu", "gloo"), {"worker": Role(2, restart="heal")}, {})
    script = Slurm().describe(plan).partition("bash -c \\\n  '")[2].partition("' \\\n")[0]
    variables = {"SLURM_NODEID": str(node), "SLURM_JOB_ID": "7", "WORLDSIZE_CODE": f"{folder}/code"}
    environment = {**variables, "PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script, "bash", "sh", "-c", f"exit {code}"], env=environment, check=False)
    assert done.returncode == code
