"""Slurm binds a job's processes to its CPUs, and the job requests as many CPUs as they need."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import slurm as real
from worldsize.observe.report.page import render_page

# these jobs start a fresh interpreter (not `warm_python`): Slurm would not bind processes of an outside parent
CPUS = os.cpu_count() or 1
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(CPUS < 2, reason="needs two CPUs to tell apart"),
]
ON_ONE_NODE = ("recipe=digits", "+cluster=slurm", "cluster.processes_per_node=2", "launcher.wait=true")
# long enough for a sample of the node's health
SLOW = ("steps=8", "observe.health.every=0.2", "faults=[{action: sleep, step: null, seconds: 0.3}]")


@pytest.fixture(scope="module")
def binding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[real.Slurm]:
    """Slurm with one node that has all CPUs of this machine, and binds processes to their job's CPUs."""
    if why := real.missing():
        pytest.skip(why)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    folder = tmp_path_factory.mktemp("slurm")
    with real.running(folder, port=17_050 + 100 * number, nodes=1, cpus=CPUS, task="affinity") as cluster:
        yield cluster


def cpus_of_ranks(folder: Path) -> set[int]:
    """Return the number of CPUs the ranks could use together, from the samples of the node's health."""
    (file,) = (folder / "health").rglob("node_00000.jsonl")
    return {json.loads(line)["cpus"] for line in file.read_text().splitlines()} - {0}  # 0: before they began


def test_two_ranks_of_a_node_are_not_on_one_core(binding: real.Slurm, train: Any) -> None:
    run = train(*ON_ONE_NODE, *SLOW, **binding.environment)
    assert run.code == 0, run.error
    assert cpus_of_ranks(run.folder) == {2}
    facts = binding.facts(run.json("run_manifest.json")["jobs"][-1]["id"])
    assert (facts["CPUs/Task"], facts["JobName"]) == ("2", "digits-ddp")


def test_a_node_with_fewer_cpus_than_its_ranks_need_is_warned_of(binding: real.Slurm, train: Any) -> None:
    run = train(*ON_ONE_NODE, *SLOW, "cluster.cpus_per_task=1", **binding.environment)
    assert run.code == 0, run.error
    assert cpus_of_ranks(run.folder) == {1}
    (log,) = (run.folder / "logs").glob("slurm_*.log")
    warning = "2 processes require 2 CPUs, but can use only 1. Request more CPUs (with Slurm: cluster.cpus_per_task)"
    assert warning in log.read_text()
    assert "require 2 CPUs (cluster.threads, data_workers), 1 available" in render_page([run.folder])


def test_more_cpus_than_a_node_has_are_refused_with_the_key_that_says_how_many(binding: real.Slurm, train: Any) -> None:
    run = train(*ON_ONE_NODE, f"data_workers={CPUS}", **binding.environment)
    assert run.code == 2
    assert f"The job requests {2 + 2 * CPUS} CPUs per node; set cluster.cpus_per_task to change this." in run.error
    assert run.folder is None
