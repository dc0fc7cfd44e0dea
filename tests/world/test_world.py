"""Processes find their place from the environment, and form process groups."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from worldsize.core import Cluster, ConfigError, Role, World
from worldsize.testing.worlds import run_in_worlds
from worldsize.world.environments import Node, Placement, derive_port, plugin_folders, read_node
from worldsize.world.environments import placement as placed
from worldsize.world.roles import find_role
from worldsize.world.world import connects_late, open_world, publish_place, threads_per_process


def test_a_placement_can_be_read_back_from_its_own_variables() -> None:
    placement = Placement(rank=5, world_size=8, local_rank=1, local_world_size=4, store="file:///x")
    assert placed(placement.variables()) == placement
    assert placement.node_rank == 1


def test_a_process_started_alone_is_rank_0_of_1() -> None:
    assert placed({}) == Placement(0, 1, 0, 1, "env://")


def test_an_incomplete_environment_is_an_error_that_names_what_is_missing() -> None:
    missing = r"missing environment variables: WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE \(set: RANK\)"
    with pytest.raises(ConfigError, match=missing):
        placed({"RANK": "0"})


def test_a_rank_that_is_not_a_number_is_named() -> None:
    variables = {**Placement(0, 1, 0, 1, "env://").variables(), "RANK": "zero"}
    with pytest.raises(ConfigError, match="RANK='zero' is not a number"):
        placed(variables)


def test_plugin_folders_are_separated_as_in_path() -> None:
    assert [str(path) for path in plugin_folders({"WORLDSIZE_PLUGINS": "/a::/b"})] == ["/a", "/b"]


def test_roles_take_consecutive_ranks() -> None:
    roles = {"worker": Role(3), "server": Role(2)}
    assert [find_role(rank, roles) for rank in range(5)] == [
        ("worker", 0),
        ("worker", 1),
        ("worker", 2),
        ("server", 0),
        ("server", 1),
    ]


def test_a_launcher_that_starts_another_number_of_processes_is_refused() -> None:
    cluster = Cluster("test", 1, 4, "cpu", "gloo")
    with (
        pytest.raises(ConfigError, match="the plan has 4 processes, but the launcher started 1"),
        open_world(Placement(0, 1, 0, 1, "env://"), cluster, {"worker": Role(4)}),
    ):
        pass


@pytest.mark.parametrize("restart", ["gang", "heal"])
def test_torch_records_the_last_collectives_of_every_gang_and_writes_no_pickle(
    restart: Literal["gang", "heal"],
) -> None:
    def body(_: World) -> list[str | None]:
        dumps = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
        names = ("TORCH_FR_BUFFER_SIZE", *dumps, "TORCH_DISTRIBUTED_DEBUG")
        for name in names:
            os.environ.pop(name, None)
        roles = {"worker": Role(1, restart=restart)}
        with open_world(Placement(0, 1, 0, 1, "env://"), Cluster("test", 1, 1, "cpu", "gloo", debug=True), roles):
            return [os.environ.get(name) for name in names]

    assert run_in_worlds(body, 1) == [["200", "0", "0", "INFO"]]


@pytest.mark.parametrize(("processes", "late"), [(32, False), (33, True)])
def test_in_a_large_gang_that_heals_two_ranks_connect_when_they_first_communicate(processes: int, late: bool) -> None:
    def body(_: World) -> bool:
        os.environ.pop("TORCH_GLOO_LAZY_INIT", None)
        cluster = Cluster("test", 1, processes, "cpu", "gloo")
        placement = Placement(0, processes, 0, processes, "env://")
        with open_world(placement, cluster, {"worker": Role(processes, restart="heal")}):
            return connects_late()

    assert run_in_worlds(body, 1) == [late]


def test_processes_of_a_node_share_its_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_process(1) == cores
    assert threads_per_process(cores * 3) == 1


def test_two_nodes_have_a_group_each_and_each_local_rank_a_group_across_them() -> None:
    def members(world: World) -> dict[str, list[int]]:
        return {name: dist.get_process_group_ranks(group) for name, group in world.groups.items()}

    first, second, third, fourth = run_in_worlds(members, 4, local_size=2)
    assert first["all"] == first["worker"] == [0, 1, 2, 3]
    assert (first["node"], second["node"]) == ([0, 1], [0, 1])
    assert (third["node"], fourth["node"]) == ([2, 3], [2, 3])
    assert first["across"] == third["across"] == [0, 2]
    assert second["across"] == fourth["across"] == [1, 3]


SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-009,12],login",
    "SLURM_JOB_ID": "17",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}
MPI_NUMBERS = {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
MPI = {f"OMPI_COMM_WORLD_{name}": number for name, number in MPI_NUMBERS.items()}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SKY = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n"}


def test_places_are_looked_up_by_whoever_asks() -> None:
    def body(world: World) -> tuple[str, str] | None:
        os.environ["SLURMD_NODENAME"] = f"host-{world.rank}"
        place_of = publish_place(world)
        return place_of(2) if world.rank == 0 else None  # the others may be absent

    assert run_in_worlds(body, 3) == [("host-2", "cpu"), None, None]


def test_tasks_of_srun_and_of_mpirun_know_their_placement() -> None:
    placement = placed(SLURM)
    assert (placement.rank, placement.world_size, placement.local_rank, placement.local_world_size) == (3, 4, 1, 2)
    assert placement.store == f"tcp://gpu007:{derive_port('17')}"
    placement = placed(MPI)
    assert (placement.rank, placement.world_size, placement.node_rank) == (5, 8, 1)


def test_the_innermost_launcher_places_a_process_unless_another_is_named() -> None:
    both = {**SLURM, **TORCHRUN}
    assert placed(both).world_size == 2
    assert placed(both, "slurm").world_size == 4
    assert placed({**SLURM, **MPI}).world_size == 8
    script = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}  # a script of sbatch
    assert placed(script).world_size == 1
    assert placed(SLURM, "alone").world_size == 1


@pytest.mark.parametrize(
    ("variables", "kind", "message"),
    [
        ({**SLURM, **TORCHRUN, "GROUP_WORLD_SIZE": "1"}, "auto", "srun started 4 torchrun"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,1"}, "auto", "unevenly over the nodes: [3, 1]"),
        ({**TORCHRUN, "RANK": "2"}, "auto", "rank 2 of 2"),
        ({}, "slurm", "SLURM_PROCID"),
        (SLURM, "slurmm", "did you mean"),
    ],
)
def test_contradictory_variables_are_refused_with_both_values(
    variables: dict[str, str], kind: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        placed(variables, kind)


def test_a_host_knows_its_place_under_every_scheduler() -> None:
    assert read_node({}) == Node()
    assert read_node(SLURM) == Node(1, 2, "gpu007")
    assert read_node(SKY) == Node(1, 2, "10.0.0.4")
    job = {"JOB_COMPLETION_INDEX": "2", "WORLDSIZE_NODES": "4", "WORLDSIZE_FIRST": "run-0.run"}
    assert read_node(job) == Node(2, 4, "run-0.run")
    assert read_node({**job, "WORLDSIZE_NODE_OFFSET": "1"}) == Node(3, 4, "run-0.run")
    assert read_node({**SLURM, **job, "WORLDSIZE_NODE_RANK": "0"}) == Node(0, 4, "run-0.run")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**SKY, "SKYPILOT_NUM_NODES": "3"}, "SKYPILOT_NUM_NODES=3, but SKYPILOT_NODE_IPS lists 2"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, "8 tasks on 2 nodes"),
        ({"WORLDSIZE_NODES": "2", "WORLDSIZE_NODE_RANK": "2", "WORLDSIZE_FIRST": "a"}, "invalid node rank 2 of 2"),
        ({"WORLDSIZE_NODES": "2", "WORLDSIZE_NODE_RANK": "1"}, "WORLDSIZE_FIRST"),
    ],
)
def test_a_host_refuses_contradictory_variables(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_node(variables)


@pytest.mark.heavy
def test_in_a_large_world_only_ranks_that_talk_are_connected() -> None:
    def body(world: World) -> tuple[float, int, int]:
        before, ones = _sockets(), torch.ones(10_000)
        for name in ("all", "checkpoint/worker", "node", "across"):
            dist.all_reduce(ones, group=world.groups[name])
        return ones[0].item(), before, _sockets()

    size = 34
    for total, before, after in run_in_worlds(body, size, local_size=size // 2):
        assert total == size * size * (size // 2) * 2
        assert before < size // 2, "nobody has said anything yet"
        assert after < 2 * size, "four groups that connect all with all are more than 80 connections"


def _sockets() -> int:
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # a thread has closed it meanwhile
            count += str(path.readlink()).startswith("socket:")
    return count
