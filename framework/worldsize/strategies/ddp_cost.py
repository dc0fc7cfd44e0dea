"""Cost of a step of distributed data parallel training, for each way of summing gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from worldsize.core import Cluster, Cost, Reduction, Workload
from worldsize.dist.cost.cluster import (
    across,
    all_gather_all_seconds,
    all_reduce_seconds,
    by_node_bytes,
    by_node_seconds,
    exchanged_across_bytes,
    exchanged_all_seconds,
    levels,
    ring_share,
    whole_bytes,
)
from worldsize.dist.cost.collectives import bucketed_exposed_seconds
from worldsize.dist.gathered import LARGEST

# bytes relative to float32; those of PowerSGD depend on the shapes of matrices
SIZES = {"bf16": 0.5, "fp16": 0.5, "int8": 0.25 + 1 / 1024}


def ddp_cost(
    work: Workload, cluster: Cluster, *, reduce: Reduction, compress: str, density: float, bucket_mb: float
) -> Cost:
    """Return the cost of a step whose buckets, of ``bucket_mb`` MiB, are reduced during the backward pass.

    ``compress`` saves bytes on all links, or with ``reduce="hierarchical"`` only between nodes; ``density`` is the
    share of the numbers that "topk" and "randomk" send. Small gradients on CPUs are gathered rather than reduced, see
    :mod:`worldsize.dist.gathered`.
    """
    sums = _Sums(work.parameter_bytes, cluster, reduce, compress, density)
    payload = work.parameter_bytes
    sent, leaving = sums.sent_bytes()
    hidden = bucketed_exposed_seconds(payload, bucket_mb * 2**20, work.overlap * work.compute_seconds, sums.seconds)
    return Cost(
        memory_bytes=whole_bytes(work),
        sent_bytes=sent,
        across_bytes=across(cluster, leaving),
        communication_seconds=sums.seconds(payload),
        exposed_seconds=hidden if work.overlap else None,
    )


def is_by_node(cluster: Cluster, reduce: Reduction) -> bool:
    """Return whether gradients are summed inside nodes first."""
    return reduce == "hierarchical" and cluster.nodes > 1


def gathering(cluster: Cluster, reduce: Reduction) -> tuple[int, str]:
    """Return how many gather from each other what "topk" sends, and what they are: hierarchical sums gather at the top.

    Each of them is then one unit of the tier below, for which one rank sends a part.
    """
    if not is_by_node(cluster, reduce):
        return cluster.processes, "ranks"
    return levels(cluster)[-1].members, "units of the last tier" if cluster.tiers else "nodes"


@final
@dataclass(frozen=True)
class _Sums:
    """Sums of ``payload_bytes`` of gradients over the processes of ``cluster``."""

    payload_bytes: float
    cluster: Cluster
    reduce: Reduction
    compress: str
    density: float

    def sent_bytes(self) -> tuple[float, float]:
        """Return the bytes that a rank sends in a step, and those that leave its node."""
        payload, cluster = self.payload_bytes, self.cluster
        if is_by_node(self.cluster, self.reduce):
            return by_node_bytes(payload, cluster, smaller=self._factor)
        if self._is_small:
            sent = (cluster.processes - 1) * payload
            return sent, sent
        sent = 2 * ring_share(cluster.processes) * payload * self._factor
        return sent, exchanged_across_bytes(payload * self._factor, cluster) if self._is_exchanged else sent

    def seconds(self, payload_bytes: float) -> float:
        """Return the seconds to sum ``payload_bytes``, of a bucket or of all gradients."""
        if is_by_node(self.cluster, self.reduce):
            return by_node_seconds(payload_bytes, self.cluster, smaller=self._factor)
        if self._is_small:
            return all_gather_all_seconds(payload_bytes * self.cluster.processes, self.cluster)
        if self._is_exchanged:
            return exchanged_all_seconds(payload_bytes * self._factor, self.cluster)
        if self.compress == "topk":
            return all_gather_all_seconds(2 * payload_bytes * self._factor, self.cluster)
        return all_reduce_seconds(payload_bytes * self._factor, self.cluster)

    @property
    def _factor(self) -> float:
        """Bytes sent per byte of an all-reduce in float32.

        A number of "topk" brings an index of as many bytes, and all of them come from each rank rather than their sum.
        """
        if self.compress == "randomk":
            return self.density
        if self.compress == "topk":
            return self.density * gathering(self.cluster, self.reduce)[0]
        return SIZES.get(self.compress, 1.0)

    @property
    def _is_exchanged(self) -> bool:
        return self.reduce == "ordered" or self.compress in SIZES

    @property
    def _is_small(self) -> bool:
        plain = not is_by_node(self.cluster, self.reduce) and not self._is_exchanged and self.compress == "none"
        on_cpu = self.cluster.device == "cpu"
        return plain and on_cpu and self.cluster.processes * self.payload_bytes <= LARGEST
