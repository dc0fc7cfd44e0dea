"""Measures the bandwidth and latency of a cluster's devices and links, in processes that do not train."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.core import Cluster, World
from worldsize.devices import synchronize
from worldsize.observe.transport import Transport
from worldsize.planning.doctor.findings import write_facts
from worldsize.world.environments import Placement
from worldsize.world.world import device_of

_FIRST, _COPIED = 1 << 20, 1 << 26  # bytes of a message, and of a copy
_GATHERED = 1 << 25  # largest bytes of a ring's message: about a bucket of DDP
_SECONDS = 0.15  # seconds that a measured message should take
_REPEATS, _MESSAGES = 3, 50


@dataclass(frozen=True)
class Effort:
    """The effort of measuring one edge: largest bytes of a message, and number of messages."""

    largest: int
    repeats: int


_THOROUGH, _SHORT = Effort(1 << 26, _REPEATS), Effort(1 << 23, 1)
_GATHER_SECONDS, _GATHERS = 0.1, 20  # of a ring

Phases = list[list[tuple[int, int]]]  # edges (from rank, to rank): a rank is in one edge of a phase


@dataclass(frozen=True)
class Edge:
    """A measured link from rank to rank: the best time of ``size`` bytes, and the median time of a message of eight.

    On tier "device" it is a copy of ``size`` / 2 bytes, which are read and written.
    """

    tier: str
    source: int
    target: int
    size: int
    seconds: float
    latency: float


def introduce(placement: Placement, cluster: Cluster, findings: Path) -> None:
    """Write this process's device to the findings, before it waits for any other process."""
    device = device_of(placement, cluster)
    write_facts(
        findings, f"rank_{placement.rank:05d}", {**_who(placement), "device": _identity(device), "joined": False}
    )


def probe(world: World, placement: Placement, transport: Transport, findings: Path, *, pairs: bool) -> int:
    """Measure together with all other processes; the first writes the result. Return the exit code."""
    who = {**_who(placement), "device": _identity(world.device), "transport": transport, "joined": True}
    write_facts(findings, f"rank_{world.rank:05d}", who)
    per_node = placement.local_world_size
    own = [_copies(world), *_measure(world, schedule(world.size // per_node, per_node, pairs=pairs), _THOROUGH)]
    rings = _rings(world)
    edges = _of_all(world, own)
    if world.rank == 0:
        write_facts(findings, "links", {"edges": edges, "rings": rings})
    return 0


def network_edges(world: World, per_node: int, distance: int) -> list[dict[str, Any]]:
    """Measure links from each node to the one ``distance`` nodes after it; return the same edges on all ranks.

    This takes a second or two, longer if a link has less than 20 Mbit/s.
    """
    return _of_all(world, _measure(world, [("network", across(world.size // per_node, per_node, [distance]))], _SHORT))


def _of_all(world: World, edges: Sequence[Edge]) -> list[dict[str, Any]]:
    gathered: list[Any] = [own := [asdict(edge) for edge in edges]]
    if world.size > 1:
        gathered = [None] * world.size
        dist.all_gather_object(gathered, own)
    return [edge for each in gathered for edge in each]


def _who(placement: Placement) -> dict[str, Any]:
    return {"rank": placement.rank, "node": placement.node_rank, "host": socket.gethostname()}


def _identity(device: torch.device) -> str | None:
    """Return an identity of a device that does not depend on its number, to detect devices used twice."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _measure(world: World, tiers: Sequence[tuple[str, Phases]], effort: Effort) -> list[Edge]:
    edges_measured = []
    for tier, phases in tiers:
        for edges in phases:
            if world.size > 1:
                dist.barrier()
            for source, target in edges:
                if world.rank == source:
                    edges_measured.append(_sent(world, tier, target, effort))
                elif world.rank == target:
                    _echo(world, source, effort.repeats)
    return edges_measured


def schedule(nodes: int, per_node: int, *, pairs: bool) -> list[tuple[str, Phases]]:
    """Plan each tier: a ring of ranks inside the nodes, and a ring of nodes, or all ``pairs`` of nodes."""
    inner = [(rank, (rank + 1) % per_node) for rank in range(per_node)] if per_node > 1 else []
    inside = [
        [(node * per_node + source, node * per_node + target) for node in range(nodes) for source, target in phase]
        for phase in _phases(inner)
    ]
    return [("node", inside), ("network", across(nodes, per_node, range(1, nodes if pairs else min(2, nodes))))]


def across(nodes: int, per_node: int, distances: Iterable[int]) -> Phases:
    """Plan edges from each node to those ``distances`` after it.

    The ranks of a node send together, each to the rank with the same local rank.
    """
    outer = [(node, (node + distance) % nodes) for distance in distances for node in range(nodes)]
    return [
        [
            (source * per_node + place, target * per_node + place)
            for source, target in phase
            for place in range(per_node)
        ]
        for phase in _phases(outer)
    ]


def _phases(edges: Sequence[tuple[int, int]]) -> Phases:
    """Divide ``edges`` into phases: no two edges of a phase share a rank."""
    phases: list[tuple[set[int], list[tuple[int, int]]]] = []
    for edge in edges:
        free = next((phase for phase in phases if phase[0].isdisjoint(edge)), None)
        if free is None:
            phases.append(free := (set(), []))
        free[0].update(edge)
        free[1].append(edge)
    return [phase for _, phase in phases]


def _copies(world: World) -> Edge:
    source, target = (torch.zeros(_COPIED // 4, device=world.device) for _ in range(2))
    few = target[:1]
    seconds = min(_timed(world, lambda: target.copy_(source)) for _ in range(_REPEATS + 1))
    latency = statistics.median(_timed(world, lambda: few.add_(1)) for _ in range(_MESSAGES))
    return Edge("device", world.rank, world.rank, 2 * _COPIED, seconds, latency)


def _sent(world: World, tier: str, target: int, effort: Effort) -> Edge:
    few, answer = (torch.zeros(1, dtype=torch.int64, device=world.device) for _ in range(2))

    def send(payload: Tensor) -> None:
        dist.send(payload, target)
        dist.recv(answer, target)

    send(few)  # connects
    latency = statistics.median(_timed(world, lambda: send(few)) for _ in range(_MESSAGES)) / 2
    first = _timed(world, lambda: send(torch.zeros(_FIRST, dtype=torch.uint8, device=world.device)))
    size = int(min(max(_SECONDS * _FIRST / first, _FIRST), effort.largest))
    send(few.fill_(size))
    payload = torch.zeros(size, dtype=torch.uint8, device=world.device)
    seconds = min(_timed(world, lambda: send(payload)) for _ in range(effort.repeats)) - latency
    return Edge(tier, world.rank, target, size, seconds, latency)


def _echo(world: World, source: int, repeats: int) -> None:
    """Answer the messages of :func:`_sent`."""
    few = torch.zeros(1, dtype=torch.int64, device=world.device)

    def hear(payload: Tensor, times: int) -> None:
        for _ in range(times):
            dist.recv(payload, source)
            dist.send(few, source)

    hear(few, 1 + _MESSAGES)
    hear(torch.zeros(_FIRST, dtype=torch.uint8, device=world.device), 1)
    hear(few, 1)
    hear(torch.zeros(int(few), dtype=torch.uint8, device=world.device), repeats)


def _rings(world: World) -> dict[str, dict[str, float]]:
    """Measure, by tier, the bandwidth of a ring while all rings of the tier are busy.

    The tiers are the rings inside the nodes, and one ring over all ranks, of which one edge leaves each node. The
    figures are named like the fields of a Link; the latency is not among them.
    """
    everyone, inside = world.groups.get("all"), world.groups.get("node")
    rings = {"node": everyone} if inside is None else {"node": inside, "network": everyone}
    rates = {tier: _ring(world, ring) for tier, ring in rings.items() if ring is not None and ring.size() > 1}
    if everyone is not None and inside is not None:
        rates["network"]["incast"] = _incast(world, everyone, inside.size(), rates["network"]["bandwidth"])
    return rates


def _ring(world: World, ring: ProcessGroup) -> dict[str, float]:
    """Measure the rounds of an all-gather: the time of a few bytes, and the bandwidth of many.

    Both are means, since a step waits for slow rounds too.
    """
    rounds = ring.size() - 1

    def seconds(size: int, times: int) -> float:
        part, full = _bytes(world, size), _bytes(world, size * ring.size())
        return _mean(world, partial(dist.all_gather_into_tensor, full, part, group=ring), times) / rounds

    gap = seconds(8, _GATHERS)
    first = torch.tensor(seconds(_FIRST // ring.size(), _REPEATS), device=world.device)
    dist.all_reduce(first, group=ring)  # all must send the same number
    size = int(min(_GATHER_SECONDS * _FIRST / (rounds * float(first)), _GATHERED / ring.size()))
    return {"gap": gap, "bandwidth": size / seconds(size, _REPEATS)}


def _incast(world: World, group: ProcessGroup, per_node: int, bandwidth: float) -> float:
    """Measure the share of ``bandwidth`` left in an all-to-all; at full bandwidth it takes :data:`_GATHER_SECONDS`."""
    few = torch.tensor(bandwidth, device=world.device)
    dist.broadcast(few, 0, group=group)
    part = int(min(_GATHER_SECONDS * float(few) / (per_node * (group.size() - per_node)), _GATHERED / group.size()))
    theirs, mine = (_bytes(world, part * group.size()) for _ in range(2))
    seconds = _mean(world, partial(dist.all_to_all_single, theirs, mine, group=group), _REPEATS)
    return min(1.0, per_node * (group.size() - per_node) * part / bandwidth / seconds)


def _bytes(world: World, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=world.device)


def _mean(world: World, action: Callable[[], Any], times: int) -> float:
    action()  # connects
    return statistics.fmean(_timed(world, action) for _ in range(times))


def _timed(world: World, action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    synchronize(world.device)
    return time.perf_counter() - begun
