"""Reads this node's counters: CPUs, memory, swap, disk, network, GPUs, processes of the run."""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import psutil

from worldsize.world.processes import RANK_NAME

_logger = logging.getLogger(__name__)

_INFINIBAND = Path("/sys/class/infiniband")
# virtual interfaces, and interfaces whose traffic is also counted by a different interface or adapter
_NOT_REAL = re.compile(
    r"lo\d*$|veth|docker|br-|br\d|virbr|cali|cilium|lxc|flannel|cni|tun|tap|bond|team|vlan|vxlan|macvlan|dummy"
    r"|ib\w|\w+\.\d+$"  # ib: IPoIB, also counted by the InfiniBand adapter; eth0.100: VLAN, also counted by eth0
)
_IB_ERRORS = ("symbol_error", "link_downed", "port_rcv_errors", "local_link_integrity_errors")
_WORD = 4  # unit of port_xmit_data and port_rcv_data in bytes (kernel documentation, ABI sysfs-class-infiniband)


class Network(NamedTuple):
    """Bytes received and sent, and errors, since the node was booted."""

    received: int
    sent: int
    errors: int


@final
@dataclass(frozen=True)
class Counters:
    """All counters of a node at one time.

    Attributes:
        at: Seconds of a monotonic clock.
        busy: Busy seconds since boot, summed over CPUs.
        idle: Idle seconds since boot, summed over CPUs.
        own: CPU seconds used by processes of the run, by process id.
        memory: Memory of the node or the container.
        swap_used: Bytes of swap space in use.
        swapped: Bytes moved between memory and swap space since boot.
        disk: Used and total bytes of the run folder's file system.
        network: Totals of the network interfaces.
        resident: Resident bytes of each rank's process, by global rank.
        cpus: Logical CPUs that any of these processes may run on.
        gpus: The GPUs.
    """

    at: float
    busy: float
    idle: float
    own: Mapping[int, float]
    memory: Memory
    swap_used: int
    swapped: int
    disk: Memory
    network: Network
    resident: Mapping[int, int]
    cpus: Set[int]
    gpus: Sequence[GpuReading]


def read_counters(root: int, folder: Path, gpus: Gpus, *, infiniband: Path = _INFINIBAND) -> Counters:
    """Read the counters of this node; takes a few milliseconds.

    Args:
        root: Id of the common ancestor of the run's processes on this node.
        folder: The run folder.
        gpus: The GPUs of this node.
        infiniband: sysfs folder of InfiniBand adapters; network interfaces do not count their traffic.
    """
    times, machine = psutil.cpu_times(), psutil.virtual_memory()
    with warnings.catch_warnings():  # a container may hide the swapped bytes, which are then 0
        warnings.simplefilter("ignore")
        swap = psutil.swap_memory()
    # user and nice already include guest times
    idle = times.idle + getattr(times, "iowait", 0.0)
    everything = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    disk = shutil.disk_usage(folder)
    networks = [*_interfaces(), *_adapters(infiniband)]
    own, resident, cpus = _processes(root)
    return Counters(
        at=time.monotonic(),
        busy=everything - idle,
        idle=idle,
        own=own,
        memory=find_memory_limit(Memory(machine.total - machine.available, machine.total)),
        swap_used=swap.used,
        swapped=swap.sin + swap.sout,
        disk=Memory(disk.total - disk.free, disk.total),
        network=Network(*map(sum, zip(Network(0, 0, 0), *networks, strict=True))),
        resident=resident,
        cpus=cpus,
        gpus=gpus.read(),
    )


def _interfaces() -> Iterator[Network]:
    """Yield the counters of each network interface that connects to other nodes."""
    with suppress(OSError):
        for name, each in psutil.net_io_counters(pernic=True).items():
            if not _NOT_REAL.match(name):
                yield Network(each.bytes_recv, each.bytes_sent, each.errin + each.errout)


def _adapters(infiniband: Path) -> Iterator[Network]:
    """Yield the counters of each port of all InfiniBand adapters."""
    for port in sorted(infiniband.glob("*/ports/*/counters")):
        count = {name: _read_number(port / name) for name in ("port_rcv_data", "port_xmit_data", *_IB_ERRORS)}
        errors = sum(count[name] for name in _IB_ERRORS)
        yield Network(_WORD * count["port_rcv_data"], _WORD * count["port_xmit_data"], errors)


def _read_number(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def _processes(root: int) -> tuple[dict[int, float], dict[int, int], set[int]]:
    """Return CPU seconds by process id, resident bytes by rank, and the ranks' CPUs.

    Forked descendants inherit the process name of their rank; only the rank's own process counts for bytes and CPUs.
    """
    seconds, resident, ranks, cpus = dict[int, float](), dict[int, int](), dict[int, int](), set[int]()
    for process in _list_processes(root):
        with suppress(psutil.Error), process.oneshot():  # the process may have exited meanwhile
            used = process.cpu_times()
            seconds[process.pid] = used.user + used.system
            if named := RANK_NAME.fullmatch(process.name()):
                ranks[process.pid] = rank = int(named[1])
                if ranks.get(process.ppid()) != rank:
                    resident[rank] = process.memory_info().rss
                    cpus.update(process.cpu_affinity() if psutil.LINUX else ())
    return seconds, resident, cpus


def _list_processes(root: int) -> list[Any]:
    """Return process ``root`` and its descendants, parents first, excluding this process."""
    with suppress(psutil.Error):
        first = psutil.Process(root)
        return [each for each in (first, *first.children(recursive=True)) if each.pid != os.getpid()]
    return []


# bits of nvmlDeviceGetCurrentClocksEventReasons that slow down a GPU under load; the power cap (0x04) is excluded,
# since most GPUs reach it under load
_SLOWDOWNS = {0x08: "hardware", 0x20: "temperature", 0x40: "temperature", 0x80: "power supply"}


@final
@dataclass(frozen=True)
class GpuReading:
    """Current measurements of one GPU; None for unsupported ones.

    Attributes:
        index: Index of the GPU on this node, as in nvidia-smi.
        utilisation: Fraction of time spent computing.
        memory: Fraction of the GPU's memory in use.
        temperature: Degrees Celsius.
        slowed_by: Sorted causes of throttling, such as "temperature".
        ecc_errors: Uncorrectable memory errors since the driver was loaded.
    """

    index: int
    utilisation: float | None
    memory: float | None
    temperature: float | None
    slowed_by: tuple[str, ...]
    ecc_errors: int | None


@final
class Gpus:
    """The GPUs of this node; none without a driver, or if NVML cannot be loaded.

    Create it in a separate process: NVML has threads and descriptors that the run's processes must not inherit.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:  # no driver, or a container without GPUs
            _logger.debug("NVML: %s", error)
        else:
            self._nvml = nvml

    def read(self) -> list[GpuReading]:
        """Read all GPUs; takes about a millisecond per GPU."""
        return list(self._readings()) if self._nvml else []

    def _readings(self) -> Iterator[GpuReading]:
        nvml = self._nvml
        for index in range(self._query_nvml(nvml.nvmlDeviceGetCount) or 0):
            handle = self._query_nvml(nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is None:  # the GPU has fallen off the bus
                continue
            rates = self._query_nvml(nvml.nvmlDeviceGetUtilizationRates, handle)
            memory = self._query_nvml(nvml.nvmlDeviceGetMemoryInfo, handle)
            yield GpuReading(
                index,
                utilisation=None if rates is None else rates.gpu / 100,
                memory=None if memory is None or not memory.total else memory.used / memory.total,
                temperature=self._query_nvml(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
                slowed_by=_list_slowdowns(
                    self._query_nvml(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
                ),
                ecc_errors=self._query_nvml(
                    nvml.nvmlDeviceGetTotalEccErrors,
                    handle,
                    nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                    nvml.NVML_VOLATILE_ECC,
                ),
            )

    def _query_nvml(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Return NVML's answer, or None if this GPU or driver does not support the query."""
        with suppress(self._nvml.NVMLError):
            return question(*arguments)
        return None


def _list_slowdowns(reasons: int) -> tuple[str, ...]:
    return tuple(sorted({name for bit, name in _SLOWDOWNS.items() if reasons & bit}))


_CGROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@final
@dataclass(frozen=True)
class Memory:
    """Used and total bytes of memory or a disk; reclaimable file caches do not count as used."""

    used: int
    total: int

    @property
    def share(self) -> float:
        """Fraction in use; 0 if the total is 0."""
        return self.used / self.total if self.total else 0.0


def find_memory_limit(node: Memory, *, cgroups: Path = _CGROUPS, own: Path = _OWN) -> Memory:
    """Return the memory of the control group, or else the node, that limits this process most.

    Supports both versions of control groups (kernel documentation, admin-guide/cgroup-v2 and cgroup-v1/memory).
    """
    limited = [each for each in _read_groups(cgroups, own) if 0 < each.total < node.total]
    return min(limited, key=lambda each: each.total, default=node)


def _read_groups(cgroups: Path, own: Path) -> Iterator[Memory]:
    """Yield usage and limit of the limited control groups that contain this process."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root = cgroups / controllers
            inner = root / path.lstrip("/")
            # in a container the path may be the host's, while the container's own group is mounted at the root
            folders = [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
            names = _V2 if not controllers else _V1
            yield from (memory for folder in folders if (memory := _read_memory(folder, *names)))


_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _read_memory(folder: Path, limit: str, usage: str, cache: str) -> Memory | None:
    with suppress(OSError, ValueError):  # ValueError: "max" means unlimited
        total, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return Memory(max(0, used - int(facts.get(cache, 0))), total)
    return None
