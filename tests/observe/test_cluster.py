"""The report shows the location of each rank, from a record that does not list them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worldsize.observe.report.nodes import list_nodes
from worldsize.observe.report.read import Record

CLUSTER = {"nodes": 2, "processes_per_node": 3, "device": "cuda"}
ROLES = [{"role": "server", "processes": 2}, {"role": "worker", "processes": 4}]


def record(cluster: dict[str, Any], *attempts: Any) -> Record:
    return Record(Path(), {"cluster": cluster, "hardware": [], "attempts": attempts}, (), (), {}, (), 1, {}, 0)


def test_places_follow_from_the_roles() -> None:
    listed = list_nodes(record({**CLUSTER, "roles": ROLES}))
    assert [[(each.rank, each.role, each.role_rank, each.device) for each in node.ranks] for node in listed] == [
        [(0, "server", 0, "cuda:0"), (1, "server", 1, "cuda:1"), (2, "worker", 0, "cuda:2")],
        [(3, "worker", 1, "cuda:0"), (4, "worker", 2, "cuda:1"), (5, "worker", 3, "cuda:2")],
    ]


def test_an_older_record_lists_them() -> None:
    place = {"rank": 0, "role": "worker", "role_rank": 0, "node": 1, "device": "cpu"}
    first, second = list_nodes(record({"nodes": 2, "ranks": [place]}))
    assert first.ranks == ()
    assert [(each.rank, each.device) for each in second.ranks] == [(0, "cpu")]


def test_spare_nodes_are_the_last_hosts_and_one_that_only_launches_is_the_first() -> None:
    spare, plain = {**CLUSTER, "spare_nodes": 2, "roles": ROLES}, {**CLUSTER, "roles": ROLES}
    for cluster, hosts in [(spare, "abcd"), (spare, "abc"), (spare, "ab"), (plain, "ab"), (plain, "xab")]:
        assert [each.name for each in list_nodes(record(cluster, {"hosts": [*hosts]}))] == ["node 0 · a", "node 1 · b"]
    assert [each.name for each in list_nodes(record(plain, {"hosts": ["a"]}))] == ["node 0", "node 1"]
