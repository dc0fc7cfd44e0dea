"""Formulas for the costs of collectives, in seconds, for the cost models of strategies.

Communication costs are functions of bytes, ranks and links. In the α–β model (Hockney 1994,
doi:10.1016/S0167-8191(06)80021-9), a message of b bytes over a link takes ``latency + b / bandwidth``. The formulas for
collectives follow Thakur, Rabenseifner and Gropp 2005 (doi:10.1177/1094342005051521).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from worldsize.core import Link


def message_seconds(payload_bytes: float, link: Link) -> float:
    """Return the seconds that one message takes: the link's latency plus bytes over bandwidth."""
    return link.latency + payload_bytes / link.bandwidth


def divide_bandwidth(link: Link, count: int) -> Link:
    """Return ``link`` with its bandwidth divided by ``count``, and the same latency."""
    return replace(link, bandwidth=link.bandwidth / max(1, count))


def round_seconds(payload_bytes: float, link: Link) -> float:
    """Return the seconds of a round: each rank sends and receives ``payload_bytes`` once."""
    return max(message_seconds(payload_bytes, link), link.gap)


def all_gather_seconds(payload_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds that a ring all-gather takes: n − 1 rounds of 1/n of the payload.

    ``payload_bytes`` is the size of the gathered result on every rank.
    """
    return (ranks - 1) * round_seconds(payload_bytes / ranks, link)


def reduce_scatter_seconds(payload_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds that a ring reduce-scatter takes, the mirror image of an all-gather.

    ``payload_bytes`` is the size of the input on every rank.
    """
    return all_gather_seconds(payload_bytes, ranks, link)


def ring_all_reduce_seconds(payload_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds that a ring all-reduce takes: 2 (n − 1) rounds of 1/n of the payload.

    This algorithm is bandwidth-optimal (Patarasu and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).
    """
    return reduce_scatter_seconds(payload_bytes, ranks, link) + all_gather_seconds(payload_bytes, ranks, link)


def tree_all_reduce_seconds(payload_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds that a double-binary-tree all-reduce takes, as used by NCCL.

    Each of two pipelined trees reduces and broadcasts half the payload: 2 log2 n latencies, and each rank sends the
    payload twice (Sanders, Speck and Träff 2009, doi:10.1016/j.parco.2009.09.001).
    """
    if ranks == 1:
        return 0.0
    return 2 * math.ceil(math.log2(ranks)) * link.latency + 2 * payload_bytes / link.bandwidth


def all_to_all_seconds(payload_bytes: float, nodes: int, ranks_per_node: int, inside: Link, across: Link) -> float:
    """Return the seconds of an all-to-all of ``payload_bytes`` per rank.

    Each rank sends 1/n of its payload to each of n ranks. All messages are sent concurrently, so the latency counts
    once, as in gloo (github.com/pytorch/gloo, gloo/alltoall.cc). ``inside`` connects the ranks of a node, which share
    the link ``across`` to other nodes.
    """
    ranks = nodes * ranks_per_node
    near = estimate_incast_seconds((ranks_per_node - 1) * payload_bytes / ranks, inside)
    if nodes == 1:
        return near
    return max(near, estimate_incast_seconds(ranks_per_node * (ranks - ranks_per_node) * payload_bytes / ranks, across))


def estimate_incast_seconds(payload_bytes: float, link: Link) -> float:
    """Return the seconds of an all-to-all's bytes over one link, see :attr:`Link.incast`."""
    return round_seconds(payload_bytes / link.incast, link)


def hierarchical_all_reduce_seconds(
    payload_bytes: float, nodes: int, ranks_per_node: int, inside: Link, across: Link, *, shared: bool = False
) -> float:
    """Return the seconds that a hierarchical all-reduce of ``payload_bytes`` takes.

    It consists of a reduce-scatter inside each node, concurrent ring all-reduces across nodes (one per local rank), and
    an all-gather inside each node. ``across`` is the link of one rank, or with ``shared``, of all ranks of a node.
    """
    mine = payload_bytes / ranks_per_node
    link = divide_bandwidth(across, ranks_per_node) if shared else across
    inner = reduce_scatter_seconds(payload_bytes, ranks_per_node, inside)
    return (
        inner + ring_all_reduce_seconds(mine, nodes, link) + all_gather_seconds(payload_bytes, ranks_per_node, inside)
    )


@final
@dataclass(frozen=True)
class Level:
    """One tier of a tree network, with one link per member.

    Attributes:
        name: Name of the tier.
        members: Number of nodes in a rack, of racks in the network, or on the lowest tier, of ranks in a node.
        ranks: Number of ranks in one member; they share its link.
    """

    name: str
    members: int
    ranks: int


def estimate_tiered_seconds(payload_bytes: float, levels: Sequence[tuple[Level, Link]]) -> float:
    """Return the seconds that a hierarchical all-reduce takes over any number of tiers.

    A reduce-scatter on each tier except the last leaves each rank with 1/ranks of the payload for the next tier. The
    last tier all-reduces these shards, and all-gathers follow in reverse order. Each tier thus costs a ring all-reduce.
    """
    return sum(
        ring_all_reduce_seconds(payload_bytes / level.ranks, level.members, divide_bandwidth(link, level.ranks))
        for level, link in levels
    )


def bubble_share(ranks: int, micro_batches: int, stages_per_rank: int = 1, *, splits_backward: bool = False) -> float:
    """Return the idle fraction of a rank in a pipelined step: (p − 1) / (v m + p − 1).

    This holds for 1F1B and GPipe with p ranks, m ≥ p micro-batches, and v stages per rank if interleaved (Narayanan et
    al. 2021, arXiv 2104.04473, section 2.2). With ``splits_backward``, weight gradients fill the wait for input
    gradients. If both take as long as a forward pass, a third of the wait is left (Qi et al. 2024, arXiv 2401.10241,
    table 1); for ZBV, m must be 2p − 1 or more.
    """
    idle = (ranks - 1) / 3 if splits_backward else ranks - 1
    return idle / (stages_per_rank * micro_batches + idle)


def estimate_exposed_seconds(communication_seconds: float, hidden_behind_seconds: float) -> float:
    """Return the seconds of communication that ``hidden_behind_seconds`` of compute cannot hide."""
    return max(0.0, communication_seconds - hidden_behind_seconds)


def estimate_bucketed_exposure(
    payload_bytes: float, bucket_bytes: float, backward_seconds: float, seconds: Callable[[float], float]
) -> float:
    """Return the seconds of gradient reduction, in buckets, that backward does not hide.

    Gradients become ready at a constant rate. A bucket's collective starts once the bucket is full and the previous
    collective is done (Li et al. 2020, arXiv 2006.15704, section 3.2). The last bucket fills up at the end of the
    backward pass, so its collective is never hidden.

    Args:
        payload_bytes: Bytes of all gradients.
        bucket_bytes: Bytes of a full bucket.
        backward_seconds: Seconds of the backward pass.
        seconds: Maps the size of a bucket, in bytes, to the seconds that its collective takes.
    """
    done = filled = 0.0
    while filled < payload_bytes:
        size = min(bucket_bytes, payload_bytes - filled)
        filled += size
        done = max(done, backward_seconds * filled / payload_bytes) + seconds(size)
    return max(0.0, done - backward_seconds)


def efficiency(compute_seconds: float, exposed: float) -> float:
    """Return compute time as a fraction of a step with ``exposed`` seconds of communication."""
    return compute_seconds / (compute_seconds + exposed)


def compute_seconds_for(wanted_efficiency: float, exposed: float) -> float:
    """Return the compute seconds at which :func:`efficiency` is ``wanted_efficiency``, below 1.

    ``exposed``: seconds of communication that are not hidden.
    """
    return exposed * wanted_efficiency / (1 - wanted_efficiency)


def ring_payload_bytes(seconds: float, ranks: int, link: Link) -> float:
    """Return the bytes that a ring all-reduce sums in ``seconds``; 0 if latency takes longer."""
    rounds = 2 * (ranks - 1)
    return max(0.0, (seconds - rounds * link.latency) * link.bandwidth * ranks / rounds)
