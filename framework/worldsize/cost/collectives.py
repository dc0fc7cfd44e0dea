"""What communication costs: pure functions of bytes, ranks and links, in seconds.

The α–β model (Hockney 1994, doi:10.1016/S0167-8191(06)80021-9): a message of b bytes over a link takes
``latency + b / bandwidth``. Collectives as in Thakur, Rabenseifner and Gropp 2005 (doi:10.1177/1094342005051521).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from worldsize.core import Link


def message_seconds(payload_bytes: float, link: Link) -> float:
    """Seconds of one message: the link's latency, and its bytes at the link's bandwidth."""
    return link.latency + payload_bytes / link.bandwidth


def divided(link: Link, count: int) -> Link:
    """Bandwidth that each of ``count`` concurrent users of ``link`` gets, as a link; latency stays."""
    return replace(link, bandwidth=link.bandwidth / max(1, count))


def round_seconds(payload_bytes: float, link: Link) -> float:
    """Each rank sends so many bytes to one and hears as many from one."""
    return max(message_seconds(payload_bytes, link), link.gap)


def all_gather_seconds(payload_bytes: float, ranks: int, link: Link) -> float:
    """Ring; ``payload_bytes`` is what every rank has in the end. n − 1 rounds of 1/n of it."""
    return (ranks - 1) * round_seconds(payload_bytes / ranks, link)


def reduce_scatter_seconds(payload_bytes: float, ranks: int, link: Link) -> float:
    """Ring; ``payload_bytes`` is what every rank has at first. The mirror of an all-gather."""
    return all_gather_seconds(payload_bytes, ranks, link)


def ring_all_reduce_seconds(payload_bytes: float, ranks: int, link: Link) -> float:
    """A reduce-scatter and an all-gather: 2 (n − 1) messages of 1/n (Patarasu and Yuan 2009,
    doi:10.1016/j.jpdc.2008.09.002).
    """
    return reduce_scatter_seconds(payload_bytes, ranks, link) + all_gather_seconds(payload_bytes, ranks, link)


def tree_all_reduce_seconds(payload_bytes: float, ranks: int, link: Link) -> float:
    """Two pipelined binary trees, each of half the payload, up and down: 2 log2 n latencies, and each rank sends the
    payload twice (Sanders, Speck and Träff 2009, doi:10.1016/j.parco.2009.09.001).
    """
    if ranks == 1:
        return 0.0
    return 2 * math.ceil(math.log2(ranks)) * link.latency + 2 * payload_bytes / link.bandwidth


def all_to_all_seconds(payload_bytes: float, nodes: int, ranks_per_node: int, inside: Link, across: Link) -> float:
    """Every rank has a message of 1/n of ``payload_bytes`` for every other, all on their way at once, as gloo sends
    them (github.com/pytorch/gloo, gloo/alltoall.cc): one latency. A node's ranks share its link ``across``.
    """
    ranks = nodes * ranks_per_node
    near = _crowded_seconds((ranks_per_node - 1) * payload_bytes / ranks, inside)
    if nodes == 1:
        return near
    return max(near, _crowded_seconds(ranks_per_node * (ranks - ranks_per_node) * payload_bytes / ranks, across))


def _crowded_seconds(payload_bytes: float, link: Link) -> float:
    return round_seconds(payload_bytes / link.incast, link)


def hierarchical_all_reduce_seconds(
    payload_bytes: float, nodes: int, ranks_per_node: int, inside: Link, across: Link, *, shared: bool = False
) -> float:
    """Reduce-scatter inside the node, a ring across nodes for each of its ranks at once, all-gather inside.

    ``across`` is the link of a rank, or with ``shared`` of a node, whose ranks then divide its bandwidth.
    """
    mine = payload_bytes / ranks_per_node
    link = divided(across, ranks_per_node) if shared else across
    inner = reduce_scatter_seconds(payload_bytes, ranks_per_node, inside)
    return (
        inner + ring_all_reduce_seconds(mine, nodes, link) + all_gather_seconds(payload_bytes, ranks_per_node, inside)
    )


def bubble_share(stages: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Share of a pipelined step in which a rank is idle: (p − 1) / (v m + p − 1), for 1F1B as for GPipe (Narayanan et
    al. 2021, arXiv 2104.04473, section 2.2; v stages a rank when interleaved).
    """
    return (stages - 1) / (stages_per_rank * micro_batches + stages - 1)


def exposed_seconds(communication_seconds: float, hidden_behind_seconds: float) -> float:
    """Seconds of communication that a step waits for, if the rest hides behind so much compute."""
    return max(0.0, communication_seconds - hidden_behind_seconds)


def bucketed_exposed_seconds(
    payload_bytes: float, bucket_bytes: float, backward_seconds: float, seconds: Callable[[float], float]
) -> float:
    """Seconds of communication that a step waits for after a backward pass whose gradients are reduced in buckets.

    Gradients come evenly. Each bucket's collective, of so many ``seconds`` for its bytes, begins once the bucket is
    full and the one before is through (Li et al. 2020, arXiv 2006.15704, section 3.2). The last bucket is full when
    the pass ends: it is never hidden.
    """
    done = filled = 0.0
    while filled < payload_bytes:
        size = min(bucket_bytes, payload_bytes - filled)
        filled += size
        done = max(done, backward_seconds * filled / payload_bytes) + seconds(size)
    return max(0.0, done - backward_seconds)


def efficiency(compute_seconds: float, exposed: float) -> float:
    """Share of a step that computes."""
    return compute_seconds / (compute_seconds + exposed)


def compute_seconds_for(wanted_efficiency: float, exposed: float) -> float:
    """Compute of a step at which ``exposed`` seconds of communication leave ``wanted_efficiency``."""
    return exposed * wanted_efficiency / (1 - wanted_efficiency)


def ring_payload_bytes(seconds: float, ranks: int, link: Link) -> float:
    """The payload whose ring all-reduce takes ``seconds``; 0 if latency alone takes longer."""
    rounds = 2 * (ranks - 1)
    return max(0.0, (seconds - rounds * link.latency) * link.bandwidth * ranks / rounds)
