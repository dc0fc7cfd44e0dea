"""Under a real Slurm, a healing run survives the loss of any of its nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import slurm as real
from tests.clusters.test_slurm import DIGITS, job_of, logs, manifest, reasons, state_digest, taken_out
from tests.support.waiting import wait_until
from worldsize.testing.hosts import Hosts

SLOW = "faults=[{action: sleep, rank: null, step: null, seconds: 0.1, attempt: null}]"
pytestmark = pytest.mark.slow
HEAL = ("+cluster=slurm", "log_every=1", "strategy.on_failure=heal", "cluster.nodes=2", "launcher.node_timeout=6", SLOW)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[real.Slurm]:
    """Slurm with three nodes."""
    if why := real.missing():
        pytest.skip(why)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    with real.running(tmp_path_factory.mktemp("three"), port=17_050 + 100 * number, nodes=3) as cluster:
        yield cluster


@pytest.fixture
def undisturbed(reference_run: Any) -> Callable[..., str]:
    """``undisturbed("steps=60")`` is the digest of an undisturbed run of four local processes."""
    return lambda *options: state_digest(reference_run(*DIGITS, *options, "cluster.processes=4").folder)


def test_a_spare_node_takes_the_place_of_one_that_is_taken_out(
    three: real.Slurm, train: Any, undisturbed: Callable[..., str], begun: Any, warm_python: Path
) -> None:
    own = (f"launcher.python={warm_python}", "cluster.processes_per_node=2", "cluster.spare_nodes=1")
    run = train(*DIGITS, *HEAL, *own, "steps=60", "checkpoint.every=0", **three.environment)
    assert "#SBATCH --nodes=3\n" in (run.folder / "slurm.sh").read_text()
    begun(run.folder, after=20)
    with taken_out(three, "127.0.0.2"):
        three.wait_for(job_of(run.folder), "COMPLETED")
    assert reasons(run.folder) == ["completed"], logs(run.folder)
    memberships = manifest(run.folder)["attempts"][0]["memberships"]
    assert [each["members"] for each in memberships] == [[0, 1, 2, 3], [0, 1, 4, 5]]
    assert state_digest(run.folder) == undisturbed("steps=60")


def test_a_run_whose_first_node_dies_is_queued_again_by_another_and_goes_on_from_its_checkpoint(
    three: real.Slurm, train: Any, undisturbed: Callable[..., str], begun: Any, warm_python: Path
) -> None:
    """The job's script dies with the node; Slurm by itself would keep the other nodes busy until the time limit."""
    own = (f"launcher.python={warm_python}", "cluster.processes_per_node=2", "cluster.spare_nodes=1")
    run = train(*DIGITS, *HEAL, *own, "steps=80", **three.environment)
    begun(run.folder, after=25)
    three.kill("127.0.0.1")
    three.wait_for(job_of(run.folder), "PENDING", "REQUEUED")
    assert (run.folder / "logs" / f"code_{job_of(run.folder)}_0.lost").exists()
    three.start("127.0.0.1")  # the node is repaired; the job needs three
    three.wait_for(job_of(run.folder), "COMPLETED", seconds=300)
    first, second = manifest(run.folder)["attempts"]
    assert (first["exit_reason"], second["exit_reason"]) == ("killed", "completed"), logs(run.folder)
    assert second["steps"][0] >= 20
    assert second["job"]["requeues"] == 1
    assert state_digest(run.folder) == undisturbed("steps=80")


def test_a_first_node_that_was_cut_off_ends_before_the_job_that_was_queued_again_begins(
    three: real.Slurm, train: Any, begun: Any
) -> None:
    """Slurm cannot end processes on a node it cannot reach: the node must check whether it still owns the job."""
    own = (f"launcher.python={sys.executable}", "cluster.processes_per_node=2")
    run = train(*DIGITS, *HEAL, *own, "steps=2000", **three.environment)
    begun(run.folder, after=25)
    job, first, agents = job_of(run.folder), "127.0.0.1", f"{sys.executable} -m worldsize agent"
    os.kill(three.daemon(first), signal.SIGKILL)
    agent, *_ = three.processes(first, agents)
    os.kill(agent, signal.SIGSTOP)
    try:
        wait_until(lambda: three.facts(job)["Restarts"] == "1")  # the other node has requeued the job
        assert agent in three.processes(first, agents)
    finally:
        os.kill(agent, signal.SIGCONT)
    wait_until(lambda: not three.processes(first, agents))
    assert "is lost, and this host no longer leads the run; exiting" in logs(run.folder)
    assert reasons(run.folder) == ["running"]  # the next attempt has not begun
    three.ask("scancel", job)
    three.start(first)


def test_a_node_that_alone_loses_its_link_to_the_first_has_no_healthy_job_queued_again(
    four: Hosts, tmp_path: Path, train: Any, undisturbed: Callable[..., str], begun: Any, warm_python: Path
) -> None:
    """It still reaches Slurm, the run folder and the other node, and rejoins once it reaches the first again."""
    own = (f"launcher.python={warm_python}", "cluster.nodes=3", "cluster.processes_per_node=1", "logical_ranks=12")
    with real.running_on(four, tmp_path / "slurm", port=17_050) as cluster:
        run = train(*DIGITS, *HEAL, *own, "steps=320", "checkpoint.every=0", **cluster.environment)
        assert run.code == 0, run.error
        begun(run.folder, after=20)
        separate(four, 1, 2, state="on")
        try:
            wait_until(lambda: (run.folder / "events.jsonl").exists())  # the other nodes continue
        finally:
            separate(four, 1, 2, state="off")
        cluster.wait_for(job_of(run.folder), "COMPLETED")
        assert cluster.facts(job_of(run.folder))["Restarts"] == "0"
    assert reasons(run.folder) == ["completed"], logs(run.folder)
    memberships = [each["members"] for each in manifest(run.folder)["attempts"][0]["memberships"]]
    assert memberships == [[0, 1, 2], [0, 2], [0, 2, 1]]
    assert state_digest(run.folder) == undisturbed("steps=320", "logical_ranks=12")


def separate(hosts: Hosts, *apart: int, state: str) -> None:
    """Cut the connections between these hosts, but not to others ("on"), or restore them ("off")."""
    for host in apart:
        port = ("link", "set", f"p{host}", "type", "bridge_slave", "isolated", state)
        subprocess.run(["ip", "-n", hosts.find_switch(host), *port], check=True, timeout=120)
