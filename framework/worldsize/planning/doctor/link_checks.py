"""Checks measured links by tier, between hosts, and against the cluster's declaration."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from worldsize.core import Cluster, Link
from worldsize.observe.transport import transport_warning
from worldsize.planning.doctor.edges import Measured, measured
from worldsize.planning.doctor.findings import Facts, Findings
from worldsize.planning.doctor.network import others
from worldsize.planning.doctor.report import Check, Pair, rate

_LEAST = 0.5  # of the declared bandwidth


@dataclass(frozen=True)
class SlowLinks:
    """Slow links, attributed to as few nodes as possible."""

    nodes: Sequence[int]  # all of whose links are slow
    links: Sequence[tuple[int, int]]  # slow links of other nodes


def tiers(by_tier: Mapping[str, Measured], rings: Mapping[str, Facts]) -> dict[str, Link]:
    """Return each tier's link: the median latency, and the bandwidth measured by its rings.

    Without rings, as on one device, it is the bandwidth of the slowest link.
    """
    slowest = {tier: {"bandwidth": min(link.bandwidth for link in links.values())} for tier, links in by_tier.items()}
    return {
        tier: Link(latency=statistics.median(link.latency for link in links.values()), **rings.get(tier, slowest[tier]))
        for tier, links in by_tier.items()
    }


def slow(links: Measured, least: float) -> SlowLinks:
    """Find the nodes, or links, with less than ``least`` bytes per second."""
    lost = [ends for ends, link in links.items() if link.bandwidth < least]
    nodes = sorted({node for ends in links for node in ends})
    to_blame = [node for node in nodes if all(ends in lost for ends in links if node in ends)]
    return SlowLinks(to_blame, [ends for ends in lost if not {*ends} & {*to_blame}])


def checks(findings: Findings, cluster: Cluster) -> Iterator[Check]:
    """Report hosts and interfaces with less than half of the bandwidth that the cluster declares for the tier.

    With CPU devices links inside a node are not judged, since they depend on other computations.
    """
    for tier, links in measured(findings.edges, cluster.processes_per_node).items():
        judged = tier == "network" or cluster.device != "cpu"
        yield from _checks_of(findings, tier, links, cluster.links.get(tier) if judged else None)
    yield from _transports(findings, cluster)


def _checks_of(findings: Findings, tier: str, links: Measured, declared: Link | None) -> Iterator[Check]:
    lost = slow(links, _LEAST * declared.bandwidth if declared else 0.0)
    nodes = sorted({node for ends in links for node in ends})
    promised = f"cluster.links.{tier} declares {rate(declared.bandwidth)}" if declared else "not judged"
    if tier == "network" and len(lost.nodes) == len(nodes):
        yield _red(findings, tier, lost.nodes, links, f"between all hosts, {promised}")
        return
    for node in lost.nodes:
        yield _red(findings, tier, [node], {ends: link for ends, link in links.items() if node in ends}, promised)
    for ends in lost.links:
        yield _red(findings, tier, ends, {ends: links[ends]}, f"from the one to the other, {promised}")
    named = {*lost.nodes, *(node for ends in lost.links for node in ends)}
    for node in (each for each in nodes if each not in named):
        own = [link for ends, link in links.items() if node in ends and not {*ends} & {*lost.nodes}]
        if own:
            yield Check(f"{tier} link", findings.name(node), True, _described(own, promised))


def _described(links: Sequence[Link], promised: str) -> str:
    bandwidth, latency = min(link.bandwidth for link in links), statistics.median(link.latency for link in links)
    return f"{rate(bandwidth)}, {latency * 1e6:.0f} µs ({promised})"


def _red(findings: Findings, tier: str, nodes: Sequence[int], links: Measured, promised: str) -> Check:
    bandwidth = min(link.bandwidth for link in links.values())
    hosts = ", ".join(findings.name(node) for node in nodes)
    detail = f"{rate(bandwidth)}{_over(findings, tier, nodes)}, {promised}"
    remedy = "Look at what else runs there, at power limits and topology;"
    if tier == "network":
        choices = {
            others(findings.hosts[node], _interface(findings, node)) for node in nodes if node in findings.hosts
        } - {""}
        another = f" try another interface ({'; '.join(sorted(choices))}) with cluster.interface;" if choices else ""
        remedy = f"Look at its cable, its switch port and what else it carries (ethtool);{another}"
    accept = f"if that is what it is, declare it: cluster.links.{tier}.bandwidth={bandwidth:.2g}."
    return Check(f"{tier} link", hosts, False, detail, f"{remedy} {accept}")


def _over(findings: Findings, tier: str, nodes: Sequence[int]) -> str:
    """Describe which interfaces carried the bytes."""
    used = [f"{_interface(findings, node)}" for node in nodes if _interface(findings, node)]
    return f" over {', '.join(dict.fromkeys(used))}" if tier == "network" and used else ""


def _interface(findings: Findings, node: int) -> str | None:
    """Return the interface that the ranks of a node report."""
    ranks = [rank for rank in findings.ranks if rank["node"] == node and rank.get("transport")]
    return next((str(rank["transport"]["interface"]) for rank in ranks if rank["transport"]["interface"]), None)


def _transports(findings: Findings, cluster: Cluster) -> Iterator[Check]:
    """Check the transport that the collectives' library has chosen on each host."""
    for node in findings.hosts:
        transports = [rank["transport"] for rank in findings.ranks if rank["node"] == node and rank.get("transport")]
        if not transports:
            continue
        ways = sorted({way for each in transports for way in each["transports"]}) or ["none"]
        name = _interface(findings, node)
        warning = next((text for each in transports if (text := transport_warning(each, cluster))), None)
        remedy = "Set cluster.interface or cluster.hca, and let the container see the fabric." if warning else ""
        detail = warning or f"{transports[0]['backend']}: {', '.join(ways)}" + (f" on {name}" if name else "")
        yield Check("transport", findings.name(node), warning is None, detail, remedy)


def pairs(by_tier: Mapping[str, Measured], findings: Findings) -> list[Pair]:
    """Name the hosts at the ends of each measured link between nodes."""
    links = by_tier.get("network", {})
    return [Pair(findings.name(source), findings.name(target), link) for (source, target), link in links.items()]
