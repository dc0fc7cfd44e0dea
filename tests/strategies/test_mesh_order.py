"""The order of a mesh's axes decides which of them cross nodes and racks, and changes no result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.strategies.test_memberships_of_meshes import trained
from tests.strategies.test_mesh import Losses, built, loaded, reference, save, steps
from worldsize.collectives.cluster_cost import (
    axis_tiers,
    count_leaving_edges,
    crossings_text,
    find_limiting_link,
    list_levels,
)
from worldsize.config.compose import compose_only
from worldsize.config.composed import build_settings
from worldsize.core import Cluster, ConfigError, Link, Strategy, Workload, World
from worldsize.launch.execute import _print_plans
from worldsize.strategies.ddp import DDP
from worldsize.strategies.mesh.layout import ORDER, Layout
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.testing.worlds import run_in_worlds

SWAPPED, STAGES_INSIDE = ["pipeline", "tensor", "data"], ["tensor", "pipeline", "data"]
LINKS = {"node": Link(10e9, 0.0), "rack": Link(2e9, 0.0), "network": Link(0.5e9, 0.0)}


def racks(nodes: int, processes: int, tiers: Mapping[str, int]) -> Cluster:
    return Cluster("test", nodes, processes, "cuda", "nccl", links=LINKS, tiers=tiers)


@pytest.mark.parametrize("order", [*permutations(ORDER)], ids="-".join)
def test_ranks_are_counted_along_the_axes_from_the_innermost_to_the_outermost(order: tuple[str, ...]) -> None:
    sizes = {"pipeline": 2, "data": 3, "context": 2, "tensor": 4}
    ranks = numpy.arange(48).reshape([sizes[axis] for axis in reversed(order)])  # the last axis is the innermost
    ranks_pdct = ranks.transpose([order[::-1].index(axis) for axis in sizes])
    layout = Layout(sizes, order)
    places = [layout.coordinate(rank) for rank in range(48)]
    assert all(ranks_pdct[tuple(place.values())] == layout.get_rank(place) == rank for rank, place in enumerate(places))
    for axis, groups in enumerate(layout.list_groups().values()):
        lines = numpy.moveaxis(ranks_pdct, axis, -1).reshape(-1, ranks_pdct.shape[axis])
        assert sorted(groups) == sorted(lines.tolist())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"order": ["tensor", "data"]},
            r"exactly once, innermost first. Set strategy.order=\[tensor, data, pipeline\]",
        ),
        ({"order": [1, 2, 3]}, r"\[1, 2, 3\] must contain .* Set strategy.order=\[tensor, data, pipeline\]"),
        ({"order": ["data", "data", "tensor"]}, r"Set strategy.order=\[data, tensor, pipeline\]"),
        ({"order": ["tensor", "date", "pipeline"]}, r"strategy.order\[1\]='date' is unknown; did you mean 'data'?"),
        (
            {"tensor": 2, "order": ["data", "tensor", "pipeline"]},
            r"the 8 ranks .* Set strategy.order=\[tensor, data, pip",
        ),
        (
            {"tensor": 4, "pipeline": 2, "order": SWAPPED},
            r"would span nodes. Set strategy.order=\[tensor, pip",
        ),
        (
            {"tensor": 2, "pipeline": 2, "order": ["data", "tensor", "pipeline"], "on_failure": "heal"},
            r"on 2 nodes requires tensor before data.* Move tensor before data",
        ),
    ],
    ids=str,
)
def test_an_order_that_cannot_be_is_refused_before_a_process_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mesh(**options).roles(Cluster("test", 2, 8, "cpu", "gloo"))
    Mesh(tensor=2, pipeline=2, order=SWAPPED).roles(Cluster("test", 2, 8, "cpu", "gloo"))  # four ranks of a node


@pytest.mark.parametrize("size", [{"pipeline": 2}, {"tensor": 2, "pipeline": 2}], ids=str)
def test_elastic_runs_end_with_the_same_bits_in_any_order(size: dict[str, int]) -> None:
    def digest(order: Sequence[str], parts: int) -> str:
        strategy = Mesh(reduce="ordered", on_failure="heal", order=list(order), **size)  # type: ignore[arg-type]
        processes = parts * strategy.tensor * strategy.pipeline
        return run_in_worlds(lambda world: trained(strategy, world), processes)[0][0]

    expected = digest(ORDER, 2)
    assert digest(SWAPPED, 2) == expected
    if "tensor" not in size:
        assert digest(STAGES_INSIDE, 3) == expected
        assert run_in_worlds(lambda world: trained(Single(reduce="ordered"), world), 1)[0][0] == expected


def test_a_checkpoint_of_one_order_goes_on_in_another(tmp_path: Path) -> None:
    before, after = Mesh(data=2, pipeline=2), Mesh(data=2, pipeline=2, order=SWAPPED)

    def first(world: World) -> Losses:
        replica = built(before, world)
        losses = steps(replica, before, world, 0, 3)
        save(tmp_path, replica, world, 3)
        return losses

    def then(world: World) -> tuple[Losses, int]:
        return steps(loaded(tmp_path, after, world), after, world, 3, 6), after.data_rank(world)

    losses = run_in_worlds(first, 4)[0]
    resumed = run_in_worlds(then, 4)
    assert [part for _, part in resumed] == [0, 0, 1, 1]  # by default it is 0, 1, 0, 1
    assert [*losses, *resumed[0][0]] == pytest.approx(reference()[0][:6], rel=1e-5)


@pytest.mark.parametrize("order", [ORDER, SWAPPED, STAGES_INSIDE, ("data", "pipeline", "tensor")], ids="-".join)
@pytest.mark.parametrize(
    ("nodes", "tiers"), [(8, {}), (8, {"rack": 2}), (8, {"rack": 2, "pod": 4}), (12, {"rack": 2, "pod": 6})], ids=str
)
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (3, 4), (6, 1)], ids=str)
def test_rings_of_an_axis_share_the_links_that_they_cross(
    order: Sequence[str], nodes: int, tiers: dict[str, int], sizes: tuple[int, int]
) -> None:
    """Count the edges of all rings that leave each node, rack or pod, also of rings that begin inside one."""
    pipeline, tensor = sizes
    cluster = replace(racks(nodes, 12 * nodes, tiers), links={**LINKS, "pod": Link(1e9, 0.0)})
    data = 12 * nodes // (pipeline * tensor)
    layout = Layout({"pipeline": pipeline, "data": data, "tensor": tensor}, order)
    for axis, rings in layout.list_groups().items():
        edges = [edge for ring in rings for edge in pairwise([*ring, ring[0]]) if len(ring) > 1]
        hosts = Counter(source // 12 for source, to in edges if source // 12 != to // 12)
        assert count_leaving_edges(cluster, len(rings[0]), layout.strides[axis]) == max(hosts.values(), default=0), axis
        slowest = LINKS["node"].bandwidth
        for level in list_levels(cluster):
            crossing = Counter(
                source // level.ranks for source, to in edges if source // level.ranks != to // level.ranks
            )
            if crossing and level.name != "node":
                slowest = min(slowest, cluster.links[level.name].bandwidth / max(crossing.values()))
        assert find_limiting_link(cluster, len(rings[0]), layout.strides[axis]).bandwidth == pytest.approx(slowest), (
            axis
        )


def test_the_axis_that_crosses_racks_is_predicted_with_their_uplink() -> None:
    """Two racks of two nodes of one process.

    With stages in different racks, the data-parallel parts gather 2 × half of 0.4 GB over a node's link, and the
    two ranks of a rack send 16 messages of 1 MB each over its uplink, at half of its bandwidth. With the stages inside,
    the messages have a node's link, and two rings share the uplink.
    """
    work = Workload(8e8, 1.6e9, boundary_bytes=1e6, micro_batches=8)
    cluster, mesh = racks(4, 4, {"rack": 2}), Mesh(data=2, pipeline=2)
    assert mesh.cost(work, cluster).communication_seconds == pytest.approx(2 * 2e8 / 2e9 + 16 * 1e6 / 0.25e9)
    inside = replace(mesh, order=STAGES_INSIDE)
    assert inside.cost(work, cluster).communication_seconds == pytest.approx(2 * 2e8 / 0.25e9 + 16 * 1e6 / 2e9)


def test_a_line_says_which_tier_each_axis_crosses() -> None:
    cluster = racks(4, 16, {"rack": 2})

    def said(strategy: Strategy, cluster: Cluster = cluster) -> str:
        return crossings_text(cluster, strategy.groups(cluster))

    default = Mesh(data=2, tensor=4, pipeline=2)
    assert said(default) == "mesh: pipeline across racks, data within a rack, tensor within a node"
    inside = replace(default, order=STAGES_INSIDE)
    assert said(inside) == "mesh: pipeline within a rack, data across racks, tensor within a node"
    assert axis_tiers(cluster, inside.groups(cluster)) == {"pipeline": "rack", "data": "network", "tensor": "node"}
    assert said(inside, replace(cluster, tiers={})).endswith("data across nodes, tensor within a node")
    assert said(Mesh(tensor=2)) == "mesh: data across racks, tensor within a node"
    assert said(DDP()) == said(inside, replace(cluster, nodes=1, tiers={})) == ""


def test_show_says_which_axis_crosses_racks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = ["+cluster=ssh", "cluster.hosts=[a,b,c,d]", "cluster.processes_per_node=2", "+cluster.tiers.rack=2"]
    mesh = ["strategy=mesh", "strategy.tensor=2", "strategy.pipeline=2", f"strategy.order=[{','.join(STAGES_INSIDE)}]"]
    settings = build_settings(compose_only(["recipe=stdlib_lm", *hosts, *mesh]))
    assert _print_plans([settings.create_plan(tmp_path)], settings) == 0
    said = capsys.readouterr().out
    assert "# mesh: pipeline within a rack, data across racks, tensor within a node\n" in said
