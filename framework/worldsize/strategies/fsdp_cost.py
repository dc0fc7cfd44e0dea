"""Cost of a step of fully sharded data parallel training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from worldsize.core import Cluster, Cost, Workload
from worldsize.devices import backend_for
from worldsize.dist.cost.cluster import across, ring_share, slowest, spanned
from worldsize.dist.cost.collectives import all_gather_seconds, divided, exposed_seconds, ring_all_reduce_seconds


@final
@dataclass(frozen=True)
class FSDPSharding:
    """Properties of a model's sharding on which the cost depends."""

    ranks: int
    """That hold one copy of the model."""
    reshard_after_forward: bool
    gathered_share: float
    """Bytes of gathered parameters for each byte of float32."""
    scattered_share: float
    """The same of gradients that are reduce-scattered."""
    cpu_offload: bool
    accumulates_shards: bool = False
    """Whether gradients are reduced after each micro-batch, not once a step."""


def fsdp_cost(work: Workload, cluster: Cluster, sharding: FSDPSharding) -> Cost:
    """Return the cost of gathering parameters for the forward pass and, unless kept, for the backward pass of each
    micro-batch, and of the gradients' reduce-scatter; with several copies they are all-reduced between these.

    gloo's reduce-scatter is an all-reduce of which most is thrown away (bytes counted at the interface:
    benchmarks/README.md), and waits for each unit; on GPUs only the first gather and the last reduce-scatter have
    nothing to hide behind (arXiv 2304.11277, section 3.3).
    """
    payload, size = work.parameter_bytes, sharding.ranks
    on_cpu = backend_for(cluster.backend, cluster.device) == "gloo"
    gathers, scatters = 2 if sharding.reshard_after_forward else 1, 2 if on_cpu else 1
    turns = max(1, work.micro_batches)
    gathers, scatters = gathers * turns, scatters * (turns if sharding.accumulates_shards else 1)
    passes = gathers * sharding.gathered_share + scatters * sharding.scattered_share
    inside = spanned(cluster, size)
    units = work.blocks + 1  # gathered one by one, the rest of the model as one
    seconds = passes * units * all_gather_seconds(payload / units, size, inside)
    sent = passes * ring_share(size) * payload
    copies, leaving = cluster.processes // size, sent if size > cluster.processes_per_node else 0.0
    if copies > 1:
        between = 2 * ring_share(copies) * payload / size
        shared = divided(slowest(cluster), cluster.processes_per_node)
        seconds += ring_all_reduce_seconds(payload / size, copies, shared)
        sent, leaving = sent + between, leaving + between * cluster.processes_per_node
    ends = 2 * all_gather_seconds(work.unit_bytes, size, inside)
    hidden = max(ends, exposed_seconds(seconds, work.overlap * work.compute_seconds))
    return Cost(
        memory_bytes=_memory_bytes(work, sharding),
        sent_bytes=sent,
        across_bytes=across(cluster, leaving),
        communication_seconds=seconds,
        exposed_seconds=min(seconds, hidden) if work.overlap and not on_cpu else seconds,
        added_seconds=-ring_share(size) * work.update_seconds,
    )


def _memory_bytes(work: Workload, sharding: FSDPSharding) -> float:
    gathered = 2 * work.unit_bytes if sharding.reshard_after_forward else work.parameter_bytes
    kept = 0.0 if sharding.cpu_offload else (2 * work.parameter_bytes + work.optimizer_bytes) / sharding.ranks
    summed = work.parameter_bytes if work.micro_batches > 1 and not sharding.accumulates_shards else 0.0
    return kept + gathered * sharding.gathered_share + summed + work.activation_bytes
