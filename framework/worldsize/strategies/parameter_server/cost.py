"""The cost of a step with parameter servers."""

from __future__ import annotations

from worldsize.core import Cluster, Cost, Workload
from worldsize.dist.cost.cluster import across, served_bytes, served_seconds
from worldsize.dist.cost.collectives import exposed_seconds


def served_cost(
    work: Workload,
    cluster: Cluster,
    *,
    servers: int,
    first_worker: int,
    pushed_bytes: float,
    bucket_bytes: float,
    same: bool,
) -> Cost:
    """Return the cost of a step: a push and a pull over the busiest link, which is that of servers if they are fewer.

    Pushes of ``pushed_bytes`` overlap with the backward pass, except for the last frame of ``bucket_bytes``. Servers
    add up gradients as they arrive, and update when all have arrived. Workers are the processes from ``first_worker``
    on.
    """
    payload, shards, workers = work.parameter_bytes, range(servers), range(first_worker, cluster.processes)
    pull, push = (served_seconds(each, workers, shards, cluster) for each in (payload, pushed_bytes))
    added = len(workers) / servers * work.sum_seconds
    frame = served_seconds(min(pushed_bytes, bucket_bytes), workers, shards, cluster)
    pushed = max(frame, exposed_seconds(max(push, added), work.overlap * work.compute_seconds))
    worker = 2 * payload + work.activation_bytes
    return Cost(
        memory_bytes=max(worker, (payload + work.optimizer_bytes) / servers),
        sent_bytes=max(pushed_bytes, len(workers) * payload / servers),
        across_bytes=across(cluster, served_bytes(payload, workers, shards, cluster)),
        communication_seconds=push + pull,
        exposed_seconds=pushed + pull,
        added_seconds=work.update_seconds / servers - work.update_seconds,
        same=same,
    )
