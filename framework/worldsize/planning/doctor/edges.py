"""Aggregates measurements between ranks to links between nodes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from worldsize.core import Link
from worldsize.planning.doctor.findings import Facts

Measured = Mapping[tuple[int, int], Link]  # from node to node; of tiers "device" and "node" the same


def measured(edges: Sequence[Facts], per_node: int) -> dict[str, Measured]:
    """Aggregate measurements from rank to rank to links from node to node, by tier.

    Between nodes the ranks share a link, so their bandwidths add up; inside a node the slowest rank counts, since it
    delays the others.
    """
    edges_by_tier: dict[str, dict[tuple[int, int], list[Facts]]] = defaultdict(lambda: defaultdict(list))
    for edge in edges:
        edges_by_tier[edge["tier"]][edge["source"] // per_node, edge["target"] // per_node].append(edge)
    return {tier: {ends: _link(tier, each) for ends, each in links.items()} for tier, links in edges_by_tier.items()}


def _link(tier: str, edges: Sequence[Facts]) -> Link:
    latency = statistics.median(edge["latency"] for edge in edges)
    rates = [edge["size"] / max(edge["seconds"], 1e-9) for edge in edges]
    return Link(sum(rates) if tier == "network" else min(rates), latency)
