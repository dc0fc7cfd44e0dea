"""What collectives over all ranks of a cluster cost, whose nodes are joined by slower links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from worldsize.core import Cluster, ConfigError, Link, Workload
from worldsize.cost.collectives import (
    all_gather_seconds,
    all_to_all_seconds,
    hierarchical_all_reduce_seconds,
    message_seconds,
    ring_all_reduce_seconds,
)


def link(cluster: Cluster, tier: str) -> Link:
    """Return the link of a tier; raise ConfigError if the cluster does not declare it."""
    if tier not in cluster.links:
        raise ConfigError(
            f"cluster={cluster.name} declares no link of tier {tier!r}. "
            f"Set cluster.links.{tier}={{bandwidth: BYTES_A_SECOND, latency: SECONDS}}."
        )
    return cluster.links[tier]


def slowest(cluster: Cluster) -> Link:
    """The link that bounds a ring over all ranks: one edge of it leaves each node."""
    return link(cluster, "network" if cluster.nodes > 1 else "node")


def across(cluster: Cluster, ring_bytes: float) -> float:
    """Bytes that leave a node when each rank of a ring over all sends ``ring_bytes``: those of one rank."""
    return ring_bytes if cluster.nodes > 1 else 0.0


def all_reduce_seconds(payload_bytes: float, cluster: Cluster) -> float:
    """Seconds of an all-reduce over all ranks as one ring."""
    return ring_all_reduce_seconds(payload_bytes, cluster.processes, slowest(cluster))


def all_gather_all_seconds(payload_bytes: float, cluster: Cluster) -> float:
    """Seconds of an all-gather over all ranks as one ring; a reduce-scatter takes as long."""
    return all_gather_seconds(payload_bytes, cluster.processes, slowest(cluster))


def exchanged_all_seconds(payload_bytes: float, cluster: Cluster) -> float:
    """Seconds of an all-to-all of parts and an all-gather of their sums, as compressed and ordered sums are made."""
    near = link(cluster, "node") if cluster.processes_per_node > 1 else slowest(cluster)
    parts = all_to_all_seconds(payload_bytes, cluster.nodes, cluster.processes_per_node, near, slowest(cluster))
    return parts + all_gather_all_seconds(payload_bytes, cluster)


def exchanged_across_bytes(payload_bytes: float, cluster: Cluster) -> float:
    """Bytes that a node sends to others in what :func:`exchanged_all_seconds` times."""
    if cluster.nodes == 1:
        return 0.0
    each, ranks = cluster.processes_per_node, cluster.processes
    return (each * (ranks - each) + ranks - 1) * payload_bytes / ranks


def served_bytes(payload_bytes: float, clients: Sequence[int], shards: Sequence[int], cluster: Cluster) -> float:
    """Bytes that cross the busiest link, one way, when each client sends every shard's owner its part of the payload.

    (Jiang et al., OSDI 2020, section 3.) ``clients`` and ``shards`` are global ranks; a node's ranks share its link,
    and what stays inside does not cross it.
    """
    part = payload_bytes / len(shards)
    if cluster.nodes == 1:
        return max(payload_bytes, len(clients) * part)
    at_home, sending = (Counter(rank // cluster.processes_per_node for rank in ranks) for ranks in (shards, clients))
    leaving = (count * (len(shards) - at_home[node]) for node, count in sending.items())
    arriving = (count * (len(clients) - sending[node]) for node, count in at_home.items())
    return part * max(*leaving, *arriving)


def served_seconds(payload_bytes: float, clients: Sequence[int], shards: Sequence[int], cluster: Cluster) -> float:
    """Seconds of what :func:`served_bytes` counts, over the slowest link."""
    return message_seconds(served_bytes(payload_bytes, clients, shards, cluster), slowest(cluster))


def by_node_seconds(payload_bytes: float, cluster: Cluster, *, smaller: float = 1.0) -> float:
    """Inside nodes first, then between ranks of one place, whose messages are ``smaller`` × as large."""
    if cluster.nodes == 1:
        return all_reduce_seconds(payload_bytes, cluster)
    network = link(cluster, "network")
    network = replace(network, bandwidth=network.bandwidth / smaller)
    inside = link(cluster, "node") if cluster.processes_per_node > 1 else network
    return hierarchical_all_reduce_seconds(
        payload_bytes, cluster.nodes, cluster.processes_per_node, inside, network, shared=True
    )


def whole_bytes(work: Workload) -> float:
    """Parameters, gradients, optimizer state and activations where nothing is divided."""
    return 2 * work.parameter_bytes + work.optimizer_bytes + work.activation_bytes


def ring_share(ranks: int) -> float:
    """(n − 1) / n: what a rank sends of a payload in an all-gather or reduce-scatter."""
    return (ranks - 1) / ranks
