"""Costs of collectives on a hierarchical cluster, and peak FLOPs of its GPUs.

:func:`axis_tiers` returns the cluster tier that each axis of a mesh crosses. The peaks are used for the model FLOPs
utilization.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from worldsize.collectives.cost import (
    Level,
    all_gather_seconds,
    all_to_all_seconds,
    divide_bandwidth,
    estimate_incast_seconds,
    estimate_tiered_seconds,
    message_seconds,
    ring_all_reduce_seconds,
)
from worldsize.core import Cluster, ConfigError, Link, Workload


def get_link(cluster: Cluster, tier: str) -> Link:
    """Return a tier's link; raise ConfigError if the cluster does not declare it."""
    if tier not in cluster.links:
        raise ConfigError(f"cluster={cluster.name} has no link for tier {tier!r}. Set {_format_remedy(cluster, tier)}")
    return cluster.links[tier]


def _format_remedy(cluster: Cluster, tier: str) -> str:
    if tier in cluster.tiers:
        return f"cluster.tiers.{tier}={{nodes: {cluster.tiers[tier]}, bandwidth: BYTES_PER_SECOND, latency: SECONDS}}."
    return f"cluster.links.{tier}={{bandwidth: BYTES_PER_SECOND, latency: SECONDS}}."


def list_levels(cluster: Cluster) -> list[Level]:
    """Return the tiers that connect ranks, innermost first, except those with one member."""
    units = {"node": 1, **cluster.tiers, "network": cluster.nodes}
    every, below = [], 1
    for name, nodes in units.items():
        ranks = nodes * cluster.processes_per_node
        every.append(Level(name, ranks // below, below))
        below = ranks
    return [level for level in every if level.members > 1] or every[:1]


def find_slowest_link(cluster: Cluster) -> Link:
    """Return the link that limits a ring over all ranks (one edge out of each node and rack)."""
    return find_limiting_link(cluster, cluster.processes)


def find_limiting_link(cluster: Cluster, ranks: int, stride: int = 1) -> Link:
    """Return the limiting link of concurrent rings, each of ``ranks`` ranks, ``stride`` apart.

    Each block of ``ranks`` · ``stride`` consecutive ranks consists of ``stride`` rings. Inside a node the limiting link
    is the node's; between nodes it is the slowest link of any ring edge. Edges that leave the same node or rack share
    its bandwidth.
    """
    shares = [
        divide_bandwidth(get_link(cluster, level.name), crossing)
        for level in list_levels(cluster)
        if level.name != "node" and (crossing := _crossing(cluster, level.ranks, ranks, stride))
    ]
    return min(shares, key=_bandwidth, default=None) or get_link(cluster, "node")


def count_leaving_edges(cluster: Cluster, ranks: int, stride: int = 1) -> int:
    """Return the maximum number of ring edges that leave a node, see :func:`find_limiting_link`."""
    return _crossing(cluster, cluster.processes_per_node, ranks, stride)


def _crossing(cluster: Cluster, unit: int, ranks: int, stride: int) -> int:
    """Return the maximum number of ring edges that leave a node or rack of ``unit`` ranks.

    ``stride`` rings form a block of consecutive ranks. If a unit contains only part of a block, each ring that is
    partly in the unit leaves it once; a unit may start within one block and end within the next.
    """
    block = ranks * stride

    def count_cut_rings(part: int) -> int:
        return min(stride, part, block - part) if ranks > 1 else 0

    most = 0
    for first in {begin % block for begin in range(0, cluster.processes, unit)}:
        part = min(unit, block - first)
        most = max(most, count_cut_rings(part) + count_cut_rings((unit - part) % block))
    return most


def _bandwidth(link: Link) -> float:
    return link.bandwidth


def estimate_leaving_bytes(cluster: Cluster, ring_bytes: float) -> float:
    """Return the bytes that leave a node if each rank of a full ring sends ``ring_bytes``.

    Only one rank of each node sends to other nodes.
    """
    return ring_bytes if cluster.nodes > 1 else 0.0


def all_reduce_seconds(payload_bytes: float, cluster: Cluster) -> float:
    """Return the seconds that a ring all-reduce of ``payload_bytes`` over all ranks takes."""
    return ring_all_reduce_seconds(payload_bytes, cluster.processes, find_slowest_link(cluster))


def all_gather_all_seconds(payload_bytes: float, cluster: Cluster) -> float:
    """Return the seconds that a ring all-gather over all ranks takes.

    ``payload_bytes`` is the size of the gathered result. A reduce-scatter takes as long.
    """
    return all_gather_seconds(payload_bytes, cluster.processes, find_slowest_link(cluster))


def estimate_exchange_seconds(payload_bytes: float, cluster: Cluster) -> float:
    """Return the seconds that an all-to-all of shards and an all-gather of their sums take.

    Compressed and ordered reductions consist of these collectives.
    """
    near = get_link(cluster, "node") if cluster.processes_per_node > 1 else find_slowest_link(cluster)
    ranks = cluster.processes
    between = [level for level in list_levels(cluster) if level.name != "node"]
    own = get_link(cluster, between[0].name) if between else near
    parts = [all_to_all_seconds(payload_bytes, cluster.nodes, cluster.processes_per_node, near, own)]
    for level in between[1:]:
        leaving = level.ranks * (ranks - level.ranks) * payload_bytes / ranks
        parts.append(estimate_incast_seconds(leaving, get_link(cluster, level.name)))
    return max(parts) + all_gather_all_seconds(payload_bytes, cluster)


def estimate_exchange_bytes(payload_bytes: float, cluster: Cluster) -> float:
    """Return the bytes that leave a node in an exchange, see :func:`estimate_exchange_seconds`."""
    if cluster.nodes == 1:
        return 0.0
    each, ranks = cluster.processes_per_node, cluster.processes
    return (each * (ranks - each) + ranks - 1) * payload_bytes / ranks


def estimate_push_bytes(
    payload_bytes: float, clients: Sequence[int], shards: Sequence[int], cluster: Cluster, unit: int | None = None
) -> float:
    """Return the one-way bytes on the busiest link of a push to a sharded parameter server.

    Each client sends each server its shard of the payload (Jiang et al., OSDI 2020, section 3). The ranks of a node
    share its link; traffic inside a node does not cross it.

    Args:
        payload_bytes: Total bytes that each client sends.
        clients: Global ranks of the clients.
        shards: Global ranks of the servers, one per shard.
        cluster: The cluster.
        unit: Number of ranks that share a link, such as those of a rack; default: those of a node.
    """
    part = payload_bytes / len(shards)
    if cluster.nodes == 1:
        return max(payload_bytes, len(clients) * part)
    size = unit or cluster.processes_per_node
    at_home, sending = (Counter(rank // size for rank in ranks) for ranks in (shards, clients))
    leaving = (count * (len(shards) - at_home[node]) for node, count in sending.items())
    arriving = (count * (len(clients) - sending[node]) for node, count in at_home.items())
    return part * max(*leaving, *arriving)


def estimate_push_seconds(
    payload_bytes: float, clients: Sequence[int], shards: Sequence[int], cluster: Cluster
) -> float:
    """Return the seconds of a push, as limited by the slowest link of a node or tier."""
    if cluster.nodes == 1:
        return message_seconds(estimate_push_bytes(payload_bytes, clients, shards, cluster), find_slowest_link(cluster))
    return max(
        message_seconds(
            estimate_push_bytes(payload_bytes, clients, shards, cluster, level.ranks), get_link(cluster, level.name)
        )
        for level in list_levels(cluster)
        if level.name != "node"
    )


def estimate_hierarchical_seconds(payload_bytes: float, cluster: Cluster, *, smaller: float = 1.0) -> float:
    """Return the seconds that a hierarchical all-reduce takes: inside nodes, then tier by tier.

    Messages on the outermost tier are compressed to ``smaller`` times their size.
    """
    if cluster.nodes == 1:
        return all_reduce_seconds(payload_bytes, cluster)
    *inner, (top, network) = [(level, get_link(cluster, level.name)) for level in list_levels(cluster)]
    network = replace(network, bandwidth=network.bandwidth / smaller)
    return estimate_tiered_seconds(payload_bytes, [*inner, (top, network)])


def estimate_hierarchical_bytes(payload_bytes: float, cluster: Cluster, *, smaller: float = 1.0) -> tuple[float, float]:
    """Return the bytes that a hierarchical all-reduce sends per rank, and those leaving a node."""
    *inner, top = list_levels(cluster)
    sent = leaving = 0.0
    for level in (*inner, top):
        part = 2 * ring_share(level.members) * payload_bytes / level.ranks * (smaller if level is top else 1.0)
        sent += part
        leaving += 0.0 if level.name == "node" else part * cluster.processes_per_node
    return sent, leaving


def whole_bytes(work: Workload) -> float:
    """Return a rank's bytes of memory, including activations, if nothing is sharded."""
    return 2 * work.parameter_bytes + work.optimizer_bytes + work.activation_bytes


def ring_share(ranks: int) -> float:
    """Return (n − 1) / n, the fraction of a payload that a rank sends in an all-gather."""
    return (ranks - 1) / ranks


Groups = Mapping[str, Sequence[Sequence[int]]]  # groups of ranks by axis, see Strategy.groups


def axis_tiers(cluster: Cluster, groups: Groups) -> dict[str, str]:
    """Return the outermost tier that each axis crosses, except for axes of one rank."""
    return {
        axis: _find_outermost_tier(cluster, lines)
        for axis, lines in groups.items()
        if any(len(line) > 1 for line in lines)
    }


def _find_outermost_tier(cluster: Cluster, lines: Sequence[Sequence[int]]) -> str:
    used = [
        level.name
        for level in list_levels(cluster)
        if any(len({rank // level.ranks for rank in line}) > 1 for line in lines)
    ]
    return used[-1]


def crossings_text(cluster: Cluster, groups: Groups) -> str:
    """Describe in one line which tier each axis of a mesh crosses; "" for a single axis or node."""
    if cluster.nodes == 1 or len(groups) == 1:
        return ""
    tiers = axis_tiers(cluster, groups).items()
    return f"mesh: {', '.join(f'{axis} {_describe_tier(cluster, tier)}' for axis, tier in tiers)}"


def _describe_tier(cluster: Cluster, tier: str) -> str:
    if tier == "network":
        return f"across {['node', *cluster.tiers][-1]}s"
    return f"within a {tier}"


# Dense operations per second, without sparsity, from NVIDIA's data sheets. Names match those reported by torch.
_PEAKS: Mapping[str, Mapping[str, float]] = {
    r"H100 NVL|H200 NVL": {"fp32": 60e12, "tf32": 417.5e12, "bf16": 835.5e12, "fp16": 835.5e12, "fp8": 1670.5e12},
    r"H100 PCIe": {"fp32": 51e12, "tf32": 378e12, "bf16": 756e12, "fp16": 756e12, "fp8": 1513e12},
    r"H100|H200": {"fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12},
    r"B200": {"bf16": 2250e12, "fp16": 2250e12, "fp8": 4500e12},
    r"A100": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
    r"L40S": {"fp32": 91.6e12, "tf32": 183e12, "bf16": 362.05e12, "fp16": 362.05e12, "fp8": 733e12},
    r"L4": {"fp32": 30.3e12, "tf32": 60e12, "bf16": 121e12, "fp16": 121e12, "fp8": 242.5e12},
    r"A10": {"fp32": 31.2e12, "tf32": 62.5e12, "bf16": 125e12, "fp16": 125e12},
    r"V100-SXM2": {"fp32": 15.7e12, "fp16": 125e12},
    r"T4": {"fp32": 8.1e12, "fp16": 65e12},
}


def peak_flops(device: str, precision: str) -> float | None:
    """Return a GPU's dense peak in operations per second; None if unknown for ``precision``.

    Args:
        device: Name of the GPU as reported by torch, such as "NVIDIA A100-SXM4-80GB".
        precision: "fp32", "tf32", "bf16", "fp16" or "fp8".
    """
    for pattern, peaks in _PEAKS.items():
        if re.search(rf"\b({pattern})\b", device):
            return peaks.get(precision)
    return None
