"""Formulas for the costs of collectives, in seconds; the cost models of strategies use them.

Costs of communication are functions of bytes, ranks and links. In the α–β model (Hockney 1994,
doi:10.1016/S0167-8191(06)80021-9) a message of b bytes over a link takes ``latency + b / bandwidth``. Collectives
follow Thakur, Rabenseifner and Gropp 2005 (doi:10.1177/1094342005051521).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from worldsize.core import Link


def message_seconds(payload_bytes: float, link: Link) -> float:
    """Return the seconds of one message: the link's latency plus its bytes over the link's bandwidth."""
    return link.latency + payload_bytes / link.bandwidth


def divided(link: Link, count: int) -> Link:
    """Return a link with the bandwidth that each of ``count`` concurrent users of ``link`` gets; latency stays."""
    return replace(link, bandwidth=link.bandwidth / max(1, count))


def round_seconds(payload_bytes: float, link: Link) -> float:
    """Return the seconds of a round in which each rank sends ``payload_bytes`` to one peer and receives as many."""
    return max(message_seconds(payload_bytes, link), link.gap)


def all_gather_seconds(payload_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a ring all-gather: n − 1 rounds of 1/n of the payload.

    ``payload_bytes`` is the size of the gathered result on every rank.
    """
    return (ranks - 1) * round_seconds(payload_bytes / ranks, link)


def reduce_scatter_seconds(payload_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a ring reduce-scatter, which mirrors an all-gather.

    ``payload_bytes`` is the size of the input on every rank.
    """
    return all_gather_seconds(payload_bytes, ranks, link)


def ring_all_reduce_seconds(payload_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a ring all-reduce: a reduce-scatter and an all-gather, 2 (n − 1) messages of 1/n.

    It is bandwidth-optimal (Patarasu and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).
    """
    return reduce_scatter_seconds(payload_bytes, ranks, link) + all_gather_seconds(payload_bytes, ranks, link)


def tree_all_reduce_seconds(payload_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a double-binary-tree all-reduce, as NCCL uses it.

    Each of two pipelined trees reduces and broadcasts half the payload: 2 log2 n latencies, and each rank sends the
    payload twice (Sanders, Speck and Träff 2009, doi:10.1016/j.parco.2009.09.001).
    """
    if ranks == 1:
        return 0.0
    return 2 * math.ceil(math.log2(ranks)) * link.latency + 2 * payload_bytes / link.bandwidth


def all_to_all_seconds(payload_bytes: float, nodes: int, ranks_per_node: int, inside: Link, across: Link) -> float:
    """Return the seconds of an all-to-all in which every rank sends 1/n of ``payload_bytes`` to every other rank.

    All messages are sent at once, so that there is one latency, as in gloo (github.com/pytorch/gloo,
    gloo/alltoall.cc). ``inside`` joins the ranks of a node; they share its link ``across`` to other nodes.
    """
    ranks = nodes * ranks_per_node
    near = crowded_seconds((ranks_per_node - 1) * payload_bytes / ranks, inside)
    if nodes == 1:
        return near
    return max(near, crowded_seconds(ranks_per_node * (ranks - ranks_per_node) * payload_bytes / ranks, across))


def crowded_seconds(payload_bytes: float, link: Link) -> float:
    """Return the seconds of ``payload_bytes`` over a link while all ranks send to all, see :attr:`Link.incast`."""
    return round_seconds(payload_bytes / link.incast, link)


def hierarchical_all_reduce_seconds(
    payload_bytes: float, nodes: int, ranks_per_node: int, inside: Link, across: Link, *, shared: bool = False
) -> float:
    """Return the seconds of a hierarchical all-reduce of ``payload_bytes``.

    It is a reduce-scatter inside each node, concurrent rings across nodes (one for each local rank), and an all-gather
    inside. ``across`` is the link of one rank, or with ``shared`` that of a node, whose ranks share its bandwidth.
    """
    mine = payload_bytes / ranks_per_node
    link = divided(across, ranks_per_node) if shared else across
    inner = reduce_scatter_seconds(payload_bytes, ranks_per_node, inside)
    return (
        inner + ring_all_reduce_seconds(mine, nodes, link) + all_gather_seconds(payload_bytes, ranks_per_node, inside)
    )


@final
@dataclass(frozen=True)
class Level:
    """One tier of a tree: ``members`` of ``ranks`` each, which one link per member joins.

    Attributes:
        name: The tier.
        members: Nodes of a rack, racks of the network, or on the lowest tier ranks of a node.
        ranks: Ranks of one member, which share its link.
    """

    name: str
    members: int
    ranks: int


def tiered_all_reduce_seconds(payload_bytes: float, levels: Sequence[tuple[Level, Link]]) -> float:
    """Return the seconds of a hierarchical all-reduce of ``payload_bytes`` over any number of tiers.

    A reduce-scatter on each tier but the last leaves a rank 1/ranks of the payload for the next; on the last it is
    all-reduced, and all-gathers lead back. On each tier that is together a ring all-reduce of what a rank has there.
    """
    return sum(
        ring_all_reduce_seconds(payload_bytes / level.ranks, level.members, divided(link, level.ranks))
        for level, link in levels
    )


def bubble_share(stages: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Return the fraction of a pipelined step in which a rank is idle: (p − 1) / (v m + p − 1).

    It holds for 1F1B and GPipe, with p stages, m micro-batches, and v stages per rank if interleaved (Narayanan et al.
    2021, arXiv 2104.04473, section 2.2).
    """
    return (stages - 1) / (stages_per_rank * micro_batches + stages - 1)


def exposed_seconds(communication_seconds: float, hidden_behind_seconds: float) -> float:
    """Return the seconds of communication that are not hidden behind ``hidden_behind_seconds`` of compute."""
    return max(0.0, communication_seconds - hidden_behind_seconds)


def bucketed_exposed_seconds(
    payload_bytes: float, bucket_bytes: float, backward_seconds: float, seconds: Callable[[float], float]
) -> float:
    """Return the seconds that a step waits after a backward pass whose gradients are reduced in buckets.

    Gradients become ready at a constant rate. Each bucket's collective begins once the bucket is full and the previous
    collective is done (Li et al. 2020, arXiv 2006.15704, section 3.2). The last bucket is full when the backward pass
    ends, so it is never hidden.

    Args:
        payload_bytes: Bytes of all gradients.
        bucket_bytes: Bytes of a full bucket.
        backward_seconds: Seconds of the backward pass.
        seconds: Maps the bytes of a bucket to the seconds of its collective.
    """
    done = filled = 0.0
    while filled < payload_bytes:
        size = min(bucket_bytes, payload_bytes - filled)
        filled += size
        done = max(done, backward_seconds * filled / payload_bytes) + seconds(size)
    return max(0.0, done - backward_seconds)


def efficiency(compute_seconds: float, exposed: float) -> float:
    """Return the fraction of a step, 0 to 1, that is compute rather than ``exposed`` seconds of communication."""
    return compute_seconds / (compute_seconds + exposed)


def compute_seconds_for(wanted_efficiency: float, exposed: float) -> float:
    """Return the compute seconds of a step at which ``exposed`` seconds of communication allow ``wanted_efficiency``.

    It is the inverse of :func:`efficiency`; ``wanted_efficiency`` is below 1.
    """
    return exposed * wanted_efficiency / (1 - wanted_efficiency)


def ring_payload_bytes(seconds: float, ranks: int, link: Link) -> float:
    """Return the payload, in bytes, whose ring all-reduce takes ``seconds``; 0 if the latency alone takes longer."""
    rounds = 2 * (ranks - 1)
    return max(0.0, (seconds - rounds * link.latency) * link.bandwidth * ranks / rounds)
