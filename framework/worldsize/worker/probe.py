"""Measures bandwidth and latency of a cluster's devices and links, without training."""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.core import Cluster, World
from worldsize.devices import synchronize
from worldsize.observe.transport import Transport
from worldsize.plan.doctor.findings import ONE_HOST, count_unit_ranks, write_facts
from worldsize.world.environments import Placement
from worldsize.world.world import select_device

_FIRST, _COPIED = 1 << 20, 1 << 26  # bytes per trial message, and per copy
_GATHERED = 1 << 25  # maximum bytes per ring message, about one DDP bucket
_SECONDS = 0.15  # target duration of a measured message, in seconds
_REPEATS, _MESSAGES = 3, 50


@dataclass(frozen=True)
class Effort:
    """The maximum bytes and the number of the messages that measure one edge."""

    largest: int
    repeats: int
    of_times: Callable[[Sequence[float]], float] = min  # combines the times of all messages


_THOROUGH, _SHORT = Effort(1 << 26, _REPEATS), Effort(1 << 23, 1)
_SHARED = Effort(1 << 26, _REPEATS, statistics.fmean)  # the minimum would overestimate a link shared by several hosts
_GATHER_SECONDS, _GATHERS = 0.1, 20  # per ring: target seconds for large messages, repeats for small ones

Turn = tuple[int, int] | None  # edge (source, target) that a member measures in this round; None: wait


@dataclass(frozen=True)
class Edge:
    """A measured link between two ranks.

    ``seconds`` is the time for ``size`` bytes, and ``latency`` the median time of an 8-byte message. On tier "device",
    the edge is a copy of ``size`` / 2 bytes, which count both as read and as written.
    """

    tier: str
    source: int
    target: int
    size: int
    seconds: float
    latency: float


def introduce(placement: Placement, cluster: Cluster, findings: Path) -> None:
    """Write this process's device to the findings, before waiting for other processes."""
    device = select_device(placement, cluster)
    write_facts(
        findings,
        f"rank_{placement.rank:05d}",
        {**_describe_process(placement), "device": _identity(device), "joined": False},
    )


def measure_cluster(
    world: World, placement: Placement, cluster: Cluster, transport: Transport, findings: Path, *, pairs: bool
) -> int:
    """Measure all links, together with the other processes; return the exit code.

    Rank 0 writes the result.
    """
    who = {**_describe_process(placement), "device": _identity(world.device), "transport": transport, "joined": True}
    write_facts(findings, f"rank_{world.rank:05d}", who)
    own = [_measure_copy(world)]
    for tier, turns in schedule(count_unit_ranks(cluster), world.rank, pairs=pairs):
        own += _measure_edges(world, tier, turns, _SHARED if tier in _list_uplink_tiers(cluster.tiers) else _THOROUGH)
    rings = _measure_rings(world)
    gathered: list[Any] | None = [None] * world.size if world.rank == 0 else None  # only rank 0 needs all pairs
    if world.size > 1:
        dist.gather_object([asdict(edge) for edge in own], gathered)
    else:
        gathered = [[asdict(edge) for edge in own]]
    if gathered is not None:
        write_facts(findings, "links", {"edges": list(chain.from_iterable(gathered)), "rings": rings})
    return 0


def network_edges(world: World, per_node: int, distance: int) -> list[dict[str, Any]]:
    """Measure the link from each node to the node ``distance`` after it.

    Returns the same edges on all ranks. This takes one or two seconds, or longer if a link has less than 20 Mbit/s.
    """
    node, place = divmod(world.rank, per_node)
    edges = plan_ring(world.size // per_node, node, distance)
    turns = [edge and (edge[0] * per_node + place, edge[1] * per_node + place) for edge in edges]
    own = [asdict(edge) for edge in _measure_edges(world, "network", turns, _SHORT)]
    gathered: list[Any] = [own] * world.size
    if world.size > 1:
        dist.all_gather_object(gathered, own)
    return list(chain.from_iterable(gathered))


def _describe_process(placement: Placement) -> dict[str, Any]:
    return {"rank": placement.rank, "node": placement.node_rank, "host": socket.gethostname()}


def _identity(device: torch.device) -> str | None:
    """Return a device's UUID, to detect devices that are used twice; None if unknown."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _measure_edges(world: World, tier: str, turns: Iterable[Turn], effort: Effort) -> list[Edge]:
    """Measure this rank's edges; all ranks must have the same number of turns."""
    edges_measured = []
    for turn in turns:
        if world.size > 1:
            dist.barrier()
        if turn is not None and world.rank == turn[0]:
            edges_measured.append(_measure_send(world, tier, turn[1], effort))
        elif turn is not None:
            _echo_messages(world, turn[0], effort.repeats)
    return edges_measured


def schedule(sizes: Mapping[str, int], rank: int, *, pairs: bool) -> list[tuple[str, list[Turn]]]:
    """Plan the turns of ``rank`` on each tier.

    There is a ring over the ranks of each node, one over the nodes of each rack, and one over the racks. All units of a
    tier measure concurrently. Above the node tier, all ranks of a node or rack send together, each to the rank with the
    same local index. An uplink shared by several nodes is measured a second time, by the ranks of only one node.

    Args:
        sizes: Number of ranks per unit of each tier, innermost first; a unit of the last tier has all ranks.
        rank: The rank whose turns to return.
        pairs: Whether to measure all pairs of nodes in a rack, and all pairs of racks, instead of rings.
    """
    (node, per_node), *_ = sizes.items()
    below, tiers = 1, list[tuple[str, list[Turn]]]()
    for tier, unit in sizes.items():
        plan = tournament if pairs and tier != node else plan_ring
        edges = plan(unit // below, rank % unit // below)
        first = rank // unit * unit + rank % below
        turns = [edge and (first + edge[0] * below, first + edge[1] * below) for edge in edges]
        tiers.append((tier, turns))
        if below > per_node:
            tiers.append((ONE_HOST + tier, turns if rank % below < per_node else [None] * len(turns)))
        below = unit
    return tiers


def _list_uplink_tiers(tiers: Mapping[str, int]) -> list[str]:
    """Return the tiers whose links several nodes share: all but the innermost between nodes."""
    return [*tiers, "network"][1:]


def plan_ring(members: int, own: int, distance: int = 1) -> list[Turn]:
    """Return the turns of ``own`` in a ring where members send to the one ``distance`` after."""
    common = math.gcd(members, distance)
    length = members // common  # the ring splits into ``common`` rings of this length
    if length < 2:
        return []
    steps = pow(distance // common, -1, length)
    turns: list[Turn] = [None] * (2 + length % 2)
    for source in ((own - distance) % members, own):
        place = source // common * steps % length
        last = length % 2 and place == length - 1
        turns[2 if last else place % 2] = source, (source + distance) % members
    return turns


def tournament(members: int, own: int) -> list[Turn]:
    """Return the turns of member ``own`` in a round-robin tournament.

    Each pair sends in both directions. Rounds follow the circle method, with disjoint pairs. With an odd number of
    members, one pauses in each round.
    """
    even = members + members % 2
    turns: list[Turn] = []
    for number in range(even - 1 if members > 1 else 0):
        other = number * (even // 2) % (even - 1) if own == even - 1 else (number - own) % (even - 1)
        other = even - 1 if other == own else other
        pair = min(own, other), max(own, other)
        turns += [None, None] if pair[1] == members else [pair, pair[::-1]]
    return turns


def _measure_copy(world: World) -> Edge:
    source, target = (torch.zeros(_COPIED // 4, device=world.device) for _ in range(2))
    few = target[:1]
    seconds = min(_measure_time(world, lambda: target.copy_(source)) for _ in range(_REPEATS + 1))
    latency = statistics.median(_measure_time(world, lambda: few.add_(1)) for _ in range(_MESSAGES))
    return Edge("device", world.rank, world.rank, 2 * _COPIED, seconds, latency)


def _measure_send(world: World, tier: str, target: int, effort: Effort) -> Edge:
    few, answer = (torch.zeros(1, dtype=torch.int64, device=world.device) for _ in range(2))

    def send_payload(payload: Tensor) -> None:
        dist.send(payload, target)
        dist.recv(answer, target)

    send_payload(few)  # establishes the connection
    latency = statistics.median(_measure_time(world, lambda: send_payload(few)) for _ in range(_MESSAGES)) / 2
    first = _measure_time(world, lambda: send_payload(torch.zeros(_FIRST, dtype=torch.uint8, device=world.device)))
    size = int(min(max(_SECONDS * _FIRST / first, _FIRST), effort.largest))
    send_payload(few.fill_(size))
    payload = torch.zeros(size, dtype=torch.uint8, device=world.device)
    seconds = (
        effort.of_times([_measure_time(world, lambda: send_payload(payload)) for _ in range(effort.repeats)]) - latency
    )
    return Edge(tier, world.rank, target, size, seconds, latency)


def _echo_messages(world: World, source: int, repeats: int) -> None:
    """Answer the messages of :func:`_measure_send`."""
    few = torch.zeros(1, dtype=torch.int64, device=world.device)

    def echo_payload(payload: Tensor, times: int) -> None:
        for _ in range(times):
            dist.recv(payload, source)
            dist.send(few, source)

    echo_payload(few, 1 + _MESSAGES)
    echo_payload(torch.zeros(_FIRST, dtype=torch.uint8, device=world.device), 1)
    echo_payload(few, 1)
    echo_payload(torch.zeros(int(few), dtype=torch.uint8, device=world.device), repeats)


def _measure_rings(world: World) -> dict[str, dict[str, float]]:
    """Measure the bandwidth of a link on each tier while all rings of the tier are busy.

    There is a ring inside each node (tier "node"), and one over all ranks, with one edge out of each node ("network").
    With intermediate tiers, the rings of each tier replace the latter; they share the links of the nodes or racks that
    they connect. The results are the fields of Link other than the latency.
    """
    everyone, inside = world.groups.get("all"), world.groups.get("node")
    if everyone is None:
        return {}
    between = {name.partition("/")[2]: group for name, group in world.groups.items() if name.startswith("tier/")}
    rings = {"node": everyone} if inside is None else {"node": inside, **(between or {"network": everyone})}
    rates, ranks = dict[str, dict[str, float]](), 1
    for tier, ring in rings.items():
        if ring.size() == 1:
            continue
        rates[tier] = _measure_ring(world, ring, everyone)
        if tier in between:
            rates[tier]["bandwidth"] *= ranks
        if tier != "node":
            parts = ranks * (ring.size() - (1 if tier in between else ranks))
            rates[tier]["incast"] = _measure_incast(world, ring, parts, rates[tier]["bandwidth"])
        ranks *= ring.size()
    return rates


def _measure_ring(world: World, ring: ProcessGroup, everyone: ProcessGroup) -> dict[str, float]:
    """Measure the rounds of an all-gather: time of small messages, bandwidth of large ones.

    Both are means, since a step also waits for slow rounds. Of the concurrent rings, the slowest one counts.
    """
    rounds = ring.size() - 1

    def time_all_gather(size: int, times: int) -> float:
        part, full = _allocate_bytes(world, size), _allocate_bytes(world, size * ring.size())
        return _measure_mean_time(world, partial(dist.all_gather_into_tensor, full, part, group=ring), times) / rounds

    gap = time_all_gather(8, _GATHERS)
    first = torch.tensor(time_all_gather(_FIRST // ring.size(), _REPEATS), device=world.device)
    dist.all_reduce(first, group=ring)
    dist.all_reduce(first, dist.ReduceOp.MAX, group=everyone)  # all must send the same number of bytes
    size = int(min(_GATHER_SECONDS * _FIRST / (rounds * float(first)), _GATHERED / ring.size()))
    slowest = torch.tensor([-gap, size / time_all_gather(size, _REPEATS)], dtype=torch.float64, device=world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MIN, group=everyone)
    return {"gap": -float(slowest[0]), "bandwidth": float(slowest[1])}


def _measure_incast(world: World, group: ProcessGroup, parts: int, bandwidth: float) -> float:
    """Measure the fraction of ``bandwidth`` that remains in an all-to-all.

    At full bandwidth, the all-to-all takes :data:`_GATHER_SECONDS`. ``parts``: number of messages that leave a node or
    rack, including those of concurrent groups.
    """
    part = int(min(_GATHER_SECONDS * bandwidth / parts, _GATHERED / group.size()))
    theirs, mine = (_allocate_bytes(world, part * group.size()) for _ in range(2))
    seconds = _measure_mean_time(world, partial(dist.all_to_all_single, theirs, mine, group=group), _REPEATS)
    return min(1.0, parts * part / bandwidth / seconds)


def _allocate_bytes(world: World, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=world.device)


def _measure_mean_time(world: World, action: Callable[[], Any], times: int) -> float:
    action()  # establishes the connection
    return statistics.fmean(_measure_time(world, action) for _ in range(times))


def _measure_time(world: World, action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    synchronize(world.device)
    return time.perf_counter() - begun
