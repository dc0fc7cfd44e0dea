"""Measured links are compared with declared ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from tests.plan.doctor.facts import GIGABIT, cluster, edge, findings, host, rank, ring
from worldsize.core import Link
from worldsize.plan.doctor import link_checks
from worldsize.plan.doctor.evaluate import evaluate
from worldsize.plan.doctor.findings import aggregate_links
from worldsize.plan.doctor.link_checks import check_links, find_slow_links, list_pairs, summarize_tiers

SLOW = 50e6 / 8  # 50 Mbit/s


def bad(edges: list[dict[str, Any]], **changes: Any) -> list[Any]:
    return [check for check in check_links(findings(edges=edges, **changes), cluster(network=GIGABIT)) if not check.ok]


def test_ranks_of_a_node_share_its_link_and_the_slowest_link_bounds_a_tier() -> None:
    edges = [edge("network", 0, 2, 3e7, 1e-4), edge("network", 1, 3, 4e7, 3e-4), edge("network", 2, 0, 1e8, 2e-4)]
    edges += [edge("network", 3, 1, 1e8, 2e-4), edge("node", 0, 1, 5e9), edge("node", 1, 0, 4e9)]
    links = aggregate_links(edges, per_node=2)
    assert links["network"][0, 1].bandwidth == pytest.approx(7e7)
    assert links["network"][1, 0].bandwidth == pytest.approx(2e8)
    assert links["node"][0, 0].bandwidth == pytest.approx(4e9)
    assert summarize_tiers(links, {})["network"].bandwidth == pytest.approx(7e7)
    assert summarize_tiers(links, {})["network"].latency == pytest.approx(2e-4)
    rings = {"network": {"bandwidth": 6e7, "gap": 1e-3, "incast": 0.7}}
    assert replace(summarize_tiers(links, rings)["network"], latency=0) == Link(6e7, 0, gap=1e-3, incast=0.7)
    assert summarize_tiers(links, rings)["node"].bandwidth == pytest.approx(4e9)


@pytest.mark.parametrize("node", range(4))
def test_one_slow_link_in_a_ring_is_named_by_its_host_and_interface_with_alternatives(node: int) -> None:
    there = {**host(node)["interfaces"], "ib0": {"address": "10.9.0.9"}}
    changed = host(node, interfaces=there)
    results = check_links(findings(changed, edges=ring({node: SLOW})), cluster(network=GIGABIT))
    (check,) = [check for check in results if not check.ok]
    assert (check.check, check.host) == ("network link", f"h{node + 1}")
    assert check.detail == "6.25 MB/s over eth0, cluster.links.network declares 125 MB/s"
    assert "Try another interface (ib0 10.9.0.9) with cluster.interface" in check.remedy
    assert "cluster.links.network.bandwidth=6.2e+06" in check.remedy


def test_a_link_passes_with_half_of_its_declared_bandwidth_and_not_with_less() -> None:
    assert not bad(ring({2: 0.51 * GIGABIT}))
    assert bad(ring({2: 0.49 * GIGABIT}))


def test_links_that_are_slow_everywhere_are_reported_once() -> None:
    (check,) = bad(ring({node: SLOW for node in range(4)}))
    assert check.host == "h1, h2, h3, h4"


def test_a_single_slow_direction_between_two_hosts_is_blamed_on_neither() -> None:
    links = {ends: Link(1e8, 1e-4) for ends in [(0, 1), (1, 2), (2, 3), (3, 0)]}
    slow_links = find_slow_links({**links, (1, 2): Link(1e6, 1e-4)}, 5e7)
    assert (slow_links.nodes, slow_links.links) == ([], [(1, 2)])
    two = {(0, 1): Link(1e6, 1e-4), (1, 0): Link(1e8, 1e-4)}
    assert find_slow_links(two, 5e7).links == [(0, 1)]


def test_a_slow_link_inside_a_node_names_its_host_and_only_gpus_are_judged() -> None:
    edges = [edge("node", 2 * node + place, 2 * node + 1 - place, 1e9) for node in range(4) for place in (0, 1)]
    edges[4] = edge("node", 4, 5, 1e8)
    edges += [edge("device", number, number, 1e9 if number == 7 else 2e12) for number in range(8)]
    facts = findings(edges=edges)
    failed = [check for check in check_links(facts, cluster("cuda", node=1e9, device=2e12)) if not check.ok]
    assert [(check.check, check.host) for check in failed] == [("node link", "h3"), ("device link", "h4")]
    assert "cluster.links.node.bandwidth=1e+08" in failed[0].remedy
    unjudged = [*check_links(facts, cluster(node=1e9, device=2e12))]
    assert all(check.ok for check in unjudged)
    assert [check.detail for check in unjudged if (check.check, check.host) == ("node link", "h3")] == [
        "100 MB/s, 100 µs (not declared)"
    ]


def test_plain_sockets_where_a_fabric_is_declared_fail_the_check() -> None:
    transport = {"backend": "nccl", "transports": ["shm", "socket"], "interface": "eth0"}
    ranks = [rank(number, transport=transport) for number in range(8)]
    failed = [
        check for check in check_links(findings(ranks=ranks, edges=[]), cluster("cuda", network=12.5e9)) if not check.ok
    ]
    assert [check.host for check in failed] == ["h1", "h2", "h3", "h4"]
    assert "plain sockets on eth0" in failed[0].detail


def test_the_report_has_the_links_and_pairs_that_plan_reads() -> None:
    written = evaluate(findings(), cluster(network=GIGABIT), needed_bytes=0).to_json()
    assert written["schema"] == 1
    network = {"bandwidth": pytest.approx(GIGABIT), "latency": pytest.approx(1e-4), "gap": 0.0, "incast": 1.0}
    assert written["links"]["network"] == network
    assert [(pair["from"], pair["to"]) for pair in written["pairs"]] == [
        ("h1", "h2"),
        ("h2", "h3"),
        ("h3", "h4"),
        ("h4", "h1"),
    ]
    assert {*written["checks"][0]} == {"check", "host", "ok", "detail", "remedy"}
    assert [entry["host"] for entry in written["hosts"]] == ["h1", "h2", "h3", "h4"]
    assert list_pairs(aggregate_links([], 2), findings()) == []


def in_racks(uplink: float, one_host: float) -> list[dict[str, Any]]:
    """Return the links of two racks of two nodes of two ranks: 1 Gbit/s inside, ``uplink`` shared by four ranks."""
    near = [edge("rack", rank, rank // 4 * 4 + (rank + 2) % 4, GIGABIT / 2) for rank in range(8)]
    far = [edge("network", rank, (rank + 4) % 8, uplink / 4, 9e-4) for rank in range(8)]
    alone = [edge("one-host network", rank, (rank + 4) % 8, one_host / 2, 2e-4) for rank in (0, 1, 4, 5)]
    return [*near, *far, *alone]


def test_the_uplink_of_a_rack_is_shared_by_its_hosts_and_told_from_the_links_inside() -> None:
    edges = in_racks(uplink=4e7, one_host=3e7)
    racks = replace(cluster(rack=GIGABIT, network=4e7), tiers={"rack": 2})
    rings = {"network": {"bandwidth": 3.9e7, "gap": 1e-3, "incast": 0.9}}
    report = evaluate(findings(edges=edges, rings=rings), racks, needed_bytes=0)
    assert report.ok
    assert report.links["rack"].bandwidth == pytest.approx(GIGABIT)
    assert report.links["network"] == Link(3.9e7, pytest.approx(2e-4), gap=1e-3, incast=0.9)  # type: ignore[arg-type]
    assert [*report.links] == ["rack", "network"]
    lines = {(check.check, check.host): check.detail for check in report.checks}
    assert lines["network link", "h1, h2"] == "40 MB/s, 900 µs (cluster.links.network declares 40 MB/s)"
    assert lines["one-host network link", "h3"] == "30 MB/s, 200 µs (not declared)"
    assert lines["rack link", "h4"] == "125 MB/s, 100 µs (cluster.tiers.rack declares 125 MB/s)"
    ends = [(pair.source, pair.target, round(pair.link.bandwidth / 1e6)) for pair in report.pairs]
    assert ends[:4] == [("h1", "h2", 125), ("h2", "h1", 125), ("h3", "h4", 125), ("h4", "h3", 125)]
    assert ends[4:] == [("h1", "h3", 30), ("h3", "h1", 30)]


def test_a_slow_uplink_and_a_slow_rack_are_named_by_their_hosts() -> None:
    racks = replace(cluster(rack=GIGABIT, network=4e7), tiers={"rack": 2})
    (uplinks,) = [check for check in check_links(findings(edges=in_racks(1e7, 1e7)), racks) if not check.ok]
    assert (uplinks.check, uplinks.host) == ("network link", "h1, h2, h3, h4")
    assert "between all groups of 2 hosts, cluster.links.network declares 40 MB/s" in uplinks.detail
    assert uplinks.remedy.startswith("Check the uplink of the switch of these hosts")
    edges = [
        {**each, "size": each["size"] / 4} if each["tier"] == "rack" and each["source"] >= 4 else each
        for each in in_racks(4e7, 4e7)
    ]
    failed = [check for check in check_links(findings(edges=edges), racks) if not check.ok]
    assert [(check.check, check.host) for check in failed] == [("rack link", "h3"), ("rack link", "h4")]
    assert "cluster.tiers.rack.bandwidth=3.1e+07" in failed[0].remedy


class Counted(dict[Any, Any]):
    """Counts full iterations over it."""

    looks = 0

    def __iter__(self) -> Any:
        self.looks += 1
        return super().__iter__()

    def items(self) -> Any:
        self.looks += 1
        return super().items()


def test_the_links_between_each_two_hosts_are_not_looked_through_for_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several hundred hosts have as many links each: cubic time would be too long."""
    looks = []
    for nodes in (10, 40):
        both_ways = permutations(range(nodes), 2)
        edges = [edge("network", 2 * one, 2 * two, 1e6 if 7 in (one, two) else 1e9) for one, two in both_ways]
        links = Counted(aggregate_links(edges, 2)["network"])
        monkeypatch.setattr(link_checks, "aggregate_links", lambda *_: {"network": links})  # noqa: B023
        found = list(check_links(findings(edges=edges), cluster(network=GIGABIT)))
        assert [check.host for check in found if not check.ok and "link" in check.check] == ["node 7"]
        looks.append(links.looks)
    assert looks[0] == looks[1] < 10
