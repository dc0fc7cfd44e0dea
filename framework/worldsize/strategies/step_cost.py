"""Cost models of a training step with data parallelism (all reductions) and full sharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from worldsize.collectives.cluster_cost import (
    all_gather_all_seconds,
    all_reduce_seconds,
    estimate_exchange_bytes,
    estimate_exchange_seconds,
    estimate_hierarchical_bytes,
    estimate_hierarchical_seconds,
    estimate_leaving_bytes,
    find_limiting_link,
    find_slowest_link,
    list_levels,
    ring_share,
    whole_bytes,
)
from worldsize.collectives.cost import (
    all_gather_seconds,
    divide_bandwidth,
    estimate_bucketed_exposure,
    estimate_exposed_seconds,
    ring_all_reduce_seconds,
)
from worldsize.collectives.ordered import LARGEST
from worldsize.core import Cluster, Cost, Reduction, Workload
from worldsize.devices import backend_for

# message size relative to float32; PowerSGD's depends on the matrix shapes
SIZES = {"bf16": 0.5, "fp16": 0.5, "int8": 0.25 + 1 / 1024}


def ddp_cost(
    work: Workload, cluster: Cluster, *, reduce: Reduction, compress: str, density: float, bucket_mb: float
) -> Cost:
    """Return the cost of a step with buckets of ``bucket_mb`` MiB reduced during backward.

    ``compress`` saves bytes on all links, or with ``reduce="hierarchical"`` only between nodes. ``density`` is the
    fraction of elements that "topk" and "randomk" send. Small gradients on CPUs are gathered rather than reduced, see
    :mod:`worldsize.collectives.ordered`.
    """
    sums = _Sums(work.parameter_bytes, cluster, reduce, compress, density)
    payload = work.parameter_bytes
    sent, leaving = sums.estimate_sent_bytes()
    hidden = estimate_bucketed_exposure(
        payload, bucket_mb * 2**20, work.overlap * work.compute_seconds, sums.estimate_seconds
    )
    return Cost(
        memory_bytes=whole_bytes(work),
        sent_bytes=sent,
        across_bytes=estimate_leaving_bytes(cluster, leaving),
        communication_seconds=sums.estimate_seconds(payload),
        exposed_seconds=hidden if work.overlap else None,
    )


def is_by_node(cluster: Cluster, reduce: Reduction) -> bool:
    """Return whether gradients are summed within nodes first."""
    return reduce == "hierarchical" and cluster.nodes > 1


def gathering(cluster: Cluster, reduce: Reduction) -> tuple[int, str]:
    """Return how many participants gather "topk" messages, and what a participant is.

    In a flat reduction these are all ranks; in a hierarchical one, the members of the last tier, in each of which every
    rank sends one part of a message.
    """
    if not is_by_node(cluster, reduce):
        return cluster.processes, "ranks"
    return list_levels(cluster)[-1].members, "units of the last tier" if cluster.tiers else "nodes"


@final
@dataclass(frozen=True)
class _Sums:
    """Cost of summing ``payload_bytes`` of gradients over the processes of ``cluster``."""

    payload_bytes: float
    cluster: Cluster
    reduce: Reduction
    compress: str
    density: float

    def estimate_sent_bytes(self) -> tuple[float, float]:
        """Return the bytes that a rank sends in a step, and the bytes that leave its node."""
        payload, cluster = self.payload_bytes, self.cluster
        if is_by_node(self.cluster, self.reduce):
            return estimate_hierarchical_bytes(payload, cluster, smaller=self._factor)
        if self._is_small:
            sent = (cluster.processes - 1) * payload
            return sent, sent
        sent = 2 * ring_share(cluster.processes) * payload * self._factor
        return sent, estimate_exchange_bytes(payload * self._factor, cluster) if self._is_exchanged else sent

    def estimate_seconds(self, payload_bytes: float) -> float:
        """Return the seconds to sum ``payload_bytes``, such as a bucket or all gradients."""
        if is_by_node(self.cluster, self.reduce):
            return estimate_hierarchical_seconds(payload_bytes, self.cluster, smaller=self._factor)
        if self._is_small:
            return all_gather_all_seconds(payload_bytes * self.cluster.processes, self.cluster)
        if self._is_exchanged:
            return estimate_exchange_seconds(payload_bytes * self._factor, self.cluster)
        if self.compress == "topk":
            return all_gather_all_seconds(2 * payload_bytes * self._factor, self.cluster)
        return all_reduce_seconds(payload_bytes * self._factor, self.cluster)

    @property
    def _factor(self) -> float:
        """Bytes sent per byte of an all-reduce in float32.

        "topk" sends an index of the same size with each value, and gathers the values of all ranks instead of a sum.
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


@final
@dataclass(frozen=True)
class FSDPSharding:
    """Properties of a model's sharding that affect the cost."""

    ranks: int
    """Number of ranks that hold one copy of the model."""
    reshard_after_forward: bool
    gathered_share: float
    """Size of gathered parameters relative to float32."""
    scattered_share: float
    """Size of reduce-scattered gradients relative to float32."""
    cpu_offload: bool
    accumulates_shards: bool = False
    """Whether gradients are reduced after each micro-batch instead of once per step."""


def fsdp_cost(work: Workload, cluster: Cluster, sharding: FSDPSharding) -> Cost:
    """Return the cost of a step with fully sharded parameters.

    Parameters are gathered for each micro-batch's forward pass and, unless kept, backward pass. Gradients are
    reduce-scattered, then all-reduced between copies, if there are several. gloo's reduce-scatter is an all-reduce
    (bytes measured at the interface: benchmarks/README.md), and blocks for each unit. On GPUs, only the first gather
    and the last reduce-scatter cannot overlap (arXiv 2304.11277, section 3.3).
    """
    payload, size = work.parameter_bytes, sharding.ranks
    on_cpu = backend_for(cluster.backend, cluster.device) == "gloo"
    gathers, scatters = 2 if sharding.reshard_after_forward else 1, 2 if on_cpu else 1
    turns = max(1, work.micro_batches)
    gathers, scatters = gathers * turns, scatters * (turns if sharding.accumulates_shards else 1)
    passes = gathers * sharding.gathered_share + scatters * sharding.scattered_share
    inside = find_limiting_link(cluster, size)
    units = work.blocks + 1  # each block, plus the rest of the model
    seconds = passes * units * all_gather_seconds(payload / units, size, inside)
    sent = passes * ring_share(size) * payload
    copies, leaving = cluster.processes // size, sent if size > cluster.processes_per_node else 0.0
    if copies > 1:
        between = 2 * ring_share(copies) * payload / size
        shared = divide_bandwidth(find_slowest_link(cluster), cluster.processes_per_node)
        seconds += ring_all_reduce_seconds(payload / size, copies, shared)
        sent, leaving = sent + between, leaving + between * cluster.processes_per_node
    ends = 2 * all_gather_seconds(work.unit_bytes, size, inside)
    hidden = max(ends, estimate_exposed_seconds(seconds, work.overlap * work.compute_seconds))
    return Cost(
        memory_bytes=_memory_bytes(work, sharding),
        sent_bytes=sent,
        across_bytes=estimate_leaving_bytes(cluster, leaving),
        communication_seconds=seconds,
        exposed_seconds=min(seconds, hidden) if work.overlap and not on_cpu else seconds,
        added_seconds=-ring_share(size) * work.update_seconds,
    )


def _memory_bytes(work: Workload, sharding: FSDPSharding) -> float:
    gathered = 2 * work.unit_bytes if sharding.reshard_after_forward else work.parameter_bytes
    kept = 0.0 if sharding.cpu_offload else (2 * work.parameter_bytes + work.optimizer_bytes) / sharding.ranks
    summed = work.parameter_bytes if work.micro_batches > 1 and not sharding.accumulates_shards else 0.0
    return kept + gathered * sharding.gathered_share + summed + work.activation_bytes
