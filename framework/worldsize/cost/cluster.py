"""Costs of collectives over all ranks of a cluster whose nodes are joined by slower links."""

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
    """Return the link that limits a ring over all ranks, one edge of which leaves each node."""
    return link(cluster, "network" if cluster.nodes > 1 else "node")


def across(cluster: Cluster, ring_bytes: float) -> float:
    """Return the bytes that leave a node when each rank of a ring over all ranks sends ``ring_bytes``.

    Only one rank of each node sends to another node.
    """
    return ring_bytes if cluster.nodes > 1 else 0.0


def all_reduce_seconds(payload_bytes: float, cluster: Cluster) -> float:
    """Return the seconds of a ring all-reduce of ``payload_bytes`` over all ranks."""
    return ring_all_reduce_seconds(payload_bytes, cluster.processes, slowest(cluster))


def all_gather_all_seconds(payload_bytes: float, cluster: Cluster) -> float:
    """Return the seconds of a ring all-gather over all ranks; a reduce-scatter takes as long.

    ``payload_bytes`` is the size of the gathered result.
    """
    return all_gather_seconds(payload_bytes, cluster.processes, slowest(cluster))


def exchanged_all_seconds(payload_bytes: float, cluster: Cluster) -> float:
    """Return the seconds of an all-to-all of shards and an all-gather of their sums.

    Compressed and ordered reductions work like this.
    """
    near = link(cluster, "node") if cluster.processes_per_node > 1 else slowest(cluster)
    parts = all_to_all_seconds(payload_bytes, cluster.nodes, cluster.processes_per_node, near, slowest(cluster))
    return parts + all_gather_all_seconds(payload_bytes, cluster)


def exchanged_across_bytes(payload_bytes: float, cluster: Cluster) -> float:
    """Return the bytes that a node sends to other nodes in the collectives of :func:`exchanged_all_seconds`."""
    if cluster.nodes == 1:
        return 0.0
    each, ranks = cluster.processes_per_node, cluster.processes
    return (each * (ranks - each) + ranks - 1) * payload_bytes / ranks


def served_bytes(payload_bytes: float, clients: Sequence[int], shards: Sequence[int], cluster: Cluster) -> float:
    """Return the bytes that cross the busiest link, in one direction, in a push to a sharded parameter server.

    Each client sends each server its shard of the payload (Jiang et al., OSDI 2020, section 3). The ranks of a node
    share its link; traffic inside a node does not cross it.

    Args:
        payload_bytes: Bytes that each client sends in all.
        clients: Global ranks of the clients.
        shards: Global ranks of the servers, one for each shard.
        cluster: The cluster.
    """
    part = payload_bytes / len(shards)
    if cluster.nodes == 1:
        return max(payload_bytes, len(clients) * part)
    at_home, sending = (Counter(rank // cluster.processes_per_node for rank in ranks) for ranks in (shards, clients))
    leaving = (count * (len(shards) - at_home[node]) for node, count in sending.items())
    arriving = (count * (len(clients) - sending[node]) for node, count in at_home.items())
    return part * max(*leaving, *arriving)


def served_seconds(payload_bytes: float, clients: Sequence[int], shards: Sequence[int], cluster: Cluster) -> float:
    """Return the seconds in which the slowest link carries the bytes of :func:`served_bytes`."""
    return message_seconds(served_bytes(payload_bytes, clients, shards, cluster), slowest(cluster))


def by_node_seconds(payload_bytes: float, cluster: Cluster, *, smaller: float = 1.0) -> float:
    """Return the seconds of a hierarchical all-reduce: inside each node, then between nodes.

    Messages between nodes have ``smaller`` times their uncompressed size.
    """
    if cluster.nodes == 1:
        return all_reduce_seconds(payload_bytes, cluster)
    network = link(cluster, "network")
    network = replace(network, bandwidth=network.bandwidth / smaller)
    inside = link(cluster, "node") if cluster.processes_per_node > 1 else network
    return hierarchical_all_reduce_seconds(
        payload_bytes, cluster.nodes, cluster.processes_per_node, inside, network, shared=True
    )


def whole_bytes(work: Workload) -> float:
    """Return the bytes of parameters, gradients, optimizer state and activations if nothing is sharded."""
    return 2 * work.parameter_bytes + work.optimizer_bytes + work.activation_bytes


def ring_share(ranks: int) -> float:
    """Return (n − 1) / n, the fraction of a payload that each rank sends in an all-gather or reduce-scatter."""
    return (ranks - 1) / ranks
