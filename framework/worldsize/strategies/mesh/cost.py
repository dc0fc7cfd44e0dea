"""Cost of a step under data × tensor × pipeline parallelism."""

from __future__ import annotations

from worldsize.core import Cluster, Cost, Workload
from worldsize.devices import backend_for
from worldsize.dist.cost.cluster import leaving, link, ring_share, spanned
from worldsize.dist.cost.collectives import (
    all_gather_seconds,
    bubble_share,
    exposed_seconds,
    message_seconds,
    ring_all_reduce_seconds,
)
from worldsize.strategies.mesh.layout import Layout


def mesh_cost(work: Workload, cluster: Cluster, layout: Layout, *, micro_batches: int, stages: int) -> Cost:
    """Return the cost of a step of ``micro_batches`` per data-parallel part, in a pipeline of ``stages``.

    Tensor: four all-reduces of a block's output for each micro-batch, inside a node (Shoeybi et al. 2019, arXiv
    1909.08053, section 3).
    Pipeline: outputs and their gradients at both edges of a stage.
    Data: FSDP of the rank's part of the model.
    The last two use the slowest link that the neighbours on their axis have between them, and share it with those on
    parallel lines of the axis.
    """
    strides = layout.strides
    held = work.parameter_bytes / (layout.tensor * layout.pipeline)
    count = micro_batches
    blocks, near = work.blocks / layout.pipeline, link(cluster, "node")
    reduced = 4 * blocks * count * work.boundary_bytes
    passed = 0.0 if layout.pipeline == 1 else 2 * count * work.boundary_bytes
    # gloo's reduce-scatter is an all-reduce, and does not overlap
    on_cpu = backend_for(cluster.backend, cluster.device) == "gloo"
    gathers = (2 if layout.pipeline == 1 else 1) + (2 if on_cpu else 1)
    waited = 4 * blocks * count * ring_all_reduce_seconds(work.boundary_bytes, layout.tensor, near)
    if layout.pipeline > 1:
        between = spanned(cluster, layout.pipeline, strides["pipeline"])
        waited += 2 * message_seconds(work.boundary_bytes, between) * count
    along = spanned(cluster, layout.data, strides["data"])
    along_data = gathers * all_gather_seconds(held, layout.data, along)
    exposed = waited + exposed_seconds(along_data, 0.0 if on_cpu else work.overlap * work.compute_seconds)
    sharded = gathers * ring_share(layout.data) * held
    share = (2 * held + work.optimizer_bytes * held / work.parameter_bytes) / layout.data
    memory = share + (2 * work.unit_bytes / layout.tensor if layout.data > 1 else 0.0)
    memory += work.activation_bytes * min(count, layout.pipeline) / (layout.tensor * layout.pipeline)
    sent = sharded + passed + 2 * ring_share(layout.tensor) * reduced
    idle = bubble_share(layout.pipeline, count, stages // layout.pipeline)
    across = sharded * leaving(cluster, layout.data, strides["data"])
    across += passed * leaving(cluster, layout.pipeline, strides["pipeline"])
    return Cost(memory, sent, across, waited + along_data, idle, exposed)
