"""A health sample of a node: its values, their description, and table cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, TypeGuard

from worldsize.messages import format_bytes
from worldsize.record.json_lines import Row, is_number

if TYPE_CHECKING:
    from worldsize.observe.health.counters import Counters


_NUMBERS = (
    *("time", "cpu", "cpu_of_others", "memory", "memory_bytes", "swap", "swap_bytes", "disk", "disk_free"),
    *("received", "sent", "network_errors"),
)
_GPU_NUMBERS = ("index", "utilisation", "memory", "temperature", "ecc_errors")
_MOST = 4096  # maximum GPUs or ranks per node
_BUSY = 0.95  # CPU utilization above which a node counts as fully used
_OTHERS = 0.20  # minimum CPU utilization by processes outside the run that is reported
_SWAPPING = 1e6  # bytes per second


class GpuRow(TypedDict):
    """The reported values of a :class:`~worldsize.observe.health.counters.GpuReading`.

    Attributes:
        slowed_by: Causes of throttling, such as "temperature".
        ecc_errors: Uncorrectable memory errors since the previous sample.
    """

    index: int
    utilisation: NotRequired[float]
    memory: NotRequired[float]
    temperature: NotRequired[float]
    slowed_by: list[str]
    ecc_errors: NotRequired[int]


class HealthRow(TypedDict):
    """The state of a node between the previous sample and this one.

    Attributes:
        time: Unix time.
        host: Host name.
        cpu: CPU utilization, from 0 to 1.
        cpu_of_others: CPU utilization by processes outside the run.
        memory: Fraction of memory in use.
        memory_bytes: Bytes of memory in use.
        swap: Bytes per second moved between memory and swap space.
        swap_bytes: Bytes of swap space in use.
        disk: Fraction of the run folder's file system in use.
        disk_free: Free bytes of that file system.
        received: Bytes received per second.
        sent: Bytes sent per second.
        network_errors: Errors per minute on network interfaces.
        resident: Resident bytes of each rank's process, by rank as text.
        cpus: Number of CPUs that these processes may run on; missing in older runs.
        gpus: The GPUs.
    """

    time: float
    host: str
    cpu: float
    cpu_of_others: float
    memory: float
    memory_bytes: int
    swap: float
    swap_bytes: int
    disk: float
    disk_free: int
    received: float
    sent: float
    network_errors: float
    resident: dict[str, int]
    cpus: NotRequired[int]
    gpus: list[GpuRow]


def health_row(before: Counters, now: Counters, *, host: str, time: float) -> HealthRow:
    """Return the sample between two readings; ``time``: Unix time of the second one."""
    seconds = max(now.at - before.at, 1e-9)
    network = [max(0, after - earlier) / seconds for earlier, after in zip(before.network, now.network, strict=True)]
    busy = max(0.0, now.busy - before.busy)
    total = max(busy + now.idle - before.idle, 1e-9)
    own = sum(max(0.0, used - before.own.get(pid, 0.0)) for pid, used in now.own.items())
    errors = {gpu.index: gpu.ecc_errors for gpu in before.gpus}
    return {
        "time": round(time, 3),
        "host": host,
        "cpu": round(busy / total, 4),
        "cpu_of_others": round(max(0.0, busy - own) / total, 4),
        "memory": round(now.memory.share, 4),
        "memory_bytes": now.memory.used,
        "swap": round(max(0, now.swapped - before.swapped) / seconds, 1),
        "swap_bytes": now.swap_used,
        "disk": round(now.disk.share, 4),
        "disk_free": now.disk.total - now.disk.used,
        "received": round(network[0], 1),
        "sent": round(network[1], 1),
        "network_errors": round(60 * network[2], 3),
        "resident": {str(rank): size for rank, size in sorted(now.resident.items())},
        "cpus": len(now.cpus),
        "gpus": [_create_gpu_row(asdict(gpu), errors.get(gpu.index)) for gpu in now.gpus],
    }


def collect_values(
    gpus: Iterable[GpuRow], figure: Literal["utilisation", "memory", "temperature", "ecc_errors"]
) -> list[float]:
    """Return the values of one measurement for the GPUs that report it."""
    return [gpu[figure] for gpu in gpus if figure in gpu]


def _create_gpu_row(reading: dict[str, Any], errors_before: int | None) -> GpuRow:
    if reading["ecc_errors"] is not None:
        known = reading["ecc_errors"] if errors_before is None else errors_before
        reading["ecc_errors"] = max(0, reading["ecc_errors"] - known)
    said = {name: round(each, 4) if isinstance(each, float) else each for name, each in reading.items()}
    return {name: each for name, each in said.items() if each is not None}  # type: ignore[return-value]


def is_health(row: Row) -> TypeGuard[HealthRow]:
    """Return whether a row is a valid health sample, with finite numbers."""
    resident, gpus = row.get("resident"), row.get("gpus")
    return (
        isinstance(row.get("host"), str)
        and all(_is_finite(row.get(name)) for name in _NUMBERS)
        and _is_finite(row.get("cpus", 0))
        and isinstance(resident, dict)
        and len(resident) <= _MOST
        and all(rank.isdecimal() and _is_finite(size) for rank, size in resident.items())
        and isinstance(gpus, list)
        and len(gpus) <= _MOST
        and all(map(_is_gpu, gpus))
    )


def _is_gpu(row: Any) -> bool:
    if not isinstance(row, dict) or type(row.get("index")) is not int:
        return False
    slowed_by = row.get("slowed_by")
    is_named = isinstance(slowed_by, list) and all(isinstance(each, str) for each in slowed_by)
    return is_named and all(_is_finite(row.get(name, 0)) for name in _GPU_NUMBERS)


def _is_finite(value: Any) -> bool:
    return is_number(value) and not isinstance(value, str)


def why_slow(rows: Sequence[HealthRow]) -> str:
    """Describe why a node is slow, given samples of the same time span; empty if unknown.

    A cause counts only if most samples show it, because a straggler is slow over several samples.
    """
    reasons = [
        *(f"GPU {index} is throttled ({by})" for index, by in _find_slowed_gpus(rows)),
        _format_frequent([row["swap"] for row in rows if row["swap"] > _SWAPPING], rows, "swapping {:,.0f} MB/s", 1e-6),
        _format_frequent(
            [row["cpu_of_others"] for row in rows if row["cpu_of_others"] > _OTHERS and row["cpu"] > _BUSY],
            rows,
            "all CPUs are busy, {:.0f} % with processes outside this run",
            100,
        ),
        _format_frequent(
            [row["network_errors"] for row in rows if row["network_errors"] > 0],
            rows,
            "{:,.0f} network errors per minute",
        ),
    ]
    return "; ".join(filter(None, reasons))


def _format_frequent(values: Sequence[float], rows: Sequence[HealthRow], text: str, unit: float = 1.0) -> str:
    """Format the mean of ``values`` if most samples have a value; otherwise return ""."""
    return text.format(unit * sum(values) / len(values)) if 2 * len(values) > len(rows) else ""


def _find_slowed_gpus(rows: Sequence[HealthRow]) -> Iterable[tuple[int, str]]:
    """Yield each GPU that was slowed down in most samples, with the cause."""
    causes: dict[int, list[str]] = {}
    for row in rows:
        for gpu in row["gpus"]:
            if gpu["slowed_by"]:
                causes.setdefault(gpu["index"], []).append(", ".join(gpu["slowed_by"]))
    return ((index, texts[-1]) for index, texts in sorted(causes.items()) if 2 * len(texts) > len(rows))


# text and unit of each kind of alert; {value} and {limit} are in that unit
_ALERTS: Mapping[str, tuple[str, float]] = {
    "memory": ("{value:.0f} % of memory in use; the kernel kills processes when memory runs out", 100),
    "process_memory": ("rank {rank} uses {value:.2f} GB, more than cluster.max_memory ({limit:.2f} GB)", 1e-9),
    "swap": ("swapping {value:,.1f} MB/s", 1e-6),
    "disk": ("the file system of the run folder is {value:.0f} % full", 100),
    "temperature": ("GPU {gpu} is at {value:.0f} °C", 1),
    "throttled": ("GPU {gpu} is throttled ({detail})", 1),
    "ecc": ("GPU {gpu} has {value:.0f} new uncorrectable memory errors", 1),
    "cpus": ("processes require {limit:.0f} CPUs (cluster.threads, data_workers), {value:.0f} available", 1),
    "network": ("{value:,.0f} network interface errors per minute", 1),
}
ALERTS = tuple(_ALERTS)


def describe_alert(row: Mapping[str, Any]) -> str:
    """Describe an alert in one line, given its fields."""
    host, what, value = row.get("host"), row.get("what"), row.get("value")
    if not isinstance(what, str) or what not in _ALERTS or not isinstance(value, int | float):
        return f"unknown alert from {host}"
    text, unit = _ALERTS[what]
    limit = row.get("limit")
    facts = {name: row.get(name) for name in ("rank", "gpu", "detail")}
    known = unit * limit if isinstance(limit, int | float) else float("nan")
    more = f" ({row['detail']})" if row.get("detail") and "{detail}" not in text else ""
    return f"node {row.get('node')}, {host}: {text.format(value=unit * value, limit=known, **facts)}{more}."


_COLUMNS = ("node", "CPU", "other CPU", "memory", "largest rank", "swap", "disk free", "network", "errors/min")
_GPU_COLUMNS = ("GPU", "hottest", "throttled by", "memory errors")


def format_node_table(rows_by_node: Mapping[int, HealthRow]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return columns and rows of a table of nodes, with GPU columns if any node has GPUs."""
    has_gpus = any(row["gpus"] for row in rows_by_node.values())
    columns = (*_COLUMNS, *(_GPU_COLUMNS if has_gpus else ()))
    table = [
        (f"{node} {row['host']}", *_format_cells(row), *(_gpu_cells(row) if has_gpus else ()))
        for node, row in rows_by_node.items()
    ]
    return columns, table


def _format_cells(row: HealthRow) -> list[str]:
    """Return the cells of a node for ``_COLUMNS``, except the first."""
    largest = max(row["resident"].items(), key=lambda each: each[1], default=None)
    return [
        f"{row['cpu']:.0%}",
        f"{row['cpu_of_others']:.0%}",
        f"{row['memory']:.0%}",
        f"rank {largest[0]}: {format_bytes(largest[1])}" if largest else "",
        f"{format_bytes(row['swap'])}/s" if row["swap"] else "",
        format_bytes(row["disk_free"]),
        f"{format_bytes(row['received'] + row['sent'])}/s",
        f"{row['network_errors']:,.0f}" if row["network_errors"] else "",
    ]


def _gpu_cells(row: HealthRow) -> list[str]:
    """Return a node's cells for ``_GPU_COLUMNS``, over all its GPUs; empty without GPUs."""
    gpus = row["gpus"]
    work, heat = collect_values(gpus, "utilisation"), collect_values(gpus, "temperature")
    slowed = [f"GPU {gpu['index']}: {', '.join(gpu['slowed_by'])}" for gpu in gpus if gpu["slowed_by"]]
    errors = sum(gpu.get("ecc_errors", 0) for gpu in gpus)
    return [
        f"{fmean(work):.0%}" if work else "",
        f"{max(heat):.0f} °C" if heat else "",
        "; ".join(slowed),
        f"{errors:,}" if errors else "",
    ]
