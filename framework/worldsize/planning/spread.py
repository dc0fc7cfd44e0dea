"""What collectives over all ranks of a cluster cost, whose nodes are joined by slower links."""

from __future__ import annotations

from worldsize.core import Cluster, ConfigError, Link, Workload
from worldsize.planning.cost import all_gather_seconds, hierarchical_all_reduce_seconds, ring_all_reduce_seconds


def link(cluster: Cluster, tier: str) -> Link:
    """Raises ConfigError if the cluster does not declare this tier."""
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
    """Of ``ring_bytes``, sent by each rank of a ring over all, those that leave a node: one rank's."""
    return ring_bytes if cluster.nodes > 1 else 0.0


def all_reduce_seconds(payload_bytes: float, cluster: Cluster) -> float:
    """As one ring."""
    return ring_all_reduce_seconds(payload_bytes, cluster.processes, slowest(cluster))


def all_gather_all_seconds(payload_bytes: float, cluster: Cluster) -> float:
    """As one ring; a reduce-scatter costs the same."""
    return all_gather_seconds(payload_bytes, cluster.processes, slowest(cluster))


def by_node_seconds(payload_bytes: float, cluster: Cluster, *, smaller: float = 1.0) -> float:
    """Inside nodes first, then between ranks of one place, whose messages are ``smaller`` × as large."""
    if cluster.nodes == 1:
        return all_reduce_seconds(payload_bytes, cluster)
    network = link(cluster, "network")
    network = Link(network.bandwidth / smaller, network.latency)
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
