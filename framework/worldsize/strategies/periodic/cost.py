"""The cost of averaging parameters over workers periodically."""

from __future__ import annotations

from worldsize.core import Cluster, Cost, Workload
from worldsize.dist.cost.cluster import across, all_reduce_seconds, ring_share, whole_bytes


def averaging_cost(work: Workload, cluster: Cluster, *, every: int) -> Cost:
    """Return the cost per step of an all-reduce of the parameters once in ``every`` steps, without overlap."""
    sent = 2 * ring_share(cluster.processes) * work.parameter_bytes / every
    seconds = all_reduce_seconds(work.parameter_bytes, cluster) / every
    return Cost(whole_bytes(work), sent, across(cluster, sent), seconds, exposed_seconds=seconds, same=False)
