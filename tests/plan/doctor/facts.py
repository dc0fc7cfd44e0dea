"""Facts reported to doctor by four healthy hosts, with changes planted by tests."""

from __future__ import annotations

from typing import Any

from worldsize.core import Cluster, Link
from worldsize.plan.doctor.findings import Findings

GIGABIT = 125e6  # bytes a second


def cluster(kind: Any = "cpu", **links: float) -> Cluster:
    declared = {tier: Link(bandwidth, 1e-4) for tier, bandwidth in links.items()}
    return Cluster("ssh", 4, 8, kind, "gloo" if kind == "cpu" else "nccl", links=declared)


def host(node: int, **changes: Any) -> dict[str, Any]:
    facts = {
        "node": node,
        "host": f"h{node + 1}",
        "must_match": {"Python": "3.11.7", "torch": "2.13.0", "code": "c0de", "data": "da7a"},
        "should_match": {"driver": "580.1", "lock": "10cc"},
        "versions": {"torch": "2.13.0", "numpy": "2.2"},
        "data": [],
        "folder": {"path": "/shared/run", "error": None, "free": 10e9},
        "cpus": 2,
        "devices": 2,
        "first": {"name": "h1", "port": 23456, "address": f"10.0.0.{node + 1}", "error": None},
        "interface": {"name": "eth0", "address": f"10.0.0.{node + 1}", "leads": "eth0", "error": None, "probe": 40000},
        "interfaces": {"lo": {"address": "127.0.0.1"}, "eth0": {"address": f"10.0.0.{node + 1}"}},
        "ahead": 0.0,
    }
    return {**facts, **changes}


def rank(number: int, **changes: Any) -> dict[str, Any]:
    node = number // 2
    transport = {"backend": "gloo", "transports": ["socket"], "interface": "eth0"}
    own = {"rank": number, "node": node, "host": f"h{node + 1}", "device": f"GPU-{number}", "joined": True}
    return {**own, "transport": transport, **changes}


def edge(tier: str, source: int, target: int, bandwidth: float, latency: float = 1e-4) -> dict[str, Any]:
    size = 1 << 20
    ends = {"tier": tier, "source": source, "target": target}
    return {**ends, "size": size, "seconds": size / bandwidth, "latency": latency}


def ring(rates: dict[int, float]) -> list[dict[str, Any]]:
    """Return measured links around four nodes of two ranks: 1 Gbit/s each way, or the node's rate in ``rates``."""
    edges = []
    for node in range(4):
        bandwidth = min(rates.get(end, GIGABIT) for end in (node, (node + 1) % 4))
        edges += [edge("network", 2 * node + place, 2 * ((node + 1) % 4) + place, bandwidth / 2) for place in (0, 1)]
    return edges


def findings(*changed: dict[str, Any], **changes: Any) -> Findings:
    """Return the findings of four hosts, with ``changed`` hosts and additions to the facts of the first."""
    hosts = {node: host(node) for node in range(4)} | {facts["node"]: facts for facts in changed}
    meeting: dict[str, Any] = {
        "hosts": list(hosts.values()),
        "clocks": {},
        "unreached": {str(node): {} for node in hosts},
    }
    meeting = {**meeting, "unseen": {}, "skipped": None, "outcome": {"failure": None}, **changes.pop("meeting", {})}
    base: dict[str, Any] = {"nodes": 4, "hosts": hosts, "meeting": meeting, "ranks": list(map(rank, range(8)))}
    return Findings(**{**base, "edges": ring({}), **changes})
