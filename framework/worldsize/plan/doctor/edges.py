"""Aggregates measurements between ranks to links between nodes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from worldsize.core import Cluster, Link
from worldsize.plan.doctor.findings import Facts

Measured = Mapping[tuple[int, int], Link]  # from node to node; of tiers "device" and "node" the same
INSIDE = ("device", "node")  # tiers whose links each rank has for itself
ONE_HOST = "one-host "  # begins the name of a tier whose uplinks one host uses, while the others of its rack are idle


def units(cluster: Cluster) -> dict[str, int]:
    """Return the ranks of a unit of each tier, the innermost first: of a node, of those in between, of the network."""
    nodes = {"node": 1, **cluster.tiers, "network": cluster.nodes}
    return {tier: count * cluster.processes_per_node for tier, count in nodes.items()}


def sharing(cluster: Cluster) -> dict[str, int]:
    """Return by tier how many ranks share one of its links: one inside a node, those of a node or of a rack beyond."""
    sizes = units(cluster)
    return dict(zip(sizes, (1, *sizes.values()), strict=False))


def measured(edges: Sequence[Facts], per_node: int, shared: Mapping[str, int] | None = None) -> dict[str, Measured]:
    """Aggregate measurements from rank to rank to links from node to node, by tier.

    Between nodes the ranks share a link, so their bandwidths add up; inside a node the slowest rank counts, since it
    delays the others. ``shared``: by tier, the ranks that share a link if these are not those of a node. An uplink of
    several nodes has the first one's number.
    """
    edges_by_tier: dict[str, dict[tuple[int, int], list[Facts]]] = defaultdict(lambda: defaultdict(list))
    for edge in edges:
        ranks = max(per_node, (shared or {}).get(edge["tier"], 0))
        source, target = (edge[end] // ranks * ranks // per_node for end in ("source", "target"))
        edges_by_tier[edge["tier"]][source, target].append(edge)
    return {tier: {ends: _link(tier, each) for ends, each in links.items()} for tier, links in edges_by_tier.items()}


def _link(tier: str, edges: Sequence[Facts]) -> Link:
    latency = statistics.median(edge["latency"] for edge in edges)
    rates = [edge["size"] / max(edge["seconds"], 1e-9) for edge in edges]
    return Link(min(rates) if tier in INSIDE else sum(rates), latency)
