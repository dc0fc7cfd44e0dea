"""Findings about a cluster, and node-to-node links from rank-to-rank measurements."""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worldsize.core import Cluster, Link
from worldsize.files import read_regular
from worldsize.strict_json import LARGEST

Facts = Mapping[str, Any]
REPORT = "report"  # name of the file with the report, which is derived from all other facts


def write_facts(folder: Path, name: str, facts: Facts) -> None:
    """Write ``name``.json atomically.

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(exist_ok=True)
    draft = folder / f".{name}_{os.getpid()}"
    draft.write_text(json.dumps(dict(facts)))
    draft.replace(folder / f"{name}.json")


def read_facts(folder: Path, name: str) -> Facts:
    """Read facts written by :func:`write_facts`; return an empty mapping if missing or invalid."""
    with suppress(OSError, ValueError):
        facts: Facts = json.loads(read_regular(folder / f"{name}.json", at_most=LARGEST))
        return facts
    return {}


@dataclass(frozen=True)
class Findings:
    """Facts collected about a cluster: hosts, connections, ranks and links."""

    nodes: int  # expected number of nodes
    hosts: Mapping[int, Facts]  # by node
    meeting: Facts = field(default_factory=dict)  # facts received by the first host from the others
    ranks: Sequence[Facts] = ()  # facts reported by each process
    edges: Sequence[Facts] = ()  # measured links from rank to rank
    rings: Mapping[str, Facts] = field(default_factory=dict)  # ring measurements by tier
    names: Sequence[str] = ()  # host names by node, if the launcher knows them

    def get_host_name(self, node: int) -> str:
        """Return the node's host name from the facts or the launcher, or a label such as "node 3"."""
        if node in self.hosts:
            return str(self.hosts[node]["host"])
        return self.names[node] if node < len(self.names) else f"node {node}"

    @property
    def first(self) -> Facts | None:
        """The facts of the first host, used as the reference for others."""
        return self.hosts[min(self.hosts)] if self.hosts else None


def read_findings(folder: Path, nodes: int, names: Sequence[str] = ()) -> Findings:
    """Read the existing findings of hosts and ranks in ``folder``."""
    meeting = read_facts(folder, "meeting")
    hosts = {int(facts["node"]): facts for facts in meeting.get("hosts", ())}
    for path in sorted(folder.glob("node_*.json")):
        facts = read_facts(folder, path.stem)
        # clock offset from the file system's, for hosts that cannot connect to the first one
        hosts[int(facts["node"])] = {**facts, "ahead": facts["written"] - path.stat().st_mtime}
    ranks = [read_facts(folder, path.stem) for path in sorted(folder.glob("rank_*.json"))]
    return Findings(nodes, dict(sorted(hosts.items())), meeting, ranks, names=names, **read_facts(folder, "links"))


Measured = Mapping[tuple[int, int], Link]  # from node to node; equal nodes for tiers "device" and "node"
INSIDE = ("device", "node")  # tiers where each rank has its own links
ONE_HOST = "one-host "  # prefix of the tier name for uplinks measured by one host while the rest of its rack was idle


def count_unit_ranks(cluster: Cluster) -> dict[str, int]:
    """Return ranks per unit of each tier (node, declared tiers, network), innermost first."""
    nodes = {"node": 1, **cluster.tiers, "network": cluster.nodes}
    return {tier: count * cluster.processes_per_node for tier, count in nodes.items()}


def count_sharing_ranks(cluster: Cluster) -> dict[str, int]:
    """Return the number of ranks per link, by tier: 1 in a node, else all ranks of a unit of the tier below."""
    sizes = count_unit_ranks(cluster)
    return dict(zip(sizes, (1, *sizes.values()), strict=False))


def aggregate_links(
    edges: Sequence[Facts], per_node: int, shared: Mapping[str, int] | None = None
) -> dict[str, Measured]:
    """Aggregate rank-to-rank measurements to node-to-node links, by tier.

    Between nodes, ranks share a link, so their bandwidths add up. Within a node the slowest rank counts, since it
    delays the others. ``shared``: number of ranks that share a link, by tier, if more than one node's. An uplink
    shared by several nodes is keyed by the first of them.
    """
    edges_by_tier: dict[str, dict[tuple[int, int], list[Facts]]] = defaultdict(lambda: defaultdict(list))
    for edge in edges:
        ranks = max(per_node, (shared or {}).get(edge["tier"], 0))
        source, target = (edge[end] // ranks * ranks // per_node for end in ("source", "target"))
        edges_by_tier[edge["tier"]][source, target].append(edge)
    return {
        tier: {ends: _merge_edges(tier, each) for ends, each in links.items()} for tier, links in edges_by_tier.items()
    }


def _merge_edges(tier: str, edges: Sequence[Facts]) -> Link:
    latency = statistics.median(edge["latency"] for edge in edges)
    rates = [edge["size"] / max(edge["seconds"], 1e-9) for edge in edges]
    return Link(min(rates) if tier in INSIDE else sum(rates), latency)
