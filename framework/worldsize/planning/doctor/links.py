"""Measured links: by tier, between hosts, and against what the cluster declares."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from worldsize.core import Cluster, Link
from worldsize.observe.transport import disappointment
from worldsize.planning.doctor.edges import Measured, measured
from worldsize.planning.doctor.found import Facts, Found
from worldsize.planning.doctor.network import others
from worldsize.planning.doctor.report import Check, Pair, rate

_LEAST = 0.5  # of the declared bandwidth


@dataclass(frozen=True)
class Slow:
    """Nodes all of whose links are slow, and slow links that none of these explains."""

    nodes: Sequence[int]
    links: Sequence[tuple[int, int]]


def tiers(found: Mapping[str, Measured], rings: Mapping[str, Facts]) -> dict[str, Link]:
    """For each tier the median latency, and what its rings have found; where there are none, as on one device, the
    bandwidth of its slowest link.
    """
    slowest = {tier: {"bandwidth": min(link.bandwidth for link in links.values())} for tier, links in found.items()}
    return {
        tier: Link(latency=statistics.median(link.latency for link in links.values()), **rings.get(tier, slowest[tier]))
        for tier, links in found.items()
    }


def slow(links: Measured, least: float) -> Slow:
    """Which nodes, or links, carry less than ``least``."""
    lost = [ends for ends, link in links.items() if link.bandwidth < least]
    nodes = sorted({node for ends in links for node in ends})
    to_blame = [node for node in nodes if all(ends in lost for ends in links if node in ends)]
    return Slow(to_blame, [ends for ends in lost if not {*ends} & {*to_blame}])


def checks(found: Found, cluster: Cluster) -> Iterator[Check]:
    """A tier that carries less than half of what the cluster declares is named by host and interface.

    Where processes compute on the CPU, what they move inside a node is not judged: it depends on who else computes.
    """
    for tier, links in measured(found.edges, cluster.processes_per_node).items():
        judged = tier == "network" or cluster.device != "cpu"
        yield from _checks_of(found, tier, links, cluster.links.get(tier) if judged else None)
    yield from _transports(found, cluster)


def _checks_of(found: Found, tier: str, links: Measured, declared: Link | None) -> Iterator[Check]:
    lost = slow(links, _LEAST * declared.bandwidth if declared else 0.0)
    nodes = sorted({node for ends in links for node in ends})
    promised = f"cluster.links.{tier} declares {rate(declared.bandwidth)}" if declared else "not judged"
    if tier == "network" and len(lost.nodes) == len(nodes):
        yield _red(found, tier, lost.nodes, links, f"between all hosts, {promised}")
        return
    for node in lost.nodes:
        yield _red(found, tier, [node], {ends: link for ends, link in links.items() if node in ends}, promised)
    for ends in lost.links:
        yield _red(found, tier, ends, {ends: links[ends]}, f"from the one to the other, {promised}")
    named = {*lost.nodes, *(node for ends in lost.links for node in ends)}
    for node in (each for each in nodes if each not in named):
        own = [link for ends, link in links.items() if node in ends and not {*ends} & {*lost.nodes}]
        if own:
            yield Check(f"{tier} link", found.name(node), True, _said(own, promised))


def _said(links: Sequence[Link], promised: str) -> str:
    bandwidth, latency = min(link.bandwidth for link in links), statistics.median(link.latency for link in links)
    return f"{rate(bandwidth)}, {latency * 1e6:.0f} µs ({promised})"


def _red(found: Found, tier: str, nodes: Sequence[int], links: Measured, promised: str) -> Check:
    bandwidth = min(link.bandwidth for link in links.values())
    hosts = ", ".join(found.name(node) for node in nodes)
    detail = f"{rate(bandwidth)}{_over(found, tier, nodes)}, {promised}"
    remedy = "Look at what else runs there, at power limits and topology;"
    if tier == "network":
        choices = {others(found.hosts[node], _interface(found, node)) for node in nodes if node in found.hosts} - {""}
        another = f" try another interface ({'; '.join(sorted(choices))}) with cluster.interface;" if choices else ""
        remedy = f"Look at its cable, its switch port and what else it carries (ethtool);{another}"
    accept = f"if that is what it is, declare it: cluster.links.{tier}.bandwidth={bandwidth:.2g}."
    return Check(f"{tier} link", hosts, False, detail, f"{remedy} {accept}")


def _over(found: Found, tier: str, nodes: Sequence[int]) -> str:
    """By which interfaces the bytes went."""
    used = [f"{_interface(found, node)}" for node in nodes if _interface(found, node)]
    return f" over {', '.join(dict.fromkeys(used))}" if tier == "network" and used else ""


def _interface(found: Found, node: int) -> str | None:
    """That the ranks of a node say they use."""
    ranks = [rank for rank in found.ranks if rank["node"] == node and rank.get("transport")]
    return next((str(rank["transport"]["interface"]) for rank in ranks if rank["transport"]["interface"]), None)


def _transports(found: Found, cluster: Cluster) -> Iterator[Check]:
    """What the collectives' library has chosen on each host."""
    for node in found.hosts:
        heard = [rank["transport"] for rank in found.ranks if rank["node"] == node and rank.get("transport")]
        if not heard:
            continue
        ways = sorted({way for each in heard for way in each["transports"]}) or ["none"]
        name = _interface(found, node)
        said = next((text for each in heard if (text := disappointment(each, cluster))), None)
        remedy = "Set cluster.interface or cluster.hca, and let the container see the fabric." if said else ""
        detail = said or f"{heard[0]['backend']}: {', '.join(ways)}" + (f" on {name}" if name else "")
        yield Check("transport", found.name(node), said is None, detail, remedy)


def pairs(found: Mapping[str, Measured], names: Found) -> list[Pair]:
    links = found.get("network", {})
    return [Pair(names.name(source), names.name(target), link) for (source, target), link in links.items()]
