"""The nodes of a run, with their ranks and health."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any, TypedDict, final

import numpy as np

from worldsize.observe.events import NODE_ALERT
from worldsize.observe.health.files import parse_alert, sample_files
from worldsize.observe.health.rows import GpuRow, HealthRow, collect_values, format_node_table, is_health
from worldsize.observe.report.read import Record
from worldsize.observe.report.svg import Axis as ChartAxis
from worldsize.observe.report.svg import Chart, Plot, series_colour
from worldsize.record.json_lines import JsonRows
from worldsize.record.run_directory import RunDirectory

_GROUPS = 64  # maximum number of groups to show per axis


@final
@dataclass(frozen=True)
class RankRow:
    """One rank of the last attempt, with its number of straggler events."""

    rank: int
    role: str
    role_rank: int
    device: str
    straggled: int  # number of times


@final
@dataclass(frozen=True)
class NodeRow:
    """One node, with its hardware as text and its ranks."""

    name: str
    machine: str
    ranks: tuple[RankRow, ...]


def list_nodes(record: Record) -> list[NodeRow]:
    """List the nodes with their ranks in the last attempt."""
    cluster, hosts = record.manifest["cluster"], _find_hosts(record)
    machines = {each.get("host"): _format_machine(each) for each in record.manifest["hardware"]}
    straggled = Counter(each["rank"] for each in record.stragglers)
    ranks: defaultdict[int, list[RankRow]] = defaultdict(list)
    for each in cluster.get("ranks") or _compute_places(cluster):
        ranks[each["node"]].append(_create_rank_row(each, straggled))
    listed = []
    for index in range(cluster["nodes"]):
        host = hosts[index] if hosts else ""
        listed.append(NodeRow(f"node {index}" + f" · {host}" * bool(host), machines.get(host, ""), tuple(ranks[index])))
    return listed


class RankPlace(TypedDict):
    """Placement of a rank: its role, its rank in that role, its node and its device."""

    rank: int
    role: str
    role_rank: int
    node: int
    device: str


def _compute_places(cluster: Mapping[str, Any]) -> Iterator[RankPlace]:
    """Compute the placements of all ranks from the number of processes per role."""
    roles = chain.from_iterable(enumerate([each["role"]] * each["processes"]) for each in cluster["roles"])
    for rank, (role_rank, role) in enumerate(roles):
        node, local_rank = divmod(rank, cluster["processes_per_node"])
        device = cluster["device"] if cluster["device"] == "cpu" else f"{cluster['device']}:{local_rank}"
        yield {"rank": rank, "role": role, "role_rank": role_rank, "node": node, "device": device}


def _create_rank_row(place: RankPlace, straggled: Mapping[int, int]) -> RankRow:
    """Describe the rank at ``place``; ``straggled``: number of straggler events per worker."""
    role, number = place["role"], place["role_rank"]
    times = straggled[number] if role == "worker" else 0
    return RankRow(place["rank"], role, number, place["device"], times)


def _find_hosts(record: Record) -> Sequence[str]:
    """Return the hosts of the nodes; empty if unknown.

    An attempt lists the launching host first, even if it does not train, and spare nodes last.
    """
    named = record.attempts[-1]["hosts"] if record.attempts else []
    cluster = record.manifest["cluster"]
    count, spare = cluster["nodes"], cluster.get("spare_nodes", 0)  # missing in older runs
    return named[-count - spare :][:count] if len(named) >= count else []


def _format_machine(hardware: Mapping[str, Any]) -> str:
    memory = f"{hardware['memory'] / 2**30:.0f} GiB" if hardware.get("memory") else ""
    gpus = [str(gpu.get("name", gpu)) if isinstance(gpu, dict) else str(gpu) for gpu in hardware.get("gpus") or ()]
    return ", ".join(filter(None, (hardware.get("cpu"), f"{hardware.get('cores')} cores", memory, *gpus)))


@final
@dataclass(frozen=True)
class Axis:
    """Groups of ranks along one axis, as text; ``left_out``: number of groups not shown."""

    name: str
    groups: tuple[str, ...]
    left_out: int


def list_axes(record: Record) -> list[Axis]:
    """List the groups along each axis in the manifest."""
    groups_by_axis: Mapping[str, Sequence[Sequence[int]]] = record.manifest["cluster"].get("groups", {})
    return [
        Axis(name, tuple(_format_ranks(group) for group in groups[:_GROUPS]), max(0, len(groups) - _GROUPS))
        for name, groups in groups_by_axis.items()
    ]


def _format_ranks(group: Sequence[int]) -> str:
    """Format ranks as text, with consecutive ones as "0–7"."""
    is_run = len(group) > 2 and list(group) == list(range(group[0], group[-1] + 1))
    return f"{group[0]}–{group[-1]}" if is_run else " ".join(map(str, group))


def list_links(record: Record) -> list[tuple[str, str]]:
    """List the declared links of the cluster: tier, and bandwidth and latency as text."""
    declared = record.manifest["cluster"]["links"]
    return [
        (tier, f"{each['bandwidth'] / 1e9:g} GB/s, {each['latency'] * 1e6:g} µs") for tier, each in declared.items()
    ]


_NODES = 32  # maximum number of nodes to show
_LINES = 300  # maximum number of samples to read per node


@final
@dataclass(frozen=True)
class NodesHealthTable:
    """A row of text per node, under ``columns``; ``left_out``: number of nodes not shown."""

    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]]
    charts: Sequence[Chart]
    left_out: int


def nodes_health(record: Record) -> NodesHealthTable | None:
    """Summarize the nodes' samples, preferring nodes with alerts; None if there are no samples."""
    files = sample_files(RunDirectory(record.folder))
    alerted = {each["node"] for each in record.events if each["event"] == NODE_ALERT}
    chosen = sorted(sorted(files, key=lambda node: node not in alerted)[:_NODES])
    read = {node: list(JsonRows(files[node], is_valid=is_health, at_most=_LINES)) for node in chosen}
    rows_by_node: dict[int, Sequence[HealthRow]] = {node: rows for node, rows in read.items() if rows}  # type: ignore[misc]
    if not rows_by_node:
        return None
    errors = _memory_errors(record)
    columns, texts = format_node_table(
        {node: _summarize_node(rows, errors.get(node, {})) for node, rows in rows_by_node.items()}
    )
    return NodesHealthTable(columns, texts, _draw_charts(rows_by_node), len(files) - len(rows_by_node))


def _memory_errors(record: Record) -> dict[int, dict[int, int]]:
    """Count memory errors by node and GPU. Uses alerts, since not all samples are read."""
    counts: dict[int, dict[int, int]] = {}
    for each in record.events:
        alert = parse_alert(dict(each)) if each["event"] == NODE_ALERT else None
        if alert and alert.what == "ecc" and alert.gpu is not None and isinstance(alert.value, int):
            of_node = counts.setdefault(alert.node, {})
            of_node[alert.gpu] = of_node.get(alert.gpu, 0) + alert.value
    return counts


def _worst_gpu(samples: Sequence[GpuRow], errors: int) -> GpuRow:
    """Summarize a GPU: mean utilization, maxima, slowdown causes, and summed errors."""
    worst: GpuRow = {
        "index": samples[0]["index"],
        "slowed_by": sorted({by for each in samples for by in each["slowed_by"]}),
    }
    if work := collect_values(samples, "utilisation"):
        worst["utilisation"] = fmean(work)
    if memory := collect_values(samples, "memory"):
        worst["memory"] = max(memory)
    if heat := collect_values(samples, "temperature"):
        worst["temperature"] = max(heat)
    counted = [each["ecc_errors"] for each in samples if "ecc_errors" in each]
    if counted or errors:
        worst["ecc_errors"] = max(sum(counted), errors)
    return worst


def _summarize_node(rows: Sequence[HealthRow], errors: Mapping[int, int]) -> HealthRow:
    """Summarize samples of one node: mean CPU load and traffic, worst of the other values.

    ``errors``: number of memory errors in alerts, by GPU.
    """
    gpus: dict[int, list[GpuRow]] = {}
    for gpu in (gpu for row in rows for gpu in row["gpus"]):
        gpus.setdefault(gpu["index"], []).append(gpu)
    sizes: dict[str, int] = {}
    for row in rows:
        for rank, size in row["resident"].items():
            sizes[rank] = max(size, sizes.get(rank, 0))
    return {
        **rows[-1],
        "cpu": fmean(row["cpu"] for row in rows),
        "cpu_of_others": fmean(row["cpu_of_others"] for row in rows),
        "memory": max(row["memory"] for row in rows),
        "swap": max(row["swap"] for row in rows),
        "disk_free": min(row["disk_free"] for row in rows),
        "received": fmean(row["received"] for row in rows),
        "sent": fmean(row["sent"] for row in rows),
        "network_errors": max(row["network_errors"] for row in rows),
        "resident": sizes,
        "gpus": [_worst_gpu(gpus[index], errors.get(index, 0)) for index in sorted(gpus)],
    }


def _draw_charts(rows_by_node: Mapping[int, Sequence[HealthRow]]) -> list[Chart]:
    """Draw CPU, memory and GPU utilization over time, with one line per node."""
    start = min(rows[0]["time"] for rows in rows_by_node.values())
    pictures = []
    for title, values in (
        ("CPU", {node: [row["cpu"] for row in rows] for node, rows in rows_by_node.items()}),
        ("Memory", {node: [row["memory"] for row in rows] for node, rows in rows_by_node.items()}),
        ("GPUs", {node: [_gpu_work(row) for row in rows] for node, rows in rows_by_node.items()}),
    ):
        times = {node: [(row["time"] - start) / 60 for row in rows] for node, rows in rows_by_node.items()}
        if np.isfinite([each for column in values.values() for each in column]).sum() > len(values):
            pictures.append(_draw_over_time(f"{title} by node", times, values))
    return pictures


def _gpu_work(row: HealthRow) -> float:
    work = collect_values(row["gpus"], "utilisation")
    return fmean(work) if work else float("nan")


def _draw_over_time(title: str, times: Mapping[int, Sequence[float]], values: Mapping[int, Sequence[float]]) -> Chart:
    plot = Plot(ChartAxis("minutes"), ChartAxis("%", low=0, high=105))
    for index, (node, column) in enumerate(values.items()):
        plot.add_line(times[node], 100 * np.array(column), series_colour(index), width=1)
        plot.add_values(f"node {node}", times[node], 100 * np.array(column))
    return Chart(title, plot.draw(title), "One line per node.")
