"""Findings that the hosts and processes of a cluster share, and links between nodes from those between ranks."""

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
REPORT = "report"  # name of the facts that say what follows from all others


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
    """Read the file of :func:`write_facts`; return an empty mapping if there is none."""
    with suppress(OSError, ValueError):
        facts: Facts = json.loads(read_regular(folder / f"{name}.json", at_most=LARGEST))
        return facts
    return {}


@dataclass(frozen=True)
class Findings:
    """All findings about a cluster."""

    nodes: int  # that the cluster should have
    hosts: Mapping[int, Facts]  # by node
    meeting: Facts = field(default_factory=dict)  # facts that the first host has received from the others
    ranks: Sequence[Facts] = ()  # facts that each process has written about itself
    edges: Sequence[Facts] = ()  # measured links from rank to rank
    rings: Mapping[str, Facts] = field(default_factory=dict)  # measurements of a ring over each tier
    names: Sequence[str] = ()  # of the nodes, where the launcher knows them

    def name(self, node: int) -> str:
        """Return the node's host name from its facts, else from the launcher, else "node 3"."""
        if node in self.hosts:
            return str(self.hosts[node]["host"])
        return self.names[node] if node < len(self.names) else f"node {node}"

    @property
    def first(self) -> Facts | None:
        """The facts of the first host, to compare the others with."""
        return self.hosts[min(self.hosts)] if self.hosts else None


def read_findings(folder: Path, nodes: int, names: Sequence[str] = ()) -> Findings:
    """Read the findings of hosts and ranks in ``folder``; those without any are missing."""
    meeting = read_facts(folder, "meeting")
    hosts = {int(facts["node"]): facts for facts in meeting.get("hosts", ())}
    for path in sorted(folder.glob("node_*.json")):
        facts = read_facts(folder, path.stem)
        # a host's clock relative to the file system's, for hosts that could not be asked
        hosts[int(facts["node"])] = {**facts, "ahead": facts["written"] - path.stat().st_mtime}
    ranks = [read_facts(folder, path.stem) for path in sorted(folder.glob("rank_*.json"))]
    return Findings(nodes, dict(sorted(hosts.items())), meeting, ranks, names=names, **read_facts(folder, "links"))


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
