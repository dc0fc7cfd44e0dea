"""The same program runs under a real Slurm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.slurm import Slurm
from worldsize.core import Cluster, Plan, Role
from worldsize.launch import slurm as launcher

pytestmark = pytest.mark.heavy

DIGITS = ("recipe=digits", "reproducibility=elastic", "cluster.threads=1", "checkpoint.every=10")
ON_SLURM = ("+cluster=slurm", "cluster.nodes=2", "cluster.processes_per_node=2")
# slow in the first attempts, so that tests have time to interrupt them
SLOW_AT_FIRST = "faults=[{action: sleep, seconds: 0.5}]"
SLOW_TWICE = "faults=[{action: sleep, seconds: 0.5}, {action: sleep, seconds: 0.5, attempt: 2}]"


@pytest.fixture
def submit(slurm: Slurm, train: Any, warm_python: Path) -> Any:
    """``submit("steps=30")`` runs train.py with Slurm; ``python`` is the interpreter of its agents."""

    def run(*options: str, python: str | Path = warm_python) -> Any:
        return train(*DIGITS, *ON_SLURM, f"launcher.python={python}", *options, **slurm.environment)

    return run


@pytest.fixture
def laptop(reference_run: Any) -> Callable[..., str]:
    """``laptop("steps=30")`` is the digest of the same training on this machine without Slurm."""
    return lambda *options: state_digest(reference_run(*DIGITS, *options, "cluster.processes=4").folder)


def manifest(folder: Path) -> Any:
    return json.loads((folder / "run_manifest.json").read_text())


def reasons(folder: Path) -> list[str]:
    return [attempt["exit_reason"] for attempt in manifest(folder)["attempts"]]


def job_of(folder: Path) -> str:
    return str(manifest(folder)["jobs"][-1]["id"])


def logs(folder: Path) -> str:
    """Return the output of the run's Slurm jobs."""
    return "".join(path.read_text() for path in (folder / "logs").glob("slurm_*.log"))


def state_digest(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["state_digest"])


def test_two_nodes_train_to_the_bits_of_the_laptop(submit: Any, laptop: Any) -> None:
    run = submit("steps=30", "launcher.wait=true", python=sys.executable)
    assert run.code == 0, run.error + logs(run.folder)
    assert run.json("result.json")["state_digest"] == laptop("steps=30")
    attempt = manifest(run.folder)["attempts"][0]
    assert (attempt["job"]["scheduler"], attempt["job"]["id"]) == ("slurm", job_of(run.folder))
    assert len(attempt["hosts"]) == 2
    assert (run.folder / "agents.key").stat().st_mode & 0o777 == 0o600


def test_a_job_logs_into_a_run_folder_whatever_characters_its_path_has(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "50%j of it" / 'my "best" runs #1'
    (folder / "logs").mkdir(parents=True)
    plan = Plan(folder, Cluster("slurm", 1, 1, "cpu", "gloo"), {"worker": Role(1)}, {})
    script = tmp_path / "job.sh"
    options = launcher.Slurm(options={"comment": "two words"}).describe(plan).partition("\ncd ")[0]
    script.write_text(f"{options}\necho hello\n")
    job = slurm.ask("sbatch", "--parsable", str(script)).strip()
    slurm.wait_for(job, "COMPLETED")
    assert (folder / "logs" / f"slurm_{job}.log").read_text() == "hello\n"
    assert "Comment=two words" in slurm.ask("scontrol", "show", "job", job)


def test_a_run_is_saved_before_the_time_limit_and_queued_again_by_itself(
    slurm: Slurm, submit: Any, laptop: Any
) -> None:
    limit = ("cluster.time=00:01:00", "launcher.signal_before=45")
    run = submit(*limit, "steps=120", SLOW_AT_FIRST)
    assert "submitted" in run.output
    slurm.wait_for(job_of(run.folder), "COMPLETED", seconds=240)
    exit_reasons = reasons(run.folder)
    assert exit_reasons[0] == "preempted"
    assert exit_reasons[-1] == "completed"
    requeues = manifest(run.folder)["attempts"][-1]["job"]["requeues"]
    assert requeues >= len(exit_reasons) - 1  # more if Slurm's signal arrived before training began
    assert state_digest(run.folder) == laptop("steps=120")


def test_a_signal_that_comes_before_the_agent_handles_signals_loses_no_run(
    slurm: Slurm, submit: Any, laptop: Any, tmp_path: Path, warm_python: Path
) -> None:
    python = tmp_path / "signalled"
    python.write_text(f'#!/bin/sh\n[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] && kill -USR1 $$\nexec {warm_python} "$@"\n')
    python.chmod(0o755)
    run = submit("steps=30", python=python)
    slurm.wait_for(job_of(run.folder), "COMPLETED")
    (attempt,) = manifest(run.folder)["attempts"]
    assert (attempt["exit_reason"], attempt["job"]["requeues"]) == ("completed", 1)
    assert state_digest(run.folder) == laptop("steps=30")


@contextmanager
def taken_out(slurm: Slurm, node: str) -> Iterator[None]:
    """Take a node out of all jobs inside the context."""
    slurm.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    try:
        yield
    finally:
        with suppress(subprocess.CalledProcessError):  # the node may have resumed by itself
            slurm.ask("scontrol", "update", f"nodename={node}", "state=resume")


def test_a_requeued_job_that_then_loses_a_node_resumes_the_same_run(
    slurm: Slurm, submit: Any, laptop: Any, begun: Any
) -> None:
    run = submit("steps=120", "log_every=1", SLOW_TWICE)
    begun(run.folder, after=3)
    slurm.ask("scontrol", "requeue", job_of(run.folder))
    slurm.wait_for(job_of(run.folder), "PENDING", "REQUEUED")
    begun(run.folder, after=20)
    with taken_out(slurm, "127.0.0.2"):
        slurm.wait_for(job_of(run.folder), "PENDING")
    slurm.wait_for(job_of(run.folder), "COMPLETED")
    assert len(reasons(run.folder)) == 3
    assert state_digest(run.folder) == laptop("steps=120")


def test_a_run_goes_on_without_the_node_on_which_a_rank_is_slow(slurm: Slurm, submit: Any, laptop: Any) -> None:
    slow = "faults=[{action: slow, rank: 1, seconds: 0.05}, {action: slow, rank: null, seconds: 0.03, attempt: 2}]"
    run = submit("cluster.nodes=1", "cluster.processes_per_node=4", "steps=120", "launcher.exclude_slow=true", slow)
    slurm.wait_for(job_of(run.folder), "COMPLETED")
    first_job, second_job = (job["id"] for job in manifest(run.folder)["jobs"])
    slurm.wait_for(second_job, "COMPLETED")
    assert first_job != second_job
    assert reasons(run.folder) == ["preempted", "completed"]
    first, second = (attempt["job"]["nodes"] for attempt in manifest(run.folder)["attempts"])
    assert (run.folder / "excluded").read_text() == f"{first}\n"
    assert {first, second} == {"127.0.0.1", "127.0.0.2"}
    assert state_digest(run.folder) == laptop("steps=120")


def test_a_cancelled_run_saves_and_can_be_resumed(
    slurm: Slurm, submit: Any, laptop: Any, begun: Any, command: Any, environment_without_wandb: dict[str, str]
) -> None:
    run = submit("steps=120", "log_every=1", SLOW_AT_FIRST)
    environment = {**environment_without_wandb, **slurm.environment}
    begun(run.folder, after=3)
    job = job_of(run.folder)
    shown = command("status", str(run.folder), cwd=run.folder, environment=environment)
    assert "RUNNING" in shown.stdout or "running" in shown.stdout
    cancelled = command("cancel", str(run.folder), cwd=run.folder, environment=environment)
    assert cancelled.stdout == f"job {job} was cancelled\n", cancelled.stderr
    slurm.wait_for(job, "CANCELLED")
    time.sleep(1)
    assert slurm.state(job) == "CANCELLED"  # not queued again
    assert reasons(run.folder) == ["preempted"]
    done = command("resume", str(run.folder), "launcher.wait=true", cwd=run.folder, environment=environment)
    assert done.returncode == 0, done.stderr + logs(run.folder)
    assert state_digest(run.folder) == laptop("steps=120")


def test_a_rank_that_fails_ends_the_job_with_its_cause(slurm: Slurm, submit: Any) -> None:
    fault = "faults=[{action: kill, rank: 3, step: 9}]"
    run = submit("steps=30", "launcher.wait=true", fault)
    assert run.code == 1
    assert "worker 3 failed at step 9:\nkilled by SIGKILL" in logs(run.folder)
    assert slurm.state(job_of(run.folder)) == "FAILED"
    assert reasons(run.folder) == ["failed"]
    (attempt,) = run.json("run_manifest.json")["attempts"]
    assert (attempt["failure"]["rank"], attempt["failure"]["step"]) == (3, 9)
    assert (attempt["failure"]["host"], attempt["failure"]["cause"]) == (attempt["hosts"][1], "killed by SIGKILL")
    assert "worker 3 on" in run.error  # from the command that waited


def test_a_failed_gang_is_restarted_within_its_job(submit: Any, laptop: Any) -> None:
    faults = "faults=[{action: kill, rank: 3, step: 15}, {action: raise, rank: 0, step: 25, attempt: 2}]"
    words = ("steps=30", "launcher.wait=true", "launcher.max_restarts=2", faults)
    run = submit(*words)
    assert run.code == 0, run.error + logs(run.folder)
    assert reasons(run.folder) == ["failed", "failed", "completed"]
    assert run.json("result.json")["state_digest"] == laptop("steps=30")


def test_a_sweep_is_a_job_array(submit: Any, tmp_path: Path, laptop: Any) -> None:
    run = submit("--multirun", "steps=20", "seed=1,2", "launcher.wait=true", "sweep.metric=loss")
    assert run.code == 0, run.error
    assert re.search(r"^sweep    2 of 2 runs completed\nrun  seed  loss +state +folder\n1 ", run.output, re.MULTILINE)
    assert len(re.findall(r" completed, best  ", run.output)) == 1
    folders = sorted(path.parent for path in (tmp_path / "runs").rglob("run_manifest.json"))
    jobs = sorted(job_of(folder) for folder in folders)
    assert [job.partition("_")[2] for job in jobs] == ["0", "1"]
    digests = {manifest(folder)["config"]["seed"]: state_digest(folder) for folder in folders}
    assert digests == {seed: laptop("steps=20", f"seed={seed}") for seed in (1, 2)}


def test_servers_and_workers_share_an_allocation(submit: Any, laptop: Any) -> None:
    roles = ("strategy=parameter_server", "strategy.servers=2")
    run = submit(*roles, "steps=30", "launcher.wait=true")
    assert run.code == 0, run.error + logs(run.folder)
    assert run.json("result.json")["state_digest"] == laptop("steps=30")


WRONG = {
    "partition": (("cluster.partition=gpu",), "Slurm rejected the request: ", "invalid partition"),
    "nodes": (("cluster.nodes=8", "cluster.processes_per_node=1"), "Slurm rejected the request: ", "node"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_job_that_slurm_refuses_is_refused_in_its_own_words_and_leaves_nothing(submit: Any, case: str) -> None:
    options, *words = WRONG[case]
    run = submit(*options, "steps=30")
    assert run.code == 2
    assert all(word.lower() in run.error.lower() for word in words), run.error
    assert run.folder is None


def test_without_slurm_nothing_is_started_but_the_job_can_be_written(train: Any) -> None:
    run = train(*DIGITS, *ON_SLURM, "steps=30", PATH="/nowhere")
    assert run.code == 2
    assert "sbatch not found" in run.error
    assert run.folder is None
    run = train(*DIGITS, *ON_SLURM, "steps=30", "launch=write", PATH="/nowhere")
    assert run.code == 0, run.error
    assert "#SBATCH --job-name=digits-ddp\n" in (run.folder / "slurm.sh").read_text()


def test_the_array_of_a_sweep_is_shown_before_it_is_submitted(submit: Any) -> None:
    run = submit("--multirun", "seed=1,2,3", "launch=show")
    assert run.code == 0, run.error
    assert run.output.count("#!/bin/bash") == run.output.count("#SBATCH --array=0-2\n") == 1
    assert run.folder is None


def by_hand(slurm: Slurm, folder: Path, *words: str, **variables: str) -> str:
    """Run ``words`` on two nodes with srun, and return the digest of the trained state."""
    done = slurm.ask("srun", "--nodes=2", *words, **variables)
    assert (folder / "result.json").exists(), done
    return state_digest(folder)


@pytest.mark.parametrize("way", ["srun", "torchrun"])
def test_workers_that_are_started_by_hand_find_each_other(
    slurm: Slurm, submit: Any, laptop: Any, warm_python: Path, way: str
) -> None:
    run = submit("steps=30", "launch=write")
    assert "nothing was started" in run.output, run.error
    python, worker = str(warm_python), ("-m", "worldsize.worker", str(run.folder))
    torchrun = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d")
    if way == "srun":
        digest = by_hand(slurm, run.folder, "--ntasks-per-node=2", python, *worker)
    else:
        rendezvous = ("--rdzv-endpoint=127.0.0.1:29477", f"--rdzv-id={run.folder.name}")
        digest = by_hand(
            slurm, run.folder, "--ntasks-per-node=1", python, *torchrun, *rendezvous, *worker, PYTHON_EXEC=python
        )
    assert digest == laptop("steps=30")
    assert reasons(run.folder) == ["completed"]


def test_torchrun_that_srun_starts_more_than_once_is_refused(slurm: Slurm, submit: Any, warm_python: Path) -> None:
    run = submit("steps=20", "launch=write")
    python, tasks = str(warm_python), ("--nodes=2", "--ntasks-per-node=1")
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "worldsize.worker")
    with pytest.raises(subprocess.CalledProcessError) as error:
        slurm.ask("srun", *tasks, python, *words, str(run.folder), PYTHON_EXEC=python)
    assert "the run would start more than once" in error.value.stderr + error.value.stdout


def test_a_run_that_heals_goes_on_without_a_node_that_is_taken_out(
    slurm: Slurm, submit: Any, laptop: Any, begun: Any
) -> None:
    slow = "faults=[{action: sleep, rank: null, step: null, seconds: 0.1, attempt: null}]"
    more = ("strategy.on_failure=heal", "launcher.node_timeout=6", "log_every=1")
    run = submit("steps=150", "checkpoint.every=0", "checkpoint.at_end=true", *more, slow)
    begun(run.folder, after=5)
    with taken_out(slurm, "127.0.0.2"):
        slurm.wait_for(job_of(run.folder), "COMPLETED")
    assert reasons(run.folder) == ["completed"]
    assert [each["members"] for each in manifest(run.folder)["attempts"][0]["memberships"]] == [[0, 1, 2, 3], [0, 1]]
    assert state_digest(run.folder) == laptop("steps=150")


def test_a_run_that_heals_is_queued_again_after_a_signal_and_when_its_first_node_is_taken_out(
    slurm: Slurm, submit: Any, laptop: Any, begun: Any
) -> None:
    """Slurm kills the script with the node; without a remedy the job would have failed."""
    slow = "faults=[{action: sleep, rank: null, step: null, seconds: 0.1, attempt: null}]"
    run = submit("steps=120", "strategy.on_failure=heal", "log_every=1", slow)
    begun(run.folder, after=3)
    slurm.ask("scancel", "--signal=USR1", job_of(run.folder))
    slurm.wait_for(job_of(run.folder), "PENDING", "REQUEUED")
    begun(run.folder, after=20)
    with taken_out(slurm, "127.0.0.1"):
        slurm.wait_for(job_of(run.folder), "PENDING")
        slurm.kill("127.0.0.1")
        slurm.start("127.0.0.1")  # it is repaired
    slurm.wait_for(job_of(run.folder), "COMPLETED")
    assert reasons(run.folder) == ["preempted", "killed", "completed"]
    assert manifest(run.folder)["attempts"][-1]["job"]["requeues"] == 2
    assert state_digest(run.folder) == laptop("steps=120")
