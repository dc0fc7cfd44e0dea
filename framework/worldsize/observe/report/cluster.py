"""The machines of a run, and the ranks on each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypedDict, final

from worldsize.observe.report.read import Record

_GROUPS = 64  # number of groups shown for an axis


@final
@dataclass(frozen=True)
class Rank:
    """One rank of the last attempt, and how often it straggled."""

    rank: int
    role: str
    role_rank: int
    device: str
    straggled: int  # times


@final
@dataclass(frozen=True)
class Node:
    """One node: its hardware as text, and its ranks."""

    name: str
    machine: str
    ranks: tuple[Rank, ...]


def nodes(record: Record) -> list[Node]:
    """List the nodes with their ranks as the last attempt had them."""
    cluster, hosts = record.manifest["cluster"], _hosts(record)
    machines = {each.get("host"): _machine(each) for each in record.manifest["hardware"]}
    straggled = Counter(each["rank"] for each in record.stragglers)
    ranks: defaultdict[int, list[Rank]] = defaultdict(list)
    for each in cluster.get("ranks") or _places(cluster):
        ranks[each["node"]].append(_rank(each, straggled))
    listed = []
    for index in range(cluster["nodes"]):
        host = hosts[index] if hosts else ""
        listed.append(Node(f"node {index}" + f" · {host}" * bool(host), machines.get(host, ""), tuple(ranks[index])))
    return listed


class Place(TypedDict):
    """The place of a rank: its role, its number in that role, its node and its device."""

    rank: int
    role: str
    role_rank: int
    node: int
    device: str


def _places(cluster: Mapping[str, Any]) -> Iterator[Place]:
    """Iterate over the places of all ranks, computed from the roles' numbers of processes."""
    roles = chain.from_iterable(enumerate([each["role"]] * each["processes"]) for each in cluster["roles"])
    for rank, (role_rank, role) in enumerate(roles):
        node, local_rank = divmod(rank, cluster["processes_per_node"])
        device = cluster["device"] if cluster["device"] == "cpu" else f"{cluster['device']}:{local_rank}"
        yield {"rank": rank, "role": role, "role_rank": role_rank, "node": node, "device": device}


def _rank(place: Place, straggled: Mapping[int, int]) -> Rank:
    """Describe the rank at ``place``; ``straggled``: how often each worker did."""
    role, number = place["role"], place["role_rank"]
    times = straggled[number] if role == "worker" else 0
    return Rank(place["rank"], role, number, place["device"], times)


def _hosts(record: Record) -> Sequence[str]:
    """Return the hosts of the nodes; empty if unknown.

    An attempt names the launching host first, even if that does not train.
    """
    named = record.attempts[-1]["hosts"] if record.attempts else []
    count = record.manifest["cluster"]["nodes"]
    return named[-count:] if len(named) >= count else []


def _machine(hardware: Mapping[str, Any]) -> str:
    memory = f"{hardware['memory'] / 2**30:.0f} GiB" if hardware.get("memory") else ""
    gpus = [str(gpu.get("name", gpu)) if isinstance(gpu, dict) else str(gpu) for gpu in hardware.get("gpus") or ()]
    return ", ".join(filter(None, (hardware.get("cpu"), f"{hardware.get('cores')} cores", memory, *gpus)))


@final
@dataclass(frozen=True)
class Axis:
    """Groups of ranks that work together, as texts; ``left_out``: how many are not shown."""

    name: str
    groups: tuple[str, ...]
    left_out: int


def axes(record: Record) -> list[Axis]:
    """List the groups along each axis that the manifest has."""
    groups_by_axis: Mapping[str, Sequence[Sequence[int]]] = record.manifest["cluster"].get("groups", {})
    return [
        Axis(name, tuple(_ranks(group) for group in groups[:_GROUPS]), max(0, len(groups) - _GROUPS))
        for name, groups in groups_by_axis.items()
    ]


def _ranks(group: Sequence[int]) -> str:
    """Format ranks as text, with neighbours as "0–7"."""
    is_run = len(group) > 2 and list(group) == list(range(group[0], group[-1] + 1))
    return f"{group[0]}–{group[-1]}" if is_run else " ".join(map(str, group))


def links(record: Record) -> list[tuple[str, str]]:
    """List the links that the cluster declares: the tier, and its bandwidth and latency as text."""
    declared = record.manifest["cluster"]["links"]
    return [
        (tier, f"{each['bandwidth'] / 1e9:g} GB/s, {each['latency'] * 1e6:g} µs") for tier, each in declared.items()
    ]
