"""Checks measured links by tier, between hosts, and against the cluster's declaration."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from worldsize.core import Cluster, Link
from worldsize.observe.transport import transport_warning
from worldsize.plan.doctor.findings import (
    INSIDE,
    ONE_HOST,
    Facts,
    Findings,
    Measured,
    aggregate_links,
    count_sharing_ranks,
)
from worldsize.plan.doctor.hosts import list_interfaces
from worldsize.plan.doctor.report import Check, Pair, format_rate

_LEAST = 0.5  # minimum fraction of the declared bandwidth


@dataclass(frozen=True)
class SlowLinks:
    """Slow links, attributed to as few nodes as possible."""

    nodes: Sequence[int]  # nodes with only slow links
    links: Sequence[tuple[int, int]]  # slow links of other nodes


def summarize_tiers(by_tier: Mapping[str, Measured], rings: Mapping[str, Facts]) -> dict[str, Link]:
    """Return each tier's link: median latency, and bandwidth measured by its rings.

    Without rings, as on one device, use the bandwidth of the slowest link. If one host measured an uplink while others
    were idle, use that latency, since other hosts' messages did not delay it.
    """
    figures = {}
    for tier, links in by_tier.items():
        if not tier.startswith(ONE_HOST):
            quiet = by_tier.get(ONE_HOST + tier, links)
            latency = statistics.median(link.latency for link in quiet.values())
            slowest = {"bandwidth": min(link.bandwidth for link in links.values())}
            figures[tier] = Link(latency=latency, **rings.get(tier, slowest))
    return figures


def find_slow_links(links: Measured, least: float) -> SlowLinks:
    """Find nodes or links with less than ``least`` bytes per second."""
    lost = [ends for ends, link in links.items() if link.bandwidth < least]
    healthy = {node for ends, link in links.items() if link.bandwidth >= least for node in ends}
    blamed = {node for ends in lost for node in ends} - healthy
    return SlowLinks(sorted(blamed), [ends for ends in lost if blamed.isdisjoint(ends)])


def check_links(findings: Findings, cluster: Cluster) -> Iterator[Check]:
    """Check that links have at least half of their tier's declared bandwidth, and check each host's transport.

    Links within a node are not judged for CPU devices, since other processes on the host slow them down.
    """
    by_tier = aggregate_links(findings.edges, cluster.processes_per_node, count_sharing_ranks(cluster))
    for tier, links in by_tier.items():
        judged = tier not in INSIDE or cluster.device != "cpu"
        yield from _Tier(tier, findings, cluster).check_tier(links, cluster.links.get(tier) if judged else None)
    yield from _transports(findings, cluster)


@final
@dataclass(frozen=True)
class _Tier:
    """Checks of the links in one tier of the cluster."""

    name: str
    findings: Findings
    cluster: Cluster

    def check_tier(self, links: Measured, declared: Link | None) -> Iterator[Check]:
        lost = find_slow_links(links, _LEAST * declared.bandwidth if declared else 0.0)
        by_node = _group_by_node(links)
        promised = f"{self._key} declares {format_rate(declared.bandwidth)}" if declared else "not declared"
        if self.name not in INSIDE and len(lost.nodes) == len(by_node):
            yield self._report_slow_link(lost.nodes, links, f"between all {self._members}, {promised}")
            return
        for node in lost.nodes:
            yield self._report_slow_link([node], by_node[node], promised)
        for ends in lost.links:
            yield self._report_slow_link(ends, {ends: links[ends]}, f"from the first to the second, {promised}")
        blamed = {*lost.nodes}
        named = blamed.union(*lost.links)
        for node in (each for each in by_node if each not in named):
            if own := [link for ends, link in by_node[node].items() if blamed.isdisjoint(ends)]:
                yield Check(f"{self.name} link", self._format_hosts(node), True, _format_links(own, promised))

    @property
    def _key(self) -> str:
        """The configuration key that declares the link."""
        return f"cluster.{'tiers' if self.name in self.cluster.tiers else 'links'}.{self.name}"

    @property
    def _nodes(self) -> int:
        """Number of nodes that share a link in this tier."""
        return max(1, count_sharing_ranks(self.cluster).get(self.name, 1) // self.cluster.processes_per_node)

    @property
    def _members(self) -> str:
        return "hosts" if self._nodes == 1 else f"groups of {self._nodes} hosts"

    def _format_hosts(self, node: int) -> str:
        """Describe the hosts that share a link; ``node`` is the first of them."""
        names = [self.findings.get_host_name(each) for each in range(node, node + self._nodes)]
        return ", ".join(names) if len(names) <= 4 else f"{names[0]} .. {names[-1]} ({len(names)} hosts)"

    def _report_slow_link(self, nodes: Sequence[int], links: Measured, promised: str) -> Check:
        bandwidth = min(link.bandwidth for link in links.values())
        hosts = ", ".join(map(self._format_hosts, nodes))
        accept = f"If this bandwidth is expected, set {self._key}.bandwidth={bandwidth:.2g}."
        detail = f"{format_rate(bandwidth)}{self._format_interfaces(nodes)}, {promised}"
        return Check(f"{self.name} link", hosts, False, detail, f"{self._suggest_remedy(nodes)} {accept}")

    def _suggest_remedy(self, nodes: Sequence[int]) -> str:
        if self.name in INSIDE:
            return "Check other processes on this host, power limits and topology."
        if self._nodes > 1:
            return "Check the uplink of the switch of these hosts and its other traffic."
        hosts = self.findings.hosts
        choices = {list_interfaces(hosts[node], _interface(self.findings, node)) for node in nodes if node in hosts} - {
            ""
        }
        another = f" Try another interface ({'; '.join(sorted(choices))}) with cluster.interface." if choices else ""
        return f"Check the cable, the switch port and other traffic (ethtool).{another}"

    def _format_interfaces(self, nodes: Sequence[int]) -> str:
        """Format the network interfaces used by ``nodes``, for a message; empty within a node."""
        used = [name for node in nodes if (name := _interface(self.findings, node))]
        return f" over {', '.join(dict.fromkeys(used))}" if self.name not in INSIDE and used else ""


def _group_by_node(links: Measured) -> dict[int, dict[tuple[int, int], Link]]:
    """Group links by node, sorted; a link belongs to both its nodes."""
    nodes = sorted({node for ends in links for node in ends})
    own: dict[int, dict[tuple[int, int], Link]] = {node: {} for node in nodes}
    for ends, link in links.items():
        for node in ends:
            own[node][ends] = link
    return own


def _format_links(links: Sequence[Link], promised: str) -> str:
    bandwidth, latency = min(link.bandwidth for link in links), statistics.median(link.latency for link in links)
    return f"{format_rate(bandwidth)}, {latency * 1e6:.0f} µs ({promised})"


def _interface(findings: Findings, node: int) -> str | None:
    """Return the interface reported by a node's ranks, or None."""
    ranks = [rank for rank in findings.ranks if rank["node"] == node and rank.get("transport")]
    return next((str(rank["transport"]["interface"]) for rank in ranks if rank["transport"]["interface"]), None)


def _transports(findings: Findings, cluster: Cluster) -> Iterator[Check]:
    """Check the transport chosen by the communication backend on each host."""
    for node in findings.hosts:
        transports = [rank["transport"] for rank in findings.ranks if rank["node"] == node and rank.get("transport")]
        if not transports:
            continue
        ways = sorted({way for each in transports for way in each["transports"]}) or ["none"]
        name = _interface(findings, node)
        warning = next((text for each in transports if (text := transport_warning(each, cluster))), None)
        remedy = (
            "Set cluster.interface or cluster.hca, and make the fabric visible in the container." if warning else ""
        )
        detail = warning or f"{transports[0]['backend']}: {', '.join(ways)}" + (f" on {name}" if name else "")
        yield Check("transport", findings.get_host_name(node), warning is None, detail, remedy)


def list_pairs(by_tier: Mapping[str, Measured], findings: Findings) -> list[Pair]:
    """Return each link between nodes with its hosts; for an uplink, the hosts that measured it."""
    between = [links for tier, links in by_tier.items() if tier not in INSIDE and ONE_HOST + tier not in by_tier]
    return [
        Pair(findings.get_host_name(source), findings.get_host_name(target), link)
        for links in between
        for (source, target), link in links.items()
    ]
