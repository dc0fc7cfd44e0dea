"""Placement and process groups."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from worldsize.core import Cluster, ConfigError, Role, World
from worldsize.testing.worlds import run_in_worlds
from worldsize.world.environments import Placement, plugin_folders
from worldsize.world.environments import placement as placed
from worldsize.world.world import open_world, role_of, threads_per_process


def test_a_placement_survives_its_own_variables() -> None:
    placement = Placement(rank=5, world_size=8, local_rank=1, local_world_size=4, store="file:///x")
    assert placed(placement.variables()) == placement
    assert placement.node_rank == 1


def test_a_process_started_alone_is_rank_0_of_1() -> None:
    assert placed({}) == Placement(0, 1, 0, 1, "env://")


def test_half_an_environment_is_an_error_that_names_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="RANK are set but WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE are not"):
        placed({"RANK": "0"})


def test_a_rank_that_is_not_a_number_is_named() -> None:
    variables = {**Placement(0, 1, 0, 1, "env://").variables(), "RANK": "zero"}
    with pytest.raises(ConfigError, match="RANK='zero' is not a number"):
        placed(variables)


def test_plugin_folders_are_separated_as_in_path() -> None:
    assert [str(path) for path in plugin_folders({"WORLDSIZE_PLUGINS": "/a::/b"})] == ["/a", "/b"]


def test_roles_take_consecutive_ranks() -> None:
    roles = {"worker": Role(3), "server": Role(2)}
    assert [role_of(rank, roles) for rank in range(5)] == [
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


def test_processes_of_a_node_share_its_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_process(1) == cores
    assert threads_per_process(cores * 3) == 1


def test_two_nodes_have_a_group_each_and_a_group_of_leaders() -> None:
    def members(world: World) -> dict[str, list[int]]:
        return {name: dist.get_process_group_ranks(group) for name, group in world.groups.items() if world_in(group)}

    def world_in(group: dist.ProcessGroup) -> bool:
        return dist.get_rank(group) >= 0

    first, second, third, fourth = run_in_worlds(members, 4, local_size=2)
    assert first["all"] == first["worker"] == [0, 1, 2, 3]
    assert (first["node"], second["node"]) == ([0, 1], [0, 1])
    assert (third["node"], fourth["node"]) == ([2, 3], [2, 3])
    assert first["leaders"] == third["leaders"] == [0, 2]
